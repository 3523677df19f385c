"""Decoding in separate processes, for loads where Python's lock would bind (many small samples).

A COS batch is cut into a piece for each idle process. A process that dies is replaced, and its piece decoded
again, once. Results, and errors of samples, are those of :func:`hapi.data.transforms.pipeline.input_batch` in
this process.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from hapi.clocks import StageClock
from hapi.data.manifest import SampleLayout
from hapi.data.transforms.decode_limits import NO_LIMITS, DecodeLimits
from hapi.data.transforms.pipeline import input_batch, input_shape
from hapi.errors import DrainingError, HapiError, ShortageError, UsageError
from hapi.server.decoding.process import DecoderProcess, DecodeTask, Died
from hapi.server.decoding.worker import task_document
from hapi.waiting import check, paused, wait, when_given_up
from hapi.wire.references import TransformSpec
from hapi.wire.samples import Samples

log = logging.getLogger("hapi.server")

TASK_BYTES = 32 << 20
"""Float32 bytes of a task, if that is at least one sample: what each process keeps as shared memory."""


class Decoders:
    """The processes. Thread-safe; none of them: :meth:`batch` decodes in the calling thread."""

    def __init__(self, processes: int = 0, threads: int = 1, limits: DecodeLimits = NO_LIMITS) -> None:
        """Start the processes; :meth:`wait` for them all, and :meth:`close` them.

        Args:
            processes: number of processes; 0: decode in this one.
            threads: that decode in each process.
            limits: bounds of every image.
        """
        if processes and sys.platform != "linux":
            raise UsageError("processes for decoding need Linux; leave --decode-processes at 0")
        self._threads = threads
        self._limits = limits
        self._changed = threading.Condition()
        self._waiting = 0
        self._closed = False
        self._cpu = 0.0
        self.replaced = 0
        """Processes that died."""
        self._all: list[DecoderProcess] = []
        self._idle: list[DecoderProcess] = []
        try:
            for _ in range(processes):
                decoder = DecoderProcess()
                self._all.append(decoder)
                self._idle.append(decoder)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> int:
        """Number of processes; 0: samples are decoded in this one."""
        return len(self._all)

    @property
    def at_once(self) -> int:
        """Samples of one batch that are decoded at a time."""
        return self._threads * max(1, len(self._all))

    @property
    def pids(self) -> list[int]:
        """Return the ids of the present processes."""
        return [decoder.pid for decoder in self._all]

    @property
    def cpu_seconds(self) -> float:
        """Seconds of the processor that the processes have used for what they decoded."""
        with self._changed:
            return self._cpu

    def wait(self) -> None:
        """Return when all are ready; :class:`HapiError` when one does not start."""
        for decoder in self._all:
            try:
                decoder.greet()
            except Died as died:
                self.close()
                raise HapiError(f"a process for decoding did not start: {died}") from None
        if self._all:
            log.info("decoding processes ready", extra={"pids": self.pids})

    def close(self) -> None:
        """End all of them at once; threads that wait for one get :class:`DrainingError`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            used = [d for d in self._all if d not in self._idle]
        for decoder in self._all:
            if decoder in used:
                decoder.kill()  # whoever uses it sees that, and ends it
            else:
                decoder.end()

    def batch(
        self,
        samples: Samples,
        layout: SampleLayout,
        transform: TransformSpec | None,
        clock: StageClock,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode and transform samples as :func:`input_batch` does, with the same errors.

        Args:
            samples: stored samples.
            layout: form of each.
            transform: None for tensors that need none.
            clock: gets the processes' CPU seconds as stage ``decode``; wall seconds are the caller's to
                count.
            out: buffer for the result; None for new memory.

        Returns:
            float32 [n, C, H, W].

        Raises:
            DataError: two processes died of a sample, one after the other, or it cannot be decoded.
        """
        if out is None:
            out = torch.empty((len(samples), *input_shape(layout, transform)), dtype=torch.float32)
        if not self._all:
            with paused():  # processors compute: long as that may take, it does not hang
                return input_batch(samples, layout, transform, self._threads, out.numpy(), self._limits)
        if not len(samples):
            return out
        taken = self._take(len(samples))
        tasks = [
            DecodeTask(
                task_document(part_samples, layout, transform, self._threads, self._limits),
                part_samples.data,
                part,
            )
            for part_samples, part in _cut(samples, out.numpy(), len(taken))
        ]
        while tasks:
            with when_given_up(partial(_kill, list(taken))):
                tasks = self._run(taken, tasks, clock)
            if tasks:
                check()
                taken = self._take(len(tasks))
        return out

    def _run(
        self, taken: list[DecoderProcess], tasks: list[DecodeTask], clock: StageClock
    ) -> list[DecodeTask]:
        """Carry them out on ``taken``, which are given back; those that are left since a process died."""
        todo, left = iter(tasks), []
        error: HapiError | None = None
        try:
            running = deque(zip(taken, todo, strict=False))
            for decoder, task in running:
                decoder.begin(task)
            while running:
                decoder, task = running.popleft()
                try:
                    self._count(decoder.finish(), clock)
                except Died as cause:
                    task.deaths.append(str(cause))
                    left.append(task)
                except HapiError as problem:
                    error = error or problem  # the others finish: their processes are good
                following = next(todo, None) if decoder.alive and not error else None
                if following is None:
                    taken.remove(decoder)
                    self._give_back([decoder])
                else:
                    running.append((decoder, following))
                    decoder.begin(following)
        finally:
            self._give_back(taken)
        for task in left:
            error = error or task.given_up()
        if error:
            raise error
        return [*left, *todo]

    def _count(self, cpu_seconds: float, clock: StageClock) -> None:
        clock.add("decode", 0.0, cpu_seconds)
        with self._changed:
            self._cpu += cpu_seconds

    def _take(self, limit: int) -> list[DecoderProcess]:
        """An idle process; up to ``limit`` if nothing else waits."""
        with self._changed:
            self._waiting += 1
            try:
                while not (usable := self._usable()):
                    wait(self._changed)
            finally:
                self._waiting -= 1
            taken = usable[: max(1, min(limit, len(usable) - self._waiting))]
            self._idle = [d for d in self._idle if d not in taken]
            return taken

    def _usable(self) -> list[DecoderProcess]:
        """The idle ones that are ready; when there is none and none to wait for, those that still start."""
        if self._closed:
            raise DrainingError("the server is shutting down; ask another one")
        for index, decoder in enumerate(self._idle):
            if not decoder.alive:
                self._replace(index, decoder)
        alive = [d for d in self._idle if d.alive]
        if ready := [d for d in alive if d.ready]:
            return ready
        if len(self._idle) < len(self._all):
            return []
        if not alive:
            raise ShortageError(
                "no process for decoding can be started for now; come back in 1 s", retry_after=1.0
            )
        return alive

    def _replace(self, index: int, dead: DecoderProcess) -> None:
        """Start another process in the place of a dead one; where the system has none, the others do its work."""
        try:
            new = DecoderProcess()
        except (HapiError, OSError) as error:
            log.warning(
                "decoding process died, and no other starts", extra={"pid": dead.pid, "error": str(error)}
            )
            return
        self._idle[index] = self._all[self._all.index(dead)] = new
        self.replaced += 1
        log.warning("decoding process died", extra={"pid": dead.pid, "how": dead.end()})

    def _give_back(self, decoders: list[DecoderProcess]) -> None:
        for decoder in decoders:
            decoder.abandon()
        with self._changed:
            if not self._closed:
                self._idle += decoders
                self._changed.notify_all()
                return
        for decoder in decoders:
            decoder.end()


def _kill(processes: list[DecoderProcess]) -> None:
    for process in processes:
        process.kill()


def _cut(
    samples: Samples, out: npt.NDArray[np.float32], processes: int
) -> Iterator[tuple[Samples, npt.NDArray[np.float32]]]:
    """Parts of a batch and where they go: as many for each of ``processes``, of at most :data:`TASK_BYTES`."""
    limit = max(1, TASK_BYTES // out[0].nbytes)
    rounds = -(-len(samples) // (limit * processes))
    count = min(rounds * processes, len(samples))
    bounds = np.linspace(0, len(samples), count + 1).astype(int).tolist()
    for start, stop in pairwise(bounds):
        offsets = samples.offsets[start : stop + 1]
        samples_of_part = Samples(
            ids=samples.ids[start:stop],
            data=samples.data[int(offsets[0]) : int(offsets[-1])],
            offsets=offsets - offsets[0],
            labels=samples.labels[start:stop],
        )
        yield samples_of_part, out[start:stop]

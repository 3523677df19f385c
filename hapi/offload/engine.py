"""The pipeline of an update outside the memory: read the next piece, compute this one, write the one before.

LoHan, section IV-C and Figure 3: the states of piece i+1 come from the drive while piece i is computed, and piece i-1
is written after piece i+1 was read, because a drive does one or the other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hapi.arrays import Bytes
from hapi.errors import UsageError
from hapi.offload.pieces import Layout, StatePiece
from hapi.offload.states.base import Commit, StateStore, buffer_of
from hapi.offload.states.queues import DriveQueue, Loaded, Traffic, Write, first_of
from hapi.profiler.offload_costs import BUFFERS, MOST_BUFFERS

_RECORDED = 2
"""Bit of a piece's slot in a commit: it holds a record."""


class Engine:
    """Updates pieces as they are submitted, and commits what was written.

    Two threads for each drive, one that commits, and one that computes beside a device. On a CPU the training's own
    thread computes, between two layers and where it waits: a further one would take the cores from backward. New
    records go to the slot that is not valid; they are written only after the step before is durable, whose other slot
    that is.
    """

    def __init__(
        self,
        store: StateStore,
        layout: Layout,
        update: Callable[[StatePiece, Loaded], None],
        reads_master: Callable[[StatePiece], bool],
        *,
        buffers: int = BUFFERS,
        has_thread: bool = False,
    ) -> None:
        """Begin without work.

        Args:
            store: of the records; what it has committed is valid.
            layout: of the pieces.
            update: computes the new record of a piece in its buffer.
            reads_master: whether the master weights of a piece are read too.
            buffers: of each drive; 1 reads, computes and writes one after the other (Figure 3a).
            has_thread: compute in a thread of its own.
        """
        self._has_thread, self._store, self._pieces = has_thread, store, layout.pieces
        self._update, self._reads_master = update, reads_master
        self.traffic = Traffic()
        committed = store.committed
        slots = b"\1" * len(layout.pieces) if committed is None else committed.slots
        self.slots = bytearray(slot & 1 for slot in slots)
        """Valid slot of each piece."""
        self.has_record = [bool(slot & _RECORDED) for slot in slots]
        """Whether the valid slot of a piece holds anything."""
        self._new: set[int] = set()
        """Pieces whose valid slot is that of the commit to come."""
        self._step = 1 if committed is None else committed.number + 1
        """Number of the commit that is being computed."""
        self._durable = self._step - 1
        self._buffers, self._ahead = buffers, buffers > 1
        size = max((piece.nbytes for piece in layout.pieces), default=0)
        self._drives = [DriveQueue(size, buffers) for _ in layout.slot_bytes]
        self._condition = threading.Condition()
        self._loading: set[int] = set()
        self._loaded: dict[int, Loaded] = {}
        self._submitted: set[int] = set()
        """Submitted and not computed yet."""
        self._computing: set[int] = set()
        """The piece that is being computed."""
        self._taken: set[int] = set()
        """Submitted for the running step; not to be read ahead again."""
        self._writing: Counter[int] = Counter()
        """Writes under way of each piece."""
        self._pending: Counter[int] = Counter()
        """Writes under way of each step."""
        self._commit: Commit | None = None
        self._error: BaseException | None = None
        self._halted: BaseException | None = None
        """Error in the training's thread."""
        self._closing = False
        jobs: list[Callable[[], None]] = [self._run_commits, *([self._run_updates] if has_thread else [])]
        for drive in self._drives:  # a second transfer goes on while the first one's thread waits for a core
            jobs += [lambda drive=drive: self._run_drive(drive)] * min(2, buffers)  # type: ignore[misc]
        self._threads = [
            threading.Thread(target=self._guarded, args=(job,), daemon=True, name="hapi-offload")
            for job in jobs
        ]
        for thread in self._threads:
            thread.start()

    # -- the training's thread -------------------------------------------------------------------------------

    def expect(self, pieces: Iterable[int]) -> None:
        """Read these ahead, in this order, as far as there are buffers."""
        with self._condition:
            self._taken.clear()
            for drive in self._drives:
                drive.expected.clear()
            for number in pieces if self._ahead else ():
                self._drive_of(number).expected.append(number)
            self._condition.notify_all()

    def submit(self, pieces: Iterable[int]) -> None:
        """Update these pieces: their gradients are there. Raises what went wrong before."""
        with self._condition:
            self._check()
            for number in pieces:
                self._submitted.add(number)
                self._taken.add(number)
                self._drive_of(number).asked.append(number)
            self._condition.notify_all()

    def help(self) -> None:
        """Compute what is read and submitted, in the caller's thread where no other one does."""
        while not self._has_thread:
            with self._condition:
                self._check()
                taken = self._take_update()
            if taken is None:
                return
            with self.all_or_nothing():
                self._compute(*taken)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Take no further work after an error in the block, which may have left values between two steps."""
        try:
            yield
        except BaseException as error:
            self._halted = error
            raise

    def drain(self) -> None:
        """Wait until all submitted pieces are computed; their writes may still run."""
        self._wait(lambda: not self._submitted)

    def wait_for_room(self, has_room: Callable[[], bool]) -> None:
        """Wait until ``has_room()``, or until no submitted piece is left that could make some."""
        if not has_room():
            self._wait(lambda: has_room() or not self._submitted)

    def settle(self) -> None:
        """Wait until all is written and the last commit is durable."""
        self._wait(lambda: not self._submitted and not self._pending.total() and self._commit is None)

    def forget_loaded(self) -> None:
        """Drop what was read ahead and what is expected; nothing is submitted."""
        self.expect(())
        self._wait(lambda: not self._loading)
        with self._condition:
            for number, loaded in self._loaded.items():
                self._drive_of(number).give(loaded.buffer)
            self._loaded.clear()

    def take_room(self, nbytes: int) -> None:
        """Have buffers in so many bytes beside the first ones; those above are given back when they are written."""
        each = sum(drive.size for drive in self._drives)
        limit = min(MOST_BUFFERS, self._buffers + nbytes // max(each, 1))
        with self._condition:
            for drive in self._drives:
                drive.resize(max(limit, self._buffers))
                while drive.made > drive.limit and self._drop_one(drive):
                    pass
            self._condition.notify_all()

    def read_record(self, number: int, *, is_new: bool = False) -> Bytes:
        """Read a piece's valid record into memory of its own, or the ``is_new`` one of the running step."""
        self._wait(lambda: not self._writing[number])
        piece = self._pieces[number]
        buffer = buffer_of(piece.nbytes)
        slot = self.slots[number]
        self._store.read(piece, 1 - slot if is_new else slot, buffer, 0, piece.nbytes)
        return buffer

    def write_record(self, number: int, record: Bytes) -> None:
        """Write a record into a piece's other slot at once: states that come from elsewhere, after :meth:`settle`."""
        self._store.write(self._pieces[number], 1 - self.slots[number], record)

    def finish(self, written: Iterable[int]) -> None:
        """Let the new records of ``written`` be the valid ones; :meth:`commit` makes them so for good."""
        with self._condition:
            for number in written:
                self._flip(number)
            self._step += 1

    def amend(self, number: int, change: Callable[[Bytes], None]) -> None:
        """Let ``change`` write master weights into a piece's record, for the commit to come."""
        self._wait(lambda: not self._writing[number] and self._commit is None)
        piece, is_new = self._pieces[number], number in self._new
        record, start = buffer_of(piece.nbytes), piece.states_bytes if is_new else 0
        if self.has_record[number]:
            self._store.read(piece, self.slots[number], record, start, piece.nbytes)
        change(record)
        if not is_new:
            self._flip(number)
        self._store.write(piece, self.slots[number], record, start)

    def commit(self, steps: int, parameter_steps: Iterable[int], extra: bytes) -> None:
        """Make the valid records those of a next process as soon as they are durable; does not wait for that."""
        self._wait(lambda: self._commit is None)
        with self._condition:
            slots = bytes(s + _RECORDED * has for s, has in zip(self.slots, self.has_record, strict=True))
            self._commit = Commit(self._step - 1, steps, slots, tuple(parameter_steps), extra)
            self._new.clear()
            self._condition.notify_all()

    def _flip(self, number: int) -> None:
        self.slots[number] = 1 - self.slots[number]
        self.has_record[number] = True
        self._new.add(number)

    def close(self) -> None:
        """Finish the last commit and end the threads; work that is not committed is dropped."""
        with self._condition:
            self._condition.wait_for(lambda: self._commit is None or self._error is not None)
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        while True:
            began = time.perf_counter()
            with self._condition:
                self._condition.wait_for(lambda: self._error or self._halted or is_done() or self._may_help())
                self.traffic.waited_seconds += time.perf_counter() - began
                self._check()
                if is_done():
                    return
            self.help()

    def _may_help(self) -> bool:
        return not self._has_thread and self._next_update() is not None

    def _check(self) -> None:
        error = self._error or self._halted
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise UsageError(
                "an update was interrupted, and parameters are between two steps: close() this optimizer and give the "
                "model to hapi.offload_training again; with disk= it goes on from the last whole step"
            )
        if error is not None:
            raise error

    def _drive_of(self, number: int) -> DriveQueue:
        return self._drives[self._pieces[number].drive]

    # -- threads ---------------------------------------------------------------------------------------------

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised in the training's thread
            with self._condition:
                self._error = self._error or error
                self._condition.notify_all()

    @property
    def _stops(self) -> bool:
        return self._closing or self._error is not None

    def _run_drive(self, drive: DriveQueue) -> None:
        while True:
            with self._condition:
                while not self._stops and (number := self._next_read(drive)) is None:
                    if self._may_write(drive):
                        break
                    self._condition.wait()
                if self._stops:
                    return
                if number is not None:
                    self._loading.add(number)
                    buffer = drive.free.pop()
                else:
                    write = drive.writes.popleft()
                    drive.writing += 1
            if number is not None:
                self._read(number, buffer)
            else:
                self._write(drive, write)

    def _next_read(self, drive: DriveQueue) -> int | None:
        """Number to read now: first one whose gradient is there, then one that is expected; None without a buffer."""
        wanted = first_of(drive.asked, self._loaded, self._loading, self._computing, among=self._submitted)
        is_asked = wanted is not None
        if wanted is None:
            wanted = first_of(drive.expected, self._loaded, self._loading, self._taken)
        if wanted is None or self._writing[wanted]:
            return None
        if is_asked and not drive.free and not drive.writes and not drive.writing:
            self._drop_one(drive)
        return wanted if drive.free else None

    def _drop_one(self, drive: DriveQueue) -> bool:
        """Give up a piece that was read ahead and waits for its gradient; return whether there was one."""
        for number in reversed(self._loaded):
            if number not in self._submitted and self._drive_of(number) is drive:
                drive.give(self._loaded.pop(number).buffer)
                drive.expected.appendleft(number)  # it is needed before those that were not read yet
                return True
        return False

    def _may_write(self, drive: DriveQueue) -> bool:
        return bool(drive.writes) and drive.writes[0].step <= self._durable + 1

    def _read(self, number: int, buffer: Bytes) -> None:
        piece, nbytes = self._pieces[number], 0
        has_states = self.has_record[number]
        has_master = has_states and self._reads_master(piece)
        began = time.perf_counter()
        record = self._store.place(piece, 1 - self.slots[number], buffer)
        if has_states:
            nbytes = piece.nbytes if has_master else piece.states_bytes
        if nbytes:
            self._store.read(piece, self.slots[number], record, 0, nbytes)
        with self._condition:
            self._loading.discard(number)
            self._loaded[number] = Loaded(record, buffer, has_states, has_master)
            self.traffic.bytes_read += nbytes
            self.traffic.read_seconds += time.perf_counter() - began
            self._condition.notify_all()

    def _write(self, drive: DriveQueue, write: Write) -> None:
        piece = self._pieces[write.piece]
        began = time.perf_counter()
        self._store.write(piece, write.slot, write.loaded.record)
        with self._condition:
            self._writing[write.piece] -= 1
            self._pending[write.step] -= 1
            drive.writing -= 1
            drive.give(write.loaded.buffer)
            self.traffic.bytes_written += piece.nbytes
            self.traffic.write_seconds += time.perf_counter() - began
            self._condition.notify_all()

    def _run_updates(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stops or self._next_update() is not None)
                if self._stops:
                    return
                taken = self._take_update()
            if taken is not None:
                self._compute(*taken)

    def _take_update(self) -> tuple[int, Loaded] | None:
        """Take a piece that is read and submitted; None without one."""
        number = self._next_update()
        if number is None:
            return None
        self._computing.add(number)
        return number, self._loaded.pop(number)

    def _compute(self, number: int, loaded: Loaded) -> None:
        """Update a piece, and hand it over to be written."""
        began = time.perf_counter()
        self._update(self._pieces[number], loaded)
        with self._condition:
            write = Write(self._step, number, 1 - self.slots[number], loaded)
            self._drive_of(number).writes.append(write)
            self._writing[number] += 1
            self._pending[write.step] += 1
            self._submitted.discard(number)
            self._computing.discard(number)
            self.traffic.pieces += 1
            self.traffic.compute_seconds += time.perf_counter() - began
            self._condition.notify_all()

    def _next_update(self) -> int | None:
        return next((number for number in self._loaded if number in self._submitted), None)

    def _run_commits(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: (
                        self._stops or (self._commit is not None and not self._pending[self._commit.number])
                    )
                )
                if self._stops:
                    return
                commit = self._commit
            if commit is None:
                continue
            began = time.perf_counter()
            self._store.commit(commit)
            with self._condition:
                del self._pending[commit.number]
                self._durable, self._commit = commit.number, None
                self.traffic.commit_seconds += time.perf_counter() - began
                self._condition.notify_all()

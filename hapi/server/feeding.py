"""Inputs of COS batches: stored samples, read and decoded in pieces that fit the request's memory.

Usually a COS batch is one piece, of long samples several: a piece's stored bytes are freed when it is
decoded, so that 256 photographs of 6 MB are never in memory at once. The layers see the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hapi.allocator import give_back_freed_memory
from hapi.arrays import Bytes, Flags, IntArray, LabelArray
from hapi.clocks import StageClock
from hapi.data.dataset import Dataset
from hapi.data.reading.reader import AccessHint
from hapi.data.sample_directory import Located
from hapi.data.transforms.decode_limits import SMALL_BYTES
from hapi.data.transforms.pipeline import input_shape
from hapi.errors import HapiError
from hapi.process.direct_io import huge_memory
from hapi.process.memory_errors import is_out_of_memory
from hapi.server.decoding.pool import Decoders
from hapi.server.device.host_memory import HostNeed
from hapi.wire.labels import LabelForm
from hapi.wire.messages import ExtractRequest

SampleRange = tuple[int, int]
"""Consecutive samples: the place of the first, and the one after the last."""
LARGE_PART = 16 << 20
"""Stored bytes from which on a piece has memory of its own: new pages cost little beside so many bytes' decoding."""


class Feeding:
    """Reads and decodes the samples of one request. Used by one thread at a time."""

    def __init__(
        self,
        dataset: Dataset,
        request: ExtractRequest,
        hint: AccessHint | None,
        decoders: Decoders,
        clock: StageClock,
    ) -> None:
        """Feed ``request``; ``hint`` is for :meth:`Dataset.read_at`. :class:`NotFoundError` for an absent id."""
        self._dataset = dataset
        self._transform = request.transform
        self._hint = hint
        self._decoders = decoders
        self._clock = clock
        self._located = dataset.locate(request.ids)
        self._shape = input_shape(dataset.layout, request.transform)
        self.part_bytes = 0
        """Most stored bytes of a piece, if that is at least one sample."""

    @property
    def label_form(self) -> LabelForm:
        """Form of the samples' labels."""
        return self._dataset.label_form

    def need(self, batch: int, sample_bytes: int) -> HostNeed:
        """Return the host memory of COS batches of ``batch`` samples, with ``sample_bytes`` more for each
        sample.

        It is a range, from pieces of one sample to whole COS batches.
        """
        lengths = self._located.length
        longest = int(lengths.max())
        whole = int(np.add.reduceat(lengths, np.arange(0, len(lengths), batch)).max())
        fixed = self._fixed(longest, batch, sample_bytes)
        return HostNeed(min_bytes=fixed + self._copies * longest, max_bytes=fixed + self._copies * whole)

    def grant(self, nbytes: int, batch: int, sample_bytes: int) -> None:
        """Take ``nbytes``, which lie within :meth:`need` of the same ``batch`` and ``sample_bytes``."""
        fixed = self._fixed(int(self._located.length.max()), batch, sample_bytes)
        self.part_bytes = (nbytes - fixed) // self._copies

    def load(self, rows: IntArray, min_count: int = 0) -> torch.Tensor:
        """Return the inputs of some samples of the request.

        Args:
            rows: their places in the request, int64 [k].
            min_count: inputs to return if there are fewer samples; they are repeated then.

        Returns:
            float32 [max(k, least), C, H, W].

        Raises:
            HapiError: a sample cannot be read or decoded, or memory is lacking.
        """
        located = self._located.at(rows)
        inputs = torch.empty((max(min_count, len(rows)), *self._shape), dtype=torch.float32)
        for start, stop in self._parts(located.length):
            self._fill(located.part(start, stop), inputs[start:stop])
        for place in range(len(rows), min_count):
            inputs[place] = inputs[place % len(rows)]
        return inputs

    def fits_memory(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids``, which the request does not name, fit its memory; bool [k]."""
        limit = max(self.part_bytes, int(self._located.length.max()))
        fits: Flags = self._dataset.locate(ids).length <= limit
        return fits

    def load_others(self, ids: IntArray, out: torch.Tensor) -> bool:
        """Load further samples of the dataset, which :meth:`fits_memory` has allowed.

        Args:
            ids: int64 [k].
            out: float32 [k or more, C, H, W].

        Returns:
            False where one cannot be read or decoded, which is no fault of the request; ``out`` then holds anything.
        """
        try:
            located = self._dataset.locate(ids)
            for start, stop in self._parts(located.length):
                self._fill(located.part(start, stop), out[start:stop])
        except HapiError:
            return False
        return True

    def labels_of(self, ids: IntArray) -> LabelArray:
        """Return the labels of samples ``ids`` of the dataset."""
        return self._dataset.labels_at(self._dataset.locate(ids))

    @property
    def count(self) -> int:
        """Number of samples of the dataset."""
        return self._dataset.count

    def labels(self, low: int, high: int) -> LabelArray:
        """Return the labels of samples ``low`` to ``high`` of the request, int64 [n] or float32 [n, k]."""
        return self._dataset.labels_at(self._located.part(low, high))

    @property
    def _copies(self) -> int:
        """Copies of stored bytes in memory: a decoding process has its own."""
        return 2 if self._decoders.processes else 1

    def _fixed(self, longest: int, batch: int, sample_bytes: int) -> int:
        at_once = min(self._decoders.at_once, len(self._located.length))
        return batch * sample_bytes + at_once * self._working(longest)

    def _working(self, longest: int) -> int:
        """Bytes beside a sample while it is made an input; larger images ask for the image room themselves."""
        layout = self._dataset.layout
        if layout.kind == "encoded":
            return SMALL_BYTES + longest  # Pillow has a copy of the file
        return (
            2 * longest + 8 * longest // np.dtype(layout.sample_dtype).itemsize
        )  # two copies, and as floats

    def _parts(self, lengths: IntArray) -> Iterator[SampleRange]:
        ends = np.cumsum(lengths)
        start = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + self.part_bytes, "right")))
            yield start, stop
            start = stop

    def _fill(self, located: Located, out: torch.Tensor) -> None:
        """The samples at ``located`` into ``out``; when memory is short after all, half of them at a time."""
        try:
            self._decode(located, out)
            return
        except (RuntimeError, MemoryError, OSError) as error:
            if len(located) == 1 or not is_out_of_memory(error):
                raise
        give_back_freed_memory()  # only here, after the handler, is gone what the error's frames held
        middle = len(located) // 2
        self._fill(located.part(0, middle), out[:middle])
        self._fill(located.part(middle, len(located)), out[middle:])

    def _decode(self, located: Located, out: torch.Tensor) -> None:
        dataset, clock = self._dataset, self._clock
        with clock.stage("read"):
            out_of_heap = _own_memory(int(located.length.sum()))
            samples = dataset.read_at(located, self._hint, out_of_heap)
        with clock.stage("decode"):
            self._decoders.batch(samples, dataset.layout, self._transform, clock, out)


def _own_memory(nbytes: int) -> Bytes | None:
    """Memory of its own for a large piece, uint8 [nbytes]; None for the heap.

    The heap keeps what is freed; pieces of many lengths would leave it with holes that fit nothing.
    """
    return None if nbytes < LARGE_PART else huge_memory(nbytes)

"""Tensors that lie in a file as views of a larger storage: transposed, sliced or expanded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from hapi.models.tensors import tensor_bytes
from hapi.repository.sources.files import SourceFile

BLOCK_BYTES = 16 << 20
"""Bytes of a part that is gathered at once: the larger it is, the longer are the runs of a transposed matrix."""
_READ_BYTES = 1 << 20
"""Bytes that are read at once although few of them may be needed; a seek costs more."""
_WASTE = 4
"""Bytes read for each byte that is needed, above which a longer read is divided."""


@dataclass(frozen=True)
class StridedView:
    """A tensor in the bytes of a file."""

    file: SourceFile
    start: int
    """Byte of its first element."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements between neighbours, by dimension, at least 0."""

    @property
    def is_contiguous(self) -> bool:
        """Return whether its elements lie in C order without gaps."""
        if 0 in self.shape:
            return True
        expected = 1
        for side, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if side > 1 and step != expected:
                return False
            expected *= side
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """One past the last byte that it has in the file."""
        if 0 in self.shape:
            return self.start
        last = sum((side - 1) * step for side, step in zip(self.shape, self.stride, strict=True))
        return self.start + (last + 1) * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        """Yield its bytes in C order; each piece is valid until the next one is asked for.

        No more than a few blocks are in memory, whatever the size and the strides.
        """
        if self.is_contiguous:
            yield from self.file.pieces(self.start, self.start + self.nbytes)
            return
        with self.file.opened() as descriptor:
            for block in self._blocks():
                yield tensor_bytes(block.read(descriptor))

    def _blocks(self) -> Iterator[StridedView]:
        """Yield parts of at most a block, in C order."""
        if self.nbytes <= BLOCK_BYTES:
            yield self
            return
        row = self.nbytes // self.shape[0]
        if row > BLOCK_BYTES:
            for i in range(self.shape[0]):
                part = self._rows(i, i + 1)
                yield from replace(part, shape=self.shape[1:], stride=self.stride[1:])._blocks()
            return
        step = BLOCK_BYTES // row
        for i in range(0, self.shape[0], step):
            yield self._rows(i, min(i + step, self.shape[0]))

    def _rows(self, first: int, stop: int) -> StridedView:
        start = self.start + first * self.stride[0] * self.dtype.itemsize
        return replace(self, start=start, shape=(stop - first, *self.shape[1:]))

    def read(self, descriptor: int) -> torch.Tensor:
        """Return the tensor, read in runs that hold little else."""
        sides, steps = self.shape, self.stride
        kept = [i for i in range(len(sides)) if sides[i] > 1 and steps[i] > 0]
        outer = sorted(kept, key=lambda i: -steps[i])
        inner: list[int] = []
        span = used = 1
        while outer:
            widened = span + (sides[outer[-1]] - 1) * steps[outer[-1]]
            needed = used * sides[outer[-1]]
            if widened * self.dtype.itemsize > max(_READ_BYTES, _WASTE * needed * self.dtype.itemsize):
                break
            inner.insert(0, outer.pop())
            span, used = widened, needed
        raw = torch.empty(span, dtype=self.dtype)
        run = raw.as_strided([sides[i] for i in inner], [steps[i] for i in inner])
        found = torch.empty([sides[i] for i in (*outer, *inner)], dtype=self.dtype)
        for index in product(*(range(sides[i]) for i in outer)):
            offset = sum(i * steps[dimension] for i, dimension in zip(index, outer, strict=True))
            self.file.fill(descriptor, self.start + offset * self.dtype.itemsize, tensor_bytes(raw))
            found[index] = run
        order = [*outer, *inner]
        found = found.permute([order.index(dimension) for dimension in kept])
        return found.reshape([sides[i] if i in kept else 1 for i in range(len(sides))]).expand(sides)

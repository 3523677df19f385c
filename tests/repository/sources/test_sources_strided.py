"""Views of a larger storage, read block by block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hapi.models.tensors import tensor_bytes
from hapi.repository.sources import strided
from hapi.repository.sources.files import SourceFile
from hapi.repository.sources.strided import StridedView

STORAGE = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> SourceFile:
    path = tmp_path_factory.mktemp("storage") / "storage.bin"
    path.write_bytes(bytes(tensor_bytes(STORAGE)))
    return SourceFile.at(path)


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    stride = tuple(draw(st.integers(0, 300)) for _ in shape)
    return draw(st.integers(0, 500)), shape, stride


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(view=views(), dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32]))
@pytest.mark.parametrize(("piece", "read"), [(1 << 23, 1 << 20), (64, 16), (8, 1)])
def test_any_view_reads_as_torch_sees_it(
    file: SourceFile,
    monkeypatch: pytest.MonkeyPatch,
    view: tuple[int, tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    piece: int,
    read: int,
) -> None:
    monkeypatch.setattr(strided, "BLOCK_BYTES", piece)
    monkeypatch.setattr(strided, "_READ_BYTES", read)
    offset, shape, stride = view
    expected = STORAGE.view(dtype).as_strided(shape, stride, offset)
    found = StridedView(file, offset * dtype.itemsize, dtype, shape, stride)
    pieces = [bytes(part) for part in found.pieces()]
    assert b"".join(pieces) == bytes(tensor_bytes(expected))
    assert all(len(part) <= max(piece, dtype.itemsize) for part in pieces) or found.is_contiguous
    assert found.is_contiguous == (expected.is_contiguous() or 0 in shape)
    if 0 not in shape:
        last = offset + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
        assert found.stop == (last + 1) * dtype.itemsize

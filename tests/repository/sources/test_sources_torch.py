"""Checkpoints of ``torch.save`` as sources: views, tied tensors, nesting, and files that lie."""

from __future__ import annotations

import io
import logging
import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_sources_safetensors import content, expected
from torch import nn

from hapi.cli.main import main
from hapi.errors import ModelError
from hapi.models.tensors import STORED_NAMES
from hapi.repository.sources.open import open_source


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def test_every_type_view_and_tie_is_read(tmp_path: Path) -> None:
    base = torch.randn(64, 48)
    state: dict[str, torch.Tensor] = {f"typed.{dtype}": torch.arange(9).to(dtype) for dtype in STORED_NAMES}
    state |= {
        "z.last": base, "a.tied": base, "view.rows": base[3:9], "view.columns": base[:, 5:9],
        "view.transposed": base.t(), "view.expanded": base[:1].expand(5, 48), "view.step": base[::3, ::5],
        "channels": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5), "empty": torch.empty(3, 0), "parameter": nn.Parameter(torch.randn(4)),
    }  # fmt: skip
    path = saved(tmp_path / "all.pth", state)
    found = content(path)
    assert found == expected(state)
    assert list(found) == list(state)  # as they were saved


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "net"])
def test_nested_and_wrapped_states_are_found(tmp_path: Path, key: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    state = OrderedDict((f"module.{name}", tensor) for name, tensor in net.state_dict().items())
    optimizer = torch.optim.Adam(net.parameters()).state_dict()
    path = saved(tmp_path / "c.ckpt", {key: state, "optimizer": optimizer, "epoch": 3})
    assert content(path) == expected(net.state_dict())


def test_a_file_of_the_old_format_is_loaded_whole_and_says_so(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(5, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16)}
    path = saved(tmp_path / "old.pth", state, _use_new_zipfile_serialization=False)
    assert content(path) == expected(state)
    (note,) = open_source(path).notes
    assert "before PyTorch 1.6" in note and "loaded into memory" in note
    assert not open_source(saved(tmp_path / "new.pth", state)).notes


def test_the_usual_name_of_the_reference_trainings_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``model_best.pth.tar`` is no archive of tar, and no architecture either."""
    monkeypatch.chdir(tmp_path)
    saved(
        tmp_path / "model_best.pth.tar",
        {"state_dict": {"module.a": torch.ones(3)}, "epoch": 1, "arch": "resnet18"},
    )
    assert list(open_source(tmp_path).tensors) == ["a"]
    assert main(["show", "model_best.pth.tar"]) == 0 and "1 tensor," in capsys.readouterr().out
    assert main(["push", "model_best.pth.tar", "store/m", "--quiet"]) == 0


def test_a_large_storage_with_a_small_view_is_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"small": torch.zeros(4 << 20)[100:103]})
    tensor = open_source(path).tensors["small"]
    assert [len(piece) for piece in tensor.pieces()] == [12]


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never",)


def test_code_is_never_run(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pth", {"a": torch.zeros(1), "b": Malicious()})
    with pytest.raises(ModelError, match="holds more than tensors, which is never loaded"):
        open_source(path)


def rewritten(path: Path, change: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED) -> Path:
    """Write the archive anew with some records' contents changed, or left out."""
    other = path.with_name(f"{len(list(path.parent.iterdir()))}.pth")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w", compression) as new:
        for record in old.infolist():
            name = record.filename.partition("/")[2]
            data = change.get(name, old.read(record))
            if data is not None:
                new.writestr(record.filename, data)
        for name in change.keys() - {record.filename.partition("/")[2] for record in old.infolist()}:
            new.writestr(f"{old.infolist()[0].filename.partition('/')[0]}/{name}", change[name] or b"")
    return other


def test_damaged_archives_are_refused_in_one_line(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pth", {"a": torch.arange(100.0), "b": torch.ones(3)})
    whole = path.read_bytes()
    cases = {
        "lies outside of its storage": rewritten(path, {"data/0": bytes(40)}),
        "another byte order": rewritten(path, {"byteorder": b"big"}),
        "is compressed": rewritten(path, {}, zipfile.ZIP_DEFLATED),
        "TorchScript": rewritten(path, {"constants.pkl": b""}),
        "its archive cannot be read": rewritten(path, {"data/0": None}),
    }
    for words, broken in cases.items():
        with pytest.raises(ModelError, match=words) as caught:
            open_source(broken)
        assert broken.name in str(caught.value) and "\n" not in str(caught.value)
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"m\.pth"):
            open_source(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([torch.zeros(1)], "holds no state dict"),
        (torch.zeros(1), "it is a single tensor; save"),
        ({"a": torch.zeros(1, dtype=torch.complex64).conj()}, "is a conjugated or negated view; save its"),
        ({}, r"holds no state dict \(names to tensors\): it is empty"),
        ({"a": torch.zeros(1), "b": 3}, "'b' is of type int; save"),
        ({"a": torch.zeros(1), "b": {"c": [1]}}, "'b' is a table; save"),
        (
            {"net": {"a": torch.zeros(1)}, "ema": {"a": torch.zeros(1)}},
            "it has 2, 'net', 'ema'; save the one",
        ),
        ({1: torch.zeros(1), "1": torch.ones(1)}, "two of its names are the same"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
        ({"__metadata__": torch.zeros(2)}, "no file of tensors can hold the name '__metadata__'; rename"),
        ({"a": torch.eye(2).to_sparse()}, "cannot be read as tensors|sparse_coo"),  # by the version of torch
        ({"a": torch.zeros(2, device="meta")}, "no bytes of its own"),
        ({"trained": {}, "identity": {}, "progress": {}}, "checkpoint of hapi-train"),
    ],
)
def test_what_is_no_state_dict_of_plain_tensors_is_refused(tmp_path: Path, value: Any, words: str) -> None:
    path = saved(tmp_path / "m.pth", value)
    with pytest.raises(ModelError, match=words) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_torch_prints_nothing_of_what_is_refused(tmp_path: Path) -> None:
    logger, lines = logging.getLogger("torch._subclasses.fake_tensor"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        path = saved(tmp_path / "m.pth", {"a": torch.eye(2).to_sparse_csr()})
        with pytest.raises(ModelError, match=r"cannot be read as tensors|sparse_csr") as caught:
            open_source(path)
    finally:
        logger.removeHandler(handler)
    assert not lines and not logger.filters and "\n" not in str(caught.value)


def old_form(value: Any) -> bytes:
    """Bytes of a file of the format before PyTorch 1.6."""
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def archive(**records: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in records.items():
            file.writestr(name, data)
    return out.getvalue()


def tar(**members: bytes) -> bytes:
    """What PyTorch before 0.2 wrote has members of these names."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"hello", "is damaged, or no checkpoint of torch.save"),
        (pickle.dumps({"a": 1}), "is damaged, or no checkpoint of torch.save"),
        (pickle.dumps({"a": 1}, protocol=2), "is damaged, or no checkpoint of torch.save"),
        (pickle.dumps(Malicious(), protocol=2), "it asks for posix.system, which may run code"),
        (old_form({"a": torch.zeros(1), "b": Malicious()}), "it asks for posix.system, which may run code"),
        (old_form(nn.Linear(2, 2)), "it asks for torch.nn.modules.linear.Linear"),
        (bytes(1000), "is damaged, or no checkpoint of torch.save"),
        (archive(), "is an archive, but no checkpoint of torch.save"),
        (archive(readme=b"hello"), "is an archive, but no checkpoint of torch.save"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n", "is a pointer of Git LFS"),
        (safetensors.torch.save({"a": torch.zeros(3)}), "is a safetensors file: give it a name that ends"),
        (b"<!DOCTYPE html><html>404</html>", "is a web page"),
        (b"\x1f\x8b\x08\x00" + bytes(60), "is compressed by gzip"),
        (b"\x89HDF\r\n\x1a\n" + bytes(60), "is an HDF5 file"),
        (
            tar(sys_info=b"", pickle=b"", storages=b"", tensors=b""),
            "is a tar archive: unpack it; if a PyTorch bef",
        ),
    ],
)
def test_other_files_are_told_in_one_line(
    tmp_path: Path, data: bytes, words: str, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "m.pth"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=words) as caught:
        open_source(path)
    assert str(caught.value).startswith(f"weights file {path} ") and "\n" not in str(caught.value)
    assert not recwarn.list  # torch's guesses


@pytest.mark.slow
def test_any_byte_may_be_another_and_any_end_missing(tmp_path: Path) -> None:
    """It is read, or refused in one line that names the file and none of torch's exceptions."""
    state = {"a.weight": torch.randn(4, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    path = saved(tmp_path / "m.pth", state)
    for data in (path.read_bytes(), old_form(state)):
        changed = [data[:end] for end in range(0, len(data), 97)]
        changed += [data[:i] + bytes([data[i] ^ 0x41]) + data[i + 1 :] for i in range(0, len(data), 11)]
        for broken in changed:
            path.write_bytes(broken)
            try:
                source = open_source(path)
            except ModelError as error:
                assert str(error).startswith(f"weights file {path}") and "\n" not in str(error)
                assert "index out of range" not in str(error) and "EOFError" not in str(error)
            else:
                assert source.nbytes < 1000


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("new_format", [True, False])
def test_a_nested_tensor_is_not_called_damage(tmp_path: Path, layout: torch.layout, new_format: bool) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    path = tmp_path / "nested.pth"
    torch.save({"a": torch.ones(3), "b": nested}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(ModelError, match="has a nested tensor, which no store holds") as caught:
        open_source(path)
    assert "damaged" not in str(caught.value)

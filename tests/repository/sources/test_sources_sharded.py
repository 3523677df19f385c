"""Sharded checkpoints: as Hugging Face's libraries write them, and with every part wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_sources_safetensors import content, expected

from hapi.errors import ModelError
from hapi.repository.sources.open import open_source

STATE = {f"model.layers.{i}.mlp.weight": torch.randn(16, 16) for i in range(12)} | {
    "lm_head.weight": torch.ones(3)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint of five files."""
    names, homes = list(STATE), {}
    for number, start in enumerate(range(0, len(names), 3), start=1):
        shard = f"model-{number:05}-of-00005.safetensors"
        homes |= dict.fromkeys(names[start : start + 3], shard)
        save_file({name: STATE[name] for name in names[start : start + 3]}, tmp_path / shard)
    total = {"total_size": sum(tensor.nbytes for tensor in STATE.values())}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": total, "weight_map": homes})
    )
    return tmp_path


def changed(folder: Path, **values: Any) -> Path:
    """Write the index with other fields; return it."""
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return found


def test_the_librarys_own_shards_are_read(tmp_path: Path) -> None:
    library = pytest.importorskip("huggingface_hub")
    library.save_torch_state_dict(STATE, tmp_path, max_shard_size=3000)
    assert content(tmp_path) == expected(STATE) and open_source(tmp_path).files > 3


def test_folder_and_index_are_the_same_checkpoint(folder: Path) -> None:
    source = open_source(folder)
    assert source.files == 5 and source.form == "sharded"
    assert content(folder) == content(folder / "model.safetensors.index.json") == expected(STATE)
    assert list(source.tensors) == ["lm_head.weight", *(name for name in STATE if "layers" in name)]


def test_shards_of_torch_save_are_read(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b.weight": torch.ones(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    homes = {"a.weight": "pytorch_model-00001-of-00002.bin", "b.weight": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    assert content(tmp_path) == expected({"a.weight": torch.ones(2), "b.weight": torch.ones(3)})


def test_a_shard_that_is_a_link_into_a_cache_is_read(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    for shard in folder.glob("*.safetensors"):
        shard.rename(blobs / shard.name)
        shard.symlink_to(blobs / shard.name)
    assert content(folder) == expected(STATE)


def refused(path: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard = index_of(folder)["weight_map"]["model.layers.3.mlp.weight"]
    (folder / shard).unlink()
    refused(folder, f"{shard} is missing, with 3 tensors")


@pytest.mark.parametrize("shard", ["x" * 5000, "\ud800.safetensors"])
def test_a_name_that_no_file_can_have_is_missing(folder: Path, shard: str) -> None:
    refused(changed(folder, weight_map={"a": shard}), "is missing, with 1 tensor;")


def test_a_tensor_in_no_shard_is_named(folder: Path) -> None:
    homes = index_of(folder)["weight_map"]
    changed(folder, weight_map={**homes, "model.norm.weight": homes["lm_head.weight"]})
    refused(folder, r"tensor 'model.norm.weight' is in model-.* it is in none of its files")


def test_a_tensor_in_another_shard_or_unknown_to_the_index_is_named(folder: Path) -> None:
    homes = index_of(folder)["weight_map"]
    moved = {**homes, "lm_head.weight": homes["model.layers.0.mlp.weight"]}
    changed(folder, weight_map=moved)
    refused(folder, "says that tensor 'lm_head.weight' is in model-")
    changed(
        folder, weight_map={name: home for name, home in homes.items() if name != "model.layers.1.mlp.weight"}
    )
    refused(folder, "says that tensor 'model.layers.1.mlp.weight' is in no file")


def test_a_tensor_in_two_shards_is_named(folder: Path) -> None:
    homes = index_of(folder)["weight_map"]
    first, second = list(dict.fromkeys(homes.values()))[:2]
    name = next(name for name, home in homes.items() if home == first)
    others = {n: STATE[n] for n, home in homes.items() if home == second}
    save_file({**others, name: STATE[name]}, folder / second)
    refused(folder, f"tensor '{name}' is in {first} and in {second}")


def test_a_total_size_that_lies_is_told(folder: Path) -> None:
    """Nothing is missing: mlx-lm counted files, and tools that take tensors out leave the number as it was."""
    changed(folder, metadata={"total_size": 5})
    assert content(folder) == expected(STATE)
    (note,) = open_source(folder).notes
    assert "says that all tensors have 5 bytes, but they have 12300" in note
    changed(folder, metadata={"total_size": "5"})
    refused(folder, "no number of bytes")
    changed(folder, metadata={})
    assert content(folder) == expected(STATE) and not open_source(folder).notes


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("total", [300, 400])
def test_tied_weights_may_be_counted_once(tmp_path: Path, new_format: bool, total: int) -> None:
    """As the libraries do that save shards of torch.save, where both names of a tensor stand in one file."""
    shared, own = torch.randn(5, 5), torch.randn(50)
    first = {"embed.weight": shared, "lm_head.weight": shared}
    for name, state in (("1.bin", first), ("2.bin", {"norm.weight": own})):
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=new_format)
    homes = {**dict.fromkeys(first, "1.bin"), "norm.weight": "2.bin"}
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert content(tmp_path) == expected({**first, "norm.weight": own})
    assert not [note for note in open_source(tmp_path).notes if "total" in note or "all tensors" in note]
    index["metadata"] = {"total_size": 200}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "200 bytes, but they have 400" in open_source(tmp_path).notes[-1]


@pytest.mark.parametrize(
    "shard", ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "a\0b"]
)
def test_shards_outside_of_the_folder_are_refused(folder: Path, shard: str) -> None:
    refused(changed(folder, weight_map={"a": shard}), "shards must lie beside their index")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
)
def test_what_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "is not JSON|has no weight_map")


def test_a_damaged_shard_is_named(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(folder, f"{shard.name} is damaged .* cut or extended")


def test_folders_without_one_checkpoint_say_what_they_have(tmp_path: Path) -> None:
    refused(tmp_path, "has no checkpoint")
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    torch.save({}, tmp_path / "training_args.bin")
    assert list(open_source(tmp_path).tensors) == ["a"]
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    refused(tmp_path, r"has 2 files that may be the checkpoint \(one.safetensors, two.safetensors\)")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_usual_name_goes_before_others(tmp_path: Path, name: str) -> None:
    for other in ("consolidated", "adapter_model", "training_args"):
        (tmp_path / f"{other}{Path(name).suffix}").write_bytes(b"no checkpoint")
    if name.endswith(".bin"):
        torch.save({"a": torch.ones(1)}, tmp_path / name)
    else:
        save_file({"a": torch.ones(1)}, tmp_path / name)
    assert list(open_source(tmp_path).tensors) == ["a"]

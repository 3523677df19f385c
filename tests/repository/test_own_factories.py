"""Pushed models of a user's own factory: buffers, plain attributes, tied tensors, what cannot be traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.front_tools import loaded_front

from hapi.errors import (
    ConflictError,
    ModelError,
)
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.opening import open_model
from hapi.repository.prefix import store_reference, zoo_reference
from hapi.repository.push import push
from hapi.repository.stored import StoredModel
from hapi.store.local import LocalStore

BUFFERS = '''
import torch
from torch import nn

class Filled(nn.Module):
    """A buffer that is in no state dict and is filled in place: the meta device forgets it."""
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.table.copy_(torch.arange(4.0))
        self.fc = nn.Linear(4, 3)
    def forward(self, x):
        return self.fc(x * self.table)
'''


def test_buffers_outside_the_state_dict_come_out_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hapi_test_buffers.py").write_text(BUFFERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ModelSpec(architecture="hapi_test_buffers:Filled", input_shape=(4,))
    store = LocalStore(str(tmp_path / "store"))
    model = build(spec, allow_import=True)
    push(store, "net", model, spec)
    with pytest.raises(ModelError, match="not allowed"):
        open_model(store, "net").layered()
    stored = open_model(store, "net")
    again = stored.layered(allow_import=True)
    stored.load(again, 0, len(again))
    assert torch.equal(again.tensors.get("table"), torch.arange(4.0))
    reference = store_reference(stored, again, 1)
    with pytest.raises(ModelError, match="not allowed"):
        loaded_front(reference, 1, store)
    assert loaded_front(reference, 1, store, ["hapi_test_buffers:Filled"]).resident_bytes() == 16


FREQUENCIES = """
import torch
from torch import nn

class Frequencies(nn.Module):
    def __init__(self):
        super().__init__()
        self.freq = torch.randn(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x):
        return self.two(torch.{between}(self.one(x * self.freq)))
"""


def test_a_tensor_that_is_a_plain_attribute_is_that_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hapi_test_plain.py").write_text(FREQUENCIES.format(between="relu"))
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ModelSpec(architecture="hapi_test_plain:Frequencies", input_shape=(4,), weights="random:7")
    model, store = build(spec, allow_import=True), LocalStore(str(tmp_path / "store"))
    x = torch.rand(2, 4)
    front = loaded_front(zoo_reference(spec, model, 2), 2, store, ["hapi_test_plain"])
    assert torch.equal(front.segment(0, 2, frozen=True)(x), model.segment(0, 2, frozen=True)(x))
    # A pushed model is made again from another seed: what is in no file does not come out as it was.
    stored = push(store, "net", model, spec).model
    with pytest.raises(ConflictError, match=r"no longer makes layer 1 \(mul\) .*register it as a buffer"):
        stored.layered(allow_import=True)
    with pytest.raises(ConflictError, match="no longer makes layer 1"):
        stored.prefix_structure((4,), True)


UNTRACEABLE = """
import torch
from torch import nn

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = {table}
    def forward(self, x):
        return x * self.table if x.shape[1] == 4 else x  # what torch.fx cannot decide

def net():
    return nn.Sequential(nn.Linear(4, 4), Table(), nn.Linear(4, 3))
"""


@pytest.mark.slow
def test_a_tensor_of_what_cannot_be_traced_is_that_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, table in (
        ("filled", "torch.empty(4).fill_(3.0)"),
        ("other", "torch.empty(4).fill_(2.0)"),
        ("random", "torch.randn(4)"),
    ):
        (tmp_path / f"hapi_test_{name}.py").write_text(UNTRACEABLE.format(table=table))
    monkeypatch.syspath_prepend(str(tmp_path))
    store = LocalStore(str(tmp_path / "store"))
    x, built = torch.rand(2, 4), {}
    for name in ("filled", "other", "random"):
        spec = ModelSpec(architecture=f"hapi_test_{name}:net", input_shape=(4,), weights="random:7")
        built[name] = model = build(spec, allow_import=True)
        front = loaded_front(zoo_reference(spec, model, 2), 2, store, [f"hapi_test_{name}"])
        assert torch.equal(front.segment(0, 2, frozen=True)(x), model.segment(0, 2, frozen=True)(x))
        push(store, name, model, spec)
    assert built["filled"].prefix_digest(1) == built["other"].prefix_digest(1)
    assert built["filled"].prefix_digest(2) != built["other"].prefix_digest(2)

    stored = open_model(store, "filled")
    again = stored.layered(allow_import=True)
    stored.load(again, 0, 3)
    assert torch.equal(again.segment(0, 3, frozen=True)(x), built["filled"].segment(0, 3, frozen=True)(x))
    with pytest.raises(ConflictError, match=r"no longer makes layer 2 \(1\) .*register it as a buffer"):
        open_model(store, "random").layered(allow_import=True)


def test_a_pushed_model_whose_code_has_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, between in (("hapi_test_before", "relu"), ("hapi_test_after", "tanh")):
        (tmp_path / f"{name}.py").write_text(FREQUENCIES.format(between=between))
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ModelSpec(architecture="hapi_test_before:Frequencies", input_shape=(4,), blocks=("one", "two"))
    store = LocalStore(str(tmp_path / "store"))
    stored = push(store, "net", build(spec, allow_import=True), spec).model
    assert stored.layered(allow_import=True, num_classes=5).output_shapes()[-1] == (5,)
    changed = replace(spec, architecture="hapi_test_after:Frequencies")
    other = StoredModel(store, replace(stored.manifest, spec=changed))
    with pytest.raises(ConflictError, match=r"Frequencies no longer makes layer 2 \(two\) as it was pushed"):
        other.layered(allow_import=True)


def test_tied_and_half_precision_tensors_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hapi_test_tied.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "        self.two.weight = self.one.weight\n"
        "        self.register_buffer('brief', torch.ones(3, dtype=torch.bfloat16))\n"
        "        self.register_buffer('none', torch.empty(0))\n"
        "        self.register_buffer('flag', torch.tensor([True, False]))\n"
        "    def forward(self, x):\n"
        "        return self.two(self.one(x)) + self.brief.float().sum() + self.none.sum() + self.flag.sum()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ModelSpec(architecture="hapi_test_tied:Tied", input_shape=(4,), weights="random:2")
    store = LocalStore(str(tmp_path / "store"))
    model = build(spec, allow_import=True)
    stored = push(store, "net", model, spec).model
    held = [load_file(pack) for pack in tmp_path.glob("store/repository/packs/*.safetensors")]
    assert torch.bfloat16 in {tensor.dtype for tensors in held for tensor in tensors.values()}
    again = stored.layered(allow_import=True)
    stored.load(again, 0, len(again))
    assert again.module.two.weight is again.module.one.weight
    x = torch.rand(2, 4)
    assert torch.equal(again.module(x), model.module(x))


def test_blocks_of_an_untraceable_model_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hapi_test_blocks.py").write_text(
        "from torch import nn\n"
        "class Root(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x)) if bool((x == x).all()) else x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ModelSpec(architecture="hapi_test_blocks:Root", input_shape=(4,), blocks=("a", "b"))
    store = LocalStore(str(tmp_path / "store"))
    model = build(spec, allow_import=True)
    stored = push(store, "net", model, spec).model
    client = stored.layered(allow_import=True)
    front = loaded_front(store_reference(stored, client, 1), 1, store, ["hapi_test_blocks"])
    x = torch.rand(2, 4)
    assert torch.equal(front.segment(0, 1, frozen=True)(x), model.module.a(x))

"""Descriptions of pushed models by a server that lies: refused in one line, whatever they say, and cheaply."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hapi.client.models import open_client_model
from hapi.client.settings import ModelSettings
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import HapiError
from hapi.models.graph.digest import content_digest
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.push import push
from hapi.repository.versions import document_checksum
from hapi.store.open import open_store
from hapi.wire.frames import Buffer
from hapi.wire.transport.http import LoopbackTransport

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The description of a model as an honest server gives it."""
    spec = ModelSpec(architecture="resnet18", num_classes=4, weights="random:3", input_shape=(3, 32, 32))
    stored = push(open_store(str(tmp_path_factory.mktemp("models"))), "mine", build(spec), spec).model
    structure = stored.manifest.structure.to_json()
    return {**stored.manifest.to_json(), "structure": structure}


def opened(document: dict[str, Any], classes: int = 4) -> None:
    """As hapi-train opens it; digest and checksum fit, as a liar's would."""
    structure = document.get("structure")
    text = json.dumps(structure, separators=(",", ":"), ensure_ascii=True)
    document["structure"] = content_digest(text.encode())
    document["checksum"] = document_checksum(document)

    def handler(method: str, path: str, asked: bytes) -> tuple[int, dict[str, str], Iterator[Buffer]]:
        return 200, {}, iter([text.encode() if "structures" in path else json.dumps(document).encode()])

    settings = ModelSettings(model="store:mine")
    model = open_client_model(
        settings, ServerPool([LoopbackTransport(handler)]), None, seed=0, classes=classes, shape=(3, 32, 32)
    )
    model.layered.prefix_digest(2)


def form(document: dict[str, Any], tensor: str, **changes: Any) -> None:
    """Change a tensor's name, type or shape."""
    (found,) = [entry for entry in document["structure"]["tensors"] if entry[0] == tensor]
    found[:] = [changes.get(key, old) for key, old in zip(("name", "dtype", "shape"), found, strict=True)]


def layers(document: dict[str, Any], found: list[Any]) -> None:
    """Give the model these layers, and digests and identities for them."""
    document["structure"].update(layers=found, identities=["0" * 32] * (len(found) + 1))
    document.update(digests=["0" * 32] * (len(found) + 1), contents=["0" * 32] * (len(found) + 1))


HUGE = (1 << 31) - 1
CHANGES: dict[str, Change] = {
    "classes of gigabytes": lambda d: d.update(classes=HUGE),
    "head of terabytes": lambda d: (d.update(classes=HUGE), form(d, "fc.weight", shape=[HUGE, 512]),
                                    form(d, "fc.bias", shape=[HUGE])),
    "tensor of exabytes": lambda d: form(d, "conv1.weight", shape=[1 << 40] * 16),
    "another type": lambda d: form(d, "conv1.weight", dtype="int64"),
    "a type that is none": lambda d: form(d, "conv1.weight", dtype="object"),
    "no tensors": lambda d: (d.update(tensors=[]), d["structure"].update(tensors=[]),
                             [la[2].clear() for la in d["structure"]["layers"]]),
    "other layers": lambda d: d["structure"]["layers"][3].__setitem__(0, "\x1b[2Jevil"),
    "very many layers": lambda d: layers(d, d["structure"]["layers"] * 2000),
    "no layers": lambda d: layers(d, []),
    "too few identities": lambda d: d["structure"]["identities"].pop(),
    "an identity that is none": lambda d: d["structure"]["identities"].insert(0, ["0" * 32]),
    "identities of something else": lambda d: d["structure"].update(identities="0" * 15),
    "contents of something else": lambda d: d.update(contents="0" * len(d["contents"])),
    "another structure": lambda d: d.update(structure="\x1b[2J"),
    "two tensors of one name": lambda d: form(d, "fc.weight", name="fc.bias"),
    "a tensor without a place": lambda d: d["tensors"][3].pop(),
    "a pack that is none": lambda d: d["packs"].__setitem__(0, "../../x"),
    "a pack beyond": lambda d: d["tensors"][3].__setitem__(2, 99),
    "other digests": lambda d: d.update(digests=["0" * 32] * len(d["digests"])),
    "an architecture that is none": lambda d: d["spec"].update(architecture="\x1b[2J../x"),
    "a factory": lambda d: d["spec"].update(architecture="os:system"),
    "another architecture": lambda d: d["spec"].update(architecture="vgg11"),
    "inputs of petabytes": lambda d: d["spec"].update(input_shape=[3, 65_536, 65_536]),
    "blocks without end": lambda d: d["spec"].update(blocks=["layer1"] * 100_000),
    "a freeze beyond": lambda d: d.update(default_freeze=99),
    "a name that is none": lambda d: d.update(name="../../etc"),
    "offsets beyond": lambda d: [t.__setitem__(3, 1 << 62) for t in d["tensors"]],
    "negative shapes": lambda d: form(d, "conv1.weight", shape=[-1, 3, 7, 7]),
    "floats": lambda d: form(d, "conv1.weight", shape=[64.0, 3, 7, 7]),
}  # fmt: skip
HARMLESS = ("inputs of petabytes", "offsets beyond", "head of terabytes")
"""The client has its own inputs and head, and no file of its own to look into."""


@pytest.mark.slow_cases("classes of gigabytes", "very many layers")
@pytest.mark.parametrize("name", CHANGES)
def test_descriptions_that_lie(name: str, described: dict[str, Any]) -> None:
    document = copy.deepcopy(described)
    CHANGES[name](document)
    if name in HARMLESS:
        opened(document)
        return
    with pytest.raises(HapiError) as caught:
        opened(document)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 4500


def test_an_honest_one_is_opened(described: dict[str, Any]) -> None:
    opened(copy.deepcopy(described))


def test_a_head_that_no_machine_trains(described: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.client.soundness.free_bytes", lambda device: 4 << 30)
    with pytest.raises(HapiError, match=r"1000000 classes.*head of resnet18"):
        opened(copy.deepcopy(described), classes=1_000_000)


def test_what_is_no_description() -> None:
    for document in ({}, {"format": 1}, {"layers": None}, {"\x1b": 1}):
        with pytest.raises(HapiError) as caught:
            opened(dict(document))
        assert str(caught.value).isprintable()


def test_the_path_is_a_name(tmp_path: Path) -> None:
    settings = ModelSettings(model="store:../../x")
    with pytest.raises(HapiError, match="is not a name"):
        open_client_model(settings, ServerPool([LoopbackTransport(lambda *a: (200, {}, iter([])))]), None,
                          seed=0, classes=4, shape=(3, 32, 32))  # fmt: skip

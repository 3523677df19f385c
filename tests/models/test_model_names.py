"""Names of architectures and weights, checked from the libraries' sources, and a hub that cannot be reached."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchvision import models

from hapi.errors import HapiError, ModelChoiceError, ModelError, UsageError
from hapi.models.zoo import hub
from hapi.models.zoo.architectures import torchvision_names
from hapi.models.zoo.names import (
    check_model,
    check_weights,
    could_be_layer,
    weights_names,
    with_seed,
)
from hapi.models.zoo.names import torchvision_names as names_from_source


@pytest.mark.slow
def test_the_source_names_what_torchvision_does() -> None:
    assert list(names_from_source()) == torchvision_names()
    for name in torchvision_names():
        known = [known for known in models.get_model_weights(name).__members__ if known != "DEFAULT"]
        assert list(weights_names(name)) == known
        check_model(name)


@pytest.mark.parametrize("name", ["transformer", "package.module:factory", "resnet18"])
def test_models_that_may_be_there(name: str) -> None:
    check_model(name)


def test_unknown_models() -> None:
    with pytest.raises(ModelChoiceError, match="unknown architecture 'resnet81'; did you mean resnet18"):
        check_model("resnet81")
    with pytest.raises(ModelChoiceError, match="use a torchvision name such as"):
        check_model("xyzzy")
    with pytest.raises(ModelChoiceError, match="is not an architecture's name"):
        check_model("my network")
    with pytest.raises(ModelChoiceError, match="timm"):
        check_model("timm:no_such_model")


def test_weights(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    files = (str(tmp_path), str(tmp_path / "w.pth"))
    for good in ("auto", "random", "random:7", "DEFAULT", "IMAGENET1K_V1", *files):
        check_weights("resnet18", good)
    check_weights("transformer", "IMAGENET1K_SWAG_E2E_V1")
    for wrong, said in (
        ("IMAGENET1K_V3", "resnet18 has no such weights; it has DEFAULT, IMAGENET1K_V1 "),
        (str(tmp_path / "none.pth"), "none.pth: there is no such file"),
        (
            f"{tmp_path}/empty",
            "empty has no checkpoint: no file ends with .safetensors.index.json, .safetensors",
        ),
        ("x" * 300 + ".pth", "cannot be read"),
        ("random:x", "random:0"),
    ):
        with pytest.raises(HapiError, match=said) as caught:
            check_weights("resnet18", wrong)
        assert isinstance(caught.value, UsageError | ModelError)
    assert with_seed("random", 3) == "random:3" and with_seed("random:1", 3) == "random:1"


def test_layers_that_surely_are_none() -> None:
    for name in ("layer1.0", "conv1", "getitem_3", "features.0", "cat", "add_12"):
        assert could_be_layer("resnet18", name)
    assert not could_be_layer("resnet18", "nonsense") and could_be_layer("own:factory", "nonsense")


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The switch of the hub's library, whether that is installed or not."""
    module = SimpleNamespace(HF_HUB_OFFLINE=False, ENDPOINT="")
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(constants=module))
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", module)
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    yield module


def test_a_hub_that_does_not_answer_is_not_asked_again(constants: SimpleNamespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (1, silent.getsockname()[1]):
            constants.ENDPOINT = f"http://127.0.0.1:{port}"
            with hub.without_retries():
                assert constants.HF_HUB_OFFLINE
            assert not constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    with hub.without_retries():
        assert constants.HF_HUB_OFFLINE
    assert constants.HF_HUB_OFFLINE

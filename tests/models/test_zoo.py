"""Models by name: architectures, weights, heads."""

from __future__ import annotations

import importlib
import importlib.util
import socket
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from hapi.errors import BadRequestError, ModelChoiceError, ModelError, WeightsAbsentError
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.zoo.build import ModelSpec, build, structure
from hapi.models.zoo.head import retarget
from hapi.repository.sources.networks import build_network

FACTORIES = """
import torch
from torch import nn
def plain():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))
def with_classes(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, num_classes))
def computes():
    layer = nn.Linear(12, 3)
    scale = float(layer.weight.abs().max())      # needs real numbers: no meta device
    return nn.Sequential(nn.Flatten(), layer, nn.Hardtanh(-scale, scale))

class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        table = torch.empty(4)
        table.fill_(2.5)
        self.register_buffer("table", table, persistent=False)
        self.attribute = torch.empty(4).fill_(0.5)
        self.fc = nn.Linear(4, 2)
    def forward(self, x):
        return self.fc(x.flatten(1)[:, :4] * self.table + self.attribute)
def needs(width):
    return nn.Linear(width, 2)
def broken():
    raise ValueError("no such file: weights.bin")

number = 3
def not_a_module():
    return 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "hapi_test_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "hapi_test_factories"


def spec(architecture: str = "squeezenet1_1", **more: object) -> ModelSpec:
    return ModelSpec(**{"architecture": architecture, "input_shape": (3, 32, 32), **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet51", "unknown architecture 'resnet51'; did you mean resnet50"),
        ("transfomer", "did you mean transformer"),
        ("zzz", "use a torchvision name such as resnet50"),
        ("../x", "is not an architecture's name"),
        ("os:system", "importing 'os:system' is not allowed here; .*--allow-model os:system"),
    ],
)
def test_unknown_architectures(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(spec(name))


def test_random_weights_are_torchs_own_and_leave_the_generator_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    model = build(spec(weights="random:7"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    plain = torchvision.models.squeezenet1_1()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], value)


@pytest.mark.slow
def test_the_front_is_the_same_for_every_number_of_classes() -> None:
    one, two = build(spec(num_classes=10)), build(spec(num_classes=3, head_seed=9))
    head = {"classifier.1.weight", "classifier.1.bias"}
    assert one.fresh == two.fresh == head
    for name in set(one.tensors.names()) - head:
        assert torch.equal(one.tensors.get(name), two.tensors.get(name))
    assert one.output_shapes()[-1] == (10,) and two.output_shapes()[-1] == (3,)
    again = build(spec(num_classes=10))
    assert torch.equal(again.tensors.get("classifier.1.weight"), one.tensors.get("classifier.1.weight"))
    other = build(spec(num_classes=10, head_seed=1))
    assert not torch.equal(other.tensors.get("classifier.1.weight"), one.tensors.get("classifier.1.weight"))


@pytest.mark.slow_except("resnet18-fc")
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        pytest.param("densenet121", "classifier", marks=pytest.mark.long),
        ("mobilenet_v3_small", "classifier.3"),
        pytest.param("swin_t", "head", marks=pytest.mark.slow),
    ],
)
def test_heads_are_found(name: str, head: str) -> None:
    assert build(spec(name, num_classes=5)).fresh == {f"{head}.weight", f"{head}.bias"}


def test_a_factory_of_the_user(factories: str) -> None:
    name = f"{factories}:plain"
    model = build(spec(name, num_classes=6), allow_import=True)
    assert model.output_shapes()[-1] == (6,) and not model.fresh  # it has the right number already
    assert build(spec(name, num_classes=4), allow_import=[name]).output_shapes()[-1] == (4,)
    assert build(spec(name), allow_import=[factories]).output_shapes()[-1] == (6,)
    with pytest.raises(ModelError, match="not allowed"):
        build(spec(name), allow_import=["other:plain"])


def test_a_factory_that_wants_the_number_of_classes(factories: str) -> None:
    shape = (3, 2, 2)
    ten = build(spec(f"{factories}:with_classes", num_classes=10, input_shape=shape), allow_import=True)
    two = build(spec(f"{factories}:with_classes", num_classes=2, input_shape=shape), allow_import=True)
    assert ten.output_shapes()[-1] == (10,)
    assert torch.equal(ten.tensors.get("1.weight"), two.tensors.get("1.weight"))


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("missing", "cannot be imported: there is no 'missing' in hapi_test_factories"),
        ("needs", "needs the argument 'width'"),
        ("broken", r"cannot be built: ValueError: no such file: weights.bin at .*hapi_test_factories.py:\d+"),
        ("number", "is a int, not a function or class"),
        ("not_a_module", "returned a int, not a torch.nn.Module"),
    ],
)
def test_factories_that_do_not_work(factories: str, attribute: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(spec(f"{factories}:{attribute}"), allow_import=True)
    with pytest.raises(
        ModelError, match="'no_such_module:f' cannot be imported: there is no module 'no_such_module'"
    ):
        build(spec("no_such_module:f"), allow_import=True)


@pytest.mark.parametrize("make", [build, structure])
def test_what_is_no_model_is_named(factories: str, make: Callable[..., LayeredModel]) -> None:
    with pytest.raises(ModelChoiceError, match="returned a int, not a torch"):
        make(spec(f"{factories}:not_a_module"), allow_import=True)


@pytest.mark.usefixtures("factories")
def test_a_module_that_needs_what_is_not_installed(tmp_path: Path) -> None:
    """It has the right name, so it is no wrong choice of the user's."""
    (tmp_path / "hapi_test_needy.py").write_text("import no_such_library\n")
    with pytest.raises(
        ModelError, match="cannot be imported: ModuleNotFoundError: No module named 'no_such_lib"
    ) as e:
        build(spec("hapi_test_needy:f"), allow_import=True)
    assert type(e.value) is ModelError


@pytest.mark.slow
def test_a_structure_has_no_weights_but_all_that_the_constructor_computes(factories: str) -> None:
    model = structure(spec("resnet18"))
    assert all(p.is_meta for p in model.module.parameters())
    swin = structure(spec("swin_t"))
    real = build(spec("swin_t"))
    tables = [n for n in real.tensors.names() if n.endswith("relative_position_index")]
    assert tables
    for name in tables:
        assert torch.equal(swin.tensors.get(name), real.tensors.get(name))
    computes = structure(spec(f"{factories}:computes", input_shape=(3, 2, 2)), allow_import=True)
    assert not computes.tensors.get("1.weight").is_meta  # it was built for real, since it had to be
    own = structure(spec(f"{factories}:Tables", input_shape=(1, 2, 2)), allow_import=True)
    assert torch.equal(own.traced.constants["attribute"], torch.full((4,), 0.5))


@pytest.mark.slow
def test_checkpoints_of_all_forms(tmp_path: Path) -> None:
    source = build(spec(weights="random:5")).module
    state = source.state_dict()
    forms = {
        "plain.pth": state,
        "nested.pth": {"state_dict": state, "epoch": 3},
        "model.pt": {"model": state},
        "ddp.pth": {f"module.{k}": v for k, v in state.items()},
    }
    for name, content in forms.items():
        torch.save(content, tmp_path / name)
    save_file(state, tmp_path / "plain.safetensors")
    for name in [*forms, "plain.safetensors"]:
        loaded = build_network(spec(weights=str(tmp_path / name)))
        assert all(torch.equal(v, state[k]) for k, v in loaded.module.state_dict().items()), name


@pytest.mark.slow
def test_a_checkpoint_with_another_number_of_classes(tmp_path: Path) -> None:
    state = build(spec(num_classes=10, weights="random:5")).module.state_dict()
    path = str(tmp_path / "ten.pth")
    torch.save(state, path)
    kept = build_network(spec(weights=path))  # no number asked for: the checkpoint's head
    assert kept.output_shapes()[-1] == (10,)
    assert torch.equal(kept.tensors.get("classifier.1.weight"), state["classifier.1.weight"])
    same = build_network(spec(weights=path, num_classes=10))
    assert (
        torch.equal(same.tensors.get("classifier.1.weight"), state["classifier.1.weight"]) and not same.fresh
    )
    other = build_network(spec(weights=path, num_classes=4))
    assert other.output_shapes()[-1] == (4,) and other.fresh
    assert torch.equal(other.tensors.get("features.0.weight"), state["features.0.weight"])


@pytest.mark.slow
def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    state = dict(build(spec()).module.state_dict())
    path = tmp_path / "x.pth"

    def saved(content: object) -> ModelSpec:
        torch.save(content, path)
        return spec(weights=str(path))

    wrong = {k: v for k, v in state.items() if k != "features.0.bias"} | {"extra.weight": torch.zeros(1)}
    with pytest.raises(
        ModelError, match=r"missing features\.0\.bias; unexpected extra\.weight \(1 missing, 1 unexp"
    ):
        build_network(saved(wrong))
    with pytest.raises(ModelError, match="size mismatch for features"):
        build_network(saved(state | {"features.0.bias": torch.zeros(3)}))
    with pytest.raises(ModelError, match="holds no state dict"):
        build_network(saved({"a": 3}))
    with pytest.raises(ModelError, match=r"holds more than tensors.*save model\.state_dict\(\)") as refused:
        build_network(saved(nn.Linear(2, 2)))  # a pickled module would run code
    assert "weights_only" not in str(refused.value)  # torch's advice to run it all the same
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match="is damaged, or no checkpoint"):
        build_network(spec(weights=str(path)))
    path = path.with_suffix(".safetensors")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match="is no safetensors file"):
        build_network(spec(weights=str(path)))
    with pytest.raises(ModelError, match="does not exist"):
        build_network(spec(weights="/nowhere/x.safetensors"))
    with pytest.raises(ModelError, match="not allowed here"):
        build(spec(weights=str(path)))


def test_weights_names_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"has no weights 'IMAGENET'; it has DEFAULT, IMAGENET1K_V1"):
        build(spec(weights="IMAGENET"))
    with pytest.raises(ModelError, match="write random:SEED"):
        build(spec(weights="random:x"))

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", offline)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(
        ModelError, match=r"cannot be downloaded \(Name or service not known\); give a local file"
    ):
        build(spec(weights="IMAGENET1K_V1"))


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (PermissionError(13, "Permission denied", "{home}/hub/checkpoints"), "Permission denied"),
        (RuntimeError("{home}/hub/a.pth: invalid hash\nmore"), "TORCH_HOME/a.pth: invalid hash"),
        (URLError(OSError(-2, "Name or service not known")), "Name or service not known"),
        (HTTPError("https://x", 403, "Forbidden", Message(), None), "HTTP Error 403: Forbidden"),
        (EOFError(), "EOFError"),
    ],
)  # fmt: skip
def test_failed_downloads_name_no_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str
) -> None:
    """A client of the server is told so too, and the server's folders are none of its business."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    if isinstance(failure, RuntimeError):
        failure = RuntimeError(str(failure).format(home=tmp_path))
    if isinstance(failure, PermissionError):
        failure.filename = str(failure.filename).format(home=tmp_path)

    def failing(*args: object, **kwargs: object) -> None:
        raise failure

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", failing)
    with pytest.raises(ModelError) as caught:
        build(spec(weights="IMAGENET1K_V1"))
    assert f"({reason})" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_silent_server_of_weights_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever builds for others must not wait for it for ever."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("hapi.models.zoo.weights.DOWNLOAD_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.pth"
        load = torchvision.models._api.load_state_dict_from_url
        monkeypatch.setattr(
            "torchvision.models._api.load_state_dict_from_url", lambda _, **kwargs: load(url, **kwargs)
        )
        with pytest.raises(ModelError, match=r"cannot be downloaded \(timed out\); give a local file"):
            build(spec(weights="IMAGENET1K_V1"))
    assert socket.getdefaulttimeout() is None


def test_downloaded_weights_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    name = Path(torchvision.models.get_model_weights(spec().architecture)["IMAGENET1K_V1"].url).name
    cached = tmp_path / "hub" / "checkpoints" / name
    cached.parent.mkdir(parents=True)
    torch.save({"fc.bias": Path("anything but a tensor")}, cached)
    with pytest.raises(ModelError, match="Weights only load failed"):
        build(spec(weights="IMAGENET1K_V1"))


def test_named_weights_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = build(spec(weights="random:8")).module.state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *a, **k: dict(state))
    loaded = build(spec(weights="DEFAULT"))
    assert all(torch.equal(v, state[k]) for k, v in loaded.module.state_dict().items())


@pytest.mark.slow
def test_googlenet_with_its_own_weights_transforms_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torchvision.models.googlenet(aux_logits=True, init_weights=False).state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *a, **k: dict(state))
    named = build(spec("googlenet", weights="DEFAULT"))  # the auxiliary heads' tensors are left out
    assert named.module.transform_input is True and named.module.aux1 is None
    assert torch.equal(named.tensors.get("conv1.conv.weight"), state["conv1.conv.weight"])
    assert structure(spec("googlenet")).module.transform_input is False


@pytest.mark.slow
def test_old_densenet_names_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    state = build(spec("densenet121")).module.state_dict()
    old = {k.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): v for k, v in state.items()}
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *a, **k: dict(old))
    loaded = build(spec("densenet121", weights="DEFAULT"))
    assert all(torch.equal(v, state[k]) for k, v in loaded.module.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), [("timm:resnet10t", 32), ("timm:vit_tiny_patch16_224", 32)])
def test_timm_models(name: str, side: int) -> None:
    model = build(spec(name, input_shape=(3, side, side), num_classes=4))
    x = torch.rand(2, 3, side, side)
    model.module.eval()
    with torch.no_grad():
        whole = model.module(x)
    split = len(model) // 2
    out = model.segment(split, len(model), frozen=True)(model.segment(0, split, frozen=True)(x))
    assert torch.equal(out, whole)


@pytest.mark.slow
def test_timm_errors() -> None:
    with pytest.raises(ModelError, match="timm has no model 'resnet10x'; did you mean resnet10"):
        build(spec("timm:resnet10x"))
    with pytest.raises(ModelError, match="timm names weights in the model"):
        build(spec("timm:resnet10t", weights="IMAGENET1K_V1"))
    with pytest.raises(ModelError, match=r"timm has no weights 'resnet10t.bogus': Invalid pretrained tag"):
        build(spec("timm:resnet10t.bogus"))


@pytest.mark.slow
def test_timm_fits_its_weights_to_the_input_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = importlib.import_module("timm")
    name = "vit_tiny_patch16_224"
    stored = timm.create_model(name, img_size=48).state_dict()
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *a, **k: dict(stored))
    before = torch.get_rng_state()
    loaded = build(spec(f"timm:{name}", weights="DEFAULT"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(loaded.tensors.get("blocks.3.attn.qkv.weight"), stored["blocks.3.attn.qkv.weight"])
    assert stored["pos_embed"].shape == (1, 10, 192) and loaded.tensors.get("pos_embed").shape == (1, 5, 192)


@pytest.mark.parametrize(
    ("failure", "expected", "message"),
    [
        (
            OSError(-2, "Name or service not known"),
            WeightsAbsentError,
            r"cannot be fetched \(Name or service",
        ),
        (RuntimeError("size mismatch for a.b"), ModelError, r"cannot be used at this input shape \(size mis"),
    ],
)
def test_timm_weights_that_do_not_come_and_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, expected: type[ModelError], message: str
) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise failure

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", failing)
    with pytest.raises(ModelError, match=message) as caught:
        build(spec("timm:resnet10t", weights="DEFAULT"))
    assert type(caught.value) is expected


def test_only_weights_that_nobody_has_are_absent(factories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then may a trainer take random ones instead."""
    with pytest.raises(WeightsAbsentError, match="has no weights called 'DEFAULT'"):
        build(spec(f"{factories}:plain", weights="DEFAULT"), allow_import=True)
    state = {"features.0.bias": torch.zeros(3)}
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *a, **k: dict(state))
    with pytest.raises(ModelError, match="does not fit") as caught:
        build(spec(weights="DEFAULT"))
    assert type(caught.value) is ModelError


def test_without_timm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(
        ModelError, match="needs timm, which is not installed: pip install 'hapi-split\\[timm\\]'"
    ):
        build(spec("timm:resnet18"))


@pytest.mark.parametrize(
    "change",
    [
        {"num_classes": 0},
        {"num_classes": True},
        {"num_classes": "7"},
        {"architecture": 3},
        {"weights": ""},
        {"blocks": "a"},
        {"blocks": [1]},
        {"input_shape": [3, -1, 2]},
        {"input_shape": 224},
        {"head_seed": -1},
        {"surprise": 1},
    ],
)
def test_documents_are_read_strictly(change: dict[str, object]) -> None:
    good = spec(blocks=("a", "b"), num_classes=3).to_json()
    assert ModelSpec.from_json(good) == spec(blocks=("a", "b"), num_classes=3)
    with pytest.raises(BadRequestError):
        ModelSpec.from_json({**good, **change})


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
        max_leaves=10,
    )
)
def test_any_document_is_refused_cleanly(document: object) -> None:
    with pytest.raises(BadRequestError):
        ModelSpec.from_json(document)


def test_impossible_specs() -> None:
    for change in ({"num_classes": 0}, {"input_shape": ()}, {"input_shape": (3, 0, 1)}):
        with pytest.raises(ModelError):
            spec(**change)


class _TwoHeads(nn.Module):
    """Means of two heads, as of distilled networks."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.first, self.second = nn.Flatten(), nn.Linear(48, 10), nn.Linear(48, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inputs = self.flatten(images)
        return (self.first(inputs) + self.second(inputs)) / 2


def test_a_network_with_several_heads_is_told() -> None:
    def relayered(module: nn.Module) -> LayeredModel:
        return layered(module, (3, 4, 4))

    with pytest.raises(ModelError, match=r"second was made for 3 classes, .* several heads, name a factory"):
        retarget(relayered(_TwoHeads()), 3, 0, relayered)

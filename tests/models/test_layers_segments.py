"""Slices of models: they compose to the whole, share its parameters, and stay in the mode they must be in."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from hapi.errors import ModelError, UsageError
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.zoo.freeze import choose_freeze
from hapi.models.zoo.head import retarget

# The very same operations on the same tensors in the same order: bit-equal on one machine.
EXACT = 0.0


class Residual(nn.Module):
    """In-place ReLUs on both sides of an addition, functional dropout, plain values that cross cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.full((1, 8, 1, 1), 1.5))
        self.fc = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = x.shape
        x = self.relu(self.bn1(self.conv1(x)))
        shortcut = x * torch.sigmoid(self.scale)
        x = self.relu(self.conv2(x))
        shortcut += x
        x = F.relu_(shortcut)
        x = F.dropout(x, 0.5, self.training)
        x = F.adaptive_avg_pool2d(x, (height // 2, width // 2))
        x = x.view(batch, -1)
        return self.fc(F.dropout(x, 0.25, self.training))


def sample(model: LayeredModel, n: int = 3) -> torch.Tensor:
    return torch.rand(n, *model.input_shape, generator=torch.Generator().manual_seed(1))


def warmed(module: nn.Module, side: int) -> nn.Module:
    """Give BatchNorm statistics that are not the initial ones."""
    generator = torch.Generator().manual_seed(2)
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.uniform_(-0.2, 0.2, generator=generator)
            m.running_var.uniform_(0.5, 1.5, generator=generator)
    return module


@cache
def model_of(name: str) -> LayeredModel:
    torch.manual_seed(0)
    if name == "residual":
        return layered(warmed(Residual(), 8), (3, 8, 8))
    side = {"alexnet": 64, "transformer": 32}.get(name, 32)
    options = {"image_size": side} if name == "transformer" else {}
    real = "vit_b_16" if name == "transformer" else name
    if name == "transformer":  # the same code with a small width
        module: nn.Module = torchvision.models.VisionTransformer(side, 16, 12, 2, 16, 32, num_classes=7)
    else:
        module = torchvision.models.get_model(real, num_classes=7, **options)
    return layered(warmed(module, side), (3, side, side), architecture=real)


SMALL = [
    "residual",
    "resnet18",
    "alexnet",
    "transformer",
    "squeezenet1_1",
    "mobilenet_v3_small",
]


@pytest.mark.long_cases("mobilenet_v3_small")
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_front_then_back_is_the_whole_at_every_split(name: str) -> None:
    model = model_of(name)
    x = sample(model)
    model.module.eval()
    with torch.no_grad():
        whole = model.module(x.clone())
    before = x.clone()
    for split in range(len(model) + 1):
        middle = model.segment(0, split, frozen=True)(x)
        assert tuple(middle.shape[1:]) == model.output_shapes()[split]
        assert middle.dtype == model.output_dtypes()[split]
        kept = middle.clone()
        back = model.segment(split, len(model), frozen=True)(middle)
        assert (back - whole).abs().max().item() <= EXACT
        assert torch.equal(x, before), f"the front changed its input at split {split}"
        assert torch.equal(middle, kept), f"the back changed its input at split {split}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "resnet18"])
def test_gradients_and_statistics_of_the_trained_part_are_those_of_the_whole(name: str) -> None:
    model = model_of(name)
    x, target = sample(model, 4), torch.tensor([0, 1, 2, 3])
    for freeze in range(1, len(model), 3):
        reference = copy.deepcopy(model.module).train()
        twin = model.over(reference)
        expected = copy.deepcopy(reference)
        frozen_names = set(twin.tensor_names(0, freeze))
        for path, m in expected.named_modules():
            m.training = not any(n.startswith(path + ".") for n in frozen_names) if path else True
        if name == "residual" and freeze >= 5:
            continue  # dropout lies in the frozen part then; whole modules cannot say so
        front, back = twin.segment(0, freeze, frozen=True), twin.segment(freeze, len(twin))
        torch.manual_seed(5)
        F.cross_entropy(back(front(x)), target).backward()
        torch.manual_seed(5)
        F.cross_entropy(expected(x), target).backward()
        wanted = dict(expected.named_parameters())
        for parameter, tensor in back.named_parameters():
            torch.testing.assert_close(tensor.grad, wanted[parameter].grad, rtol=1e-5, atol=1e-7)
        for buffer, value in back.named_buffers():
            torch.testing.assert_close(value, dict(expected.named_buffers())[buffer], rtol=1e-6, atol=1e-7)
        assert all(p.grad is None for p in front.parameters() if not any(p is q for q in back.parameters()))


@pytest.mark.slow
def test_dropout_in_the_trained_part_is_the_wholes_under_the_same_seed() -> None:
    model = model_of("alexnet")
    x = sample(model)
    features = model.segment(0, 15, frozen=True)(x)
    back = model.segment(15, len(model)).train()
    model.module.train()
    torch.manual_seed(3)
    whole = model.module(x)
    torch.manual_seed(3)
    assert torch.equal(back(features), whole)
    back.eval()
    assert torch.equal(back(features), back(features))


def test_functional_dropout_follows_the_segments_mode() -> None:
    model = model_of("residual")
    split = model.resolve("add")
    middle = model.segment(0, split, frozen=True)(sample(model))
    back = model.segment(split, len(model))
    assert not torch.equal(back(middle), back(middle))
    back.eval()
    assert torch.equal(back(middle), back(middle))


def test_a_frozen_segment_cannot_be_put_in_train_mode() -> None:
    model = model_of("resnet18")
    x = sample(model)
    front = model.segment(0, 11, frozen=True)
    expected = front(x)
    statistics = model.tensors.get("bn1.running_mean").clone()
    model.module.train()
    front.train(True)
    nn.Sequential(front).train()
    for m in front.modules():
        m.training = True
    got = front(x)
    assert torch.equal(got, expected) and not got.requires_grad
    assert torch.equal(model.tensors.get("bn1.running_mean"), statistics)
    assert not any(m.training for m in front.modules() if m is not front)


def test_training_the_back_leaves_a_shared_module_of_the_front_in_eval_mode() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.two(self.drop(self.one(x))))

    model = layered(Shared(), (4,))
    assert [layer.name for layer in model.layers] == ["one", "drop", "two", "drop_1"]
    front, back = model.segment(0, 2, frozen=True), model.segment(2, 4).train()
    x = torch.rand(8, 4)
    assert torch.equal(front(x), front(x))
    assert not torch.equal(back(x), back(x))


def test_segments_share_parameters_and_carry_the_original_names() -> None:
    model = model_of("resnet18")
    back = model.segment(11, len(model))
    names = [n for n, _ in back.named_parameters()]
    assert names[0] == "layer4.1.conv1.weight" and names[-1] == "fc.bias" and len(names) == 8
    for name, tensor in back.state_dict(keep_vars=True).items():
        assert tensor is model.tensors.get(name)
    assert set(back.state_dict()) == {
        n for n in model.module.state_dict() if n.startswith(("layer4.1.", "fc."))
    }
    assert set(dict(model.segment(0, 11, frozen=True).named_parameters())).isdisjoint(names)


def test_a_loaded_or_moved_tensor_is_seen_by_a_frozen_segment() -> None:
    model = layered(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), (2,))
    front = model.segment(0, 2, frozen=True)
    x = torch.ones(2, 2)
    before = front(x)
    model.assign("0.bias", torch.full((2,), 9.0))
    model.assign("1.running_mean", torch.full((2,), 4.0))
    assert not torch.equal(front(x), before)
    assert front.double()(x.double()).dtype == torch.float64
    assert model.tensors.get("1.running_mean").dtype == torch.float64


def test_deepcopy_of_a_trained_segment_is_independent() -> None:
    model = layered(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (2,))
    back = model.segment(1, 2)
    twin = copy.deepcopy(back)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(twin(torch.ones(1, 2)), torch.zeros(1, 2))
    assert not torch.equal(back(torch.ones(1, 2)), torch.zeros(1, 2))


def test_batch_sizes_and_shapes_in_plain_values() -> None:
    model = model_of("residual")
    for n in (1, 2, 7):
        x = sample(model, n)
        for split in range(len(model)):
            out = model.segment(split, len(model), frozen=True)(model.segment(0, split, frozen=True)(x))
            assert out.shape == (n, 5)


def test_a_value_that_mixes_batch_and_shape_forbids_the_cut() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count = x.flatten().shape[0]  # batch times four, known from a tensor before the cut only
            y = x + 1
            z = y * 2
            return z.reshape(count).reshape(z.shape[0], -1)

    assert [cut.name for cut in layered(Mixed(), (4,)).cuts] == ["reshape"]


def test_values_made_of_the_shape_are_made_again_behind_the_cut() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count = x.shape[0] * x.shape[1]
            mask = torch.ones(count, device=x.device)
            return ((x + 1).reshape(count) * mask).reshape(x.size(0), -1)

    model = layered(Product(), (4,))
    assert [cut.name for cut in model.cuts] == ["add", "reshape"]
    for n in (1, 5):
        x = torch.rand(n, 4)
        middle = model.segment(0, 1, frozen=True)(x)
        assert torch.equal(model.segment(1, 2, frozen=True)(middle), x + 1)


def test_what_is_computed_from_the_batch_size_is_computed_again_not_remembered() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            few = x.shape[0] // 4  # 0 for the batches of 2 and 3 that the model is measured with
            return (x + 1) * 2 + few

    model = layered(Halves(), (4,))
    x = torch.rand(9, 4)
    middle = model.segment(0, 1, frozen=True)(x)
    assert torch.equal(model.segment(1, len(model), frozen=True)(middle), (x + 1) * 2 + 2)


def test_wrong_shape_is_refused_with_the_layers_named() -> None:
    model = model_of("resnet18")
    with pytest.raises(
        ModelError, match=r"layers 2 to 4 take samples of shape \[64, 16, 16\].*\[2, 64, 8, 8\]"
    ):
        model.segment(1, 4)(torch.rand(2, 64, 8, 8))
    with pytest.raises(ModelError, match="out of range"):
        model.segment(3, 2)


def test_a_parameter_on_both_sides_of_the_freeze_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.mid, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.mid(self.one(x)))

    model = layered(Tied(), (4,))
    with pytest.raises(ModelError, match=r"'one.weight' is used on both sides of layer 1"):
        model.check_freeze(1)
    model.check_freeze(0)
    model.assign("two.weight", torch.zeros(4, 4))
    assert model.module.one.weight is model.module.two.weight  # one tensor under all its names


def test_a_module_that_trains_nothing_is_refused_and_a_fresh_head_trains() -> None:
    """The usual factory for feature extraction switches every parameter off."""

    def off() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).requires_grad_(False)

    with pytest.raises(UsageError, match=r"after the freeze \(layer 1\) have requires_grad off"):
        choose_freeze(layered(off(), (4,)), 1)
    fresh = retarget(layered(off(), (4,)), 5, 0, lambda module: layered(module, (4,)))
    assert choose_freeze(fresh, 1) == 1
    assert all(p.requires_grad for p in fresh.module[2].parameters())


@pytest.mark.parametrize("name", ["start", "frozen", "_tree", "layers"])
def test_a_child_may_have_any_name(name: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(3, 3))
            self.last = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(getattr(self, name)(x))

    model = layered(Odd(), (3,))
    segment = model.segment(0, 2)
    assert segment.start == 0 and segment.frozen is False
    x = torch.rand(2, 3)
    assert torch.equal(segment(x), model.module(x))


def test_in_place_through_a_view_of_the_input_leaves_the_caller_alone() -> None:
    class View(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.flatten(1)
            y.mul_(2)
            return y + x.flatten(1)

    model = layered(View(), (2, 3))
    x = torch.ones(2, 2, 3)
    out = model.segment(0, len(model), frozen=True)(x)
    assert torch.equal(x, torch.ones(2, 2, 3))
    assert torch.equal(out, torch.full((2, 6), 4.0))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    ],
)
def test_a_layer_that_normalises_by_the_batch_at_hand_is_not_frozen(norm: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), norm, nn.Flatten(), nn.Linear(16, 2))
    model = layered(module, (3, 2, 2))
    model.check_freeze(2)
    assert model.candidate_splits(1) == range(3)
    with pytest.raises(ModelError, match=r"^layer 3 \(2\) normalises by the batch at hand .*before it"):
        model.check_freeze(4)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)])
def test_layers_that_normalise_each_sample_for_itself_are_frozen(norm: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.Flatten(), nn.Linear(16, 2))
    model = layered(module, (3, 2, 2))
    model.check_freeze(3)
    assert not any(layer.mixes for layer in model.layers)


@pytest.mark.parametrize("leaf", [nn.Flatten(1), nn.Dropout(0.5)])
def test_in_place_behind_a_module_that_returns_its_input_leaves_the_caller_alone(leaf: nn.Module) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = leaf

        def train(self, mode: bool = True) -> Doubles:
            super().train(mode)
            self.leaf.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leaf(x.permute(0, 2, 3, 1)).mul_(2)

    model = layered(Doubles(), (2, 3, 3))
    for frozen in (False, True):
        x = torch.ones(2, 2, 3, 3).to(memory_format=torch.channels_last)
        model.segment(0, len(model), frozen=frozen)(x)
        assert torch.equal(x, torch.ones(2, 2, 3, 3))


def test_what_the_model_keeps_in_eval_mode_stays_so_in_the_trained_part() -> None:
    """The usual way to leave BatchNorm's statistics alone: ``train`` is overridden."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

        def train(self, mode: bool = True) -> Body:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.norm(self.fc(x)))

    model = layered(nn.Sequential(nn.Linear(4, 4), Body(), nn.Linear(4, 2)), (4,))
    back = copy.deepcopy(model.segment(1, len(model)).eval().train())
    assert {path for path, m in back.named_modules() if path.count(".") and m.training} == {"1.fc", "1.drop"}
    back(torch.rand(8, 4))
    assert torch.equal(dict(back.named_buffers())["1.norm.running_mean"], torch.zeros(4))


def test_a_tensor_that_forward_makes_and_changes_is_made_anew_in_every_call() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.ones(4)
            same = scale
            scale *= self.gamma
            return x * scale + same.add_(x[:0].sum())

    module = Scaled()
    model = layered(module, (4,))
    x = torch.rand(3, 4)
    with torch.no_grad():
        expected = module(x)
        for segment in (model.segment(0, len(model), frozen=True), model.segment(0, len(model))):
            assert all(torch.equal(segment(x), expected) for _ in range(3))


def test_no_layer_ends_where_the_tensor_cannot_be_sent() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x + 1).abs()

    assert [cut.name for cut in layered(Spectrum(), (4,)).cuts] == ["add", "abs"]


def test_candidate_splits_stop_at_randomness_and_parameters() -> None:
    module = nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.BatchNorm1d(4, affine=False),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.ReLU(),
    )
    model = layered(module, (4,))
    assert model.candidate_splits(1) == range(3)  # ReLU yes, BatchNorm's statistics no
    assert model.candidate_splits(4) == range(6)  # Tanh yes, dropout no
    assert model.candidate_splits(7) == range(8)

"""What torch.fx cannot trace: leaves inside, block lists, and clear words about what stood in the way."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from hapi.errors import ModelError
from hapi.models.graph.layers import layered

ONES = torch.ones(4)


class Branching(nn.Module):
    """Control flow on data: fx cannot trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.one(x)
        return self.two(x)


class Root(nn.Module):
    """Blocks run in sequence by a forward that itself cannot be traced."""

    def __init__(self, extra: float = 0.0) -> None:
        super().__init__()
        self.stem, self.body, self.head = (
            nn.Linear(6, 6),
            nn.Sequential(nn.ReLU(), nn.Linear(6, 6)),
            nn.Linear(6, 3),
        )
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if bool((x == x).all()):
            x = self.body(x)
        return self.head(x) + self.extra


def test_an_untraceable_submodule_becomes_a_leaf() -> None:
    module = nn.Sequential(nn.Linear(6, 6), Branching(), nn.ReLU(), Branching(), nn.Linear(6, 2))
    model = layered(module, (6,))
    assert [layer.name for layer in model.layers] == ["0", "1", "2", "3", "4"]
    assert model.traced.opaque == ("1", "3") and not model.traced.sequential
    assert model.layers[1].tensors == ("1.one.weight", "1.one.bias", "1.two.weight", "1.two.bias")
    x = torch.rand(4, 6)
    module.eval()
    for split in range(6):
        out = model.segment(split, 5, frozen=True)(model.segment(0, split, frozen=True)(x))
        assert torch.equal(out, module(x))


def test_an_untraceable_root_says_what_stood_in_the_way_and_how_to_name_blocks() -> None:
    with pytest.raises(ModelError) as caught:
        layered(Root(), (6,))
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        "Root cannot be traced",
        "test_tracing_fallback.py:",
        "if bool((x == x).all())",
        "--blocks a,b,c",
    ):
        assert part in text


def test_named_blocks_are_run_in_sequence() -> None:
    module = Root()
    model = layered(module, (6,), blocks=["stem", "body", "head"])
    assert model.traced.sequential
    assert [layer.name for layer in model.layers] == ["stem", "body", "head"]
    x = torch.rand(4, 6)
    for split in range(4):
        assert torch.equal(
            model.segment(split, 3, frozen=True)(model.segment(0, split, frozen=True)(x)), module(x)
        )


@pytest.mark.parametrize(
    ("blocks", "extra", "message"),
    [
        (["stem", "head"], 0.0, "differ from Root"),
        (["stem", "body", "head"], 0.5, "differ from Root"),
        (["stem", "body"], 0.0, r"give \[2, 6\], but Root gives \[2, 3\]"),
        (["stem", "bod"], 0.0, "block 'bod' is not a module of Root; near it: body"),
        (["head", "stem"], 0.0, "the blocks of Root cannot run"),
    ],
)
def test_wrong_blocks_are_found_out(blocks: list[str], extra: float, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        layered(Root(extra), (6,), blocks=blocks)


def test_blocks_choose_among_the_cuts_of_a_traceable_model() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.Linear(4, 2))
    assert [layer.name for layer in layered(module, (4,), blocks=["0"]).layers] == ["0", "2"]
    with pytest.raises(ModelError, match="no layer can end at '7'"):
        layered(module, (4,), blocks=["7"])
    with pytest.raises(ModelError, match="block '0' does not come after block '1'"):
        layered(module, (4,), blocks=["1", "0"])


def test_random_numbers_that_tracing_would_freeze_make_a_leaf_or_an_error() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(4)

    model = layered(nn.Sequential(nn.Linear(4, 4), Noise(), nn.Linear(4, 2)), (4,))
    assert model.traced.opaque == ("1",) and model.layers[1].random
    with pytest.raises(ModelError, match="draws random numbers that do not depend on its input"):
        layered(Noise(), (4,))


def test_two_inputs_or_outputs_are_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    class AuxiliaryInTraining(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return (x * 2, x) if self.training else x * 2

    with pytest.raises(ModelError, match="takes 2 inputs"):
        layered(Two(), (4,))
    with pytest.raises(ModelError, match="in eval mode the model returns a tuple"):
        layered(Pair(), (4,))
    with pytest.raises(ModelError, match="in train mode the model returns a tuple"):
        layered(AuxiliaryInTraining(), (4,))
    with pytest.raises(ModelError, match="TorchScript"):
        layered(torch.jit.script(nn.Linear(2, 2)), (2,))


def test_hooks_of_the_whole_model_are_refused() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        getattr(module[0], register)(lambda *_: None)
        assert len(layered(module, (2,))) == 2
        getattr(module, register)(lambda *_: None)
        with pytest.raises(ModelError, match="Sequential has hooks on its own forward"):
            layered(module, (2,))


def test_an_optional_second_argument_keeps_its_default() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return self.fc(x) * scale

    module = Optional()
    model = layered(module, (4,))
    x = torch.rand(2, 4)
    assert torch.equal(model.segment(1, 2, frozen=True)(model.segment(0, 1, frozen=True)(x)), module(x))


def test_an_optional_argument_that_is_not_given_decides_a_branch() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(
            self, x: torch.Tensor, normalize: float | None = None, *, shift: torch.Tensor = ONES
        ) -> torch.Tensor:
            if normalize is None:
                x = x * 3
            return self.fc(x) + shift

    module = Branches()
    model = layered(module, (4,))
    x = torch.rand(2, 4)
    assert torch.equal(model.segment(0, len(model), frozen=True)(x), module(x))
    assert [layer.name for layer in model.layers] == ["mul", "fc", "add"]


def test_train_graph_with_more_operations_is_aligned() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x) + 1
            if self.training:
                x = x + torch.randn_like(x)
            return self.two(x + 2)

    model = layered(Noisy(), (4,))
    assert [layer.name for layer in model.layers] == ["one", "add", "add_1", "two"]
    x = torch.rand(3, 4)
    back = model.segment(2, 4)
    middle = model.segment(0, 2, frozen=True)(x)
    assert not torch.equal(back(middle), back(middle))  # the noise is on the trained side
    assert model.candidate_splits(1) == range(3)  # not past it


def test_constants_and_plain_tensor_attributes_travel_with_their_layer() -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.tensor([3.0, 4.0])
            self.register_buffer("offset", torch.tensor([1.0, 2.0]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.plain
            x = x + self.offset.clamp(max=1.5)
            return x / torch.tensor([2.0, 5.0])

    module = Constants()
    attributes = set(vars(module))
    model = layered(module, (2,))
    assert set(vars(module)) == attributes  # tracing leaves nothing behind
    x = torch.rand(3, 2)
    for split in range(len(model) + 1):
        out = model.segment(split, len(model), frozen=True)(model.segment(0, split, frozen=True)(x))
        assert torch.equal(out, module(x))
    assert model.segment(0, len(model)).state_dict() == {}
    module.plain[0] = 7.0
    assert layered(module, (2,)).prefix_digest(1) != model.prefix_digest(0)


def test_training_flags_are_as_before() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    module[1].eval()
    before = [m.training for m in module.modules()]
    layered(module, (2,))
    assert [m.training for m in module.modules()] == before


@pytest.mark.slow
def test_other_threads_compute_undisturbed_while_one_traces() -> None:
    worker_model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    x = torch.rand(2, 8)
    expected = worker_model(x)
    stop = threading.Event()
    failures: list[str] = []

    def work() -> None:
        while not stop.is_set():
            out = worker_model(x)
            if type(out) is not torch.Tensor or not torch.equal(out, expected):
                failures.append(repr(out))
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(15):
            model = layered(nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]), (8,))
            assert len(model) == 20
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_data_dependent_blocks_are_measured_by_a_real_run() -> None:
    class Item(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.abs().max().item() > 1e9 else x + 1

    model = layered(nn.Sequential(nn.BatchNorm1d(4), Item(), nn.Linear(4, 3)), (4,))
    assert model.output_shapes() == [(4,), (4,), (4,), (3,)]
    assert model.tensors.get("0.num_batches_tracked").item() == 0  # the run left the statistics alone

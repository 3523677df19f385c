"""The identity of layers: the same for the same network however it is labelled or built, another for any change."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hapi.errors import BadRequestError
from hapi.models.graph.architecture import ArchitectureGraph, shared_layers
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.zoo.build import ModelSpec, build


class Branches(nn.Module):
    """Two branches over one stem, joined; ``first`` is built and run first, ``names`` are the branches' labels."""

    def __init__(
        self, first: str = "left", names: tuple[str, str] = ("left", "right"), stride: int = 1
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, stride=stride), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.order, self.labels = first, names
        made = {names[0]: nn.Conv2d(4, 4, 1), names[1]: nn.Conv2d(4, 4, 3, padding=1)}
        for name in names if first == "left" else reversed(names):
            self.add_module(name, made[name])
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        torch.manual_seed(0)
        for module in (self.stem, made[names[0]], made[names[1]], self.head):
            for parameter in module.parameters():
                nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.order == "left":
            left = getattr(self, self.labels[0])(x)
            right = getattr(self, self.labels[1])(x)
        else:
            right = getattr(self, self.labels[1])(x)
            left = getattr(self, self.labels[0])(x)
        return self.head(left - right)


def cut(module: nn.Module, side: int = 8) -> LayeredModel:
    return layered(module.eval(), (3, side, side))


def ends(model: LayeredModel) -> tuple[str, str]:
    """Structure and content of the whole network."""
    return model.identities()[-1]


def changed(change: Callable[[Branches], object]) -> tuple[bool, bool]:
    """Whether a change is seen in the structure, and in the content."""
    before, module = ends(cut(Branches())), Branches()
    change(module)
    after = ends(cut(module))
    return before[0] != after[0], before[1] != after[1]


def test_labels_and_the_order_of_construction_say_nothing() -> None:
    base = ends(cut(Branches()))
    assert ends(cut(Branches(first="right"))) == base
    assert ends(cut(Branches(names=("conv2d_7", "a")))) == base
    assert ends(cut(Branches(first="right", names=("x", "stem2")))) == base


def test_connections_are_in_their_order() -> None:
    class Swapped(Branches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.head(self.right_(x) - self.left_(x))

        def left_(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, self.labels[0])(x)

        def right_(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, self.labels[1])(x)

    assert ends(cut(Swapped()))[0] != ends(cut(Branches()))[0]


def test_every_input_counts_also_one_that_was_visited_before() -> None:
    class Skip(nn.Module):
        def __init__(self, early: bool) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.early = early

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.a(x)
            b = self.b(a)
            return self.c(b) + (a if self.early else b)

    assert ends(cut(Skip(True)))[0] != ends(cut(Skip(False)))[0]


def test_a_change_in_place_counts_for_whatever_reads_that_memory_later() -> None:
    class InPlace(nn.Module):
        def __init__(self, before: bool) -> None:
            super().__init__()
            self.a, self.before = nn.Conv2d(3, 3, 1), before

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            if self.before:
                y.mul_(2)
                return torch.relu(y)
            z = torch.relu(y)
            y.mul_(2)
            return z

    assert ends(cut(InPlace(True)))[0] != ends(cut(InPlace(False)))[0]


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda m: m.stem[0].weight.data[0, 0, 0].add_(1e-6), (False, True)),
        (lambda m: m.stem[1].running_var[0].mul_(2), (False, True)),
        (lambda m: m.head[2].bias.data.neg_(), (False, True)),
        (lambda m: setattr(m.stem[1], "eps", 2e-5), (True, True)),
        (lambda m: setattr(m.stem[0], "stride", (2, 2)), (True, True)),
        (lambda m: setattr(m.stem[0], "padding_mode", "circular"), (True, True)),
        (lambda m: m.stem.__setitem__(2, nn.ReLU6()), (True, True)),
        (lambda m: m.head.__setitem__(2, nn.Linear(4, 3)), (True, True)),
        (lambda m: m.head.__setitem__(2, nn.Linear(4, 2, bias=False)), (True, True)),
        (lambda m: m.train(), (False, False)),
        (lambda m: m.requires_grad_(False), (False, False)),
    ],
)
def test_what_is_seen_of_a_change(change: Callable[[Branches], object], seen: tuple[bool, bool]) -> None:
    assert changed(change) == seen


def test_the_size_of_images_and_the_head_are_no_part_of_what_lies_before() -> None:
    small, large = cut(Branches(), 8).identities(), cut(Branches(), 16).identities()
    assert [i.structure for i in small] == [i.structure for i in large]
    tuned = Branches()
    tuned.head[2] = nn.Linear(4, 7)
    one, two = cut(Branches()), cut(tuned)
    structure = [[i.structure for i in model.identities()] for model in (one, two)]
    assert shared_layers(*structure) == len(one) - 1 == shared_layers(*reversed(structure))
    with torch.no_grad():
        tuned.stem[0].weight[0].add_(1)
    content = [[i.content for i in model.identities()] for model in (one, cut(tuned))]
    assert shared_layers(*content) == 0
    assert shared_layers(*structure) == len(one) - 1


@pytest.mark.slow
def test_a_layer_list_of_other_cuts_shares_what_it_can() -> None:
    spec = ModelSpec(architecture="resnet18", weights="random:1", input_shape=(3, 64, 64))
    model = build(spec)
    coarse, fine = model.identities(), model.with_all_cuts().identities()
    assert shared_layers([i.content for i in coarse], [i.content for i in fine]) == len(coarse) - 1
    other = build(ModelSpec(architecture="resnet34", weights="random:1", input_shape=(3, 64, 64)))
    shared = shared_layers([i.structure for i in coarse], [i.structure for i in other.identities()])
    assert model.layers[shared - 1].name == "layer1.1"  # the stages are 2 2 2 2 and 3 4 6 3 blocks
    assert shared_layers([i.content for i in coarse], [i.content for i in other.identities()]) < shared


def test_copies_moves_and_expected_digests_say_the_same() -> None:
    model = cut(Branches())
    found = model.identities()
    assert cut(copy.deepcopy(model.module)).identities() == found
    expected = {name: model.digest_of(name) for name in model.tensors.names()}
    empty = cut(Branches().to("meta"))
    empty.expected_digests = expected
    assert empty.identities() == found


@pytest.mark.slow
def test_another_process_says_the_same() -> None:
    program = (
        "import json; from hapi.models.zoo.build import ModelSpec, build\n"
        "spec = ModelSpec(architecture='squeezenet1_1', weights='random:1', input_shape=(3, 64, 64))\n"
        "print(json.dumps(build(spec).identities()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7"},
    )
    spec = ModelSpec(architecture="squeezenet1_1", weights="random:1", input_shape=(3, 64, 64))
    assert [tuple(pair) for pair in json.loads(done.stdout)] == build(spec).identities()


@pytest.mark.slow
def test_other_versions_say_the_same() -> None:
    """Digests of Python 3.11 and 3.13, torch 2.9 and 2.14, torchvision 0.24 and 0.29, which all gave these."""
    module = Branches()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 7)
    assert ends(cut(module)) == ("ee5c5e37361c9a8c90ed234def515299", "f6ba7f5e74f1ade5249290bd916ed15a")
    for name, structure in (
        ("squeezenet1_1", "83307b1926e18590b04af3a10e3764b8"),
        ("mobilenet_v3_small", "7e796c55be41b369b649e82c277aac28"),
        ("resnet18", "401b9c0014d52baeba7b14006aa5cf4a"),
    ):
        spec = ModelSpec(architecture=name, weights="random:1", input_shape=(3, 64, 64))
        assert ends(build(spec))[0] == structure, name


GRAPHS = st.integers(1, 30).flatmap(
    lambda count: st.tuples(
        st.just(tuple(f"config {i}" for i in range(count))),
        st.tuples(
            *(
                st.lists(st.integers(0, max(0, place - 1)), max_size=3 if place else 0).map(
                    lambda inputs, p=place: (p, *inputs)
                )
                for place in range(count)
            )
        ),
    )
)


@given(GRAPHS, st.randoms(use_true_random=False))
def test_any_order_of_construction_gives_the_same(
    parts: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]], random: object
) -> None:
    graph = ArchitectureGraph(*parts)
    left, order = list(range(len(graph.nodes))), []
    while left:
        ready = [place for place in left if all(source in order for source in graph.nodes[place][1:])]
        order.append(random.choice(ready))  # type: ignore[attr-defined]
        left.remove(order[-1])
    where = {place: i for i, place in enumerate(order)}
    moved = tuple((graph.nodes[p][0], *(where[source] for source in graph.nodes[p][1:])) for p in order)
    other = ArchitectureGraph(graph.configs, moved).structure()
    assert [other[where[place]] for place in range(len(order))] == graph.structure()


@pytest.mark.slow
@given(GRAPHS)
def test_distinct_layers_have_distinct_identities(
    parts: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]],
) -> None:
    graph = ArchitectureGraph(*parts)
    assert len(set(graph.structure())) == len(graph.nodes)
    assert ArchitectureGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"configs": "a"},
        {"configs": [1]},
        {"nodes": {}},
        {"nodes": [[]]},
        {"nodes": [[5]]},
        {"nodes": [[0, 0]]},
        {"nodes": [[0], [0, 1]]},
        {"nodes": [[0], [0, -1]]},
        {"nodes": [[True]]},
        {"more": 1},
    ],
)
def test_a_damaged_graph_is_refused(change: dict[str, object]) -> None:
    whole = {"format": 2, "configs": ["a"], "nodes": [[0], [0, 0]]}
    assert ArchitectureGraph.from_json(whole).nodes == ((0,), (0, 0))
    with pytest.raises(BadRequestError, match="architecture"):
        ArchitectureGraph.from_json({**whole, **change})


def test_names_cannot_provoke_collisions() -> None:
    """A configuration that spells another one's bytes, or an input's identity."""
    plain = ArchitectureGraph(("a", "b"), ((0,), (1, 0)))
    identity = plain.structure()[0]
    spelled = ArchitectureGraph(
        ("a", "b" + identity.hex(), "b" + identity.decode("latin-1")), ((0,), (1,), (2,))
    )
    assert not set(plain.structure()[1:]) & set(spelled.structure())
    apart = plain.content([["d1"], ["d2", "d3"]])
    assert apart != plain.content([["d1"], ["d2d3"]]) and apart != plain.content([["d1", "d2"], ["d3"]])
    assert set(apart).isdisjoint(plain.structure())

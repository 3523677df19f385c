"""The paper's seven tables, and layer lists over other models of the same families."""

from __future__ import annotations

from functools import cache

import pytest

from hapi.errors import ModelError
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec, structure

# HAPI, table 2: model, number of layers, default freeze, candidate splits end here, names at some indices.
PAPER = [
    (
        "alexnet",
        22,
        17,
        18,
        {1: "features.0", 13: "features.12", 14: "avgpool", 15: "flatten", 17: "classifier.1"},
    ),
    (
        "resnet18",
        14,
        11,
        11,
        {1: "conv1", 4: "maxpool", 5: "layer1.0", 11: "layer4.0", 13: "flatten", 14: "fc"},
    ),
    ("resnet50", 22, 21, 21, {4: "maxpool", 20: "layer4.2", 21: "flatten", 22: "fc"}),
    (
        "densenet121",
        22,
        20,
        20,
        {
            5: "features.denseblock1",
            9: "features.transition1.pool",
            19: "features.transition3.pool",
            22: "classifier",
        },
    ),
    ("vgg11", 28, 25, 26, {21: "features.20", 22: "classifier.0", 25: "classifier.3", 28: "classifier.6"}),
    ("vgg19", 45, 36, 38, {36: "features.35", 37: "features.36", 38: "flatten", 39: "classifier.0"}),
    (
        "transformer",
        21,
        17,
        17,
        {
            1: "conv_proj",
            4: "cat",
            5: "encoder.dropout",
            17: "encoder.layers.encoder_layer_11",
            21: "heads.head",
        },
    ),
]


@cache
def skeleton_of(name: str, side: int = 224) -> LayeredModel:
    return structure(ModelSpec(architecture=name, input_shape=(3, side, side)))


@pytest.mark.slow_cases("densenet121")
@pytest.mark.parametrize(("name", "count", "freeze", "last", "names"), PAPER, ids=[row[0] for row in PAPER])
def test_paper_numbering(name: str, count: int, freeze: int, last: int, names: dict[int, str]) -> None:
    model = skeleton_of(name)
    assert (len(model), model.default_freeze) == (count, freeze)
    assert {i: model.layers[i - 1].name for i in names} == names
    assert [layer.index for layer in model.layers] == list(range(1, count + 1))
    assert model.candidate_splits(freeze) == range(last + 1)


def test_output_sizes_have_the_papers_minima() -> None:
    densenet = skeleton_of("densenet121").output_bytes()
    for index in (9, 19):
        assert densenet[index] <= min(densenet[1:index])
    alexnet = skeleton_of("alexnet").output_bytes()
    assert alexnet[3] < min(alexnet[1:3]) and alexnet[6] < min(alexnet[4:6])
    assert skeleton_of("resnet50").output_shapes()[21] == (2048,)


def test_transformer_has_an_empty_layer_where_timm_has_the_heads_dropout() -> None:
    model = skeleton_of("transformer")
    assert model.layers[19].name == "head_drop"
    assert model.layers[19].tensors == () and model.output_shapes()[19] == model.output_shapes()[20] == (768,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet34", 22),
        ("resnet101", 39),
        ("vgg16", 39),
        ("vgg11_bn", 37),
        ("densenet169", 22),
        ("vit_b_32", 21),
    ],
)
def test_other_members_of_the_families_are_numbered_alike(name: str, count: int) -> None:
    model = skeleton_of(name)
    assert len(model) == count
    # All but the head's layer is frozen by default.
    assert model.default_freeze is not None
    assert sum(bool(layer.parameter_count) for layer in model.layers[model.default_freeze :]) == 1


@pytest.mark.parametrize(
    ("name", "side"), [("resnet18", 32), ("alexnet", 64), ("transformer", 32), ("vgg11", 48)]
)
def test_numbering_does_not_depend_on_the_input_size(name: str, side: int) -> None:
    small = skeleton_of(name, side)
    assert [layer.name for layer in small.layers] == [layer.name for layer in skeleton_of(name).layers]
    assert small.output_shapes()[0] == (3, side, side)


def test_parameters_are_counted_once() -> None:
    model = skeleton_of("resnet18")
    assert sum(layer.parameter_count for layer in model.layers) == sum(
        p.numel() for p in model.module.parameters()
    )


def test_too_small_an_input_is_one_clear_line() -> None:
    with pytest.raises(
        ModelError, match=r"cannot run on samples of shape 3x32x32: .*[Oo]utput size is too small"
    ):
        structure(ModelSpec(architecture="alexnet", input_shape=(3, 32, 32)))


def test_resolve_names_near_misses_and_ranges() -> None:
    model = skeleton_of("resnet18")
    assert model.resolve("layer4.0") == 11 and model.resolve("11") == 11 and model.resolve(0) == 0
    with pytest.raises(ModelError, match=r"no layer 'layer4.9'; did you mean 'layer4"):
        model.resolve("layer4.9")
    with pytest.raises(ModelError, match=r"did you mean 'layer4\.1'"):
        model.resolve("layer4")
    for wrong in (-1, 15, "15"):
        with pytest.raises(ModelError, match="layers 1 to 14"):
            model.resolve(wrong)
    for odd in ("++5", "\u00b2", "9" * 5000):  # digits to str.isdigit(), no numbers to int()
        with pytest.raises(ModelError, match="no layer"):
            model.resolve(odd)


def test_every_cut_point_instead_of_the_papers_list() -> None:
    model = skeleton_of("resnet18")
    assert [layer.name for layer in model.with_all_cuts().layers] == [cut.name for cut in model.cuts]
    assert len(model.cuts) == 23

"""Every field of every request wrong in turn, over HTTP: the right status, one line that names it, and life goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.http_tools import (
    EXTRACT,
    MISSING,
    SAMPLES,
    TENSORS,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    paths_of,
    received,
    served,
    with_field,
)

from hapi.wire.references import TransformSpec

WRONG: list[Any] = [
    MISSING, None, True, -1, 1.5, 1e400, 10**30, "", "x" * 5000, "../../etc/passwd", "a/b", "%2e%2e%2f", "\x00",
    "\ud800", "ü💥", "a\nb", [], [[]], [None], {}, {"x": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[ServedApplication]:
    """A server that keeps no layers between requests."""
    with served(folder, model_reuse=False) as application:
        yield application


@pytest.fixture(autouse=True)
def lives_on(server: ServedApplication, known: Known) -> Iterator[None]:
    """After every test the server answers a good request with the right content."""
    yield
    answer = exchange(server.port, "POST", EXTRACT, known.extract())
    assert answer.status == 200, answer.body
    known.check_features(answer.body, [3, 39, 0, 17])
    server.idle()


def good(known: Known, path: str) -> dict[str, Any]:
    return {EXTRACT: known.extract, SAMPLES: known.samples, TENSORS: known.tensors}[path]()


def _is_good(place: tuple[str, ...], value: Any) -> bool:
    """What is wrong elsewhere may be a value here."""
    if place in {("model", "blocks"), ("model", "input_shape")} and value is MISSING:
        return True
    return place == ("model", "blocks") and value == []


@pytest.mark.parametrize("path", [EXTRACT, SAMPLES, TENSORS])
def test_good_requests(server: ServedApplication, known: Known, path: str) -> None:
    answer = exchange(server.port, "POST", path, good(known, path))
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/vnd.hapi.frames"
    assert int(answer.headers["Content-Length"]) == len(answer.body)
    if path == SAMPLES:
        ids, (stored, _, _) = received(answer.body, 3)
        assert ids == [5, 0, 5]
        assert stored.tobytes() == known.dataset.read([5, 0, 5]).data.tobytes()


@pytest.mark.parametrize("path", [EXTRACT, SAMPLES, TENSORS])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda v: repr(v)[:30] if v is not MISSING else "missing")
def test_every_field_wrong_in_turn(server: ServedApplication, known: Known, path: str, wrong: Any) -> None:
    document = good(known, path)
    for place in paths_of(document):
        if _is_good(place, wrong):
            continue
        answer = exchange(server.port, "POST", path, with_field(document, place, wrong))
        if wrong in (1e400, 10**30):
            check_problem(answer, 400, "is not JSON")
        elif place == ("transform",) and wrong is None:
            check_problem(answer, 422, "need a transform")
        elif place == ("split_name",) and isinstance(wrong, str) and 0 < len(wrong) <= 512:
            check_problem(answer, 422, "'maxpool'")  # text of the right form, but no layer's name
        else:
            check_problem(answer, 400, place[-1])


@pytest.mark.parametrize("path", [EXTRACT, SAMPLES, TENSORS])
def test_unknown_fields(server: ServedApplication, known: Known, path: str) -> None:
    document = good(known, path)
    places = [(), *(p for p in paths_of(document) if isinstance(document[p[0]], dict) and len(p) == 1)]
    for place in places:
        for name in ("surprise", "__class__", "\n", "ü" * 300):
            changed = with_field(document, (*place, name), 1)
            check_problem(exchange(server.port, "POST", path, changed), 400, "unknown field")


@pytest.mark.slow_cases("place4-resnet34-409-digest", "place9-random:1-409-digest")
@pytest.mark.parametrize(
    ("place", "value", "status", "word"),
    [
        (("dataset", "name"), "nosuch", 404, "nosuch"),
        (("dataset", "version"), "0" * 16, 409, "version"),
        (("model", "digest"), "0" * 32, 409, "digest"),
        (("model", "name"), "resnet19", 422, "resnet18"),
        (("model", "name"), "resnet34", 409, "digest"),
        (("model", "name"), "os:system", 422, "not allowed"),
        (("model", "name"), "antigravity:x", 422, "not allowed"),
        (("model", "name"), "builtins:eval", 422, "not allowed"),
        (("model", "name"), "timm:no_such_model", 422, "no_such_model"),
        (("model", "weights"), "random:1", 409, "digest"),
        (("model", "weights"), "random:x", 422, "random:SEED"),
        (("model", "weights"), "evil.pth", 422, "push"),
        (("model", "weights"), "evil.safetensors", 422, "push"),
        (("model", "weights"), "NO_SUCH_WEIGHTS", 422, "NO_SUCH_WEIGHTS"),
        (("model", "blocks"), ["layer1", "nosuch"], 422, "nosuch"),
        (("model", "source"), "store", 400, "model.weights"),
        (("model", "input_shape"), [3, 64, 64], 422, "(3, 64, 64)"),
        (("model", "input_shape"), [3], 422, "(3,)"),
        (("model", "input_shape"), [7, 32, 32], 422, "(7, 32, 32)"),
        (("model", "input_shape"), [4096, 4096, 4096, 4096], 422, "(4096, 4096, 4096, 4096)"),
        (("model", "input_shape"), [3, (1 << 24) + 1, 1], 400, "input_shape"),
        (("split",), 99_999, 422, "layers 1 to"),
        (("split",), 5, 409, "digest"),
        (("split",), 0, 400, "split"),
        (("split_name",), "layer9", 422, "layer9"),
        (("ids",), [40], 404, "40"),
        (("ids",), [0, (1 << 62) - 1], 404, "no sample"),
        (("ids",), [1 << 62], 400, "ids"),
        (("ids",), list(range(65537)), 413, "65536"),
        (("transform",), None, 422, "transform"),
        (("transform", "crop"), 31, 422, "(3, 31, 31)"),
        (("transform", "resize"), 31, 400, "resize"),
        (("transform", "std"), [0, 1, 1], 400, "std"),
        (("transform", "mean"), [1e300, 0, 0], 400, "mean"),
    ],
)  # fmt: skip
def test_well_formed_but_wrong(
    server: ServedApplication,
    cold: ServedApplication,
    known: Known,
    place: tuple[str, ...],
    value: Any,
    status: int,
    word: str,
) -> None:
    """The answer does not depend on what the server's cache happens to hold."""
    for one in (server, cold):
        answer = exchange(one.port, "POST", EXTRACT, with_field(known.extract(), place, value))
        check_problem(answer, status, word)


@pytest.mark.slow
def test_images_too_small_for_the_model(server: ServedApplication, known: Known) -> None:
    document = known.extract(transform=TransformSpec.for_image_size(1).to_json(), split=7)
    for name in ("alexnet", "vit_b_16", "swin_t", "maxvit_t", "inception_v3"):
        document["model"] |= {"name": name, "input_shape": [3, 1, 1]}
        check_problem(exchange(server.port, "POST", EXTRACT, document), 422, "1")


def test_weights_that_cannot_be_fetched(
    server: ServedApplication, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client learns why, and nothing of the server's folders."""

    def failing(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", torch.hub.get_dir())

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", failing)
    document = known.extract()
    document["model"]["weights"] = "IMAGENET1K_V1"
    answer = exchange(server.port, "POST", EXTRACT, document)
    check_problem(answer, 422, "cannot be downloaded (Permission denied)")
    assert torch.hub.get_dir().encode() not in answer.body


@pytest.mark.slow
def test_what_large_inputs_need_is_bounded(folder: Path, known: Known) -> None:
    """At 256 pixels the widest of the layers gives 4 MiB a sample: four of them in a pass, or none."""
    document = known.extract(list(range(10)), transform=TransformSpec(resize=256, crop=256).to_json())
    document["model"] = known.model_at(256)
    with served(folder, max_layer_bytes=18 << 20) as four:
        answer = exchange(four.port, "POST", EXTRACT, document)
        assert received(answer.body, 2)[0] == list(range(10))
        assert json.loads(answer.body[-2056 + 20 : -8])["report"]["cos_batch"] == 4
    with served(folder, max_layer_bytes=(4 << 20) - 1) as none:
        check_problem(exchange(none.port, "POST", EXTRACT, document), 413, "--image-size")
        known.check_features(exchange(none.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
    with served(folder, max_frame_bytes=(1 << 20) - 1) as none:
        check_problem(exchange(none.port, "POST", EXTRACT, document), 413, "--image-size")


def test_duplicate_ids_are_samples_like_others(server: ServedApplication, known: Known) -> None:
    ids = [7] * 20 + [1, 7]
    answer = exchange(server.port, "POST", EXTRACT, known.extract(ids))
    known.check_features(answer.body, ids)


def test_pushed_model_in_odd_requests(server: ServedApplication, known: Known) -> None:
    document = known.tensors()
    for change, status, word in (
        ({"name": "nosuch"}, 404, "nosuch"),
        ({"digest": "0" * 32}, 409, "digest"),
        ({"names": ["no.such.tensor"]}, 404, "no.such.tensor"),
        ({"names": [document["names"][0]] * 2}, 400, "names"),
        ({"names": ["__proto__", "../weights.safetensors"]}, 404, "__proto__"),
    ):
        check_problem(exchange(server.port, "POST", TENSORS, {**document, **change}), status, word)

"""Features that the wire rounds are kept as they came: by codec and split, for no other job, and to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.harness import of_epochs
from support.kept_tools import JOB, LAST, SAMPLES, Counting, check_same, kept_service, train
from support.local_job import open_session

from hapi.cache import catalog as cache_catalogue
from hapi.cache import folder as cache_folder
from hapi.cache.disk_rates import DiskRates
from hapi.cache.inventory import describe
from hapi.cache.writing import record_codec
from hapi.codecs.names import LOSSY
from hapi.errors import BadRequestError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with kept_service(tmp_path_factory.mktemp("rounded") / "store") as running:
        yield running


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_catalogue, "LOOK_SECONDS", 0.0)


def hits(found: tuple[Any, Any]) -> list[int]:
    return of_epochs(found[0], "feature_hits")


@pytest.mark.long_cases("fp16-5", "bf16-5", "bf16-13")
@pytest.mark.slow_except("int8-13")
@pytest.mark.parametrize(
    ("codec", "split"),
    [
        (codec, split) if (split == 5) == number % 2 else pytest.param(codec, split, marks=pytest.mark.slow)
        for number, codec in enumerate(LOSSY)
        for split in (5, LAST)
    ],
)
def test_the_same_losses_and_nothing_is_asked_twice(
    service: Service, tmp_path: Path, codec: str, split: int
) -> None:
    changes = {"split": split, "wire_codec": codec, "validation": "held"}
    reference, exact = train(service, None, **changes), train(service, None, split=split)
    assert of_epochs(reference[0], "loss") != of_epochs(exact[0], "loss")
    found = train(service, tmp_path, **changes)
    check_same(reference, found)
    assert hits(found) == [0, SAMPLES, SAMPLES] and found[0]["cache"]["why"] == ""
    counting = Counting(service)
    check_same(reference, train(counting, tmp_path, **changes))
    assert counting.asked == 0
    rounded = f", rounded to {codec} at split {split}"
    assert all(describe(folder).endswith(rounded) for folder in tmp_path.glob("features@*"))


@pytest.mark.slow
def test_jobs_that_round_otherwise_never_hit_them(service: Service, tmp_path: Path) -> None:
    train(service, tmp_path, split=5, wire_codec="fp16", epochs=2)
    for changes in ({}, {"wire_codec": "bf16"}, {"wire_codec": "fp16", "split": 7}, {"wire_codec": "zeros"}):
        changes = {"split": 5, "epochs": 1, **changes}
        found = train(service, tmp_path, **changes)
        check_same(train(service, None, **changes), found)
        assert hits(found) == [0]
    found = train(service, tmp_path, split=5, wire_codec="fp16", epochs=1)
    assert hits(found) == [SAMPLES]


@pytest.mark.slow
def test_stored_samples_are_not_rounded_and_share_what_any_job_keeps(
    service: Service, tmp_path: Path
) -> None:
    train(service, tmp_path, split=7, epochs=2)
    found = train(service, tmp_path, split=0, wire_codec="int8", epochs=1)
    check_same(train(service, None, split=0, epochs=1), found)
    assert hits(found) == [SAMPLES]


@pytest.mark.long_cases("fp16", "bf16")
@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", [*(pytest.param(codec, marks=pytest.mark.slow) for codec in LOSSY[:-1]), LOSSY[-1]]
)
def test_what_came_small_is_kept_small(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """On a disk that is slower than the training."""
    monkeypatch.setattr(record_codec, "ENOUGH_BYTES", 1)
    monkeypatch.setattr(cache_folder, "measure_disk", lambda folder: DiskRates(100.0, 100.0))
    changes = {"split": 8, "wire_codec": codec, "freeze": 8}
    found = train(service, tmp_path, **changes, cache_memory=0)
    check_same(train(service, None, **changes), found)
    (told,) = found[0]["cache"]["codecs"]
    assert codec in {figures["name"] for figures in told["measured"]} and told["codec"] != "none"
    assert hits(found) == [0, SAMPLES, SAMPLES]


@pytest.mark.long_cases("bf16", "fp16")
@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", [LOSSY[0], *(pytest.param(codec, marks=pytest.mark.slow) for codec in LOSSY[1:])]
)
def test_a_split_that_a_strategy_chooses(service: Service, tmp_path: Path, codec: str) -> None:
    """Batches of epoch 0 cross at two splits and are kept apart; what is kept at the one of the plan is read."""
    found = train(service, tmp_path, split="auto", wire_codec=codec, cache="on", epochs=4)
    own = of_epochs(found[0], "samples")[0]
    assert hits(found)[-1] == own and hits(found)[0] == 0
    again = train(service, tmp_path, split="auto", wire_codec=codec, cache="on", epochs=4)
    assert hits(again)[-1] == own
    with open_session(
        service, **{**JOB, "cache_dir": str(tmp_path), "split": "auto", "wire_codec": codec}
    ) as session:
        kept = session.keeping.training.of()
        assert all(
            cache.key.rounding == ((codec, at.split) if at.split else None) for at, cache in kept.items()
        )
        assert max(cache.share(session.job_context.training_ids) for cache in kept.values()) == 1
        chosen = session.keeping.source(session.last.kept, 0, None, validation=False)
        assert chosen is None, "a caller who names each batch's split gets what that split gives"


@pytest.mark.slow
def test_nothing_is_kept_where_one_server_does_not_round(service: Service, tmp_path: Path) -> None:
    answer = loopback_handler(service)

    def older(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        if method == "POST" and "codec" in json.loads(body):
            error = BadRequestError("request: unknown field 'codec'; known are dataset, ids, job, model")
            problem = json.dumps(error.to_problem()).encode()
            return 400, {"Content-Type": "application/problem+json"}, [problem]
        return answer(method, path, body)

    found = train(older, tmp_path, split=5, wire_codec="fp16")  # type: ignore[arg-type]
    check_same(train(service, None, split=5), found)
    assert hits(found) == [0, 0, 0]

"""``--frozen-precision``: half the bytes, the same numbers at every split, losses near those of float32."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import COUNT, Silent, open_session, pack_blobs, service_of, settings_of, trainer_of

from hapi.client.session import Session
from hapi.errors import BadRequestError, ConflictError, DataError, UnprocessableError
from hapi.models.graph import precision
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.train.checkpoints.resuming import identity_of
from hapi.wire.messages import ExtractRequest

FREEZE = 12
LAST = 13
"""The freeze, and on over the pooling."""
LOSS_OFF = 0.02
"""Largest relative difference of a bf16 run's losses from those of float32."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("precision") / "store"
    pack_blobs(store)
    with service_of(store) as running:
        yield running


def epoch_of(session: Session) -> list[torch.Tensor]:
    return [features.clone() for features, _ in session.epoch(0)]


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.long_cases("fp16")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_every_split_gives_the_same_features_as_float32(service: Service, kind: str) -> None:
    with open_session(service, frozen_precision=kind, split=0) as session:
        assert session.last_split == LAST
        here = epoch_of(session)
    assert all(features.dtype == torch.float32 for features in here)
    for split in range(1, LAST + 1):
        with open_session(service, frozen_precision=kind, split=split) as session:
            # The server's batches of 4 and this side's of 10 take other kernels, whose last bits may be rounded apart.
            assert largest_difference(epoch_of(session), here) < (2e-2 if kind == "bf16" else 3e-3), split


@pytest.mark.slow
def test_features_take_exactly_half_the_bytes(service: Service) -> None:
    def crossed(**changes: Any) -> float:
        with open_session(service, split=6, **changes) as session:
            for _ in session.epoch(0):
                pass
            return session.last.traffic.bytes_received

    with open_session(service, split=6) as session:
        features = session.job_context.model.output_bytes()[6]
    exact, half = crossed(), crossed(frozen_precision="bf16")
    headers = abs((exact - half) - COUNT * features / 2)
    assert headers <= 64 * 2 * 12, "all but the word for the type and padding of a dozen frames"


@pytest.mark.slow
def test_losses_stay_near_those_of_float32(service: Service) -> None:
    def losses(**changes: Any) -> list[float]:
        with open_session(service, **changes) as session:
            report = trainer_of(session, Silent(), **changes).run()
        assert report["settings"]["frozen_precision"] == changes.get("frozen_precision", "fp32")
        return [epoch["loss"] for epoch in report["epochs"]]

    exact = losses()
    for split in (0, 6, LAST):
        assert losses(frozen_precision="bf16", split=split) == pytest.approx(exact, rel=LOSS_OFF)


@pytest.mark.slow
def test_a_strategy_trains_in_bf16_with_sizes_of_half(service: Service) -> None:
    with open_session(service, frozen_precision="bf16", split="auto", epochs=1, recheck=3) as session:
        trainer_of(session, Silent(), epochs=1).run()
        assert session.planning is not None and session.planning.profile is not None
        layers, exact = session.planning.profile.layers, session.job_context.model.layers
        assert session.recheck is not None and session.recheck.compared >= 3
        assert session.recheck.to_json()["tolerance"] == 2e-2
    assert [layer.output_bytes * 2 for layer in layers[:LAST]] == [x.output_bytes for x in exact[:LAST]]
    assert layers[LAST].output_bytes == exact[LAST].output_bytes


@pytest.mark.slow
def test_weights_of_both_types_are_resident_beside_each_other(service: Service) -> None:
    cache = service.workers.all[0].cache
    cache.drop_idle()
    for kind in ("fp32", "bf16", "bf16"):
        with open_session(service, frozen_precision=kind, split=6) as session:
            next(iter(session.epoch(0)))
    found = {key: json.loads(key)[-1] for key in cache._prefixes}
    assert sorted(found.values()) == ["bf16", "fp32"]


@pytest.mark.slow
def test_a_resident_bf16_front_takes_half_where_layers_compute_in_bf16(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "arithmetic_type", lambda features, device: features)
    cache = service.workers.all[0].cache
    nbytes = {}
    for kind in ("fp32", "bf16"):
        cache.drop_idle()
        service.workers.sizing._kept.clear()
        with open_session(service, frozen_precision=kind, split=2, recheck=0) as session:
            features = epoch_of(session)
            nbytes[kind] = cache.resident_bytes
            model = session.job_context.model
        assert all(torch.isfinite(batch).all() for batch in features)
    assert nbytes["fp32"] - nbytes["bf16"] == model.tensors.get("conv1.weight").nbytes // 2


@pytest.mark.slow
def test_an_older_server_is_told_to_be_one(service: Service) -> None:
    answer = loopback_handler(service)

    def older(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        document = json.loads(body) if method == "POST" else {}
        if "precision" in document:
            error = BadRequestError("request: unknown field 'precision'; known are dataset, ids, job, model")
            return (
                400,
                {"Content-Type": "application/problem+json"},
                [json.dumps(error.to_problem()).encode()],
            )
        return answer(method, path, body)

    with (
        open_session(older, frozen_precision="bf16", split=6) as session,
        pytest.raises(UnprocessableError, match=r"older hapi.*leave --frozen-precision bf16 away"),
    ):
        epoch_of(session)
    with open_session(older, split=6) as session:
        assert len(epoch_of(session)) == 5, "a request for float32 is one that older servers know"


@pytest.mark.parametrize("split", [0, 6, LAST])
def test_values_beyond_fp16_are_told_with_the_remedy(
    service: Service, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_weight = precision.rounded_weight

    def huge(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return round_weight(model, name, tensor) * (1e4 if name == "conv1.weight" else 1)

    monkeypatch.setattr(precision, "rounded_weight", huge)
    monkeypatch.setattr("hapi.server.device.prefix_loader.rounded_weight", huge)
    service.workers.all[0].cache.drop_idle()
    with (
        open_session(service, frozen_precision="fp16", split=split) as session,
        pytest.raises(DataError, match=r"do not fit fp16, of sample \d+.*give --frozen-precision bf16"),
    ):
        epoch_of(session)
    service.workers.all[0].cache.drop_idle()


@pytest.mark.slow
def test_another_precision_is_another_training(service: Service, tmp_path: Path) -> None:
    path = str(tmp_path / "ck.pt")
    with open_session(service, epochs=1) as session:
        trainer_of(session, Silent(), epochs=1, checkpoint=path).run()
        own = identity_of(settings_of(), settings_of(), session.job_context)
    assert (own["frozen_precision"], own["tf32"]) == ("fp32", False)
    with open_session(service, frozen_precision="bf16") as session:
        trainer = trainer_of(session, Silent(), checkpoint=path, resume=True)
        with pytest.raises(ConflictError, match="frozen_precision is 'fp32', this one's 'bf16'"):
            trainer.run()


@pytest.mark.slow
def test_the_model_file_has_the_frozen_layers_as_they_were(service: Service, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with open_session(service, frozen_precision="bf16", split=3, epochs=1) as session:
        expected = session.job_context.client_model.read(["layer2.0.conv1.weight", "conv1.weight"])
        trainer_of(session, Silent(), epochs=1, output=str(tmp_path / "out")).run()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("value", ["bf32", 16, None, ["bf16"]])
def test_a_request_names_a_known_precision(value: Any, service: Service) -> None:
    with open_session(service, frozen_precision="bf16", split=6) as session:
        document = session.job_context.job(6).request(session.batch_ids(0)[0])
    assert document["precision"] == "bf16"
    assert ExtractRequest.from_json(document).to_json() == document
    with pytest.raises(BadRequestError, match="precision: expected one of fp32, bf16, fp16"):
        ExtractRequest.from_json({**document, "precision": value})

"""Kept features together with what the trainer's steps can do: the same to the bit, resumed and begun from another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import of_epochs
from support.kept_tools import JOB, SAMPLES, Counting, check_same, kept_service, train
from support.local_job import SETTINGS, Interrupting
from support.thin_resnet import THIN_RESNET

from hapi.client.session import Session
from hapi.config.settings import load
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.train.init_from import started
from hapi.train.settings import TrainSettings
from hapi.train.trainer import Trainer
from hapi.wire.transport.http import LoopbackTransport

TRAINING = 64
"""Samples that are not held out."""
STEPS: dict[str, Any] = {
    "validation": 1 / 3, "ema": 0.9, "accumulate": 2, "feature_mixup": 0.4, "class_weights": "balanced",
    "label_smoothing": 0.1, "clip_norm": 1.0, "schedule": "one-cycle", "warmup": "0.5ep", "optimizer": "adamw",
    "head_lr": 0.02, "weight_decay": 0.01, "decay_norm_bias": False, "best": "f1", "metric": "f1",
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with kept_service(tmp_path_factory.mktemp("steps") / "store") as running:
        yield running


@pytest.mark.slow_except("fp32")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"split": 5}, id="fp32"),
        pytest.param({"split": 0, "precision": "bf16", "frozen_precision": "bf16"}, id="bf16"),
        pytest.param(
            {"split": "auto", "precision": "fp16", "frozen_precision": "fp16"},
            id="fp16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_all_kinds_of_steps(service: Service, tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = train(service, None, **STEPS, **changes)
    found = train(service, tmp_path, **STEPS, **changes)
    check_same(reference, found)
    assert of_epochs(found[0], "feature_hits") == [0, TRAINING, TRAINING]
    again = Counting(service)
    check_same(reference, train(again, tmp_path, **STEPS, **changes))
    assert again.asked == 0


STOPPING: dict[str, Any] = {
    **STEPS, "split": 5, "bs": 16, "request_size": 16, "epochs": 6, "early_stopping": 1, "min_improvement": 0.5,
    "frozen_precision": "bf16",
}  # fmt: skip


@pytest.fixture(scope="module")
def stopped(service: Service) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A run that stopped early, without a cache and an interruption."""
    return train(service, None, **STOPPING)


@pytest.mark.slow_except("8")
@pytest.mark.parametrize("at", [1, pytest.param(5, marks=pytest.mark.slow), 8])
def test_resumed_with_early_stopping(service: Service, stopped: Any, tmp_path: Path, at: int) -> None:
    """In the first epoch, between two of an accumulated step, and at the end of the second."""
    reference = stopped
    assert reference[0]["ended"]["how"] == "stopped early" and len(reference[0]["epochs"]) > 1
    kept = {**STOPPING, "checkpoint": str(tmp_path / "run.pt")}
    with pytest.raises(KeyboardInterrupt):
        train(service, tmp_path / "cache", Interrupting(at), **kept)
    counting = Counting(service)
    found = train(counting, tmp_path / "cache", resume=True, **kept)
    check_same(reference, found)
    assert counting.asked == (TRAINING - 16 * at + SAMPLES - TRAINING if at < 4 else 0)


@pytest.mark.slow
def test_begun_from_another(service: Service, tmp_path: Path) -> None:
    """Layers before the cut that the old training changed have features of their own; the others' are found."""
    cache = tmp_path / "cache"
    train(service, cache, split=5)
    train(service, cache, freeze=5, split=5, output=str(tmp_path / "old"))
    file = tmp_path / "old" / "model.safetensors"
    reference = begun(service, None, file, freeze=12)
    found = begun(service, cache, file, freeze=12)
    check_same(reference, found)
    assert of_epochs(found[0], "feature_hits") == [0, SAMPLES, SAMPLES]
    check_same(reference, begun(service, cache, file, freeze=12))
    shallow = begun(service, cache, file, freeze=5)
    assert of_epochs(shallow[0], "feature_hits") == [SAMPLES] * 3
    check_same(begun(service, None, file, freeze=5), shallow)


def begun(
    service: Service, folder: Path | None, file: Path, freeze: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A training from the network in ``file``."""
    own = {"cache": "off"} if folder is None else {"cache_dir": str(folder)}
    given = {
        name: value for name, value in {**SETTINGS, **JOB, **own}.items() if name not in ("model", "weights")
    }
    given |= {"init_from": str(file), "freeze": freeze, "split": 5, "store": service.settings.store}
    given["allow_model"] = (THIN_RESNET,)
    settings = started(load(TrainSettings, None, given).value, has_model=False)
    with Session.open(settings, transports=[LoopbackTransport(loopback_handler(service))]) as session:
        report = Trainer(session, settings).run()
        return report, {k: v.clone() for k, v in session.trained.state_dict().items()}

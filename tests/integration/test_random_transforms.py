"""Random transforms over the real service: the same pixels at every split, after a resume, and for a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from support.harness import report_of
from support.harness import train as hapi_train
from support.local_job import Silent, built
from support.plain import BATCH, COUNT, EPOCHS, SEED, file_order, packed_digits
from torchvision.transforms.v2 import functional as F

from hapi.client.session import Session
from hapi.data.transforms.random_params import FLIP, resized_crop, uniforms
from hapi.errors import ConflictError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.train.settings import TrainSettings
from hapi.train.trainer import Trainer
from hapi.wire.transport.http import LoopbackTransport

SIDE = 32


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"))


def service_of(store: Path, **settings: Any) -> Service:
    return Service(
        ServerSettings(store=str(store), threads=1, device="cpu", **settings), open_store(str(store))
    )


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    running = service_of(store, cos_batch=3)
    yield running
    running.close()


def settings_of(**changes: Any) -> TrainSettings:
    chosen: dict[str, Any] = {
        "model": "resnet18", "weights": "random", "dataset": "digits", "image_size": SIDE, "bs": BATCH, "seed": SEED,
        "split": 4, "freeze": 11, "request_size": 5, "micro_batch": 3, "device": "cpu", "augment": ("imagenet",),
        "epochs": EPOCHS, "threads": 1,
    }  # fmt: skip
    return TrainSettings(**{**chosen, **changes})


def open_session(service: Service, **changes: Any) -> Session:
    settings = settings_of(**changes)
    transport = LoopbackTransport(loopback_handler(service))
    with mock.patch("hapi.client.models.build_network", built):
        return Session.open(settings, transports=[transport])


def train(service: Service, watcher: Silent | None = None, **changes: Any) -> list[float]:
    with open_session(service, **changes) as session:
        report = Trainer(session, callbacks=[watcher or Silent()]).run()
    return [entry["loss"] for entry in report["epochs"]]


def features_of(session: Session, epoch: int) -> torch.Tensor:
    """Features of an epoch, by sample."""
    ids = np.concatenate(session.batch_ids(epoch))
    features = torch.cat([f.clone() for f, _ in session.epoch(epoch)])
    return features[torch.from_numpy(np.argsort(ids))]


def plain_pixels(store: Path, epoch: int) -> torch.Tensor:
    """What a plain pipeline of torchvision's functions gives for the samples, in stored order."""
    digits = load_digits()
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    out = []
    for position, numbers in zip(file_order(store), uniforms(SEED, epoch, np.arange(COUNT)), strict=True):
        pixels = torch.from_numpy((digits.images[position] * 255 / 16).round().astype(np.uint8)).expand(
            3, -1, -1
        )
        box = resized_crop(numbers, 8, 8, (0.08, 1.0), (3 / 4, 4 / 3))
        image = F.resized_crop(pixels, *box, [SIDE, SIDE])
        image = F.horizontal_flip(image) if numbers[FLIP] < 0.5 else image
        out.append((image.float() / 255 - mean) / std)
    return torch.stack(out)


@pytest.mark.slow
def test_split_0_has_the_pixels_of_a_plain_pipeline(service: Service, store: Path) -> None:
    with open_session(service, split=0, freeze=0) as session:
        seen = [features_of(session, epoch) for epoch in (0, 1)]
    for epoch in (0, 1):
        assert torch.equal(seen[epoch], plain_pixels(store, epoch))
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.slow
def test_a_pushed_split_has_the_same_pixels(service: Service, store: Path) -> None:
    """A server's features are those of its layers over the very pixels that split 0 gives, also when splits change."""
    wanted = [reference_features(service, plain_pixels(store, epoch)) for epoch in (0, 1)]
    for split in (0, 1, 4, 11):
        with open_session(service, split=split) as session:
            for epoch in (0, 1):
                got, expected = features_of(session, epoch), wanted[epoch]
                assert torch.linalg.norm(got - expected) <= 1e-5 * torch.linalg.norm(expected), (split, epoch)


def reference_features(service: Service, inputs: torch.Tensor) -> torch.Tensor:
    with open_session(service, split=0, freeze=11) as session:
        session.job_context.client_model.load_from(0)
        segment = session.job_context.model.segment(0, session.last_split, frozen=True)
        with torch.inference_mode():
            return segment(inputs)


@pytest.mark.slow
def test_requests_and_cos_batches_have_no_influence(service: Service, store: Path) -> None:
    """Split 1 is one convolution: what each COS batch computes is compared within its rounding."""
    with open_session(service, split=1, freeze=1) as session:
        expected = features_of(session, 2)
    for cos_batch, request_size in ((16, 16), (1, 7), (5, 2)):
        other = service_of(store, cos_batch=cos_batch, decode_threads=2)
        try:
            with open_session(other, split=1, freeze=1, request_size=request_size, bs=6) as session:
                torch.testing.assert_close(features_of(session, 2), expected, rtol=1e-5, atol=1e-5)
        finally:
            other.close()


@pytest.mark.slow
def test_two_runs_are_equal_to_the_last_bit_and_another_seed_is_not(service: Service) -> None:
    first = train(service)
    assert train(service) == first
    assert train(service, augment=()) != first and train(service, seed=SEED + 1) != first


class Stops(Silent):
    """Ctrl-C in the middle of the second epoch."""

    def on_step(self, steps: int) -> None:
        if steps == 3:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_resumed_in_the_middle_of_an_epoch(service: Service, tmp_path: Path) -> None:
    undisturbed, path = (
        train(service, augment=("imagenet", "jitter:brightness=0.4:hue=0.1")),
        str(tmp_path / "job.pt"),
    )
    changes = {"augment": ("imagenet", "jitter:brightness=0.4:hue=0.1"), "checkpoint": path, "resume": True}
    with pytest.raises(KeyboardInterrupt):
        train(service, Stops(), **changes)
    with pytest.raises(ConflictError, match="its transform is"):
        train(service, **{**changes, "augment": ("imagenet",)})
    assert train(service, **changes) == undisturbed


def test_validation_is_never_augmented(service: Service) -> None:
    for validation in (0.25, "digits"):
        with (
            open_session(service, validation=validation) as random,
            open_session(service, validation=validation, augment=()) as fixed,
        ):
            assert (
                random.job_context.transforms[0]
                != random.job_context.transforms[1]
                == fixed.job_context.transforms[0]
            )
            theirs = [(f.clone(), labels.clone()) for f, labels in fixed.validation()]
            for (features, labels), (expected, wanted) in zip(random.validation(), theirs, strict=True):
                assert torch.equal(features, expected) and torch.equal(labels, wanted)


@pytest.mark.slow
def test_a_planned_split_changes_nothing(service: Service, store: Path) -> None:
    with open_session(service, split="auto", freeze=11) as session:
        expected = reference_features(service, plain_pixels(store, 1))
        by = session.epoch(1, split_of=lambda number: (0, 11)[number % 2])
        got = torch.cat([f.clone() for f, _ in by])[
            torch.from_numpy(np.argsort(np.concatenate(session.batch_ids(1))))
        ]
    assert torch.linalg.norm(got - expected) <= 1e-5 * torch.linalg.norm(expected)


@pytest.mark.slow
def test_the_command(store: Path, tmp_path: Path) -> None:
    """``hapi-train --augment`` over its own server: the first lines say it, and the report has it."""
    report = tmp_path / "report.json"
    common = ["--store", str(store), "--dataset", "digits", "--weights", "random", "--bs", "8", "--epochs", "1",
              "--no-progress", "--split", "freeze"]  # fmt: skip
    said = hapi_train(*common, "--augment", "crop-flip", "--report", str(report)).stdout
    assert "input 3x32x32, augmented by crop-flip" in said
    assert report_of(report)["settings"]["augment"] == ["crop-flip"]
    wrong = hapi_train(*common, "--augment", "crop-flop", code=None)
    assert wrong.returncode == 2 and wrong.stderr.splitlines() == [
        "hapi-train: error: --augment: there is no 'crop-flop'; did you mean 'crop-flip'?"
    ]

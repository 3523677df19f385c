"""The Python API over the real service without a socket: what a user's own training loop may do."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.local_job import COUNT, open_session, pack_blobs, service_of
from support.thin_resnet import THIN_FEATURES

from hapi.client.delivery import passes
from hapi.client.loading import receiver as receiving
from hapi.client.session import Session
from hapi.client.settings import SessionSettings
from hapi.errors import DataError, HapiError, UsageError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("session") / "store"
    pack_blobs(store)
    pack_blobs(store, "fewer", count=9, classes=2)
    pack_blobs(store, "more", count=9, classes=7)
    with service_of(store) as running:
        yield running


@pytest.fixture(scope="module")
def session(service: Service) -> Iterator[Session]:
    with open_session(service) as opened:
        yield opened


def window_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hapi-window")]


def test_batches_have_the_shapes_they_should(session: Session) -> None:
    sizes = []
    for features, labels in session.epoch(0):
        assert (features.shape[1:], features.dtype) == ((THIN_FEATURES,), torch.float32)
        assert labels.shape == (len(features),) and labels.dtype == torch.int64
        assert not features.requires_grad
        sizes.append(len(features))
    assert sizes == [10, 10, 10, 10, 6]
    assert session.last.samples == COUNT
    assert session.last.seconds >= session.last.stall_seconds > 0


def test_a_connection_is_not_idle_while_samples_are_decoded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_decode, handle, decode = (
        [],
        threading.Event(),
        loopback_handler(service),
        receiving.input_batch,
    )

    def answers(method: str, path: str, body: bytes) -> Any:
        asked.append(path)
        return handle(method, path, body)

    def late(*given: Any) -> Any:
        assert may_decode.wait(240)
        return decode(*given)

    monkeypatch.setattr(receiving, "input_batch", late)
    with open_session(answers, split="none", request_size=5, in_flight=1) as session:
        stream = session.epoch(0)
        training = threading.Thread(target=lambda: sizes.append(len(next(stream)[0])))
        sizes: list[int] = []
        training.start()
        deadline = time.monotonic() + 240
        while asked.count("/v1/samples") < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert asked.count("/v1/samples") >= 4 and not sizes
        may_decode.set()
        training.join()
        assert sizes == [10]
        assert sum(len(features) for features, _ in stream) == COUNT - 10
    assert window_threads() == []


def test_what_cannot_be_decoded_reaches_the_consumer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise DataError("sample 3 is no image; pack the dataset again")

    monkeypatch.setattr(receiving, "input_batch", broken)
    with open_session(service, split="none") as session, pytest.raises(DataError, match="sample 3"):
        list(session.epoch(0))
    assert window_threads() == []


def test_the_order_is_a_pure_function_of_seed_and_epoch(service: Service, session: Session) -> None:
    with open_session(service) as other, open_session(service, seed=1) as different:
        for epoch in (0, 1, 7):
            ids = np.concatenate(session.batch_ids(epoch))
            assert sorted(ids.tolist()) == list(range(COUNT))
            np.testing.assert_array_equal(ids, np.concatenate(other.batch_ids(epoch)))
            assert ids.tolist() != np.concatenate(session.batch_ids(epoch + 1)).tolist()
            assert ids.tolist() != np.concatenate(different.batch_ids(epoch)).tolist()
        labels = torch.cat([labels for _, labels in session.epoch(7)])
    assert labels.tolist() == (ids % 4).tolist()


def test_an_epoch_can_begin_in_its_middle(session: Session) -> None:
    whole = list(session.epoch(3))
    for start in (0, 2, 4, 5):
        part = list(session.epoch(3, start_batch=start))
        assert len(part) == 5 - start
        for (features, labels), (f, y) in zip(whole[start:], part, strict=True):
            torch.testing.assert_close(features, f)
            assert torch.equal(labels, y)


@pytest.mark.parametrize(("epoch", "start"), [(0, 6), (0, -1), (-1, 0), (1 << 70, 0)])
def test_epochs_that_are_none(session: Session, epoch: int, start: int) -> None:
    with pytest.raises(UsageError, match="epoch"):
        session.epoch(epoch, start)


@pytest.mark.slow
def test_kept_features_are_never_overwritten(session: Session) -> None:
    kept = [(features, features.clone()) for features, _ in session.epoch(0)]
    for _ in range(2):
        list(session.epoch(1))
    for features, copy in kept:
        assert torch.equal(features, copy)


def by_id(session: Session, epoch: int) -> torch.Tensor:
    """Features of one epoch in the order of the samples' ids."""
    ids = np.concatenate(session.batch_ids(epoch))
    return torch.cat([features for features, _ in session.epoch(epoch)])[np.argsort(ids)]


@pytest.mark.slow
def test_features_may_be_kept_unless_they_are_drawn_anew(service: Service, session: Session) -> None:
    assert session.reusable and torch.allclose(by_id(session, 0), by_id(session, 1), atol=1e-5)
    with open_session(service, augment=("flip",), image_size=32) as random:
        assert not random.reusable and not torch.allclose(by_id(random, 0), by_id(random, 1), atol=1e-2)


@pytest.mark.slow
def test_leaving_the_loop_in_the_middle_leaves_no_threads(session: Session) -> None:
    for epoch in range(3):
        for _ in session.epoch(epoch):
            break
        assert not window_threads()
    with pytest.raises(ZeroDivisionError):
        for _ in session.epoch(0):
            1 / 0  # noqa: B018
    gc.collect()
    assert not window_threads()
    assert len(list(session.epoch(0))) == 5


def test_an_epoch_that_is_never_begun_costs_nothing(session: Session) -> None:
    unused = session.epoch(0)
    assert not window_threads()
    del unused


@pytest.mark.slow
def test_two_epochs_at_once(session: Session) -> None:
    apart = [list(session.epoch(e)) for e in (0, 1)]
    for together, *alone in zip(zip(session.epoch(0), session.epoch(1), strict=True), *apart, strict=True):
        for (features, labels), (f, y) in zip(together, alone, strict=True):
            torch.testing.assert_close(features, f)
            assert torch.equal(labels, y)


def test_a_closed_session_says_so(service: Service) -> None:
    session = open_session(service, bs=2, request_size=1, prefetch_bytes=0)
    stream = session.epoch(0)
    next(stream)
    session.close()
    with pytest.raises(HapiError, match="closed"):
        list(stream)
    for begun in (lambda: session.epoch(0), session.validation):  # also where all features are kept
        with pytest.raises(UsageError, match="the session is closed; open another one"):
            begun()
    session.close()
    assert not window_threads()


def test_a_missing_sample_is_noticed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check counts what frames carried: a window that left something out is found."""

    class Forgetful(passes.Incoming):
        def __iter__(self):  # type: ignore[no-untyped-def]
            for batch in super().__iter__():
                if batch.number == 2:
                    batch.ids[3] = batch.ids[4]
                yield batch

    monkeypatch.setattr(passes, "Incoming", Forgetful)
    with pytest.raises(HapiError, match="exactly once"):
        list(session.epoch(0))


def test_labels_beyond_the_classes_are_refused(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(passes.Incoming):
        def __iter__(self):  # type: ignore[no-untyped-def]
            for batch in super().__iter__():
                batch.fetched.labels[0] = 4
                yield batch

    monkeypatch.setattr(passes, "Incoming", Wrong)
    with pytest.raises(DataError, match="labels that are not the number of a class, 0 to 3"):
        list(session.epoch(0))


def test_drop_last(service: Service) -> None:
    with open_session(service, drop_last=True) as session:
        assert [len(y) for _, y in session.epoch(0)] == [10] * 4
    with (
        open_session(service, drop_last=True, bs=COUNT + 1) as session,
        pytest.raises(UsageError, match="drop-last"),
    ):
        session.epoch(0)


def test_a_validation_share_is_held_out(service: Service) -> None:
    with open_session(service, validation=0.25) as session:
        training = set(np.concatenate(session.batch_ids(0)).tolist())
        held_out = set(session.job_context.validation_ids.tolist())
        assert len(held_out) == round(COUNT / 4)
        assert training | held_out == set(range(COUNT)) and not training & held_out
        assert set(np.concatenate(session.batch_ids(1)).tolist()) == training
        labels = torch.cat([y for _, y in session.validation()])
        assert labels.tolist() == [i % 4 for i in sorted(held_out)]


def test_validation_on_another_data_set(service: Service) -> None:
    with open_session(service, validation="fewer") as session:
        assert sum(len(y) for _, y in session.validation()) == 9
        assert sum(len(y) for _, y in session.epoch(0)) == COUNT
    with pytest.raises(UsageError, match="--validation more: its classes are others"):
        open_session(service, validation="more")


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("split", [0, 5, 12, 13])
def test_every_split_gives_the_same_features(service: Service, session: Session, split: int) -> None:
    """Past the freeze (13) only layers without parameters follow, so it is a split too, and the last one."""
    with open_session(service, split=split) as other:
        assert other.last_split == 13
        mine = torch.cat([other.trained.eval()(f) for f, _ in other.epoch(0)])
        session.trained.eval()
        theirs = torch.cat([session.trained(f) for f, _ in session.epoch(0)])
        session.trained.train()
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("bs", 0), ("in_flight", -1.0), ("replan", "maybe"), ("seed", -1), ("bs", "x")],
)
def test_settings_made_in_python_are_checked(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):  # before any server is asked
        Session.open(SessionSettings(server=("http://127.0.0.1:9",), **{field: value}))  # type: ignore[arg-type]


def test_a_session_reads_its_own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SessionSettings(server=("http://127.0.0.1:9",), token_file="/nowhere", patience=0)
    with pytest.raises(UsageError, match="--token-file /nowhere: cannot be read"):
        Session.open(settings)
    monkeypatch.setenv("HAPI_TOKEN", "two words")
    with pytest.raises(UsageError, match="HAPI_TOKEN: expected one token"):
        Session.open(replace(settings, token_file=None))
    with pytest.raises(HapiError, match="refused"):
        Session.open(settings, token="given")


def test_settings_that_are_none() -> None:
    with pytest.raises(UsageError, match=r"settings: expected hapi\.SessionSettings .*, got dict"):
        Session.open({"model": "resnet18"})  # type: ignore[arg-type]


def test_one_server_as_plain_text_is_one_server() -> None:
    with pytest.raises(HapiError, match=r"http://127.0.0.1:9/v1/datasets.*refused"):
        Session.open(SessionSettings(server="http://127.0.0.1:9", patience=0))  # type: ignore[arg-type]


@pytest.mark.slow
def test_trainers_share_an_epoch_in_chunk_windows(service: Service) -> None:
    """Each trainer gets what its order names, and together they get every sample once."""
    seen: list[int] = []
    for trainer in range(2):
        with open_session(service, shuffle="chunks:4:3", trainers=2, trainer=trainer, bs=8) as session:
            planned = session.batch_ids(1)
            assert [len(labels) for _, labels in session.epoch(1)] == [len(ids) for ids in planned]
            assert str(session.job_context.order.shuffle) == "chunks:4:3"
            seen += [int(i) for ids in planned for i in ids]
    assert sorted(seen) == list(range(COUNT)) and seen != sorted(seen)

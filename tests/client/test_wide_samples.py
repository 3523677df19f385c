"""Samples with a longer side than an image has: vectors and signals, packed, extracted and trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.local_job import open_session, service_of
from torch import nn

from hapi.errors import BadRequestError, UsageError
from hapi.ingest.pack import pack
from hapi.ingest.sources.open import open_source
from hapi.store.open import open_store
from hapi.wire.references import MAX_SIDE, check_shape

MODULE = "hapi_test_wide_samples"
SOURCE = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(70_000, 4), nn.ReLU(), nn.Linear(4, 3))
"""


def test_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("support.local_job.ALLOWED", (MODULE,))
    x = np.random.default_rng(0).normal(size=(12, 70_000)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(12) % 3)
    pack(open_source(str(tmp_path / "x.npz")), open_store(str(tmp_path / "store")), "wide")
    with (
        service_of(tmp_path / "store") as service,
        open_session(service, dataset="wide", model=f"{MODULE}:net", freeze=1, split=1) as session,
    ):
        ids = session.batch_ids(0)[0]
        features = next(iter(session.epoch(0)))[0]
        state = session.job_context.client_model.read(["0.weight", "0.bias"])
        whole = torch.relu(nn.functional.linear(torch.from_numpy(x[ids]), state["0.weight"], state["0.bias"]))
        torch.testing.assert_close(features, whole, rtol=1e-4, atol=1e-4)


def test_shapes_that_nothing_has(tmp_path: Path) -> None:
    assert check_shape([MAX_SIDE], "x") == (MAX_SIDE,)
    for shape in ([], [0], [MAX_SIDE + 1], [MAX_SIDE] * 4, [1] * 5, "12", [1.0], [True]):
        with pytest.raises(BadRequestError, match=r"^x: "):
            check_shape(shape, "x")
    np.savez(tmp_path / "x.npz", x=np.zeros((1, MAX_SIDE + 1), np.uint8), y=[0])
    with pytest.raises(UsageError, match=f"shape of its samples: .* from 1 to {MAX_SIDE}, got"):
        open_source(str(tmp_path / "x.npz"))

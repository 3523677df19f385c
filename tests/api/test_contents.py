"""What a store has under a name, also where its listing is behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hapi
from hapi.api.contents import is_model
from hapi.errors import NotFoundError
from hapi.store.local import LocalStore


def test_a_data_set_that_the_listing_lacks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Swift with a dead node, right after it was written."""
    np.savez(tmp_path / "dots.npz", x=np.zeros((4, 3, 8, 8), dtype=np.uint8), y=[0, 1, 0, 1])
    hapi.pack(str(tmp_path / "dots.npz"), str(tmp_path / "store/dots"))
    store = LocalStore(tmp_path / "store")
    monkeypatch.setattr(LocalStore, "list_names", lambda *_: list[str]())
    assert not is_model(store, "dots")
    for name in ("dot", "..", "dots/", "dot@1"):
        with pytest.raises(NotFoundError, match="no dataset or model"):
            is_model(store, name)

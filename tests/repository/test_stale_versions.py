"""A node of a store that was away answers with the old state of a version, after its tensors were packed anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_repacking import layer

from hapi.errors import NotFoundError
from hapi.ingest.removal import remove_model
from hapi.repository.opening import open_model
from hapi.repository.packs.collect import collect_packs
from hapi.repository.push import push_tensors
from hapi.repository.verify import verify_model
from hapi.repository.versions import version_key
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore
from hapi.store.open import open_store


def packs(store: ObjectStore) -> dict[str, int]:
    return {info.key: info.size for info in store.list("repository/packs")}


@pytest.mark.parametrize("has_old_pack", [False, True])
@pytest.mark.parametrize("sharing", [(), (5,)])
def test_nothing_goes_that_the_new_state_needs(sharing: tuple[int, ...], has_old_pack: bool) -> None:
    """Neither as it is, nor where what another version needs of the pack is packed anew once more; the node may also
    have the pack that was removed.
    """
    store = open_store(f"memory://stale-{len(sharing)}-{has_old_pack}")
    push_tensors(store, "large", [layer(number) for number in (1, 2, 3, 4, 5)])
    push_tensors(store, "m", [layer(2), layer(5), layer(6)])
    if sharing:
        push_tensors(store, "n", [layer(number) for number in sharing])
    key = version_key("m", 1)
    old, old_packs = store.get(key), {pack: store.get(pack) for pack in packs(store)}
    remove_model(store, "large")
    collect_packs(store)
    new = store.get(key)
    needed = set(open_model(store, "m").manifest.packs)
    assert new != old and not needed <= old_packs.keys()
    push_tensors(store, "gone", [layer(9)])
    remove_model(store, "gone")
    for pack in old_packs.keys() - packs(store).keys() if has_old_pack else ():
        store.put(pack, old_packs[pack])
    for _ in range(2):
        store.put(key, old)
        assert collect_packs(store) and needed <= packs(store).keys()
        push_tensors(store, "gone", [layer(9)])
        remove_model(store, "gone")
    store.put(key, new)
    collect_packs(store)
    assert collect_packs(store) == ()
    for name in ("m", *(("n",) if sharing else ())):
        assert not verify_model(store, name).damages


def test_a_pack_that_goes_while_it_is_read_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node of a store may have it, and the next one not."""
    store = LocalStore(tmp_path / "store")
    push_tensors(store, "large", [layer(number) for number in (1, 2, 3, 4, 5)])
    push_tensors(store, "m", [layer(2), layer(6)])
    remove_model(store, "large")

    def absent(asked: LocalStore, key: str, start: int, out: memoryview) -> None:
        raise NotFoundError(f"there is no object {key}")

    before = packs(store)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read_into", absent)
        collect_packs(store)
    assert packs(store) == before and not verify_model(store, "m").damages
    collect_packs(store)
    assert packs(store) != before and not verify_model(store, "m").damages

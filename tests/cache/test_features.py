"""The cache of features: what was put comes back to the bit or not at all, whatever is killed, flipped or full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_tools import PHOTOS, cache_at, samples_of, size
from support.disks import small_disk
from support.feature_tools import COUNT, KEY, OTHER, SAMPLE_BYTES, content, features_at, found, labels, put

from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.errors import DataError
from hapi.wire.labels import LabelForm

ALL = set(range(COUNT))


@pytest.mark.parametrize("memory", [0, 300, 1 << 20])
def test_what_was_put_is_read(tmp_path: Path, memory: int) -> None:
    with features_at(tmp_path, memory=memory) as cache:
        put(cache, range(10))
        put(cache, range(5, 12))
        assert cache.share(np.arange(24)) == 0.5
        assert found(cache, [3, 15, 9, 11]) == {3, 9, 11} and found(cache) == set(range(12))
    with features_at(tmp_path, key=OTHER) as cache:
        assert found(cache) == set()
    with features_at(tmp_path, memory=memory) as cache:
        assert found(cache) == found(cache) == set(range(12))


def test_labels_of_several_values(tmp_path: Path) -> None:
    form = LabelForm("multi", 5)
    ids, wanted = np.arange(20), np.random.default_rng(0).random((20, 5)).astype(np.float32)
    for memory in (0, 1 << 20):
        with FeatureCache(CacheFolder.open(tmp_path, 1 << 20), KEY, COUNT, form, memory) as cache:
            cache.put(ids, content(ids), wanted)
            for _ in range(2):
                rows, read = np.empty((20, SAMPLE_BYTES), np.uint8), form.empty(20)
                assert cache.read(ids, rows, read).all() and (read == wanted).all()


def test_rows_of_a_wrong_form_are_refused(tmp_path: Path) -> None:
    with features_at(tmp_path) as cache:
        wide = np.empty((2, 2 * SAMPLE_BYTES), np.uint8)
        for rows in (wide, wide[:, ::2], wide[:1, :SAMPLE_BYTES]):
            with pytest.raises(ValueError, match="contiguous rows of 32 bytes"):
                cache.read(np.arange(2), rows, np.empty(2, np.int64))


# -- any steps ---------------------------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, COUNT - 1), max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "read"]), IDS),
        st.tuples(st.sampled_from(["flush", "close", "kill"]), st.just([])),
        st.tuples(
            st.sampled_from(["flip", "cut"]), st.lists(st.integers(0, 1 << 16), min_size=1, max_size=2)
        ),
    ),
    max_size=30,
)


@settings(max_examples=30)
@given(STEPS, st.sampled_from([2_500, 1 << 20]), st.sampled_from([0, 400, 1 << 20]))
def test_any_steps(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int]]], budget: int, memory: int
) -> None:
    """Against a set of ids: nothing that was not put, and all of it unless a file was harmed or there is no room."""
    base = tmp_path_factory.mktemp("features")
    path, places = base / "0", 0
    cache, model, harmed = features_at(path, budget, memory), set[int](), False
    for step, numbers in steps:
        if step == "put":
            put(cache, numbers)
            model |= set(numbers)
        elif step == "read":
            assert found(cache, numbers) <= model
        elif step == "flush":
            cache.flush()
        elif step == "close":
            cache.close()
            cache = features_at(path, budget, memory)
        elif step == "kill":  # what a new process finds is a copy of the folder at this moment
            places += 1
            if path.exists():
                shutil.copytree(path, base / str(places))
            cache.close()
            path = base / str(places)
            cache = features_at(path, budget, memory)
        else:
            files = sorted(path.glob("*@*/*-*"))
            for file in files[: 1 + len(numbers)]:
                data = bytearray(file.read_bytes())
                if not data:
                    continue
                where = numbers[0] % len(data)
                if step == "flip":
                    data[where] ^= 1 << numbers[-1] % 8
                with file.open("r+b") as opened:
                    opened.write(data)
                    if step == "cut":
                        opened.truncate(where)
                harmed = True
        here = found(cache)
        assert here <= model and (harmed or size(path) <= budget)
        if not harmed and budget == 1 << 20:
            assert here == model
    cache.close()


# -- killed ------------------------------------------------------------------------------------------------------

_FILLER = """
import sys
from pathlib import Path
from support import feature_tools as t
import numpy as np
cache = t.features_at(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
order = np.random.default_rng(int(sys.argv[4])).permutation(t.COUNT)
for start in range(0, t.COUNT, 4):
    t.put(cache, order[start : start + 4].tolist())
    t.found(cache)
    print(start, flush=True)
sys.stdin.read()
cache.close()
"""


def filler(path: Path, budget: int = 1 << 20, memory: int = 0, seed: int = 0) -> subprocess.Popen[str]:
    search = [str(Path(__file__).parents[1]), *sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", _FILLER, str(path), str(budget), str(memory), str(seed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def said(process: subprocess.Popen[str], lines: int) -> None:
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline()


def test_a_killed_process_leaves_what_it_had_put(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(COUNT)
    process = filler(tmp_path / "cache")
    said(process, 8)
    process.kill()
    process.communicate()
    with features_at(tmp_path / "cache") as first, features_at(tmp_path / "cache") as second:
        here = found(first)
        assert here >= set(order[:32].tolist()) and found(second) == here
        assert not list((tmp_path / "cache").glob("*@*/open-*"))


@pytest.mark.slow
def test_two_processes_fill_one_key(tmp_path: Path) -> None:
    """Each with rows in memory or not; one is killed at its end, and nothing is lost."""
    processes = [filler(tmp_path / "cache", memory=seed << 20, seed=seed) for seed in range(2)]
    for process in processes:
        said(process, COUNT // 4)
    processes[0].kill()
    for process in processes:
        assert process.communicate("")[1] == ""
    with features_at(tmp_path / "cache") as cache:
        assert found(cache) == ALL
    assert size(tmp_path / "cache") < 3 * COUNT * 100


def test_many_open_what_a_killed_one_left_at_once(tmp_path: Path) -> None:
    with features_at(tmp_path / "a") as cache:
        put(cache, range(40))
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    seen: list[set[int]] = []

    def work() -> None:
        with features_at(tmp_path / "b") as cache:
            while len(here := found(cache)) < 40:  # until the one that recovers it is done
                time.sleep(0.01)
            seen.append(here)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert seen == [set(range(40))] * 6


# -- damage and disks --------------------------------------------------------------------------------------------


def test_a_flipped_bit_costs_one_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with features_at(tmp_path) as cache:
        put(cache, range(COUNT))
    (segment,) = tmp_path.glob("*@*/segment-*")
    record = SAMPLE_BYTES + 32
    with segment.open("r+b") as file:
        file.seek(7 * record + 40)
        byte = file.read(1)[0]
        file.seek(7 * record + 40)
        file.write(bytes([byte ^ 4]))
    with features_at(tmp_path, memory=1 << 20) as cache:
        assert found(cache) == found(cache) == ALL - {7} and len(caplog.records) == 1
        put(cache, [7])
        assert found(cache) == ALL
    caplog.clear()
    with features_at(tmp_path) as cache:  # the mark stays in the file
        assert found(cache) == ALL and not caplog.records


def test_what_is_in_memory_needs_no_disk(tmp_path: Path) -> None:
    with features_at(tmp_path / "cache", memory=1 << 20) as cache:
        put(cache, range(30))
        cache.flush()
        shutil.rmtree(tmp_path / "cache")
        assert found(cache) == set(range(30))
    with features_at(tmp_path / "none", budget=10, memory=1 << 20) as cache:  # no room on the disk at all
        put(cache, range(30))
        assert found(cache) == set(range(30)) and cache.admits
        assert not (tmp_path / "none").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")
@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = replace(KEY, shape=(4096,))
    ids = np.arange(COUNT)
    rows = np.random.default_rng(0).integers(0, 256, (COUNT, 4 * 4096)).astype(np.uint8)
    with small_disk(tmp_path / "disk", 400) as disk:
        folder = CacheFolder.open(disk / "cache", 1 << 30)
        with FeatureCache(folder, key, COUNT, LabelForm()) as cache:
            for start in range(0, COUNT, 5):
                cache.put(ids[start : start + 5], rows[start : start + 5], ids[start : start + 5])
            out, got = np.empty_like(rows), np.empty(COUNT, np.int64)
            there = cache.read(ids, out, got)
            assert (out[there] == rows[there]).all() and not there.all()
        assert len(caplog.records) == 1 and "No space left on device" in caplog.text


# -- keys and budget ---------------------------------------------------------------------------------------------


def test_the_folder_says_of_which_key_it_is(tmp_path: Path) -> None:
    for line in ("cpu, batches of 16", "", "cuda, batches of 32", "cpu, batches of 16"):
        with features_at(tmp_path, made_with=line) as cache:
            put(cache, [len(line)])
    (file,) = tmp_path.glob("*@*/key.json")
    document = json.loads(file.read_text())
    assert document == {
        "key": KEY.to_json(),
        "digest": KEY.digest,
        "dataset": "flowers",
        "made_with": ["cpu, batches of 16", "cuda, batches of 32"],
    }
    flipped = json.dumps({**document, "key": {**KEY.to_json(), "cut": KEY.cut ^ 1}})
    for damaged in ("{", flipped):  # a power cut; a bit
        file.write_text(damaged)
        with features_at(tmp_path) as cache:
            assert found(cache) == {0, 18, 19}
        assert json.loads(file.read_text())["key"] == KEY.to_json()
    file.write_text(json.dumps({**document, "key": OTHER.to_json(), "digest": OTHER.digest}))
    with pytest.raises(DataError, match="holds features of another key; remove it with 'hapi cache clear"):
        features_at(tmp_path)


def test_another_name_of_the_data_set_is_the_same_key(tmp_path: Path) -> None:
    with features_at(tmp_path) as cache:
        put(cache, range(10))
    renamed = replace(KEY, dataset=replace(KEY.dataset, name="roses"))
    with features_at(tmp_path, key=renamed) as cache:
        assert (found(cache) == set(range(10))) == (renamed.digest == KEY.digest)


def test_samples_and_features_share_a_budget(tmp_path: Path) -> None:
    """What nobody uses goes, the least recently used first, be it samples or features; what is used stays."""
    budget, now = 16_000, time.time()
    with features_at(tmp_path, budget) as old:
        put(old, range(40))
    with cache_at(tmp_path, PHOTOS, budget) as middle:
        middle.put(samples_of(range(20)))
    for cache, age in ((old, 50), (middle, 20)):
        path = cache._records.path if isinstance(cache, FeatureCache) else cache.path
        os.utime(path / "users", (now - age, now - age))
    with features_at(tmp_path, budget, key=OTHER) as used:
        put(used, range(30))
    with features_at(tmp_path, budget, key=OTHER) as used, cache_at(tmp_path, budget=budget) as samples:
        for start in range(0, 400, 10):
            samples.put(samples_of(range(start, start + 10)))
            assert size(tmp_path) <= budget
        assert found(used) == set(range(30))
        names = {version.name for version in CacheFolder.open(tmp_path, budget).versions()}
        assert f"features@{KEY.digest}" not in names and len(names) == 2


def test_a_put_copies(tmp_path: Path) -> None:
    ids = np.arange(20)
    rows, kept = content(ids), labels(ids)
    with features_at(tmp_path, memory=400) as cache:
        cache.put(ids, rows, kept)
        rows[:], kept[:] = 0, 0
        assert found(cache) == set(range(20))

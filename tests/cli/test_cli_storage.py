"""``hapi pack``, ``ls`` and ``verify`` as real processes: killed, at once, on a full disk, and with wrong input."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.forked import ForkedProcess, environment
from support.killed_storing import killed_storing

from hapi.cli.main import main
from hapi.data.dataset import find_dataset
from hapi.data.verify import verify_dataset
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.repository.versions import compressed, version_key
from hapi.store.open import open_store

SHARD = 4096


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """4,000 samples of 64 bytes: 63 shards of 4 KiB."""
    rng = np.random.default_rng(0)
    path = tmp_path / "xy.npz"
    np.savez(path, x=rng.integers(0, 256, (4000, 64), dtype=np.uint8), y=np.arange(4000) % 7)
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hapi.cli.main", *arguments]


def start(*arguments: str) -> ForkedProcess:
    return ForkedProcess(
        ["hapi.cli.main", *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(condition: Path, process: ForkedProcess, pattern: str) -> None:
    """Or for the end of the process, if nothing went wrong."""
    deadline = time.monotonic() + 240
    while not list(condition.glob(pattern)) and (code := process.poll()) != 0:
        assert time.monotonic() < deadline and code is None, process.communicate()
        time.sleep(0.0005)


@pytest.mark.slow
def test_killed_at_random_moments_then_resumed(arrays: Path, tmp_path: Path) -> None:
    """SIGKILL lands somewhere between the first shard and the end; the same command goes on each time."""
    store = tmp_path / "store"
    arguments = ("pack", str(arrays), f"{store}/d", "--shard-size", str(SHARD), "--quiet")
    rng, kills = random.Random(time.time_ns()), 0
    for _ in range(60):
        process = start(*arguments)
        wait_for(store, process, "datasets/d/packing.json")
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0 and kills:
            break
        if process.returncode == 0:  # the signal came too late: from the beginning
            shutil.rmtree(store)
            continue
        kills += 1
        if (store / "datasets/d/manifest.json").exists():
            assert verify_dataset(open_store(str(store)), "d").sound
        if kills == 6:
            break
    result = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment())
    if result.returncode:
        assert "--replace" in result.stderr
    assert kills >= 1
    fresh = pack(open_source(str(arrays)), open_store("memory://kills"), "d", PackOptions(shard_bytes=SHARD))
    opened = find_dataset(open_store(str(store)), "d")
    assert opened.version == fresh.version and verify_dataset(open_store(str(store)), "d").sound
    names = sorted(p.name for p in (store / "datasets/d").rglob("*") if p.is_file())
    assert names == sorted(["manifest.json", "index.safetensors", *(f"shard-{n:05d}.bin" for n in range(63))])


@pytest.mark.slow
def test_two_processes_at_once(arrays: Path, tmp_path: Path) -> None:
    """One writes, the other is told who does; then the dataset is whole."""
    store = tmp_path / "store"
    arguments = ("pack", str(arrays), f"{store}/d", "--shard-size", "1024", "--quiet")
    processes = [start(*arguments), start(*arguments)]
    outputs = [p.communicate(timeout=240) for p in processes]
    codes = sorted(p.returncode for p in processes)
    assert codes == [0, 1], outputs
    loser = next(o for p, o in zip(processes, outputs, strict=True) if p.returncode)
    assert "is being written by process" in loser[1] or "there is a dataset" in loser[1]
    assert loser[1].count("\n") == 1
    assert verify_dataset(open_store(str(store)), "d").sound


@pytest.mark.slow
def test_interrupt_says_so_and_frees_the_lock(arrays: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments = ("pack", str(arrays), f"{store}/d", "--shard-size", "1024", "--quiet")
    code, said = killed_storing("put", "shard-", 4, *arguments, number=signal.SIGINT)
    assert code == 130 and "interrupted" in said and "Traceback" not in said
    assert not (store / "datasets/d/pack.lock").exists() and not (store / "datasets/d/manifest.json").exists()
    assert main([*arguments]) == 0
    assert verify_dataset(open_store(str(store)), "d").sound


def test_full_disk_leaves_nothing_whole_and_can_go_on(
    arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on file size stands for the full disk (EFBIG for ENOSPC): the shards fit, the index does not."""
    arguments = ["pack", str(arrays), f"{tmp_path}/store/d", "--shard-size", "16KiB", "--quiet"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        code = main(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    error = capsys.readouterr().err
    assert code == 1 and "make room and run the same again" in error and "index.safetensors" in error
    folder = tmp_path / "store" / "datasets" / "d"
    assert not (folder / "manifest.json").exists() and not list(folder.rglob(".*"))
    assert main(["ls", f"{tmp_path}/store"]) == 0 and "incomplete" in capsys.readouterr().out
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert "going on after 4000 samples" in output.err
    assert main(["verify", f"{tmp_path}/store/d"]) == 0


def test_pack_ls_verify(arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"{tmp_path}/store"
    assert (
        main(["pack", str(arrays), f"{store}/d", "--shard-size", "64KiB", "--classes", "a,b,c,d,e,f,g"]) == 0
    )
    assert "4000 samples, 7 classes" in capsys.readouterr().out
    assert (
        main(["pack", "torchvision:FakeData:size=6", f"{store}/fake", "--image-size", "32", "--limit", "4"])
        == 0
    )
    document = {"digest": "ab" * 16, "bytes": 10, "architecture": "resnet18"}
    open_store(store).put(version_key("net", 1), compressed(document))
    open_store(store).put(version_key("bad", 1), b"[")
    capsys.readouterr()
    assert main(["ls", store, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(d["name"], d["samples"], d["kind"]) for d in listed["datasets"]] == [
        ("d", 4000, "tensor"),
        ("fake", 4, "encoded"),
    ]
    assert listed["datasets"][1]["transform"]["crop"] == 32
    assert [(m["name"], m["state"], m.get("architecture")) for m in listed["models"]] == [
        ("bad", "damaged", None),
        ("net", "whole", "resnet18"),
    ]
    assert main(["ls", store]) == 0
    assert "resnet18" in capsys.readouterr().out
    assert main(["ls", f"{store}/d"]) == 0
    assert "7: a, b, c" in capsys.readouterr().out
    assert main(["verify", f"{store}/d"]) == 0
    assert ": sound" in capsys.readouterr().out


def test_verify_tells_of_a_flipped_byte(
    arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["pack", str(arrays), f"{tmp_path}/store/d", "--shard-size", "64KiB", "--quiet"])
    shard = next(tmp_path.glob("store/datasets/d/*/shard-00001.bin"))
    data = bytearray(shard.read_bytes())
    data[70] ^= 4
    shard.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", f"{tmp_path}/store/d"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "shard-00001.bin: sample 1025, bytes 64..128: fails its checksum" in lines[0]
    assert "DAMAGED, 1 findings" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["pack", "SRC", "noslash"], 2, "STORE/NAME"),
        (["pack", "SRC", "TMP/store/.."], 2, "not a name"),
        (["pack", "SRC", "TMP/store/.hidden"], 2, "not a name"),
        (["pack", "SRC", "TMP/store/a\0b"], 2, "not a name"),
        (["pack", "/nonexistent", "TMP/store/d"], 2, "no such folder"),
        (["pack", "SRC", "TMP/store/d", "--limit", "0"], 2, "limit"),
        (["pack", "SRC", "TMP/store/d", "--shard-size", "1"], 2, "--shard-size"),
        (["pack", "SRC", "TMP/store/d", "--image-size", "100000"], 2, "--image-size"),
        (["pack", "SRC", "TMP/store/d", "--image-size", "64", "--crop", "3"], 2, "--image-size"),
        (["pack", "SRC", "TMP/store/d", "--std", "0", "1", "1"], 2, "std"),
        (["pack", "SRC", "TMP/store/d", "--classes", "a,b"], 2, "classes"),
        (["pack", "SRC", "TMP/store/d", "--classes", "a,a,b,c,d,e,f"], 2, "twice"),
        (["pack", "SRC", "TMP/store/d", "--classes", "@/nonexistent"], 2, "cannot be read: No such file"),
        (["pack", "SRC", "TMP/store/d", "--labels", "/nonexistent"], 2, "labels"),
        (["pack", "SRC", "gopher://x/d"], 2, "unknown scheme"),
        (["verify", "TMP/store/d"], 1, "no folder"),
        (["ls", "TMP/nothing"], 1, "no folder"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    code: int,
    word: str,
    arrays: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [a.replace("TMP", str(tmp_path)).replace("SRC", str(arrays)) for a in arguments]
    assert main(filled) == code
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1 and error.startswith(f"hapi {arguments[0]}: error: ")


@pytest.mark.slow
def test_names_that_are_no_text(tmp_path: Path) -> None:
    """Where a terminal takes UTF-8 only; a folder's name may be any bytes."""
    folder = tmp_path / os.fsdecode(b"r\xe9t")
    (folder / os.fsdecode(b"caf\xe9")).mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / os.fsdecode(b"caf\xe9") / "x.png")
    for arguments in (
        ["pack", str(folder), f"{tmp_path}/store/d", "--quiet"],
        ["ls", f"{tmp_path}/store/d"],
    ):
        done = subprocess.run(
            command(*arguments),
            env=environment(PYTHONIOENCODING="utf-8:strict"),
            capture_output=True,
            timeout=240,
        )
        assert done.returncode == 0 and b"\\udce9t" in done.stdout, done.stderr


def test_names_in_a_store_do_not_steer_the_terminal(
    arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    hostile = "cat\x1b]0;owned\x07 \u202e \udc80"
    source = open_source(str(arrays))
    packed = pack(source, open_store(str(store)), "xy", PackOptions(limit=10))
    manifest = replace(packed, classes=(hostile, *packed.classes[1:]), source=hostile)
    (store / "datasets/xy/manifest.json").write_bytes(manifest.to_bytes())
    document = {"architecture": hostile, "digest": hostile, "bytes": 3}
    open_store(str(store)).put(version_key("m", 1), compressed(document))
    (store / "models" / os.fsdecode(b"\x1b[2J\xff")).mkdir()
    (store / "models" / os.fsdecode(b"\x1b[2J\xff") / "model.json").write_text("{")
    for address in (store, store / "xy", store / "m"):
        assert main(["ls", str(address)]) == 0
        shown = capsys.readouterr().out
        assert shown and all(line.isprintable() for line in shown.splitlines())
        assert r"\x1b]0;owned\x07" in shown


@pytest.mark.slow
def test_no_library_warns_beside_the_line_of_an_image_that_is_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "wide.ppm").write_bytes(b"P6 12000 9000 255\n" + bytes(64))
    assert main(["pack", f"{tmp_path}/images", f"{tmp_path}/store/d", "--quiet"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "12000 x 9000 is too large" in err, err
    assert not recwarn.list

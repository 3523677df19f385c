"""``benchmarks siege``: everything at once against one server, beside three training jobs.

A server with few descriptors and little memory on one half of the cores; on the other three jobs of three tenants, and
those who flood, drip, reset, send garbage, have reads hang, take memory away, fill disks, replace datasets and kill.
First the jobs are trained undisturbed. Under siege they must end with the same losses, the server must answer for its
health, and afterwards have no more memory and descriptors than before.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load.siege_attacks import Attackers, Target, descriptors
from benchmarks.load.siege_figures import Siege
from benchmarks.load.siege_jobs import Job, Replacer, Rounds, Trainers
from benchmarks.testbed.bed import Cores
from benchmarks.testbed.conditions import conditions
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.tiers import START_SECONDS, environment, last_line, process_bytes, read_line
from hapi.data.dataset import find_dataset
from hapi.errors import TransportError, UsageError
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.prefix import zoo_reference
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec

TENANTS = ("one", "two", "three", "trouble")
SIDE = 64
LARGE_SIDE = 3000
"""Pixels of the large images' sides: 27 MB each when decoded."""
DISK_BYTES = 256 << 20
"""The small file system that checkpoints go to."""
SETTLE_SECONDS = 25.0
"""Seconds until an idle server has given back its memory and dropped connections."""


@dataclass(frozen=True, kw_only=True)
class SiegeSettings:
    """Duration and size of a siege."""

    seconds: float = 600.0
    samples: int = 320
    """Samples of each job's dataset."""
    epochs: int = 3
    """Epochs of each round of a job."""
    descriptors: int = 256
    """File descriptors that the server may have."""
    kill_every: float = 60.0
    """Seconds between two kills of the server, in the first half of the siege."""
    replace_every: float = 8.0
    large_side: int = LARGE_SIDE


def measure_siege(settings: SiegeSettings, tell: Callable[[str], None]) -> Siege:
    """Train undisturbed, then under siege; ``tell`` is given lines about the progress."""
    Cores.split_machine()  # says what is missing before anything is made
    with (
        LooseBed("its clients are not limited") as bed,
        tempfile.TemporaryDirectory(prefix="hapi-siege-") as folder,
        _small_disk(Path(folder)) as disk,
    ):
        town = _Testbed(bed, Path(folder), disk, settings)
        found = {
            **conditions(),
            "server_and_clients": "each on one half of the cores, over the loopback",
            "full_disk": "tmpfs" if disk else "left out: mounting needs root",
        }
        tell("the jobs, undisturbed")
        quiet = town.train(None)
        before = town.settled()
        tell(f"undisturbed: {max(r.seconds[0] for r in quiet.values() if r.seconds):.0f} s; the siege begins")
        return town.besieged(quiet, before, found, tell)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of :data:`DISK_BYTES`; None where none can be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "hapi-siege", str(disk)]
    try:
        is_mounted = subprocess.run(mounting, capture_output=True, check=False).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield disk if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(disk)], capture_output=True, check=False)


class _Testbed:
    """The server, its store, and those who live from it."""

    def __init__(self, bed: LooseBed, folder: Path, disk: Path | None, settings: SiegeSettings) -> None:
        self._bed, self._folder, self._disk, self._settings = bed, folder, disk, settings
        self._store = folder / "store"
        self._unhang = folder / "reads-come-back"
        self._log = folder / "server.log"
        self._make_data()
        self._tokens = {name: secrets.token_hex(16) for name in TENANTS}
        tenants = "".join(f"{name}: {{token: {token}}}\n" for name, token in self._tokens.items())
        (folder / "tenants.yaml").write_text(tenants)
        self._port = 0
        self._server = self._start_server()
        self._down: list[tuple[float, float]] = []
        self._trainers = Trainers(bed, folder, f"http://127.0.0.1:{self._port}")

    # -- before ------------------------------------------------------------------------------------------

    def _make_data(self) -> None:
        from benchmarks.testbed.photos import write_crops

        folder, settings = self._folder, self._settings
        write_crops(folder / "crops", settings.samples, SIDE)
        write_crops(folder / "other", 64, SIDE)
        _write_large(folder / "large", settings.large_side)
        for name, source in self._packings().items():
            self._pack(name, source)
        self._pack("hung", "other")

    def _packings(self) -> Mapping[str, str]:
        return {"images": "crops", "same": "crops", "changing": "other", "large": "large"}

    def _pack(self, name: str, source: str, *more: str) -> None:
        command = [sys.executable, "-m", "hapi.cli.main", *self._packing(name, source), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(""), check=False)
        if done.returncode:
            raise UsageError(f"hapi pack: {last_line(done.stderr)}")

    def _packing(self, name: str, source: str) -> list[str]:
        source_and_target = (str(self._folder / source), str(self._store / name))
        return ["pack", *source_and_target, "--image-size", str(SIDE)]

    def _start_server(self) -> subprocess.Popen[str]:
        own = ("--hang", "datasets/hung/", "--until", str(self._unhang))
        options = {
            "--store": str(self._store),
            "--port": str(self._port),
            "--threads": "1",
            "--device": "cpu",
            "--tenants": str(self._folder / "tenants.yaml"),
            "--device-memory": "500MB",
            "--host-memory": "500MB",
            "--cos-batch": "32",
            "--max-queued": "64",
            "--max-request-seconds": "30",
            "--stuck-seconds": "10",
            "--send-timeout": "10",
            "--slow-reader-seconds": "5",
            "--log-level": "warning",
        }
        module = [sys.executable, "-m", "benchmarks.load.siege_server", *own]
        module += ["--descriptors", str(self._settings.descriptors), "--", "--exit-with-stdin"]
        with self._log.open("ab") as log:
            process = self._bed.start(
                "server",
                [*module, *(word for option in options.items() for word in option)],
                env=environment(""),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        line = read_line(process, START_SECONDS)
        if not line.startswith("listening on "):
            raise TransportError(f"hapi-server did not start: {last_line(self._log.read_text())}")
        self._port = int(line.strip().rpartition(":")[2])
        return process

    # -- the jobs ----------------------------------------------------------------------------------------

    def _jobs(self) -> Sequence[Job]:
        common = ("--model", "resnet18", "--weights", "random", "--bs", "32", "--request-size", "32", "--lr", "0.01",
                  "--epochs", str(self._settings.epochs), "--timeout", "30", "--patience", "300")  # fmt: skip
        disk = self._disk or self._folder
        cuts = (
            ("one", "same", "none", disk),
            ("two", "images", "maxpool", disk),
            ("three", "images", "freeze", None),
        )
        return [
            Job(
                name=name,
                token=self._tokens[name],
                flags=(*common, "--dataset", dataset, "--split", split),
                checkpoints=checkpoints or self._folder,
                killed=checkpoints is None,
            )
            for name, dataset, split, checkpoints in cuts
        ]

    def train(self, over: threading.Event | None) -> dict[str, Rounds]:
        """All jobs at the same time: once, or in rounds until ``over``."""
        jobs = self._jobs()
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = {job.name: pool.submit(self._trainers.run, job, over) for job in jobs}
        return {name: rounds.result() for name, rounds in running.items()}

    # -- the siege ---------------------------------------------------------------------------------------

    def besieged(
        self,
        quiet: Mapping[str, Rounds],
        before: Mapping[str, int],
        found: dict[str, Any],
        tell: Callable[[str], None],
    ) -> Siege:
        """All of it, for as long as the settings say."""
        over = threading.Event()
        timer = threading.Timer(self._settings.seconds, over.set)
        packings = [self._packing("same", "crops")]
        packings += [self._packing("changing", "crops"), packings[0], self._packing("changing", "other")]
        began = time.monotonic()
        timer.start()
        with self._watched() as looks:
            with (
                Attackers(self._target()) as attackers,
                Replacer(self._bed, packings, self._settings.replace_every) as replacer,
            ):
                killer = threading.Thread(target=self._kill_now_and_then, args=(over, began, tell))
                killer.start()
                rounds = self.train(over)
                over.set()
                killer.join()
            lasted = time.monotonic() - began
            self._unhang.touch()
            tell(f"the siege of {lasted:.0f} s is over; the server settles")
            after = self.settled()
        timer.cancel()
        return Siege(
            settings=asdict(self._settings),
            conditions=found,
            quiet=quiet,
            rounds=rounds,
            looks=looks,
            down=self._down,
            before=before,
            after=after,
            log_bytes=self._log.stat().st_size,
            seen={
                **attackers.seen,
                "replaced": replacer.seen,
            },
            seconds=lasted,
        )

    def _target(self) -> Target:
        store = open_store(str(self._store))

        def of(name: str, **more: Any) -> dict[str, Any]:
            return {"dataset": find_dataset(store, name).reference.to_json(), **more}

        spec = ModelSpec(architecture="resnet18", weights="random:0", input_shape=(3, SIDE, SIDE))
        model = build(spec)
        layer = model.layers[3]
        extract = of(
            "large",
            model=zoo_reference(spec, model, 4).to_json(),
            split=4,
            split_name=layer.name,
            transform=TransformSpec.for_image_size(SIDE).to_json(),
        )
        return Target(
            port=self._port,
            token=self._tokens["trouble"],
            extract=extract,
            hung=of("hung", ids=list(range(32))),
            changing=lambda: of("changing", ids=list(range(32))),
            pid=lambda: self._server.pid,
            disk=self._disk,
        )

    def _kill_now_and_then(self, over: threading.Event, began: float, tell: Callable[[str], None]) -> None:
        """Kill the server in the first half; afterwards one process goes through all the trouble."""
        settings = self._settings
        while not over.wait(settings.kill_every) and time.monotonic() - began < settings.seconds / 2:
            since = time.monotonic()
            self._server.kill()
            self._server.wait()
            self._server = self._start_server()
            self._down.append((since, time.monotonic()))
            tell(f"{since - began:.0f} s: the server was killed and started again")

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[dict[str, Any]]]:
        """The looks at the server's health inside the block."""
        process = self._bed.start(
            "client",
            [sys.executable, "-m", "benchmarks.load.siege_watch", f"http://127.0.0.1:{self._port}"],
            env=environment(""),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        looks: list[dict[str, Any]] = []
        lines = process.stdout
        if process.stdin is None or lines is None:
            raise TransportError("the benchmark's watch has no pipes; this is a defect of hapi")
        reader = threading.Thread(target=lambda: looks.extend(json.loads(line) for line in lines))
        reader.start()
        try:
            yield looks
        finally:
            process.stdin.close()
            process.wait()
            reader.join()

    def settled(self) -> dict[str, int]:
        """Resident bytes and descriptors of the server when it has had nothing to do for a while."""
        time.sleep(SETTLE_SECONDS)
        pid = self._server.pid
        return {"resident": process_bytes(pid, "VmRSS"), "descriptors": descriptors(pid)}


def _write_large(target: Path, side: int) -> None:
    """Eight JPEGs of smooth noise."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(8):
        class_folder = target / f"class{number % 2}"
        class_folder.mkdir(parents=True, exist_ok=True)
        small = generator.integers(0, 256, (side // 50, side // 50, 3), dtype=np.uint8)
        Image.fromarray(small).resize((side, side)).save(class_folder / f"{number}.jpg", quality=85)

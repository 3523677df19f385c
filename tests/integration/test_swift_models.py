"""Models in a real OpenStack Swift: pushed, pulled, loaded by trainings, over one server and over two that share."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forked import ForkedProcess, environment
from support.free_ports import free_port
from support.harness import (
    RESNET_JOB,
    ServerProcess,
    hapi,
    losses,
    packed_digits,
    report_of,
    server,
    train,
    wait_for,
)
from support.swift_tools import FaultProxy, Swift

from hapi.models.zoo.build import ModelSpec, build

pytestmark = pytest.mark.slow
STORE = "s3://hapi/models"
NET = ModelSpec(architecture="squeezenet1_1", num_classes=10, weights="random:3", input_shape=(3, 64, 64))
TRAINED = (*RESNET_JOB, "--model", "store:net", "--image-size", "64", "--epochs", "1", "--bs", "20", "--split", "5",
           "--dataset", "digits")  # fmt: skip
MIB = 1 << 20


@pytest.fixture(scope="module")
def models(swift: Swift, tmp_path_factory: pytest.TempPathFactory) -> Swift:
    """The Swift with a network, ``net``, and tensors only, ``raw``."""
    folder = tmp_path_factory.mktemp("given")
    state = {f"layers.{i}.weight": torch.full((8 * MIB,), i, dtype=torch.uint8) for i in range(12)}
    save_file(state, folder / "raw.safetensors")
    hapi("push", "squeezenet1_1", f"{STORE}/net", "--weights", "random:3", "--num-classes", "10", "--input-size", "64",
         **swift.environment)  # fmt: skip
    hapi("push", str(folder / "raw.safetensors"), f"{STORE}/raw", "--tag", "first", **swift.environment)
    return swift


def merged(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors") if folder.is_dir() else [folder]
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def is_raw(state: dict[str, torch.Tensor]) -> bool:
    return len(state) == 12 and all(
        torch.equal(tensor, torch.full((8 * MIB,), int(name.split(".")[1]), dtype=torch.uint8))
        for name, tensor in state.items()
    )


def test_a_network_comes_back_whole_and_in_shards(models: Swift, tmp_path: Path) -> None:
    expected = build(NET).module.state_dict()
    for output, flags in (("net.safetensors", ()), ("net", ("--shard-size", "2MB"))):
        hapi("pull", f"{STORE}/net", "--output", str(tmp_path / output), *flags, **models.environment)
        found = merged(tmp_path / output)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert ": sound" in hapi("verify", f"{STORE}/net", "--quiet", **models.environment).stdout
    shown = json.loads(hapi("show", f"{STORE}/raw@first", "--json", **models.environment).stdout)
    assert len(shown["layers"]) == 12


@contextlib.contextmanager
def behind(swift: Swift) -> Iterator[tuple[FaultProxy, dict[str, str]]]:
    """A proxy before the store, and the environment that goes through it."""
    with contextlib.closing(FaultProxy(swift.port)) as proxy:
        yield proxy, {**swift.environment, "AWS_ENDPOINT_URL": proxy.url, "HAPI_STORE_RETRIES": "2"}


def test_a_store_with_faults_gives_the_same_file(models: Swift, tmp_path: Path) -> None:
    with behind(models) as (proxy, env):
        proxy.faults = ("late", "pass", "503", "pass", "reset", "pass", "cut", "pass", "less", "pass")
        hapi("pull", f"{STORE}/raw", "--output", str(tmp_path / "raw.safetensors"), "--quiet", **env)
        assert sum(proxy.happened.values()) > 3
    assert is_raw(merged(tmp_path / "raw.safetensors"))


def test_a_store_that_goes_away_is_one_line_and_the_pull_goes_on_later(models: Swift, tmp_path: Path) -> None:
    output = tmp_path / "raw.safetensors"
    pull = ("pull", f"{STORE}/raw", "--output", str(output), "--quiet")
    with behind(models) as (proxy, env):
        proxy.faults = ("pass", *["503"] * 1000)
        done = hapi(*pull, code=1, **env)
        assert done.stderr.startswith("hapi pull: error: ") and done.stderr.count("\n") == 1, done.stderr
        assert [path.name for path in tmp_path.iterdir()] in ([], ["raw.safetensors.partial"])
        proxy.faults = ("pass",)
        hapi(*pull, **env)
    assert is_raw(merged(output)) and [path.name for path in tmp_path.iterdir()] == ["raw.safetensors"]


def large(partial: Path) -> bool:
    """Whether so much has come that a part of it is kept."""
    return partial.exists() and partial.stat().st_size > 24 * MIB


@pytest.mark.parametrize("given", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_that_is_ended_in_the_middle_goes_on(
    models: Swift, tmp_path: Path, given: signal.Signals
) -> None:
    output = tmp_path / "raw.safetensors"
    arguments = ("pull", f"{STORE}/raw", "--output", str(output), "--quiet")
    partial = tmp_path / "raw.safetensors.partial"
    with behind(models) as (proxy, env):
        env |= {f"HAPI_STORE_{name}_TIMEOUT": "600" for name in ("READ", "REQUEST")}  # while answers are held
        proxy.read_bytes = 48 * MIB
        process = ForkedProcess(["hapi", *arguments], env={**environment(), **env})
        wait_for(lambda: process.poll() is not None or large(partial), what="a part of the file")
        assert process.poll() is None
        process.send_signal(given)
        proxy.release()
        assert process.wait(240) == (130 if given == signal.SIGINT else -given)
        assert not output.exists()
        assert " MiB of them kept from an earlier pull" in hapi(*arguments, **env).stdout
    assert is_raw(merged(output)) and not partial.exists()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a training with the network in a folder."""
    folder = packed_digits(tmp_path_factory.mktemp("local"), 60)
    hapi(
        "push",
        "squeezenet1_1",
        f"{folder}/net",
        "--weights",
        "random:3",
        "--num-classes",
        "10",
        "--input-size",
        "64",
    )
    with server(folder) as running:
        return trained_over(running, folder / "report.json")


def trained_over(running: ServerProcess, report: Path) -> list[float]:
    train(*TRAINED, "--server", running.url, "--report", str(report))
    return losses(report_of(report))


def test_a_training_over_one_server_and_over_two(
    models: Swift, expected: list[float], tmp_path: Path
) -> None:
    """The two know each other, and each hands on the packs that it provides."""
    hapi(
        "pack",
        "sklearn:digits",
        f"{STORE}/digits",
        "--image-size",
        "32",
        "--limit",
        "60",
        **models.environment,
    )
    with server(STORE, **models.environment) as running:
        assert trained_over(running, tmp_path / "report.json") == pytest.approx(expected, rel=1e-6)
    with ExitStack() as ends:
        ports = [free_port() for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        providers = [part for url in urls for part in ("--providers", url)]
        running = [
            ends.enter_context(server(STORE, *providers, "--advertise", url, port=port, **models.environment))
            for url, port in zip(urls, ports, strict=True)
        ]
        for one in running:
            assert trained_over(one, tmp_path / "report.json") == pytest.approx(expected, rel=1e-6)

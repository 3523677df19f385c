"""Device names, the kinds of full memory, and float32 that is exact whatever was set before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.local_job import open_session, pack_blobs

from hapi.errors import DeviceMemoryError, HostMemoryError, UsageError
from hapi.models.devices import does_not_fit, finish, resolve_device
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store

EXACT = """
import os, torch
from hapi.models.devices import set_arithmetic

def told(before, tf32):
    exec(before)
    set_arithmetic(torch.device("cuda"), tf32=tf32)
    b = torch.backends
    # Reading the older flags raises when they contradict the newer ones, as computing would.
    return b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32, b.cuda.matmul.fp32_precision, b.cudnn.conv.fp32_precision

for before in BEFORE:
    for tf32 in (False, True):
        if not os.fork():
            print(told(before, tf32), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
"""
"""Each case in a process of its own, forked when torch has been imported."""
BEFORE = (
    "",
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.fp32_precision = torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = 'ieee'",
)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "", "cuda:x"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(UsageError, match=r"^--device '"):
        resolve_device(name, "--device")


def test_devices_that_are() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_work_that_does_not_fit() -> None:
    """A GPU will not have room later either; a machine may."""
    assert isinstance(does_not_fit(torch.device("cuda"), "no room"), DeviceMemoryError)
    host = does_not_fit(torch.device("cpu"), "no room")
    assert isinstance(host, HostMemoryError) and host.retryable and host.status == 503


def test_finishing_on_the_cpu_is_nothing() -> None:
    finish(torch.device("cpu"))


@pytest.mark.slow
def test_float32_is_exact_whatever_was_set_before() -> None:
    code = EXACT.replace("BEFORE", repr(BEFORE))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    exact, asked = (False, False, "ieee", "ieee"), (True, True, "tf32", "tf32")
    assert done.stdout.splitlines() == [str(exact), str(asked)] * len(BEFORE), done.stderr
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("tf32", [False, True])
def test_both_tiers_compute_with_tf32_only_if_asked_to(
    tf32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    for room in ("server.device.device", "client.session"):
        monkeypatch.setattr(f"hapi.{room}.set_arithmetic", lambda device, *, tf32=False: asked.append(tf32))
    pack_blobs(tmp_path / "store")
    settings = ServerSettings(store=str(tmp_path / "store"), threads=1, tf32=tf32)
    service = Service(settings, open_store(settings.store))
    try:
        with open_session(service, tf32=tf32) as session:
            assert session.job_context.rough is tf32
    finally:
        service.close()
    assert asked == [tf32, tf32]

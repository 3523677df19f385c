"""A folder on a disk that the kernel slows down: a file as a block device, whose rates a control group bounds.

Needs Linux, root, ``losetup``, ``mkfs.ext4`` and the ``blkio`` controller (version 1) with throttling. The bounds are
those of the root group, where the writing of dirty pages is counted too; they are of this one device alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.keep.disks import Disk
from hapi.errors import UsageError

CONTROLLER = Path("/sys/fs/cgroup/blkio")
_LOOK_SECONDS = 0.02
_SECTOR = 512
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def why_not() -> str | None:
    """Return the reason why no such folder can be made here; None when it can."""
    if os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    if not (CONTROLLER / "blkio.throttle.write_bps_device").exists():
        return f"there is no {CONTROLLER} that can bound a device"
    return None


class SlowFolder:
    """The folder; its disk can be given other rates while it is in use."""

    def __init__(self, path: Path, device: str) -> None:
        """Bound nothing yet of block device ``device``, which is mounted at ``path``."""
        self.path, self._device = path, device
        number = Path(device).stat().st_rdev
        self._number = f"{os.major(number)}:{os.minor(number)}"

    def set_rates(self, read: float, write: float) -> None:
        """Bound both directions, in bytes a second."""
        for name, rate in (("read", read), ("write", write)):
            _bound(name, self._number, int(rate))

    def written_bytes(self) -> int:
        """Return the bytes that the device has written since it was made."""
        fields = (Path("/sys/block") / Path(self._device).name / "stat").read_text(encoding="ascii").split()
        return int(fields[6]) * _SECTOR

    @contextlib.contextmanager
    def like(self, disk: Disk) -> Iterator[None]:
        """Behave as ``disk`` in the block, whose fast part begins empty."""
        self.set_rates(disk.read, disk.write)
        ended, before = threading.Event(), self.written_bytes()

        def watch() -> None:
            """Slow the device down once its fast part is full."""
            while not ended.wait(_LOOK_SECONDS):
                if disk.slow_write is not None and self.written_bytes() - before >= disk.fast_bytes:
                    self.set_rates(disk.read, disk.slow_write)
                    return

        watcher = threading.Thread(target=watch, name="slow-folder", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _bound(name: str, number: str, rate: int) -> None:
    (CONTROLLER / f"blkio.throttle.{name}_bps_device").write_text(f"{number} {rate}\n", encoding="ascii")


@contextlib.contextmanager
def slow_folder(folder: Path, nbytes: int) -> Iterator[SlowFolder]:
    """Make a disk of ``nbytes`` in a file in ``folder`` and mount it; it is gone afterwards.

    Raises:
        UsageError: it cannot be made.
    """
    reason = why_not()
    if reason is not None:
        raise UsageError(f"no throttled folder on this machine: {reason}")
    image, mount_point = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    mount_point.mkdir()
    _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
    device = _run("losetup", "--find", "--show", "--direct-io=off", str(image)).strip()
    with contextlib.ExitStack() as stack:
        stack.callback(image.unlink)
        stack.callback(_run, "losetup", "--detach", device)
        _run("mount", device, str(mount_point))
        stack.callback(_unmount, mount_point)
        found = SlowFolder(mount_point, device)
        stack.callback(found.set_rates, 0, 0)  # which means no bound
        yield found


def _unmount(path: Path) -> None:
    for _ in range(50):
        done = subprocess.run(["umount", str(path)], capture_output=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    _run("umount", "--lazy", str(path))


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip().splitlines()
        raise UsageError(f"{command[0]}: {words[-1] if words else 'failed'}") from None

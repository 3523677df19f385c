"""A machine's constants: speeds of computing, copying, decoding, sending and receiving. Learned once, then
kept.

Call :func:`constants` for them. They take a few tenths of a second to measure and do not depend on a model.
"""

from __future__ import annotations

import dataclasses
import io
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Self, cast

from hapi.errors import ConfigError
from hapi.process.processors import processor_count
from hapi.profiler import machine_cache as cache
from hapi.profiler.profile import TierProfile
from hapi.profiler.reading import read_strictly
from hapi.wire.samples import Samples

if TYPE_CHECKING:
    import torch

MACHINE_VERSION = 1
_KIND = "machine"
_RUNS = 4
"""The first warms up; of the others the fastest counts, as other work only ever makes a run slower."""
_MATRIX = 512
_PATTERN_BYTES = 8 << 20
_FRAME_SAMPLES = 16
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of this machine with one device (HAPI, section 4.3, Table 1: linear in the data's size)."""

    version: int = MACHINE_VERSION
    identity: tuple[str, ...]
    """Facts that they depend on; see :func:`hapi.profiler.machine_cache.identity`."""
    measured: str
    """Time of the measurement, as ISO 8601."""
    device: str
    """``cpu`` or ``cuda``."""
    device_name: str
    image_side: int
    """Side of the images that :attr:`decode_seconds` is about."""
    processors: int
    threads: int
    """Threads that torch computes with on the CPU."""
    flops_per_second: float
    """Operations of a float32 matrix product per second on the device."""
    copy_bytes_per_second: float
    """Bytes read and written by a copy on the device."""
    decode_seconds: float
    """CPU seconds to decode and transform a JPEG of 500 x 375, ImageNet's usual size."""
    send_seconds_per_byte: float
    """CPU seconds to make frames with checksums and write them to a socket."""
    receive_seconds_per_byte: float
    """CPU seconds to read frames from a socket and check them."""
    to_device_seconds_per_byte: float
    from_device_seconds_per_byte: float

    def __post_init__(self) -> None:
        if self.version != MACHINE_VERSION:
            raise ConfigError(f"machine: version is {self.version}, this hapi reads {MACHINE_VERSION}")
        if (
            min(self.processors, self.threads) < 1
            or min(self.flops_per_second, self.copy_bytes_per_second) <= 0
        ):
            raise ConfigError("machine: processors, threads and rates must be above 0")

    def tier(self, *, server: bool, encoded: bool = True) -> TierProfile:
        """This machine in the part of the server, which sends, or of the client, which receives."""
        return TierProfile(
            device=self.device,
            processors=self.processors,
            threads=min(self.threads, self.processors),
            decode_seconds=self.decode_seconds if encoded else 0.0,
            codec_seconds_per_byte=self.send_seconds_per_byte if server else self.receive_seconds_per_byte,
            to_device_seconds_per_byte=self.to_device_seconds_per_byte,
            from_device_seconds_per_byte=self.from_device_seconds_per_byte,
        )

    def faster(self, speed: float) -> Machine:
        """A machine whose processors are ``speed`` times as fast."""
        return dataclasses.replace(
            self,
            flops_per_second=self.flops_per_second * speed,
            copy_bytes_per_second=self.copy_bytes_per_second * speed,
            decode_seconds=self.decode_seconds / speed,
            send_seconds_per_byte=self.send_seconds_per_byte / speed,
            receive_seconds_per_byte=self.receive_seconds_per_byte / speed,
        )

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Parse ``document``; :class:`ConfigError` names the first field that is wrong."""
        return cast(Self, read_strictly(cls, document, "machine"))


def constants(
    device: torch.device | str = "cpu", image_side: int = 224, *, remeasure: bool = False
) -> Machine:
    """Return the constants of this machine with ``device``: kept ones, or measured now and kept.

    They are measured again after 30 days, and with other versions, cores or threads. A cache that cannot be
    read or written is no error.

    Args:
        device: the torch device.
        image_side: of the synthetic images, in pixels.
        remeasure: measure in any case.
    """
    import torch

    chosen = torch.device(device)
    key = (*cache.identity(), f"device={chosen}", f"threads={torch.get_num_threads()}", f"side={image_side}")
    kept = None if remeasure else _remembered(key)
    if kept is not None:
        return kept
    found = _measure(chosen, image_side)
    cache.save(_KIND, key, dataclasses.asdict(found))
    _remembered.cache_clear()
    return found


@lru_cache(maxsize=8)
def _remembered(key: tuple[str, ...]) -> Machine | None:
    kept = cache.load(_KIND, key)
    if kept is None:
        return None
    try:
        return Machine.from_json(kept.content)
    except ConfigError:
        return None


def _measure(device: torch.device, image_side: int) -> Machine:
    import torch

    cuda = device.type == "cuda"
    flops, traffic = _device_rates(device)
    send, receive = frame_seconds()
    to_device, from_device = _copies(device) if cuda else (0.0, 0.0)
    return Machine(
        identity=cache.identity(),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if cuda else cache.processor_name(),
        image_side=image_side,
        processors=processor_count(),
        threads=torch.get_num_threads(),
        flops_per_second=flops,
        copy_bytes_per_second=traffic,
        decode_seconds=_decode_seconds(image_side),
        send_seconds_per_byte=send,
        receive_seconds_per_byte=receive,
        to_device_seconds_per_byte=to_device,
        from_device_seconds_per_byte=from_device,
    )


def _fastest(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    seconds = []
    for _ in range(_RUNS):
        started = clock()
        work()
        seconds.append(clock() - started)
    return max(1e-9, min(seconds[1:]))


def _device_rates(device: torch.device) -> tuple[float, float]:
    """(operations per second, bytes per second) on the device."""
    import torch

    from hapi.models.devices import finish
    from hapi.profiler.timing import work_clock

    clock = work_clock(device)
    square = torch.ones(_MATRIX, _MATRIX, device=device)
    source = torch.ones(_PATTERN_BYTES // 4, device=device)
    target = torch.empty_like(source)

    def multiply() -> None:
        torch.mm(square, square)
        finish(device)

    def copy() -> None:
        target.copy_(source)
        finish(device)

    return 2 * _MATRIX**3 / _fastest(multiply, clock), 2 * _PATTERN_BYTES / _fastest(copy, clock)


def _copies(device: torch.device) -> tuple[float, float]:
    """Seconds a byte from pinned memory to the device, and back."""
    import torch

    from hapi.models.devices import finish

    pinned = torch.ones(_PATTERN_BYTES, dtype=torch.uint8).pin_memory()
    on_device = pinned.to(device)

    def to_device() -> None:
        on_device.copy_(pinned, non_blocking=True)
        finish(device)

    def from_device() -> None:
        pinned.copy_(on_device, non_blocking=True)
        finish(device)

    return _fastest(to_device) / _PATTERN_BYTES, _fastest(from_device) / _PATTERN_BYTES


def _decode_seconds(side: int) -> float:
    """CPU seconds of one thread for a synthetic JPEG."""
    import numpy as np
    from PIL import Image

    from hapi.data.manifest import SampleLayout
    from hapi.data.transforms.pipeline import input_batch
    from hapi.wire.references import TransformSpec

    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((500, 375)).save(buffer, "JPEG", quality=95)
    data = np.frombuffer(buffer.getvalue(), dtype=np.uint8)
    one = np.zeros(1, dtype=np.int64)
    samples = Samples(ids=one, data=data, offsets=np.array([0, len(data)]), labels=one)
    transform, layout = TransformSpec.for_image_size(side), SampleLayout(kind="encoded")
    return _fastest(lambda: input_batch(samples, layout, transform), time.thread_time)


def frame_seconds() -> tuple[float, float]:
    """CPU seconds a byte to send and to receive frames, as both tiers do it, over a local connection."""
    import numpy as np

    from hapi.wire import frames
    from hapi.wire.frame_reader import FrameReader

    side = _PATTERN_BYTES // 4 // _FRAME_SAMPLES
    spec = frames.TensorSpec("features", "float32", (_FRAME_SAMPLES, side))
    header = frames.FrameHeader(ids=np.arange(_FRAME_SAMPLES), tensors=(spec,))
    payload = frames.byte_view(np.ones((_FRAME_SAMPLES, side), dtype=np.float32))
    target = memoryview(bytearray(len(payload)))
    sending, receiving = _connection()
    sent: list[float] = []

    def send() -> None:
        """The sending side's runs; CPU seconds of each are noted."""
        try:
            for _ in range(_RUNS):
                started = time.thread_time()
                for part in frames.joined(frames.data_frame(header, [payload])):
                    sending.sendall(part)
                sent.append(time.thread_time() - started)
        except OSError:  # the receiving side says what is wrong
            sending.close()

    with sending, receiving:
        sender = threading.Thread(target=send, name="hapi-measure-frames", daemon=True)
        sender.start()
        reader = FrameReader(_SocketSource(receiving))
        received = _fastest(lambda: reader.next(lambda _: [target]), time.thread_time)
        sender.join(_TIMEOUT_SECONDS)
    return max(1e-9, min(sent[1:])) / len(payload), received / len(payload)


class _SocketSource:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def readinto(self, buffer: memoryview, /) -> int:
        return self._connection.recv_into(buffer)


def _connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection on this machine, or of a socket pair where there is no loopback."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname(), timeout=_TIMEOUT_SECONDS)
            two, _ = listener.accept()
    except OSError:
        one, two = socket.socketpair()
    one.settimeout(_TIMEOUT_SECONDS)
    two.settimeout(_TIMEOUT_SECONDS)
    return one, two

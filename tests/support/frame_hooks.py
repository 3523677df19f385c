"""Read by the property-based tester: how it reads frames. An answer that is not whole fails there."""

from __future__ import annotations

from typing import Any

import numpy as np
import schemathesis

from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import MEDIA_TYPE, FrameHeader, StreamEnd, byte_view


@schemathesis.deserializer(MEDIA_TYPE)
def frames(context: Any, response: Any) -> int:
    """Number of the frames of an answer; raises for one that breaks the format."""
    reader = FrameReader(BufferSource(iter([response.content])))
    while not isinstance(reader.next(_buffers), StreamEnd):
        pass
    if reader.bytes_read != len(response.content):
        raise ValueError("something follows the end frame")
    return reader.frames


def _buffers(header: FrameHeader) -> list[memoryview]:
    return [byte_view(np.empty(tensor.nbytes, np.uint8)) for tensor in header.tensors]

"""Encoding of a frame's tensors, where that makes them shorter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hapi.codecs.codec import encode
from hapi.codecs.exact import Buffer
from hapi.codecs.names import NONE
from hapi.wire.frames import ALIGNMENT, DTYPE_BYTES, StreamedBytes, TensorSpec, codec_fits


def encode_tensor(spec: TensorSpec, data: Buffer, codec: str) -> tuple[TensorSpec, Buffer | StreamedBytes]:
    """Return a tensor's form on the wire and its bytes there: encoded if that is shorter, otherwise raw.

    Args:
        spec: the tensor's form, raw.
        data: its raw bytes; parts of the result may be parts of them.
        codec: the encoding, one of :data:`hapi.codecs.names.CODECS`.

    Raises:
        UnprocessableError: a value is too large for the codec.
    """
    if codec == NONE or not codec_fits(codec, spec.dtype) or not spec.nbytes:
        return spec, data
    buffers = encode(codec, data, DTYPE_BYTES[spec.dtype], spec.shape[0] if spec.shape else 1)
    if buffers is None or _length(buffers) + ALIGNMENT > spec.nbytes:  # a header that says so is longer, too
        return spec, data
    length = _length(buffers)
    return replace(spec, codec=codec, encoded_bytes=length), StreamedBytes(length, buffers)


def _length(buffers: Iterable[Buffer]) -> int:
    return sum(map(len, buffers))

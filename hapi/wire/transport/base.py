"""The one seam at the network: every request of the client to a server goes through a :class:`Transport`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hapi.wire.frame_reader import FrameReader
from hapi.wire.transport.cancellation import Cancellation

T = TypeVar("T")


class Transport(Protocol):
    """A way to one server."""

    url: str

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Send a request and return the JSON answer.

        Args:
            method: of HTTP.
            path: on the server, such as ``/v1/datasets``.
            document: the body; None for none.

        Raises:
            HapiError: the error that the server sent, or :class:`TransportError`.
        """

    def stream(
        self,
        path: str,
        document: Any,
        receive: Callable[[FrameReader], T],
        cancellation: Cancellation | None = None,
    ) -> T:
        """POST a request whose answer is a stream of frames.

        Args:
            path: on the server.
            document: the body.
            receive: given the answer's frames; must read to the end frame. Its result is returned.
            cancellation: by which another thread may break this request alone, which then raises.

        Raises:
            HapiError: the error that the server sent, or :class:`TransportError`.
        """

    def received_bytes(self) -> int | None:
        """Bytes that have arrived over the network so far, read or not; None where the system does not tell."""

    def interrupt(self) -> None:
        """Break the requests under way, which then raise :class:`TransportError`; from any thread."""

    def close(self) -> None:
        """Break what is under way and release connections; may be called from any thread, and twice."""

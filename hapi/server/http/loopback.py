"""A server without a socket: the handler that a client's loopback transport calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from hapi.errors import HapiError
from hapi.server.service import Service
from hapi.wire.frames import Buffer, error_frame
from hapi.wire.messages import CODE_HEADER, parse_body
from hapi.wire.warm_up import WARM_PATH, WarmUpRequest

Answer = tuple[int, Mapping[str, str], Iterator[Buffer]]


def loopback_handler(service: Service) -> Callable[[str, str, bytes], Answer]:
    """Return the function from (method, path, body) to (status, headers, buffers), as the HTTP application
    answers.
    """

    def handle(method: str, path: str, body: bytes) -> Answer:
        """Return status, headers and body for one request."""
        try:
            if method == "GET":
                return 200, {}, iter([json.dumps(service.document(path)).encode()])
            if path == WARM_PATH:
                ahead = WarmUpRequest.from_json(parse_body(body))
                state = service.warm_ups.begin(ahead, busy=False)
                return 200, {}, iter([json.dumps({"state": state}).encode()])
            stream = service.stream(service.request(path, body))
            first = next(stream.frames)
        except HapiError as error:
            return error.status, {}, iter([json.dumps(error.to_problem()).encode()])

        def buffers() -> Iterator[Buffer]:
            """Yield the frames' buffers."""
            try:
                for frame in chain([first], stream.frames):
                    yield from frame
            except HapiError as error:
                yield error_frame(error)
            finally:
                stream.close()

        return 200, {CODE_HEADER: service.code}, buffers()

    return handle

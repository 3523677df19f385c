"""The tests' own memory of a server's answers: what a second job asks is not computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from support import local_job
from support.local_job import COUNT, open_session, remembering

from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.wire.frames import Buffer


@pytest.mark.slow
def test_a_second_job_computes_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, handle = [], loopback_handler(service)

    def counted(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        asked.append(path)
        return handle(method, path, body)

    monkeypatch.setattr(local_job, "loopback_handler", lambda service: counted)
    remembered, epochs, counts = remembering(service), [], []
    for _ in range(2):
        with open_session(remembered) as session:
            epochs.append([tensor for batch in session.epoch(0) for tensor in batch])
        counts.append(len(asked))
    assert counts[0] == counts[1] >= COUNT // 10
    assert all(torch.equal(one, other) for one, other in zip(*epochs, strict=True))

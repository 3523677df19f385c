"""The client's side of the evaluation: a session that does what the other process says, one JSON line each way.

Commands: ``{"do": "open", ...settings}``, ``{"do": "plan", "samples", "epoch", "profiled"}``, ``{"do": "epoch",
"split", "samples", "epoch", "limit"}``, ``{"do": "warm", "split", "samples"}``, ``{"do": "fetch", "split", "samples",
"at_once"}``, ``{"do": "ready"}``, ``{"do": "close"}``, and with ``--limited`` ``{"do": "limit", "bits"}``. It ends with
its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.split.replay import mean_profile, priced
from benchmarks.testbed.limited import LimitedTransport, RateLimit
from hapi.allocator import keep_freed_memory
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.pass_loading import PassLoading
from hapi.client.loading.prefetcher import Prefetcher
from hapi.client.loading.wire_codecs import WireCodecs
from hapi.client.planning.split_source import planning_of
from hapi.client.session import Session
from hapi.config.settings import load
from hapi.errors import DeviceMemoryError, HapiError
from hapi.models.warm_up import warm_up_libraries
from hapi.profiler.profile import Profile
from hapi.train.settings import TrainSettings
from hapi.train.steps.optimizer import make_optimizer
from hapi.wire.transport.http import HttpTransport


class SweepClient:
    """One session at a time."""

    def __init__(self, token: str | None, limit: RateLimit | None = None) -> None:
        """``limit``: of the link, where the system has none of its own."""
        self._token = token
        self._limit = limit
        self._session: Session | None = None
        self._optimizer_bytes = 0.0
        self._optimizer: torch.optim.Optimizer | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do one command; errors of Hapi's become the answer."""
        try:
            return {"ok": True, **getattr(self, "do_" + command.pop("do"))(**command)}
        except DeviceMemoryError as error:
            return {"ok": False, "memory": True, "error": str(error)}
        except HapiError as error:
            return {"ok": False, "memory": False, "error": str(error)}

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def do_open(self, **settings: Any) -> dict[str, Any]:
        """Another model or batch size."""
        self.close()
        made = load(TrainSettings, None, {"cache": "off", **settings}).value  # each epoch computes
        if made.memory is None:
            keep_freed_memory()
        self._session = session = self._connect(made)
        session.trained.train()
        self._optimizer = make_optimizer(made, session.trained)
        self._ids = session.job_context.training_ids
        return {
            "splits": list(session.job_context.candidate_splits),
            "freeze": session.job_context.freeze,
            "layers": len(session.job_context.model.layers),
            "count": len(self._ids),
        }

    def do_ready(self) -> dict[str, Any]:
        """Let the libraries take the memory of any training, so that later growth is the job's."""
        warm_up_libraries()
        return {}

    def do_close(self) -> dict[str, Any]:
        """End the session, until another one is opened."""
        self.close()
        self._optimizer = None
        return {}

    def _connect(self, settings: TrainSettings) -> Session:
        transports, limit = None, self._limit
        if limit is not None:
            urls = settings.server
            transports = [LimitedTransport(HttpTransport(url, token=self._token), limit) for url in urls]
        self._optimizer_bytes = settings.optimizer_bytes
        return Session.open(
            settings,
            token=self._token,
            optimizer_bytes=self._optimizer_bytes,
            transports=transports,
        )

    def do_limit(self, bits: float | None) -> dict[str, Any]:
        """The link's rate from now on."""
        if self._limit is None:
            raise HapiError("the benchmark's client was started without --limited; this is a defect of hapi")
        self._limit.set_rate(bits)
        return {}

    def do_warm(self, split: int, samples: int) -> dict[str, Any]:
        """Let both sides load the layers that ``split`` needs."""
        return self.do_epoch(split=split, samples=samples, epoch=0, limit=None)

    def do_epoch(self, split: int, samples: int, epoch: int, limit: float | None) -> dict[str, Any]:
        """One epoch of ``samples`` at ``split``; it is broken off after ``limit`` seconds."""
        session = self._opened(samples)
        started = time.monotonic()
        over = False
        planned = session.job_context.strategy is not None
        stream = session.epoch(epoch, split_of=(lambda number: split) if planned else None)
        for features, labels in stream:
            self._step(session, features, labels)
            if limit is not None and time.monotonic() - started > limit:
                over = session.last.samples < samples
                break
        seconds = time.monotonic() - started
        stream.close()  # type: ignore[attr-defined]
        report = session.last
        return {
            "seconds": seconds,
            "over": over,
            "samples": report.samples,
            "bytes": report.traffic.bytes_received,
            "server_seconds": report.traffic.server_seconds(),
            "client_seconds": report.client.seconds,
            "stall_seconds": report.stall_seconds,
            "requests": report.traffic.requests,
            "stages": report.traffic.stages(),
        }

    def do_fetch(self, split: int, samples: int, at_once: int) -> dict[str, Any]:
        """Receive ``samples`` at ``split``, ``at_once`` requests at a time, and do nothing with them."""
        session = self._opened(samples)
        job_context, settings = session.job_context, session.settings
        started = time.monotonic()
        loading = PassLoading(
            servers=job_context.servers,
            traffic=Traffic(job_context.servers.received_bytes),
            buffers=BufferPool(pinned=session.device.type == "cuda"),
            tracer=session.tracer,
            codecs=WireCodecs("none"),
            request_size=settings.request_size,
            in_flight=at_once,
            budget=settings.prefetch_bytes,
        )
        window = Prefetcher(lambda number: job_context.job(split), session.batch_ids(0), loading)
        try:
            received = sum(len(batch.ids) for batch in window)
            seconds = time.monotonic() - started
        finally:
            window.close()
        return {"seconds": seconds, "samples": received, "bytes": loading.traffic.bytes_received}

    def do_plan(
        self,
        samples: int,
        epoch: int,
        profiled: int | None = None,
        before: dict[str, Any] | None = None,
        parts: int = 0,
    ) -> dict[str, Any]:
        """Profile an epoch of ``profiled`` samples as ``hapi-train`` does; what strategies choose for ``samples``.

        They choose from the mean of that profile and of ``before``, itself the mean of ``parts`` profiles.
        """
        session = self._opened(profiled or samples)
        planning = planning_of(
            session.settings, session.job_context, session.meter, session.budget, self._optimizer_bytes
        )
        if planning is None:
            raise HapiError("the sweep's session has no strategy; this is a defect of hapi")
        session.planning = planning
        started = time.monotonic()
        epochs = 0
        while planning.plan is None:
            for features, labels in session.epoch(epoch + epochs):
                self._step(session, features, labels)
            epochs += 1
        profile, job = planning.profile, replace(planning.job, samples=samples)
        if profile is None:
            raise HapiError("there is a plan without a profile; this is a defect of hapi")
        if before is not None:
            profile = mean_profile([*[Profile.from_json(before)] * parts, profile])
        return {
            "seconds": time.monotonic() - started,
            **priced(profile, job),
            "observed_memory": session.budget.highest(),
            "profile": profile.to_json(),
        }

    def _opened(self, samples: int) -> Session:
        if self._session is None:
            raise HapiError("the sweep's session is not open; this is a defect of hapi")
        self._session.job_context.training_ids = spread(self._ids, samples)
        return self._session

    def _step(self, session: Session, features: torch.Tensor, labels: torch.Tensor) -> None:
        loss = torch.nn.functional.cross_entropy(session.trained(features), labels)
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()


def spread(ids: npt.NDArray[np.int64], samples: int) -> npt.NDArray[np.int64]:
    """``samples`` of ``ids`` at equal distances: stored class by class, the first ones need not be like all."""
    return ids[np.arange(min(samples, len(ids))) * len(ids) // max(1, min(samples, len(ids)))]


def main() -> None:
    """Answer commands until standard input ends."""
    limit = RateLimit(None) if "--limited" in sys.argv[1:] else None
    client = SweepClient(os.environ.get("HAPI_TOKEN"), limit)
    try:
        for line in sys.stdin:
            print(json.dumps(client.answer(json.loads(line))), flush=True)
    finally:
        client.close()


if __name__ == "__main__":
    main()

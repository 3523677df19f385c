"""The client's side of a sweep: a session that does what the other process says, one JSON line each way.

Commands: ``{"do": "open", ...settings}``, ``{"do": "plan", "samples", "epoch"}``, ``{"do": "epoch", "split", "samples",
"epoch", "limit"}``, ``{"do": "warm", "split", "samples"}``. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from hapi.client.session import Session
from hapi.client.settings import TrainSettings
from hapi.client.splits import planning_of
from hapi.client.trainer import make_optimizer
from hapi.errors import DeviceMemoryError, HapiError
from hapi.profiler.cost import estimate
from hapi.profiler.decide import PLANNERS, plan


class SweepClient:
    """One session at a time."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._session: Session | None = None
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
        made = TrainSettings(**{**settings, "server": tuple(settings["server"])})
        self._session = session = Session.open(made, token=self._token)
        session.trained.train()
        self._optimizer = make_optimizer(made, session.trained)
        self._ids = session.prepared.training_ids
        return {
            "splits": list(session.prepared.pushable),
            "freeze": session.prepared.freeze,
            "layers": len(session.prepared.model.layers),
            "count": len(self._ids),
        }

    def do_warm(self, split: int, samples: int) -> dict[str, Any]:
        """Have both sides load what ``split`` needs."""
        return self.do_epoch(split=split, samples=samples, epoch=0, limit=None)

    def do_epoch(self, split: int, samples: int, epoch: int, limit: float | None) -> dict[str, Any]:
        """One epoch of the first ``samples`` at ``split``; it is broken off after ``limit`` seconds."""
        session = self._opened(samples)
        started = time.monotonic()
        over = False
        stream = session.epoch(epoch, split_of=lambda number: split)
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
        }

    def do_plan(self, samples: int, epoch: int) -> dict[str, Any]:
        """Profile one epoch as ``hapi-train`` does, and tell what every strategy makes of it."""
        session = self._opened(samples)
        planning = planning_of(session.settings, session.prepared, session.meter, session.budget)
        if planning is None:
            raise HapiError("the sweep's session has no strategy; this is a defect of hapi")
        session.planning = planning
        started = time.monotonic()
        epochs = 0
        while planning.plan is None:
            for features, labels in session.epoch(epoch + epochs):
                self._step(session, features, labels)
            epochs += 1
        profile, job = planning.profile, planning.job
        if profile is None:
            raise HapiError("there is a plan without a profile; this is a defect of hapi")
        estimates = [estimate(profile, job, split) for split in session.prepared.pushable]
        return {
            "seconds": time.monotonic() - started,
            "choices": {name: plan(name, profile, job).split for name in PLANNERS},
            "auto": [e.epoch_seconds for e in estimates],
            "paper": [e.paper_epoch_seconds for e in estimates],
            "sum": [
                (e.stages.server_waves + e.stages.network + e.stages.client) * job.samples / job.bs
                for e in estimates
            ],
            "wire": [e.epoch_wire_bytes for e in estimates],
            "memory": [e.memory.peak for e in estimates],
            "observed_memory": session.budget.highest(),
            "profile": profile.to_json(),
        }

    def _opened(self, samples: int) -> Session:
        if self._session is None:
            raise HapiError("the sweep's session is not open; this is a defect of hapi")
        self._session.prepared.training_ids = self._ids[:samples]
        return self._session

    def _step(self, session: Session, features: torch.Tensor, labels: torch.Tensor) -> None:
        loss = torch.nn.functional.cross_entropy(session.trained(features), labels)
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()


def main() -> None:
    """Answer commands until standard input ends."""
    client = SweepClient(os.environ.get("HAPI_TOKEN"))
    try:
        for line in sys.stdin:
            print(json.dumps(client.answer(json.loads(line))), flush=True)
    finally:
        client.close()


if __name__ == "__main__":
    main()

"""A trainer of the fleet's test bed: a real session whose step is a pause, one JSON line each way.

Commands: ``{"do": "open", ...settings}``, ``{"do": "profile"}``, ``{"do": "train", "until", "pause"}``. ``until`` is
of the monotonic clock, which all processes of a machine share. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from hapi.client.session import Session
from hapi.config.settings import load
from hapi.errors import HapiError
from hapi.train.settings import TrainSettings


class FleetTrainer:
    """One session at a time."""

    def __init__(self, token: str | None) -> None:
        """Begin without a session."""
        self._token = token
        self._session: Session | None = None
        self._epochs = 0

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do one command; errors of Hapi's become the answer."""
        try:
            return {"ok": True, **getattr(self, "do_" + command.pop("do"))(**command)}
        except HapiError as error:
            return {"ok": False, "memory": False, "error": str(error)}

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def do_open(self, **settings: Any) -> dict[str, Any]:
        """Another session; the one before ends."""
        self.close()
        made = load(TrainSettings, None, {"cache": "off", "wire_codec": "none", **settings}).value
        self._session = Session.open(made, token=self._token)
        return {"samples": len(self._session.job_context.training_ids)}

    def do_profile(self) -> dict[str, Any]:
        """An epoch of a session that plans; its profile and job."""
        session = self._opened()
        for _ in session.epoch(0):
            pass
        planning = session.planning
        if planning is None or planning.profile is None:
            raise HapiError("the epoch was too short for a profile; this is a defect of hapi")
        return {"profile": planning.profile.to_json(), "job": vars(planning.job)}

    def do_train(self, until: float, pause: float) -> dict[str, Any]:
        """Train epoch after epoch; the time at which each batch was over, its samples, and what it all took."""
        session, ends = self._opened(), list[tuple[float, int]]()
        began, cpu, stalled = time.monotonic(), time.process_time(), 0.0
        while time.monotonic() < until:
            stream = session.epoch(self._epochs)
            self._epochs += 1
            for _, labels in stream:
                if pause:
                    time.sleep(pause)
                ends.append((time.monotonic(), len(labels)))
                if ends[-1][0] >= until:
                    break
            stream.close()  # type: ignore[attr-defined]
            stalled += session.last.stall_seconds
        seconds = time.monotonic() - began
        return {
            "began": began,
            "ends": ends,
            "retries": session.retries,
            "cores": (time.process_time() - cpu) / seconds,
            "stalled": stalled / seconds,
        }

    def _opened(self) -> Session:
        if self._session is None:
            raise HapiError("the trainer's session is not open; this is a defect of hapi")
        return self._session


def main() -> None:
    """Answer commands until standard input ends."""
    trainer = FleetTrainer(os.environ.get("HAPI_TOKEN"))
    try:
        for line in sys.stdin:
            print(json.dumps(trainer.answer(json.loads(line))), flush=True)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()

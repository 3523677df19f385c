"""Figures of a training in MLflow."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from hapi.train.callbacks import TrainingStart
from hapi.train.loggers.base import MetricLogger, RemoteRun, hyper_parameters

_PARAMETERS = 100
"""Most parameters that MLflow takes at once."""
_PARAMETER_CHARACTERS = 500
"""Characters of a parameter's value that every version of MLflow takes."""
_ENDS = {"finished": "FINISHED", "stopped early": "FINISHED", "interrupted": "KILLED"}


class MlflowLogger(MetricLogger):
    """Sends figures to a run of MLflow, which is called as the folder.

    They go to ``MLFLOW_TRACKING_URI``, or to ``mlflow.db`` in the folder; the experiment is ``MLFLOW_EXPERIMENT_NAME``
    or ``hapi``. The folder's ``mlflow.json`` remembers the run, so that a resumed training goes on in it.
    """

    title = "mlflow"

    def open(self, start: TrainingStart, step: int) -> None:
        """Begin or resume the run."""
        # A server that is away must not hold the training up for MLflow's own minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # they tell how each table of a new database is made
            logging.getLogger(name).setLevel(logging.WARNING)
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder.resolve()}/mlflow.db"
        self._client: Any = MlflowClient(tracking_uri=place)
        self._run = RemoteRun(self.folder / "mlflow.json")
        if step and self._run.run_id:
            self._client.update_run(self._run.run_id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "hapi")
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run = self._client.create_run(number, run_name=self.folder.resolve().name)
        self._run.run_id, self._run.sent = run.info.run_id, {"step": 0, "epoch": 0}
        self._log_parameters(start)
        self._run.save()

    def _log_parameters(self, start: TrainingStart) -> None:
        from mlflow.entities import Param

        parameters = iter(hyper_parameters(start).items())
        while chunk := list(itertools.islice(parameters, _PARAMETERS)):
            given = [Param(name, str(value)[:_PARAMETER_CHARACTERS]) for name, value in chunk]
            self._client.log_batch(self._run.run_id, params=given)

    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Send metrics."""
        self._send("step", step, figures)

    def log_epoch(self, step: int, figures: Mapping[str, float]) -> None:
        """Send metrics."""
        self._send("epoch", step, figures)

    def _send(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if self._run.due(kind, step):
            now = int(time.time() * 1000)
            metrics = [Metric(f"{kind}/{name}", value, now, step) for name, value in figures.items()]
            self._client.log_batch(self._run.run_id, metrics=metrics)
            self._run.note(kind, step)

    def close(self, how: str) -> None:
        """End the run."""
        self._client.set_terminated(self._run.run_id, _ENDS.get(how, "FAILED"))

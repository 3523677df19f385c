"""The training loop of ``hapi-train``: the session's features through the trained layers, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.client.loading.epoch_stats import PassReport
from hapi.client.planning.split_source import fixed_split
from hapi.client.session import Session
from hapi.config.settings import checked
from hapi.errors import DeviceMemoryError, DivergedError, HapiError, UnprocessableError, UsageError
from hapi.models.graph.tracing import TRACE_LOCK
from hapi.models.model_file import write_model
from hapi.paths import make_folder
from hapi.process.memory_errors import is_out_of_memory
from hapi.profiler.profile import Profile
from hapi.train.callbacks import TrainingCallback
from hapi.train.checkpoints import checkpoint
from hapi.train.checkpoints.checkpoint import Progress, identity_of
from hapi.train.checkpoints.keeping import Keeper
from hapi.train.interrupts import Interrupts
from hapi.train.outputs.best import BestEpoch
from hapi.train.outputs.model_out import card_of, whole_state
from hapi.train.report import Measured, Totals, epoch_entry
from hapi.train.report_facts import job_facts, plan_facts
from hapi.train.settings import TrainingSettings
from hapi.train.steps.divergence import Finite
from hapi.train.steps.optimizer import make_optimizer

log = logging.getLogger("hapi.client")

MODEL_FILE, BEST_FILE = "model.safetensors", "best.safetensors"
"""Names in the folder of a training: the network after the last epoch, and after the best one."""


def step_seed(seed: int, epoch: int, batch: int) -> int:
    """Return the seed of torch's generator before a step; independent of earlier steps, a resume and the
    split.
    """
    return ((seed * 1_000_003 + epoch) * 1_000_003 + batch) % (1 << 63)


class Trainer:
    """Trains a session's layers for its epochs, as ``hapi-train`` does; see :meth:`run`::

        settings = hapi.TrainSettings(store="store", model="resnet18", epochs=3, optimizer="adamw", lr=1e-3)
        with hapi.Session.open(settings) as session:
            report = hapi.Trainer(session).run()
        print(report["epochs"][-1]["accuracy"])

    Args:
        session: an open session; it stays open.
        settings: optimiser, checkpoints and model files, checked here; None for those of the session, where it has
            them (``TrainSettings``), otherwise the defaults.
        watcher: told epochs and steps; None for nothing.
    """

    def __init__(
        self,
        session: Session,
        settings: TrainingSettings | None = None,
        watcher: TrainingCallback | None = None,
    ) -> None:
        self.session = session
        own = session.settings if isinstance(session.settings, TrainingSettings) else TrainingSettings()
        self.settings = settings = checked(settings or own)
        if settings.save_profile is not None and session.planning is None:
            raise UsageError(f"--save-profile {fixed_split(session.settings)}")
        self.watcher = watcher or TrainingCallback()
        self.trained = session.trained
        self.optimizer = make_optimizer(settings, self.trained)
        self.progress = Progress()
        self.epochs: list[dict[str, Any]] = []
        """The report's entries, with those from before a resume."""
        self.trained_epochs = 0
        """Epochs that this process ended."""
        self.ended: dict[str, Any] = {"how": "running"}
        """Kind of the training's end, for the report."""
        self.best = BestEpoch() if settings.output else None
        """Layers of the best epoch; None without a folder for the model files."""
        save = self._save if settings.checkpoint_path else None
        self.keeper = Keeper(save, settings.checkpoint_every, session.settings.patience)
        self._finite = Finite(self.trained, self.optimizer, settings.lr)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=session.device)
        self._correct = torch.zeros((), dtype=torch.int64, device=session.device)
        self._pass = PassReport()
        """Counters of the training pass that is under way."""
        self._before = Measured()
        """Measurements of the epoch from before this process resumed it."""
        self._earlier = Totals()
        """Costs of the processes before this one."""
        self._keep = settings.keep
        """Checkpoints that are left when the next one is written."""
        self._estimated: float | None = None
        """The plan's seconds for the running epoch."""
        self._timeline: dict[str, Any] | None = None
        self._kept: Profile | None = None
        """Contents of the settings' file for the profile."""
        self._torn = False
        """True inside a step, while weights, optimiser and progress do not belong together."""
        self._started = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Train to the end and return the report.

        On KeyboardInterrupt (also SIGTERM) and on errors, the checkpoint is written as of the last whole step before
        they are raised on. A training that diverged (:class:`DivergedError`) keeps the last checkpoint of before.
        """
        path, folder = self.settings.checkpoint_path, self.settings.output
        if folder is not None:
            make_folder(folder, "--output")
        with checkpoint.claimed(path) if path else nullcontext(), Interrupts() as interrupts:
            if path and self.settings.resume:
                self._resume(path)
            try:
                while self.progress.epoch < self.session.settings.epochs:
                    self._epoch(interrupts)
            except (KeyboardInterrupt, Exception) as error:
                self._end(error)
                raise
            self._note_end("finished")
            self.keeper.last(self._position)
            self._write_models()
        return self.report()

    def save_model(self, path: str | Path, *, best: bool = False) -> None:
        """Write the whole network, frozen layers included, as ``hapi.load_model`` and plain PyTorch read it.

        Args:
            path: a ``.safetensors`` file; its folder must exist.
            best: as it was after the best epoch (needs ``output`` in the settings), instead of as it is now.

        Raises:
            HapiError: the file cannot be written, or the frozen layers' weights are no longer in reach.
        """
        entry: Mapping[str, Any] = self.epochs[-1] if self.epochs else {}
        trained = self.trained.state_dict()
        if best:
            if self.best is None or self.best.entry is None:
                raise UsageError("there is no best epoch: give 'output' in the settings, and train an epoch")
            entry, trained = self.best.entry, self.best.trained
        job = self.session.job_context
        write_model(path, whole_state(job, trained), card_of(job, entry))

    def _write_models(self) -> None:
        if self.settings.output is not None and self.epochs:
            folder = Path(self.settings.output)
            self.save_model(folder / MODEL_FILE)
            self.save_model(folder / BEST_FILE, best=True)

    @property
    def _position(self) -> tuple[int, int]:
        """Epoch and batch of the next step."""
        return self.progress.epoch, self.progress.batch

    @property
    def has_checkpoint(self) -> bool:
        """Return whether this training can be resumed."""
        return self.keeper.saved is not None

    def _end(self, error: BaseException) -> None:
        """Keep what is worth it of a training that ends before its time; HapiError when that cannot be."""
        how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._note_end("diverged" if isinstance(error, DivergedError) else how, str(error))
        if self._torn or isinstance(error, DivergedError) or self._position == (self.keeper.saved or (0, 0)):
            return
        try:
            self.keeper.last(self._position)
        except DivergedError as found:
            log.warning("%s; the last steps are not saved", found)
            self._note_end("diverged", str(found))
        except HapiError as failed:
            if isinstance(error, KeyboardInterrupt):
                raise
            log.warning("%s", failed)

    def _note_end(self, how: str, detail: str = "") -> None:
        epoch, batch = self._position
        self.ended = {"how": how, "epoch": epoch, "batch": batch, "detail": detail}

    def _epoch(self, interrupts: Interrupts) -> None:
        epoch, first = self.progress.epoch, self.progress.batch
        planned = self.session.batch_ids(epoch)
        self.watcher.epoch_started(epoch, len(planned), first)
        self.trained.train()
        stream = self.session.epoch(epoch, first)
        begun = False
        try:
            for features, labels in stream:
                self._pass = self.session.last
                self._finite.check_loss()  # of the step before, which the session has waited for
                if not begun:  # what the epoch's beginning changed of the split is known by now
                    self._estimated, begun = self._estimate(first), True
                with interrupts.deferred():
                    self._torn = True
                    self._step(features, labels)
                    self._torn = False
                    del features, labels
                self.watcher.step_done(self._pass)
                self._keep_profile()
                self.keeper.step(self._position)
            self._finite.check_state(*self._position)
        finally:
            stream.close()  # type: ignore[attr-defined]
        # When it is interrupted, the checkpoint stands between it and the last step.
        validation = self._validate()
        with interrupts.deferred():
            self._finish_epoch(epoch, validation)
            self._keep_profile()

    def _estimate(self, first: int) -> float | None:
        """The plan's seconds for the epoch that begins; None without a plan, and for a part of an epoch."""
        planning = self.session.planning
        if planning is None or first:
            return None
        epoch = self.progress.epoch
        return planning.estimated_seconds(epoch, sum(map(len, self.session.batch_ids(epoch))))

    def _step(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Take one optimiser step. Its randomness (dropout) depends on seed, epoch and batch alone."""
        progress = self.progress
        span = self.session.tracer.span("train step", "client", epoch=progress.epoch, batch=progress.batch)
        # torch's generator is the process's: a server in this one (the loopback) draws from it to make weights.
        with TRACE_LOCK, span:
            torch.manual_seed(step_seed(self.session.settings.seed, progress.epoch, progress.batch))
            try:
                logits = self.trained(features)
                loss = nn.functional.cross_entropy(logits, labels)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise DeviceMemoryError(
                    f"the trained layers with a batch of {self.session.settings.bs} do not fit {self.session.device}; "
                    "choose a smaller --bs or a later --freeze"
                ) from None
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise UnprocessableError(
                    f"batch {progress.batch} has {len(labels)} sample(s), too few for BatchNorm in the trained "
                    "layers; give --drop-last or another --bs"
                ) from None
        self._finite.note(progress.epoch, progress.batch, loss)
        self._loss_sum += loss.detach().double() * len(labels)
        self._correct += (logits.detach().argmax(1) == labels).sum()
        self.progress = replace(progress, batch=progress.batch + 1, samples=progress.samples + len(labels))

    def _keep_profile(self) -> None:
        """Write the profile that was measured where the settings say, when it is made and when it changes."""
        path, planning = self.settings.save_profile, self.session.planning
        measured = None if planning is None else planning.profile
        if path is None or measured is None or measured is self._kept:
            return
        try:
            measured.save(path)
        except UsageError as error:  # that it can be written was tried before training began
            log.warning("--save-profile %s; training goes on", error)
        self._kept = measured

    def _finish_epoch(self, epoch: int, validation: Mapping[str, Any]) -> None:
        samples = self.progress.samples
        measured = self._before + Measured.of(self._pass)
        entry = epoch_entry(
            epoch,
            self.session.split,
            measured,
            loss=self._loss_sum.item() / samples,
            accuracy=self._correct.item() / samples,
            samples=samples,
        )
        # Of an epoch that ran at one split, as the plan had it; what a profiling epoch takes nobody can know before.
        planned = self._estimated if len(measured.splits) == 1 else None
        entry["estimated_seconds"] = None if planned is None else round(planned, 4)
        self._timeline = self._pass.timeline.to_json() or self._timeline
        entry.update(validation)
        self.epochs.append(entry)
        self.trained_epochs += 1
        self._loss_sum.zero_()
        self._correct.zero_()
        self._pass, self._before = PassReport(), Measured()
        self.progress = Progress(epoch=epoch + 1)
        if self.best is not None:
            self.best.offer(entry, self.trained)
        self.keeper.epoch(self._position)
        self.watcher.epoch_done(entry)

    def _validate(self) -> dict[str, Any]:
        """Loss and accuracy over the validation samples, in eval mode; nothing without them."""
        if not len(self.session.job_context.validation_ids):
            return {}
        loss_sum, correct, samples = 0.0, 0, 0
        self.trained.eval()
        with torch.no_grad():
            for features, labels in self.session.validation():
                logits = self.trained(features)
                loss_sum += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                correct += int((logits.argmax(1) == labels).sum())
                samples += len(labels)
        self.trained.train()
        return {
            "validation_loss": loss_sum / samples,
            "validation_accuracy": correct / samples,
            "validation_seconds": round(self.session.last.seconds, 4),
        }

    # -- checkpoint --------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write the checkpoint; :class:`DivergedError` when its state is not worth it, HapiError when it cannot be."""
        self._finite.check_state(*self._position)
        progress = replace(
            self.progress,
            loss_sum=self._loss_sum.item(),
            correct=int(self._correct.item()),
            measured=self._before + Measured.of(self._pass),
        )
        checkpoint.save(
            str(self.settings.checkpoint_path),
            trained=self.trained,
            optimizer=self.optimizer,
            progress=progress,
            identity=self._identity(),
            epochs=self.epochs,
            plan=None if self.session.planning is None else self.session.planning.state(),
            totals=self._totals(),
            best=None if self.best is None else self.best.state(),
            keep=self._keep,
        )
        self._keep = self.settings.keep

    def _identity(self, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """This job's identity, in the order of the one that was ``kept`` if the user names none."""
        if kept is not None and self.session.settings.shuffle == "auto":
            checkpoint.keep_order(self.session.job_context, kept)
        return identity_of(self.session.settings, self.settings, self.session.job_context)

    def _resume(self, path: str) -> None:
        found = checkpoint.load_newest(
            path,
            trained=self.trained,
            optimizer=self.optimizer,
            identity=self._identity,
            restore_plan=self._restore_plan,
        )
        if found is not None:
            self.progress, self.epochs = found.progress, found.epochs
            self._before = found.progress.measured
            self._earlier = replace(found.totals, resumes=found.totals.resumes + 1)
            if self.best is not None and found.best is not None:
                self.best.restore(found.best)
            self.keeper.saved = self._position
            self._loss_sum.fill_(self.progress.loss_sum)
            self._correct.fill_(self.progress.correct)
            if not found.is_newest:  # the next one takes the damaged one's place, and no whole one's
                self._keep = 1

    def _restore_plan(self, state: Any, progress: Progress) -> None:
        planning = self.session.planning
        if planning is not None and planning.profile is None:  # one that was given wins
            planning.restore(state, progress.epoch, progress.batch)

    # -- report ------------------------------------------------------------------------------------------

    def _totals(self) -> Totals:
        seconds, session = time.monotonic() - self._started, self.session
        return self._earlier.and_then(seconds, session.retries, session.budget.process_highest() or 0)

    def report(self) -> dict[str, Any]:
        """The run's report, JSON-able."""
        return {
            **job_facts(self.session, self.settings),
            **asdict(self._totals()),
            "epochs": self.epochs,
            "ended": self.ended,
            "troubles": list(self.keeper.troubles),
            **plan_facts(self.session, self.epochs),
            **({} if self._timeline is None else {"timeline": self._timeline}),
        }

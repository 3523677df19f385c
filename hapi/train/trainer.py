"""The training loop of ``hapi-train``: the session's features through the trained layers, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hapi.client.early_checks import fixed_split
from hapi.client.session import Session
from hapi.config.settings import checked
from hapi.errors import DivergedError, HapiError, UsageError
from hapi.models.graph.tracing import TRACE_LOCK
from hapi.models.model_file import write_model
from hapi.paths import make_folder
from hapi.train.callbacks import Callbacks, StepDone, TrainingCallback, TrainingStart
from hapi.train.checkpoints import checkpoint
from hapi.train.checkpoints.checkpoint import Progress
from hapi.train.checkpoints.checkpoint_files import check_unused, goes_on
from hapi.train.checkpoints.keeping import Keeper
from hapi.train.checkpoints.kept_settings import settings_to_keep
from hapi.train.checkpoints.resuming import Changes, identity_of, meanings_of
from hapi.train.distributed.agreement import OTHER_JOB, check_same, check_same_checkpoint
from hapi.train.distributed.collected import Collected
from hapi.train.init_from import begin_from
from hapi.train.interrupts import Interrupts
from hapi.train.objective.checks import check_objective
from hapi.train.objective.criterion import make_criterion
from hapi.train.objective.growth import LossGrowth
from hapi.train.objective.objective import Objective
from hapi.train.objective.validation import DETAILS, validate
from hapi.train.outputs.best import BestEpoch, score
from hapi.train.outputs.model_out import card_of, network_facts, whole_state
from hapi.train.outputs.profile_file import ProfileFile
from hapi.train.outputs.run_folder import BEST_FILE, MODEL_FILE
from hapi.train.report import Totals
from hapi.train.report_facts import job_facts, plan_facts
from hapi.train.running_epoch import RunningEpoch
from hapi.train.settings import TrainingSettings
from hapi.train.steps.divergence import Finite
from hapi.train.steps.early_stopping import stop_reason
from hapi.train.steps.gradient_step import GradientStep
from hapi.train.steps.offloading import Offloading
from hapi.train.steps.settings import check_steps

log = logging.getLogger("hapi.client")


class Trainer:
    """Trains a session's layers for its epochs, as ``hapi-train`` does; see :meth:`run`::

        settings = hapi.TrainSettings(store="store", model="resnet18", epochs=3, optimizer="adamw", lr=1e-3)
        with hapi.Session.open(settings) as session:
            report = hapi.Trainer(session).run()
        print(report["epochs"][-1]["accuracy"])

    Args:
        session: an open session; it stays open.
        settings: optimiser, checkpoints and model files, checked here; those of another run are only gone on with
            (``resume``). None for those of the session, if it has them (``TrainSettings``), otherwise the defaults.
        callbacks: followers of the training (:class:`hapi.train.callbacks.TrainingCallback`), called in this order.
    """

    def __init__(
        self,
        session: Session,
        settings: TrainingSettings | None = None,
        callbacks: Sequence[TrainingCallback] = (),
    ) -> None:
        self.session = session
        own = session.settings if isinstance(session.settings, TrainingSettings) else TrainingSettings()
        self.settings = settings = checked(settings or own)
        if settings.save_profile is not None and session.planning is None:
            raise UsageError(f"--save-profile {fixed_split(session.settings)}")
        check_steps(settings)
        check_unused(settings)
        check_objective(settings, validated=session.settings.validation is not None)
        check_same(session.ranks, meanings_of(session.job_context), OTHER_JOB)
        self._callbacks = Callbacks(callbacks)
        self.trained = session.trained
        if settings.init_from is not None and not goes_on(settings.checkpoint_path, settings.resume):
            begin_from(session, settings.init_from)
        self._criterion = criterion = make_criterion(settings, session)
        self._objective = Objective(criterion, session.device)
        self._step = GradientStep(session, settings, self._objective)
        self.offloading = Offloading(session, settings, self._step)
        """Place of the optimiser's states."""
        self.optimizer = self._step.optimizer
        self.progress = Progress()
        self.epochs: list[dict[str, Any]] = []
        """The report's entries, with those from before a resume."""
        self.trained_epochs = 0
        """Epochs that this process ended."""
        self.began = False
        """True once this run has claimed its checkpoint, and restored it where it goes on."""
        self.ended: dict[str, Any] = {"how": "running"}
        """Kind of the training's end, for the report."""
        self.best = BestEpoch(settings.best) if settings.output and session.ranks.is_first else None
        """Layers of the best epoch; None without a folder for the model files."""
        self._ranks = session.ranks
        save = self._save if settings.checkpoint_path else None
        self.keeper = Keeper(
            save, settings.checkpoint_every, session.settings.patience, together=self._ranks.size > 1
        )
        growth = LossGrowth(criterion.kind, len(criterion.classes))
        self._finite = Finite(self.trained, self.optimizer, growth)
        self._running = RunningEpoch(session)
        self._changes = Changes()
        self._collected = Collected(self._ranks, self._running, self._parts)
        self._earlier = Totals()
        """Costs of the processes before this one."""
        self._keep = settings.keep
        """Checkpoints that are left when the next one is written."""
        self._profile_file = ProfileFile(settings.save_profile, session)
        self._torn = False
        """True inside a step, while weights, optimiser and progress do not belong together."""
        self._started = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Train to the end and return the report.

        On KeyboardInterrupt (also SIGTERM) and on errors, the checkpoint is written as of the last whole step before
        they are raised on. A training that diverged (:class:`DivergedError`) keeps the last checkpoint of before.
        """
        try:
            self._run()
        except BaseException as error:
            self.offloading.close()
            self._callbacks.training_ended(self.report(), error)
            raise
        self.offloading.close()
        report = self.report()
        self._callbacks.training_ended(report)
        return report

    def _run(self) -> None:
        path, folder, writes = self.settings.checkpoint_path, self.settings.output, self._ranks.is_first
        if folder is not None and writes:
            make_folder(folder, "--output")
        place = checkpoint.claimed(path, self.settings.checkpoint_flag) if path and writes else nullcontext()
        with place, Interrupts(self._ranks) as interrupts:
            if path and self.settings.resume:
                self._resume(path)
            try:
                self.began = True
                self._callbacks.training_started(self._start())
                reason = ""
                while self.progress.epoch < self.session.settings.epochs and not (
                    reason := self._stop_reason()
                ):
                    self._epoch(interrupts)
            except (KeyboardInterrupt, Exception) as error:
                self._end(error)
                raise
            early = self.progress.epoch < self.session.settings.epochs
            self._note_end("stopped early" if early else "finished", reason if early else "")
            try:
                self.keeper.last(self._position)
            except HapiError as error:
                if not isinstance(error, DivergedError):
                    self._write_models()  # smaller, so they may fit where the checkpoint does not
                raise
            self._write_models()

    def save_model(self, path: str | Path, *, best: bool = False) -> None:
        """Write the whole network, frozen layers included, as ``hapi.load_model`` and plain PyTorch read it.

        Args:
            path: a ``.safetensors`` file; its folder must exist.
            best: as it was after the best epoch (needs ``output`` in the settings), instead of as it is now.

        Raises:
            HapiError: the file cannot be written, or the frozen layers' weights are no longer in reach.
        """
        entry: Mapping[str, Any] = self.epochs[-1] if self.epochs else {}
        trained = self._step.evaluated.state_dict()
        if best:
            if self.best is None or self.best.entry is None:
                raise UsageError("there is no best epoch: give 'output' in the settings, and train an epoch")
            entry, trained = self.best.entry, self.best.trained
        job = self.session.job_context
        write_model(path, whole_state(job, trained), card_of(job, entry))

    def _write_models(self) -> None:
        if self.settings.output is not None and self.epochs and self._ranks.is_first:
            folder = Path(self.settings.output)
            self.save_model(folder / MODEL_FILE)
            if self.best is None or self.best.entry is None:
                log.warning("%s is not written: the epochs were trained without --output", folder / BEST_FILE)
                return
            self.save_model(folder / BEST_FILE, best=True)

    @property
    def _position(self) -> tuple[int, int]:
        """Epoch and batch of the next step."""
        return self.progress.epoch, self.progress.batch

    @property
    def _steps_done(self) -> int:
        """Steps of the training so far; each epoch has as many."""
        return self.progress.epoch * self._running.batches + self.progress.batch

    def _start(self) -> TrainingStart:
        facts = job_facts(self.session, self.settings)
        return TrainingStart(facts=facts, step=self._steps_done, epochs=list(self.epochs))

    @property
    def has_checkpoint(self) -> bool:
        """Return whether this training can be resumed."""
        return self.keeper.saved is not None

    def _end(self, error: BaseException) -> None:
        """Keep what is worth it of a training that ends before its time; HapiError when that cannot be."""
        self._collected.together = self._ranks.stops
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

    def _stop_reason(self) -> str:
        """Why training stops before its last epoch; empty while it goes on.

        The first rank decides: others' metrics may differ in the last bits.
        """
        allowed = self.settings.early_stopping
        if allowed is None:
            return ""
        best, improvement = self.settings.best, self.settings.min_improvement
        found = stop_reason([score(entry, best) for entry in self.epochs], allowed, improvement)
        return self._ranks.gathered(found)[0]

    def _epoch(self, interrupts: Interrupts) -> None:
        epoch, first = self.progress.epoch, self.progress.batch
        self._ranks.settle(now=True)
        planned = self.session.batch_ids(epoch)
        self._callbacks.epoch_started(epoch, len(planned), first)
        self.trained.train()
        stream = self.session.epoch(epoch, first)
        try:
            for features, labels in stream:
                self._running.stepping(epoch, first)
                self._finite.check_loss()  # of the step before, which the session has waited for
                if self._ranks.size > 1:
                    self._ranks.settle()
                with interrupts.deferred():
                    self._torn = True
                    done = self._take_step(features, labels)
                    self._torn = False
                    del features, labels
                self._callbacks.step_done(done)
                self._profile_file.keep()
                self.keeper.step(self._position)
            self._finite.check_state(*self._position)
        finally:
            stream.close()  # type: ignore[attr-defined]
        # When it is interrupted, the checkpoint stands between it and the last step.
        validation = validate(self.session, self._step.evaluated, self._criterion, self._step.precision)
        with interrupts.deferred():
            self._finish_epoch(epoch, validation)
            self._profile_file.keep()

    def _take_step(self, features: torch.Tensor, labels: torch.Tensor) -> StepDone:
        epoch, batch = self._position
        # torch's generator is the process's: a server in this one (the loopback) draws from it to make weights.
        span = self.session.tracer.span("train step", "client", epoch=epoch, batch=batch)
        with TRACE_LOCK, span, self.offloading.timed():
            loss = self._step.take(features, labels, epoch, batch)
        self._finite.note(epoch, batch, loss)
        self.progress = Progress(epoch=epoch, batch=batch + 1)
        return StepDone(
            epoch=epoch,
            batch=batch,
            step=self._steps_done,
            samples=len(labels),
            loss=loss,
            rates=[group["lr"] for group in self.optimizer.param_groups],
            figures=self._objective.figures,
            report=self._running.report,
        )

    def _finish_epoch(self, epoch: int, validation: Mapping[str, Any]) -> None:
        figures = {**self._objective.figures(), **self._step.figures(epoch)}
        entry = self._running.finish(epoch, self._objective.samples, figures)
        entry.update(validation)
        self._objective.clear()
        self._step.clear()
        for earlier in self.epochs:
            earlier.pop(DETAILS, None)
        self.epochs.append(entry)
        self.trained_epochs += 1
        self.progress = Progress(epoch=epoch + 1)
        if self.best is not None:
            self.best.offer(entry, self._step.evaluated)
        self.keeper.epoch(self._position)
        self._callbacks.epoch_done(entry)

    # -- checkpoint --------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write the checkpoint; :class:`DivergedError` when its state is not worth it, HapiError when it cannot be."""
        self._finite.check_state(*self._position)
        self.session.keeping.flush()
        parts, measured = self._collected.at(self._position)
        if not self._ranks.is_first:
            return
        checkpoint.save(
            str(self.settings.checkpoint_path),
            parts=parts,
            progress=replace(self.progress, measured=measured),
            identity=self._identity(),
            epochs=self.epochs,
            plan=None if self.session.planning is None else self.session.planning.state(),
            totals=self._totals(),
            network=network_facts(self.session),
            settings=settings_to_keep(
                self.session.settings, self.settings, self.session.job_context.description.reference.name
            ),
            keep=self._keep,
        )
        self._collected.clear()
        self._keep = self.settings.keep

    def _parts(self) -> dict[str, checkpoint.Part]:
        """Parts of the training that have a state, by their names in the checkpoint."""
        parts: dict[str, checkpoint.Part] = {
            "trained": self.trained,
            "optimizer": self.optimizer,
            "objective": self._objective,
            "changes": self._changes,
            "step": self._step,
        }
        if self.best is not None:
            parts["best"] = self.best
        return parts

    def _identity(self, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """This job's identity, in the order of the one that was ``kept`` if the user names none."""
        if kept is not None and self.session.settings.shuffle == "auto":
            checkpoint.keep_order(self.session.job_context, kept)
        job = identity_of(self.session.settings, self.settings, self.session.job_context)
        return {**job, **self._criterion.identity()}

    def _resume(self, path: str) -> None:
        mapped = self.offloading.where != "off"
        found = checkpoint.load_newest(
            path, parts=self._parts(), identity=self._identity, restore_plan=self._restore_plan, mapped=mapped
        )
        check_same_checkpoint(self._ranks, path, found)
        if found is not None:
            self.progress, self.epochs = found.progress, found.epochs
            self._running.go_on(found.progress.measured)
            self._earlier = replace(found.totals, resumes=found.totals.resumes + 1)
            self.keeper.saved = self._position
            self._changes.add(found.changes)
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
            "changes": self._changes.to_json(),
            "offload": self.offloading.to_json(),
            **plan_facts(self.session, self.epochs),
            **({} if self._running.timeline is None else {"timeline": self._running.timeline}),
        }

"""Files and folders that ``hapi-train`` writes: checked before it starts, made when it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hapi.cli.shared.run_log import RunLog
from hapi.config.settings import Loaded
from hapi.data.listing import is_store, lies_in_store
from hapi.errors import HapiError, UsageError
from hapi.figures.canvas import check_drawing
from hapi.paths import Named, check_folder, check_outputs, remove_empty, user_path
from hapi.process import output as standard
from hapi.trace import Tracer
from hapi.train.callbacks import TrainingCallback, TrainingStart
from hapi.train.objective.class_weights import weights_file
from hapi.train.outputs.run_folder import (
    ANOTHER,
    BEST_FILE,
    LOG_FILE,
    MODEL_FILE,
    REPORT_FILE,
    RUNS,
    new_run_folder,
)
from hapi.train.settings import OutputSettings, TrainingSettings, TrainSettings


def wants_folder(loaded: Loaded[TrainSettings]) -> bool:
    """Return whether the run leaves a folder: unless the user wants none."""
    return loaded.value.output is not None or "output" not in loaded.origins


class _LogOpener(TrainingCallback):
    """Opens a run's log at the start of the training: the folder is this run's alone by then."""

    def __init__(self, log: RunLog, folder: str | None) -> None:
        self._log, self._folder = log, folder

    def training_started(self, start: TrainingStart) -> None:
        """Write the log into the folder from now on."""
        if self._folder is not None:
            self._log.open(Path(self._folder, LOG_FILE))


class RunFiles:
    """Outputs of a run. A context manager, at whose end folders that it made and that stayed empty are removed."""

    def __init__(self, loaded: Loaded[TrainSettings], experiment: str | None, log: RunLog) -> None:
        """Check that all files can be written; :class:`UsageError` for the first that cannot.

        Args:
            loaded: the settings.
            experiment: the file that they were read from; None without one.
            log: the run's log, not open yet.
        """
        self._loaded, self._log = loaded, log
        self._new = wants_folder(loaded) and loaded.value.output is None
        if self._new:
            check_folder(RUNS, ANOTHER)
        self._made = check_files(loaded, experiment)

    def begin(self, dataset: str, model: str) -> TrainSettings:
        """Make the run folder, if there is to be a new one, and return the settings with the files' places.

        Args:
            dataset: the dataset's name, for that of a new folder.
            model: the model as the user named it.

        Raises:
            UsageError: the folder cannot be made.
        """
        settings = self._loaded.value
        if self._new:
            runs = Path(RUNS)
            self._made += [] if runs.exists() else [runs]
            folder = new_run_folder(dataset, model)
            self._made.append(folder)
            settings = replace(settings, output=str(folder))
        if settings.output is not None and settings.report is None:
            settings = replace(settings, report=str(Path(settings.output, REPORT_FILE)))
        return settings

    def log_opener(self, settings: TrainSettings) -> TrainingCallback:
        """Return what opens the log in the run folder of ``settings``, if there is one, when the training begins."""
        return _LogOpener(self._log, settings.output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_empty(self._made)


def check_files(loaded: Loaded[TrainSettings], experiment: str | None) -> list[Path]:
    """Check that output files can be written, now and not after hours of training; returns the folders made for them.

    Each must differ from the others and from the files that are read.
    """
    from hapi.train.checkpoints.checkpoint_files import check_unused

    settings = loaded.value
    given = loaded.as_given
    named = (
        (given("--report"), settings.report),
        (given("--html"), settings.html),
        (given("--trace"), settings.trace),
        (given("--checkpoint" if settings.checkpoint else "--output"), settings.checkpoint_path),
        (given("--save-profile"), settings.save_profile),
    )
    _check_places(((given("--output"), settings.output), *named), settings.store)
    if settings.html is not None:
        check_drawing(given("--html"))
    made = check_outputs(
        (*((given("--output"), path) for path in _model_files(settings)), *named),
        (
            ("the experiment file", experiment),
            (given("--weights"), settings.weights),
            (given("--class-weights"), weights_file(settings.class_weights)),
            (given("--init-from"), settings.init_from),
            (given("--profile"), settings.profile),
            (given("--token-file"), settings.token_file),
            (given("--ca-file"), settings.ca_file),
        ),
    )
    try:
        check_unused(settings)
    except UsageError:
        remove_empty(made)
        raise
    return made


def _check_places(outputs: Iterable[Named], store: str | None) -> None:
    """Raise :class:`UsageError` for an output among the files of a local store, also of one that only servers know.

    Args:
        outputs: pairs of a flag and a path; None for no file.
        store: the store that the user names; None for none.
    """
    root = None
    if store is not None and ("://" not in store or store.startswith("file://")):
        with suppress(UsageError):  # told by whoever opens it
            root = Path(os.path.realpath(user_path(store.removeprefix("file://"), "--store")))
    for flag, path in outputs:
        target = Path(os.path.realpath(path or "."))
        for folder in (target, *target.parents) if path else ():
            if lies_in_store(target, folder) and (folder == root or is_store(folder)):
                name = store if folder == root else folder
                raise UsageError(
                    f"{flag} {path}: lies among the files of the store {name}; name a place of its own"
                )


def _model_files(training: TrainingSettings) -> list[str]:
    folder = training.output
    return [] if folder is None else [str(Path(folder, name)) for name in (MODEL_FILE, BEST_FILE)]


def absent_files(training: TrainingSettings) -> list[str]:
    """Names of the files of a whole run that are not in its folder."""
    folder = training.output
    names = () if folder is None else (MODEL_FILE, BEST_FILE, REPORT_FILE)
    return [name for name in names if not Path(folder or "", name).exists()]


LAST_SECONDS = 15.0
"""Longest time of trying outputs again when a training has ended well, in seconds."""


def write_outputs(
    settings: OutputSettings, tracer: Tracer, report: dict[str, Any], seconds: float
) -> list[str]:
    """Write each output, whatever becomes of the others; the report comes last and says it too.

    Args:
        settings: places of the outputs.
        tracer: spans of the run.
        report: the trainer's report.
        seconds: how long a failed output is tried again.

    Returns a line for each output that failed.
    """
    failed: list[str] = []
    deadline = time.monotonic() + seconds
    if settings.trace is not None:
        failed += _tried(lambda: tracer.write(str(settings.trace)), deadline)
    if settings.html is not None:
        from hapi.figures.html import write_html
        from hapi.figures.reading import Run

        failed += _tried(lambda: write_html(Run.from_json(report), str(settings.html)), deadline)
    if settings.report is not None:
        from hapi.train.report import write_report

        lost = [] if standard.current is None else standard.current.lost()
        said = {**report, "troubles": [*report["troubles"], *lost, *failed]}
        failed += _tried(lambda: write_report(str(settings.report), said), deadline)
    return failed


def _tried(write: Callable[[], None], deadline: float) -> list[str]:
    """Write, again and again until ``deadline``; the last error's line."""
    pause = 1.0
    while True:
        try:
            write()
            return []
        except HapiError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                return [str(error)]
            time.sleep(min(pause, left))
            pause *= 2

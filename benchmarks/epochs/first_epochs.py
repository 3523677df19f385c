"""The first epochs of a ``hapi-train`` that is told of more::

python -m benchmarks.epochs.first_epochs 4 --epochs 30 --dataset images --model resnet18

A JSON line on standard output follows the start and each epoch; the settings are those of ``hapi-train``. With
``--samples-only`` after the number, the cache keeps stored samples alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hapi.allocator import keep_freed_memory
from hapi.cli.train import check_together, parser
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.keeping import Keeping
from hapi.client.session import Session
from hapi.config.settings import Loaded, load, overrides_of
from hapi.factories import search_here
from hapi.train.callbacks import TrainingCallback, TrainingStart
from hapi.train.settings import TrainSettings
from hapi.train.trainer import Trainer

SAMPLES_ONLY = "--samples-only"
FACTS = ("loss", "splits", "bytes_received", "cached_samples", "feature_hits", "features_kept")
"""Facts of an epoch that are passed on, as far as the report has them."""


class EpochsReached(KeyboardInterrupt):
    """The training is ended here, as Ctrl-C would."""


class FirstEpochs(TrainingCallback):
    """Prints a line for each epoch, and ends the training after some of them."""

    def __init__(self, count: int, planned: int) -> None:
        """End after ``count`` epochs; not at all if that is all that are ``planned``."""
        self._last = None if count >= planned else count - 1

    def training_started(self, start: TrainingStart) -> None:
        """Print that the job begins."""
        print(json.dumps({"ready": True}), flush=True)

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Print the epoch, and end after the last that is wanted."""
        facts = {name: entry[name] for name in FACTS if name in entry}
        print(json.dumps({"epoch": entry["epoch"], **facts}), flush=True)
        if entry["epoch"] == self._last:
            raise EpochsReached


def _no_features(
    self: Keeping, counts: KeptCounts, epoch: int, split: int | None, *, validation: bool
) -> None:
    """Stand for :meth:`Keeping.source` where no features are kept."""


def main(argv: Sequence[str]) -> None:
    """Train the first ``argv[0]`` epochs of the job that the other arguments name."""
    flags = list(argv[1:])
    if SAMPLES_ONLY in flags:
        flags.remove(SAMPLES_ONLY)
        Keeping.source = _no_features  # type: ignore[method-assign]
    given = overrides_of(parser().parse_args(flags), TrainSettings)
    loaded: Loaded[TrainSettings] = load(TrainSettings, None, given)
    check_together(loaded)
    settings = loaded.value
    keep_freed_memory()
    search_here()
    with Session.open(settings, optimizer_bytes=settings.optimizer_bytes) as session:
        trainer = Trainer(session, settings, [FirstEpochs(int(argv[0]), settings.epochs)])
        with contextlib.suppress(EpochsReached):
            trainer.run()


if __name__ == "__main__":
    main(sys.argv[1:])

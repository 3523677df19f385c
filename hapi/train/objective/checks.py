"""Checks of the objective's settings that need neither torch nor a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hapi.errors import UsageError
from hapi.train.objective.class_weights import read_class_weights, weights_file

if TYPE_CHECKING:
    from hapi.train.settings import ObjectiveSettings


def check_objective(settings: ObjectiveSettings, *, validated: bool) -> None:
    """Raise :class:`UsageError` for settings that no training can have.

    Args:
        settings: the objective's.
        validated: True when there are validation samples.
    """
    for flag, given in (("--mixup", settings.mixup), ("--cutmix", settings.cutmix)):
        if given is not None:
            raise UsageError(
                f"{flag}: images cannot be mixed, because the server runs the frozen layers on single images; give "
                f"--feature-mixup {given:g} to mix the features that come after them"
            )
    if not validated:
        for flag, names in (("--metric", settings.metric), ("--best", (settings.best,))):
            named = [name for name in names if name not in ("auto", "loss")]
            if named:
                raise UsageError(
                    f"{flag} {named[0]}: is measured on validation samples; give --validation, such as 0.1"
                )
    file = weights_file(settings.class_weights)
    if file is not None:
        read_class_weights(file)

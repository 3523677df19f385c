"""Choice of the freeze."""

from __future__ import annotations

from torch import nn

from hapi.errors import ModelError, UsageError
from hapi.models.graph.layers import LayeredModel


def choose_freeze(model: LayeredModel, asked: int | str | None) -> int:
    """Return the freeze index: as asked, else the paper's for its families, else all but the last layer with
    weights.

    Raises:
        UsageError: the layer is unknown, or nothing would be trained.
    """
    if asked is not None:
        freeze = _resolve(model, asked)
    elif model.default_freeze is not None:
        freeze = model.default_freeze
    else:
        with_weights = [layer.index for layer in model.layers if layer.parameter_count]
        if not with_weights:
            raise ModelError("the model has no parameter to train")
        freeze = with_weights[-1] - 1
    if not any(layer.parameter_count for layer in model.layers[freeze:]):
        raise UsageError(f"--freeze {freeze}: no layer after it has parameters, so nothing would be trained")
    model.check_freeze(freeze)
    trained = (model.tensors.get(name) for name in model.tensor_names(freeze, len(model)))
    if not any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in trained):
        raise UsageError(
            f"the model's parameters after the freeze (layer {freeze}) have requires_grad off, so nothing would be "
            "trained; have its factory leave it on for them"
        )
    return freeze


def _resolve(model: LayeredModel, asked: int | str) -> int:
    try:
        return model.resolve(asked)
    except ModelError as error:
        raise UsageError(f"--freeze: {error} ('hapi layers MODEL' lists them)") from None

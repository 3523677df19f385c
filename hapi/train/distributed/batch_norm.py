"""BatchNorm in layers that several ranks train."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hapi.client.joint.ranks import Ranks
from hapi.errors import UsageError
from hapi.train.distributed.launch import NEEDS_RANKS


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer of ``module`` normalises by the statistics of a batch."""
    return any(
        isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        for layer in module.modules()
    )


def synchronise(module: nn.Module, ranks: Ranks) -> None:
    """Let the BatchNorms in ``module`` take the statistics of a batch over all ranks, with torch's own layer.

    Raises:
        UsageError: there is one rank only, or torch has no such layer for the device.
    """
    if ranks.size == 1:
        raise UsageError(NEEDS_RANKS)
    if any(parameter.device.type == "cpu" for parameter in module.parameters()):
        raise UsageError("--sync-batchnorm: torch synchronises BatchNorm between GPUs, not on a CPU")
    for name, layer in module.named_children():
        setattr(module, name, nn.SyncBatchNorm.convert_sync_batchnorm(layer))

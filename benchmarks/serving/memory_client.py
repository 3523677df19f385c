"""One case of the memory benchmark, in a process of its own: what a client's part of a training batch takes.

Its argument is a JSON object, its answer is another on stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.allocator import keep_freed_memory
from hapi.client.memory import FrozenSuffix, MemoryBudget, MicroBatch, status_bytes
from hapi.models.warm_up import warm_up_libraries
from hapi.models.zoo.build import ModelSpec, structure
from hapi.models.zoo.freeze import choose_freeze
from hapi.profiler.work import fill
from hapi.train.settings import TrainingSettings
from hapi.train.steps.optimizer import make_optimizer

_WARM_STEPS = 2
"""Steps until the optimiser has its state, and the libraries' code that is needed is in memory."""


def main() -> None:
    """Run the case and print the bytes that the process grew by."""
    keep_freed_memory()  # as hapi-train does
    case: dict[str, Any] = json.loads(sys.argv[1])
    side, device = case["image_size"], torch.device("cpu")
    spec = ModelSpec(architecture=case["model"], weights="random:0", input_shape=(3, side, side))
    model = structure(spec)
    warm_up_libraries()
    before, code_before = status_bytes("RssAnon"), status_bytes("RssFile")
    split, last_split = case["split"], model.last_split(choose_freeze(model, None))
    fill(model, split, len(model), device)
    features = torch.rand((case["bs"], *model.output_shapes()[split])).to(model.output_dtypes()[split])
    suffix: FrozenSuffix | None = None
    if split < last_split:
        shape, dtype = model.output_shapes()[last_split], model.output_dtypes()[last_split]
        segment = model.segment(split, last_split, frozen=True)
        micro = MicroBatch(case["micro_batch"])
        suffix = FrozenSuffix(segment, tuple(shape), dtype, micro, device, MemoryBudget(None, device))
    trained = model.segment(last_split, len(model), frozen=False)
    optimizer = make_optimizer(TrainingSettings(momentum=0.9), trained)
    for _ in range(_WARM_STEPS):
        _step(features, suffix, trained, optimizer)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    _step(features, suffix, trained, optimizer)
    code = status_bytes("RssFile")
    print(json.dumps({"grown": status_bytes("VmHWM") - code - before, "code": code - code_before}))


def _step(
    features: torch.Tensor, suffix: FrozenSuffix | None, trained: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Take a step as a session and its trainer do."""
    at_last_split = features if suffix is None else suffix(features)
    optimizer.zero_grad()
    output = trained(at_last_split)
    nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.int64)).backward()
    optimizer.step()


if __name__ == "__main__":
    main()

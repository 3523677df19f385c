"""A process that trains under ``ActivationOffload`` and prints its growth and what was predicted, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from hapi.offload.activations.offload import ActivationOffload
from support.activation_models import SmallGpt


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def main() -> None:
    memory, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SmallGpt(width=256, depth=8)

    def step(batch: int) -> None:
        model(torch.randint(0, 101, (batch, 192))).pow(2).mean().backward()

    with ActivationOffload(model, memory, [folder]) as offload:
        step(1)  # libraries are loaded, gradients are there
        before = status("VmRSS")
        step(8)
        offload.step_done()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest use begins anew
        step(8)
        report = offload.report()
    print(json.dumps({"growth": status("VmHWM") - before, **report}))


if __name__ == "__main__":
    main()

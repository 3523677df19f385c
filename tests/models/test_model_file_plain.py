"""Model files of several kinds of architecture in a Python that has no Hapi: the same outputs, bit for bit; and as
ONNX, within 1e-4."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from hapi.api.export import export
from hapi.api.model_files import load_model
from hapi.models.model_file import ModelCard, write_model
from hapi.models.zoo.build import ModelSpec, build

FACTORY = """from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3))
"""
BUILT = {
    "resnet18": "import torchvision; model = torchvision.models.resnet18(num_classes=3)",
    "vit_b_16": "import torchvision; model = torchvision.models.vit_b_16(image_size=32, num_classes=3)",
    "timm:resnet10t": "import timm; model = timm.create_model('resnet10t', num_classes=3)",
    "plain_factory:net": "import sys; sys.path.insert(0, '.'); import plain_factory; model = plain_factory.net()",
}


@pytest.mark.long_cases("timm:resnet10t")
@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.long) if name == "vit_b_16" else name for name in BUILT],
)
def test_outputs_without_hapi(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_factory.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    shape = (3, 4, 4) if architecture == "plain_factory:net" else (3, 32, 32)
    spec = ModelSpec(architecture=architecture, num_classes=3, input_shape=shape)
    state = build(spec, allow_import=True).module.state_dict()
    card = ModelCard(spec=spec, classes=("a", "b", "c"), transform=None, freeze=1)
    write_model(tmp_path / "m.safetensors", state, card)
    inputs = torch.rand(2, *shape)
    torch.save(inputs, tmp_path / "inputs.pt")
    code = f"""
import sys
sys.modules["hapi"] = None
import torch
from safetensors.torch import load_file
{BUILT[architecture]}
model.load_state_dict(load_file("m.safetensors"))
with torch.no_grad():
    torch.save(model.eval()(torch.load("inputs.pt")), "outputs.pt")
"""
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, check=True)
    with torch.no_grad():
        expected = load_model(tmp_path / "m.safetensors", allow_import=True).module(inputs)
    assert torch.equal(torch.load(tmp_path / "outputs.pt"), expected)
    if architecture.startswith("timm:"):
        return  # its graph is one of torchvision's kind
    export(tmp_path / "m.safetensors", tmp_path / "m.onnx", allow_import=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"input": inputs.numpy()})
    assert np.abs(logits - expected.numpy()).max() < 1e-4

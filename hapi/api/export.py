"""Model files in the formats of others: PyTorch, ONNX, torch.export, Hugging Face's folders."""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from hapi.atomic import replacing
from hapi.errors import HapiError, ModelError, UsageError
from hapi.models.model_file import ModelCard, write_model
from hapi.models.zoo.architectures import ImportRule
from hapi.paths import check_output, make_folder
from hapi.train.outputs.from_checkpoint import FrozenSource, read_network

__all__ = ("FORMATS", "export")

_HF_MODEL, _HF_CONFIG = "model.safetensors", "config.json"
"""Names that readers of a Hugging Face folder look for."""
_EXAMPLE_BATCH = 2
"""Samples of the input that a graph is made with; its batch size stays free."""


@dataclass(frozen=True)
class _Format:
    suffix: str
    """Suffix of a file name from which the format is told; empty for a folder."""
    write: Callable[[nn.Module, ModelCard, Path], None]


def export(
    model: str | Path,
    output: str | Path,
    format: str | None = None,
    *,
    source: FrozenSource | None = None,
    best: bool = False,
    allow_import: ImportRule = False,
) -> str:
    """Write the network of a model file or a checkpoint in another format; returns the format's name.

    Args:
        model: a file that a training or ``hapi export`` wrote.
        output: the file to write; a folder for ``hf``.
        format: one of :data:`FORMATS`; None tells it from the ending of ``output``.
        source: where the weights of a checkpoint's frozen layers are, if no longer where they were.
        best: for a checkpoint: as it was after the best epoch.
        allow_import: see :func:`hapi.load_model`.

    Raises:
        ModelError: the file cannot be read, or its network cannot be expressed in the format.
        UsageError: the format is unknown, a library for it is not installed, or ``output`` cannot be written.
    """
    name = _format_of(str(output), format)
    if name == "hf":
        _check_folder(Path(output))
    else:
        check_output("--output", str(output))
    module, card = read_network(model, source, best=best, allow_import=allow_import)
    FORMATS[name].write(module, card, Path(output))
    return name


def _format_of(output: str, asked: str | None) -> str:
    if asked is not None:
        if asked not in FORMATS:
            raise UsageError(f"--format {asked}: expected one of {', '.join(FORMATS)}")
        return asked
    for name, known in FORMATS.items():
        if known.suffix and output.endswith(known.suffix):
            return name
    endings = ", ".join(f"{known.suffix} for {name}" for name, known in FORMATS.items() if known.suffix)
    raise UsageError(
        f"--output {output}: its ending names no format ({endings}); give one with --format, such as hf"
    )


def _check_folder(output: Path) -> None:
    """Raise :class:`UsageError` when an export into the folder would replace a model that is none, such as a run's."""
    if (output / _HF_MODEL).exists() and not (output / _HF_CONFIG).exists():
        raise UsageError(f"--output {output}: its {_HF_MODEL} is no export; name another folder")


def _safetensors(module: nn.Module, card: ModelCard, output: Path) -> None:
    write_model(output, module.state_dict(), card)


def _torch(module: nn.Module, card: ModelCard, output: Path) -> None:
    with _written(output) as file:
        torch.save(module.state_dict(), file)


def _torch_export(module: nn.Module, card: ModelCard, output: Path) -> None:
    program = _program(module, card)
    with _written(output) as file:
        torch.export.save(
            program, file, extra_files={"classes.json": json.dumps(list(card.classes)), **_transform(card)}
        )


def _onnx(module: nn.Module, card: ModelCard, output: Path) -> None:
    try:
        import onnx
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError:
        raise UsageError("--format onnx needs the onnx libraries: pip install 'hapi-split[onnx]'") from None
    program = _program(module, card)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        try:
            with _quiet():
                made = torch.onnx.export(
                    program, dynamo=True, input_names=["input"], output_names=["logits"], verbose=False
                )
            if made is None:  # so says its type
                raise ModelError(f"{card.spec.architecture}: torch's exporter gave no model")
            made.save(str(path), external_data=False)
        except Exception as error:  # the exporter's own errors are of many kinds
            raise ModelError(
                f"{card.spec.architecture} cannot be written as ONNX: {str(error).splitlines()[0][:200]}"
            ) from error
        model = onnx.load(str(path))
        for key, value in {"classes": json.dumps(list(card.classes)), **_transform(card)}.items():
            model.metadata_props.add(key=key, value=value)
        with _written(output) as file:
            file.write(model.SerializeToString())


def _hugging_face(module: nn.Module, card: ModelCard, output: Path) -> None:
    """A folder as transformers and timm read it: weights, classes by number, and what is done to images."""
    names = {str(number): name for number, name in enumerate(card.classes)}
    architecture = card.spec.architecture
    config: dict[str, Any] = {
        "architecture": architecture.removeprefix("timm:"),
        "num_classes": len(card.classes),
        "label_names": list(card.classes),
        "id2label": names,
        "label2id": {name: int(number) for number, name in names.items()},
    }
    processor: dict[str, Any] | None = None
    if (transform := card.transform) is not None:
        config["pretrained_cfg"] = {
            "input_size": list(card.spec.input_shape),
            "interpolation": "bilinear",
            "crop_pct": transform.crop / transform.resize,
            "mean": list(transform.mean),
            "std": list(transform.std),
        }
        processor = {
            "do_resize": True, "size": {"shortest_edge": transform.resize}, "resample": 2,
            "do_center_crop": True, "crop_size": {"height": transform.crop, "width": transform.crop},
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": list(transform.mean), "image_std": list(transform.std),
        }  # fmt: skip
    make_folder(output, "--output")
    # Weights come last: weights without settings would be taken for a model that is no export, and not be replaced.
    for name, document in ((_HF_CONFIG, config), ("preprocessor_config.json", processor)):
        if document is not None:
            with _written(output / name) as file:
                file.write((json.dumps(document, indent=2) + "\n").encode())
    write_model(output / _HF_MODEL, module.state_dict(), card)


FORMATS = {
    "safetensors": _Format(".safetensors", _safetensors),
    "torch": _Format(".pth", _torch),
    "onnx": _Format(".onnx", _onnx),
    "torch-export": _Format(".pt2", _torch_export),
    "hf": _Format("", _hugging_face),
}
"""Formats by name."""


def _program(module: nn.Module, card: ModelCard) -> torch.export.ExportedProgram:
    """The network's graph, for any batch size. :class:`ModelError` when torch.export cannot follow it."""
    example = torch.zeros((_EXAMPLE_BATCH, *card.spec.input_shape))
    try:
        with _quiet(), torch.no_grad():
            shapes = ({0: torch.export.Dim("batch")},)
            return torch.export.export(module.eval(), (example,), dynamic_shapes=shapes)
    except Exception as error:  # torch.export's errors are of many kinds
        raise ModelError(
            f"{card.spec.architecture} cannot be exported as a graph by torch.export "
            f"({str(error).splitlines()[0][:200]}); safetensors and torch hold its weights"
        ) from error


def _transform(card: ModelCard) -> dict[str, str]:
    return {} if card.transform is None else {"transform.json": json.dumps(card.transform.to_json())}


@contextmanager
def _written(output: Path) -> Iterator[BinaryIO]:
    try:
        with replacing(output) as file:
            yield file
    except OSError as error:
        raise HapiError(f"--output {output}: cannot be written: {error.strerror or error}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' talk about their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

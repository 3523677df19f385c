"""``hapi predict``, ``hapi evaluate`` and ``hapi export``: a model file at work."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torchvision.transforms import v2

from hapi.api.model_files import load_model
from hapi.cli.main import main
from hapi.errors import UsageError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.models.model_file import ModelCard, write_model
from hapi.models.zoo.build import ModelSpec, build
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec

CLASSES = ("ant", "bee", "fly", "gnat", "moth", "wasp")
SPEC = ModelSpec(architecture="squeezenet1_1", num_classes=6, input_shape=(3, 64, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photographs in folders of six classes, their dataset in ``store/insects``, and a model of them."""
    root = tmp_path_factory.mktemp("predict")
    rng = np.random.default_rng(0)
    for number in range(12):
        place = root / "images" / CLASSES[number % 6]
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (90 + number, 70, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02}.png")
    pack(open_source(str(root / "images")), open_store(str(root / "store")), "insects", PackOptions())
    state = build(SPEC).module.state_dict()
    transform = TransformSpec.for_image_size(64)
    write_model(
        root / "m.safetensors",
        state,
        ModelCard(spec=SPEC, classes=CLASSES, transform=transform, freeze=3, epoch=2),
    )
    return root


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def expected_outputs(folder: Path) -> tuple[list[str], torch.Tensor]:
    """The outputs of plain PyTorch and torchvision for all images, in the order of their names."""
    module = build(SPEC).module.eval()
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(73, antialias=True),
            v2.CenterCrop(64),
            v2.Lambda(lambda image: image.float() / 255),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    files = sorted((folder / "images").rglob("*.png"))
    inputs = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    with torch.no_grad():
        return [str(f.relative_to(folder)) for f in files], module(inputs)


def test_a_folder_of_images(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, logits = expected_outputs(here)
    code, out, _ = run(capsys, "predict", "m.safetensors", "images", "--top", "2")
    assert code == 0
    for line, name, outputs in zip(out.splitlines(), names, logits, strict=True):
        best = outputs.softmax(0).topk(2)
        said = [f"{CLASSES[i]} {100 * p:.1f}%" for p, i in zip(*(t.tolist() for t in best), strict=True)]
        assert line.split("  ") == [name, *said]


def test_several_images_and_folders(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a shell's ``*.png`` gives them, in the order in which they are given."""
    sources = ["images/wasp", "images/ant/00.png", "images/bee/01.png"]
    code, out, _ = run(capsys, "predict", "m.safetensors", *sources, "--top", "1")
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert code == 0 and names == ["images/wasp/05.png", "images/wasp/11.png", *sources[1:]]
    code, out, err = run(capsys, "predict", "m.safetensors", "images", "store/insects")
    assert (code, out) == (2, "") and "store/insects: there is no such image or folder" in err
    assert err.endswith("only one dataset can be given\n") and err.count("\n") == 1


def test_hidden_files_are_left_out(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("images/ant", tmp_path / "ant")
    (tmp_path / "ant" / "._00.png").write_bytes(b"no image")
    code, out, err = run(capsys, "predict", "m.safetensors", str(tmp_path / "ant"))
    assert (code, err, out.count("\n")) == (0, "", 2)


def test_a_file_of_predictions(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "found.csv"
    code, out, _ = run(
        capsys, "predict", "m.safetensors", "store/insects", "--csv", str(table), "--batch-size", "5"
    )
    rows = list(csv.DictReader(table.open()))
    _, logits = expected_outputs(here)  # the dataset is in the order of the folders, too
    assert code == 0 and out.splitlines()[0] == f"12 predictions in {table}"
    assert [row["sample"] for row in rows] == [str(n) for n in range(12)]
    assert [row["class_1"] for row in rows] == [CLASSES[i] for i in logits.argmax(1)]
    assert [row["label"] for row in rows] == [CLASSES[n // 2] for n in range(12)]
    assert sum(float(rows[3][f"probability_{n}"]) for n in range(1, 6)) < 1.0
    right = sum(row["class_1"] == row["label"] for row in rows)
    assert out.splitlines()[1] == f"{right} of 12 as labelled ({100 * right / 12:.1f}%)"


def test_evaluation_is_plain_pytorchs(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, logits = expected_outputs(here)
    labels = torch.arange(12) // 2
    code, out, _ = run(
        capsys, "evaluate", "m.safetensors", "--dataset", "store/insects", "--json", str(tmp_path / "e.json")
    )
    found = json.loads((tmp_path / "e.json").read_text())
    assert code == 0 and out.startswith("12 samples: loss ") and "top5" in out and "  moth: " in out
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-6)
    assert found["accuracy"] == (logits.argmax(1) == labels).double().mean()
    assert found["top5"] == (logits.topk(5).indices == labels[:, None]).any(1).double().mean()
    assert found["class_samples"] == [2] * 6
    assert found["class_accuracy"][4] == (logits[8:10].argmax(1) == 4).double().mean()
    assert sum(map(sum, found["confusion"])) == 12 and len(found["worst"]) == 12
    worst = found["worst"][0]
    assert worst["loss"] == pytest.approx(
        nn.functional.cross_entropy(logits, labels, reduction="none").max().item()
    )


@pytest.mark.slow
def test_chosen_metrics(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        "evaluate",
        "m.safetensors",
        "--dataset",
        "store/insects",
        "--metric",
        "f1",
        "--metric",
        "auroc",
    )
    assert code == 0 and ", f1 0." in out and ", auroc 0." in out and "top5" not in out
    code, _, err = run(capsys, "evaluate", "m.safetensors", "--dataset", "store/insects", "--metric", "mae")
    assert code == 2 and "--metric mae: the dataset has one class for each sample" in err


def test_a_loaded_model_in_three_lines(here: Path) -> None:
    module, transform, classes, card = load_model("m.safetensors")
    assert transform is not None and classes == CLASSES and card.epoch == 2
    names, logits = expected_outputs(here)
    for image in (names[3], Path(names[3]), Path(names[3]).read_bytes(), Image.open(names[3])):
        with torch.no_grad():
            assert torch.equal(module(transform(image)[None])[0], module(transform(names[3])[None])[0])
            torch.testing.assert_close(module(transform(image)[None])[0], logits[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["predict", "none.safetensors", "images"], 1, "none.safetensors does not exist"),
        (["predict", "m.safetensors", "nowhere"], 2, "nowhere: there is no such image or folder"),
        (["predict", "m.safetensors", "store/none"], 1, "none"),
        (["predict", "m.safetensors", "store"], 2, "store has no images in it"),
        (["predict", "m.safetensors", "m.safetensors"], 1, "image m.safetensors"),
        (["predict", "m.safetensors", "images", "--csv", "m.safetensors"], 2, "--csv"),
        (["predict", "m.safetensors", "images", "--top", "0"], 2, "--top"),
        (["predict", "m.safetensors", "images", "--device", "tpu"], 2, "--device"),
        (["evaluate", "m.safetensors"], 2, "--dataset"),
        (["evaluate", "m.safetensors", "--dataset", "store/other"], 2, "classes are others"),
        (["export", "m.safetensors", "--output", "m.tflite"], 2, "its ending names no format"),
        (["export", "m.safetensors", "--output", "m.safetensors"], 2, "--output"),
        (["export", "m.safetensors", "--output", "m.pth", "--format", "keras"], 2, "keras"),
    ],
)
def test_wrong_use_ends_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    if "store/other" in arguments and not (here / "store" / "datasets" / "other").exists():
        np.savez(here / "other.npz", x=np.zeros((4, 3, 64, 64), np.uint8), y=[0, 1, 2, 3])
        pack(open_source(str(here / "other.npz")), open_store("store"), "other", PackOptions())
    before = (here / "m.safetensors").read_bytes()
    try:
        found = main(arguments)
    except SystemExit as ended:
        found = int(ended.code or 0)
    err = capsys.readouterr().err
    assert found == code, err
    assert says in err and len(err.splitlines()) == 1
    assert (here / "m.safetensors").read_bytes() == before


def test_pytorchs_own_format(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "export", "m.safetensors", "--output", str(tmp_path / "m.pth"))[0] == 0
    found, own = torch.load(tmp_path / "m.pth", weights_only=True), load_file("m.safetensors")
    assert found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)


@pytest.mark.slow
def test_a_folder_as_hugging_face_has_it(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, *_ = run(capsys, "export", "m.safetensors", "--format", "hf", "--output", str(tmp_path / "hf"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    processor = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())
    assert code == 0 and config["id2label"]["5"] == "wasp" and config["label2id"]["bee"] == 1
    assert processor["size"] == {"shortest_edge": 73} and processor["crop_size"] == {
        "height": 64,
        "width": 64,
    }
    assert load_model(tmp_path / "hf" / "model.safetensors").classes == CLASSES
    again = ("export", "m.safetensors", "--format", "hf", "--output")
    assert run(capsys, *again, str(tmp_path / "hf"))[0] == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"of the last epoch")
    code, _, err = run(capsys, *again, str(tmp_path / "run"))
    assert code == 2 and "run: its model.safetensors is no export; name another folder" in err
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == b"of the last epoch"


@pytest.mark.slow
def test_an_export_that_failed_halfway_is_done_again(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any of its files: a full disk, or a kill."""
    export, place = ("export", "m.safetensors", "--format", "hf", "--output"), tmp_path / "hf"

    def full(*arguments: object) -> None:
        raise UsageError("No space left on device")

    for name in ("_written", "write_model"):
        with monkeypatch.context() as patched:
            patched.setattr(f"hapi.api.export.{name}", full)
            assert run(capsys, *export, str(place))[0] == 2
        assert run(capsys, *export, str(place))[0] == 0
        shutil.rmtree(place)


@pytest.mark.slow
def test_graphs(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    for name in ("m.onnx", "m.pt2"):
        code, out, err = run(capsys, "export", "m.safetensors", "--output", str(tmp_path / name))
        assert code == 0 and out.startswith(str(tmp_path / name)) and not err, err
    inputs = torch.rand(5, 3, 64, 64)
    with torch.no_grad():
        expected = load_model("m.safetensors").module(inputs)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"input": inputs.numpy()})
    assert np.abs(logits - expected.numpy()).max() < 1e-4
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(CLASSES)
    extra = {"classes.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    torch.testing.assert_close(program.module()(inputs), expected, rtol=1e-5, atol=1e-6)
    assert json.loads(extra["classes.json"]) == list(CLASSES)


def test_the_worst_samples_are_named_where_each_has_an_object(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(here / "images", tmp_path / "images")
    assert main(["index", "images", f"{tmp_path}/insects", "--quiet"]) == 0
    capsys.readouterr()
    found_at = tmp_path / "e.json"
    code, _, err = run(
        capsys, "evaluate", "m.safetensors", "--dataset", f"{tmp_path}/insects", "--json", str(found_at)
    )
    assert code == 0, err
    worst = json.loads(found_at.read_text())["worst"]
    assert len({sample["object"] for sample in worst}) == 12
    for sample in worst:
        assert (tmp_path / sample["object"]).is_file() and f"/{sample['label']}/" in f"/{sample['object']}"


@pytest.mark.slow
def test_evaluation_beside_the_store(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures as here; with frozen layers that the server cannot make, a line says that they run here."""
    command = ("evaluate", "--quiet", "--device", "cpu", "--json", str(tmp_path / "e.json"))
    assert run(capsys, *command, "m.safetensors", "--dataset", "store/insects")[0] == 0
    expected = json.loads((tmp_path / "e.json").read_text())
    code, _, err = run(capsys, *command, "m.safetensors", "--dataset", "insects", "--store", "store")
    found = json.loads((tmp_path / "e.json").read_text())
    assert code == 0 and not err, err
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["accuracy"] == expected["accuracy"] and found["class_samples"] == expected["class_samples"]
    state = {name: 1.1 * tensor for name, tensor in load_file("m.safetensors").items()}
    write_model(tmp_path / "other.safetensors", state, load_model("m.safetensors").card)
    code, _, err = run(
        capsys, *command, str(tmp_path / "other.safetensors"), "--dataset", "insects", "--store", "store"
    )
    assert code == 0 and len(err.splitlines()) == 1 and "so all run here" in err
    code, _, err = run(capsys, *command, "m.safetensors", "--dataset", "none", "--store", "store")
    assert code == 2 and len(err.splitlines()) == 1 and "none" in err, err

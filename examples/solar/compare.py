"""Both trainings side by side: ``python compare.py RUNS TARGET SEED [SEED ...]``.

Writes TARGET/results.json and TARGET/curves.svg. AUROC: the probability that a defective cell gets the higher score.
"""

import csv
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score

FIGURES = ("loss", "accuracy", "auroc")


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


def of_file(predictions: Path) -> dict[str, float]:
    """Accuracy and AUROC of the model file, by what ``hapi predict --csv`` wrote."""
    rows = table(predictions)
    scores = [
        float(row["probability_1" if row["class_1"] == "defective" else "probability_2"]) for row in rows
    ]
    return {
        "accuracy": mean(row["label"] == row["class_1"] for row in rows),
        "auroc": float(roc_auc_score([row["label"] == "defective" for row in rows], scores)),
    }


def compared(folder: Path, plain: dict[str, Any]) -> dict[str, Any]:
    """A run of Hapi beside the plain one of its seed."""
    losses = [float(row["loss"]) for row in table(folder / "steps.csv")]
    epochs = table(folder / "epochs.csv")
    return {
        "losses": losses,
        "epochs": [{key: float(row[f"validation_{key}"]) for key in FIGURES} for row in epochs],
        "bytes_received": [int(row["bytes_received"]) for row in epochs],
        "model_file": of_file(folder / "predictions.csv"),
        "largest_relative_difference": max(
            abs(a - b) / b for a, b in zip(losses, plain["losses"], strict=True)
        ),
    }


def read(runs: Path, seed: int) -> dict[str, Any]:
    """All runs of a seed: the plain one, and Hapi's by the precision of its frozen layers."""
    folder = runs / f"seed{seed}"
    plain = json.loads((folder / "plain.json").read_text())
    kept = [{key: epoch[key] for key in FIGURES} for epoch in plain["epochs"]]
    found = {"seed": seed, "plain": {"losses": plain["losses"], "epochs": kept}}
    for run in sorted(folder.glob("hapi-*")):
        if (run / "predictions.csv").exists():
            found[run.name.removeprefix("hapi-")] = compared(run, plain)
    return found


def draw(found: list[dict[str, Any]], target: Path) -> None:
    """Curves of the plain runs and of Hapi's in fp32: losses of steps, their differences, held-out accuracy."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    above, middle, below = figure.subplots(3, 1, height_ratios=(2, 1, 1.5))
    for number, one in enumerate(seed for seed in found if "fp32" in seed):
        plain, hapi, colour = one["plain"], one["fp32"], f"C{number}"
        steps = range(1, len(hapi["losses"]) + 1)
        title = f"seed {one['seed']}"
        above.plot(steps, plain["losses"], color=colour, linewidth=3, alpha=0.35, label=f"plain, {title}")
        above.plot(steps, hapi["losses"], color=colour, linewidth=1, label=f"Hapi, {title}")
        pairs = zip(hapi["losses"], plain["losses"], strict=True)
        middle.semilogy(steps, [max(abs(a - b) / b, 1e-9) for a, b in pairs], color=colour, linewidth=1)
        epochs = range(1, len(hapi["epochs"]) + 1)
        accuracy = {
            who: [100 * epoch["accuracy"] for epoch in run["epochs"]]
            for who, run in (("plain", plain), ("Hapi", hapi))
        }
        below.plot(epochs, accuracy["plain"], color=colour, linewidth=3, alpha=0.35)
        below.plot(epochs, accuracy["Hapi"], color=colour, linewidth=1, marker="o", markersize=3)
    middle.axhline(1e-4, color="black", linestyle=":", linewidth=1)
    above.set_ylabel("training loss of a step")
    middle.set_ylabel("relative difference")
    middle.set_xlabel("step (64 images)")
    below.set_ylabel("held-out accuracy, %")
    below.set_xlabel("epoch")
    below.xaxis.get_major_locator().set_params(integer=True)
    above.legend(fontsize=7, ncols=2)
    figure.savefig(target, metadata={"Date": None})


def main(runs: Path, target: Path, seeds: list[int]) -> None:
    """Read, write and print."""
    found = [read(runs, seed) for seed in seeds]
    (target / "results.json").write_text(json.dumps({"seeds": found}, indent=1) + "\n")
    draw(found, target / "curves.svg")
    print("seed  frozen  accuracy Hapi / plain   AUROC Hapi / plain   difference of losses   MB an epoch")
    kinds = sorted({kind for one in found for kind in one if kind not in ("seed", "plain")}, reverse=True)
    for one in found:
        plain = one["plain"]["epochs"][-1]
        for kind in (kind for kind in kinds if kind in one):
            run = one[kind]
            last = run["epochs"][-1]
            print(
                f"{one['seed']:4d}  {kind:6}  {last['accuracy']:13.2%} / {plain['accuracy']:.2%}   "
                f"{last['auroc']:.4f} / {plain['auroc']:.4f}   {run['largest_relative_difference']:20.1e}   "
                f"{run['bytes_received'][-1] / 1e6:.1f}"
            )
    for who in ("plain", *kinds):
        lasts = [one[who]["epochs"][-1] for one in found if who in one]
        if len(lasts) > 1:
            both = {key: [last[key] for last in lasts] for key in ("accuracy", "auroc")}
            said = (f"{key} {mean(v):.4f} (standard deviation {stdev(v):.4f})" for key, v in both.items())
            print(who, *said, sep="  ")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]])

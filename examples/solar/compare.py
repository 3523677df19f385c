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


def hapi_losses(folder: Path) -> list[float]:
    """The loss of each step, from the table that ``--log csv --log-every 1`` makes."""
    (table,) = folder.rglob("steps.csv")
    with table.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def held_out(predictions: Path) -> dict[str, float]:
    """Accuracy and AUROC of the file that ``hapi predict --csv`` wrote."""
    with predictions.open() as file:
        rows = list(csv.DictReader(file))
    scores = [
        float(row["probability_1" if row["class_1"] == "defective" else "probability_2"]) for row in rows
    ]
    return {
        "accuracy": mean(row["label"] == row["class_1"] for row in rows),
        "auroc": float(roc_auc_score([row["label"] == "defective" for row in rows], scores)),
    }


def compared(runs: Path, seed: int) -> dict[str, Any]:
    folder = runs / f"seed{seed}"
    plain = json.loads((folder / "plain.json").read_text())
    losses = hapi_losses(folder / "hapi")
    return {
        "seed": seed,
        "hapi": held_out(folder / "predictions.csv"),
        "plain": {key: plain["epochs"][-1][key] for key in ("accuracy", "auroc")},
        "largest_relative_difference": max(
            abs(a - b) / b for a, b in zip(losses, plain["losses"], strict=True)
        ),
        "hapi_losses": losses,
        "plain_losses": plain["losses"],
        "plain_held_out_losses": [epoch["loss"] for epoch in plain["epochs"]],
    }


def draw(found: list[dict[str, Any]], target: Path) -> None:
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, one in enumerate(found):
        steps = range(1, len(one["hapi_losses"]) + 1)
        colour = f"C{number}"
        above.plot(
            steps,
            one["plain_losses"],
            color=colour,
            linewidth=3,
            alpha=0.35,
            label=f"plain PyTorch, seed {one['seed']}",
        )
        above.plot(steps, one["hapi_losses"], color=colour, linewidth=1, label=f"Hapi, seed {one['seed']}")
        pairs = zip(one["hapi_losses"], one["plain_losses"], strict=True)
        below.semilogy(steps, [max(abs(a - b) / b, 1e-9) for a, b in pairs], color=colour, linewidth=1)
    below.axhline(1e-4, color="black", linestyle=":", linewidth=1)
    above.set_ylabel("training loss of a step")
    below.set_ylabel("relative difference")
    below.set_xlabel("step (64 images)")
    above.legend(fontsize=8, ncols=2)
    figure.savefig(target, metadata={"Date": None})


def main(runs: Path, target: Path, seeds: list[int]) -> None:
    found = [compared(runs, seed) for seed in seeds]
    (target / "results.json").write_text(json.dumps({"seeds": found}, indent=1) + "\n")
    draw(found, target / "curves.svg")
    print("seed  accuracy Hapi / plain   AUROC Hapi / plain   largest difference of a step's loss")
    for one in found:
        h, p = one["hapi"], one["plain"]
        print(
            f"{one['seed']:4d}  {h['accuracy']:13.2%} / {p['accuracy']:.2%}   {h['auroc']:.4f} / {p['auroc']:.4f}   "
            f"{one['largest_relative_difference']:.1e}"
        )
    if len(found) > 1:
        for key in ("accuracy", "auroc"):
            both = {who: [one[who][key] for one in found] for who in ("hapi", "plain")}
            print(
                key,
                *(f"{who} {mean(v):.4f} (standard deviation {stdev(v):.4f})" for who, v in both.items()),
                sep="  ",
            )


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]])

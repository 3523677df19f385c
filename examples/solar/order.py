"""The order in which a job of Hapi uses its samples, as names of files, for a program that has no Hapi.

    python order.py SERVER STORE TRAIN_FOLDER SEED EPOCHS FILE

The file has a list for each epoch, of a list for each batch, of names below TRAIN_FOLDER.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import hapi


def names_of(dataset: str, folder: Path) -> list[str]:
    """The file of each sample, by id: the one with its bytes."""
    files = {
        hashlib.sha256(f.read_bytes()).digest(): str(f.relative_to(folder)) for f in folder.glob("*/*.png")
    }
    names = []
    with hapi.open_dataset(dataset) as reader:
        reader.sequence(seed=0, epoch=0, order=np.arange(reader.count, dtype=np.int64))
        for samples in reader:
            names += [
                files[hashlib.sha256(samples.sample(i).tobytes()).digest()] for i in range(len(samples.ids))
            ]
    return names


def main(server: str, store: str, folder: str, seed: str, epochs: str, target: str) -> None:
    names = names_of(f"{store}/solar-train", Path(folder))
    settings = hapi.SessionSettings(
        server=(server,), dataset="solar-train", model="store:lite0", allow_model=("solar_model:lite0",),
        freeze="_blocks.14.add", split="freeze", bs=64, drop_last=True, shuffle="full", seed=int(seed),
    )  # fmt: skip
    with hapi.Session.open(settings) as session:
        order = [
            [[names[i] for i in ids] for ids in session.batch_ids(epoch)] for epoch in range(int(epochs))
        ]
    Path(target).write_text(json.dumps(order))


if __name__ == "__main__":
    if len(sys.argv) != 7:
        sys.exit(__doc__)
    main(*sys.argv[1:])

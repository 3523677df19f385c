"""Class folders of links to the clear images of the package elpv-dataset: ``python images.py FOLDER [N]``.

Clear images are those whose defect probability is exactly 0 (intact) or 1 (defective): 2,223 of 2,624. Every fourth
of each class and each type of cell is held out. N: only the first N of each class. The images are CC BY-NC-SA 4.0 and
stay where the package has them.
"""

import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path


def main(folder: Path, most: int | None = None) -> None:
    source = Path(str(files("elpv_dataset"))) / "data"
    seen: Counter[tuple[str, str]] = Counter()
    made: Counter[str] = Counter()
    for line in (source / "labels.csv").read_text().splitlines():
        name, probability, cell = line.split()
        if float(probability) not in (0.0, 1.0):
            continue
        label = "defective" if float(probability) else "intact"
        if most is not None and made[label] == most:
            continue
        made[label] += 1
        seen[label, cell] += 1
        part = "test" if seen[label, cell] % 4 == 0 else "train"
        link = folder / part / label / Path(name).name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(source / name)
        made[f"{part}/{label}"] += 1
    print(", ".join(f"{made[where]} {where}" for where in sorted(made) if "/" in where))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

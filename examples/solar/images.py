"""Class folders of links to the clear images of the package elpv-dataset: ``python images.py FOLDER``.

Clear images are those whose defect probability is exactly 0 (intact) or 1 (defective): 2,223 of 2,624. Every fourth
of each class and each type of cell is held out. The images are CC BY-NC-SA 4.0 and stay where the package has them.
"""

import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path


def main(folder: Path) -> None:
    source = Path(str(files("elpv_dataset"))) / "data"
    seen: Counter[tuple[str, str]] = Counter()
    made: Counter[str] = Counter()
    for line in (source / "labels.csv").read_text().splitlines():
        name, probability, cell = line.split()
        if float(probability) not in (0.0, 1.0):
            continue
        label = "defective" if float(probability) else "intact"
        seen[label, cell] += 1
        part = "test" if seen[label, cell] % 4 == 0 else "train"
        link = folder / part / label / Path(name).name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(source / name)
        made[f"{part}/{label}"] += 1
    print(", ".join(f"{count} {where}" for where, count in sorted(made.items())))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

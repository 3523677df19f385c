"""``hapi-train`` that stands still inside the write of its training's last checkpoint until a test lets it go on.

python -m support.held_saving EPOCHS ARGUMENT...     makes the file ``saving``, and waits for the file ``go-on``
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from hapi.cli.train import main
from hapi.train.checkpoints import checkpoint


def _hold(epochs: int) -> None:
    make_way = checkpoint.make_way

    def held(path: Path, keep: int) -> None:
        """Between the new file's last byte and its name."""
        if _progress.epoch == epochs:
            Path("saving").touch()
            while not Path("go-on").exists():
                time.sleep(0.01)
        make_way(path, keep)

    save = checkpoint.save

    def noting(path: str, *, progress: checkpoint.Progress, **parts: Any) -> None:
        global _progress
        _progress = progress
        save(path, progress=progress, **parts)

    checkpoint.make_way, checkpoint.save = held, noting


_progress = checkpoint.Progress()

if __name__ == "__main__":
    _hold(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))

"""tqdm's progress bar by a clock that nobody sets: where the time of day goes back, its own would stand still."""

from __future__ import annotations

import time
from typing import Any

from tqdm import tqdm


class SteadyBar(tqdm):  # type: ignore[type-arg]
    """A bar of tqdm; each update that is due is drawn."""

    monitor_interval = 0  # its thread goes by the time of day too

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"miniters": 1, **options})
        if not self.disable:
            self._time = time.monotonic
            self.start_t = self.last_print_t = self._time()

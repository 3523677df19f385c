"""Which test process runs which tests: those of a file together, and the files that take longest first.

What a file's tests share is then made once. ``--dist loadgroup`` with ``xdist_group`` was to do that; it renames tests,
which pytest 9.2 no longer lets it, and says nothing.
"""

from __future__ import annotations

import re

import pytest

_SLOW_ONES = re.compile(r"\bmark\.(slow|long)(_cases|_except)?\b")
_ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(slow|long)\b", re.MULTILINE)

FIRST: tuple[tuple[str, ...], ...] = (
    (
        "tests/integration/test_swift.py",
        "tests/integration/test_swift_dead_node.py",
        "tests/integration/test_swift_faults.py",
        "tests/integration/test_swift_models.py",
        "tests/integration/test_swift_removal.py",
        "tests/integration/test_swift_script.py",
        "tests/integration/test_swift_stale.py",
    ),
    # What looks at the heap after each operator comes first, as long as little is in it.
    ("tests/offload/test_loops_of_the_field.py",),
    ("tests/train/distributed/test_ranks_of_hapi_train.py",),
    ("tests/cli/test_cli_train_runs.py",),
    ("tests/hostile/test_hostile_host_memory.py",),
    ("tests/integration/test_ray_fleet.py",),
    ("tests/integration/test_jobs.py",),
    ("tests/integration/test_solar_example.py",),
    ("tests/integration/test_chaos.py",),
    ("tests/hostile/test_hostile_trainer.py",),
    ("tests/cluster/test_server_replica.py",),
    ("tests/train/distributed/test_own_loops.py",),
    ("tests/server/test_decoding.py",),
    ("tests/client/test_session_planned.py",),
    ("tests/integration/test_resident_jobs.py",),
    ("tests/integration/test_planning_jobs.py",),
    ("tests/hostile/test_hostile_memory.py",),
    ("tests/hostile/test_hostile_locks.py",),
    ("tests/offload/test_memory_cap.py",),
    ("tests/test_site.py",),
    ("tests/hostile/test_hostile_hung.py",),
    ("tests/hostile/test_hostile_store.py",),
    ("tests/integration/test_parity.py",),
    ("tests/integration/test_status_page.py",),
    ("tests/offload/test_offload_kills.py",),
    ("tests/repository/test_repository_interleaved.py",),
    # Of the fast part.
    ("tests/offload/test_activation_training.py",),
    ("tests/offload/test_freed_memory.py",),
    ("tests/offload/test_exact_steps.py",),
    ("tests/offload/test_second_passes.py",),
    ("tests/offload/test_drive_buffers.py",),
    ("tests/offload/test_scripts_settings.py",),
    ("tests/offload/test_unseen_loops.py",),
    ("tests/offload/test_further_loops.py",),
    ("tests/offload/test_saved_tensors.py",),
    ("tests/offload/test_gradient_views.py",),
    ("tests/client/test_kept_features.py",),
    ("tests/repository/loading/test_load.py",),
    ("tests/train/steps/test_offloading.py",),
    ("tests/models/test_zoo.py",),
    ("tests/offload/test_late_surprises.py",),
    ("tests/server/test_http_fields.py",),
)
"""Files whose tests take long, the longest first; those in one group share fixtures of the session."""
_GROUPS = {file: number for number, group in enumerate(FIRST) for file in group}


def longest_first(items: list[pytest.Item]) -> None:
    """Sort them by file."""
    items.sort(key=lambda item: _GROUPS.get(_file_of(item.nodeid), len(FIRST)))


def group_of(nodeid: str) -> str:
    """Name what a test of a node's id is run together with: its file, or its group of files."""
    file = _file_of(nodeid)
    return str(_GROUPS.get(file, file))


def leaves_nothing(chosen: str, source: str) -> bool:
    """Whether ``-m`` with these marks ``chosen`` leaves no test of a file, by its ``source`` alone."""
    if chosen.startswith(("slow", "long")):
        return _SLOW_ONES.search(source) is None
    return chosen.endswith("not slow") and _ALL_SLOW.search(source) is not None


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]

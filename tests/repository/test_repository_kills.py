"""``hapi push``, ``tag``, ``rm`` and ``gc`` killed at each change of a file: all that is referenced stays, whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.killed_at import killed_at

from hapi.cli.main import main
from hapi.repository.packs.journal import JOURNAL
from hapi.repository.verify import verify_model
from hapi.repository.versions import list_tags, list_versions, model_names
from hapi.store.local import LocalStore

SIZE = 300 << 10
"""Bytes of a tensor, which models share from 256 KiB on."""
NEVER = 10**6
"""Moments that no command has."""
State = dict[str, tuple[dict[int, str | None], dict[str, int]]]


def checkpoint(folder: Path, *numbers: int) -> str:
    """A file with a tensor of each of these numbers."""
    path = folder / f"{'-'.join(map(str, numbers))}.safetensors"
    save_file({f"layer{n}.weight": torch.full((SIZE,), n, dtype=torch.uint8) for n in numbers}, path)
    return str(path)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with versions, a tag, the packs of a model that is gone, and a pack of which a third is needed."""
    folder = tmp_path_factory.mktemp("prepared")
    models = (
        ("m", (1, 2)),
        ("m", (1, 3)),
        ("gone", (1, 4, 5)),
        ("other", (2, 3)),
        ("large", (6, 7, 8)),
        ("part", (2, 7)),
    )
    for name, numbers in models:
        assert main(["push", checkpoint(folder, *numbers), f"{folder}/store/{name}", "--quiet"]) == 0
    assert main(["tag", f"{folder}/store/m@1", "best"]) == 0
    assert main(["rm", f"{folder}/store/gone", f"{folder}/store/large", "--yes"]) == 0
    return folder


def check(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> State:
    """The versions by digest, and the tags, of all models: each version is whole, and the store can be listed."""
    found = {}
    for name in model_names(store):
        reports = {number: verify_model(store, f"{name}@{number}") for number in list_versions(store, name)}
        assert reports and not any(report.damages for report in reports.values())
        versions = {number: report.version for number, report in reports.items()}
        found[name] = versions, {tag.name: tag.version for tag in list_tags(store, name).values()}
    capsys.readouterr()
    assert main(["ls", store.url]) == 0
    assert "no version" not in capsys.readouterr().out
    return found


def check_between(now: State, before: State, after: State) -> None:
    """Nothing is there that is neither of the time before nor of that after, and nothing is lost of both."""
    for name, (versions, tags) in now.items():
        known = [state[name] for state in (before, after) if name in state]
        for number, digest in versions.items():
            assert any(theirs.get(number) == digest for theirs, _ in known)
        for tag, number in tags.items():
            assert any(theirs.get(tag) == number for _, theirs in known)
    for name in before.keys() & after.keys():
        assert now[name][0].items() >= before[name][0].items() & after[name][0].items()
        assert now[name][1].keys() >= before[name][1].keys() & after[name][1].keys()


COMMANDS = {
    "tag": ("tag", "{store}/m@2", "best"),
    "new tag": ("tag", "{store}/other", "best"),
    "rm version": ("rm", "{store}/m@2", "--yes"),
    "rm model": ("rm", "{store}/m", "--yes"),
    "gc": ("gc", "{store}", "--yes"),
    "push": ("push", "{folder}/4-5.safetensors", "{store}/new", "--quiet"),
    "replace": ("push", "{folder}/1-5.safetensors", "{store}/m", "--replace", "--tag", "best", "--quiet"),
}


def _without_journal(store: LocalStore) -> list[str]:
    """Keys of all objects but the journal's, whose entries stay for a day: a killed push has some more."""
    return sorted(info.key for info in store.list() if not info.key.startswith(f"{JOURNAL}/"))


@pytest.mark.slow
@pytest.mark.long_cases("7-new tag", "7-rm version")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_each_change_of_a_file(
    command: str, every: int, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(prepared, 4, 5)
    checkpoint(prepared, 1, 5)
    before = check(LocalStore(prepared / "store"), capsys)
    shutil.copytree(prepared / "store", tmp_path / "undisturbed")
    undisturbed = LocalStore(tmp_path / "undisturbed")

    def arguments(store: LocalStore) -> list[str]:
        return [part.format(store=store.url, folder=prepared) for part in COMMANDS[command]]

    assert main(arguments(undisturbed)) == 0
    after = check(undisturbed, capsys)
    assert main(["gc", undisturbed.url, "--yes"]) == 0
    left = _without_journal(undisturbed)
    for moment in range(0, NEVER, every):
        folder = tmp_path / str(moment)
        shutil.copytree(prepared / "store", folder)
        store = LocalStore(folder)
        code, output = killed_at(folder, moment, *arguments(store))
        now = check(store, capsys)
        check_between(now, before, after)
        if code == 0:
            assert now == after and moment > 5, output
            return
        assert code == -9, output
        again, output = killed_at(folder, NEVER, *arguments(store))
        gone = command.startswith("rm") and "Traceback" not in output and now == after
        assert again == 0 or gone, output
        assert check(store, capsys) == after
        assert main(["gc", store.url, "--yes"]) == 0
        assert check(store, capsys) == after and _without_journal(store) == left
        assert not list(folder.rglob(".*"))
        shutil.rmtree(folder)

"""Models in a real OpenStack Swift that loses a storage node in the middle of a push, and gets it back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forked import ForkedProcess, environment
from support.harness import hapi, wait_for
from support.swift_tools import Swift

from hapi.repository.packs.journal import JOURNAL
from hapi.repository.packs.place import PACKS
from hapi.store.open import open_store

pytestmark = pytest.mark.slow
STORE = "s3://hapi/dead-node"
NODE = ("account-1", "container-1", "object-1")
TENSOR = 9 << 20
"""Bytes of a tensor; a pack of one is uploaded in parts."""
TIMES = 3
"""Times that everything is asked again: the store takes the answer of any of its nodes."""


def saved(path: Path, *numbers: int) -> str:
    state = {f"t{number}.weight": torch.full((TENSOR,), number, dtype=torch.uint8) for number in numbers}
    save_file(state, path)
    return str(path)


@pytest.mark.timeout(900)
def test_a_node_dies_during_a_push_and_comes_back(
    swift_copies: Swift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is pushed, tagged, removed and packed anew meanwhile stays so, and every byte comes back."""
    env = swift_copies.environment
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    store = open_store(STORE)

    def command(*arguments: str, code: int = 0) -> str:
        done = hapi(*arguments, code=code, **env)
        return str(done.stdout if code == 0 else done.stderr)

    def check(reference: str, *numbers: int) -> None:
        """The model is sound, and has these tensors."""
        assert ": sound" in command("verify", f"{STORE}/{reference}", "--quiet")
        output = tmp_path / "back.safetensors"
        command("pull", f"{STORE}/{reference}", "--output", str(output), "--quiet")
        found = {name: int(tensor[0]) for name, tensor in load_file(output).items()}
        assert found == {f"t{number}.weight": number for number in numbers}
        output.unlink()

    command("push", saved(tmp_path / "large.safetensors", 1, 2, 3), f"{STORE}/large", "--quiet")
    # A listing that lags behind hides the tensors of "large", which "part" then brings once more.
    wait_for(lambda: "large" in command("ls", STORE), 120, "the first model in the listing")
    wait_for(lambda: store.list_keys(PACKS), 120, "its pack in the listing")
    packs = set(store.list_keys(PACKS))
    command("push", saved(tmp_path / "part.safetensors", 2), f"{STORE}/part", "--quiet")
    before = len(store.list_keys(JOURNAL))
    arguments = ("push", saved(tmp_path / "m.safetensors", 2, 4, 5, 6, 7, 8), f"{STORE}/m", "--quiet")
    push = ForkedProcess(["hapi", *arguments], env={**environment(), **env})
    try:
        wait_for(lambda: len(store.list_keys(JOURNAL)) > before, 120, "the push's word of what it needs")
        swift_copies.kill(*NODE)
        assert push.wait(300) == 0
        check("m", 2, 4, 5, 6, 7, 8)
        command("tag", f"{STORE}/m@1", "best")
        command("push", saved(tmp_path / "m.safetensors", 2, 9), f"{STORE}/m", "--quiet")
        command("rm", f"{STORE}/large", "--yes")
        # Where the dead node held up the end of a push, its lock has to run out first; one run may pack anew, and a
        # later one remove.
        wait_for(
            lambda: command("gc", STORE, "--yes") and not packs & set(store.list_keys(PACKS)),
            what="a store without the pack that was mostly dead",
        )
        for reference, numbers in (("m@best", (2, 4, 5, 6, 7, 8)), ("m", (2, 9)), ("part", (2,))):
            check(reference, *numbers)
    finally:
        push.kill()
        push.wait()
        swift_copies.start()
    for _ in range(TIMES):
        assert "is tagged best" in command("rm", f"{STORE}/m@best", "--yes", code=1)
        command("gc", STORE, "--yes")
    command("push", saved(tmp_path / "m.safetensors", 2, 9), f"{STORE}/m", "--quiet")
    command("push", saved(tmp_path / "m.safetensors", 9, 10), f"{STORE}/m", "--quiet", "--replace")
    for reference, numbers in (("m@best", (2, 4, 5, 6, 7, 8)), ("m", (9, 10))):
        check(reference, *numbers)

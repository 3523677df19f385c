"""Commands and flags that the documents show are those that the programs have."""

from __future__ import annotations

import ast
import re

import pytest
from support.doc_commands import (
    ROOT,
    known_flags,
    mistake,
    named_commands,
    named_flags,
    shell_commands,
)
from support.parsed import modules_of, nodes_of

PAGES = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))
]  # fmt: skip
FOREIGN = {"--stop-timeout", "--no-python", "--nnodes"}
"""Flags of other programs."""


def test_the_programs_take_the_commands_of_the_pages() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = [(command, mistake(command, whole=True)) for command in shell_commands(text)]
        shown += [(command, mistake(command, whole=False)) for command in named_commands(text)]
        wrong += [f"{page.relative_to(ROOT)}: {command}: {said}" for command, said in shown if said]
    assert not wrong, "commands that would be refused:\n" + "\n".join(wrong)


def test_the_flags_of_the_pages_exist() -> None:
    known = known_flags() | FOREIGN
    unknown = {
        f"{page.relative_to(ROOT)}: no command has {flag}"
        for page in PAGES
        for flag in named_flags(page.read_text(encoding="utf-8")) if flag not in known
    }  # fmt: skip
    assert not unknown, "\n".join(sorted(unknown))


@pytest.mark.slow
def test_the_programs_take_the_commands_of_the_docstrings() -> None:
    wrong = []
    for module in modules_of("hapi", "examples"):
        for node in nodes_of(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "``" in node.value:
                for command in named_commands(re.sub(r"``([^`]+)``", r"`\1`", node.value)):
                    if said := mistake(command, whole=False):
                        wrong.append(f"{module.relative_to(ROOT)}: {command}: {said}")
    assert not wrong


def test_the_readme_shows_commands() -> None:
    found = list(shell_commands((ROOT / "README.md").read_text(encoding="utf-8")))
    assert len(found) >= 6 and any(command.startswith("hapi-server") for command in found)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("```sh\nhapi-train --bach-size 3\n```", "unknown argument --bach-size"),
        ("```sh\nhapi-train --bs many\n```", "many"),
        ("```sh\nhapi pack photos store/photos | tee log && hapi pak a b\n```", "pak"),
        ("```sh\nHAPI_TOKEN=x hapi pack photos  # needs an address\n```", "required"),
        ("```sh\nhapi-servant --port 1\n```", "no command hapi-servant"),
        ("```sh\nscripts/test --slowly\n```", "--slowly"),
        ("```sh\nscripts/tests\n```", "no script"),
        ("`python -m benchmarks sweeps`", "sweeps"),
        ("see `hapi verify STORE/NAME [--modell]`", "--modell"),
        ("`hapi cache empty DIR`", "empty"),
        ("`hapi train --bach-size 3`", "--bach-size"),
    ],
)
def test_a_mistake_is_found(shown: str, said: str) -> None:
    found = [mistake(command, whole=True) for command in shell_commands(shown)]
    found += [mistake(command, whole=False) for command in named_commands(shown)]
    assert re.search(said, " ".join(text for text in found if text)), found


@pytest.mark.parametrize(
    "shown",
    [
        "`hapi plan MODEL --figure FILE`",
        "`hapi pack ... --replace`",
        "`python -m benchmarks NAME`",
        "`hapi-train --profile`",
        "```sh\nhapi-train --server http://store:8099 --bs 256  # beside the store\n```",
        "```sh\nscripts/test --fast\n```",
    ],
)
def test_what_is_right_or_only_unfinished_passes(shown: str) -> None:
    found = [mistake(command, whole=True) for command in shell_commands(shown)]
    found += [mistake(command, whole=False) for command in named_commands(shown)]
    assert found == [None]


def test_a_flag_of_no_command_is_found() -> None:
    assert set(named_flags("`--cache-dir DIR` and `--cahce-dir`")) - known_flags() == {"--cahce-dir"}

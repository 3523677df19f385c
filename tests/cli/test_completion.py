"""``hapi completion``: bash completes commands, flags and choices from what it prints; all shells get a script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hapi.cli.completion import SHELLS
from hapi.cli.main import main

ASK = """
set -e
source "$1"; shift
program=$1
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
spec=$(complete -p "$program"); function=${spec#*-F }; function=${function%% *}
$function "$program" "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$COMP_CWORD - 1]}" || true
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "completion.bash"
    file.write_text(script("bash", capsys))
    for words, expected in (
        (("hapi", "pu"), {"push"}),
        (("hapi", "plan", "--batch"), {"--batch-size"}),
        (("hapi", "train", "--learning"), {"--learning-rate"}),
        (("hapi", "rm", "--k"), {"--keep-old"}),
        (("hapi-train", "--learning"), {"--learning-rate"}),
        (("hapi-server", "--cos"), {"--cos-batch"}),
        (("hapi", "pack", "--preprocess", "ui"), {"uint8"}),
    ):
        done = subprocess.run(
            ["bash", "--norc", "-c", ASK, "bash", str(file), *words], capture_output=True, text=True
        )
        assert set(done.stdout.split()) >= expected, (words, done.stdout, done.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for word in ("hapi-train", "hapi-server", "learning-rate", "keep-old", "completion"):
        assert word in text


def test_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err.count("\n") == 1

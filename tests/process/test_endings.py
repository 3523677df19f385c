"""Ends of real processes, told apart in an ``atexit`` hook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hapi

BEGIN = """
import atexit, os, signal, sys, threading
from hapi.process.endings import process_ending

ending = process_ending()
atexit.register(lambda: os.write(1, str(ending.is_in_order()).encode()))

class Handler:
    def __init__(self, code):
        self.code = code
    def __call__(self, number, frame):
        self.leave()
    def leave(self):
        sys.exit(self.code)

def get(handler):
    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signal.pause()

def raising(code):
    raise SystemExit(code)

def nested(code):
    try:
        sys.exit(code)
    finally:
        pass
"""
IN_ORDER = [
    "pass",
    "sys.exit()",
    "sys.exit(0)",
    "sys.exit(False)",
    "nested(0)",
    "exit(0)",
    "quit()",
    "with open(os.devnull):\n    sys.exit(0)",
    "try:\n    nested(0)\nexcept ValueError:\n    pass\nfinally:\n    os.getpid()",
    "thread = threading.Thread(target=lambda: sys.exit(3)); thread.start(); thread.join()",
    "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
    "try:\n    sys.exit(3)\nexcept SystemExit:\n    sys.exit(0)",
    "if not os.fork():\n    os._exit(3)\nos.wait()",
]
OUT_OF_ORDER = [
    "1 / 0",
    "sys.exit(1)",
    "sys.exit('text')",
    "sys.exit('')",
    "nested(2)",
    "raise SystemExit(1)",
    "raise KeyboardInterrupt",
    "try:\n    sys.exit(0)\nexcept SystemExit:\n    raise SystemExit(1)",
    "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    sys.exit(130)",
    "get(lambda *_: sys.exit(143))",
    "get(lambda number, frame: sys.exit(0))",
    "get(lambda *_: sys.exit(0))",
    "get(Handler(0))",
    "exit(1)",
    "with open(os.devnull):\n    sys.exit(2)",
    "get(lambda *_: raising(0))",
    "raise SystemExit(0)",  # it cannot be told from the code 1, and is taken for the worse
]


def ended(how: str, folder: Path, *start: str) -> str:
    """Run a script that ends so, and return whether its hook found that in order."""
    (folder / "script.py").write_text(f"{BEGIN}\n{how}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{Path(hapi.__file__).parents[1]}:{folder}"}
    found = subprocess.run(
        [sys.executable, *(start or (str(folder / "script.py"),))],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return found.stdout


@pytest.mark.parametrize("how", IN_ORDER)
def test_in_order(how: str, tmp_path: Path) -> None:
    assert ended(how, tmp_path) == "True"


@pytest.mark.parametrize("how", OUT_OF_ORDER)
def test_out_of_order(how: str, tmp_path: Path) -> None:
    assert ended(how, tmp_path) == "False"


@pytest.mark.parametrize("start", [("-m", "script"), ("-c", "import script; script.sys.exit(0)")])
def test_other_main_programs(start: tuple[str, ...], tmp_path: Path) -> None:
    assert ended("pass", tmp_path, *start) == "True"
    assert ended("get(Handler(0))", tmp_path, *start) == "False"

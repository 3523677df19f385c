"""Standard streams that are lost: told once, tried again where that may help, and no error of what works on."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.harness import environment
from support.http_tools import until

from hapi.process.output_stream import Background, OutputStream, UnwaitingStream


def test_lines_are_written_whole_and_at_once(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as file:
        stream = OutputStream(file.fileno(), "stdout")
        print("one", "two", file=stream)
        stream.write("thr")
        assert (tmp_path / "out").read_bytes() == b"one two\n"
        stream.write("ee \udcff ä\n")
        assert (tmp_path / "out").read_bytes() == "one two\nthree \\udcff ä\n".encode()
        stream.write("x" * 10_000)
        stream.flush()
        assert len((tmp_path / "out").read_bytes()) > 10_000
    assert stream.why is None and not stream.isatty()


def test_a_reader_that_went_away_is_told_once() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    told: list[str] = []
    stream = OutputStream(writing, "stdout", lambda lost, error: told.append(f"{lost.title}: {lost.why}"))
    for _ in range(3):
        print("text", file=stream)
    assert told == ["stdout: Broken pipe"]
    os.close(writing)
    print("text", file=stream)


def test_a_disk_that_was_full_gets_later_lines(tmp_path: Path) -> None:
    """A limit on the file's size stands for the disk; it is taken away again."""
    path = tmp_path / "out"
    program = (
        "import resource, signal, sys; from hapi.process.output_stream import OutputStream\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "stream = OutputStream(1, 'stdout')\n"
        "print('before', file=stream)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (7, resource.RLIM_INFINITY))\n"
        "print('lost', file=stream); print('lost too', file=stream)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "print('after', file=stream); print(stream.why, file=stream)"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    with path.open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True, env=environment())
    assert path.read_text() == "before\nafter\nFile too large\n"


def test_nobody_waits_for_a_reader_that_takes_nothing() -> None:
    """What it left no room for is counted, in a line between those before and those after."""
    reading, writing = os.pipe()
    os.write(writing, b"\n" * fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096))
    background = Background(2000)
    stream = UnwaitingStream(writing, "log", background, lambda count: f"{count} missing\n")
    for number in range(1000):
        print(f"line {number:4}", file=stream)
    assert not stream.settle(0.01) and stream.dropped > 0
    received: list[str] = []
    with os.fdopen(reading) as reader:
        thread = threading.Thread(target=lambda: received.extend(reader))
        thread.start()
        assert stream.settle(60)
        print("after", file=stream)
        background.close()
        os.close(writing)
        thread.join()
    whole = 1000 - stream.dropped
    assert whole == 200
    assert received[4096:] == [
        *(f"line {n:4}\n" for n in range(whole)),
        f"{stream.dropped} missing\n",
        "after\n",
    ]


def test_text_is_written_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    background = Background()
    with (tmp_path / "out").open("wb") as file:
        print("line", file=UnwaitingStream(file.fileno(), "log", background, str))
    background.close()
    assert (tmp_path / "out").read_text() == "line\n"


COMMAND = "import sys; from hapi.cli.shared.common import run_command\nsys.exit(run_command('prog', body, goes_on=%s))"
PRINTS = "def body():\n    for n in range(9): print('line', n)\n    return 0\n"


def outcome(shell: str, goes_on: bool, body: str = PRINTS) -> tuple[int, str]:
    """(exit code of the command, stderr) of a command with redirections as ``shell`` has them after it."""
    script = f'"$0" -c "$1" {shell}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, body + COMMAND % goes_on],
        capture_output=True, text=True, env=environment(), check=False, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("shell", "why"),
    [("> /dev/full", "No space left on device"), ("| (exec <&-; sleep 1)", "Broken pipe")],
)
def test_a_command_that_works_goes_on(shell: str, why: str) -> None:
    slow = "import time\n" + PRINTS.replace("print(", "time.sleep(0.03); print(")
    code, errors = outcome(shell, True, slow)
    assert (code, errors) == (0, f"prog: stdout cannot be written ({why}); the work goes on\n")


@pytest.mark.parametrize(
    "shell", [">&-", "2> /dev/full", "2>&-", "> /dev/full 2>&1", ">&- 2>&-", "<&- >&- 2>&-"]
)
def test_nothing_left_to_tell_it_to(shell: str) -> None:
    tells = PRINTS.replace("return 0", "print('told', file=sys.stderr); return 0")
    assert outcome(shell, True, "import sys\n" + tells) == (0, "told\n" if shell == ">&-" else "")


def test_a_command_that_works_does_not_wait_for_its_reader(tmp_path: Path) -> None:
    """It waits once the work is done: no line is lost that it can hold, and both streams keep their order."""
    done, lines = tmp_path / "done", 10_000
    body = (
        f"import pathlib, sys\ndef body():\n    for n in range({lines}):\n"
        f"        print('line', n); print('other', n, file=sys.stderr)\n"
        f"    pathlib.Path({str(done)!r}).touch()\n    return 0\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", body + COMMAND % True],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    try:
        until(done.exists, 60, "the end of the work")
        assert process.poll() is None
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0
    assert out.splitlines() == [line for n in range(lines) for line in (f"line {n}", f"other {n}")]


def test_a_command_that_prints_has_failed() -> None:
    assert outcome("> /dev/full", False) == (
        1,
        "prog: error: stdout cannot be written: No space left on device\n",
    )
    endless = "def body():\n    while True: print('line')\n"
    assert outcome("| head -n 1", False, endless) == (1, "")


def test_files_that_are_opened_later_are_no_standard_output(tmp_path: Path) -> None:
    """Where stdout was closed at the start, the next file would be descriptor 1."""
    path = tmp_path / "data"
    body = (
        f"def body():\n    with open({str(path)!r}, 'w') as f: print('line'); f.write('data')\n    return 0\n"
    )
    assert outcome(">&-", True, body)[0] == 0
    assert path.read_text() == "data"

"""``hapi-train`` as a person meets it: wrong use in one line, Ctrl-C at any moment, pipes, terminals, the example."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import (
    ROOT,
    ServerProcess,
    environment,
    packed_digits,
    report_of,
    run,
    server,
    start_new_train,
    start_train,
    train,
    wait_for,
)
from support.local_job import pack_blobs

from hapi.cli import train as command
from hapi.cli.main import main
from hapi.config.settings import load
from hapi.train.settings import TrainSettings

FAST = ("--weights", "random", "--epochs", "1", "--bs", "50", "--threads", "1", "--no-progress")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), 200)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("HAPI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, the one line on stderr) of a command that does not train."""
    try:
        code = command.main(arguments)
    except SystemExit as stop:
        code = int(str(stop.code))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("hapi-train: error: "), err
    return code, err


# -- wrong use without a server ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--modle", "x"], "unknown argument --modle; did you mean --model?"),
        (["a.yaml", "b.yaml"], "unknown argument b.yaml"),
        (["--bs"], "--bs"),
        (["--bs", "many"], "--bs: expected an integer from 1 to 1048576, got 'many'"),
        (["--bs", "9" * 30], "--bs: expected"),
        (["--bs", "1.5"], "--bs: expected"),
        (["--bs", "1__0"], "--bs: expected an integer from 1 to 1048576, got '1__0'"),
        (["--lr", "nan"], "--lr: expected a number above 0"),
        (["--optimizer", "sdg"], "--optimizer: expected one of sgd, adam"),
        (["--device", "tpu"], "--device 'tpu': expected auto, cpu, cuda"),
        (["--timeout", "0"], "--timeout: expected"),
        (["--prefetch-bytes", "1 parsec"], "unknown unit"),
        (["--split", ""], "--split: the text is empty; give a value, or leave the flag away"),
        (["--server", "ftp://x"], "server URL 'ftp://x': expected http://HOST:PORT"),
        (["--server", "http://a..b"], "expected http://HOST:PORT"),
        (["--server", "http://x", "--token-file", "/nowhere"], "--token-file /nowhere: cannot be read"),
        (
            ["--server", "https://x", "--ca-file", "/nowhere"],
            "--ca-file /nowhere: cannot be read: No such file",
        ),
        (
            ["--server", "http://x", "--ca-file", "/some.pem"],
            "--ca-file /some.pem: http://x is not an https:// server",
        ),
        (["--store", "/nowhere"], "no data set in the store '/nowhere'; make one with 'hapi pack"),
        (["--store", "memory://"], "lives in one process"),
        ([], "no data set in the store"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint"),
        (["--keep", "3"], "--keep needs --checkpoint FILE"),
        (["--sample-cache-size", "20GB"], "--sample-cache-size needs --sample-cache DIR"),
        (["--profile-epoch", "3"], "--profile-epoch 3: expected 0 to 2, the last epoch; give more --epochs"),
        (["--profile-epoch", "0,9", "--epochs", "9"], "--profile-epoch 9: expected 0 to 8"),
        (["--report", "/tmp"], "--report /tmp: is not a plain file"),
        (["--checkpoint", "/dev/null"], "--checkpoint /dev/null: is not a plain file"),
        (["--trace", "/proc/no/trace"], "--trace /proc/no/trace: cannot be written there"),
        (["--report", "r" * 300], "cannot be written there: File name too long"),
        (["--store", "~no-such-user/s"], "--store ~no-such-user/s: there is no user of this name"),
        (["--store", "s" * 300], "cannot be read: File name too long"),
        (["--sample-cache", "~no-such-user"], "--sample-cache ~no-such-user: there is no user of this name"),
        (["/nowhere.yaml"], "/nowhere.yaml: cannot read the settings file: No such file"),
        (["/tmp"], "/tmp: cannot read the settings file: Is a directory"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_use(capsys: pytest.CaptureFixture[str], arguments: list[str], match: str) -> None:
    code, line = refused(capsys, *arguments)
    assert code == 2 and match in line


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            ["--report", "out", "--html", "sub/../out"],
            "--html sub/../out: it is the same file as --report; give another name",
        ),
        (["--checkpoint", "out", "--report", "out"], "--checkpoint out: is --report too"),
        (["--trace", "out", "--save-profile", "link"], "--save-profile link: is --trace too"),
        (["job.yaml", "--report", "job.yaml"], "--report job.yaml: is the experiment file too"),
        (["--weights", "w.pth", "--checkpoint", "w.pth"], "--checkpoint w.pth: is --weights too"),
    ],
)
def test_a_file_has_one_use(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    match: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "job.yaml").write_text("bs: 5\n")
    (tmp_path / "w.pth").write_bytes(b"weights")
    code, line = refused(capsys, *arguments)
    assert code == 2 and match in line
    assert (tmp_path / "w.pth").read_bytes() == b"weights" and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("model: resnet18\nlrr: 3\n", ":2:1: unknown key 'lrr'; did you mean 'lr'?"),
        ("bs: hello\n", ":1:5: bs: expected an integer"),
        ("model: [a\nbs: 8\n", ":2:3: not YAML"),
        ("- a\n- b\n", ":1:1: expected settings"),
        ("bs: 8\nbs: 9\n", ":2:1: key 'bs' appears twice"),
        ("model: !!python/object:os.system x\n", ":1:8: model: the tag"),
        ('checkpoint: "a\\0b"\n', ":1:13: checkpoint: expected text without a NUL"),
        ("server: [1, {a: b}]\n", ":1:"),
        ("\x00", "not YAML"),
    ],
)
def test_wrong_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    code, line = refused(capsys, str(path))
    assert code == 2 and line.startswith(f"hapi-train: error: {path}") and match in line


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("bs: 5\ndevice: tpu\n", "job.yaml:2:9: device 'tpu': expected auto, cpu, cuda"),
        ("resume: yes\n", "job.yaml:1:9: resume needs --checkpoint FILE"),
        ("sample_cache_size: 1GB\n", "job.yaml:1:20: sample_cache_size needs --sample-cache DIR"),
        (
            "epochs: 1\nprofile_epoch: [0, 1]\n",
            "job.yaml:2:16: profile_epoch 1: expected 0 to 0, the last epoch",
        ),
        ("report: .\n", "job.yaml:1:9: report .: is not a plain file"),
        (
            "html: out\nreport: out\n",
            "job.yaml:1:7: html out: it is the same file as job.yaml:2:9: report; give another name",
        ),
        ("server: http://x\ntoken_file: t\n", "job.yaml:2:13: token_file t: cannot be read: No such file"),
        (
            "sample_cache: ~no-such-user\n",
            "job.yaml:1:15: sample_cache ~no-such-user: there is no user of",
        ),
        ("", "HAPI_STORE ~no-such-user/s: there is no user of this name"),
    ],
)
def test_what_is_wrong_is_named_by_where_it_was_given(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    match: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HAPI_STORE", "~no-such-user/s")
    Path("job.yaml").write_text(text)
    code, line = refused(capsys, "job.yaml")
    assert code == 2 and line.startswith(f"hapi-train: error: {match}")


def test_a_dead_server_ends_soon(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    code, line = refused(capsys, "--server", "http://127.0.0.1:9", "--patience", "1s")
    assert code == 1 and "http://127.0.0.1:9/v1/datasets: Connection refused" in line
    assert time.monotonic() - started < 30


def test_an_earlier_checkpoint_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "training.pt"
    path.write_bytes(b"hours of work")
    code, line = refused(capsys, "--checkpoint", str(path))
    assert code == 2 and "give --resume" in line
    assert path.read_bytes() == b"hours of work"
    path.rename(f"{path}.1")
    code, line = refused(capsys, "--checkpoint", str(path), "--keep", "2")
    assert code == 2 and f"{path}.1: exists; give --resume" in line


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_the_experiments_can_be_read(path: Path) -> None:
    settings = load(TrainSettings, path).value.session
    assert settings.model == path.stem


# -- wrong use with a server -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        (["--dataset", "digit"], 1, "no data set 'digit'"),
        (["--model", "resnet1"], 2, "unknown architecture 'resnet1'; did you mean resnet18"),
        (["--model", "nothing:there"], 2, "'nothing:there' cannot be imported"),
        (["--model", "store:nope"], 1, "no model 'nope'"),
        (["--model", "../x"], 2, "'../x' is not an architecture's name"),
        (["--model", "store:a/b"], 2, "--model: 'a/b' is not a name"),
        (["--dataset", "a/b"], 2, "--dataset: 'a/b' is not a name"),
        (["--validation", "a/b"], 2, "--validation: 'a/b' is not a name"),
        (["--blocks", "layer9"], 2, "no layer can end at 'layer9'"),
        (["--weights", "V9"], 2, "has no weights 'V9'; it has"),
        (["--weights", "/nowhere.pth"], 1, "/nowhere.pth does not exist"),
        (["--split", "12"], 2, "--split 12: layer 12 comes after the freeze (11)"),
        (["--split", "99"], 2, "--split: layer 99 is out of range"),
        (["--split", "layer9"], 2, "--split: resnet18 has no layer 'layer9'; did you mean"),
        (["--freeze", "14"], 2, "--freeze 14: no layer after it has parameters"),
        (["--freeze", "layer4.7"], 2, "--freeze: resnet18 has no layer 'layer4.7'; did you mean 'layer4.1'"),
        (["--model", "alexnet", "--image-size", "16"], 2, "cannot run on samples of shape 3x16x16"),
        (["--validation", "1.0"], 2, "--validation 1.0: expected a share"),
        (["--validation", "nope"], 1, "no data set 'nope'"),
        (["--bs", "1000", "--drop-last"], 2, "--drop-last leaves no batch"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_for_this_server(
    capsys: pytest.CaptureFixture[str], running: ServerProcess, arguments: list[str], code: int, match: str
) -> None:
    try:
        found = command.main(["--server", running.url, *FAST, *arguments])
    except SystemExit as stop:
        found = int(str(stop.code))
    err = capsys.readouterr().err
    assert (found, err.count("\n")) == (code, 1), err
    assert match in err


@pytest.mark.parametrize(("arguments", "kept"), [([], True), (["--memory", "8GB"], False)])
def test_freed_memory_is_kept_unless_there_is_a_bound(
    arguments: list[str], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("hapi.cli.train.keep_freed_memory", lambda: asked.append(True))
    assert command.main(["--store", "ftp://nowhere", *FAST, *arguments]) == 2
    assert asked == [True] * kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("split: 12", "job.yaml:1:8: split 12: layer 12 comes after the freeze (11)"),
        ("split: layer9", "job.yaml:1:8: split: resnet18 has no layer 'layer9'; did you mean"),
        ("freeze: 14", "job.yaml:1:9: freeze 14: no layer after it has parameters"),
        ("validation: 1.0", "job.yaml:1:13: validation 1.0: expected a share"),
    ],
)
def test_what_a_file_has_wrong_for_this_server(
    capsys: pytest.CaptureFixture[str],
    running: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    match: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(text)
    code, line = refused(capsys, "job.yaml", "--server", running.url, *FAST)
    assert code == 2 and line.startswith(f"hapi-train: error: {match}")


@pytest.mark.slow
def test_another_kind_of_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = (
        "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); "
        "print(s.server_port, flush=True); s.serve_forever()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    ) as web:
        try:
            port = web.stdout.readline().strip()  # type: ignore[union-attr]
            code, line = refused(capsys, "--server", f"http://127.0.0.1:{port}")
        finally:
            web.kill()
    assert code == 1 and f"{port}/v1/datasets: answered 404" in line and "is this a hapi-server?" in line


# -- what it says ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_beyond_the_data_and_a_diverging_loss(
    capsys: pytest.CaptureFixture[str], running: ServerProcess, tmp_path: Path
) -> None:
    report = tmp_path / "deep" / "er" / "report.json"
    page = tmp_path / "report.html"
    arguments = ["--server", running.url, *FAST, "--bs", "1024", "--report", str(report)]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "note  --bs 1024 is more than the 200 samples: every epoch is one batch of 200" in out
    assert report_of(report)["epochs"][0]["samples"] == 200
    outputs = ["--report", str(report), "--html", str(page)]
    exploding = ["--lr", "1e6", "--weight-decay", "1e3", "--epochs", "9"]
    assert command.main(["--server", running.url, *FAST, *exploding, *outputs]) == 3
    assert "diverged after" in page.read_text(encoding="utf-8")
    error = capsys.readouterr().err
    assert error.startswith("hapi-train: error: training has diverged: ") and error.count("\n") == 1
    assert "learning rate 1e+06; lower --lr" in error
    document = json.loads(report.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document["ended"]["how"] == "diverged" and document["ended"]["detail"] in error


@pytest.mark.slow
def test_several_data_sets_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        assert (
            main(["pack", "sklearn:digits", f"{tmp_path}/{name}", "--image-size", "32", "--limit", "20"]) == 0
        )
    capsys.readouterr()
    monkeypatch.setenv("HAPI_STORE", str(tmp_path))
    code, line = refused(capsys, *FAST)
    assert code == 2 and "several data sets, choose one with --dataset: one, two" in line


@pytest.mark.slow
def test_the_issues_first_command(store: Path) -> None:
    """Nothing but a model and a batch size, where exactly one data set is in reach; in the poorest of locales."""
    done = run(
        [sys.executable, "-m", "hapi.cli.train", "--model", "resnet50", "--bs", "1024", "--epochs", "1"],
        0, 200, {"HAPI_STORE": str(store), "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert "(embedded)" in done.stdout and "resnet50, 22 layers" in done.stdout
    assert re.search(r"^epoch +0 +split +21 .* loss \d", done.stdout, re.MULTILINE)
    assert "note  --bs 1024" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [0, 80])
def test_live_progress_on_a_terminal(running: ServerProcess, columns: int) -> None:
    """Also on one that does not tell its width; samples/s, MB/s and stall fit 80 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command_line = [
        sys.executable, "-m", "hapi.cli.train", "--server", running.url, "--weights", "random", "--bs", "10",
        "--epochs", "1", "--threads", "1", "--split", "1",  # whose outputs are so large that no machine shows 0.0 MB/s
    ]  # fmt: skip
    with subprocess.Popen(command_line, stdout=slave, stderr=slave, env=environment(TERM="xterm")) as process:
        os.close(slave)
        text = _read_all(master)
        assert process.wait(60) == 0
    os.close(master)
    shown = re.findall(
        r"epoch 0:[^\r]* (\d+)/20, [\d:?]+ left, (\d+) samples/s, ([\d.]+) MB/s, stall (\d+)%", text
    )
    assert len(shown) > 3, text
    for _, samples, megabytes, stall in shown:
        assert 0 < int(samples) < 1e5 and 0 <= float(megabytes) < 1e3 and 0 <= int(stall) <= 100
    assert any(float(megabytes) > 0 for _, _, megabytes, _ in shown)
    assert max(len(line) for line in re.split(r"[\r\n]+", text) if line.startswith("epoch 0:")) <= 80
    assert re.search(r"\r +\repoch   0  split +[0-9/]+ ", text), "the bar is wiped before the epoch's line"


def _read_all(descriptor: int) -> str:
    received = b""
    with contextlib.suppress(OSError):  # a terminal's way to say that the other end is closed
        while part := os.read(descriptor, 65536):
            received += part
    return received.decode()


@pytest.mark.slow
def test_output_to_a_pipe_that_closes(running: ServerProcess, tmp_path: Path) -> None:
    checkpoint = tmp_path / "training.pt"
    script = (
        f"{sys.executable} -m hapi.cli.train --server {running.url} --weights random --bs 50 --threads 1 --epochs 3 "
        f"--checkpoint {checkpoint} | head -n 1; exit ${{PIPESTATUS[0]}}"
    )
    done = run(["bash", "-c", script], 0, 200, {})
    assert done.stderr == "hapi-train: stdout cannot be written (Broken pipe); the work goes on\n"
    assert done.stdout.count("\n") == 1
    assert torch.load(checkpoint, weights_only=True)["progress"]["epoch"] == 3


# -- Ctrl-C ------------------------------------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    return [int(c) for c in run(["pgrep", "-P", str(pid)], None, 10, {}).stdout.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.3, 1.2, 2.7, 5.7])
def test_ctrl_c_at_the_start(store: Path, delay: float) -> None:
    """During the imports, while the embedded server starts, while the model is built."""
    job = start_new_train(*FAST, "--model", "resnet50", "--store", str(store), "--epochs", "50")
    maps = Path(f"/proc/{job.pid}/maps")
    # Before our own imports Python itself starts, and nothing of ours can answer.
    wait_for(lambda: not maps.exists() or "numpy" in maps.read_text(), 60, "the first of the imports")
    time.sleep(delay)
    children = children_of(job.pid)
    job.send_signal(signal.SIGINT)
    output = job.communicate(timeout=90)[0]
    # Python 3.11 ends itself by the signal when it came in code made from a string (dataclasses, torch.fx), caught or
    # not. A shell shows 130 for both.
    assert job.returncode in (130, -signal.SIGINT), output
    assert "Traceback" not in output and output.endswith("hapi-train: interrupted\n")
    wait_for(lambda: not any(alive(c) for c in children), 15, "the end of the embedded server")


@pytest.mark.slow
@pytest.mark.parametrize(("where", "number"), [("epoch", signal.SIGINT), ("validation", signal.SIGTERM)])
def test_stopped_in_training(store: Path, tmp_path: Path, where: str, number: int) -> None:
    checkpoint, report = tmp_path / "training.pt", tmp_path / "report.json"
    page = tmp_path / "report.html"
    share = "0.05" if where == "epoch" else "0.95"
    arguments = (
        *FAST, "--store", str(store), "--bs", "10", "--validation", share, "--checkpoint", str(checkpoint),
        "--epochs", "200", "--request-size", "10", "--report", str(report), "--html", str(page),
    )  # fmt: skip
    job = start_train(*arguments)
    wait_for(checkpoint.exists, 90, "a checkpoint")
    assert not page.exists()
    children = children_of(job.pid)
    time.sleep(0.2)
    job.send_signal(number)
    output = job.communicate(timeout=90)[0]
    assert job.returncode == 130, output
    assert "Traceback" not in output
    assert f"go on with: --resume --checkpoint {checkpoint}" in output
    assert report_of(report)["epochs"]
    assert " of 200 epochs" in page.read_text(encoding="utf-8")
    wait_for(lambda: not any(alive(c) for c in children), 15, "the end of the embedded server")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "training.pt"]


@pytest.mark.slow
def test_ctrl_c_while_the_server_hangs(store: Path, tmp_path: Path) -> None:
    """A server that is stopped, not dead, answers nothing and closes nothing; that must not hold Ctrl-C up."""
    with server(store, log=tmp_path / "log") as hanging:
        job = start_train(*FAST, "--server", hanging.url, "--epochs", "500", "--request-size", "8")
        wait_for(lambda: (tmp_path / "log").read_text().count("/v1/extract") > 5, 90, "requests")
        hanging.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        started = time.monotonic()
        job.send_signal(signal.SIGINT)
        output = job.communicate(timeout=90)[0]
        assert time.monotonic() - started < 30
    assert job.returncode == 130 and "Traceback" not in output


@pytest.mark.slow
def test_two_jobs_on_one_checkpoint(
    capsys: pytest.CaptureFixture[str], running: ServerProcess, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "training.pt"
    arguments = (*FAST, "--server", running.url, "--checkpoint", str(checkpoint), "--resume")
    first = start_train(*arguments, "--epochs", "500")
    try:
        wait_for(checkpoint.exists, 90, "a checkpoint")
        code, line = refused(capsys, *arguments)
        assert code == 1 and "another hapi-train is writing it" in line
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    assert command.main(arguments) == 0  # a killed job's claim counts for nothing
    assert "nothing to do" in capsys.readouterr().out


# -- runs as documented ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_experiment_runs(running: ServerProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    train(
        str(ROOT / "configs" / "alexnet.yaml"), "--server", running.url, "--image-size", "64", "--epochs", "1",
        "--report", str(report),
    )  # fmt: skip
    document: dict[str, Any] = report_of(report)
    assert (document["model"], document["layers"], document["freeze"]) == ("alexnet", 22, 17)
    assert 0 <= document["split"] < 22  # the link and the machine decide


@pytest.mark.slow
def test_the_example_of_a_custom_loop(store: Path) -> None:
    done = run([sys.executable, str(ROOT / "examples" / "custom_loop.py"), str(store)], 0, 120, {})
    assert (
        len(re.findall(r"^epoch \d: loss \d\.\d+, held-out accuracy \d+\.\d%", done.stdout, re.MULTILINE))
        == 3
    )
    assert done.stderr == ""


@pytest.mark.slow
def test_a_pushed_model_of_ones_own_factory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hapi push` says it, in the folder of the factory; an installed command does not search that by itself."""
    pack_blobs(tmp_path / "store", side=8)
    (tmp_path / "hapi_test_mynet.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert main(["push", "hapi_test_mynet:make", "store/n", "--input-size", "8"]) == 0
    told = capsys.readouterr().out.strip().partition("train with: hapi-train ")[2].split()
    job = [*told, "--store", "store", *FAST, "--bs", "10", "--split", "1"]
    output = run(
        [sys.executable, "-m", "hapi.cli.train", *job],
        0,
        120,
        {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)},
    ).stdout
    assert "weights pushed:n" in output

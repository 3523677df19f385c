"""``hapi-train`` as a person meets it: wrong use in one line, Ctrl-C at any moment, pipes, terminals, the example."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.harness import (
    ROOT,
    ServerProcess,
)
from support.local_job import open_session, over_slow_store, pack_blobs, service_of
from support.train_cli import FAST, refused

from hapi.cli import train as command
from hapi.cli.shared.pushing import check_push
from hapi.cli.shared.training_notes import notes, room_notes
from hapi.config.settings import load
from hapi.errors import UsageError
from hapi.server.http.loopback import loopback_handler
from hapi.train.settings import TrainSettings


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--modle", "x"], "unknown argument --modle; did you mean --model?"),
        (["--save", "x"], "unknown argument --save; did you mean --save-profile?"),
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
        (["--split", ""], "--split: the text is empty; give a value, or leave the flag out"),
        (["--server", ","], "--server: there are only commas; give a value, or leave the flag out"),
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
        (["--store", "/nowhere"], "no dataset in the store '/nowhere'; make one with 'hapi pack"),
        (["--store", "memory://"], "lives in one process"),
        (["--store", __file__], "is a file; name the folder of a store"),
        ([], "no dataset in the store"),
        (["--resume"], "--resume needs the folder of the run"),
        (
            ["--mixup", "0.2"],
            "--mixup: images cannot be mixed, because the server runs the frozen layers on single",
        ),
        (["--metric", "f1"], "--metric f1: is measured on validation samples; give --validation"),
        (["--loss", "focal"], "--loss: expected one of auto, cross-entropy"),
        (["--class-weights", "/nowhere"], "--class-weights /nowhere: cannot be read: No such file"),
        (["--no-output", "--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint"),
        (["--no-output", "--keep", "3"], "--keep needs --checkpoint FILE"),
        (["--cache", "off", "--cache-size", "20GB"], "--cache-size: has no effect with --cache off"),
        (["--cache", "off", "--cache-codec", "zeros"], "--cache-codec: has no effect with --cache off"),
        (["--cache-codec", "int8"], "--cache-codec"),
        (["--profile-epoch", "3"], "--profile-epoch 3: expected 0 to 2, the last epoch; give more --epochs"),
        (["--profile-epoch", "0,9", "--epochs", "9"], "--profile-epoch 9: expected 0 to 8"),
        (["--report", "/tmp"], "--report /tmp: is not a plain file"),
        (["--checkpoint", "/dev/null"], "--checkpoint /dev/null: is not a plain file"),
        (["--offload-dir", "/proc/no"], "/proc/no: cannot be written there"),
        (
            ["--offload-dir", "/dev/null"],
            "/dev/null: cannot be written there: Not a directory; name another --offload",
        ),
        (["--offload-dir", "~no-such-user"], "--offload-dir ~no-such-user: there is no user of this name"),
        (
            ["--offload-dir", "x", "--offload-dir", "./x/"],
            "--offload-dir: each drive has one folder; name each once",
        ),
        (["--trace", "/proc/no/trace"], "--trace /proc/no/trace: cannot be written there"),
        (["--report", "r" * 300], "cannot be written there: File name too long"),
        (["--store", "~no-such-user/s"], "--store ~no-such-user/s: there is no user of this name"),
        (["--store", "s" * 300], "cannot be read: File name too long"),
        (
            ["--cache", "on", "--cache-dir", "~no-such-user"],
            "--cache-dir ~no-such-user: there is no user of this name",
        ),
        (["--store", "s", "--output", "s"], "--output s: lies among the files of the store s; name a place"),
        (
            ["--store", "s", "--output", "s/models/x"],
            "--output s/models/x: lies among the files of the",
        ),
        (["/nowhere.yaml"], "/nowhere.yaml: cannot read the settings file: No such file"),
        (["/tmp"], "/tmp: is a folder, no file of settings; to go on with the run in it, give --resume /tmp"),
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
        (["--checkpoint", "out", "--report", "out"], "--checkpoint out: it is the same file as --report"),
        (["--trace", "out", "--save-profile", "link"], "--save-profile link: it is the same file as --trace"),
        (
            ["job.yaml", "--report", "job.yaml"],
            "--report job.yaml: it is the same file as the experiment file",
        ),
        (
            ["--weights", "w.pth", "--checkpoint", "w.pth"],
            "--checkpoint w.pth: it is the same file as --weights",
        ),
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
        ("resume: yes\n", "job.yaml:1:9: resume needs the folder of the run"),
        ("cache: off\ncache_size: 1GB\n", "job.yaml:2:13: cache_size: has no effect with --cache off"),
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
            "cache_dir: ~no-such-user\ncache: on\n",
            "job.yaml:1:12: cache_dir ~no-such-user: there is no user of",
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
    assert time.monotonic() - started < 150


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
    settings = load(TrainSettings, path).value
    assert settings.model == path.stem


# -- wrong use with a server -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        (["--dataset", "digit"], 1, "no dataset 'digit'"),
        (["--model", "resnet1"], 2, "unknown architecture 'resnet1'; did you mean resnet18"),
        (["--model", "nothing:there"], 2, "'nothing:there' cannot be imported"),
        (["--model", "store:nope"], 1, "no model 'nope'"),
        (["--model", "../x"], 2, "'../x' is not an architecture's name"),
        (["--model", "store:a/b"], 2, "--model: 'a/b' is not a name"),
        (["--dataset", "a/b"], 2, "--dataset: 'a/b' is not a name"),
        (["--validation", "a/b"], 2, "--validation: 'a/b' is not a name"),
        (["--blocks", "layer9"], 2, "no layer can end at 'layer9'"),
        (["--weights", "V9"], 2, "has no such weights; it has DEFAULT"),
        (["--weights", "/nowhere.pth"], 2, "/nowhere.pth: there is no such file"),
        (["--split", "12"], 2, "--split 12: layer 12 comes after the freeze (11)"),
        (["--split", "99"], 2, "--split: layer 99 is out of range"),
        (["--split", "layer9"], 2, "--split: resnet18 has no layer 'layer9'; did you mean"),
        (["--freeze", "14"], 2, "--freeze 14: no layer after it has parameters"),
        (["--freeze", "layer4.7"], 2, "--freeze: resnet18 has no layer 'layer4.7'; did you mean 'layer4.1'"),
        (["--model", "alexnet", "--image-size", "16"], 2, "cannot run on samples of shape 3x16x16"),
        (["--validation", "1.0"], 2, "--validation 1.0: expected a share"),
        (["--validation", "nope"], 1, "no dataset 'nope'"),
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
def test_any_order_over_a_slow_store_says_what_it_costs(tmp_path: Path) -> None:
    """Each sample is a range in any order; by default they come in chunks."""
    pack_blobs(tmp_path / "store")
    loaded = load(TrainSettings, None, {})
    with service_of(tmp_path / "store") as service:
        slow = over_slow_store(loopback_handler(service))
        with open_session(slow, split=0, shuffle="full") as session:
            note, weights = sorted(notes(session, loaded))
        assert weights == (
            "--weights random: layers 1 to 12 are frozen and keep their random weights; give pre-trained weights, or "
            "--freeze 0 to train all layers"
        )
        assert note.startswith("--shuffle full reads 46 ranges of 12.0 KiB an epoch from the object store")
        assert "without it there would be 3 of 184.0 KiB" in note
        for handler, order in ((slow, "auto"), (slow, "chunks"), (loopback_handler(service), "full")):
            with open_session(handler, split=0, shuffle=order) as session:
                assert list(notes(session, loaded)) == [weights]


@pytest.mark.slow
def test_random_weights_that_nobody_asked_for(tmp_path: Path) -> None:
    pack_blobs(tmp_path / "store")
    loaded = load(TrainSettings, None, {})
    with service_of(tmp_path / "store") as service:
        for freeze, kept in ((0, ""), (12, " (layers 1 to 12 are frozen and keep their random weights)")):
            with open_session(service, model="resnet18", weights="auto", freeze=freeze, split=0) as session:
                found = list(notes(session, loaded))
            (line,) = found
            assert line == (
                f"--weights auto: no pre-trained weights of resnet18 are in reach, so random ones are used{kept}; "
                "--weights FILE brings your own"
            )
        with open_session(service, weights="random", freeze=0, split=0) as session:
            assert not list(notes(session, loaded))


def test_a_disk_without_room_for_the_model_is_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_blobs(tmp_path / "store")
    small = TrainSettings(output=str(tmp_path / "run"), optimizer="adamw", ema=0.9, keep=3, epochs=2)
    (tmp_path / "run").mkdir()
    with service_of(tmp_path / "store") as service, open_session(service, freeze=0, split=0) as session:
        network = sum(t.nbytes for t in session.job_context.model.module.state_dict().values())
        trained = sum(p.nbytes for p in session.trained.parameters())
        needed = 2 * network + 2 * 5 * trained  # two epochs: two checkpoints
        free = iter((needed, needed - 1, needed - 1, needed - 1, needed - 9, needed - 10))
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(free)))
        assert not list(room_notes(session, small))
        (line,) = room_notes(session, small)
        for enough in (replace(small, checkpoint="elsewhere.pt"), replace(small, epochs=1)):
            assert not list(room_notes(session, enough))
        assert not list(room_notes(session, replace(small, output=None)))
        (tmp_path / "run/best.safetensors").write_bytes(bytes(9))  # of a run to go on with
        assert [len(list(room_notes(session, small))) for _ in range(2)] == [0, 1]
    assert line.startswith(f"--output {tmp_path}/run: its disk has ") and line.endswith("no model is written")


def test_a_dataset_of_one_class_is_told(tmp_path: Path) -> None:
    """Somebody packed the folder that holds the folder of the classes."""
    pack_blobs(tmp_path / "store", classes=1)
    loaded = load(TrainSettings, None, {})
    with service_of(tmp_path / "store") as service, open_session(service, freeze=0, split=0) as session:
        (line,) = notes(session, loaded)
    assert line.startswith(
        "--dataset blobs: all its samples are of one class, 0, so there is nothing to learn"
    )


def test_a_push_into_a_folder_without_rights_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    check_push(f"{tmp_path}/store/flowers", has_folder=True)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("hapi.paths._try_writing", read_only)
    with pytest.raises(
        UsageError, match=r"store: cannot be written there: Read-only file system; name another"
    ):
        check_push(f"{tmp_path}/store/flowers", has_folder=True)

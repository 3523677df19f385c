"""Wrong names in commands: told in one line before torch is imported, so before any server is started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_job import pack_blobs

from hapi.cli.main import main
from hapi.client.session import Session
from hapi.client.settings import SessionSettings
from hapi.errors import HapiError, ModelError, UsageError

ROWS = (
    (
        "train --store one/flowers",
        "flowers is a data set of the store one; give --store one --dataset flowers",
    ),
    ("server --store one/flowers", "flowers is a data set of the store one; give --store one"),
    ("train --store one --model resnet81", "unknown architecture 'resnet81'; did you mean resnet18"),
    ("train --store one --model store:net", "there is no pushed model 'net'"),
    ("train --store one --model timm:no_such_model", "timm"),
    ("train --store one --dataset flower", "there is no dataset 'flower' in"),
    ("train --store one --dataset flower", "did you mean 'flowers'?"),
    ("train --store one --validation flour", "--validation: there is no dataset 'flour'"),
    ("train --store one --weights none.pth", "--weights none.pth: there is no such file"),
    ("train --store one --weights IMAGENET1K_V9", "it has DEFAULT, IMAGENET1K_V1"),
    ("train --store one --weights random:x", "random:0"),
    ("train --store one --optimizer adm", "expected one of sgd, adam, adamw"),
    ("train --store one --split frezee", "--split frezee; did you mean freeze?"),
    ("train --store one --split nonsense", "--split nonsense: neither a strategy (auto, "),
    ("train --store one --augment imagnet", "--augment: there is no 'imagnet'; did you mean 'imagenet'?"),
    ("train --store one --augment crop:pading=2", "--augment: crop has no option 'pading=2'"),
    ("train --store one --shuffle ful", "--shuffle: expected 'auto', 'full' or 'chunks[:GROUP[:WINDOW]]'"),
    ("train --store one --shuffle chunks:0", "--shuffle chunks:0: group and window are integers from 1"),
    ("train --store one --validation 1.5", "--validation 1.5: expected a share between 0 and 1"),
    ("train --store one --profile none.json", "--profile none.json: cannot be read: No such file"),
    ("train --store one --profile one", "--profile one: cannot be read: Is a directory"),
    ("train --store one --profile no_profile.json", "--profile no_profile.json: profile: "),
    ("train --store one --split freeze --profile none.json", "--profile needs a split that is chosen"),
    ("train --store one --trainer 3", "--trainer 3: trainers are numbered from 0"),
    (
        "train --store one --ca-file ca.pem",
        "--ca-file ca.pem: is for an https:// --server, and none is named",
    ),
    ("train --store one --sync-batchnorm", "--sync-batchnorm needs several ranks"),
    (
        "train --store one --model no_such:net",
        "'no_such:net' cannot be imported: there is no module 'no_such'",
    ),
    ("train --store one --model nets.py:small", "a module is named without .py; write nets:small"),
    ("push resnet81 one/net", "did you mean resnet18"),
    ("push resnet18 one/net --weights none.pth", "there is no such file"),
    ("layers resnet81", "did you mean resnet18"),
    ("plan resnet81", "did you mean resnet18"),
    ("plan --model resnet81", "did you mean resnet18"),
)
SCRIPT = """
import contextlib, io, json, sys
from hapi.cli.main import main
found = []
for row in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(row.split())
    found.append((code, said.getvalue(), "torch" in sys.modules))
print(json.dumps(found))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the store ``one``, which has the dataset ``flowers``."""
    pack_blobs(tmp_path / "one", "flowers")
    (tmp_path / "no_profile.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_told_without_torch(place: Path) -> None:
    rows = json.dumps([row for row, _ in ROWS])
    done = subprocess.run([sys.executable, "-c", SCRIPT, rows], capture_output=True, text=True, check=True)
    for (row, says), (code, said, torch) in zip(ROWS, json.loads(done.stdout), strict=True):
        assert code == 2 and says in said and said.count("\n") == 1 and not torch, (row, said)


def test_no_server_for_a_profile_that_there_will_not_be(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hapi.client.connect.EmbeddedServer", pytest.fail)
    assert main(["train", "--store", "one", "--split", "3", "--save-profile", "p.json"]) == 2
    assert "--save-profile needs a split that is chosen" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "resnet81"},
        {"dataset": "flower"},
        {"weights": "none.pth"},
        {"split": "frezee"},
        {"augment": ("imagnet",)},
        {"shuffle": "ful"},
        {"profile": "no_profile.json"},
        {"store": "one/flowers"},
    ],
)
def test_a_session_starts_no_server(
    place: Path, wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hapi.client.connect.EmbeddedServer", pytest.fail)
    with pytest.raises(HapiError):
        Session.open(SessionSettings(**{"store": "one", **wrong}))  # type: ignore[arg-type]


def awaited(*arguments: object, meanwhile: Callable[[], None], **options: object) -> None:
    """Take an embedded server's place until it would be awaited."""
    meanwhile()
    pytest.fail("the server was awaited")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"freeze": "layer9"}, "--freeze: resnet18 has no layer 'layer9'"),
        ({"freeze": 99}, "--freeze: layer 99 is out of range"),
        ({"freeze": 14}, "--freeze 14: no layer after it has parameters"),
        ({"split": 99}, "--split: layer 99 is out of range"),
        ({"split": "layer4.1"}, "--split layer4.1: layer 12 comes after the freeze"),
        ({"split": 5, "freeze": 3, "image_size": 64}, "--split 5: layer 5 comes after the freeze"),
    ],
)
def test_layers_are_told_while_a_server_starts(
    place: Path, wrong: dict[str, int | str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hapi.client.connect.EmbeddedServer", awaited)
    with pytest.raises(UsageError, match=re.escape(says)):
        Session.open(SessionSettings(store="one", model="resnet18", **wrong))  # type: ignore[arg-type]


NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, way, inputs=3 * 32 * 32):
        super().__init__()
        self.flat, self.first = nn.Flatten(), nn.Linear(inputs, 4)
        self.one, self.two, self.way = nn.Linear(4, num_classes), nn.Linear(4, num_classes), way

    def forward(self, x):
        x = self.first(self.flat(x))
        if self.way == "pair":
            return self.one(x), self.two(x)
        if self.way == "one":
            return self.one(x)
        if self.way == "joined":
            return torch.cat([self.one(x), self.two(x)], 1)
        if self.way == "values" and x.sum() > 0:
            return self.one(x)
        return self.one(x) + self.two(x)


def pair(num_classes): return Net(num_classes, "pair")
def joined(num_classes): return Net(num_classes, "joined")
def values(num_classes): return Net(num_classes, "values")
def added(num_classes): return Net(num_classes, "added")
def other_size(num_classes): return Net(num_classes, "added", 5)


def loaded(num_classes):
    made = Net(num_classes, "one")
    made.load_state_dict({name: torch.zeros(value.shape) for name, value in made.state_dict().items()})
    return made
"""


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("pair", "the model returns a tuple, not one tensor"),
        ("joined", "no Linear or Conv2d with 2000 outputs was found, so the head cannot be replaced"),
        ("values", "Net cannot be traced: "),
        ("added", "two was made for 4 classes, and now "),
        ("other_size", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_a_factory_makes_is_told_while_a_server_starts(
    place: Path, model: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "early_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr("hapi.client.connect.EmbeddedServer", awaited)
    with pytest.raises(ModelError, match=re.escape(says)) as raised:
        Session.open(SessionSettings(store="one", model=f"early_nets:{model}"))
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_factory_that_loads_its_weights_is_checked_without_a_word(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "loading_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr("hapi.client.connect.EmbeddedServer", awaited)
    with pytest.raises(pytest.fail.Exception, match="awaited"):
        Session.open(SessionSettings(store="one", model="loading_nets:loaded"))


def test_servers_elsewhere_know_their_names_themselves(place: Path) -> None:
    settings = SessionSettings(server=("http://127.0.0.1:9",), dataset="flower", store="nowhere", patience=0)
    with pytest.raises(HapiError, match=r"127\.0\.0\.1:9") as caught:
        Session.open(settings)
    assert not isinstance(caught.value, UsageError)

"""The settings of planning as people write them, in YAML and as flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hapi.client.early_checks import check_names
from hapi.client.settings import SessionSettings
from hapi.config.settings import load
from hapi.errors import ConfigError, UsageError
from hapi.profiler.reuse.facts import Prices
from hapi.train.settings import TrainSettings


def from_yaml(folder: Path, text: str) -> SessionSettings:
    path = folder / "experiment.yaml"
    path.write_text(text)
    return load(TrainSettings, path).value


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("replan: on", "replan", "on"),
        ("replan: off", "replan", "off"),
        ("replan: 'off'", "replan", "off"),
        ("split: none", "split", "none"),
        ("split: 5", "split", 5),
        ("split: auto", "split", "auto"),
        ("profile_epoch: 2", "profile_epoch", (2,)),
        ("profile_epoch: [0, 2]", "profile_epoch", (0, 2)),
        ("profile_epoch: []", "profile_epoch", ()),
        ("profile_batches: 3", "profile_batches", 3),
        ("memory: 2GiB", "memory", 2 << 30),
        ("profile: no", "profile", "no"),
        ("objective: money", "objective", "money"),
        ("egress: 0.09", "egress", 0.09),
        ("server_price: 1", "server_price", 1.0),
        ("trainer_price: 1e-3", "trainer_price", 0.001),
    ],
)
def test_yaml(tmp_path: Path, text: str, field: str, value: Any) -> None:
    """YAML 1.1 reads on, off and no as truth values; here they are the words that stand there."""
    assert getattr(from_yaml(tmp_path, text), field) == value


@pytest.mark.parametrize(
    "text",
    ["replan: true", "replan: yes", "replan: 1", "profile_epoch: -1", "profile_epoch: [0, x]", "profile_batches: 0",
     "memory: 1kB", "memory: -5GB", "profile_batches: 1e99", "objective: fame", "egress: -1", "server_price: nan",
     "trainer_price: 1e10"],
)  # fmt: skip
def test_yaml_that_is_wrong(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"experiment.yaml:1:\d+: {text.partition(':')[0]}") as caught:
        from_yaml(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_the_objective_and_its_prices() -> None:
    found = load(TrainSettings, None, {"objective": "money", "egress": "0.09", "server_price": "0.5"}).value
    assert found.prices == Prices(egress=0.09, server=0.5)
    check_names(found)
    with pytest.raises(UsageError, match="--objective money: give a price"):
        check_names(TrainSettings(objective="money"))


def test_flags() -> None:
    found = load(
        TrainSettings, None, {"profile_epoch": ["0", "3"], "replan": "off", "memory": "512MiB"}
    ).value
    assert (found.profile_epoch, found.replan, found.memory) == ((0, 3), "off", 512 << 20)
    for wrong in ({"profile_epoch": ["-1"]}, {"replan": "maybe"}, {"profile_batches": "none"}):
        with pytest.raises(UsageError, match=f"--{next(iter(wrong)).replace('_', '-')}"):
            load(TrainSettings, None, wrong)

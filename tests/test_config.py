"""Strict settings: what is read, and that everything else is refused with its place."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.config.fields import flat
from hapi.config.settings import Loaded, add_flags, checked, load, overrides_of, setting
from hapi.errors import ConfigError, UsageError


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    name: Literal["sgd", "adamw"] = setting("Which optimiser.", default="sgd")
    learning_rate: float = setting("Step size.", default=0.1, above=0)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    model: str = setting("Architecture.")
    bs: int = setting("Training batch, 100% of it.", default=32, low=1, high=10_000, flags=("--batch-size",))
    freeze: int | str | None = setting("Layer.", default=None, low=0)
    resume: bool = setting("Go on.", default=False)
    server: tuple[str, ...] = setting("URLs.", default=(), env="EXPERIMENT_SERVER")
    mean: tuple[float, float, float] = setting("Per channel.", default=(0.5, 0.5, 0.5))
    prefetch_bytes: int | None = setting("Window.", default=None, unit="bytes", low=1024)
    report: Path | None = setting("File.", default=None)
    optimiser: Optimiser = Optimiser()
    validation: Optimiser | None = None

    def __post_init__(self) -> None:
        if self.resume and self.report is None:
            raise UsageError("resume needs a report")


def read(tmp_path: Path, text: str | bytes, **overrides: Any) -> Loaded[Experiment]:
    path = tmp_path / "exp.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(Experiment, path, overrides)


def refused(tmp_path: Path, text: str | bytes, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **overrides)
    return str(caught.value).replace(str(tmp_path / "exp.yaml"), "exp.yaml")


def test_a_file_is_read_by_the_types_of_the_fields(tmp_path: Path) -> None:
    text = """\
model: no
bs: 1e3
freeze: layer1
server: [http://a:1, "http://b:2"]
mean: [0, 1e-1, .5]
prefetch_bytes: 64MiB
report: out/report.json
optimiser:
  learning_rate: 1e-3
validation:
  name: adamw
"""
    loaded = read(tmp_path, text)
    assert loaded.value == Experiment(
        model="no",
        bs=1000,
        freeze="layer1",
        server=("http://a:1", "http://b:2"),
        mean=(0.0, 0.1, 0.5),
        prefetch_bytes=64 * 2**20,
        report=Path("out/report.json"),
        optimiser=Optimiser(learning_rate=1e-3),
        validation=Optimiser(name="adamw"),
    )
    assert isinstance(loaded.value.bs, int)
    assert loaded.origins["optimiser.learning_rate"].endswith("exp.yaml:9:18")
    assert "resume" not in loaded.origins


@pytest.mark.slow_cases("text34-exp.yaml: nested too deeply")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\noptimiser:\n  lerning_rate: 1",
         "exp.yaml:3:3: unknown key 'optimiser.lerning_rate'; did you mean 'learning_rate'?"),
        ("model: a\nbatch-size: 1", "exp.yaml:2:1: unknown key 'batch-size'; did you mean 'batch_size'?"),
        ("model: a\nzzz: 1", "exp.yaml:2:1: unknown key 'zzz'; known are model, bs,"),
        ("model: a\nbs: 1\nbs: 2", "exp.yaml:3:1: key 'bs' appears twice (first on line 2)"),
        ("model: a\nbs: many", "exp.yaml:2:5: bs: expected an integer from 1 to 10000, got 'many'"),
        ("model: a\nbs: '5'", "exp.yaml:2:5: bs: expected an integer from 1 to 10000, got text '5'"),
        ("model: a\nbs: 010", "exp.yaml:2:5: bs: expected an integer"),
        ("model: a\nbs: 1__0", "exp.yaml:2:5: bs: expected an integer"),
        ("model: a\nbs: 10_", "exp.yaml:2:5: bs: expected an integer"),
        ("model: a\nbs: 1.5", "exp.yaml:2:5: bs: expected an integer"),
        ("model: a\nbs: true", "exp.yaml:2:5: bs: expected an integer"),
        ("model: a\nbs: 0", "exp.yaml:2:5: bs: expected a number from 1 to 10000, got '0'"),
        ("model: a\nbs:", "exp.yaml:2:4: bs: expected an integer from 1 to 10000, got nothing"),
        ("model: a\nbs: [1]", "exp.yaml:2:5: bs: expected an integer from 1 to 10000, got a list"),
        ("model: a\nfreeze: -1", "exp.yaml:2:9: freeze: expected a number from 0, got '-1'"),
        ("model: a\nresume: maybe", "exp.yaml:2:9: resume: expected true or false, got 'maybe'"),
        ("model: a\nmean: [1, 2]", "exp.yaml:2:7: mean: expected 3 values, got 2"),
        ("model: a\nmean: [1, 2, .inf]", "exp.yaml:2:14: mean: expected a number, got '.inf'"),
        ("model: a\nmean: [1, 2, 1e999]", "exp.yaml:2:14: mean: expected a number"),
        ("model: a\nprefetch_bytes: 64M", "exp.yaml:2:17: prefetch_bytes: '64M' is ambiguous; write MB"),
        ("model: a\nprefetch_bytes: 1B", "exp.yaml:2:17: prefetch_bytes: expected a number from 1024"),
        ("model: a\nprefetch_bytes: lots", "exp.yaml:2:17: prefetch_bytes: expected an integer from 1024"),
        ("model: a\noptimiser: sgd", "exp.yaml:2:12: optimiser: expected settings"),
        ("model: a\noptimiser: {name: sdg}",
         "exp.yaml:2:19: optimiser.name: expected one of sgd, adamw, got 'sdg'"),
        ("model: a\noptimiser: {learning_rate: 0}",
         "exp.yaml:2:28: optimiser.learning_rate: expected a number above 0"),
        ("model: a\n[1]: 2", "exp.yaml:2:1: expected a setting's name, got a list"),
        ("- model", "exp.yaml:1:1: expected settings"),
        ("model: [a", "exp.yaml:1:10: not YAML:"),
        ("model: a\n---\nmodel: b", "not YAML:"),
        ("model: a\n\tbs: 1", "exp.yaml:2:1: not YAML:"),
        (b"model: \xff\xfe", "exp.yaml: not YAML:"),
        ("model: !!python/object/apply:os.system [ls]", "exp.yaml:1:8: model: the tag"),
        ('model: "\\ud800"', "exp.yaml:1:8: model: '\\ud800' has what is no character"),
        ("model: *nothing", "exp.yaml:1:8: not YAML:"),
        ("[" * 2_000, "exp.yaml: nested too deeply"),
        ("model: " + "a" * 2_000_000, "exp.yaml: larger than"),
        ("model: a\nresume: yes", "exp.yaml: resume needs a report"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str | bytes, message: str) -> None:
    shown = refused(tmp_path, text)
    assert message in shown and "\n" not in shown and len(shown) < 400


@pytest.mark.slow
def test_a_bomb_of_aliases_is_bounded(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Nested:
        rows: tuple[tuple[str, ...], ...] = ()

    path = tmp_path / "bomb.yaml"
    path.write_text("rows:\n- &r [" + "a," * 1000 + "]\n" + "- *r\n" * 1000)
    with pytest.raises(ConfigError, match="values in one file"):
        load(Nested, path)


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        load(Experiment, tmp_path / name)


def test_what_is_required_is_named() -> None:
    with pytest.raises(UsageError, match=r"'model' is missing; set it in the file or with --model"):
        load(Experiment)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text("model: a\nserver: http://file:1\nbs: 4\n")
    environ = {"EXPERIMENT_SERVER": "http://env:1,http://env:2"}
    assert load(Experiment, path).value.server == ("http://file:1",)
    from_environ = load(Experiment, path, environ=environ)
    assert from_environ.value.server == ("http://env:1", "http://env:2")
    assert from_environ.origins["server"] == "EXPERIMENT_SERVER"
    overrides = {
        "server": ["http://flag:1"],
        "bs": None,
        "optimiser.learning_rate": "0.5",
        "validation.name": "adamw",
    }
    loaded = load(Experiment, path, overrides, environ)
    assert (loaded.value.server, loaded.value.bs) == (("http://flag:1",), 4)
    assert loaded.value.optimiser.learning_rate == 0.5
    assert loaded.value.validation == Optimiser(name="adamw")
    assert loaded.origins["optimiser.learning_rate"] == "--optimiser-learning-rate"


def test_errors_of_later_say_where_the_value_came_from(tmp_path: Path) -> None:
    exp = tmp_path / "exp.yaml"
    exp.write_text("model: a\nfreeze: 99\noptimiser:\n  learning_rate: 2")
    loaded = load(Experiment, exp, {"bs": "8"}, {"EXPERIMENT_SERVER": "x"})
    assert loaded.as_given("--freeze 99: there is none") == f"{exp}:2:9: freeze 99: there is none"
    assert loaded.as_given("--freeze: there is none") == f"{exp}:2:9: freeze: there is none"
    assert loaded.as_given("--freeze needs --report FILE") == f"{exp}:2:9: freeze needs --report FILE"
    assert loaded.as_given("--optimiser-learning-rate: x") == f"{exp}:4:18: optimiser.learning_rate: x"
    assert loaded.as_given("--server x: is no URL") == "EXPERIMENT_SERVER x: is no URL"
    for as_it_is in (
        "--bs 8: too large",
        "--resume needs it",
        "--freezer 9: x",
        "no layer; give --freeze",
        "",
    ):
        assert loaded.as_given(as_it_is) == as_it_is


def test_errors_about_what_a_checkpoint_kept_name_the_setting() -> None:
    """``checkpoint.pt random: ...`` would say nothing."""
    kept = Loaded(value=None, origins={"weights": "run/checkpoint.pt"})
    assert kept.as_given("--weights random: x") == "run/checkpoint.pt: weights random: x"


def parsed(*arguments: str) -> Experiment:
    parser = argparse.ArgumentParser()
    add_flags(parser, Experiment, "training")
    return load(Experiment, None, overrides_of(parser.parse_args(arguments), Experiment)).value


def test_every_field_has_a_flag() -> None:
    settings = parsed(
        "--model", "123", "--batch-size", "8", "--freeze", "3", "--resume", "--report", "r.json",
        "--server", "http://a:1", "--server", "http://b:1,http://c:1", "--mean", "0,0.5,1",
        "--prefetch-bytes", "2KiB", "--optimiser-name", "adamw",
    )  # fmt: skip
    assert settings == Experiment(
        model="123",
        bs=8,
        freeze=3,
        resume=True,
        report=Path("r.json"),
        server=("http://a:1", "http://b:1", "http://c:1"),
        mean=(0.0, 0.5, 1.0),
        prefetch_bytes=2048,
        optimiser=Optimiser(name="adamw"),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bs", "0"), "--bs: expected a number from 1 to 10000, got '0'"),
        (
            ("--optimiser-learning-rate", "fast"),
            "--optimiser-learning-rate: expected a number above 0, got 'fast'",
        ),
        (("--mean", "1,2"), "--mean: expected 3 values, got 2"),
        (("--prefetch-bytes", "-5MB"), "--prefetch-bytes: '-5MB' is negative"),
    ],
)
def test_flags_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    if arguments[1].startswith("-"):
        arguments = (f"{arguments[0]}={arguments[1]}",)
    with pytest.raises(UsageError) as caught:
        parsed("--model", "a", *arguments)
    assert str(caught.value) == message


def test_unknown_override_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="no setting 'modle'; did you mean 'model'"):
        load(Experiment, None, {"modle": "x"})


def test_help_names_defaults_and_variables() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Experiment)
    text = " ".join(parser.format_help().split())
    assert "100% of it. (default: 32)" in text
    assert "or EXPERIMENT_SERVER in the environment" in text
    assert "--no-resume" in text and "--optimiser-name sgd|adamw" in text


def test_settings_made_in_python_are_checked() -> None:
    good = Experiment(model="null", freeze="5", report=Path("a,b"), server=("http://a,b",))
    assert checked(good) == good
    with pytest.raises(ConfigError, match=r"Experiment: bs: expected a number from 1"):
        checked(Experiment(model="a", bs=0))
    with pytest.raises(ConfigError, match=r"Experiment: bs: expected an integer .* got text '5'"):
        checked(Experiment(model="a", bs="5"))  # type: ignore[arg-type]


_WORDS = [
    "model",
    "bs",
    "optimiser",
    "server",
    "'",
    '"',
    "&a",
    "*a",
    "1e3",
    "null",
    "!!int",
    "!x",
    "<<",
    "é",
    "\x00",
]
_MARKS = [":", " ", "\n", "  ", "- ", "[", "]", "{", "}", "|", ">", "#", "%", "\t", ",", "? ", "---\n"]


@given(st.lists(st.sampled_from(_WORDS + _MARKS) | st.text(max_size=5), max_size=30).map("".join))
def test_any_text_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(load(Experiment, path).value.model, str)
    except UsageError as error:
        assert "\n" not in str(error)


@dataclass(frozen=True, kw_only=True)
class Wire:
    timeout: float = setting("Silence.", default=60.0, above=0)
    optimiser: Optimiser = Optimiser()


@dataclass(frozen=True, kw_only=True)
class Network(Wire):
    server: str = setting("URL.", env="GROUPED_SERVER")


@dataclass(frozen=True, kw_only=True)
class Grouped(Network):
    bs: int = setting("Batch.", default=32, low=1)


def test_the_settings_of_a_group_stand_among_the_others(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text("bs: 8\ntimeout: 5\noptimiser: {name: adamw}\n")
    loaded = load(Grouped, path, {"bs": "9"}, {"GROUPED_SERVER": "http://a:1"})
    assert loaded.value == Grouped(server="http://a:1", timeout=5.0, optimiser=Optimiser(name="adamw"), bs=9)
    assert loaded.origins == {
        "bs": "--bs", "timeout": f"{path}:2:10", "server": "GROUPED_SERVER", "optimiser.name": f"{path}:3:19",
    }  # fmt: skip
    assert checked(loaded.value) == loaded.value
    assert flat(loaded.value) == {
        "server": "http://a:1", "timeout": 5.0, "bs": 9, "optimiser": {"name": "adamw", "learning_rate": 0.1},
    }  # fmt: skip
    parser = argparse.ArgumentParser()
    add_flags(parser, Grouped)
    given = overrides_of(parser.parse_args(["--timeout", "7", "--optimiser-name", "sgd"]), Grouped)
    assert given == {"timeout": "7", "optimiser.name": "sgd"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: a\ntimeout: 0", "exp.yaml:2:10: timeout: expected a number above 0, got '0'"),
        (
            "network: {server: a}",
            "exp.yaml:1:1: unknown key 'network'; known are timeout, optimiser, server, bs",
        ),
        ("bs: 1", "exp.yaml: 'server' is missing; set it in the file or with --server or GROUPED_SERVER"),
    ],
)
def test_a_groups_wrong_settings_have_their_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(Grouped, path)
    assert str(caught.value).replace(str(path), "exp.yaml") == message

"""Balancers that fail, answer by themselves or are reloaded, and servers that die behind them at any moment.

The job ends with the losses that it has without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.balancers import KINDS, balanced, installed
from support.harness import DIGITS_JOB, ServerProcess, losses, report_of, server, start_train, train, wait_for
from support.http_tools import make_store
from support.wicked_balancer import (
    Deed,
    Held,
    cut,
    deaf,
    early,
    hanging_up,
    page,
    shortened,
    swallowing,
    whole,
    wicked,
)

pytestmark = pytest.mark.slow
COUNT, EPOCHS, IN_FLIGHT = 40, 5, 4
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits", "--epochs",
    str(EPOCHS), "--timeout", "600", "--wire-codec", "none",
)  # fmt: skip
SERVER = ("--cos-batch", "5")
"""One frame a request, so that a request that is made again is computed as it was."""
BY_ITSELF = {
    "bad gateway": page("502 Bad Gateway"),
    "bad gateway, closed": page("502 Bad Gateway", "Connection: close", keep=False),
    "no server": page("503 Service Unavailable"),
    "no server for a second": page("503 Service Unavailable", "Retry-After: 1"),
    "gateway time-out": page("504 Gateway Time-out"),
    "request time-out": page("408 Request Time-out", "Connection: close", keep=False),
    "too many": page("429 Too Many Requests", "Retry-After: 1"),
    "failed": page("500 Internal Server Error"),
}
DAMAGED = {
    "cut in the head": cut(30),
    "cut in the body": cut(20_000),
    "cut by a reset": cut(20_000, reset=True),
    "shortened": shortened,
    "deaf": deaf,
}
HARMLESS = {"hangs up": hanging_up, "interim answer": early}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ServerProcess]:
    with server(folder, *SERVER) as process:
        yield process


@pytest.fixture(scope="module")
def undisturbed(running: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    path = tmp_path_factory.mktemp("undisturbed") / "report.json"
    train(*JOB, "--server", running.url, "--report", str(path))
    return losses(report_of(path))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return installed(str(request.param))


def spaced(deeds: Sequence[Deed]) -> list[Deed]:
    """Good answers between them: a balancer that does nothing else serves nobody."""
    return [deed for misdeed in deeds for deed in (misdeed, whole)]


def check(path: Path, undisturbed: list[float], most_retries: int | None) -> None:
    report = report_of(path)
    assert losses(report) == undisturbed
    assert [epoch["samples"] for epoch in report["epochs"]] == [COUNT] * EPOCHS
    assert most_retries is None or report["retries"] <= most_retries


def test_a_balancer_that_answers_by_itself_or_damages_answers(
    running: ServerProcess, undisturbed: list[float], tmp_path: Path
) -> None:
    deeds, path = [*BY_ITSELF.values(), *DAMAGED.values(), *HARMLESS.values()], tmp_path / "report.json"
    with wicked(running.port, *spaced(deeds)) as balancer:
        train(*JOB, "--server", balancer.url, "--report", str(path))
        assert balancer.left == 0
    check(path, undisturbed, len(BY_ITSELF) + len(DAMAGED))


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (
            page("413 Request Entity Too Large"),
            "answered 413 .*let requests of 1 MiB pass; or lower --request-size",
        ),
        (page("404 Not Found"), "answered 404 Not Found; is this a hapi-server"),
        (
            page("302 Found", "Location: https://elsewhere/"),
            "redirected to https://elsewhere/.*give the final server URL",
        ),
        (page("401 Unauthorized"), "answered 401 Unauthorized"),
    ],
)
def test_what_no_repetition_mends_ends_in_one_line(deed: Deed, said: str, running: ServerProcess) -> None:
    with wicked(running.port, *[deed] * 100) as balancer:
        process = start_train(*JOB, "--server", balancer.url)
        output, _ = process.communicate(240)
    lines = [line for line in output.splitlines() if line.startswith("hapi-train: error:")]
    assert process.wait() in (1, 2) and len(lines) == 1 and "Traceback" not in output, output
    assert re.search(said, lines[0]), lines[0]


def test_servers_die_behind_a_balancer(
    kind: str, running: ServerProcess, undisturbed: list[float], tmp_path: Path
) -> None:
    """Before the answer, in its head, in its body, and between two requests of a connection: the balancer tells."""
    deeds, path = spaced([*DAMAGED.values(), hanging_up]), tmp_path / "report.json"
    with ExitStack() as ends:
        dying = [ends.enter_context(wicked(running.port, *deeds)) for _ in range(2)]
        balancer = ends.enter_context(balanced(kind, tmp_path / kind, [one.port for one in dying]))
        train(*JOB, "--server", balancer.url, "--report", str(path))
        assert sum(one.left for one in dying) < len(deeds), "deeds were done at both"
    check(path, undisturbed, None)  # while nginx trusts neither, it answers 502 as often as it is asked


def test_a_machine_behind_a_balancer_is_gone(
    kind: str, running: ServerProcess, undisturbed: list[float], tmp_path: Path
) -> None:
    """Its packets are swallowed: a request that finds out goes to the other server, and no trainer hears of it."""
    path = tmp_path / "report.json"
    with (
        swallowing() as gone,
        balanced(kind, tmp_path / kind, [gone, running.port]) as balancer,
    ):
        train(*JOB, "--server", balancer.url, "--report", str(path))
    check(path, undisturbed, 0)


def test_a_server_is_killed_and_comes_back(
    kind: str, folder: Path, undisturbed: list[float], tmp_path: Path
) -> None:
    """SIGKILL while it holds a request; the other one answers meanwhile, and no request is made again unasked."""
    path, held = tmp_path / "report.json", Held()
    with ExitStack() as ends:
        stays = ends.enter_context(server(folder, *SERVER))
        dies = ServerProcess(folder, *SERVER)
        ends.callback(lambda: dies.process.poll() is not None or dies.kill())
        before = ends.enter_context(wicked(dies.port, whole, whole, held))
        balancer = ends.enter_context(balanced(kind, tmp_path / kind, [before.port, stays.port]))
        job = start_train(
            *JOB, "--in-flight", str(IN_FLIGHT), "--server", balancer.url, "--report", str(path)
        )
        ends.callback(job.kill)
        held.wait()
        dies.kill()
        held.go_on.set()
        dies = dies.restarted()
        output, _ = job.communicate(240)
        assert job.wait() == 0, output
        broken = before.broken
    check(path, undisturbed, broken)


def test_a_balancer_is_reloaded_under_a_request(
    kind: str, running: ServerProcess, undisturbed: list[float], tmp_path: Path
) -> None:
    """Its old process finishes what is under way, and closes connections that a trainer keeps: all it may have."""
    path, held = tmp_path / "report.json", [Held() for _ in range(2)]
    with ExitStack() as ends:
        deeds = [deed for one in held for deed in (whole, whole, whole, one)]
        between = ends.enter_context(wicked(running.port, *deeds))
        balancer = ends.enter_context(balanced(kind, tmp_path / kind, [between.port] * 2))
        job = start_train(
            *JOB, "--in-flight", str(IN_FLIGHT), "--server", balancer.url, "--report", str(path)
        )
        ends.callback(job.kill)
        for one in held:
            one.wait()
            balancer.reload()
            wait_for(balancer.answers, 60, "the reloaded balancer")
            one.go_on.set()
        output, _ = job.communicate(240)
        assert job.wait() == 0, output
    check(path, undisturbed, IN_FLIGHT * len(held))

"""What the server keeps for its operator: requests at work, errors, stages that are under way. Without sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.clocks import StageClock
from hapi.errors import (
    BusyError,
    DataError,
    DeadlineError,
    DrainingError,
    HapiError,
    NotFoundError,
    StoreError,
    UnauthorizedError,
)
from hapi.server.context import Progress, RequestClock, RequestContext
from hapi.server.scheduling.fair_queue import Tenant
from hapi.server.status import ERRORS_KEPT, MAX_LINE, Board, RunningRequest
from hapi.wire.messages import TensorsRequest
from hapi.wire.report import STAGES

ASKED = TensorsRequest(name="m", digest="0" * 64, names=("a", "b"))


def request(number: int = 0) -> RunningRequest:
    context = RequestContext(clock=RequestClock(StageClock(STAGES), None), tenant=Tenant(name="t"))
    return RunningRequest(request_id=f"id{number}", asked=ASKED, context=context, waited=0.5, began=10.0)


def failed(board: Board, error: HapiError, path: str = "/v1/extract", tenant: str = "t") -> None:
    board.failed(error, request_id="abc", tenant=tenant, path=path)


@given(st.lists(st.integers(0, 7)))
def test_the_board_has_whoever_is_at_work_in_the_order_of_their_coming(moves: list[int]) -> None:
    board = Board([Tenant(name="t")])
    at_work: dict[int, tuple[RunningRequest, Callable[[], None]]] = {}
    for number in moves:
        if number in at_work:
            at_work.pop(number)[1]()
        else:
            one, block = request(number), None
            block = board.running(one)
            block.__enter__()
            at_work[number] = (one, lambda block=block: block.__exit__(None, None, None))  # type: ignore[misc]
        assert board.requests() == [one for one, _ in at_work.values()]
    for _, end in at_work.values():
        end()
    assert board.requests() == []


def test_a_request_that_fails_is_at_work_no_more() -> None:
    board = Board([])
    with pytest.raises(ValueError, match="oh"), board.running(request()):
        raise ValueError("oh")
    assert board.requests() == []


def test_errors_are_few_short_and_the_newest_first() -> None:
    board = Board([])
    for number in range(3 * ERRORS_KEPT):
        failed(board, StoreError(f"{number} " + "x" * 10_000), path="/" + "y" * 10_000)
    errors = board.errors()
    assert [int(e.line.split()[0]) for e in errors] == list(
        range(3 * ERRORS_KEPT - 1, 2 * ERRORS_KEPT - 1, -1)
    )
    assert all(
        len(e.line) == MAX_LINE == len(e.path) and e.status == 502 and e.kind == "store" for e in errors
    )


def test_what_a_healthy_server_answers_does_not_push_out_errors() -> None:
    board = Board([])
    failed(board, DataError("damaged"))
    for error in (BusyError, DeadlineError, DrainingError, UnauthorizedError):
        for _ in range(2 * ERRORS_KEPT):
            failed(board, error("as usual"))
    assert [e.line for e in board.errors()] == ["damaged"]


def test_a_tenant_that_errs_all_the_time_hides_only_its_own_errors() -> None:
    board = Board([])
    for number in range(3):
        failed(board, DataError(f"damaged {number}"), tenant="quiet")
    for number in range(5 * ERRORS_KEPT):
        failed(board, NotFoundError(f"no dataset {number}"), tenant="noisy")
    lines = [e.line for e in board.errors()]
    assert lines[-3:] == ["damaged 2", "damaged 1", "damaged 0"] and len(lines) == ERRORS_KEPT
    assert lines[0] == f"no dataset {5 * ERRORS_KEPT - 1}"


def test_stages_under_way_are_those_of_all_threads() -> None:
    clock = RequestClock(StageClock(STAGES), None)
    progress = Progress(stages_now=clock.under_way)
    assert progress.stages() == ()
    inside, leave = threading.Event(), threading.Event()

    def decode() -> None:
        with clock.stage("decode"):
            inside.set()
            leave.wait(240)

    thread = threading.Thread(target=decode)
    thread.start()
    assert inside.wait(240)
    with clock.stage("send"), clock.stage("decode"):
        assert progress.stages() == ("decode", "send")
        progress.forward = lambda: "device_wait"
        assert progress.stages() == ("decode", "device_wait", "send")
        progress.forward = lambda: "forward"
        assert progress.stages() == ("decode", "forward", "send")
        progress.forward = str
    assert progress.stages() == ("decode",)
    leave.set()
    thread.join(240)
    assert progress.stages() == ()
    with pytest.raises(KeyError), clock.stage("forward"):
        raise KeyError
    assert progress.stages() == () and clock.seconds()["forward"] > 0
    assert set(progress.stages()) <= set(STAGES)


def test_a_request_as_json() -> None:
    one = request()
    one.context.progress.choose("cuda:0", 16)
    one.context.progress.done = 1
    document = one.to_json(now=12.5)
    assert json.loads(json.dumps(document)) == document
    expected = {"id": "id0", "tenant": "t", "kind": "tensors", "model": "m", "dataset": "", "split": 0,
                "split_name": "", "device": "cuda:0", "cos_batch": 16, "done": 1, "total": 2, "waited": 0.5,
                "seconds": 2.5, "stages": []}  # fmt: skip
    assert document == expected

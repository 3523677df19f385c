"""Admission: bounded, fair, and right when waiters leave, are sent away or have a deadline."""

from __future__ import annotations

import asyncio

import pytest

from hapi.errors import BusyError, DeadlineError, DrainingError, HapiError
from hapi.server.scheduling.admission import Admission, Slot
from hapi.server.scheduling.fair_queue import Tenant
from hapi.server.scheduling.service_rate import ENOUGH_COMPLETED

A, B = Tenant(name="a"), Tenant(name="b")


def test_runs_at_most_so_many_and_in_order() -> None:
    async def scenario() -> None:
        admission = Admission(slots=2, max_queued=10)
        order: list[int] = []
        most = 0

        async def request(number: int) -> None:
            nonlocal most
            async with admission.slot(A, 1.0, 10):
                order.append(number)
                most = max(most, admission.running)
                await asyncio.sleep(0.01)

        await asyncio.gather(*(request(n) for n in range(8)))
        assert order == list(range(8))
        assert most == 2
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


def test_refuses_beyond_the_queue_with_a_time_to_return() -> None:
    async def scenario() -> None:
        admission = Admission(slots=1, max_queued=1)
        release = asyncio.Event()

        async def hold() -> None:
            async with admission.slot(A, 1.0, 10):
                await release.wait()

        tasks = [asyncio.create_task(hold()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError) as caught:
            async with admission.slot(A, 1.0, 10):
                pass
        assert caught.value.retry_after is not None
        assert caught.value.retry_after >= 1
        release.set()
        await asyncio.gather(*tasks)
        assert admission.running == 0

    asyncio.run(scenario())


def test_all_that_wait_are_sent_away_and_what_runs_goes_on() -> None:
    async def scenario() -> None:
        admission = Admission(slots=1, max_queued=5)
        release, done = asyncio.Event(), list[str]()

        async def hold(tenant: Tenant) -> None:
            async with admission.slot(tenant, 1.0, 10):
                await release.wait()
            done.append(tenant.name)

        tasks = [asyncio.create_task(hold(tenant)) for tenant in (A, A, B)]
        await asyncio.sleep(0)
        admission.send_away(DrainingError("the end"))
        admission.send_away(DrainingError("the end"))
        assert (admission.running, admission.queued) == (1, 0)
        release.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [type(None), DrainingError, DrainingError] and done == ["a"]
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


def test_impatience_and_cancellation_leave_no_hole() -> None:
    async def scenario() -> None:
        admission = Admission(slots=1, max_queued=5)
        release = asyncio.Event()

        async def hold() -> None:
            async with admission.slot(A, 1.0, 10):
                await release.wait()

        holder = asyncio.create_task(hold())
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="no slot"):
            async with admission.slot(A, 1.0, 0.02):
                pass
        cancelled = asyncio.create_task(hold())
        after = asyncio.create_task(hold())
        await asyncio.sleep(0)
        cancelled.cancel()
        release.set()
        await asyncio.gather(holder, after)
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


def test_a_slot_handed_to_one_who_is_cancelled_in_that_moment_goes_on() -> None:
    async def scenario() -> None:
        admission = Admission(slots=1, max_queued=5)

        async def hold(seconds: float) -> None:
            async with admission.slot(A, 1.0, 10):
                await asyncio.sleep(seconds)

        first = asyncio.create_task(hold(0.01))
        await asyncio.sleep(0)
        second = asyncio.create_task(hold(0.01))
        third = asyncio.create_task(hold(0.01))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)  # the slot is handed to the second, whose task has not run yet
        second.cancel()
        await asyncio.wait_for(third, 240)
        await asyncio.gather(first, second, return_exceptions=True)
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


class Crowd:
    """Requests that hold their slots until they are told, and what became of them."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.running: list[str] = []
        self.failed: dict[str, HapiError] = {}
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, name: str, tenant: Tenant, cost: float = 1.0, deadline: float | None = None) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._request(name, tenant, cost, deadline))

    async def _request(self, name: str, tenant: Tenant, cost: float, deadline: float | None) -> None:
        try:
            async with self.admission.slot(tenant, cost, 10, deadline) as slot:
                self.running.append(name)
                await self.ends[name].wait()
                slot.cost = cost
        except HapiError as error:
            self.failed[name] = error

    async def end(self) -> None:
        for event in self.ends.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert (self.admission.running, self.admission.queued) == (0, 0)


async def soon() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_crowd_does_not_delay_one() -> None:
    async def scenario() -> None:
        crowd = Crowd(Admission(slots=1, max_queued=100))
        for n in range(20):
            crowd.ask(f"a{n}", A)
        await soon()
        crowd.ask("b0", B)
        await soon()
        crowd.ends["a0"].set()
        await soon()
        assert crowd.running == ["a0", "b0"]
        await crowd.end()

    asyncio.run(scenario())


def test_whoever_fills_the_queue_makes_room() -> None:
    async def scenario() -> None:
        told: list[tuple[str, str]] = []
        admission = Admission(1, 3, lambda tenant, reason: told.append((tenant.name, reason)))
        crowd = Crowd(admission)
        for n in range(4):
            crowd.ask(f"a{n}", A)
        await soon()
        crowd.ask("b0", B)
        await soon()
        assert list(crowd.failed) == ["a3"] and told == [("a", "full")]
        error = crowd.failed["a3"]
        assert isinstance(error, BusyError) and error.retry_after and error.expected_wait is not None
        assert (admission.of(A), admission.of(B)) == ((2, 1), (1, 0))
        await crowd.end()

    asyncio.run(scenario())


def test_who_has_no_place_is_told_before_it_is_read() -> None:
    async def scenario() -> None:
        told: list[tuple[str, str]] = []
        admission = Admission(1, 3, lambda tenant, reason: told.append((tenant.name, reason)))
        crowd = Crowd(admission)
        for n in range(4):
            admission.check_place(A)
            crowd.ask(f"a{n}", A)
            await soon()
        pauses = []
        for _ in range(2):
            with pytest.raises(BusyError) as refused:
                admission.check_place(A)
            pauses.append(refused.value.retry_after or 0)
        assert told == [("a", "full")] * 2 and pauses[1] > pauses[0] >= 1, "one after the other"
        admission.check_place(B)  # one of the others makes room
        await crowd.end()

    asyncio.run(scenario())


def test_a_deadline_in_the_queue() -> None:
    async def scenario() -> None:
        told: list[tuple[str, str]] = []
        crowd = Crowd(Admission(1, 5, lambda tenant, reason: told.append((tenant.name, reason))))
        crowd.ask("first", A)
        await soon()
        crowd.ask("late", B, deadline=0.03)
        crowd.ask("too late", B, deadline=0.0)
        await asyncio.wait([crowd.tasks["late"], crowd.tasks["too late"]], timeout=240)
        assert [type(e) for e in crowd.failed.values()] == [DeadlineError, DeadlineError]
        assert "deadline of 0.03 s" in str(crowd.failed["late"])
        assert told == [("b", "expired")] * 2
        assert crowd.admission.queued == 0
        await crowd.end()

    asyncio.run(scenario())


def test_who_would_wait_in_vain_is_told_at_once() -> None:
    async def scenario() -> None:
        told: list[tuple[str, str]] = []
        crowd = Crowd(Admission(1, 50, lambda tenant, reason: told.append((tenant.name, reason))))
        for n in range(ENOUGH_COMPLETED + 1):  # a second of estimated cost takes some hundredths in truth
            crowd.ask(f"a{n}", A)
        await soon()
        for n in range(ENOUGH_COMPLETED):
            await asyncio.sleep(0.02)
            crowd.ends[f"a{n}"].set()
            await soon()
        for n in range(20):
            crowd.ask(f"more{n}", A)
        await soon()
        crowd.ask("patient", A, deadline=9.0)
        crowd.ask("hurried", A, deadline=0.05)
        crowd.ask("other", B, deadline=0.5)
        await soon()
        assert list(crowd.failed) == ["hurried"] and told == [("a", "late")]
        error = crowd.failed["hurried"]
        assert isinstance(error, BusyError) and "another server" in str(error)
        assert error.expected_wait is not None and 0.05 < error.expected_wait < 10
        await crowd.end()

    asyncio.run(scenario())


def test_a_tenant_over_its_rate_goes_on_by_itself() -> None:
    async def scenario() -> None:
        slow = Tenant(name="slow", bytes_per_second=1000)
        admission = Admission(2, 10)
        loop = asyncio.get_running_loop()

        async def request() -> float:
            async with admission.slot(slow, 0.01, 10):
                admission.sent(slow, 1150)
                return loop.time()

        first = await request()
        second = await request()
        assert 0.1 < second - first < 5, "it waits until 150 bytes are paid off, and nobody else wakes it"
        assert admission.expected_wait(slow) > 0.5

    asyncio.run(scenario())


def test_a_slot_costs_what_it_is_said_to() -> None:
    async def scenario() -> None:
        admission = Admission(1, 10)

        async def use(tenant: Tenant, cost: float | None) -> Slot:
            async with admission.slot(tenant, 1.0, 10) as slot:
                slot.cost = cost
                await asyncio.sleep(0)
            return slot

        slots = await asyncio.gather(use(A, 5.0), use(A, 5.0), use(B, None), use(B, None), use(B, None))
        order = sorted(range(5), key=lambda n: slots[n].began)
        assert order == [0, 2, 3, 4, 1], "the first has cost five times what was expected"

    asyncio.run(scenario())

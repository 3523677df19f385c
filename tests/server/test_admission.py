"""Admission: bounded, fair, and right when waiters leave."""

from __future__ import annotations

import asyncio

import pytest

from hapi.errors import BusyError
from hapi.server.admission import Admission


def test_runs_at_most_so_many_and_in_order() -> None:
    async def scenario() -> None:
        admission = Admission(max_running=2, max_queued=10)
        order: list[int] = []
        most = 0

        async def request(number: int) -> None:
            nonlocal most
            async with admission.slot(10):
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
        admission = Admission(max_running=1, max_queued=1)
        release = asyncio.Event()

        async def hold() -> None:
            async with admission.slot(10):
                await release.wait()

        tasks = [asyncio.create_task(hold()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError) as caught:
            async with admission.slot(10):
                pass
        assert caught.value.retry_after is not None
        assert caught.value.retry_after >= 1
        release.set()
        await asyncio.gather(*tasks)
        assert admission.running == 0

    asyncio.run(scenario())


def test_impatience_and_cancellation_leave_no_hole() -> None:
    async def scenario() -> None:
        admission = Admission(max_running=1, max_queued=5)
        release = asyncio.Event()

        async def hold() -> None:
            async with admission.slot(10):
                await release.wait()

        holder = asyncio.create_task(hold())
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="no slot"):
            async with admission.slot(0.02):
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
        admission = Admission(max_running=1, max_queued=5)

        async def hold(seconds: float) -> None:
            async with admission.slot(10):
                await asyncio.sleep(seconds)

        first = asyncio.create_task(hold(0.01))
        await asyncio.sleep(0)
        second = asyncio.create_task(hold(0.01))
        third = asyncio.create_task(hold(0.01))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)  # the slot is handed to the second, whose task has not run yet
        second.cancel()
        await asyncio.wait_for(third, 1)
        await asyncio.gather(first, second, return_exceptions=True)
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())

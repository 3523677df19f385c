"""Leases under every order of steps: writers on machines with clocks of their own, pauses of any length between any two
requests, kills, renewals that fail, and clocks that jump. One writer runs at a time, and who is next is drawn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import Killed

from hapi.errors import ConflictError, DataError, StoreUnavailableError
from hapi.store.locking.lease import RENEWALS, HeldLease, Timing, held
from hapi.store.locking.locks import LeaseLostError, LockObjects, LockOwner, Seen, beat_key, is_lock_object

LOCK, LEASE, WRITERS = "d/pack.lock", 60.0, 3
MANIFEST = "d/manifest.json"


@dataclass
class World:
    """A store whose every request waits for its writer's turn, and the time that passes."""

    objects: dict[str, bytes] = field(default_factory=dict)
    now: float = 0.0
    killed: set[int] = field(default_factory=set)
    unlucky: set[int] = field(default_factory=set)
    """Renewals that fail, counted from 0."""
    renewals: int = 0
    changes: int = 0

    def __post_init__(self) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(WRITERS)]
        self._back = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self.done: dict[int, str] = {}
        self.jumps = [0.0] * WRITERS

    def step(self, writer: int) -> None:
        """Wait for the turn of ``writer``."""
        self._back.release()
        self._turns[writer].acquire()
        if writer in self.killed:
            raise Killed

    def start(self, program: Callable[[World, int], None]) -> None:
        def run(writer: int) -> None:
            outcome = "killed"
            try:
                self.step(writer)
                program(self, writer)
                outcome = "done"
            except LeaseLostError:
                outcome = "lost"
            except ConflictError:
                outcome = "conflict"
            except StoreUnavailableError:
                outcome = "store"
            except DataError:
                outcome = "data"
            except Killed:
                pass
            except BaseException:
                outcome = "wrong"
            finally:
                self.done[writer] = outcome
                self._back.release()

        for writer in range(WRITERS):
            thread = threading.Thread(target=run, args=(writer,), daemon=True)
            self._threads.append(thread)
            thread.start()
            self._back.acquire()

    def turn(self, writer: int) -> None:
        """Let ``writer`` make one request."""
        if writer not in self.done:
            self._turns[writer].release()
            self._back.acquire()

    def drain(self) -> None:
        """Everybody goes on in turn until all have ended."""
        for _ in range(5000):
            if len(self.done) == WRITERS:
                break
            self.now += 1.0
            for writer in range(WRITERS):
                self.turn(writer)
        stuck = WRITERS - len(self.done)
        self.killed |= set(range(WRITERS))
        while len(self.done) < WRITERS:
            for writer in range(WRITERS):
                self.turn(writer)
        for thread in self._threads:
            thread.join()
        assert not stuck, "somebody waits for ever"


class FakeObjects(LockObjects):
    """The lock's objects of one writer."""

    forces_the_living = True
    where = "fake://store/d"

    def __init__(self, world: World, writer: int, sees: bool) -> None:
        self.world, self.writer, self.sees = world, writer, sees

    def create(self, key: str, document: bytes) -> bool:
        self.world.step(self.writer)
        OWNERS[LockOwner.from_bytes(document).id] = self.writer
        return self.world.objects.setdefault(key, document) == document

    def read(self, key: str) -> Seen | None:
        self.world.step(self.writer)
        document = self.world.objects.get(key)
        if document is None:
            return None
        self.world.step(self.writer)
        return Seen(document, self.world.objects.get(beat_key(LOCK, LockOwner.from_bytes(document).id), b""))

    def renew(self, key: str, owner: str, beat: int) -> None:
        self.world.step(self.writer)
        self.world.renewals += 1
        if self.world.renewals - 1 in self.world.unlucky:
            raise StoreUnavailableError("the store is out of reach; wait for it")
        self.world.objects[beat_key(LOCK, owner)] = str(beat).encode()

    def lives(self, key: str, owner: LockOwner) -> bool | None:
        if not self.sees:
            return None
        return OWNERS.get(owner.id) not in self.world.killed

    def names(self) -> list[str]:
        self.world.step(self.writer)
        return [key for key in self.world.objects if is_lock_object(key, LOCK)]

    def remove(self, key: str) -> None:
        self.world.step(self.writer)
        self.world.objects.pop(key, None)


OWNERS: dict[str, int] = {}


def pack(world: World, writer: int, *, one_step: bool = True, sees: bool = False) -> None:
    """The steps of packing and pushing, as far as they concern others."""

    def clock() -> float:
        return world.now + world.jumps[writer] + 1000.0 * writer

    def pause(seconds: float) -> None:
        until = world.now + seconds
        while world.now < until:
            world.step(writer)

    timing = Timing(clock, pause, background=False)
    with held(FakeObjects(world, writer, sees), LOCK, timing=timing, lease=LEASE) as lease:
        world.step(writer)
        mark = world.objects.get(MANIFEST)
        for part in range(3):
            world.step(writer)
            lease.raise_if_lost()
            world.objects[f"d/{writer}/{part}"] = b"part"
            _renew(lease)
        lease.check()
        world.step(writer)
        if any(f"d/{writer}/{part}" not in world.objects for part in range(3)):
            raise DataError("a part is gone; run the same again")
        lease.check()
        world.step(writer)
        if one_step and world.objects.get(MANIFEST) != mark:
            raise ConflictError("written by another meanwhile")
        world.changes += 1
        world.objects[MANIFEST] = f"{writer} {world.changes}".encode()
        world.step(writer)
        there = list(world.objects)
        lease.check()
        for key in there:
            if key != MANIFEST and not is_lock_object(key, LOCK) and not key.startswith(f"d/{writer}/"):
                world.step(writer)
                world.objects.pop(key, None)


def _renew(lease: HeldLease) -> None:
    """What the background thread does."""
    try:
        lease.renew()
    except StoreUnavailableError:
        return


def is_whole(world: World) -> bool:
    """Whether what the manifest names is there."""
    writer = world.objects[MANIFEST].split()[0].decode()
    return all(f"d/{writer}/{part}" in world.objects for part in range(3))


STEPS = st.lists(
    st.tuples(st.integers(0, WRITERS - 1), st.sampled_from([0, 0, 0, 0, 1, 10, 61])), max_size=150
)
KILLS = st.dictionaries(st.integers(0, WRITERS - 2), st.integers(0, 150), max_size=2)
JUMPS = st.dictionaries(
    st.integers(0, 150), st.tuples(st.integers(0, WRITERS - 1), st.floats(-1e4, 1e4)), max_size=3
)


@given(
    steps=STEPS, kills=KILLS, jumps=JUMPS, unlucky=st.sets(st.integers(0, 20), max_size=4), sees=st.booleans()
)
def test_no_order_of_steps_loses_a_shard(
    steps: list[tuple[int, float]],
    kills: dict[int, int],
    jumps: dict[int, tuple[int, float]],
    unlucky: set[int],
    sees: bool,
) -> None:
    world = World(unlucky=unlucky)
    world.start(lambda world, writer: pack(world, writer, sees=sees))
    for number, (writer, seconds) in enumerate(steps):
        world.killed |= {victim for victim, at in kills.items() if at == number}
        if number in jumps:
            world.jumps[jumps[number][0]] += jumps[number][1]
        world.now += seconds
        world.turn(writer)
        if MANIFEST in world.objects:
            assert is_whole(world), "the dataset has lost a shard"
    world.drain()
    assert set(world.done.values()) <= {"done", "lost", "conflict", "store", "killed"}
    if MANIFEST in world.objects:
        assert is_whole(world), "the dataset has lost a shard"
    if not unlucky and not any(end == "lost" for end in world.done.values()) and WRITERS - 1 not in kills:
        ended = [end for end in world.done.values() if end != "killed"]
        assert "done" in ended, f"nobody had success: {world.done}"


class Inside(set[int]):
    """Writers that hold the lock, by their own belief, in a world where no lease ends."""

    def program(self, world: World, writer: int, times: int = 4) -> None:
        for _ in range(times):
            try:
                objects, timing = FakeObjects(world, writer, True), Timing(background=False)
                with held(objects, LOCK, timing=timing, lease=LEASE) as lease:
                    self.add(writer)
                    world.step(writer)
                    lease.check()
                    self.remove(writer)
            except LeaseLostError:
                raise AssertionError("the lock of a living writer was taken") from None
            except ConflictError:
                world.step(writer)

    def turn(self, world: World, writer: int) -> None:
        world.turn(writer)
        assert len(self - world.killed) <= 1


def world_with_a_dead_lock() -> World:
    world, dead = World(killed={99}), LockOwner.new(LEASE)
    OWNERS[dead.id] = 99
    world.objects[LOCK] = dead.to_bytes()
    return world


@given(steps=st.lists(st.integers(0, WRITERS - 1), max_size=300), kills=KILLS)
def test_one_holder_at_a_time(steps: list[int], kills: dict[int, int]) -> None:
    """While no lease ends, only a killed writer's lock is taken, and by one, whoever gives it back meanwhile."""
    world, inside = world_with_a_dead_lock(), Inside()
    world.start(inside.program)
    for number, writer in enumerate(steps):
        world.killed |= {victim for victim, at in kills.items() if at == number}
        inside.turn(world, writer)
    world.drain()
    assert "wrong" not in world.done.values(), world.done
    assert kills or world.objects == {}, "something was left behind"


@pytest.mark.slow_except("5", "6")
@pytest.mark.parametrize("late", range(2, 7))
def test_one_that_takes_over_late(late: int) -> None:
    """It is paused after ``late`` requests, while a second one takes the dead lock and gives it back, and a third
    comes; it goes on at each point of that."""
    has_ended = False
    for second in range(1, 40):
        if has_ended:  # with one turn less than now
            return
        for third in range(6):
            world, inside = world_with_a_dead_lock(), Inside()
            world.start(lambda world, writer, inside=inside: inside.program(world, writer, 1))
            for writer, turns in ((0, late), (1, second), (2, third), (0, 7), (1, 40), (0, 40), (2, 40)):
                for _ in range(turns):
                    inside.turn(world, writer)
                has_ended = 1 in world.done if writer == 1 and turns == second else has_ended
            world.drain()
            assert "wrong" not in world.done.values(), (late, second, third)
    raise AssertionError("the second never ends")


@pytest.mark.parametrize("sees", [False, True])
@given(at=st.integers(1, 40))
def test_a_killed_writers_lock_is_taken_over_in_bounded_time(sees: bool, at: int) -> None:
    world = World()
    world.start(lambda world, writer: pack(world, writer, sees=sees))
    for _ in range(at):
        world.turn(0)
    world.killed |= {0, 2}
    began, held_then = world.now, LOCK in world.objects
    for _ in range(2000):
        world.turn(1)
        world.now += 0.25
        if 1 in world.done:
            break
    took = world.now - began
    left = LOCK in world.objects
    world.drain()
    assert world.done[1] == "done" and not left
    assert took <= (0 if sees else LEASE) + 60 * 0.25 + 5
    assert took >= LEASE or sees or not held_then


@pytest.mark.parametrize("woken", ["while its successor is at work", "after that"])
def test_a_holder_that_was_paused_for_longer_than_its_lease_stops(woken: str) -> None:
    world = World()
    world.start(pack)
    while not any(key.startswith("d/0/") for key in world.objects):
        world.turn(0)
    while not any(key.startswith("d/1/") for key in world.objects):
        world.now += 1.0
        world.turn(1)
    if woken == "while its successor is at work":
        for _ in range(20):
            world.turn(0)
        assert world.done == {0: "lost"}
    while 1 not in world.done:
        world.turn(1)
    assert world.done[1] == "done" and world.objects[MANIFEST].startswith(b"1 ")
    before = dict(world.objects)
    while 0 not in world.done:
        world.turn(0)
    assert world.done[0] == "lost"
    assert {k: v for k, v in world.objects.items() if k in before} == before
    world.killed.add(2)
    world.drain()


def test_signs_of_life_keep_a_lock() -> None:
    """Of a writer that cannot be seen, for as long as it takes."""
    world = World()
    world.start(lambda world, writer: pack(world, writer) if writer else slow(world))

    def slow(world: World) -> None:
        with held(FakeObjects(world, 0, False), LOCK, timing=Timing(background=False), lease=LEASE) as lease:
            for _ in range(300):
                lease.check()

    while LOCK not in world.objects:
        world.turn(0)
    while 1 not in world.done:
        world.now += LEASE / RENEWALS / 4
        world.turn(0)
        world.turn(1)
    assert world.done[1] == "conflict" and world.now < LEASE + 20
    world.drain()
    assert world.done == {0: "done", 1: "conflict", 2: "conflict"} or world.done[2] == "done"


def test_failing_renewals_alone_lose_nothing() -> None:
    world = World(unlucky=set(range(3)))
    world.killed |= {1, 2}
    world.start(pack)
    world.drain()
    assert world.done[0] == "done"


def test_a_lock_without_an_end_is_an_error() -> None:
    class Endless(FakeObjects):
        def read(self, key: str) -> Seen | None:
            return Seen(LockOwner.new(LEASE).to_bytes(), b"")

    timing: Any = Timing(background=False)
    objects = Endless(World(), 0, False)
    with pytest.raises(Exception, match="has no end"), held(objects, LOCK, timing=timing, lease=LEASE):
        pass

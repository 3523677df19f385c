"""Choice of the activations that are swapped: LoHan's equations 1 to 8 and Algorithm 1. Pure.

A forward pass saves activations for the backward pass. Those of a layer are either swapped (moved out of the device's
memory and back) or computed a second time from the layer's input. The seconds of an iteration are convex in the
swapped bytes ``A_G2M``, so that the best amount is found by adding layers in the order of their offloading benefit.

Two things are more general than in the paper. First, the device has room of its own (``kept_bytes``): what stays in it
costs no transfer. On a CPU the device is the host's memory, and the only tier below it is the disk: the link is free
(``bw_g`` infinite) and there is no host tier. Second, the states may lie anywhere: :class:`StateTraffic`.
Both add terms of the form ``max(0, A - constant) / rate``, which are convex too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from hapi.offload.layer_memory import Action, Layer, LayerPlan, keep_whole
from hapi.offload.pass_memory import Event, HighestUse, highest_use


class Case(StrEnum):
    """Shape of the iteration time over the swapped bytes (the three cases of section IV-D), or none."""

    TRANSFERS = "1: transfers are the bottleneck"
    COMPUTATION = "2: computation is the bottleneck"
    BALANCED = "3: least time between both ends"
    FITS = "everything fits"
    FIXED = "nothing to choose"


@dataclass(frozen=True, kw_only=True)
class StateTraffic:
    """Bytes that parameters, gradients and optimiser states move in one iteration; all 0 when they stay in memory."""

    forward_link_in: float = 0
    forward_disk_read: float = 0
    backward_link_out: float = 0
    backward_link_in: float = 0
    backward_disk_read: float = 0
    backward_disk_write: float = 0


def paper_traffic(parameters: int) -> StateTraffic:
    """Compute traffic of the paper: 16-bit parameters and gradients, 32-bit masters and Adam's states on disk."""
    return StateTraffic(
        forward_link_in=2 * parameters,
        forward_disk_read=2 * parameters,
        backward_link_out=2 * parameters,
        backward_link_in=2 * parameters,
        backward_disk_read=14 * parameters,
        backward_disk_write=14 * parameters,
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates and room of the user's own machine, as measured."""

    thp_g: float
    """``THP_G``: operations a second."""
    bw_s2m: float
    """``BW_S2M``: bytes a second from disk; 0 without a disk."""
    bw_m2s: float
    """``BW_M2S``: bytes a second to disk; 0 without a disk."""
    bw_g: float = math.inf
    """``BW_G``: bytes a second between device and host, each way; infinite where they are one memory."""
    device_bytes: int
    """Memory for saved activations and this machinery's buffers on the device."""
    host_bytes: int = 0
    """``MEM_avail_M``: host memory for swapped activations; 0 where device and host are one memory."""
    buffer_bytes: int = 0
    """Most bytes under way to or from the tiers below, beyond what is kept."""
    in_use_bytes: int = 0
    """Bytes that an operator may still use of what has left."""
    drives: int = 1
    backward_factor: float = 2.0
    """Operations of a backward pass over those of the forward pass; 2 in the paper."""

    @property
    def has_tier_below(self) -> bool:
        """Whether bytes can leave the device at all."""
        return self.bw_m2s > 0 or self.host_bytes > 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Layers in the order of the forward pass, traffic of the states and the machine; sums over them are kept."""

    layers: Sequence[Layer]
    machine: Machine
    traffic: StateTraffic = StateTraffic()
    events: Sequence[Event] = ()
    """Events of a measured iteration; without any, those that the layers' numbers stand for."""

    @cached_property
    def other_bytes(self) -> int:
        """Most bytes that a pass takes beside what layers save."""
        each = (layer.working for layer in self.layers)
        moments = (
            max(w.forward + w.output + max(w.ahead, w.waiting), w.after + w.ahead, w.backward + w.waiting)
            for w in each
        )
        return max(moments, default=0)

    @cached_property
    def fits(self) -> bool:
        """Say whether the device has room for everything that the layers save."""
        kept = [keep_whole(layer) for layer in self.layers]
        found = highest_use(self.layers, kept, 0, self.events, has_tier_below=False)
        return found.peak <= self.machine.device_bytes

    def use(self, plans: Sequence[LayerPlan]) -> HighestUse:
        """Compute the most bytes on the device when the layers are treated so."""
        machine = self.machine
        return highest_use(
            self.layers,
            plans,
            machine.buffer_bytes,
            self.events,
            has_tier_below=machine.has_tier_below,
            leaves_in_order=machine.drives == 1,
        )

    @cached_property
    def flop_f(self) -> float:
        """``FLOP_f``: operations of a forward pass."""
        return sum(layer.flops for layer in self.layers)

    @cached_property
    def all_bytes(self) -> int:
        """``A_all``: bytes saved when nothing is computed a second time."""
        return sum(layer.all_bytes for layer in self.layers)

    @cached_property
    def _room(self) -> int:
        """Bytes on the device beside buffers and what passes take."""
        machine = self.machine
        return machine.device_bytes - machine.buffer_bytes - machine.in_use_bytes - self.other_bytes

    def forced(self, index: int) -> bool:
        """Say whether a layer is always saved: it cannot be recomputed, has no room to be, or saves nothing.

        Without a tier below all that can be is recomputed in however little room: keeping it would take more.
        """
        layer = self.layers[index]
        if not layer.recomputable or layer.saved_bytes <= 0:
            return True
        return self.machine.has_tier_below and layer.saved_bytes > self._room

    @cached_property
    def safe_bytes(self) -> int:
        """Least ``A_G2M`` that avoids running out of memory: ``A_interBlock`` and the layers that have to be saved."""
        inputs = sum(layer.input_bytes for layer in self.layers)
        return inputs + sum(x.saved_bytes for i, x in enumerate(self.layers) if self.forced(i))

    @cached_property
    def largest_recomputed(self) -> int:
        """Bytes of the largest layer that may be recomputed: it has all of them at once when it is."""
        return max((x.saved_bytes for i, x in enumerate(self.layers) if not self.forced(i)), default=0)

    @cached_property
    def kept_bytes(self) -> int:
        """Room on the device for activations that stay: without buffers and the largest recomputed layer.

        The equations count with this one room, so that the time stays convex. A plan that recomputes smaller layers,
        or none, keeps more.
        """
        return max(0, self._room - self.largest_recomputed)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Treatment of every layer and its predicted cost."""

    layers: tuple[LayerPlan, ...]
    saved_bytes: int
    """``A_G2M``: bytes saved in any tier; the others are computed a second time."""
    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    """Most bytes on the device: of saved activations, buffers, waiting gradients, and all else that a pass takes."""
    most_bytes: int
    """Bytes of saved activations on the device that are never exceeded, those on their way included."""
    case: Case

    @property
    def seconds(self) -> float:
        """``T_iter`` (equation 1)."""
        return self.forward_seconds + self.backward_seconds

    @property
    def kept_bytes(self) -> int:
        """Bytes of saved activations that stay on the device."""
        return sum(layer.kept_bytes for layer in self.layers)

    @property
    def swapped_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(layer.host_bytes + layer.disk_bytes for layer in self.layers)

    @property
    def disk_bytes(self) -> int:
        """``alpha * A_G2M`` (equation 3): bytes that go to disk."""
        return sum(layer.disk_bytes for layer in self.layers)


def transfer_seconds(nbytes: float, rate: float) -> float:
    """Compute seconds of a transfer: none for no bytes, endless without a rate."""
    if nbytes <= 0:
        return 0.0
    return nbytes / rate if rate > 0 else math.inf


def forward_seconds(problem: Problem, saved_bytes: float) -> float:
    """``T_f`` (equations 2 and 4) in seconds when ``saved_bytes`` are saved in any tier."""
    machine, traffic = problem.machine, problem.traffic
    out, disk = _moved(problem, saved_bytes)
    return max(
        transfer_seconds(problem.flop_f, machine.thp_g),
        transfer_seconds(out, machine.bw_g),
        transfer_seconds(traffic.forward_link_in, machine.bw_g),
        transfer_seconds(traffic.forward_disk_read, machine.bw_s2m) + transfer_seconds(disk, machine.bw_m2s),
    )


def backward_seconds(problem: Problem, saved_bytes: float, flop_r: float) -> float:
    """``T_b`` (equation 5) in seconds when ``flop_r`` operations are done a second time."""
    machine, traffic = problem.machine, problem.traffic
    out, disk = _moved(problem, saved_bytes)
    return max(
        transfer_seconds(machine.backward_factor * problem.flop_f + flop_r, machine.thp_g),
        transfer_seconds(traffic.backward_link_out, machine.bw_g),
        transfer_seconds(traffic.backward_link_in + out, machine.bw_g),
        transfer_seconds(traffic.backward_disk_read + disk, machine.bw_s2m)
        + transfer_seconds(traffic.backward_disk_write, machine.bw_m2s),
    )


def _moved(problem: Problem, saved_bytes: float) -> tuple[float, float]:
    """Bytes that leave the device, and those of them that go on to disk (equation 3)."""
    out = max(0.0, saved_bytes - problem.kept_bytes)
    return out, max(0.0, out - problem.machine.host_bytes)


def by_benefit(problem: Problem) -> list[int]:
    """Order the layers that may be recomputed by offloading benefit, largest first (line 6 of Algorithm 1)."""
    free = [i for i in range(len(problem.layers)) if not problem.forced(i)]
    return sorted(free, key=lambda i: (-problem.layers[i].benefit, i))


def recomputed_flops(problem: Problem, saved_bytes: float) -> float:
    """``FLOP_r`` (equation 7), where a layer may be saved in part: piecewise linear and convex.

    Args:
        problem: layers and machine.
        saved_bytes: ``A_G2M``, from the safe amount on.

    Returns:
        Operations that are done a second time. Their derivative is the negative benefit of the layer that is saved in
        part (equation 8).
    """
    room = saved_bytes - problem.safe_bytes
    flops = 0.0
    for index in by_benefit(problem):
        layer = problem.layers[index]
        share = min(1.0, max(0.0, room / layer.saved_bytes)) if layer.saved_bytes else 1.0
        flops += layer.flops * (1 - share)
        room -= layer.saved_bytes
    return flops


def iteration_seconds(problem: Problem, saved_bytes: float) -> float:
    """``T_iter`` (equation 1) as a function of the saved bytes, layers in part included."""
    flop_r = recomputed_flops(problem, saved_bytes)
    return forward_seconds(problem, saved_bytes) + backward_seconds(problem, saved_bytes, flop_r)


def evaluate(problem: Problem, saved: Collection[int], case: Case = Case.FIXED) -> Plan:
    """Price one choice of layers.

    Args:
        problem: layers and machine.
        saved: indices of the layers whose activations are saved; those that have to be are added.
        case: name of the case that led to the choice.

    Returns:
        The plan. Its seconds are infinite when saved bytes find no tier.
    """
    layers = problem.layers
    chosen = {i for i in range(len(layers)) if i in saved or problem.forced(i)}
    amounts = [x.all_bytes if i in chosen else x.input_bytes for i, x in enumerate(layers)]
    total = sum(amounts)
    flop_r = sum(x.flops for i, x in enumerate(layers) if i not in chosen)
    fits = len(chosen) == len(layers) and problem.fits
    recomputed = max((x.saved_bytes for i, x in enumerate(layers) if i not in chosen), default=0)
    room = total if fits else problem.kept_bytes + problem.largest_recomputed - recomputed
    plans = _tiers(problem, amounts, chosen, room)
    moved = 0 if fits else total
    use = problem.use(plans)
    return Plan(
        layers=plans,
        saved_bytes=total,
        forward_seconds=forward_seconds(problem, moved),
        backward_seconds=backward_seconds(problem, moved, flop_r),
        peak_bytes=use.peak,
        most_bytes=use.saved,
        case=case,
    )


def _tiers(problem: Problem, amounts: list[int], chosen: set[int], room: int) -> tuple[LayerPlan, ...]:
    """Fill the device from the last layer on, then the host, then the disk.

    What the last layers save is needed first: it would come back before it has gone. The first layers' time away is
    the longest. A tensor is kept whole or not at all.
    Without a tier below all stays, whether it fits or not.
    """
    host_room = problem.machine.host_bytes
    plans = []
    for index in reversed(range(len(amounts))):
        kept = amounts[index]
        if problem.machine.has_tier_below and kept > room:
            layer = problem.layers[index]
            kept = layer.kept_of(room) if index in chosen or not layer.tensors else 0
        host = min(amounts[index] - kept, host_room)
        disk = amounts[index] - kept - host
        room, host_room = max(0, room - kept), host_room - host
        action = Action.DISK if disk else Action.HOST if host else Action.KEEP
        if index not in chosen:
            action = Action.RECOMPUTE
        plans.append(
            LayerPlan(
                name=problem.layers[index].name,
                action=action,
                kept_bytes=kept,
                host_bytes=host,
                disk_bytes=disk,
            )
        )
    return tuple(reversed(plans))


def sweep(problem: Problem) -> list[Plan]:
    """Price every amount of Algorithm 1's order, from the safe amount to all: the exhaustive search over ``A_G2M``."""
    order = by_benefit(problem)
    return [evaluate(problem, order[:count]) for count in range(len(order) + 1)]


def plan_activations(problem: Problem) -> Plan:
    """Choose what to swap: Algorithm 1, where the safe amount alone is a choice too.

    Of amounts that take equally long it is the largest one that moves nothing: what is not computed again leaves a CPU
    to the updates.

    Args:
        problem: layers in the order of the forward pass, traffic of the states and the machine.

    Returns:
        The plan with the fewest seconds of an iteration. It keeps all when all fits.
    """
    everything = range(len(problem.layers))
    if problem.fits:
        return evaluate(problem, everything, Case.FITS)
    order = by_benefit(problem)
    if not order:
        return evaluate(problem, everything, Case.FIXED)
    flop_r = sum(problem.layers[i].flops for i in order)
    amount = problem.safe_bytes
    shortest = forward_seconds(problem, amount) + backward_seconds(problem, amount, flop_r)
    count, safe_seconds = 0, shortest
    for index in order:
        amount += problem.layers[index].saved_bytes
        flop_r = max(0.0, flop_r - problem.layers[index].flops)
        seconds = forward_seconds(problem, amount) + backward_seconds(problem, amount, flop_r)
        if seconds > shortest or (seconds == shortest and amount > problem.kept_bytes):
            break
        shortest = seconds
        count += 1
    case = Case.COMPUTATION if count == len(order) else Case.BALANCED
    if shortest == safe_seconds:
        case = Case.TRANSFERS
    return evaluate(problem, order[:count], case)

"""Costs of a trained part with its optimiser's states in memory, and elsewhere (LoHan, section IV-C). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hapi.profiler.cost import Estimate, estimate, memory
from hapi.profiler.offload.faster_split import FasterSplit
from hapi.profiler.offload.freezes import LaterFreeze, earliest_hidden, later_freezes
from hapi.profiler.profile import Job, Profile
from hapi.units import format_bytes, format_duration

OffloadName = Literal["auto", "off", "host", "disk"]
"""Places of the states that a user may ask for."""
StatesPlace = Literal["off", "host", "disk"]

STATES = {"sgd": 0, "sgd with momentum": 1, "adam": 2, "adamw": 2}
"""Tensors that an optimiser keeps for each parameter, in fp32."""
SMALL_SHARE = 0.1
"""Share of the memory below which it is not the trained part that does not fit."""
PIECE_ELEMENTS = 1 << 20
"""Most elements of a piece, which is read, computed and written at once: with AdamW in fp32 its record has 12 MiB."""
BUFFERS = 6
"""Records of a drive in memory: those of a layer wait for its gradients while those of the layer before are written."""
MOST_BUFFERS = 24
"""Records of a drive in memory where steps wait for it and there is room: it goes on during the forward pass, writes
what backward left and reads ahead."""
PENDING_BYTES = 64 << 20
"""Backward waits while gradients that wait for their update have more bytes than this."""
GRADIENT_SHARE = 0.75
"""Share of the memory that parameters and gradients may take together; above it, kept gradients go to the disk."""
WORTHWHILE = 0.95
"""Share of an epoch's seconds below which states that would fit the memory go to a disk: prices are estimates."""
_FP32 = 4


def keeps_gradients(gradient_bytes: int, room: int) -> bool:
    """Return whether gradients stay in ``room`` bytes of memory until the step, although states are on a disk."""
    return 2 * gradient_bytes <= GRADIENT_SHARE * room


@dataclass(frozen=True, kw_only=True)
class OffloadedMemory:
    """Bytes in memory of a training whose states are elsewhere, beside its activations: priced and trained by it."""

    values: int
    """Bytes of the trained parameters; their gradients take as many."""
    largest: int
    """Bytes of the largest parameter."""
    record: int
    """Bytes of the largest piece's states and master weights; 0 where updates are computed beside a device."""
    drives: int
    keeps_gradients: bool
    """Whether all gradients stay until the step."""

    @property
    def constant(self) -> int:
        """Bytes that are there all the time: parameters, gradients that stay, buffers, and an update's own."""
        gradients = self.values if self.keeps_gradients else 0
        return self.values + gradients + (BUFFERS * self.drives + 1) * self.record

    @property
    def waiting(self) -> int:
        """Most bytes of gradients that wait for their update while backward makes another one."""
        return 0 if self.keeps_gradients else min(self.values, PENDING_BYTES)

    @property
    def total(self) -> int:
        """Most bytes of all, the gradient that backward makes included."""
        return self.constant + (0 if self.keeps_gradients else min(self.values, self.waiting + self.largest))


@dataclass(frozen=True, kw_only=True)
class OffloadCosts:
    """Bytes of one trained part and its optimiser."""

    parameters: int
    """Number of trained parameters."""
    states: int
    """Tensors that the optimiser keeps for each of them: see :data:`STATES`."""
    half: bool = False
    """Whether parameters and gradients are bf16 or fp16, with fp32 master weights beside them."""
    drives: int = 1
    """Drives between which the states are striped."""
    largest: int = 0
    """Number of parameters in the largest tensor."""
    keeps_gradients: bool = False
    """Whether all gradients stay in memory until the step."""
    is_on_cpu: bool = True
    """Whether updates are computed in the memory that is trained in, and not beside a device."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that layers compute with; their gradients take as many."""
        return self.parameters * (2 if self.half else _FP32)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimiser's states, and of master weights where parameters are in half precision."""
        return _FP32 * self.parameters * (self.states + self.half)

    @property
    def memory_without(self) -> int:
        """Bytes in memory without offloading: parameters, gradients, states."""
        return 2 * self.parameter_bytes + self.state_bytes

    @property
    def memory_with(self) -> int:
        """Bytes in memory with offloading: parameters, gradients on their way or all of them, buffers."""
        record = _FP32 * min(self.parameters, PIECE_ELEMENTS) * (self.states + 1)
        return OffloadedMemory(
            values=self.parameter_bytes,
            largest=self.largest * (2 if self.half else _FP32),
            record=record if self.is_on_cpu else 0,
            drives=self.drives,
            keeps_gradients=self.keeps_gradients,
        ).total

    @property
    def saved(self) -> int:
        """Bytes of memory that offloading frees; none of a small part, whose buffers take more."""
        return max(0, self.memory_without - self.memory_with)

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disks: two slots of master weights and states, of which one is committed."""
        return 2 * self.written

    @property
    def read(self) -> int:
        """Bytes read each step; parameters in fp32 are their own master weights in memory."""
        return self.state_bytes

    @property
    def written(self) -> int:
        """Bytes written each step: master weights and states."""
        return _FP32 * self.parameters * (self.states + 1)


@dataclass(frozen=True, kw_only=True)
class OffloadTerms:
    """A user's choice of the place, and the optimiser's states."""

    wanted: OffloadName
    states: int
    """See :class:`OffloadCosts`."""
    drives: int = 1
    rates: Callable[[], tuple[float, float]] | None = None
    """Measures the bytes a second that all drives read and write; None where nobody asks for a price."""


@dataclass(frozen=True, kw_only=True)
class OffloadChoice:
    """Place of the states of a training, and its reason."""

    where: StatesPlace
    is_needed: bool
    """Whether no split fits the memory with the states in it."""
    freed: int
    """Bytes of memory that this frees."""
    costs: OffloadCosts
    fitting_freeze: int | None
    """Earliest freeze that fits with the states in memory, where the present one does not."""
    faster: FasterSplit | None = None
    """Reason to offload what need not be."""
    added_seconds: float = 0.0
    """Seconds that a step takes more, as far as it was priced."""
    freezes: tuple[LaterFreeze, ...] = ()
    """Those that could be taken instead, the earliest first."""

    @property
    def is_short(self) -> bool:
        """Whether memory is what the states leave it for."""
        return self.is_needed or self.faster is not None


@dataclass(frozen=True, kw_only=True)
class PricedOffload:
    """The place of the states by its price, with the profiles before and after."""

    choice: OffloadChoice
    price: OffloadPrice | None
    """None for host memory, and where offloading is no question."""
    in_memory: Profile
    elsewhere: Profile

    @property
    def profile(self) -> Profile:
        """Return the profile that a plan is made from."""
        return self.in_memory if self.choice.where == "off" else self.elsewhere


@dataclass(frozen=True, kw_only=True)
class OffloadPrice:
    """Seconds that a disk adds to a step, and what would hide them."""

    costs: OffloadCosts
    read_rate: float
    """Bytes a second of all drives together."""
    write_rate: float
    step_seconds: float
    """Seconds of forward and backward of a training batch in the trained layers; 0 where unknown."""
    batch: int
    samples: int
    """Samples of an epoch: no batch is larger."""
    freezes: tuple[LaterFreeze, ...] = ()
    """See :class:`OffloadChoice`."""

    @property
    def transfer_seconds(self) -> float:
        """Return the seconds that the drives take for one step."""
        return self._transfer_seconds(self.costs)

    def _transfer_seconds(self, costs: OffloadCosts) -> float:
        return costs.read / self.read_rate + costs.written / self.write_rate

    @property
    def added_seconds(self) -> float:
        """Return the seconds that a step takes more: transfers overlap with forward and backward."""
        return max(0.0, self.transfer_seconds - self.step_seconds)

    @property
    def free_batch(self) -> int | None:
        """Return the smallest training batch whose step hides the transfers; None where no batch does."""
        if not self.step_seconds:
            return None
        found = max(self.batch, -int(-self.batch * self.transfer_seconds // self.step_seconds))
        return found if found <= max(self.samples, self.batch) else None

    @property
    def free_freeze(self) -> int | None:
        """Return the earliest later freeze whose step hides its transfers; None where none does, or that is unknown."""
        return earliest_hidden(
            self.freezes,
            lambda one: self._transfer_seconds(replace(self.costs, parameters=one.parameters)),
            self.step_seconds,
        )

    def __str__(self) -> str:
        """Say it in a line."""
        text = (
            f"{format_bytes(self.costs.read)} read and {format_bytes(self.costs.written)} written a step: "
            f"{format_duration(self.transfer_seconds)} at the disk's rate"
        )
        if not self.step_seconds:
            return f"{text}, free where forward and backward take as long"
        step = format_duration(self.step_seconds)
        if not self.added_seconds:
            return f"{text}, hidden behind steps of {step}"
        text += f", which adds {format_duration(self.added_seconds)} to steps of {step}"
        freeze = "" if self.free_freeze is None else f", with --freeze {self.free_freeze} it is free"
        if self.free_batch is None:
            return f"{text}; no batch of {self.samples} samples would hide that{freeze}"
        return f"{text}; free from --bs {self.free_batch} on{freeze}"


def choose_offload(
    profile: Profile, job: Job, terms: OffloadTerms, split: int | None = None, *, is_short: bool = False
) -> OffloadChoice:
    """Choose the place of a training's states, as a run and ``hapi plan`` do.

    Args:
        profile: sizes of the layers, and the optimiser's bytes with all in memory.
        job: the training, with its bound on memory.
        terms: what the user asks for.
        split: the only one; None for all.
        is_short: whether memory is short for another reason than that no split fits it.
    """
    trained = profile.layers[profile.last_split :]
    costs = OffloadCosts(
        parameters=sum(layer.parameter_bytes for layer in trained) // 4,
        states=terms.states,
        drives=terms.drives,
        largest=max((layer.parameter_bytes for layer in trained), default=0) // 4,
        keeps_gradients=terms.wanted == "host" or profile.ranks > 1,
        is_on_cpu=profile.client_tier.device == "cpu",
    )
    frees_memory = terms.wanted != "host" or not costs.is_on_cpu
    freed = costs.saved if frees_memory else 0
    splits = range(profile.last_split + 1) if split is None else (split,)
    is_needed = (
        terms.wanted != "off"
        and freed > 0
        and job.memory_bytes is not None
        and costs.memory_without >= SMALL_SHARE * job.memory_bytes
        and not _fits(profile, job, splits)
    )
    where: StatesPlace = "disk" if is_needed else "off"
    if terms.wanted != "auto":
        where = terms.wanted
    if where == "disk" and not (is_needed or is_short) and _has_room_for_gradients(costs, job):
        costs = replace(costs, keeps_gradients=True)
    return OffloadChoice(
        where=where,
        is_needed=is_needed,
        freed=costs.saved if frees_memory and where != "off" else 0,
        costs=costs,
        fitting_freeze=_fitting_freeze(profile, job, split) if is_needed else None,
        freezes=tuple(later_freezes(profile)),
    )


def _has_room_for_gradients(costs: OffloadCosts, job: Job) -> bool:
    return job.memory_bytes is None or keeps_gradients(costs.parameter_bytes, job.memory_bytes)


def price_offload(
    profile: Profile, job: Job, terms: OffloadTerms, rates: Callable[[], tuple[float, float]]
) -> PricedOffload:
    """Choose the place of a training's states where seconds are known too, as a run and ``hapi plan`` do.

    Args:
        profile: measurements, with all in memory.
        job: the training, with its bound on memory.
        terms: what the user asks for.
        rates: returns bytes a second that the drives read and write; called where the price is a question.
    """
    choice = choose_offload(profile, job, terms)
    splits = range(profile.last_split + 1)
    unfit = [split for split in splits if not _fits(profile, job, (split,))]
    if terms.wanted == "off" or (choice.where == "off" and not unfit):
        return PricedOffload(choice=choice, price=None, in_memory=profile, elsewhere=profile)
    asked = choice
    if choice.where == "off":
        asked = choose_offload(profile, job, replace(terms, wanted="disk"), is_short=True)
    price = None
    read, write = rates() if asked.where == "disk" and asked.costs.parameters else (0.0, 0.0)
    if read and write:
        price = OffloadPrice(
            costs=asked.costs,
            read_rate=read,
            write_rate=write,
            step_seconds=profile.step_seconds * min(job.bs, job.samples) + profile.update_seconds,
            batch=job.bs,
            samples=job.samples,
            freezes=asked.freezes,
        )
        asked = replace(asked, added_seconds=price.added_seconds)
    elsewhere = offloaded(profile, asked, price) if asked.freed or choice.where != "off" else profile
    if choice.where != "off":
        choice = asked
    elif asked.freed and price is not None:
        faster = _faster(profile, elsewhere, job, unfit)
        choice = choice if faster is None else replace(asked, faster=faster)
    return PricedOffload(choice=choice, price=price, in_memory=profile, elsewhere=elsewhere)


def fitting_elsewhere(elsewhere: Profile, job: Job, unfit: Iterable[int]) -> list[Estimate]:
    """Return the estimates with the states elsewhere of those ``unfit`` splits that fit the memory so."""
    found = (estimate(elsewhere, job, split) for split in unfit)
    return [e for e in found if e.memory.peak <= (job.memory_bytes or 0)]


def _faster(in_memory: Profile, elsewhere: Profile, job: Job, unfit: Sequence[int]) -> FasterSplit | None:
    fitting = (split for split in range(in_memory.last_split + 1) if split not in unfit)
    best = min((estimate(in_memory, job, split) for split in fitting), key=_seconds, default=None)
    other = min(fitting_elsewhere(elsewhere, job, unfit), key=_seconds, default=None)
    if best is None or other is None or other.epoch_seconds > WORTHWHILE * best.epoch_seconds:
        return None
    return FasterSplit(other.split, other.epoch_seconds, best.split, best.epoch_seconds)


def _seconds(one: Estimate) -> float:
    return one.epoch_seconds


def offloaded(profile: Profile, choice: OffloadChoice, price: OffloadPrice | None) -> Profile:
    """Return the profile of a training whose states are elsewhere; seconds without a ``price`` stay as they are."""
    added = 0.0 if price is None else price.added_seconds
    return replace(
        profile,
        offloaded_bytes=choice.freed,
        update_seconds=profile.update_seconds + added,
    )


def _fits(profile: Profile, job: Job, splits: Iterable[int]) -> bool:
    return job.memory_bytes is None or any(
        memory(profile, job, split).peak <= job.memory_bytes for split in splits
    )


def _fitting_freeze(profile: Profile, job: Job, split: int | None) -> int | None:
    """Return the earliest later freeze that fits, with all that is frozen on the server."""
    for freeze in range(profile.last_split + 1, len(profile.layers)):
        if not any(layer.parameter_bytes for layer in profile.layers[freeze:]):
            return None
        later = replace(profile, freeze=freeze, last_split=freeze)
        if _fits(later, job, (freeze if split is None else split,)):
            return freeze
    return None

"""The optimiser's own arithmetic on one piece: the user's class and options, on tensors that lie in the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from hapi.arrays import Bytes
from hapi.errors import UsageError
from hapi.offload.device_staging import PieceStaging
from hapi.offload.loop.gradients import GradientChange
from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import Segment, StatePiece
from hapi.offload.states.queues import Loaded

CACHED_ELEMENTS = 3 << 14
"""Elements that one thread computes together: they stay in a cache, and what is made beside them (192 KiB) is below
what :func:`hapi.allocator.give_back_large_blocks` gives back, page by page, each time."""
ADAM_ELEMENTS = 1 << 18
"""Elements that :class:`PlainAdam` computes together, and copies while they are in a cache: of 16,384 to 1,048,576
these took the least processor time, with one thread and with two."""

_FP32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""Form of what is made here, whatever default type and device a script has set."""


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options, detached from it."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two groups' options are equal, tensors by their values."""
    return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def state_names(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tensors that an optimiser keeps for each parameter, found by a step on one number."""
    probe = nn.Parameter(torch.zeros(1, **_FP32))
    probe.grad = torch.zeros(1, **_FP32)
    optimizer: torch.optim.Optimizer = kind([{**options, "params": [probe]}])  # type: ignore[call-arg]
    with torch.device("cpu"):  # a loop's default device is not that of the probe's state
        _step(optimizer)
    state = optimizer.state[probe]
    return tuple(name for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim())


class PieceUpdate:
    """Computes the new record of a piece from the old one and the gradients."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        parameters: Sequence[TrainedParameter],
        staging: PieceStaging | None = None,
    ) -> None:
        """Prepare.

        Args:
            kind: the user's optimiser.
            parameters: all trained ones by number.
            staging: of those on a GPU.
        """
        self._kind, self._parameters, self._staging = kind, parameters, staging
        self._plain = PlainAdam(kind)
        self.options: Sequence[Mapping[str, Any]] = ()
        """Options of the parameter groups for the running step."""
        self.expected: Sequence[GradientChange] | None = None
        """Changes that gradients are expected to get before the step; None once the step knows them."""

    @torch.no_grad()
    def __call__(self, piece: StatePiece, loaded: Loaded) -> None:
        """Update a piece in its record, and the parameters in memory.

        Values are computed where they lie, in the record, or in staging memory, and copied to where else they are kept
        once. Segments whose parameter has no gradient keep their values.
        """
        parts: list[_Part] = []
        computed = []
        for segment in piece.segments:
            known = self._parameters[segment.parameter]
            known.wait_for_device()
            master, own = master_of(segment, loaded.record), known.flat[segment.start : segment.stop]
            is_recorded = loaded.has_master and not known.takes_memory
            if not known.has_gradient:
                if not is_recorded:
                    master.copy_(own)
                continue
            values, copies = self._values(known, piece, segment, master, own)
            source = self._source(known, segment, master, own, is_recorded=is_recorded)
            if not _is_same(values, source):
                values.copy_(source)
            if known.is_master and self.expected is not None:
                known.watch.note_before(segment.start, values)
            options, gradient = self.options[known.group], self._gradient(known, piece, segment)
            states = states_of(segment, loaded.record)
            if self._plain.takes(options):
                copies = self._plain.step(values, gradient, states, options, known.steps, copies)
            else:
                parts += _parts(known, values, gradient.float(), states, options)
            computed.append((known, values, copies))
        _take_step(self._kind, parts)
        for known, values, copies in computed:
            known.writes += 1
            if known.is_on_host:  # ``.data`` has a version of its own
                torch.autograd.graph.increment_version(known.parameter)
            for copy in copies:
                copy.copy_(values)

    def _source(
        self,
        known: TrainedParameter,
        segment: Segment,
        master: torch.Tensor,
        own: torch.Tensor,
        *,
        is_recorded: bool,
    ) -> torch.Tensor:
        """Return a segment's values before the step: those in memory, or the record's where these are not there."""
        if not is_recorded:
            return own
        if known.watch.is_noted(segment.start):
            check_before(known, segment, master)
            return master
        if known.is_master:
            return own
        is_alike = not own.is_cpu or torch.equal(master.to(own.dtype), own)
        known.watch.note_before(segment.start, master if is_alike else None)
        return master if is_alike else own

    def _gradient(self, known: TrainedParameter, piece: StatePiece, segment: Segment) -> torch.Tensor:
        """A segment's gradient after the loop's changes, in the parameter's type; not to be changed."""
        changes = known.changes if self.expected is None else self.expected
        room = None
        if self._staging is not None:
            room = self._staging.gradient(piece, segment, known.parameter.dtype)
        return known.part(segment.start, segment.stop, changes, room)

    def _values(
        self,
        known: TrainedParameter,
        piece: StatePiece,
        segment: Segment,
        master: torch.Tensor,
        own: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return where a segment's values are computed, and where they are copied to."""
        if known.is_on_host:
            return own.data, (master,)
        if own.device.type == "cpu" or self._staging is None:
            return master, (own,)
        return self._staging.values(piece, segment), (own, master)


def _parts(
    known: TrainedParameter,
    values: torch.Tensor,
    gradient: torch.Tensor,
    states: Sequence[torch.Tensor],
    options: Mapping[str, Any],
) -> list[_Part]:
    """Cut a segment into parts that stay in a core's cache, where one thread computes.

    Several threads divide each operator, and wait for each other by spinning: beside other work so many small
    operators take 200 times as much processor time as those on whole segments.
    """
    size = CACHED_ELEMENTS if torch.get_num_threads() == 1 else len(values)
    parts = []
    for start in range(0, len(values), size):
        span = slice(start, start + size)
        parameter = nn.Parameter(values[span], requires_grad=True)
        parameter.grad = gradient[span]
        kept = {name: state[span] for name, state in zip(known.state_names, states, strict=True)}
        parts.append(_Part(parameter, options, kept, known.steps, known.counts_steps))
    return parts


def check_before(known: TrainedParameter, segment: Segment, master: torch.Tensor) -> None:
    """Raise UsageError unless a segment's recorded values are those that its step was computed from.

    Somebody changed them otherwise as no version tells: the step cannot be undone.
    """
    if not known.watch.were(segment.start, master):
        raise UsageError(
            f"{known.name} was changed through .data before a step that has to be computed again: change parameters "
            'under torch.no_grad(), or give mode="serial"; the last step is committed, and a next run on this folder '
            "goes on from it"
        )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without the hooks that a loop has for the steps of all optimisers: this one is not the loop's."""
    own = type(optimizer).step
    getattr(own, "__wrapped__", own)(optimizer)


class _Part(NamedTuple):
    """Elements that are computed together."""

    values: nn.Parameter
    options: Mapping[str, Any]
    states: Mapping[str, torch.Tensor]
    """In the record."""
    steps: int
    """Taken before; the states count where there were some."""
    counts_steps: bool


def _take_step(kind: type[torch.optim.Optimizer], parts: Sequence[_Part]) -> None:
    """Take a step with these parts, each with its options; their states are those after it."""
    if not parts:
        return
    grouped = [list(group) for _, group in groupby(parts, key=lambda part: id(part.options))]
    groups = [{**group[0].options, "params": [part.values for part in group]} for group in grouped]
    optimizer: torch.optim.Optimizer = kind(groups)  # type: ignore[call-arg]
    for part in parts:
        if part.steps:
            state = optimizer.state[part.values] = dict(part.states)
            if part.counts_steps:
                state["step"] = torch.tensor(float(part.steps), **_FP32)
    _step(optimizer)
    for part in parts:
        state = optimizer.state[part.values]
        for name, kept in part.states.items():
            if state[name].data_ptr() != kept.data_ptr():
                kept.copy_(state[name])


class PlainAdam:
    """Torch's Adam and AdamW as they compute on a CPU by default, operator by operator, without an optimiser around it.

    The denominator, of which torch makes two tensors for each parameter, has one place for all; the copy of new values
    is made while they are in a cache. So an update with its copy takes no more processor time than torch's without.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], *, is_exact: bool | None = None) -> None:
        """Prepare.

        Args:
            kind: the user's; of another one nothing is taken.
            is_exact: whether the bits are those of ``kind``; None to find out.
        """
        self._kind = kind
        self._is_exact = _is_exact(kind) if is_exact is None else is_exact
        self._denominator = torch.empty(0, **_FP32)

    def takes(self, options: Mapping[str, Any]) -> bool:
        """Return whether a parameter group's options are those of a plain step."""
        if not self._is_exact or any(options.get(name) for name in _UNUSUAL):
            return False
        numbers = (options["lr"], *options["betas"], options["eps"], options["weight_decay"])
        is_decoupled = options.get("decoupled_weight_decay", self._kind is torch.optim.AdamW)
        return all(isinstance(one, int | float) for one in numbers) and (
            is_decoupled or not options["weight_decay"]
        )

    def step(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        options: Mapping[str, Any],
        steps: int,
        copies: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        """Take a step in place.

        Args:
            values: fp32 [elements], as states; contiguous on the CPU.
            gradient: [elements], of any type.
            states: both averages; their values do not count before the first step.
            options: of the parameter group.
            steps: taken before.
            copies: tensors that get the new values.

        Returns:
            Those of ``copies`` that are still to be made: they are not on the CPU.
        """
        on_host = [copy for copy in copies if copy.is_cpu]
        for start in range(0, len(values), ADAM_ELEMENTS):
            span = slice(start, start + ADAM_ELEMENTS)
            part = values[span]
            self._compute(part, gradient[span].float(), [state[span] for state in states], options, steps)
            for copy in on_host:
                copy[span].copy_(part)
        return tuple(copy for copy in copies if not copy.is_cpu)

    def _compute(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        options: Mapping[str, Any],
        steps: int,
    ) -> None:
        average, squares = states
        if not steps:
            average.zero_()
            squares.zero_()
        (beta1, beta2), rate, decay = options["betas"], options["lr"], options["weight_decay"]
        count = float(steps + 1)
        if decay:
            values.mul_(1 - rate * decay)
        average.lerp_(gradient, 1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if len(self._denominator) < len(values):
            self._denominator = torch.empty(min(ADAM_ELEMENTS, 2 * len(values)), **_FP32)
        denominator = self._denominator[: len(values)]
        torch.sqrt(squares, out=denominator).div_((1 - beta2**count) ** 0.5).add_(options["eps"])
        values.addcdiv_(average, denominator, value=-(rate / (1 - beta1**count)))


_UNUSUAL = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")
"""Options with which torch computes otherwise."""


@torch.no_grad()
def _is_exact(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether :class:`PlainAdam` gives the bits of the installed torch, found by three steps on random numbers."""
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    parameter = nn.Parameter(torch.randn(4099, generator=generator, **_FP32))
    optimizer: torch.optim.Optimizer = kind([parameter])
    options, values = optimizer.param_groups[0], parameter.detach().clone()
    ours = PlainAdam(kind, is_exact=True)
    states = [torch.empty_like(values) for _ in range(2)]
    for steps in range(3):
        parameter.grad = torch.randn(values.shape, generator=generator, **_FP32)
        with torch.device("cpu"):
            _step(optimizer)
        if not ours.takes(options):
            return False
        ours.step(values, parameter.grad, states, options, steps)
    kept = optimizer.state[parameter]
    theirs = (parameter, kept["exp_avg"], kept["exp_avg_sq"])
    return all(torch.equal(one, other) for one, other in zip((values, *states), theirs, strict=True))


def master_of(segment: Segment, record: Bytes) -> torch.Tensor:
    """Return a segment's master weights, fp32 [elements], which lie in the record."""
    return torch.from_numpy(record[segment.master_at : segment.master_at + 4 * segment.elements]).view(
        torch.float32
    )


def states_of(segment: Segment, record: Bytes) -> list[torch.Tensor]:
    """Return a segment's optimiser states, each fp32 [elements], which lie in the record."""
    return [
        torch.from_numpy(record[at : at + 4 * segment.elements]).view(torch.float32)
        for at in segment.states_at
    ]

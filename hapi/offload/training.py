"""``hapi.offload_training``: a loop's model and optimiser, with states outside the memory where they do not fit it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.cache.disk_rates import measure_disk
from hapi.errors import UsageError
from hapi.models.devices import free_bytes
from hapi.offload.activations.layers import SERVED, end_plan_before, owned
from hapi.offload.activations.offload import ActivationOffload
from hapi.offload.layer_memory import GradientRoom
from hapi.offload.loop.admission import check_memory, check_model, check_optimizer, check_policy
from hapi.offload.loop.fixed import refuse_steps
from hapi.offload.loop.hooks import check_not_followed
from hapi.offload.loop.notices import notice
from hapi.offload.loop.values import form_of
from hapi.offload.loop.verdict import StepWatch
from hapi.offload.optimizer import MODES, OffloadedOptimizer
from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import Layout, plan_pieces
from hapi.offload.planner import StateTraffic
from hapi.offload.shards import agree_on_step, shares_of, smallest
from hapi.offload.small_state import SmallState
from hapi.offload.states.base import StateStore
from hapi.offload.states.disk import DiskStates
from hapi.offload.states.folder import NAME, holds, rank_folder
from hapi.offload.states.host import HostStates
from hapi.offload.states.queues import Traffic
from hapi.offload.updates import options_of, state_names
from hapi.paths import user_path
from hapi.process.mapped_files import give_back_file_pages
from hapi.profiler.offload_costs import PENDING_BYTES, OffloadedMemory, keeps_gradients
from hapi.units import format_bytes, format_duration, parse_bytes

log = logging.getLogger("hapi.offload")

_MEMORY_SHARE = 0.8
"""Share of the free memory that counts as a training's own where the user names none."""

_LEAST_BYTES = 32 << 20
"""Activations get so much memory even where nothing is left of it."""


def offload_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    memory: str | int | None = None,
    disk: str | Path | Sequence[str | Path] | None = None,
    *,
    mode: str = "active",
    keep_gradients: bool | None = None,
    activations: str = "auto",
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train in less memory: optimiser states and activations go to a disk, and each step stays bit by bit what it was.

    ::

        model, optimizer = hapi.offload_training(model, optimizer, memory="8GB", disk="/scratch")

    The loop stays as it is: clipping, accumulation, schedulers and gradient scalers work. A killed process leaves the
    last whole step in the folder; the same call finds it, restores the model, and ``optimizer.steps`` says how many
    steps are done. A scheduler that is made anew is moved on: ``for _ in range(optimizer.steps): scheduler.step()``.

    Args:
        model: of any kind; its parameters stay where they are.
        optimizer: torch's AdamW, Adam or SGD over the model's parameters in float32, bfloat16 or float16 (those in half
            precision get fp32 master weights).
        memory: bytes for parameters, gradients, states and activations; None for most of what is free. States that
            fit stay where they are, and the optimiser is returned, with ``steps`` 0.
        disk: a folder, or one on each of several drives, between which the states are striped; None for the host's
            memory.
        mode: "active" overlaps updates with backward (LoHan, section IV-C); "naive" and "serial" are for comparison.
        keep_gradients: keep gradients on the disk until the step, for loops that begin to look at them later than in
            their first steps; None keeps them where the first steps did, or a run before ended for want of one.
        activations: "auto" measures the first iteration, and keeps, swaps or recomputes what each layer saves for
            backward so that it fits the memory (LoHan, section IV-D); "keep" leaves all in memory; "swap" recomputes
            nothing; "recompute" all it can.

    Returns:
        The model, and the optimiser to use from now on.

    Raises:
        UsageError: an optimiser, parameter, mode or folder that cannot be used, or too little room on the disk.
    """
    if mode not in MODES:
        raise UsageError(f"mode={mode!r}: take one of {', '.join(MODES)}")
    check_model(model)
    if keep_gradients not in (None, True, False):
        raise UsageError(f"keep_gradients={keep_gradients!r}: give True, False, or None to learn it")
    check_optimizer(optimizer)
    check_policy(activations)
    end_plan_before(model, optimizer)
    room = _room(memory, model)
    needed = sum(_bytes_in_memory(optimizer))
    rank, ranks = shares_of(model)
    folders = [rank_folder(folder, rank, ranks) for folder in _folders(disk)]
    if (room is None or needed <= room) and not _can_go_on(model, optimizer, folders):
        size = format_bytes(needed) + ("" if room is None else f" of {format_bytes(room)}")
        notice(f"all fits, states stay in memory: they, parameters and gradients take {size}")
        layers = None
        if room is not None:
            layers = ActivationOffload(model, max(room - needed, _LEAST_BYTES), folders, activations)
            layers.install()
            owned(model, optimizer, layers)
        _serve_loops(optimizer, mode, layers)
        return model, optimizer
    return model, offload_states(
        model, optimizer, room, folders, mode=mode, keep_gradients=keep_gradients, activations=activations
    )


def _can_go_on(model: nn.Module, optimizer: torch.optim.Optimizer, folders: Sequence[Path]) -> bool:
    """Whether the folders hold states of this very job, which was killed when less memory was free."""
    is_found = all((folder / NAME).is_dir() for folder in folders)
    if is_found and folders:
        small = SmallState(model, optimizer.param_groups)
        is_found = holds(folders, _signature(model, optimizer, small))
    return bool(folders) and smallest(model, 0 if is_found else 1) == 0


def _serve_loops(optimizer: torch.optim.Optimizer, mode: str, layers: ActivationOffload | None) -> None:
    """Give an optimiser whose states stay what loops use of an offloaded one, so that they run with both."""

    def report() -> dict[str, Any]:
        """Return the counts of an offloaded optimiser, all 0; ``activations`` has those of the layers, if any."""
        steps = ("steps", "taken_steps", "redone_steps", "restored_steps", "speculated_pieces")
        counts = {**dict.fromkeys(steps, 0), **asdict(Traffic())}
        kept = {} if layers is None else layers.report()
        return {"mode": mode, "where": "memory", **counts, "activations": kept}

    def close(*, remove: bool = True) -> None:
        """End the plan of the activations; no files are there."""
        if layers is not None:
            layers.close()

    for name, value in zip(SERVED, (0, report, close), strict=True):
        if not hasattr(optimizer, name):
            setattr(optimizer, name, value)


def offload_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    room: int | None,
    folders: Sequence[Path],
    *,
    mode: str = "active",
    keep_gradients: bool | None = None,
    activations: str = "auto",
    resumes: bool = True,
    is_short: bool = False,
    say: Callable[[str, bool], None] = notice,
) -> OffloadedOptimizer:
    """Put the states elsewhere, whether they fit the memory or not; see :func:`offload_training`.

    Args:
        model: the trained layers.
        optimizer: of a kind that can be offloaded.
        room: bytes for parameters, gradients, states and activations; None for most of what is free.
        folders: one for each drive; none for the host's memory.
        mode: as there.
        keep_gradients: as there.
        activations: as there.
        resumes: whether a next process goes on from the files that a killed one leaves.
        is_short: whether other things take a part of ``room``, so that gradients do not stay in it until the step.
        say: gets the lines on what it does, each with whether that is a cost.
    """
    needed = sum(_bytes_in_memory(optimizer))
    if room is None:
        room = _room(None, model) or needed
    in_memory = not folders or (not is_short and keeps_gradients(_gradient_bytes(optimizer), room))
    store, layout, small, parameters = _make(model, optimizer, folders, resumes, in_memory=in_memory)
    traffic = _traffic(layout, parameters)
    seconds = _transfer_seconds(folders, traffic)
    text = (
        f"offloading: parameters, gradients and states take {format_bytes(needed)} of {format_bytes(room)} memory; the "
        f"states go to {_named(folders)}"
    )
    if seconds:
        read, write = traffic.backward_disk_read, traffic.backward_disk_write
        text += (
            f"; a step reads {format_bytes(read)} and writes {format_bytes(write)} there, which takes about "
            f"{format_duration(seconds)}: free where forward and backward take longer"
        )
    say(text, bool(folders))
    taken = memory_taken(parameters, layout, is_alone=shares_of(model)[1] == 1)
    gradients = _gradient_room(taken)
    left = max(_memory_left(room, parameters, folders, taken), _LEAST_BYTES + gradients.waiting)
    swapped = ActivationOffload(model, left, folders, activations, traffic=traffic, gradients=gradients)
    give_back_file_pages()
    made = OffloadedOptimizer(
        optimizer, model, parameters, layout, store, small, mode=mode, keep_gradients=keep_gradients,
        where=_named(folders), activations=swapped.install(), resumes=resumes and bool(folders),
        watch=lambda traffic: StepWatch(traffic, seconds, say),
    )  # fmt: skip
    refuse_steps(optimizer)
    return made


def _named(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders)) or "host memory"


def _memory_left(
    room: int, parameters: Sequence[TrainedParameter], folders: Sequence[Path], taken: OffloadedMemory
) -> int:
    """Return the bytes that a pass may take; warns where the memory is too small, or nothing frees it."""
    left = room - taken.total
    if left < 0:
        log.warning(
            "%s of memory does not hold the trained parameters and their buffers: it takes %s more",
            format_bytes(room),
            format_bytes(-left),
        )
    if not folders and all(known.parameter.device.type == "cpu" for known in parameters):
        log.warning(
            "the states go to the memory that the CPU trains in, which frees none of it: a disk would"
        )
    return room - taken.constant


def memory_taken(
    parameters: Sequence[TrainedParameter], layout: Layout, *, is_alone: bool
) -> OffloadedMemory:
    """Return what offloaded training takes beside activations.

    Args:
        parameters: trained ones.
        layout: of their states.
        is_alone: whether this process trains alone; otherwise gradients are reduced before they are used.
    """
    sizes = [known.parameter.nbytes for known in parameters]
    is_on_cpu = all(known.parameter.device.type == "cpu" for known in parameters)
    return OffloadedMemory(
        values=sum(sizes),
        largest=max(sizes, default=0),
        record=max((piece.nbytes for piece in layout.pieces), default=0) if is_on_cpu else 0,
        drives=len(layout.slot_bytes),
        keeps_gradients=not is_alone or any(known.keeps_in_memory for known in parameters),
    )


def _gradient_room(taken: OffloadedMemory) -> GradientRoom:
    """Gradients that come and go within a pass; none where all stay in memory until the step."""
    if taken.keeps_gradients:
        return GradientRoom()
    return GradientRoom(
        total=taken.values, waiting=taken.waiting, ahead=min(taken.waiting, PENDING_BYTES // 2)
    )


def _traffic(layout: Layout, parameters: Sequence[TrainedParameter]) -> StateTraffic:
    """Bytes that the states move in a step."""
    read = sum(
        piece.states_bytes if all(parameters[s.parameter].is_master for s in piece.segments) else piece.nbytes
        for piece in layout.pieces
    )
    return StateTraffic(
        backward_disk_read=read, backward_disk_write=sum(piece.nbytes for piece in layout.pieces)
    )


def _transfer_seconds(folders: Sequence[Path], traffic: StateTraffic) -> float:
    """Return the seconds that a step's bytes take the disks, as they are measured now; 0 where that is unknown."""
    rates = [measure_disk(folder) for folder in folders]
    read, write = (sum(rate[at] or 0.0 for rate in rates) for at in (0, 1))
    if not read or not write:
        return 0.0
    return traffic.backward_disk_read / read + traffic.backward_disk_write / write


def _room(memory: str | int | None, model: nn.Module) -> int | None:
    """Bytes that the training may take; None when that is not known."""
    if memory is not None:
        return parse_bytes(memory, "memory")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    free = free_bytes(device)
    if free is None:
        return None
    own = sum(parameter.nbytes for parameter in model.parameters())
    return smallest(model, int(_MEMORY_SHARE * (free + own)))


def _folders(disk: str | Path | Sequence[str | Path] | None) -> list[Path]:
    if disk is None:
        return []
    named = [disk] if isinstance(disk, str | Path) else disk
    if not isinstance(named, Sequence) or not all(isinstance(one, str | Path) and str(one) for one in named):
        raise UsageError(f"disk={disk!r}: name a folder, or a list with one on each drive")
    folders = [user_path(one, "disk") for one in named]
    if len({folder.resolve() for folder in folders}) != len(folders) or not folders:
        raise UsageError("disk: name one folder on each drive, each once")
    return folders


def _in_groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, nn.Parameter]]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield number, parameter


def _bytes_in_memory(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Bytes of each parameter, its gradient, its states, and its master weights where it is in half precision."""
    columns = [len(names) for names in _kept(optimizer)]
    for group, parameter in _in_groups(optimizer):
        masters = parameter.dtype != torch.float32
        yield 2 * parameter.nbytes + 4 * parameter.numel() * (columns[group] + masters)


def _gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.nbytes for _, parameter in _in_groups(optimizer))


def _make(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folders: Sequence[Path],
    resumes: bool,
    *,
    in_memory: bool,
) -> tuple[StateStore, Layout, SmallState, list[TrainedParameter]]:
    kept = _kept(optimizer)
    parameters: list[TrainedParameter] = []
    at = 0
    for number, (name, group, parameter) in enumerate(_with_names(model, optimizer)):
        known = TrainedParameter(
            number=number,
            name=name,
            parameter=parameter,
            group=group,
            state_names=kept[group],
            gradient_at=at,
            keeps_in_memory=in_memory,
            counts_steps=type(optimizer) is not torch.optim.SGD,
        )
        at += parameter.nbytes
        parameters.append(known)
    check_memory((known.name, known.parameter) for known in parameters)
    check_not_followed(parameters)
    rank, ranks = shares_of(model)
    layout = plan_pieces([known.size for known in parameters], max(len(folders), 1), rank=rank, ranks=ranks)
    for piece in layout.pieces:
        for segment in piece.segments:
            known = parameters[segment.parameter]
            known.pieces.append(piece.number)
            known.parts.append((segment.start, segment.stop))
    small = SmallState(model, optimizer.param_groups)
    store: StateStore
    if folders:
        store = DiskStates(
            folders,
            layout,
            parameters=len(parameters),
            gradient_bytes=0 if in_memory else _gradient_bytes(optimizer),
            extra_bytes=small.nbytes,
            signature=_signature(model, optimizer, small),
            resumes=resumes,
        )
    else:
        store = HostStates(layout, 0)
    agree_on_step(model, store)
    return store, layout, small, parameters


def _with_names(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, int, nn.Parameter]]:
    """Yield each trained parameter with its name, and the number of its group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, (group, parameter) in enumerate(_in_groups(optimizer)):
        yield names.get(id(parameter), f"parameter {number} of the optimizer"), group, parameter


def _kept(optimizer: torch.optim.Optimizer) -> list[tuple[str, ...]]:
    """States of each group's parameters."""
    return [state_names(type(optimizer), options_of(group)) for group in optimizer.param_groups]


def _signature(model: nn.Module, optimizer: torch.optim.Optimizer, small: SmallState) -> str:
    """Return what a job is recognised by: optimiser, parameters, their order and groups."""
    facts: list[Any] = [type(optimizer).__name__, small.nbytes, shares_of(model)[1]]
    kept = _kept(optimizer)
    for name, group, parameter in _with_names(model, optimizer):
        shape, strides, dtype, _ = form_of(parameter)
        form = [list(shape), list(strides), str(dtype), list(kept[group])]
        facts.append([name, group, *form])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

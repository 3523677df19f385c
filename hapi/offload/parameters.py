"""A trained parameter whose optimiser states are elsewhere: its gradient, what was done to it, its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hapi.errors import UsageError
from hapi.offload.failures import GradientGoneError
from hapi.offload.loop.admission import check_parameter
from hapi.offload.loop.gradients import GradientChange, OffloadedGradient, own_gradient
from hapi.offload.loop.holders import is_alone
from hapi.offload.loop.kept_gradients import GradientSpan, KeptGradients
from hapi.offload.loop.values import (
    ValueWatch,
    bytes_of,
    flat_view,
    form_of,
    in_words,
    laid_out,
    norm_of,
)
from hapi.offload.pieces import ParameterSize


@dataclass
class TrainedParameter:
    """One parameter and its gradient of the running step; a :class:`~hapi.offload.loop.gradients.GradientSource`."""

    number: int
    name: str
    parameter: nn.Parameter
    group: int
    """Number of its parameter group."""
    state_names: tuple[str, ...]
    """Tensors of its size that the optimiser keeps."""
    gradient_at: int
    """Byte of its kept gradient in the store."""
    keeps_in_memory: bool
    counts_steps: bool = True
    """Whether the optimiser keeps the number of steps of each parameter."""
    kept: KeptGradients = field(init=False)
    """Hold its gradient when the memory does not."""
    pieces: list[int] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Its first elements in each piece, and those after the last; in their order."""
    steps: int = 0
    """Steps that it took part in."""
    version: int = 0
    """Version of its values when the states were last in step with them."""
    passes: int = 0
    """Backward passes since the last step that gave it a gradient."""
    changes: list[GradientChange] = field(default_factory=list)
    generation: int = 0
    """Number of the gradient; another one after each that took its place."""
    writes: int = 0
    """Writes of new values into the memory since then."""
    takes_memory: bool = False
    """Whether the values in memory count, and not the master weights in the store."""
    is_submitted: bool = False
    """Whether pieces of it were handed to the engine before the step."""
    is_lent: bool = False
    """Whether the gradient is consumed by work that was begun, and not kept."""
    is_carried: bool = False
    """Whether the gradient is that of a step that was taken, and the loop has not dropped it since."""
    is_added_to: bool = False
    """Whether a further pass is expected to add to what the next one adds: its gradient stays in the store then."""
    is_loops_own: bool = False
    """Whether the gradient is a tensor that the loop made, and may use otherwise: it stays in its place."""
    is_aside: bool = False
    """Whether the kept gradient left its place to the one that backward makes now, which it is added to."""
    pieces_left: int = 0
    """Pieces that are not computed yet in this step."""
    on_change: Callable[[], None] = lambda: None
    """Called before another gradient takes the place of one that was handed to the engine."""
    norm_wanted: bool = False
    """Whether a loop asked for its norm in this step."""
    was_touched: bool = False
    """Whether a loop looked at the gradient, or changed it, in this step."""
    watch: ValueWatch = field(init=False)
    _made: torch.cuda.Event | None = None
    _gradient: torch.Tensor | None = None
    _is_stored: bool = False
    _norm: torch.Tensor | None = None
    _offloaded: OffloadedGradient | None = None

    def __post_init__(self) -> None:
        """Look at the parameter's form; UsageError for one that cannot be offloaded."""
        check_parameter(self.name, self.parameter)
        self.version, self.watch = self.parameter._version, ValueWatch(self.parameter)
        self._form = form_of(self.parameter)

    @property
    def size(self) -> ParameterSize:
        """Its size for the planner of pieces."""
        return ParameterSize(self.parameter.numel(), len(self.state_names))

    @property
    def is_master(self) -> bool:
        """Whether the memory holds its fp32 master weights themselves."""
        return self.parameter.dtype == torch.float32

    @property
    def is_on_host(self) -> bool:
        """Whether its fp32 values lie in the memory that updates are computed in."""
        return self.is_master and self.parameter.device.type == "cpu"

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else changed the values in memory since the last step (``load_state_dict``)."""
        return self.parameter._version != self.version + self.writes

    @property
    def is_current(self) -> bool:
        """Whether what is known of its values and its gradient is what the loop has."""
        return not self.is_foreign and (self._offloaded is None or self.is_handed_over)

    def check_form(self) -> None:
        """Raise UsageError unless it has the form that its states were made for."""
        found = form_of(self.parameter)
        if found != self._form:
            raise UsageError(
                f"{self.name} is {in_words(*found)} now, and was {in_words(*self._form)}: change a model before "
                "hapi.offload_training"
            )

    def settle(self, *, is_step: bool = True) -> None:
        """Take the values in memory for those that the states belong to; a step has made them, or the loop."""
        self.version, self.writes = self.parameter._version, 0
        self.watch.settle(is_step=is_step)

    def find_change(self) -> bool:
        """Return whether somebody changed the values since the last step so that no version tells.

        Then those in memory count, and not the master weights in the store.
        """
        if self.writes or self.is_submitted or self.is_foreign or self.watch.is_met():
            return False
        self.version = -1
        return True

    @property
    def has_moved(self) -> bool:
        """Whether somebody changed the values since backward gave the gradient, and no update has begun."""
        return self.has_gradient and not self.writes and not self.is_submitted and self.watch.has_moved()

    @property
    def flat(self) -> torch.Tensor:
        """Its values in the order of memory, one dimension, sharing memory and version."""
        return flat_view(self.parameter.detach())

    # -- the gradient ----------------------------------------------------------------------------------------

    @property
    def offloaded(self) -> OffloadedGradient:
        """The value of ``parameter.grad``; made anew after each :meth:`drop`."""
        if self._offloaded is None:
            self._offloaded = OffloadedGradient(self.parameter, self)
        return self._offloaded

    @property
    def has_gradient(self) -> bool:
        """Whether this step has a gradient of it, kept or consumed."""
        return self._offloaded is not None

    def own_gradient(self) -> torch.Tensor | None:
        """Return ``parameter.grad``: what was handed over, a gradient with bytes, or None."""
        return own_gradient(self.parameter, self._offloaded)

    @property
    def is_handed_over(self) -> bool:
        """Whether ``parameter.grad`` is the gradient that was handed over, and not another one, or none."""
        return self._offloaded is not None and self.parameter.grad is self._offloaded

    @property
    def is_spent(self) -> bool:
        """Whether a step took the gradient, which was not kept: what is added to it before it is dropped is lost."""
        return self.is_carried and self.is_lent

    def check_kept(self) -> None:
        """Raise GradientGoneError for a step of a gradient that the step before took."""
        if self.is_spent:
            raise self._gone()

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of its gradient in memory."""
        return 0 if self._gradient is None else self._gradient.nbytes

    def take(self, gradient: torch.Tensor) -> None:
        """Take a gradient over; its memory may be this one's from now on."""
        self.drop()
        self.generation += 1
        self._gradient = laid_out(gradient, self.parameter)
        self.offloaded  # noqa: B018 - makes it

    def note_own_buffer(self) -> None:
        """Look, before backward adds a gradient, whether it adds to memory that the loop uses otherwise.

        All gradients in one tensor, to be cleared and clipped at once, are such memory.
        """
        found = self.parameter.grad
        is_taken = found is None or isinstance(found, OffloadedGradient)
        self.is_loops_own = not is_taken and not is_alone(found)

    def set_aside(self) -> bool:
        """Take a kept gradient out of ``parameter.grad``; return whether there was one that is not in memory."""
        if not (self.is_handed_over and self._is_stored and self._gradient is None) or self.is_lent:
            return False
        self.parameter.grad, self.is_aside = None, True
        return True

    def put_back(self) -> None:
        """Undo :meth:`set_aside`."""
        if self.is_aside:
            self.parameter.grad, self.is_aside = self.offloaded, False

    def note_stream(self) -> None:
        """Let :meth:`wait_for_device` wait for what the device's current stream has to do."""
        device = self.parameter.device
        if device.type == "cuda":
            self._made = torch.cuda.current_stream(device).record_event()

    def wait_for_device(self) -> None:
        """Let the current stream wait until the gradient is made, and backward needs the values no more."""
        if self._made is not None:
            torch.cuda.current_stream(self.parameter.device).wait_event(self._made)

    def drop(self) -> None:
        """Forget the gradient."""
        if self._is_stored:
            self.kept.forget(self.gradient_at, self.parameter.nbytes)
        if self._offloaded is not None:
            self._offloaded.drop(self.name)
        self._gradient, self._is_stored, self._norm, self._offloaded = None, False, None, None
        self.is_lent = self.is_carried = False
        self.changes.clear()
        self.passes = 0

    def compute_norm(self) -> None:
        """Compute the 2-norm while the gradient is in memory."""
        if self._norm is None and self._gradient is not None:
            self._norm = norm_of(self._gradient)

    def put_away(self) -> None:
        """Move the gradient from the memory to the store."""
        if self._gradient is None or self.keeps_in_memory:
            return
        self.kept.write(self.gradient_at, bytes_of(flat_view(self._gradient).cpu()))
        self._is_stored, self._gradient = True, None

    def spans(self, start: int = 0, stop: int | None = None) -> list[GradientSpan]:
        """Return where its kept gradient's elements lie, part by part; nothing of one that is not in the store."""
        if not self._is_stored or self._gradient is not None:
            return []
        stop = self.parameter.numel() if stop is None else stop
        return [self._span(*part) for part in self.parts if start <= part[0] < stop]

    def consume(self) -> None:
        """Give the gradient's memory back; it is not kept."""
        self._gradient = None

    def part(
        self, start: int, stop: int, changes: Sequence[GradientChange], room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return elements of the gradient after ``changes``, in the order of memory, on the CPU; not to be changed.

        Args:
            start: the first of them.
            stop: the one behind the last.
            changes: to be applied.
            room: for them in pinned memory, if they are on a GPU.
        """
        gradient = self._gradient
        if gradient is None:
            part = self._read(start, stop)
        elif gradient.is_cpu or room is None:
            part = flat_view(gradient)[start:stop].to("cpu", copy=bool(changes))
        else:
            part = room.copy_(flat_view(gradient)[start:stop])
        for change in changes:
            change.apply(part)
        return part

    def norm(self) -> torch.Tensor:
        """Return the 2-norm of the gradient as backward made it."""
        self.norm_wanted = self.was_touched = True
        if self._norm is None:
            self._norm = norm_of(self._whole())
        return self._norm.clone()

    def value(self) -> torch.Tensor:
        """Return the gradient with its changes."""
        self.was_touched = True
        whole = self._whole()
        if whole is self._gradient:
            whole = whole.clone(memory_format=torch.preserve_format)
        return self._changed(whole)

    def replace(self, gradient: torch.Tensor) -> None:
        """Take a changed gradient."""
        self.was_touched = True
        self._tell()
        passes, offloaded = self.passes, self._offloaded
        self._offloaded = None
        self.drop()
        self._gradient, self.passes, self._offloaded = laid_out(gradient, self.parameter), passes, offloaded
        self.generation += 1
        self.put_away()

    def accumulate(self, gradient: torch.Tensor, *, is_own: bool = False) -> None:
        """Add a further backward pass's gradient, as autograd does: in place, in the parameter's type.

        Args:
            gradient: of the further pass.
            is_own: whether its memory is this parameter's from now on. A gradient in the store is then added to it, so
                that the memory never holds both.
        """
        if self.is_spent:
            return
        self._tell()
        added = laid_out(gradient, self.parameter)
        is_away = self._is_stored and self._gradient is None and not self.is_lent
        if self.is_added_to and is_away and not self.changes:
            self._add_in_store(flat_view(added))
            return
        if is_own and is_away:
            whole, flat = added, flat_view(added)
            for start, stop in self.parts:
                flat[start:stop].add_(self._changed(self._read(start, stop)).to(flat.device))
        else:
            whole = self._changed(self._whole()).add_(added)
        self.changes.clear()
        self.generation += 1
        self._gradient, self._norm, self._is_stored = whole, None, False

    def note(self, change: GradientChange) -> None:
        """Remember an elementwise change; a product with one is none."""
        self.was_touched = True
        if change.name.startswith("clamp") or change.operands != (1.0,):
            self.changes.append(change)

    def _changed(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the changes that were noted, in place."""
        for change in self.changes:
            change.apply(values)
        return values

    def _tell(self) -> None:
        if self.is_submitted:
            self.on_change()

    def _whole(self) -> torch.Tensor:
        """The gradient in memory, without its changes: itself or a copy."""
        if self.is_lent:
            raise self._gone()
        gradient = self._gradient  # the engine's thread may put it away meanwhile
        if gradient is not None:
            return gradient
        whole = torch.empty_like(self.parameter, requires_grad=False)
        flat = flat_view(whole)
        for start, stop in self.parts:
            flat[start:stop].copy_(self._read(start, stop))
        return whole

    def _add_in_store(self, flat: torch.Tensor) -> None:
        """Add to the kept gradient part by part, so that the memory never holds it whole."""
        for start, stop in self.parts:
            part = self._read(start, stop).add_(flat[start:stop].cpu())
            self.kept.write(self._span(start, stop).at, bytes_of(part))
        self.generation += 1
        self._norm = None

    def _gone(self) -> GradientGoneError:
        self.kept.note_lacking()
        return GradientGoneError(
            f"the gradient of {self.name} was consumed as backward made it, and is needed again: between backward and "
            "step the loop looked at it, added to it, or changed it or an option, which it did not in its first steps; "
            "the last step is committed, and a next run on this folder goes on from it and keeps gradients, as "
            "keep_gradients=True does from the beginning"
        )

    def _read(self, start: int, stop: int) -> torch.Tensor:
        if not self._is_stored:
            raise self._gone()
        return torch.from_numpy(self.kept.read(self._span(start, stop))).view(self.parameter.dtype)

    def _span(self, start: int, stop: int) -> GradientSpan:
        size = self.parameter.itemsize
        return GradientSpan(self.gradient_at + start * size, (stop - start) * size)

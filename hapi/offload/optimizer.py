"""An optimiser whose states and master weights are not in memory (LoHan, section IV-C: active gradient offloading)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from hapi.errors import HapiError
from hapi.offload.activations.offload import ActivationOffload
from hapi.offload.device_staging import staging_for
from hapi.offload.engine import Engine
from hapi.offload.lifetime import Lifetime
from hapi.offload.loop.admission import check_gradient
from hapi.offload.loop.expectation import Expectation
from hapi.offload.loop.fixed import FixedOptimizer, outside_compiled_code
from hapi.offload.loop.handed_states import StateTable
from hapi.offload.loop.holders import is_alone, is_shared
from hapi.offload.loop.hooks import attach
from hapi.offload.loop.kept_gradients import KeptGradients
from hapi.offload.loop.pending import PendingGradients
from hapi.offload.loop.speculation import Speculation, check_untouched
from hapi.offload.loop.state_exchange import StateExchange
from hapi.offload.loop.verdict import StepWatch
from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import Layout, StatePiece
from hapi.offload.records import Records
from hapi.offload.shards import Shards
from hapi.offload.small_state import SmallState
from hapi.offload.states.base import StateStore
from hapi.offload.states.queues import Loaded, Traffic
from hapi.offload.updates import PieceUpdate, options_of, same_options
from hapi.profiler.offload_costs import BUFFERS, PENDING_BYTES

log = logging.getLogger("hapi.offload")

MODES = ("active", "naive", "serial")
"""Updates within backward, three steps overlapped (Figure 3b); within backward one after the other (Figure 3a); after
backward, as ZeRO-Infinity does.
"""


class OffloadedOptimizer(FixedOptimizer):
    """Takes the steps of a user's optimiser, bit by bit, with its states elsewhere; see ``hapi.offload_training``.

    It works ahead: a parameter's gradient is consumed as soon as backward has made it, in the expectation that the loop
    leaves it as it is and takes a step. What a loop does otherwise (clipping, a further backward pass, a step that is
    left out, another learning rate) is noticed, and the update is computed again from the states before: these are
    intact until the step is committed. Only the time depends on the expectation, which the step before teaches.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        parameters: Sequence[TrainedParameter],
        layout: Layout,
        store: StateStore,
        small: SmallState,
        *,
        mode: str = "active",
        keep_gradients: bool | None = None,
        where: str = "",
        activations: ActivationOffload,
        watch: Callable[[Traffic], StepWatch],
        resumes: bool = True,
    ) -> None:
        """Take over ``optimizer``; made by ``hapi.offload_training``, which has the arguments' meaning."""
        super().__init__(optimizer)
        self._parameters, self._layout, self._store = list(parameters), layout, store
        self._mode, self._where = mode, where
        self._staging = staging_for(self._parameters, layout)
        self._update = PieceUpdate(type(optimizer), self._parameters, self._staging)
        self._engine = Engine(
            store,
            layout,
            self._compute,
            self._reads_master,
            buffers=1 if mode == "naive" else BUFFERS,
            has_thread=self._staging is not None or mode == "naive",
        )
        self._shards = Shards(model, self._parameters, layout, store)
        self._records = Records(self._parameters, layout, self._engine, store, self._shards)
        self._pending = PendingGradients(layout, self._parameters, self._engine.has_record)
        self._taken_steps = 0
        self._kept = KeptGradients(store, PENDING_BYTES // 2)
        self._lifetime = Lifetime(self._engine, self._kept, store, where, resumes=resumes)
        self._activations = activations
        activations.on_measure = lambda: self._engine.take_room(0)
        self._watch = watch(self._engine.traffic)
        self._is_alone = self._shards.ranks == 1
        """Whether gradients are whole when backward has made them; otherwise they are reduced first."""
        if keep_gradients is None and store.lacked_gradient:
            keep_gradients = True
        self._expected = Expectation(
            [piece.number for piece in layout.pieces], self._is_alone and mode != "serial", keep_gradients
        )
        self._ahead = Speculation(
            self._parameters, self._engine, self._records, self._expected, self._give_values_back
        )
        self._states = StateExchange(
            self._parameters, self._engine, self._records, small, self._ahead, holds=resumes
        )
        self._lifetime.before_keeping = lambda in_error: self._seal(takes_buffers=True, in_error=in_error)
        with self._lifetime.guarded():
            self._states.take_over(optimizer, store, where, self.param_groups)
            # For schedulers, which are moved on before the next step.
            self._opt_called = store.committed is not None
        self._lifetime.handles += attach(
            model, self._parameters, self._on_gradient if self._is_alone else None, self._ahead.pieces,
            self._give_values_back, lambda: self._seal(takes_buffers=True), self._note_compiling,
        )  # fmt: skip
        for known in self._parameters:
            known.kept, known.on_change = self._kept, self._ahead.undo
        self._begin()

    @property
    def steps(self) -> int:
        """Steps done, those before a kill included: a loop that goes on leaves out so many batches."""
        return self._states.steps

    @outside_compiled_code
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the gradients as they are now.

        Raises:
            OffloadError: the place of the states failed; the last committed step is intact.
            GradientGoneError: the loop changed a gradient that was not kept.
            UsageError: it is called in a compiled function, where steps of torch's own optimisers have other bits.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.take_scale():
            return loss
        with self._lifetime.guarded():
            self._states.seal()
            self._states.take_back(self.param_groups)
            active = self._ahead.gather()
            options = self._options()
            self._engine.drain()
            check_untouched(self._parameters)
            is_alike = all(map(same_options, options, self._update.options))
            self._ahead.resolve(is_alike=is_alike, used=self._used)
            wanted = {number for known in active for number in known.pieces}
            self._update.options, self._update.expected = options, None
            late = [number for number in self._expected.order if number in wanted - set(self._ahead.pieces)]
            if not self._is_alone:
                self._engine.settle()
                self._shards.meet()  # all have committed the step before
            self._kept.expect(self._records.gradient_spans(late))
            self._engine.submit(self._shards.own(late))
            self._engine.drain()
            self._shards.share_values(sorted(wanted))
            with self._engine.all_or_nothing():
                self._commit(active, wanted)
        self._lifetime.has_recovered()
        self._expected.learn(active, self._ahead.is_dropped)
        self._activations.step_done()
        if self._watch.step_done() and self._mode == "active":
            self._engine.take_room(self._activations.spare_bytes)
        self._begin()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; with ``set_to_none`` False they become zeros."""
        with self._lifetime.guarded():
            if any(known.has_moved for known in self._parameters):
                self._expected.forbid()
            self._ahead.undo()
            self._ahead.is_dropped = False
            for known in self._parameters:
                if set_to_none or known.parameter.grad is None:
                    known.parameter.grad = None
                    known.drop()
                else:
                    known.parameter.grad.zero_()

    @property
    def state(self) -> StateTable:
        """The states, by parameter; the tensors lie on the disk. What the loop changes in them counts, as in memory."""
        with self._lifetime.guarded():
            return self._states.given()

    @state.setter
    def state(self, table: StateTable) -> None:
        """Take other states: none are as those of a new optimiser."""
        if self._is_fixed:  # torch's own beginning sets it too
            self._states.handed.replace(table)

    def state_dict(self) -> dict[str, Any]:
        """Return options and states in the form of the user's own optimiser; the tensors lie on the disk.

        Parameters in half precision have their master weights as a further state, ``master``.
        """
        with self._lifetime.guarded(), self._states.packing():
            return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the states of this or of the user's own optimiser; they are written to their place."""
        with self._lifetime.guarded():
            self._ahead.undo()
            states = self.load_options(state_dict)
            self._states.handed.check_before(states)
            self._states.handed.drop()
            self._states.load(states, self.param_groups)
            self._begin()

    def find_not_finite(self) -> tuple[int, str] | None:
        """Return a parameter's number and the name of its state that is not finite; None where all are.

        It reads the states piece by piece.
        """
        with self._lifetime.guarded():
            return self._states.find_not_finite()

    def report(self) -> dict[str, Any]:
        """Return bytes, seconds and numbers of pieces and steps so far; ``activations`` has those of the layers."""
        ahead = self._ahead
        counts = {
            "steps": self.steps,
            "taken_steps": self._taken_steps,
            "redone_steps": ahead.redone_steps,
            "restored_steps": ahead.restored_steps,
            "speculated_pieces": ahead.all_pieces,
            **asdict(self._engine.traffic),
        }
        return {"mode": self._mode, "where": self._where, **counts, "activations": self._activations.report()}

    def __enter__(self) -> OffloadedOptimizer:
        """Return itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; after an error the files stay for a next process."""
        self._close(remove=error is None, in_error=error is not None)

    def close(self, *, remove: bool = True) -> None:
        """Finish the last commit and end; the files are removed, or kept for a next process.

        A step that was computed ahead and not taken leaves the values before it.
        """
        self._close(remove=remove, in_error=False)

    def _close(self, *, remove: bool, in_error: bool) -> None:
        self._activations.close()
        if self._lifetime.is_sound:
            try:
                self._give_values_back()
            except HapiError as error:
                log.warning("%s", error)
        self._lifetime.close(remove=remove, in_error=in_error)

    def _give_values_back(self) -> None:
        with self._lifetime.guarded():
            self._ahead.put_aside()

    def _note_compiling(self) -> None:
        """Compute nothing ahead where compiled code uses values between backward and step, which no hook sees."""
        if self._ahead.pieces:
            self._give_values_back()
            self._ahead.forbid()

    def _seal(self, *, takes_buffers: bool = False, in_error: bool = False) -> None:
        """Commit the step before, if that was not done."""
        if self._states.is_open and self._lifetime.is_usable:
            with self._lifetime.guarded():
                if self._states.seal(takes_buffers=takes_buffers, in_error=in_error):
                    self._expect_pieces()

    def _on_gradient(self, known: TrainedParameter) -> None:
        self._seal()
        with self._lifetime.guarded():
            gradient = known.own_gradient()
            if gradient is None:
                return
            check_gradient(known.name, known.parameter, gradient)
            if known.find_change():
                self._expected.forbid()
            has_graph = gradient.requires_grad and not known.is_aside  # derivatives of it may be asked for
            if known.is_loops_own or has_graph:
                if known.is_submitted:
                    self._ahead.undo()
                known.drop()
                return
            if known.is_aside:
                is_own = is_alone(gradient)  # before there is a further view of it
                known.put_back()
                known.accumulate(gradient.detach(), is_own=is_own)
            elif not known.has_gradient or gradient is not known.offloaded:
                if known.has_moved:
                    self._expected.forbid()
                known.take(gradient)
                known.parameter.grad = known.offloaded
            del gradient
            if known.is_spent:
                return
            known.watch.note_gradient()
            known.note_stream()
            known.passes += 1
            left = self._expected.passes - known.passes
            known.is_added_to = left > 1
            if self._expected.norms and left <= 0:
                known.compute_norm()
            if known.passes == 1 and self._expected.is_on and not self._ahead.pieces:
                self._expected.check_frozen(self._parameters)
            if self._expected.is_on and not left:
                self._speculate(known)
            else:
                known.put_away()
            if self._expected.note_gradient(known.number) and left > 0:
                order = self._expected.arrivals
                self._kept.expect(span for number in order for span in self._parameters[number].spans())

    def _speculate(self, known: TrainedParameter) -> None:
        """Hand over the pieces that are complete with this gradient."""
        if known.number not in self._expected.active or is_shared(known.parameter, known.watch.views):
            known.put_away()
            return
        if not self._ahead.pieces:
            if self._states.handed.is_changed():
                known.put_away()
                return
            self._update.options = self._options()
            self._update.expected = self._expected.changes
        ready = self._pending.arrive(known)
        for number in ready:
            self._ahead.add(number, self._used(number), is_lent=not self._expected.keeps)
        self._expected.note_arrival(ready)
        self._engine.submit(ready)
        self._engine.help()
        if not known.keeps_in_memory:  # those of passes before are read ahead beside
            room = PENDING_BYTES if self._expected.passes <= 1 else PENDING_BYTES // 2
            self._engine.wait_for_room(lambda: self._pending.nbytes <= room)

    # -- the engine's thread ---------------------------------------------------------------------------------

    def _reads_master(self, piece: StatePiece) -> bool:
        return piece.number in self._ahead.redone or any(
            not known.is_master for known in self._used(piece.number)
        )

    def _compute(self, piece: StatePiece, loaded: Loaded) -> None:
        used = [known for known in self._used(piece.number) if known.has_gradient]
        copying = nullcontext() if self._staging is None else self._staging.copying()
        with copying, torch._C.DisableTorchFunctionSubclass():
            self._update(piece, loaded)
            for known in used:
                known.pieces_left -= 1
                if known.pieces_left:
                    continue
                self._pending.leave(known)
                if self._expected.keeps:
                    known.put_away()
                elif not known.keeps_in_memory:
                    known.consume()

    def _begin(self) -> None:
        """Prepare for the next step's gradients."""
        self._ahead.begin()
        self._pending.begin(self._expected.active)
        for known in self._parameters:
            known.is_submitted = known.takes_memory = known.is_added_to = known.is_loops_own = False
            known.norm_wanted = known.was_touched = False
            known.is_carried = known.has_gradient
            known.pieces_left = len(known.pieces)
            known.passes = 0
        self._expect_pieces()

    def _expect_pieces(self) -> None:
        order = self._expected.order if self._expected.is_on else ()
        self._engine.expect(number for number in order if self._pending.is_awaited(number))

    def _options(self) -> list[dict[str, Any]]:
        self.check_options()
        return [options_of(group) for group in self.param_groups]

    def _used(self, number: int) -> list[TrainedParameter]:
        """Return a piece's parameters."""
        return [self._parameters[segment.parameter] for segment in self._layout.pieces[number].segments]

    def _commit(self, active: Sequence[TrainedParameter], wanted: set[int]) -> None:
        for known in active:
            known.steps += 1
            known.settle()
            if known.is_loops_own:
                known.drop()
        self._states.steps += 1
        self._taken_steps += 1
        self._states.finish(self._shards.own(wanted), self.param_groups)

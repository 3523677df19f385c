"""Ends of an offloaded training: those in order remove its files, others leave the last commit."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hapi.errors import HapiError, UsageError
from hapi.offload.engine import Engine
from hapi.offload.failures import failure
from hapi.offload.loop.kept_gradients import KeptGradients
from hapi.offload.states.base import StateStore
from hapi.process.endings import at_child_end, process_ending

log = logging.getLogger("hapi.offload")


class Lifetime:
    """Closes engine and store once: when asked, or at the process's end."""

    def __init__(
        self, engine: Engine, kept: KeptGradients, store: StateStore, where: str, *, resumes: bool
    ) -> None:
        """``where`` names the store for people; ``resumes`` is whether a next run goes on from it."""
        self._resumes = resumes
        self._engine, self._kept, self._store, self._where = engine, kept, store, where
        self.handles: list[Any] = []
        """Hooks to be removed at the end."""
        self.before_keeping: Callable[[bool], None] = lambda in_error: None
        """Called before the files are closed for a next process, with whether the process ends in an error."""
        self._closed = self._failed = False
        self._lock = threading.RLock()  # backward has a thread for each device
        self._process = os.getpid()
        self._ending = process_ending() if resumes else None
        atexit.register(self._at_exit)
        self._forget_child = at_child_end(self._end)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Use the states in the block: a disk's error becomes OffloadError, and any error keeps the files."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():  # this package's own reads are not watched
            if self._closed:
                raise UsageError("this offloaded optimizer is closed")
            if not self._is_own:
                raise UsageError(
                    "this offloaded optimizer belongs to the process that made it: a forked one has neither its "
                    "threads nor its files"
                )
            try:
                yield
            except OSError as error:
                self._failed = True
                raise failure(error, self._where, self._store, self._resumes) from error
            except BaseException:
                self._failed = True
                raise

    @property
    def _is_own(self) -> bool:
        return os.getpid() == self._process

    @property
    def is_usable(self) -> bool:
        """Whether it is open, in the process that made it."""
        return self._is_own and not self._closed

    @property
    def is_sound(self) -> bool:
        """Whether it is usable, and nothing went wrong."""
        return self.is_usable and not self._failed

    def has_recovered(self) -> None:
        """Note a whole step: what went wrong before it, and was caught, leaves nothing to go on from."""
        self._failed = False

    def close(self, *, remove: bool, in_error: bool = False) -> None:
        """Finish the last commit, end the threads, and remove the files unless a next run goes on from a failure.

        A forked process leaves all to its parent. ``in_error`` is whether an error ends the training.
        """
        if not self.is_usable:
            return
        if self.is_sound and not remove:
            try:
                self.before_keeping(in_error)
            except HapiError as error:
                log.warning("%s", error)
        self._closed = True
        atexit.unregister(self._at_exit)
        self._forget_child()
        for handle in self.handles:
            handle.remove()
        if not self._failed:
            try:
                self._engine.settle()
            except OSError as error:
                self._failed = True
                log.warning("%s", failure(error, self._where, self._store, self._resumes))
        self._engine.close()
        self._kept.close()
        self._store.close(remove=remove and not (self._failed and self._resumes))

    def _at_exit(self) -> None:
        if self._is_own:
            self._end(self._ending is None or self._ending.is_in_order())

    def _end(self, is_in_order: bool) -> None:
        """Close at the process's end; what is left is for the next run unless this one ended in order."""
        keeps = self._ending is not None and not is_in_order
        self.close(remove=not keeps, in_error=keeps)
        committed = self._store.committed
        if keeps and committed is not None:
            log.warning("%s keeps step %d, from which the next run goes on", self._where, committed.steps)

"""Jobs of one process that take one backbone, for ``python -m benchmarks residency``.

It says ``ready`` once the layers are there without weights. For each line on its standard input the next job takes its
weights in a thread of its own, and reads every byte of them; a line of JSON tells what that took. It ends with its
input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash

from hapi.allocator import give_back_freed_memory
from hapi.client.frozen_weights import FrozenWeights
from hapi.models.shared.weights import shared_weights
from hapi.models.tensors import tensor_bytes
from hapi.repository.opening import open_model
from hapi.store.open import open_store


class Job:
    """One job's layers, first without weights."""

    def __init__(self, store: str, name: str, freeze: int) -> None:
        """Open model ``name`` of ``store``, whose first ``freeze`` layers are frozen."""
        self._stored = open_model(open_store(store), name)
        self._model = self._stored.layered()
        self._freeze = freeze
        self._read_bytes = 0

    def take(self) -> dict[str, Any]:
        """Take the weights, then read them; the seconds of the taking, and the bytes that were read for it."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        shared, names = shared_weights(torch.device("cpu")), self._model.tensor_names(0, self._freeze)
        if shared is None:
            for name, tensor in self._read(names).items():
                self._model.assign(name, tensor)
        else:
            FrozenWeights(self._model, self._model, self._freeze, shared, self._read).bring(0)
        took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.thread_time() - cpu_began}
        give_back_freed_memory()
        tensors = [self._model.tensors.get(name) for name in names]
        content = xxhash.xxh3_64()
        for tensor in tensors:
            content.update(tensor_bytes(tensor))
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return {**took, "read_bytes": self._read_bytes, "nbytes": nbytes, "content": content.hexdigest()}

    def _read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = dict(self._stored.read(names))
        self._read_bytes += sum(tensor.nbytes for tensor in found.values())
        return found


def main(store: str, name: str, freeze: str, count: str) -> None:
    """See the module; ``count`` jobs take layers 1 to ``freeze``."""
    torch.set_num_threads(1)
    jobs = [Job(store, name, int(freeze)) for _ in range(int(count))]
    print("ready", flush=True)
    for job, _ in zip(jobs, sys.stdin, strict=False):
        with ThreadPoolExecutor(1) as threads:
            print(json.dumps(threads.submit(job.take).result()), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

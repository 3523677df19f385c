"""The cost of a thousand layers' identity: a hash for each configuration and each leaf layer, and nothing else."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import pytest

from hapi.models.graph import architecture
from hapi.models.graph.architecture import ArchitectureGraph


def graph_of(count: int, inputs: int) -> ArchitectureGraph:
    """A chain of leaf layers with configurations of their own, each of which also reads earlier ones."""
    nodes = [(n, *range(n - 1, max(-1, n - 1 - inputs), -1)) for n in range(count)]
    return ArchitectureGraph(tuple(f'["call_module", "Linear {n}"]' for n in range(count)), tuple(nodes))


class Counted:
    """Counts what is hashed."""

    def __init__(self, counts: dict[str, int], state: Any = None, **how: Any) -> None:
        self._state = hashlib.blake2b(**how) if state is None else state
        self._counts = counts

    def copy(self) -> Counted:
        return Counted(self._counts, self._state.copy())

    def update(self, data: bytes) -> None:
        self._counts["bytes"] += len(data)
        self._state.update(data)

    def digest(self) -> bytes:
        self._counts["hashes"] += 1
        return bytes(self._state.digest())


@pytest.mark.parametrize("inputs", [1, 2, 5])
def test_work_is_proportional_to_layers_and_connections(monkeypatch: pytest.MonkeyPatch, inputs: int) -> None:
    found = []
    for count in (1000, 2000):
        graph, counts = graph_of(count, inputs), {"hashes": 0, "bytes": 0}
        counted = partial(Counted, counts, digest_size=16)
        monkeypatch.setattr(architecture, "_fresh", lambda kind, counted=counted: counted(person=kind))
        identities = graph.structure()
        edges = sum(len(node) - 1 for node in graph.nodes)
        configs = sum(map(len, graph.configs))
        assert counts == {"hashes": 2 * count, "bytes": configs + 16 * (count + edges)}
        found.append(identities)
    assert found[1][:1000] == found[0] and len(set(found[1])) == 2000


@pytest.mark.parametrize("inputs", [0, 1, 2, 5])
def test_the_definition(inputs: int) -> None:
    """Stored models have these identities: they must never change."""

    def hashed(kind: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, person=kind).digest()

    graph = graph_of(50, inputs)
    digests = [[f"{n:032x}"] * (n % 3) for n in range(50)]
    for kind, got in ((b"hapi structure", graph.structure()), (b"hapi content", graph.content(digests))):
        expected: list[bytes] = []
        for node, held in zip(graph.nodes, digests, strict=True):
            own = hashed(kind, graph.configs[node[0]].encode())
            if kind == b"hapi content":
                texts = ", ".join(f'"{digest}"' for digest in held)
                own += hashed(kind, f"[{texts}]".encode())
            expected.append(hashed(kind, own + b"".join(expected[place] for place in node[1:])))
        assert got == expected

"""Jobs whose models share a backbone: the server's resident weights grow by what is not shared, and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.front_tools import contents, tuned
from support.http_tools import SIDE, Known, make_store, received

from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.prefix import store_reference, zoo_reference
from hapi.repository.push import push
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.wire import messages

SPEC = ModelSpec(architecture="mobilenet_v3_small", weights="random:8", input_shape=(3, SIDE, SIDE))
BACKBONE = 9
"""Layers that all jobs have in common."""
IDS = [4, 2, 30]


class Jobs:
    """A served store with models tuned from one backbone."""

    def __init__(self, folder: Path) -> None:
        self.known = Known(make_store(folder))
        self.models: dict[str, LayeredModel] = {"base": build(SPEC)}
        self.models |= {"zoo": self.models["base"], "left": tuned(self.models["base"], BACKBONE)}
        self.models["right"] = tuned(self.models["left"], BACKBONE + 1)
        self.pushed = {
            n: push(self.known.store, n, m, SPEC).model for n, m in self.models.items() if n != "zoo"
        }

    def extract(self, service: Service, name: str, split: int) -> bytes:
        """The features of some samples, as the server answers."""
        model = self.models[name]
        if name == "zoo":
            reference = zoo_reference(SPEC, model, split)
        else:
            reference = store_reference(self.pushed[name], model, split)
        document: dict[str, Any] = self.known.extract(
            IDS, split, model=reference.to_json(), split_name=model.layers[split - 1].name
        )
        body = json.dumps(document).encode()
        status, _, buffers = loopback_handler(service)("POST", messages.EXTRACT_PATH, body)
        answer = b"".join(buffers)
        assert status == 200, answer
        return received(answer, 2)[1][0].tobytes()

    def contents(self, name: str, split: int) -> dict[str, int]:
        return contents(self.models[name], split)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("shared-backbone"))


def service_of(jobs: Jobs, **settings: Any) -> Service:
    """A service that shares weights, and no features: a model whose features are at hand would not be loaded."""
    options = ServerSettings(store=jobs.known.store.url, device="cpu", share_memory=0, **settings)
    return Service(options, open_store(jobs.known.store.url))


@pytest.mark.slow
def test_resident_weights_grow_by_the_trained_part_only(jobs: Jobs) -> None:
    service, alone = service_of(jobs), service_of(jobs, model_reuse=False)
    try:
        splits = {"left": BACKBONE, "right": BACKBONE, "base": BACKBONE - 2, "zoo": BACKBONE}
        backbone = jobs.contents("left", BACKBONE)
        for name, split in splits.items():  # frozen layers that nobody trained: nothing is added
            assert jobs.extract(service, name, split) == jobs.extract(alone, name, split)
            assert service.workers.all[0].cache.resident_bytes == sum(backbone.values())
        held = backbone
        for name in ("left", "right"):  # a split past what one of the jobs trained: its own layers are added
            before = service.workers.all[0].cache.resident_bytes
            assert jobs.extract(service, name, BACKBONE + 3) == jobs.extract(alone, name, BACKBONE + 3)
            own = jobs.contents(name, BACKBONE + 3)
            added = {key: n for key, n in own.items() if key not in held}
            assert service.workers.all[0].cache.resident_bytes - before == sum(added.values())
            assert 0 < sum(added.values()) < sum(own.values())
            held = held | own
        trained = jobs.models["right"].layers[BACKBONE + 1 : BACKBONE + 3]
        assert sum(added.values()) <= sum(layer.parameter_bytes for layer in trained)
        assert service.workers.all[0].cache.misses == len(splits) + 2
        assert service.workers.all[0].cache.drop_idle() == sum(held.values())
    finally:
        service.close()
        alone.close()

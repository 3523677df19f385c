"""Hapi: near-data transfer learning over an object store.

    import hapi

    hapi.pack("~/flowers", "store/flowers")
    with hapi.Session.open(hapi.SessionSettings(store="store", model="resnet18")) as session:
        for features, labels in session.epoch(0):
            ...

The names in ``__all__`` are what programs may rely on; ``docs/api.md`` describes them. Each is imported when it is
first used, so that ``import hapi`` itself is light.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # as few imports as can be come before a command's first handler of Ctrl-C
    from typing import Any

    from hapi import errors
    from hapi.allocator import keep_freed_memory
    from hapi.api.contents import list_datasets, verify
    from hapi.api.datasets import index, pack
    from hapi.api.model_files import load_model
    from hapi.api.models import list_models, open_model, push
    from hapi.client.session import Session
    from hapi.client.settings import SessionSettings
    from hapi.data.mount import DatasetReader, open_dataset
    from hapi.errors import HapiError
    from hapi.ingest.in_place.indexer import IndexOptions
    from hapi.ingest.pack_options import PackOptions
    from hapi.offload.training import offload_training
    from hapi.profiler.profile import Job, Profile
    from hapi.profiler.strategies import plan
    from hapi.server.lifecycle.run import run_server
    from hapi.server.settings import ServerSettings
    from hapi.store.open import open_store
    from hapi.train.settings import TrainSettings
    from hapi.train.trainer import Trainer

__version__ = "0.1.0"

__all__ = (
    "DatasetReader",
    "HapiError",
    "IndexOptions",
    "Job",
    "PackOptions",
    "Profile",
    "ServerSettings",
    "Session",
    "SessionSettings",
    "TrainSettings",
    "Trainer",
    "__version__",
    "errors",
    "index",
    "keep_freed_memory",
    "list_datasets",
    "list_models",
    "load_model",
    "offload_training",
    "open_dataset",
    "open_model",
    "open_store",
    "pack",
    "plan",
    "push",
    "run_server",
    "verify",
)

_MODULES = {
    "Session": "hapi.client.session",
    "SessionSettings": "hapi.client.settings",
    "Trainer": "hapi.train.trainer",
    "TrainSettings": "hapi.train.settings",
    "pack": "hapi.api.datasets",
    "PackOptions": "hapi.ingest.pack_options",
    "index": "hapi.api.datasets",
    "IndexOptions": "hapi.ingest.in_place.indexer",
    "verify": "hapi.api.contents",
    "list_datasets": "hapi.api.contents",
    "open_dataset": "hapi.data.mount",
    "DatasetReader": "hapi.data.mount",
    "push": "hapi.api.models",
    "open_model": "hapi.api.models",
    "list_models": "hapi.api.models",
    "load_model": "hapi.api.model_files",
    "plan": "hapi.profiler.strategies",
    "Profile": "hapi.profiler.profile",
    "Job": "hapi.profiler.profile",
    "run_server": "hapi.server.lifecycle.run",
    "ServerSettings": "hapi.server.settings",
    "open_store": "hapi.store.open",
    "keep_freed_memory": "hapi.allocator",
    "offload_training": "hapi.offload.training",
    "HapiError": "hapi.errors",
    "errors": "hapi.errors",
}
"""Module of each name; ``errors`` is the module itself."""


if not TYPE_CHECKING:  # a type checker would believe that every name is here

    def __getattr__(name: str) -> Any:
        """Import what is used for the first time."""
        if name not in _MODULES:
            raise AttributeError(f"module 'hapi' has no attribute {name!r}; it has: {', '.join(__all__)}")
        import importlib

        module = importlib.import_module(_MODULES[name])
        found = module if _MODULES[name] == f"hapi.{name}" else getattr(module, name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """The public names, and the module's own."""
    return sorted({*__all__, *globals()})

"""Imported last by the process that commands are forked from.

The network that most commands begin with is drawn, traced and digested once, as the tests' own process does; and what
was imported is collected no more: a collection that looks through it would copy its pages in each of the commands.
"""

from __future__ import annotations

import gc

from hapi.models.graph.digest import TensorDigests
from hapi.models.zoo import build
from hapi.models.zoo.build import ModelSpec
from hapi.repository import built, pushed
from hapi.repository.sources import fitting
from support.drawn_once import digested_once, drawn_once, traced_once

build.build_module = built.build_module = drawn_once
build.layers_of = pushed.layers_of = fitting.layers_of = traced_once
TensorDigests.of = digested_once(TensorDigests.of)  # type: ignore[method-assign]
for classes in (None, 10):
    digits = ModelSpec(
        architecture="resnet18", weights="random:0", input_shape=(3, 32, 32), num_classes=classes
    )
    build.build(digits).prefix_digests()
    build.structure(digits)
gc.collect()
gc.freeze()

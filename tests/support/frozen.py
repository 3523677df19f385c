"""Imported last by the process that commands are forked from.

The networks that most commands begin with are drawn, traced and digested once, as the tests' own process does; and what
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
from support.thin_resnet import THIN_LAYERS, THIN_RESNET

build.build_module = built.build_module = drawn_once
build.layers_of = pushed.layers_of = fitting.layers_of = traced_once
TensorDigests.of = digested_once(TensorDigests.of)  # type: ignore[method-assign]
for name, blocks in (("resnet18", ()), (THIN_RESNET, THIN_LAYERS)):
    for classes in (None, 10):
        digits = ModelSpec(
            architecture=name, weights="random:0", input_shape=(3, 32, 32), num_classes=classes, blocks=blocks
        )
        build.build(digits, allow_import=True).prefix_digests()
        build.structure(digits, allow_import=True)
gc.collect()
gc.freeze()

"""Imported last by the process that commands are forked from.

Random weights that most commands begin with are drawn once, as the tests' own process does; and what was imported is
collected no more: a collection that looks through it would copy its pages in each of the commands.
"""

from __future__ import annotations

import gc

from hapi.models.zoo import build
from hapi.models.zoo.architectures import find_architecture
from hapi.repository import built
from support.drawn_once import drawn_once

build.build_module = built.build_module = drawn_once
drawn_once(find_architecture("resnet18", (3, 32, 32)), 0)
gc.collect()
gc.freeze()

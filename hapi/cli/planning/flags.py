"""Flags of ``hapi plan``: what is planned, measurements to plan from, and what is written."""

from __future__ import annotations

import argparse
from typing import get_args

from hapi import units
from hapi.cli.planning import offload, reuse
from hapi.cli.shared.numbers import Number, count, rate, real, size
from hapi.config.fields import flag_of
from hapi.profiler.profile import Job
from hapi.profiler.strategies import PLANNERS
from hapi.wire.references import MAX_IMAGE_SIDE, Precision

USUAL_JOB = Job()
BANDWIDTH = "1Gbps"
LOOPBACK = "20Gbps"
"""Bandwidth inside one machine; what frames cost its processors counts by itself."""
STORED = "110kB"


def _stored_bytes(text: str) -> int:
    """Bytes of a stored JPEG; 0 for samples stored as tensors."""
    if text == "tensor":
        return 0
    found = units.parse_bytes(text)
    if found < 1:
        raise ValueError(text)
    return found


_STORED_BYTES = Number(_stored_bytes, 0, 1 << 40, "1 to 1TiB, or 'tensor'")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _of_the_model(parser)
    _of_the_job(parser)
    _of_the_measurements(parser)
    offload.configure(parser)
    reuse.configure(parser)
    parser.add_argument(
        "--figure", metavar="FILE", help="draw layers, splits and what is kept (.png, .svg or .pdf)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def _of_the_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a torchvision name, transformer (vit_b_16), timm:NAME or package.module:factory; "
        "may be left out with --profile",
    )
    parser.add_argument("--model", dest="named", metavar="MODEL", help="the same, as hapi-train has it")
    parser.add_argument(
        "--input-size",
        type=count(1, MAX_IMAGE_SIDE),
        default=224,
        metavar="N",
        help="side of the square RGB input (default 224)",
    )
    parser.add_argument("--blocks", metavar="A,B,...", help="where layers end, as for hapi layers")
    parser.add_argument(
        "--frozen-precision",
        choices=get_args(Precision),
        help="type of the frozen layers' results and of features on the wire (default fp32, or the profile's)",
    )
    parser.add_argument("--freeze", metavar="N|NAME", help="last frozen layer (default: as hapi-train)")


def _of_the_job(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("bs", "training batch"),
        ("samples", "samples of an epoch"),
        ("epochs", "epochs"),
        ("request_size", "as hapi-train"),
        ("micro_batch", "as hapi-train"),
    ):
        usual = getattr(USUAL_JOB, name)
        parser.add_argument(
            *((flag_of(name), "--batch-size") if name == "bs" else (flag_of(name),)),
            type=count(1, 1 << 40),
            metavar="N",
            help=f"{what} (default {usual}, or the profile's run's)",
        )
    parser.add_argument(
        "--bandwidth",
        type=rate(),
        metavar="RATE",
        help=f"from server to client (default {BANDWIDTH}, {LOOPBACK} with --one-machine, or the profile's)",
    )
    parser.add_argument(
        "--one-machine",
        action="store_true",
        help="server and trainer share one machine's processors, and the store is there, as with hapi-train --store",
    )
    parser.add_argument(
        "--server-speed",
        type=real(1e-6, 1e6, suffix="x"),
        metavar="Kx",
        help="how many times as fast as this machine, or as the profile's, the server is (default 1x)",
    )
    parser.add_argument(
        "--stored-bytes",
        type=_STORED_BYTES,
        metavar="SIZE",
        help=f"a stored JPEG (default {STORED}, or the profile's), or 'tensor' for float32 tensors",
    )
    parser.add_argument(
        "--memory",
        type=size(1),
        metavar="SIZE",
        help="memory that the client may use (default: no bound, or the profile's run's)",
    )
    parser.add_argument(
        "--strategy", default="auto", metavar="NAME", help=f"one of {', '.join(PLANNERS)} (default auto)"
    )


def _of_the_measurements(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="device to measure: auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="compute from a saved profile, or that in a report of hapi-train; nothing is measured",
    )
    parser.add_argument(
        "--remeasure", action="store_true", help="repeat the kept measurements of this machine and model"
    )
    parser.add_argument("--save-profile", metavar="FILE", help="keep the profile as JSON")

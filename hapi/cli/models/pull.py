"""``hapi pull STORE/NAME --output F``: a pushed model as safetensors, whole or in part."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hapi.cli.models.origin import configure_allowed
from hapi.cli.shared.common import EXIT_OK, say
from hapi.cli.shared.numbers import size
from hapi.cli.shared.progress import TransferBar
from hapi.errors import UsageError
from hapi.factories import check_allowed, search_here
from hapi.models.zoo.names import FILE_SUFFIXES
from hapi.paths import check_outputs, user_path
from hapi.store.open import open_store, split_model_address
from hapi.text import counted
from hapi.units import format_bytes

_FILE = ".safetensors"
_LAYERS = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9}))?")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", metavar="STORE/NAME", help="the model: STORE/NAME, or with @VERSION, @TAG or @DIGEST"
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help="the file to write (.safetensors), or a folder, which is filled as Hugging Face's libraries do",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--layers", metavar="A..B", help="only the tensors of layers A to B, counted from 1")
    part.add_argument("--tensors", metavar="GLOB", help="only tensors whose names match, such as 'encoder.*'")
    parser.add_argument(
        "--shard-size",
        type=size(1 << 20, 1 << 50),
        metavar="SIZE",
        help="largest file in a folder (default 5GB); a larger tensor is alone in one",
    )
    configure_allowed(parser, "a factory that the model may name, whose network a whole pull makes")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Write the files, and say which."""
    url, reference = split_model_address(args.model)
    if not args.output:
        raise UsageError("--output is empty; give a file that ends with .safetensors, or a folder")
    single = args.output.endswith(_FILE)
    if single and args.shard_size is not None:
        raise UsageError(f"--shard-size: --output {args.output} is one file; give a folder")
    if not single and args.output.endswith(FILE_SUFFIXES):
        raise UsageError(
            f"--output {args.output}: pulls are .safetensors files, or folders; hapi export writes others from them"
        )
    bounds = _bounds(args.layers)
    if single:
        check_outputs((("--output", args.output),))
    if args.allow_model:
        search_here()
    from hapi.repository.opening import open_model  # brings torch, after what can be told without
    from hapi.repository.pulling.files import SHARD_BYTES, write
    from hapi.repository.pulling.selection import layers, matching, whole

    stored = open_model(open_store(url), reference)
    if bounds is not None:
        content = layers(stored, *bounds)
    elif args.tensors is not None:
        content = matching(stored, args.tensors)
    else:
        if stored.manifest.spec is not None:
            check_allowed(stored.spec.architecture, args.allow_model, stored.name)
        content = whole(stored, args.allow_model)
    output = user_path(args.output, "--output")
    with TransferBar(f"pulling {stored.name}", args.quiet, by_bytes=True) as bar:
        bar.start(sum(tensor.nbytes for tensor in content.tensors))
        limit = args.shard_size or SHARD_BYTES
        pulled = write(stored, content, output, limit, lambda nbytes: bar.advance(0, nbytes))
    what = f"{counted(len(content.tensors), 'tensor')}, {format_bytes(pulled.nbytes)}"
    kept = f", {format_bytes(pulled.kept)} of them kept from an earlier pull" if pulled.kept else ""
    files = "" if len(pulled.files) == 1 else f" as {len(pulled.files)} files"
    place = pulled.files[0] if len(pulled.files) == 1 else Path(args.output)
    say(f"{place}: {what} of {stored.reference!r} from {url}{files}{kept}")
    return EXIT_OK


def _bounds(layers: str | None) -> tuple[int, int] | None:
    if layers is None:
        return None
    found = _LAYERS.fullmatch(layers)
    if found is None:
        raise UsageError(f"--layers {layers[:40]}: expected A..B, such as 1..8, or one number")
    return int(found[1]), int(found[2] or found[1])

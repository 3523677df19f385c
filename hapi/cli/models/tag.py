"""``hapi tag STORE/NAME TAG``: a name for a version of a pushed model; versions and tags listed."""

from __future__ import annotations

import argparse
from contextlib import suppress

from hapi.cli.shared.common import EXIT_OK, say
from hapi.cli.shared.writing import lasting_store
from hapi.errors import BadRequestError, DataError, UsageError
from hapi.repository.versions import (
    add_tag,
    list_tags,
    list_versions,
    parse_reference,
    resolve,
    unknown_model,
)
from hapi.store.open import open_store, split_model_address
from hapi.text import printable
from hapi.wire.references import check_tag


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        metavar="STORE/NAME[@REF]",
        help="the version: @VERSION, @TAG or @DIGEST; the latest one without any",
    )
    parser.add_argument(
        "tag", metavar="TAG", nargs="?", help="its new name; without one, list versions and tags"
    )


def run(args: argparse.Namespace) -> int:
    """Tag a version, or list."""
    url, reference = split_model_address(args.model)
    address = parse_reference(reference)
    if args.tag is None:
        store = open_store(url)
        one = None if address.wanted is None else resolve(store, address)
        versions = list_versions(store, address.name) if one is None else [one]
        if not versions:
            raise unknown_model(store, address.name)
        tags = list_tags(store, address.name).values()
        for version in versions:
            names = ", ".join(printable(tag.name) for tag in tags if tag.version == version)
            say(f"{printable(address.name)}@{version}" + (f"  {names}" if names else ""))
        return EXIT_OK
    try:
        check_tag(args.tag, "TAG")
    except BadRequestError as error:
        raise UsageError(str(error)) from None
    store = lasting_store(url)
    version = resolve(store, address)
    before = None
    with suppress(DataError):  # a damaged tag says so where it is used, and is named anew by this
        before = list_tags(store, address.name).get(args.tag)
    add_tag(store, address.name, args.tag, version)
    moved = f"; it was {before.version}" if before is not None and before.version != version else ""
    say(f"{printable(address.name)}@{printable(args.tag)} is version {version}{moved}")
    return EXIT_OK

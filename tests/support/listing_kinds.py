"""More of what a hostile store may do: with listings, and with what is written into it."""

from __future__ import annotations

from support.hostile_store import Asked, HostileStore, Kind, content, listing_page
from support.store_kinds import ESCAPES, MISDEEDS, Misdeed, misdeed, never_answers

# -- listings --------------------------------------------------------------------------------------------

LISTS = ("ls", "verify", "serve")


@misdeed("listing never ends: the same page again", "ls", "verify", "pack")
def same_page(store: HostileStore, asked: Asked) -> bool:
    if not asked.lists:
        return False
    items = [content(f"x/datasets/small/{number:05d}", 1) for number in range(1000)]
    asked.answer(200, listing_page(items, "again"))
    return True


@misdeed("listing never ends: new names", "ls", "verify", "pack")
def ever_new_names(store: HostileStore, asked: Asked) -> bool:
    if not asked.lists:
        return False
    first = store.requests * 1000
    items = [content(f"x/datasets/n{number:012d}/manifest.json", 1) for number in range(first, first + 1000)]
    asked.answer(200, listing_page(items, f"{first}"))
    return True


@misdeed("listing is a bomb", *LISTS, "pack")
def xml_bomb(store: HostileStore, asked: Asked) -> bool:
    if not asked.lists:
        return False
    steps = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))
    bomb = f'<!DOCTYPE b [<!ENTITY a0 "ha">{steps}]>'
    item = content("x/datasets/BOMB/manifest.json", 1).replace("BOMB", "&a9;")
    asked.answer(200, listing_page([item], head=bomb))
    return True


@misdeed("listing is nested a hundred thousand deep", "ls")
def nested_xml(store: HostileStore, asked: Asked) -> bool:
    if not asked.lists:
        return False
    asked.answer(200, listing_page(["<a>" * 100_000 + "</a>" * 100_000]))
    return True


@misdeed("listing is a web page", "ls")
def web_page(store: HostileStore, asked: Asked) -> bool:
    if not asked.lists:
        return False
    asked.answer(200, f"<html><body>Log in{ESCAPES}</body></html>".encode(), Content_Type="text/html")
    return True


NAMES = (*LISTS, "pack")


def _with_name(name: str) -> Kind:
    """Listings that name one more object."""

    def kind(store: HostileStore, asked: Asked) -> bool:
        if not asked.lists:
            return False
        page, item = store.listing(asked), content(name, 1).encode("utf-8", "surrogatepass")
        asked.answer(200, page.replace(b"<Contents>", item + b"<Contents>", 1))
        return True

    return kind


for _name, _stops in (
    ("x/datasets/../../etc/passwd", NAMES),
    ("x/datasets/a\x1b[31mb/manifest.json", NAMES),
    ("x/datasets/nul\x00/manifest.json", NAMES),
    ("x/datasets/\ud800/manifest.json", NAMES),
    ("x/datasets/dot/./manifest.json", NAMES),
    ("x/datasets//manifest.json", NAMES),
    ("x/datasets/small/back\\slash", ("verify",)),
    ("x/datasets/small/.DS_Store", ("verify",)),
    ("x/datasets/" + "n" * 5000 + "/manifest.json", ()),
    ("outside/of/the/prefix", ()),
    ("/", ("verify",)),
    ("", ("verify",)),
):
    MISDEEDS.append(Misdeed(f"listing names {_name[:28]!a}", _with_name(_name), _stops))


# -- writing ---------------------------------------------------------------------------------------------


@misdeed("puts nothing and says it did", "pack")
def forgets(store: HostileStore, asked: Asked) -> bool:
    if not asked.writes:
        return False
    asked.answer(200, ETag='"1"')
    return True


@misdeed("puts shards only", "pack")
def forgets_manifests(store: HostileStore, asked: Asked) -> bool:
    return asked.about("manifest.json") and forgets(store, asked)


@misdeed("puts manifests only", "pack")
def forgets_shards(store: HostileStore, asked: Asked) -> bool:
    return asked.about("shard-") and forgets(store, asked)


@misdeed("puts half", "pack")
def puts_half(store: HostileStore, asked: Asked) -> bool:
    if not asked.writes or not asked.about(".bin"):
        return False
    store.objects[asked.key] = asked.body[: len(asked.body) // 2]
    asked.answer(200, ETag='"1"')
    return True


@misdeed("never creates", "pack")
def never_creates(store: HostileStore, asked: Asked) -> bool:
    if "if-none-match" not in asked.headers:
        return False
    asked.refuse(412, "PreconditionFailed")
    return True


@misdeed("creates what is there already")
def always_creates(store: HostileStore, asked: Asked) -> bool:
    asked.headers.pop("if-none-match", None)
    return False


@misdeed("deletes nothing and refuses", "pack")
def refuses_to_delete(store: HostileStore, asked: Asked) -> bool:
    if not asked.deletes:
        return False
    asked.refuse(403, "AccessDenied")
    return True


@misdeed("is full", "pack")
def full(store: HostileStore, asked: Asked) -> bool:
    if not asked.writes:
        return False
    asked.refuse(507, "InsufficientStorage")
    return True


@misdeed("never answers a put", "pack")
def hangs_on_put(store: HostileStore, asked: Asked) -> bool:
    return asked.writes and never_answers(store, asked)

"""A crawler over all endpoints and their errors, in each role: what a tenant may not see is not there for it."""

from __future__ import annotations

import http.client
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import ServerProcess, server
from support.http_tools import (
    EXTRACT,
    PUSHED_SPEC,
    SAMPLES,
    SPEC,
    SPLIT,
    TENSORS,
    TRANSFORM,
    Answer,
    Known,
    exchange,
    make_store,
    pushed_model,
    resnet,
    until,
)

from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.repository.prefix import store_reference
from hapi.repository.push import push
from hapi.server.http.openapi import operations
from hapi.store.open import open_store
from hapi.wire.warm_up import WARM_PATH

pytestmark = pytest.mark.slow

TENANTS = """
operator: {token: operator-secret}
otherteam: {token: otherteam-secret, datasets: [secretset], models: ["secret*"]}
guest: {token: guest-secret, datasets: [digits, "open*"], models: ["pushed", "open*"]}
blind: {token: blind-secret, datasets: [], models: [], status: no, metrics: no}
gone: {token: gone-secret, expires: 2020-01-01T00:00:00Z}
"""
ROLES = {
    "operator": {"Authorization": "Bearer operator-secret"},
    "guest": {"Authorization": "Bearer guest-secret"},
    "blind": {"Authorization": "Bearer blind-secret"},
    "expired": {"Authorization": "Bearer gone-secret"},
    "wrong": {"Authorization": "Bearer not-the-secret"},
    "nobody": {},
}
OTHER = {"Authorization": "Bearer otherteam-secret"}
PROVIDER = "http://127.0.0.1:9/provider-of-others"
HIDDEN_DATASETS, HIDDEN_MODELS = ("secretset", "brokenset", "halfset"), ("secretmodel",)
NO_HEX = "0" * 32
OF_REQUESTS = ("/v1/status", "/metrics")


class Bed:
    """A server whose store has what is open, hidden and damaged, and all that is to be kept from a guest."""

    def __init__(self, folder: Path) -> None:
        self.folder, store = make_store(folder), open_store(str(folder))
        options = PackOptions(limit=23, transform=TRANSFORM, shard_bytes=2000)
        pack(open_source("sklearn:digits"), store, "secretset", options)
        (folder / "datasets" / "halfset").mkdir()
        for name in ("brokenset", "openbroken"):
            (folder / "datasets" / name).mkdir()
            (folder / "datasets" / name / "manifest.json").write_text("{}")
        secret = push(store, "secretmodel", resnet(), SPEC).model
        card = {"classes": ["a"], "label_kind": "class", "transform": None, "freeze": 1, "epoch": 1, "metrics": {},
                "dataset": Known(folder, "secretset").dataset.reference.to_json(), "hapi": "0"}  # fmt: skip
        push(store, "openchild", pushed_model(), PUSHED_SPEC, parent="secretmodel@1", card=card)
        (broken := folder / "models" / "openbroken" / "versions").mkdir(parents=True)
        (broken / "00000001.json.gz").write_bytes(b"no gzip")
        self.known, self.hidden = Known(folder), Known(folder, "secretset")
        self.secret = store_reference(secret, resnet(), SPLIT).to_json()
        self.structure = secret.manifest.structure.digest
        self.packs = [key.rsplit("/", 1)[1].partition(".")[0] for key in secret.manifest.packs]
        self.markers = [*HIDDEN_DATASETS, *HIDDEN_MODELS, "otherteam", "provider-of", self.structure, *self.packs,
                        self.secret["digest"], self.hidden.dataset.version, secret.manifest.digest]  # fmt: skip
        self.process: ServerProcess

    def ask(self, role: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return exchange(self.process.port, method, path, body, {**ROLES[role], **headers})

    def bodies(self, path: str) -> Iterator[Any]:
        """Bodies of requests to ``path``: good, for what is hidden, for what is absent, and malformed."""
        known, hidden = self.known, self.hidden
        absent = {"name": "absentset", "version": hidden.dataset.version}
        half = [{"name": name, "version": hidden.dataset.version} for name in HIDDEN_DATASETS[1:]]
        references = [known.dataset.reference.to_json(), hidden.dataset.reference.to_json(), absent, *half]
        models = [known.extract()["model"], self.secret, self.secret | {"name": "absentmodel"}]
        split = {"split": SPLIT, "split_name": known.extract()["split_name"]}
        if path == EXTRACT:
            yield from (known.extract([1], dataset=d, model=m) for d in references for m in models)
            yield {**known.extract([1]), "split": 99}
        if path == SAMPLES:
            yield from ({"dataset": d, "ids": ids} for d in references for ids in ([1], [10**6]))
        if path == TENSORS:
            for name in ("pushed", "secretmodel", "secretmodel@1", "absentmodel", "absentmodel@1"):
                for digest in (known.tensors()["digest"], self.secret["digest"], NO_HEX):
                    yield known.tensors() | {"name": name, "digest": digest}
        if path == WARM_PATH:
            yield from ({"model": m, **split} for m in models)
        yield from (None, b"{", {}, {"dataset": "secretset"}, b"\xff" * 10)

    def requests(self) -> Iterator[tuple[str, str, Any, str]]:
        """Method, path, body and route of all that the crawler asks for; first what tells of the requests before."""
        yield from (("GET", path, None, path) for path in OF_REQUESTS)
        names = ("digits", *HIDDEN_DATASETS, "absentset", "openbroken", "..", "%2e%2e", "a%20b")
        models = (
            "pushed",
            "pushed@7",
            "secretmodel",
            "secretmodel@1",
            "absentmodel",
            "openchild",
            "openbroken",
        )
        for operation in operations():
            fields: dict[str, tuple[str, ...]] = {
                "name": names, "model": models, "pack": (*self.packs, NO_HEX, "x"),
                "digest": (self.structure, NO_HEX, "x"), "seed": ("0", "x"), "count": ("3", "99999"),
            }  # fmt: skip
            paths = [operation.path]
            for field in re.findall(r"\{(\w+)\}", operation.path):
                paths = [p.replace(f"{{{field}}}", value) for p in paths for value in fields[field]]
            for path in paths:
                if operation.method == "post":
                    yield from (("POST", path, body, operation.path) for body in self.bodies(operation.path))
                for method in ("GET", "HEAD", "DELETE", *(() if operation.method == "post" else ("POST",))):
                    yield method, path, None, operation.path
        yield from (
            ("GET", path, None, "") for path in ("/nosuch", "/v1/nosuch", "/v1/datasets/digits/nosuch")
        )


@pytest.fixture(scope="module", params=["", "--tell-store"])
def bed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Bed]:
    """A server at work for another team: it computes, it failed, it found damage, it holds a request."""
    made, tenants = Bed(tmp_path_factory.mktemp("store")), tmp_path_factory.mktemp("etc") / "tenants.yaml"
    tenants.write_text(TENANTS)
    arguments = ("--tenants", str(tenants), "--scrub-rate", "1GiB", "--share-memory", "16MiB", "--cache-dir",
                 str(tmp_path_factory.mktemp("kept")), "--accounts", str(tmp_path_factory.mktemp("accounts")),
                 "--send-timeout", "1h", "--slow-reader-rate", "0", "--providers", PROVIDER,
                 *filter(None, [request.param]))  # fmt: skip
    with server(made.folder, *arguments) as made.process:
        dataset = made.hidden.dataset.reference.to_json()
        for document in (made.hidden.extract([1], model=made.secret), made.hidden.extract([10**6])):
            exchange(made.process.port, "POST", EXTRACT, document, OTHER)
        held = http.client.HTTPConnection("127.0.0.1", made.process.port, timeout=240)
        ids = [n % 23 for n in range(4000)]
        held.request("POST", EXTRACT, json.dumps(made.known.extract(ids, dataset=dataset)).encode(), OTHER)
        until(
            lambda: b'dataset="brokenset"' in made.ask("operator", "GET", "/metrics").body, 60, "found damage"
        )
        yield made
        held.close()


def shown(answer: Answer) -> str:
    return f"{answer.headers}".replace("\\", "") + answer.body.decode("latin-1")


def test_the_operator_sees_all_that_is_to_be_hidden(bed: Bed) -> None:
    status = bed.ask("operator", "GET", "/v1/status").json()
    assert {"otherteam", "guest"} <= {t["name"] for t in status["tenants"]}
    assert status["running"][0]["dataset"] == "secretset" and status["errors"][0]["tenant"] == "otherteam"
    assert [d["name"] for d in bed.ask("operator", "GET", "/v1/datasets").json()["datasets"]] == [
        "digits",
        "secretset",
    ]
    child = bed.ask("operator", "GET", "/v1/models/openchild").json()
    assert child["parent"] == "secretmodel@1" and child["card"]["dataset"]["name"] == "secretset"
    for path in (f"/v1/structures/{bed.structure}", *(f"/v1/packs/{one}" for one in bed.packs)):
        assert bed.ask("operator", "GET", path).status == 200
    text = bed.ask("operator", "GET", "/metrics").body.decode()
    assert 'tenant="otherteam"' in text and 'dataset="brokenset"' in text
    bed.hidden.check_features(
        bed.ask("operator", "POST", EXTRACT, bed.hidden.extract([1], model=bed.secret)).body, [1]
    )


def test_a_guest_sees_what_is_its_own(bed: Bed) -> None:
    assert [d["name"] for d in bed.ask("guest", "GET", "/v1/datasets").json()["datasets"]] == ["digits"]
    models = {m["name"]: m for m in bed.ask("guest", "GET", "/v1/models").json()["models"]}
    assert set(models) == {"pushed", "openbroken", "openchild"} and models["openbroken"]["problem"]
    child = bed.ask("guest", "GET", "/v1/models/openchild").json()
    assert child["parent"] is None and child["card"]["dataset"] is None and child["card"]["epoch"] == 1
    bed.known.check_features(bed.ask("guest", "POST", EXTRACT, bed.known.extract()).body, [3, 39, 0, 17])
    assert bed.ask("guest", "POST", TENSORS, bed.known.tensors()).status == 200
    own = bed.ask("guest", "GET", f"/v1/structures/{child['structure']}")
    assert own.status == 200 and own.json()
    bed.ask("guest", "POST", SAMPLES, bed.known.samples([10**6]))
    status = bed.ask("guest", "GET", "/v1/status").json()
    assert [t["name"] for t in status["tenants"]] == ["guest"] and status["tenants_in_all"] == 1
    assert status["running"] == [] and {e["tenant"] for e in status["errors"]} == {"guest"}
    text = bed.ask("guest", "GET", "/metrics").body.decode()
    assert 'hapi_tenant_served_total{tenant="guest"}' in text and "hapi_requests_total{" in text


def test_endpoints_that_are_not_given_are_not_there(bed: Bed) -> None:
    absent = bed.ask("blind", "GET", "/v1/nosuch")
    for path in OF_REQUESTS:
        answer = bed.ask("blind", "GET", path)
        assert (answer.status, answer.body) == (absent.status, absent.body) and answer.status == 404
    assert bed.ask("blind", "GET", "/v1/datasets").json() == {"datasets": []}
    assert bed.ask("blind", "GET", "/v1/models").json() == {"models": []}


def telling(headers: dict[str, str]) -> list[tuple[str, str]]:
    """Headers without those that differ from answer to answer, and the length, which is that of the body."""
    others = ("date", "x-request-id", "content-length")
    return sorted((name, value) for name, value in headers.items() if name.lower() not in others)


def leaks(bed: Bed, role: str, tells_store: bool) -> Iterator[str]:
    """What a role learns that it must not, over all that the crawler asks for."""
    restricted = role != "operator"
    seen: dict[str, tuple[int, str, list[tuple[str, str]]]] = {}
    unanswered = {(o.method.upper(), o.path) for o in operations()}
    before = ""
    for method, path, body, route in bed.requests():
        answer, asked = bed.ask(role, method, path, body), path + repr(body)
        before += asked
        if answer.status == 200:
            unanswered.discard((method, route))
        text, where = shown(answer), f"{role}: {method} {path} {body!r:.200}: {answer.status}"
        if restricted:
            yield from (
                f"{where} names {m}"
                for m in bed.markers
                if m in text and m not in (before if path in OF_REQUESTS else asked)
            )
        if restricted or not tells_store:
            places = (str(bed.folder), "/tmp/", sys.prefix, str(Path.home()), str(Path(__file__).parents[2]))
            yield from (f"{where} has the path {p}" for p in places if p in text)
        if "Traceback" in text or (answer.status == 500 and "broken" not in asked):
            yield f"{where} failed"
        if restricted and path not in OF_REQUESTS:
            # What is hidden and what is not there: the same request but for the name, the same answer but for it.
            for name in (*HIDDEN_DATASETS, *HIDDEN_MODELS, bed.structure, *bed.packs):
                absent = NO_HEX if len(name) == 32 else "absentset" if name.endswith("set") else "absentmodel"
                asked, text = asked.replace(name, absent), answer.body.decode("latin-1").replace(name, absent)
                answer = Answer(answer.status, answer.headers, text.encode("latin-1"))
            found = answer.status, text, telling(answer.headers)
            if seen.setdefault(f"{method} {asked}", found) != found:
                yield f"{where} differs from what is not there: {text[:200]} / {seen[f'{method} {asked}']}"
    if (
        not restricted
    ):  # each route of the application is in the document, and has a good request in the crawl
        yield from (
            f"{method} {path}: no good request is made; add one to Bed" for method, path in unanswered
        )


@pytest.mark.long_cases(
    "--tell-store-operator",
    "--tell-store-guest",
    "--tell-store-blind",
    "--tell-store-expired",
    "-nobody",
    "-wrong",
)
@pytest.mark.parametrize("role", ROLES)
def test_no_answer_tells_of_what_is_hidden(bed: Bed, role: str) -> None:
    found = list(leaks(bed, role, "--tell-store" in bed.process.arguments))
    assert not found, "\n".join(found[:20]) + f"\n{len(found)} in all"

"""Tenants from a file: what is read, what is refused, and whose token is whose."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_tools import Answer, check_problem, exchange, served

from hapi.errors import ConfigError, NotFoundError, UnauthorizedError
from hapi.server.lifecycle.progress_watch import LOST_TO_ONE
from hapi.server.scheduling.fair_queue import Tenant
from hapi.server.tenants.access import Access
from hapi.server.tenants.by_token import DEFAULT, Tenants, read_tenants
from hapi.wire.messages import ExtractRequest, SamplesRequest, TensorsRequest
from hapi.wire.references import DatasetReference, ModelReference
from hapi.wire.warm_up import WarmUpRequest

DIGEST = hashlib.sha256(b"another-secret").hexdigest()
GOOD = f"""
vision:
  token: a-long-secret
  weight: 2.5
students:
  token_sha256: {DIGEST}
  in_flight: 2
  bytes_per_second: 20MiB
"""


def written(folder: Path, text: str) -> str:
    path = folder / "tenants.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file(tmp_path: Path) -> None:
    tenants = read_tenants(written(tmp_path, GOOD), None)
    assert tenants.of("Bearer a-long-secret") == Tenant(name="vision", weight=2.5)
    limited = Tenant(name="students", in_flight=2, bytes_per_second=20 << 20)
    assert tenants.of("Bearer another-secret") == limited
    assert list(tenants.all) == [Tenant(name="vision", weight=2.5), limited] and not tenants.open
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {DIGEST}",
        "Bear a-long-secret",
        "Bearer a-long-secret ",
    ):
        with pytest.raises(UnauthorizedError, match="--token-file"):
            tenants.of(wrong)


def test_the_one_token_is_one_tenant_more(tmp_path: Path) -> None:
    tenants = read_tenants(written(tmp_path, GOOD), "operators-own")
    assert tenants.of("Bearer operators-own") == DEFAULT
    assert [t.name for t in tenants.all] == ["default", "vision", "students"]


def test_without_a_file() -> None:
    assert read_tenants(None, None).open and read_tenants(None, None).of("Bearer whatever") == DEFAULT
    alone = read_tenants(None, "short")
    assert alone.of("Bearer short") == DEFAULT and not alone.open
    with pytest.raises(UnauthorizedError):
        alone.of("")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "has 0 tenants"),
        ("[a, b]", "expected 'name: settings' blocks"),
        ("a: 3", "expected settings"),
        ("a: {}", "a: give either token or token_sha256"),
        (f"a: {{token: secret-secret, token_sha256: {DIGEST}}}", "a: give either"),
        ("a: {token: short}", "a: token: expected at least 8"),
        ("a: {token: 'with a blank'}", "a: token: expected"),
        ("a: {token: größergrößer}", "a: token: expected"),
        ("a: {token_sha256: abcdef}", "a: token_sha256: expected 64"),
        ("a: {token: secret-secret, weight: 0}", ":1:35: a.weight: expected a number"),
        ("a: {token: secret-secret, wieght: 1}", "unknown key 'a.wieght'; did you mean 'weight'"),
        ("a: {token: secret-secret, in_flight: 0}", "a.in_flight"),
        ("a: {token: secret-secret, bytes_per_second: 20M}", "a.bytes_per_second"),
        ("a: {token: secret-secret}\na: {token: secret-secre2}", "'a' appears twice"),
        ("a: {token: secret-secret}\nb: {token: secret-secret}", "b has the same token as a"),
        ("a: {token: operators-own}", "a has the same token as default"),
        ("default: {token: secret-secret}", "'default' is the one of HAPI_TOKEN"),
        ("../a: {token: secret-secret}", "is not a name"),
        ("? [a]\n: {token: secret-secret}", "expected a setting's name"),
        ("a: {token: secret-secret", "not YAML"),
        ("a: {token: secret-secret, datasets: }", ":1:36: a.datasets: expected a list, got nothing"),
        (
            "a: {token: secret-secret, datasets: ['x/y']}",
            "a: datasets: expected names, * for any text in them",
        ),
        ("a: {token: secret-secret, models: ['pushed@1']}", "a: models: expected names"),
        ("a: {token: secret-secret, status: maybe}", "a.status: expected true or false"),
        ("a: {token: secret-secret, expires: tomorrow}", "a: expires: expected a time of RFC 3339"),
        ("a: {token: secret-secret, expires: 2030-01-31}", "a: expires: expected a time of RFC 3339"),
        ("a: {token: secret-secret, expires: 2030-01-31T12:00:00}", "a: expires: expected"),
        ("a: {token: secret-secret, expires: 2030-02-31T12:00:00Z}", "a: expires: expected"),
        ("a: {token: secret-secret, more_tokens: [{token: secret-secret}]}", "a has the same token twice"),
        ("a: {token: secret-secret, more_tokens: [{}]}", "a: give either token or token_sha256"),
        ("a: {token: secret-secret, more_tokens: [other-secret]}", ":1:41: a.more_tokens: expected settings"),
        ("a: {token: secret-secret, more_tokens: [{tokn: x}]}", "unknown key 'a.more_tokens.tokn'"),
        (
            "a: {token: a-secret}\nb: {token: secret-b, more_tokens: [{token: a-secret}]}",
            "b has the same token as a",
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tenants(written(tmp_path, text), "operators-own")
    message = str(caught.value)
    assert word in message and "tenants.yaml" in message and "\n" not in message
    assert "secret-secret" not in message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_tenants(str(tmp_path / "none.yaml"), None)


@given(st.text(max_size=60))
def test_no_other_header_is_anybodys(text: str) -> None:
    with pytest.raises(UnauthorizedError):
        Tenants({}, "the-only-one").of(text)


ROTATED = f"""
vision:
  token: the-new-secret
  more_tokens:
    - token: the-old-secret
      expires: 2030-01-31T13:00:00+01:00
    - {{token_sha256: {DIGEST}, expires: 2029-12-31t23:59:59.5z}}
gone: {{token: gone-for-long, expires: 2029-01-01T00:00:00Z}}
"""


def test_two_tokens_and_their_end(tmp_path: Path) -> None:
    tenants, noon = read_tenants(written(tmp_path, ROTATED), None), 1896091200.0
    assert [tenant.name for tenant in tenants.all] == ["vision", "gone"]
    vision = Tenant(name="vision")
    for now, valid, expired in (
        (noon - 1e8, ["the-new-secret", "the-old-secret", "another-secret", "gone-for-long"], {}),
        (noon - 1, ["the-new-secret", "the-old-secret"], {"another-secret": "2029-12-31T23:59:59Z"}),
        (noon, ["the-new-secret"], {"the-old-secret": "2030-01-31T12:00:00Z"}),
    ):
        tenants._clock = lambda now=now: now
        for token in valid:
            assert tenants.of(f"Bearer {token}").name == ("gone" if token.startswith("gone") else vision.name)
        for token, told in expired.items():
            with pytest.raises(UnauthorizedError, match=f"the token expired at {told}; set HAPI_TOKEN"):
                tenants.of(f"Bearer {token}")
        assert tenants.without_token == (["gone"] if expired else [])


def test_reads_of_others_that_hang_tell_nothing(folder: Path, tmp_path: Path) -> None:
    text = "a: {token: a-secret-here}\nb: {token: b-secret-here, datasets: []}"
    with served(folder, tenants=read_tenants(written(tmp_path, text), None)) as server:

        def asked(name: str, path: str) -> Answer:
            return exchange(server.port, "GET", path, headers={"Authorization": f"Bearer {name}-secret-here"})

        path = "/v1/datasets/digits"
        server.service.watch.lost._of[f"GET {path}"] = LOST_TO_ONE
        check_problem(asked("a", path), 502, "reads wait")
        check_problem(asked("b", path), 404, "there is no dataset 'digits' here")


def test_what_a_tenant_sees(tmp_path: Path) -> None:
    text = "a: {token: secret-secret, datasets: [x, 'b.*', '*-z'], models: [], metrics: no}"
    (tenant,) = read_tenants(written(tmp_path, text), None).all
    access = tenant.access
    assert [n for n in ("x", "xx", "b.1", "b11", "b.", "1-z", "1-z.", "") if access.sees_dataset(n)] == [
        "x", "b.1", "b.", "1-z",
    ]  # fmt: skip
    assert not access.sees_model("x") and access.status and not access.metrics and not access.whole
    assert Tenant(name="b").access.whole and Tenant(name="b").access.sees_model("any@3")
    assert (
        tenant.may_see(tenant) and not tenant.may_see(Tenant(name="b")) and Tenant(name="b").may_see(tenant)
    )


def test_models_are_seen_by_their_whole_names() -> None:
    access = Access(models=("net", "b*"))
    names = ("net", "net@3", "nets", "nets@1", "a-net", "b1@2", "")
    assert [name for name in names if access.sees_model(name)] == ["net", "net@3", "b1@2"]


def test_of_others_know_those_who_see_all() -> None:
    assert Access().whole and Access(datasets=("x", "*")).whole
    assert not Access(datasets=("x",)).whole and not Access(models=("x",)).whole


DATA = DatasetReference(name="seen", version="0" * 16)
PUSHED = ModelReference(source="store", name="net", weights="pushed", digest="0" * 32)
BUILT = ModelReference(source="zoo", name="net", weights="random:0", digest="0" * 32)
IDS = np.arange(2)


@pytest.mark.parametrize(
    ("request_of", "data", "model"),
    [
        (
            ExtractRequest(dataset=DATA, model=PUSHED, split=1, split_name="a", ids=IDS, transform=None),
            True,
            True,
        ),
        (
            ExtractRequest(dataset=DATA, model=BUILT, split=1, split_name="a", ids=IDS, transform=None),
            True,
            False,
        ),
        (SamplesRequest(dataset=DATA, ids=IDS), True, False),
        (TensorsRequest(name="net", digest="0" * 32, names=("t",)), False, True),
        (WarmUpRequest(model=PUSHED, split=1, split_name="a"), False, True),
        (WarmUpRequest(model=BUILT, split=1, split_name="a"), False, False),
    ],
)
def test_all_that_a_request_names_is_checked(request_of: Any, data: bool, model: bool) -> None:
    Access(datasets=("seen",), models=("net",)).check(request_of)
    for access, names_it in ((Access(datasets=("other",)), data), (Access(models=("other",)), model)):
        if not names_it:
            access.check(request_of)
            continue
        with pytest.raises(NotFoundError, match=r"there is no|has no model"):
            access.check(request_of)

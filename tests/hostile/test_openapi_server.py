"""A property-based tester reads the document of the interface from a running server and holds the server to it.

Schemathesis (https://schemathesis.readthedocs.io) makes requests that fit the document, at and around every bound, and
requests that do not, and checks status, media type, headers and body of each answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import ROOT, environment
from support.harness import ServerProcess, server
from support.http_tools import COUNT, EXTRACT, SAMPLES, SIDE, TENSORS, Known, exchange, make_store

from hapi.wire import messages, schemas

pytestmark = pytest.mark.slow

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
          "response_headers_conformance", "unsupported_method", "allow_header_conformance",
          "ignored_auth")  # fmt: skip
PATHS = os.pathsep.join([str(Path(__file__).parents[1]), str(ROOT)])
TOKEN = "token-of-the-property-tests"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ServerProcess]:
    with server(folder, HAPI_TOKEN=TOKEN) as process:
        yield process


@pytest.fixture
def document(running: ServerProcess) -> dict[str, Any]:
    """As the server tells it."""
    answer = exchange(running.port, "GET", messages.OPENAPI_PATH, headers=BEARER)
    assert answer.status == 200
    found: dict[str, Any] = answer.json()
    return found


BEARER = {"Authorization": f"Bearer {TOKEN}"}


def held_against(running: ServerProcess, document: dict[str, Any], folder: Path, *arguments: str) -> None:
    """Run the tester over ``document``; an answer that is another than told fails with its report."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", running.url, "--no-color",
               "--header", f"Authorization: Bearer {TOKEN}", "--workers", "1", "--seed", "25", "--continue-on-failure",
               "--warnings", "off", "--generation-database", "none", "--suppress-health-check", "all",
               "--request-timeout", "240", *arguments]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=800,
        env=environment(SCHEMATHESIS_HOOKS="support.frame_hooks", PYTHONPATH=PATHS),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]


def bodies(known: Known) -> dict[str, list[dict[str, Any]]]:
    """Good requests of each kind."""
    by_range = {"sequence": {"seed": 1, "epoch": 2, "shuffle": "full"}, "start": 3, "stop": 40}
    return {
        EXTRACT: [known.extract(), known.extract(time_layers=True, job="a1")],
        SAMPLES: [known.samples(), {"dataset": known.samples()["dataset"], **by_range}],
        TENSORS: [known.tensors()],
    }


def test_good_and_bad_requests_of_every_kind(
    running: ServerProcess, document: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """At every bound and past it; what does not fit the document is refused, and only by its status."""
    for path, examples in bodies(Known(folder)).items():
        body_of(document, path)["examples"] = {f"good{n}": {"value": body} for n, body in enumerate(examples)}
    checks = ",".join((*CHECKS, "negative_data_rejection"))
    held_against(running, document, tmp_path, "--checks", checks, "--phases", "examples,coverage,fuzzing",
                 "--max-examples", "20")  # fmt: skip
    for path in (EXTRACT, SAMPLES, TENSORS):
        assert answered(running, path, 200) >= 1


@pytest.mark.long
def test_requests_for_what_there_is(
    running: ServerProcess, document: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Any ids, orders and transforms of a real dataset and model: whole answers, or a problem that says why not."""
    known = Known(folder)
    fixed = {n: {"const": value} for n, value in known.extract().items() if n not in ("ids", "transform")}
    ids = schemas.listed(schemas.whole(0, COUNT - 1), 1, 20)
    extract, samples = (body_of(document, path)["schema"] for path in (EXTRACT, SAMPLES))
    drawn = schemas.transform(random=True)["anyOf"][1]
    drawn["properties"] |= {"crop": {"const": SIDE}, "resize": schemas.whole(SIDE, 3 * SIDE)}
    extract["properties"] |= fixed | {"ids": ids, "transform": drawn}
    for one in samples["anyOf"]:
        one["properties"] |= {"dataset": fixed["dataset"]}
    samples["anyOf"][0]["properties"] |= {"ids": ids}
    samples["anyOf"][1]["properties"] |= {"start": {"enum": [0, 7, 19]}, "stop": {"enum": [20, 40, 41]}}
    for path in (EXTRACT, SAMPLES):
        del document["paths"][path]["post"][
            "parameters"
        ]  # a deadline that has passed would refuse most of them
    before = {path: answered(running, path, 200) for path in (EXTRACT, SAMPLES)}
    held_against(running, document, tmp_path, "--checks", ",".join(CHECKS), "--phases", "fuzzing", "--mode", "positive",
                 "--max-examples", "60", "--include-path-regex", "extract|samples")  # fmt: skip
    for path, count in before.items():
        assert answered(running, path, 200) >= count + 10


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The description of the body of a POST to ``path``."""
    found: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return found


def answered(running: ServerProcess, path: str, status: int) -> float:
    """Requests to ``path`` that were answered with ``status``."""
    line = f'hapi_requests_total{{route="{path}",status="{status}"}} '
    text = exchange(running.port, "GET", messages.METRICS_PATH, headers=BEARER).body.decode()
    return sum(float(one.removeprefix(line)) for one in text.splitlines() if one.startswith(line))

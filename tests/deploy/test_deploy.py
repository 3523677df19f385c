"""The files of ``deploy/``: what they name exists, and what they say fits the server."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.clean_root import instructions

import hapi
from hapi.cli.server import parser
from hapi.config.settings import load, overrides_of
from hapi.server.http.app import Application
from hapi.server.scheduling.fair_queue import ANONYMOUS
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.wire import messages

ROOT = Path(hapi.__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "hapi-server.service"
CONTAINER = DEPLOY / "container" / "Containerfile"
OF_PROMETHEUS = {"up"}
OF_EVERY_CLIENT = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of all samples and histograms that a server can print, with their labels."""
    folder = str(tmp_path_factory.mktemp("store"))
    service = Service(ServerSettings(store=folder, device="cpu"), open_store(folder))
    application = Application(service)
    try:
        application.metrics.requests.labels("/v1/extract", "200")
        application.metrics.seconds.labels("/v1/extract")
        text = application.metrics.render(ANONYMOUS).decode()
    finally:
        application.close()
        service.close()
    names = {name: set[str]() for name in re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        names[name] = set(re.findall(r'(\w+)="', labels))
    return names


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DEPLOY / "grafana" / "hapi.json").read_text())
    return document


def panel_queries() -> Iterator[tuple[str, str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target.get("legendFormat", "")


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def metrics_of(query: str) -> set[str]:
    """Names of metrics in a PromQL expression: words that are no function, keyword, label or string."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\{[^}]*\}|\b(?:by|on|without)\s*\([^)]*\)|\[[^\]]*\]", " ", bare)
    words = re.findall(r"[a-zA-Z_]\w*(?!\w*\s*\()", bare)
    return {word for word in words if word not in ("and", "or", "unless", "by", "sum", "max", "count")}


def labels_of(query: str) -> set[str]:
    """Labels that a query groups by or selects."""
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", query)
    selected = re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query)
    return {word.strip() for group in grouped for word in group.split(",")} | set(selected)


OF_THE_SCRAPE = {"instance", "job", "le"}


def check_query(query: str, printed: dict[str, set[str]], legend: str = "") -> None:
    names = metrics_of(query)
    assert names, query
    for name in names - OF_PROMETHEUS:
        assert name in printed or name in OF_EVERY_CLIENT, f"{name} is not in /metrics: {query}"
    known = set().union(*(printed.get(name, set()) for name in names)) | OF_THE_SCRAPE
    if names not in (
        {"hapi_device_allocated_bytes"},
        {"hapi_scrub_damaged"},
    ):  # no samples on a CPU, without damage
        wanted = labels_of(query) | set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", legend))
        assert wanted <= known, f"{wanted - known}: no such label in {query}"
    for name in names:
        if "rate(" in query or "increase(" in query:
            rated = re.search(rf"(?:rate|increase)\({name}\b", query)
            assert (rated is not None) == name.endswith(("_total", "_bucket")), f"rate of {name}: {query}"


def test_every_query_of_the_dashboard_finds_something(printed: dict[str, set[str]]) -> None:
    queries = list(panel_queries())
    assert len(queries) >= 30
    for _, query, legend in queries:
        check_query(query, printed, legend)


def test_every_alert_finds_something(printed: dict[str, set[str]]) -> None:
    for rule in alerts():
        assert rule["annotations"]["summary"] and rule["labels"]["severity"]
        summary = rule["annotations"]["summary"].replace("{{ $value }}", "")
        check_query(rule["expr"], {**printed, "up": set()}, summary)


def test_the_rule_of_autoscaling_finds_something(printed: dict[str, set[str]]) -> None:
    document = yaml.safe_load((DEPLOY / "prometheus" / "scaling.yaml").read_text())
    for rule in (rule for group in document["groups"] for rule in group["rules"]):
        check_query(rule["expr"], printed)


def test_a_query_of_nothing_is_found(printed: dict[str, set[str]]) -> None:
    """The check itself: names, labels and rates that are not there."""
    for wrong in ("sum(rate(hapi_nonsense_total[5m]))", "sum by (colour) (hapi_tenant_queued)",
                  'hapi_tenant_queued{color="red"}', "rate(hapi_tenant_queued[5m])",
                  "max(rate(hapi_busy_seconds_total[5m])) + sum(hapi_samples_total)"):  # fmt: skip
        with pytest.raises(AssertionError):
            check_query(wrong, printed)


def test_the_dashboard_shows_every_metric(printed: dict[str, set[str]]) -> None:
    shown = set().union(*(metrics_of(query) for _, query, _ in panel_queries()))
    shown |= {name.removesuffix("_bucket") for name in shown}
    parts = ("_bucket", "_count", "_sum")
    missing = {n for n in printed if n.startswith("hapi_") and not n.endswith(parts)} - shown
    assert missing == set()


def test_the_dashboard_can_be_imported_anywhere() -> None:
    document = dashboard()
    variables = {v["name"]: v for v in document["templating"]["list"]}
    assert (
        variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    )
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids) and "id" not in document
    sources = {json.dumps(s) for s in _values(document, "datasource")}
    assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and max(x for x, _ in cells) < 24, (
            f"{panel['title']} lies over another panel"
        )
        taken |= cells


def _values(document: Any, key: str) -> Iterator[Any]:
    if isinstance(document, dict):
        for name, value in document.items():
            if name == key:
                yield value
            yield from _values(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from _values(value, key)


def test_the_page_names_every_alert() -> None:
    text = (ROOT / "deploy" / "prometheus" / "README.md").read_text()
    assert re.findall(r"^\| (Hapi\w+) \|", text, re.MULTILINE) == [rule["alert"] for rule in alerts()]


# -- systemd -------------------------------------------------------------------------------------------------


def settings_of(arguments: list[str]) -> ServerSettings:
    """As hapi-server reads its command line."""
    given = overrides_of(parser().parse_args(arguments), ServerSettings)
    return load(ServerSettings, None, {"store": "x", **given}).value


def unit() -> configparser.SectionProxy:
    found = configparser.RawConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read(UNIT)
    return found["Service"]


def test_the_unit_starts_a_server_as_the_command_line_is() -> None:
    program, *arguments = shlex.split(unit()["ExecStart"])
    assert Path(program).name == "hapi-server"
    parsed = settings_of(arguments)
    assert parsed.tenants == "%d/tenants.yaml"
    assert parsed.lame_duck + parsed.drain_seconds + 10 <= float(unit()["TimeoutStopSec"])


def test_the_unit_is_hardened() -> None:
    service = unit()
    assert service["Restart"] == "on-failure" and service["EnvironmentFile"]
    for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome", "ProtectKernelTunables"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict" and service["CapabilityBoundingSet"] == ""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    program = unit()["ExecStart"].split()[0]
    copy.write_text(
        UNIT.read_text().replace(program, shutil.which("true") or "/bin/true")
    )  # it is not installed
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert str(copy) not in done.stderr and UNIT.name not in done.stderr, done.stderr


# -- container -----------------------------------------------------------------------------------------------


def test_the_container_copies_what_there_is_and_what_an_installation_needs() -> None:
    copied = [word for name, rest in instructions(CONTAINER) if name == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    assert {"pyproject.toml", "setup.py", "hapi", "README.md", "LICENSE"} <= set(copied)


def test_an_installation_has_the_page() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["hapi"]
    packed = {path for pattern in patterns for path in (ROOT / "hapi").glob(pattern)}
    pages = set((ROOT / "hapi").rglob("*.html"))
    assert pages and pages <= packed


def test_the_container_starts_a_server_that_is_not_root() -> None:
    by_name = dict(instructions(CONTAINER))
    assert by_name["FROM"].endswith("-slim") and by_name["STOPSIGNAL"] == "SIGTERM"
    assert by_name["USER"].isdigit() and by_name["USER"] != "0"
    order = [name for name, _ in instructions(CONTAINER)]
    assert order.index("USER") < order.index("ENTRYPOINT") and "RUN" not in order[order.index("USER") :]
    program, *arguments = json.loads(by_name["ENTRYPOINT"])
    assert program == "hapi-server"
    parsed = settings_of(arguments)
    assert parsed.host == "0.0.0.0" and str(parsed.port) == by_name["EXPOSE"]


def test_the_health_check_is_a_program_that_asks_the_server() -> None:
    check = dict(instructions(CONTAINER))["HEALTHCHECK"]
    program, flag, code = json.loads(check[check.index("CMD ") + 4 :])
    assert (program, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:8099{messages.HEALTH_PATH}'" in code

"""The manifests of ``deploy/kubernetes``: Kubernetes takes them, and what they say fits the server."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import hapi
from hapi.cli.server import VARIABLES, parser
from hapi.config.fields import every_field, variable_of
from hapi.config.settings import load, overrides_of
from hapi.errors import HapiError
from hapi.server.http import openapi
from hapi.server.lifecycle.ending import END_SECONDS
from hapi.server.settings import ServerSettings
from hapi.server.tenants.by_token import read_tenants
from hapi.wire import messages

DEPLOY = Path(hapi.__file__).parents[1] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("cpu", "gpu", "autoscale-hpa", "autoscale-keda", "stateful")
OWN_FILES = {"tenants.yaml": "tenants.example.yaml", "store.env": "store.example.env"}
"""Files that are the operator's, by the examples that they are copied from."""
NOT_APPLIED = {"server.yaml", "tenants.example.yaml", "prometheus-adapter.yaml"}
RELEASES = ("1.30", kubernetes_validate.latest_version())
RECORD = "hapi:servers_wanted:ratio"
KEDA_SPEC = {
    "scaleTargetRef",
    "pollingInterval",
    "minReplicaCount",
    "maxReplicaCount",
    "advanced",
    "triggers",
}
KEDA_TRIGGER = {"type", "metricType", "metadata"}
KEDA_PROMETHEUS = {"serverAddress", "query", "threshold", "ignoreNullValues"}
"""Fields of KEDA's ScaledObject that are used here; there is no schema of it."""


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def read(*parts: str) -> dict[str, Any]:
    (found,) = documents((KUBERNETES.joinpath(*parts)).read_text(encoding="utf-8"))
    return found


def kustomizations() -> list[Path]:
    return sorted(KUBERNETES.rglob("kustomization.yaml"))


def named_by(kustomization: Path) -> Iterator[str]:
    """Paths that a kustomization.yaml reads, relative to it."""
    found = yaml.safe_load(kustomization.read_text(encoding="utf-8"))
    yield from found["resources"]
    yield from (patch["path"] for patch in found.get("patches", []) if "path" in patch)
    for generator in (*found.get("configMapGenerator", []), *found.get("secretGenerator", [])):
        yield from (*generator.get("files", []), *generator.get("envs", []))


def own_copy(folder: Path) -> Path:
    """Copy the folder as an operator would have it."""
    copy = folder / "kubernetes"
    shutil.copytree(KUBERNETES, copy, ignore=shutil.ignore_patterns(*OWN_FILES))
    for name, example in OWN_FILES.items():
        shutil.copy(copy / "base" / example, copy / "base" / name)
    return copy


def kustomize(folder: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    command = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def built(overlay: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What ``kubectl apply -k`` would send, by kind and name."""
    done = kustomize(own_copy(folder) / "overlays" / overlay)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return {f"{d['kind']}/{d['metadata']['name']}": d for d in documents(done.stdout)}


def check(document: dict[str, Any], release: str) -> None:
    """Raise for a manifest that this release of Kubernetes would refuse, unknown fields included."""
    if document["apiVersion"] == "keda.sh/v1alpha1":
        document = autoscaler_of(document)
    kubernetes_validate.validate(document, release, strict=True)


def autoscaler_of(scaled: dict[str, Any]) -> dict[str, Any]:
    """Return the autoscaler that KEDA makes of its object, whose own fields are checked."""
    spec = scaled["spec"]
    assert scaled["kind"] == "ScaledObject" and set(spec) <= KEDA_SPEC
    metrics = []
    for trigger in spec["triggers"]:
        assert set(trigger) <= KEDA_TRIGGER and set(trigger["metadata"]) <= KEDA_PROMETHEUS
        assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes texts alone"
        target = {"type": trigger["metricType"], "value": trigger["metadata"]["threshold"]}
        metrics.append({"type": "External", "external": {"metric": {"name": "s0"}, "target": target}})
    assert set(spec["advanced"]) == {"horizontalPodAutoscalerConfig"}
    return {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"], "metrics": metrics, "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"], **spec["advanced"]["horizontalPodAutoscalerConfig"],
        },
    }  # fmt: skip


# -- what Kubernetes takes -----------------------------------------------------------------------------------


def test_every_name_in_a_kustomization_exists_and_every_file_is_named() -> None:
    assert {path.parent.name for path in kustomizations()} == {"base", *OVERLAYS}
    named = set()
    for kustomization in kustomizations():
        for name in named_by(kustomization):
            path = kustomization.parent / OWN_FILES.get(name, name)
            assert path.exists(), f"{kustomization}: no {name}"
            named.add(path.resolve())
    files = {
        path.resolve() for path in KUBERNETES.rglob("*") if path.is_file() and path.name not in OWN_FILES
    }
    left = {path.name for path in files - named} - {"kustomization.yaml"}
    assert left == {"prometheus-adapter.yaml"}


@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_takes_every_manifest(release: str) -> None:
    patches = {"processors.yaml", "gpu.yaml", "stateful.yaml"}  # no whole manifests: see the next test
    skipped = {"kustomization.yaml", *NOT_APPLIED, *patches, *OWN_FILES}
    paths = [path for path in sorted(KUBERNETES.rglob("*.yaml")) if path.name not in skipped]
    assert len(paths) >= 8
    for path in paths:
        for document in documents(path.read_text(encoding="utf-8")):
            check(document, release)


@pytest.mark.slow_except("gpu", "autoscale-hpa")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_what_an_overlay_becomes(overlay: str, tmp_path: Path) -> None:
    found = built(overlay, tmp_path)
    for document in found.values():
        check(document, RELEASES[-1])
    kinds = sorted(name.partition("/")[0] for name in found)
    servers = "StatefulSet" if overlay == "stateful" else "Deployment"
    base = ["ConfigMap", servers, "NetworkPolicy", "PodDisruptionBudget", "Secret", "Secret", "Service", "Service",
            "ServiceAccount"]  # fmt: skip
    more = {"autoscale-hpa": ["HorizontalPodAutoscaler"], "autoscale-keda": ["ScaledObject"]}
    assert kinds == sorted(base + more.get(overlay, []))
    deployment = found[f"{servers}/hapi-server"]["spec"]
    assert ("replicas" in deployment) == (not overlay.startswith("autoscale")), (
        "an autoscaler's number is its own"
    )
    generated = {name for name in found if name.startswith(("Secret", "ConfigMap"))}
    text = json.dumps(deployment)
    assert all(f'"{name.partition("/")[2]}"' in text for name in generated)


def test_without_the_operators_files_nothing_is_applied(tmp_path: Path) -> None:
    copy = own_copy(tmp_path)
    (copy / "base" / "tenants.yaml").unlink()
    done = kustomize(copy / "overlays" / "cpu")
    assert done.returncode != 0 and "tenants.yaml" in done.stderr and not done.stdout


def test_a_mistake_is_found() -> None:
    """The check itself: a field that is not there, a type, and KEDA's."""
    deployment = read("base", "deployment.yaml")
    deployment["spec"]["template"]["spec"]["gracePeriod"] = 3
    scaled = read("overlays", "autoscale-keda", "scaled-object.yaml")
    scaled["spec"]["maxReplicaCount"] = "many"
    for wrong in (deployment, scaled):
        with pytest.raises(kubernetes_validate.ValidationError):
            check(wrong, RELEASES[-1])
    scaled["spec"]["minReplicas"] = 1
    with pytest.raises(AssertionError):
        check(scaled, RELEASES[-1])


# -- what the server is --------------------------------------------------------------------------------------


def pod() -> dict[str, Any]:
    found: dict[str, Any] = read("base", "deployment.yaml")["spec"]["template"]["spec"]
    return found


def container(*parts: str) -> dict[str, Any]:
    spec = read(*(parts or ("base", "deployment.yaml")))["spec"]["template"]["spec"]
    (found,) = spec["containers"]
    assert found["name"] == "hapi-server"
    return dict(found)


def entrypoint() -> list[str]:
    """Arguments that the image gives to ``hapi-server``."""
    text = (DEPLOY / "container" / "Containerfile").read_text(encoding="utf-8")
    program, *arguments = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    assert program == "hapi-server"
    return list(arguments)


def settings(environment: dict[str, str] | None = None) -> ServerSettings:
    """As the container reads its command line, its file and its environment."""
    args = parser().parse_args([*entrypoint(), *container()["args"]])
    assert args.config == "/etc/hapi/settings/server.yaml"
    given = overrides_of(args, ServerSettings)
    return load(ServerSettings, KUBERNETES / "base" / "server.yaml", given, environment, VARIABLES).value


def test_the_flags_and_the_file_are_those_of_the_server() -> None:
    found = settings()
    assert found.store.startswith("s3://") and found.host == "0.0.0.0"
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert found.tenants == f"{mounts['tenants']}/tenants.yaml"
    assert mounts["settings"] == "/etc/hapi/settings"
    assert set(mounts) == {volume["name"] for volume in pod()["volumes"]}


@pytest.mark.parametrize(("overlay", "file"), [("cpu", "processors.yaml"), ("gpu", "gpu.yaml")])
def test_the_environment_is_the_servers(overlay: str, file: str) -> None:
    patched = container("overlays", overlay, file)
    environment = {variable["name"]: variable["value"] for variable in patched["env"]}
    known = {variable_of(f, VARIABLES) for f in every_field(ServerSettings)}
    assert set(environment) <= known
    found, limits = settings(environment), patched["resources"]["limits"]
    assert found.device == {"cpu": "cpu", "gpu": "cuda"}[overlay]
    if overlay == "cpu":
        assert str(found.threads) == str(found.decode_threads) == limits["cpu"]
    else:
        assert limits["nvidia.com/gpu"] == "1"


def test_ports_and_paths_are_the_servers() -> None:
    (port,) = container()["ports"]
    assert port["containerPort"] == settings().port
    for name in ("service.yaml", "service-headless.yaml"):
        (service,) = read("base", name)["spec"]["ports"]
        assert service["port"] == settings().port and service["targetPort"] == port["name"]
    (ingress,) = read("base", "network-policy.yaml")["spec"]["ingress"]
    assert [allowed["port"] for allowed in ingress["ports"]] == [port["name"]]
    paths = {messages.READY_PATH: ["readinessProbe"], messages.HEALTH_PATH: ["livenessProbe", "startupProbe"]}
    for path, probes in paths.items():
        assert path in json.loads(openapi.document())["paths"]
        for probe in probes:
            assert container()[probe]["httpGet"] == {"path": path, "port": port["name"]}


def test_every_selector_finds_the_servers() -> None:
    template = read("base", "deployment.yaml")["spec"]
    (label,) = template["selector"]["matchLabels"].items()
    assert label in template["template"]["metadata"]["labels"].items()
    assert dict([label]) == read("base", "service.yaml")["spec"]["selector"]
    assert dict([label]) == read("base", "service-headless.yaml")["spec"]["selector"]
    assert dict([label]) == read("base", "network-policy.yaml")["spec"]["podSelector"]["matchLabels"]
    assert dict([label]) == read("base", "disruption-budget.yaml")["spec"]["selector"]["matchLabels"]
    assert pod()["serviceAccountName"] == read("base", "service-account.yaml")["metadata"]["name"]


def test_trainers_can_see_every_server_and_only_those_that_take_work() -> None:
    """A headless Service is a name with each ready server's address, which a client follows."""
    spec = read("base", "service-headless.yaml")["spec"]
    assert spec["clusterIP"] == "None" and not spec.get("publishNotReadyAddresses")
    assert "clusterIP" not in read("base", "service.yaml")["spec"]


def test_servers_may_ask_each_other() -> None:
    """For --providers: in and out, at the servers' port, and nobody else comes in by it."""
    labels = read("base", "deployment.yaml")["spec"]["selector"]["matchLabels"]
    policy = read("base", "network-policy.yaml")["spec"]
    (ingress,) = policy["ingress"]
    assert {"podSelector": {"matchLabels": labels}} in ingress["from"]
    out = [
        rule for rule in policy["egress"] if {"podSelector": {"matchLabels": labels}} in rule.get("to", ())
    ]
    assert [rule["ports"] for rule in out] == [ingress["ports"]]


@pytest.mark.slow
def test_a_server_with_a_name_provides_under_it_and_keeps_features_on_its_disk(tmp_path: Path) -> None:
    found = built("stateful", tmp_path)
    spec = found["StatefulSet/hapi-server"]["spec"]
    (pod,) = spec["template"]["spec"]["containers"]
    service = found["Service/hapi-servers"]["metadata"]["name"]
    assert spec["serviceName"] == service
    names = [f"hapi-server-{number}" for number in range(spec["replicas"])]
    variables = {variable["name"]: variable for variable in pod["env"]}
    assert variables["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    for name in names:
        args = [argument.replace("$(POD_NAME)", name) for argument in pod["args"]]
        given = overrides_of(parser().parse_args([*entrypoint(), *args]), ServerSettings)
        read_settings = load(ServerSettings, KUBERNETES / "base" / "server.yaml", given, {}, VARIABLES).value
        assert read_settings.advertise in read_settings.providers
        assert list(read_settings.providers) == [
            f"http://{each}.{service}:{settings().port}" for each in names
        ]
        (mount,) = [mount for mount in pod["volumeMounts"] if mount["name"] == "features"]
        assert (read_settings.cache_dir or "").startswith(mount["mountPath"])
        (claim,) = spec["volumeClaimTemplates"]
        room = claim["spec"]["resources"]["requests"]["storage"]
        assert claim["metadata"]["name"] == "features"
        assert (read_settings.cache_size or 0) < int(room.removesuffix("Gi")) << 30


def seconds_to_fail(probe: str) -> float:
    """The longest time until a probe that fails has failed as often as it takes."""
    found = container()[probe]
    return float(found["periodSeconds"] * found["failureThreshold"] + found["timeoutSeconds"])


def test_the_times_fit_the_end_of_a_server() -> None:
    found = settings()
    assert found.lame_duck >= seconds_to_fail("readinessProbe"), "balancers look away before the port closes"
    ending = found.lame_duck + found.drain_seconds + END_SECONDS
    assert ending + 10 <= pod()["terminationGracePeriodSeconds"], "nothing is killed in the drain"
    closed = found.drain_seconds + END_SECONDS
    alive = container()["livenessProbe"]
    assert alive["periodSeconds"] * (alive["failureThreshold"] - 1) > closed, "a drain is no death"


def test_the_container_has_no_rights() -> None:
    spec, secured = pod()["securityContext"], container()["securityContext"]
    text = (DEPLOY / "container" / "Containerfile").read_text(encoding="utf-8")
    assert str(spec["runAsUser"]) == re.findall(r"^USER (\d+)$", text, re.MULTILINE)[0]
    assert spec["runAsNonRoot"] and spec["seccompProfile"] == {"type": "RuntimeDefault"}
    assert secured["readOnlyRootFilesystem"] and not secured["allowPrivilegeEscalation"]
    assert secured["capabilities"] == {"drop": ["ALL"]}
    assert not pod()["automountServiceAccountToken"]
    cache = re.findall(r"XDG_CACHE_HOME=(\S+)", text)[0]
    writable = {m["mountPath"] for m in container()["volumeMounts"] if not m.get("readOnly")}
    assert writable == {cache, "/tmp", "/dev/shm"}


def test_tokens_of_the_example_are_refused_and_others_taken(tmp_path: Path) -> None:
    example = (KUBERNETES / "base" / "tenants.example.yaml").read_text(encoding="utf-8")
    path = tmp_path / "tenants.yaml"
    path.write_text(example)
    with pytest.raises(HapiError, match="token"):
        read_tenants(str(path), None)
    words = iter(("5e1f0c7a9b3d4826", "d2b84f6a1c9e7053"))
    path.write_text(re.sub(r"(?<=token: )\S+", lambda _: next(words), example))
    assert not read_tenants(str(path), None).open


def test_the_operators_files_stay_out_of_the_repository() -> None:
    ignored = (DEPLOY.parent / ".gitignore").read_text(encoding="utf-8").split()
    assert {f"deploy/kubernetes/base/{name}" for name in OWN_FILES} <= set(ignored)


def test_the_variables_of_the_store_are_those_that_are_read() -> None:
    text = (KUBERNETES / "base" / "store.example.env").read_text(encoding="utf-8")
    found = configparser.RawConfigParser()
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(f"[store]\n{text}")
    documented = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    assert found["store"] and all(f"`{name}`" in documented for name in found["store"])


# -- autoscaling ---------------------------------------------------------------------------------------------


def recorded() -> str:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "scaling.yaml").read_text(encoding="utf-8"))["groups"]
    ((rule,),) = (group["rules"] for group in groups)
    assert rule["record"] == RECORD
    return str(rule["expr"])


def test_both_autoscalers_read_the_one_rule_and_do_the_same() -> None:
    recorded()
    hpa = read("overlays", "autoscale-hpa", "autoscaler.yaml")["spec"]
    (rule,) = read("overlays", "autoscale-hpa", "prometheus-adapter.yaml")["externalRules"]
    (metric,) = hpa["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    (trigger,) = read("overlays", "autoscale-keda", "scaled-object.yaml")["spec"]["triggers"]
    assert rule["metricsQuery"] == trigger["metadata"]["query"] == f"max({RECORD})"
    assert rule["seriesQuery"] == RECORD
    made = autoscaler_of(read("overlays", "autoscale-keda", "scaled-object.yaml"))["spec"]
    made["metrics"][0]["external"]["metric"] = metric["external"]["metric"]
    assert made == hpa
    assert hpa["scaleTargetRef"]["name"] == read("base", "deployment.yaml")["metadata"]["name"]


def test_servers_are_added_quickly_and_taken_away_slowly() -> None:
    behavior = read("overlays", "autoscale-hpa", "autoscaler.yaml")["spec"]["behavior"]
    up, down = behavior["scaleUp"], behavior["scaleDown"]
    assert 0 < up["stabilizationWindowSeconds"] < down["stabilizationWindowSeconds"]
    (slowest,) = down["policies"]
    assert slowest["type"] == "Pods" and slowest["periodSeconds"] >= pod()["terminationGracePeriodSeconds"]


def test_trainers_wait_decides_and_not_the_length_of_the_queue() -> None:
    query = recorded()
    assert "hapi_trainer_wait_seconds" in query and "expected_wait" not in query
    assert not re.search(r"queued", query)
    assert re.search(r"or clamp_max\(\s*sum\(.*hapi_requests_running.*, 1\)", query), "slots ask for no more"

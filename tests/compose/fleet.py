"""The services of docker-compose.yml: built, brought up, looked at, broken and mended."""

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightbus.tests.compose.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "weightbus-story"
HOST = "127.77.0.1"  # where this run publishes its ports, lest another one has them
KEYS = "keys"  # the service that makes them, and has ended by the time that the others begin
RUST = "rust"
PROFILE = "rust-trainer"  # brings the second trainer and its workers, of images that the first have
BUILD_SECONDS = 1800.0  # most of it is packages: a slow mirror is not a failure

Row = dict[str, Any]


@dataclass(frozen=True)
class State:
    """A container's status and health, as docker names them, and how often it was restarted."""

    status: str
    health: str
    restarts: int


@dataclass(frozen=True)
class Fleet:
    """The containers of one project, each called by the name of its service."""

    engine: Engine
    compose: tuple[str, ...]
    containers: dict[str, str]

    def rows(self, service: str) -> list[Row]:
        """Return every JSON line that a service has printed since it was created."""
        lines = self.engine.run("docker", "logs", self.containers[service]).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def words(self, service: str) -> str:
        """Return the end of all that a service has said, for whoever looks for a cause."""
        return self.engine.run(
            "sh", "-c", f"docker logs --tail 12 {self.containers[service]} 2>&1"
        ).rstrip()

    def state(self, service: str) -> State:
        """Look at a container."""
        form = "{{.State.Status}} {{.State.Health.Status}} {{.RestartCount}}"
        said = self.engine.run("docker", "inspect", "-f", form, self.containers[service]).split()
        return State(said[0], said[1], int(said[2]))

    def new_key(self, name: str) -> str:
        """Make a worker's key as docker-compose.yml says; return what is in its file."""
        make = f"weightbus keygen /keys {name} >&2; cat /keys/workers/{name}.json"
        return self.engine.run(*self.compose, "run", "--rm", "-T", KEYS, make)

    def crash(self, service: str) -> None:
        """Kill all programs in a container; its restart policy has to bring them back."""
        # The shell dies with the others, so that this command fails is a matter of course.
        kill = ("sh", "-c", "kill -9 -1; :")
        self.engine.run("sh", "-c", 'docker exec "$@" || :', "-", self.containers[service], *kill)

    def cut_off(self, service: str) -> None:
        """Take a container off the network, with its connections open."""
        network = f"{PROJECT}_bus"
        self.engine.run("docker", "network", "disconnect", network, self.containers[service])

    def reconnect(self, service: str) -> None:
        """Put it back."""
        network = f"{PROJECT}_bus"
        self.engine.run("docker", "network", "connect", network, self.containers[service])


@contextmanager
def fleet(engine: Engine) -> Generator[Fleet]:
    """Build all services and bring them up; take them down when the block ends."""
    os.environ["WEIGHTBUS_HOST"] = HOST
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        files = ["--file", str(ROOT / "docker-compose.yml")]
        compose = (*_compose(engine), "--project-name", PROJECT)
        services = engine.run(*compose, *files, "config", "--services").split()
        if engine.own:  # it has no network for builds but the host's
            json.dump(_with_the_hosts_network(services), file)
            file.flush()
            files += ["--file", file.name]
        # C++ takes the layer with Rust from that one's image, which side by side both would make.
        for which in ([RUST], []):
            engine.run(*compose, *files, "build", "--parallel", *which, seconds=BUILD_SECONDS)
        compose = (*compose, *files, "--profile", PROFILE)
        try:
            engine.run(*compose, "up", "--detach", seconds=120)
            running = [name for name in services if name != KEYS]
            ids = {name: engine.run(*compose, "ps", "-q", name).strip() for name in running}
            yield Fleet(engine, compose, ids)
        finally:
            engine.run(*compose, "down", "--timeout", "3", "--volumes", seconds=120)


def _compose(engine: Engine) -> tuple[str, ...]:
    """Return how compose is called here: as docker's plugin, or by its older name."""
    try:
        engine.run("docker", "compose", "version")
    except RuntimeError:
        return ("docker-compose",)
    return ("docker", "compose")


def _with_the_hosts_network(services: list[str]) -> dict[str, Any]:
    return {"services": {s: {"build": {"network": "host"}} for s in services}}

"""The services of docker-compose.yml: built, brought up, looked at, broken and mended."""

import json
import os
import tempfile
from collections.abc import Generator, Iterable
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
# These profiles have the second trainer with its workers, and relays with theirs.
RUST_TRAINER, RELAYS = "rust-trainer", "relays"
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

    def bring(self, profile: str) -> None:
        """Bring up the services of a profile, beside those that are up."""
        self.engine.run(*self.compose, "--profile", profile, "up", "--detach", seconds=120)
        label = "com.docker.compose"
        form = f'{{{{.Label "{label}.service"}}}} {{{{.ID}}}}'
        ours = ("--filter", f"label={label}.project={PROJECT}", "--format", form)
        found = self.engine.run("docker", "ps", "--all", *ours).splitlines()
        self.containers.update((name, id_) for name, id_ in map(str.split, found))

    def stop(self, services: Iterable[str]) -> None:
        """Stop containers, which are no longer needed."""
        self.engine.run("docker", "stop", "--time", "3", *(self.containers[s] for s in services))

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
        if engine.own:  # it has no network for builds but the host's
            json.dump(_with_the_hosts_network(_services(engine, (*compose, *files))), file)
            file.flush()
            files += ["--file", file.name]
        # C++ takes the layer with Rust from that one's image, which side by side both would make.
        for which in ([RUST], []):
            engine.run(*compose, *files, "build", "--parallel", *which, seconds=BUILD_SECONDS)
        compose = (*compose, *files)
        made = Fleet(engine, compose, {})
        try:
            made.bring(RUST_TRAINER)
            yield made
        finally:
            down = (*_profiles(), "down", "--timeout", "3", "--volumes")
            engine.run(*compose, *down, seconds=120)


def _services(engine: Engine, compose: tuple[str, ...]) -> list[str]:
    return engine.run(*compose, *_profiles(), "config", "--services").split()


def _profiles() -> list[str]:
    return ["--profile", RUST_TRAINER, "--profile", RELAYS]


def _compose(engine: Engine) -> tuple[str, ...]:
    """Return how compose is called here: as docker's plugin, or by its older name."""
    try:
        engine.run("docker", "compose", "version")
    except RuntimeError:
        return ("docker-compose",)
    return ("docker", "compose")


def _with_the_hosts_network(services: list[str]) -> dict[str, Any]:
    return {"services": {s: {"build": {"network": "host"}} for s in services}}

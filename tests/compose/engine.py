"""A docker engine for one run: the one that is given, or one of our own that leaves nothing behind.

Our own has its own data, state and socket in a folder that is removed, opens no firewall and has no
default network, so it changes nothing else on the host. Whatever happens to this process, the
kernel ends the engine with it.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightbus.tests.compose.waiting import wait_for

START_SECONDS = 60.0
STOP_SECONDS = 60.0
NEEDED = ("dockerd", "docker", "docker-compose", "mmdebstrap", "iptables", "setpriv")


class NoEngineError(Exception):
    """There is no engine, and none can be started; the text says what is missing."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers.

    Attributes:
        host: Where it listens, as DOCKER_HOST says it; empty: where docker looks by itself.
        own: It is ours alone, and knows no registry: base images must be made for it.
    """

    host: str
    own: bool

    def run(self, *command: str, seconds: float = 60.0, stdin: str = "") -> str:
        """Run a command against this engine; return its output, or say what it said."""
        done = subprocess.run(  # noqa: S603
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=self.environment(),
            check=False,
        )
        if done.returncode:
            said = (done.stdout + done.stderr).strip()[-4000:]
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Return the environment in which docker and its kin find this engine."""
        return {**os.environ, **({"DOCKER_HOST": self.host} if self.host else {})}

    def answers(self) -> bool:
        """Tell whether it is there."""
        try:
            self.run("docker", "version", seconds=30)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            return False
        return True


@contextmanager
def engine() -> Generator[Engine]:
    """Find an engine, or start one until the block ends.

    Raises:
        NoEngineError: Neither can be done here.
    """
    given = Engine(os.environ.get("DOCKER_HOST", ""), own=False)
    if shutil.which("docker") and given.answers():
        yield given
        return
    if given.host:
        raise NoEngineError(f"no docker engine answers at DOCKER_HOST={given.host}")
    missing = [name for name in NEEDED if not shutil.which(name)]
    if missing:
        raise NoEngineError(f"no docker engine answers, and to start one needs {missing}")
    if os.geteuid() != 0:
        raise NoEngineError("no docker engine answers, and only root can start one")
    with (
        tempfile.TemporaryDirectory(prefix="weightbus-docker-") as folder,
        _started(Path(folder)) as own,
    ):
        yield own


@contextmanager
def _started(folder: Path) -> Generator[Engine]:
    socket = f"unix://{folder}/socket"
    command = ["setpriv", "--pdeathsig", "TERM", "dockerd", f"--host={socket}"]
    command += [f"--{name}={folder}/{name}" for name in ("data-root", "exec-root", "pidfile")]
    command += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
    command += ["--ip-forward=false", "--ip-masq=false"]
    with (folder / "log").open("wb") as log:
        # In a session of its own: a Ctrl-C is for us, and we end it when its containers are gone.
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)  # noqa: S603
    own = Engine(socket, own=True)
    try:
        wait_for(
            lambda: process.poll() is not None or own.answers(), "dockerd's answer", START_SECONDS
        )
        if process.poll() is not None:
            said = (folder / "log").read_text()[-2000:]
            raise NoEngineError(f"dockerd ended with {process.returncode}:\n{said}")
        yield own
    finally:
        _stop(process, folder)


def _stop(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End it, and by force whatever it may have left: shims, and what is mounted."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended by itself meanwhile
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)  # noqa: S603, S607

"""Pictures of what operators see, from a running bus: `make pictures` writes them into docs/.

Of its workers one is stopped, one has another model, one has changed its weights, and one is the
example of level 1, which cannot say what it has.
"""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from weightbus import Publisher, Settings
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.operators.browser import Browser

ROOT = Path(__file__).parent.parent.parent
SECONDS, COLUMNS, LINES = 60.0, 150, 60
LAYOUT = {"head.weight": (10, 64), "head.bias": (10,), "body.weight": (64, 64)}
COMMANDS = {
    "top": ("top", "--once"),
    "status": ("status",),
    "verify": ("verify",),
    "doctor": ("doctor",),
}
WORKER = """
import sys, threading, numpy, weightbus
address, name, heads, spoil = sys.argv[1:]
model = {"head.weight": numpy.zeros((int(heads), 64), "f4"), "head.bias": numpy.zeros(10, "f4"),
         "body.weight": numpy.zeros((64, 64), "f4")}
def spoiled(update):
    model["head.bias"][3] += 1
few = weightbus.Settings(on_commit=spoiled if spoil == "spoil" else None)
with weightbus.Subscriber(address, {"policy": model}, name=name, settings=few) as worker:
    worker.start()
    threading.Event().wait()
"""


def weights(value: float) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {name: np.full(shape, value, np.float32) for name, shape in LAYOUT.items()}


@contextmanager
def running() -> Generator[tuple[str, str]]:
    """Have a bus in which not all is well; give its address, and that of its page."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        few = Settings(ping=0.2, lost_after=1.0)
        publisher = stack.enter_context(Publisher(settings=few, dashboard="127.0.0.1:0"))

        def start(*words: str) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen([sys.executable, *words])  # noqa: S603
            stack.callback(process.wait, SECONDS)
            stack.callback(process.kill)
            return process

        address = publisher.address
        start("-c", WORKER, address, "rollout-0", "10", "")
        stopped = start("-c", WORKER, address, "rollout-1", "10", "")
        start("-c", WORKER, address, "rollout-2", "12", "")
        start("-c", WORKER, address, "rollout-3", "10", "spoil")
        level1 = str(ROOT / "examples" / "level1_worker.py")
        start(level1, address, "policy", str(Path(folder) / "policy.safetensors"))
        publisher.wait_for_workers(5, SECONDS)
        for value in (1.0, 2.0):
            publisher.publish("policy", weights(value), require=4, timeout=SECONDS)
        stopped.send_signal(signal.SIGSTOP)
        publisher.publish("policy", weights(3.0), require=3, timeout=SECONDS)

        def lost() -> bool:
            return publisher.workers()["rollout-1"].state == "lost"

        wait_for(lost, "the stopped one is lost", SECONDS)
        yield address, publisher.shown.dashboard


def shown(*words: str) -> str:
    """Return what a command shows on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "weightbus", *words]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:  # noqa: S603
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 65536):
                text += piece
        except OSError:  # the other side of a terminal is gone
            pass
        process.wait(SECONDS)
    os.close(ours)
    return text.decode().replace("\r\n", "\n")


def main(folder: Path) -> None:
    """Write the pictures."""
    with running() as (address, page), tempfile.TemporaryDirectory() as profile:
        with Browser(Path(profile), 1300, 900) as browser:
            browser.open(page)
            wait_for(lambda: browser.shows("rollout-1 is lost"), "the page", SECONDS)
            browser.picture(folder / "dashboard.png")
        for name, (command, *options) in COMMANDS.items():
            text = shown(command, address, *options)
            console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
            console.print(Text.from_ansi(text.rstrip()), soft_wrap=False)
            title = " ".join(("weightbus", command, "tcp://trainer:5555", *options))
            (folder / f"{name}.svg").write_text(console.export_svg(title=title))
            print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")

"""Many workers of level 1, in one process: `crowd.py ADDRESS MODEL FOLDER COUNT`.

Each is the worker of `examples/level1_worker.py` as it stands, in a thread of its own and with a
connection of its own. They only look less often, since so many look at once.
"""

import sys
import threading
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).parent.parent.parent
POLL_MS, OFTEN = 500, "self.dealer.poll(20)"
STACK_BYTES = 2**18
SOURCE, mark, _ = (
    (ROOT / "examples" / "level1_worker.py").read_text().partition("\nworker = Worker(")
)


def work(code: Any, address: str, model: str, path: Path, over: threading.Event) -> None:
    """Be a worker until it is over."""
    names: dict[str, Any] = {"__name__": "level1_worker"}
    exec(code, names)  # noqa: S102 - a namespace for each: they are made for one in a process
    worker = names["Worker"](address, model, str(path))
    while not over.is_set():
        worker.session()
        over.wait(names["HELLO"])


def main(address: str, model: str, folder: str, count: str) -> None:
    """Start them, and go on until the standard input ends."""
    assert mark
    assert OFTEN in SOURCE
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 2 * int(count))
    threading.stack_size(STACK_BYTES)
    over = threading.Event()
    code = compile(
        SOURCE.replace(OFTEN, f"self.dealer.poll({POLL_MS})"), "level1_worker.py", "exec"
    )
    for number in range(int(count)):
        about = (code, address, model, Path(folder) / f"{number}.safetensors", over)
        threading.Thread(target=work, args=about, daemon=True).start()
    sys.stdin.read()
    over.set()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Measure how long a real `vllm serve` pauses for one update: `... serving_real.py`.

It runs on the CPU, as in `make serving-real`, and generates all the time. The updates, in turns,
are:

staged   weightbus as usual: the version is staged while vLLM generates, then loaded in the pause
wholly   weightbus, with the whole transfer in the pause
disk     in the pause, a checkpoint is written to disk, and vLLM's own `reload_weights` loads it

The time is from the server's reply that it is paused until it is resumed. The longest time between
two words of a streamed answer is measured, too.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from weightbus import Publisher, Settings
from weightbus.codecs.dtypes import name_of_torch
from weightbus.python_client.serving.server import VllmServers
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.serving.real.run import environment
from weightbus.tests.serving.real.served import Served, saved, trained
from weightbus.tests.serving.vllm.run import NEWEST

SECONDS, MIB = 120.0, 2**20
WORDS = 100  # tokens of each answer; after an update, they are computed again, slowly
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


class Generating:
    """A thread that streams answers, and measures the longest time between two words."""

    def __init__(self, served: Served) -> None:
        self._served, self._longest, self._last = served, 0.0, time.perf_counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            with closing(self._served.stream(WORDS)) as words:
                for _ in words:
                    now = time.perf_counter()
                    self._longest, self._last = max(self._longest, now - self._last), now
                    if self._over.is_set():
                        break

    def longest(self) -> float:
        """Return the longest time and reset it; wait for the word that ends the current pause."""
        seen = self._last
        while self._last == seen and self._thread.is_alive():
            time.sleep(0.001)
        longest, self._longest = self._longest, 0.0
        return longest

    def close(self) -> None:
        """Stop generating."""
        self._over.set()
        self._thread.join()


@contextmanager
def serving(folder: Path, version: str) -> Iterator[Served]:
    """Return a server of such a model, until the end."""
    os.environ.update(environment(version))
    served = Served(saved(folder / "model", trained(0, **SIZES)), folder / "log")
    try:
        served.start()
        yield served
    finally:
        served.close()


def measured(served: Served, folder: Path, rounds: int, *, shared: bool) -> None:
    """Measure, and print."""
    publisher = Publisher(settings=Settings(shared_memory=shared))
    servers = VllmServers(served.url, SECONDS)
    staging, inside = (
        Transfers(
            publisher,
            servers,
            model="policy",
            deployment="v",
            timeout=SECONDS,
            pause_timeout=SECONDS,
            pause=mode,
        )
        for mode in ("keep", None)
    )
    model = trained(0, **SIZES)
    weights = model.state_dict()
    for each in staging, inside:
        each.join({n: (name_of_torch(t.dtype), tuple(t.shape)) for n, t in weights.items()})

    def wholly() -> None:
        with servers.paused():
            inside.send(weights)

    def disk() -> None:
        with servers.paused():
            model.save_pretrained(folder / "new")
            asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder / "new")}}
            answer = httpx.post(f"{served.url}/collective_rpc", json=asked, timeout=SECONDS)
            assert answer.status_code == 200, answer.text

    turns: dict[str, Callable[[], object]] = {
        "staged": lambda: staging.send(weights),
        "wholly": wholly,
        "disk": disk,
    }
    stood: dict[str, list[float]] = {name: [] for name in turns}
    waited: dict[str, list[float]] = {name: [] for name in turns}
    with closing(Generating(served)) as generating:
        for number in range(rounds + 1):  # the first warms up
            for name, turn in turns.items():
                for tensor in weights.values():
                    tensor.mul_(1.001)
                generating.longest()
                turn()
                if number:
                    stood[name].append(servers.paused_s)
                    waited[name].append(generating.longest())
    nbytes = sum(t.numel() * t.element_size() for t in weights.values())
    transport = "shared memory" if shared else "network"
    print(f"{nbytes / MIB:.0f} MiB, {transport}; medians of {rounds}: paused; between two words")
    for name in turns:
        paused, between = (1e3 * statistics.median(each[name]) for each in (stood, waited))
        ratio = statistics.median(a / b for a, b in zip(stood["staged"], stood[name], strict=True))
        print(f"{name:8} {paused:6.0f} ms {between:6.0f} ms   staged over it {ratio:.2f}")
    servers.close()
    publisher.close()


def main() -> None:
    """Measure with one vLLM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default=NEWEST)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, serving(Path(made), given.vllm) as served:
        for shared in (True, False):
            measured(served, Path(made), given.rounds, shared=shared)


if __name__ == "__main__":
    main()

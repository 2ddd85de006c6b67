"""Publishing to an inference server whose coroutines await while they read the weights.

    .venv/bin/python benchmarks/servers.py

Eight clients read one after the other without a break, so that there is never nobody reading. Each
publish is to be over within twice the time of the longest reader: one that had begun when the
version came, and in the worst case one that had queued behind the version before.
"""

import argparse
import asyncio
import sys
import threading
import time

import numpy as np

import weightbus

MOST = 2.0  # times the longest reader that a publish may take
TIMEOUT = 10.0  # seconds for each publish


class Server:
    """Clients in coroutines, beside a publisher in a thread.

    Attributes:
        readers: Seconds that each block of reading was held.
        mixed: Answers that were made of two versions.
        publishes: Seconds of each that succeeded.
        failures: What the others raised.
    """

    def __init__(self, nbytes: int, hold: float) -> None:
        self.readers, self.publishes = list[float](), list[float]()
        self.mixed, self.failures = 0, list[str]()
        self._nbytes, self._hold = nbytes, hold
        self._over = threading.Event()

    async def run(self, clients: int, publishes: int) -> None:
        """Serve until so much is published."""
        target = {"w": np.zeros(self._nbytes // 4, np.float32)}
        with weightbus.Publisher() as publisher:
            worker = weightbus.Subscriber(publisher.address, {"m": target}, name="server").start()
            with worker:
                publisher.wait_for_workers(1, timeout=TIMEOUT)
                trainer = asyncio.to_thread(self._publish, publisher, publishes)
                answers = [self._answer(worker, target["w"]) for _ in range(clients)]
                await asyncio.gather(trainer, *answers)

    def _publish(self, publisher: weightbus.Publisher, count: int) -> None:
        weights = {"w": np.zeros(self._nbytes // 4, np.float32)}
        for version in range(1, count + 1):
            weights["w"][:] = version
            before = time.perf_counter()
            try:
                publisher.publish("m", weights, timeout=TIMEOUT)
            except weightbus.PublishError as error:
                self.failures.append(str(error))
            else:
                self.publishes.append(time.perf_counter() - before)
        self._over.set()

    async def _answer(self, worker: weightbus.Subscriber, weights: "np.ndarray") -> None:
        while not self._over.is_set():
            async with worker.reading() as running:
                before, began = float(weights[0]), time.perf_counter()
                await asyncio.sleep(self._hold)
                self.readers.append(time.perf_counter() - began)
                self.mixed += not before == weights[-1] == running.version


def main() -> int:
    """Measure, print a line, and return 0 if the bound holds."""
    parser = argparse.ArgumentParser(description="Publish to a server whose coroutines await.")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--publishes", type=int, default=200)
    parser.add_argument("--hold", type=float, default=0.05, help="seconds awaited in each block")
    parser.add_argument("--nbytes", type=int, default=4 * 2**20)
    asked = parser.parse_args()
    server = Server(asked.nbytes, asked.hold)
    asyncio.run(server.run(asked.clients, asked.publishes))
    slowest, longest = max(server.publishes, default=float("inf")), max(server.readers)
    print(
        f"{asked.clients} clients, {asked.hold * 1000:.0f} ms awaited inside: "
        f"{len(server.publishes)} of {asked.publishes} publishes applied; slowest "
        f"{slowest * 1000:.0f} ms, {slowest / longest:.2f} x the longest reader "
        f"({longest * 1000:.0f} ms; at most {MOST:g}); {len(server.readers)} answers, "
        f"{server.mixed} mixed"
    )
    for failure in server.failures[:3]:
        print(failure)
    kept = len(server.publishes) == asked.publishes and slowest <= MOST * longest
    return 0 if kept and not server.mixed else 1


if __name__ == "__main__":
    sys.exit(main())

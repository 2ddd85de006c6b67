"""weightbus, applied by the worker's main thread at `receive()`."""

import time

from weightbus import Publisher, Subscriber

from ..contender import Kind
from ..fleet import START_SECONDS, Fleet, Worker
from ..model import Model

NEEDS: tuple[str, ...] = ("torch",)
MODEL = "policy"
FOREVER = 86_400.0


class Bus:
    """The publisher's side: staged whole, verified, applied in place, every worker answers.

    Args:
        title: What it is called in tables.
        module: The module whose `work` the workers run.
    """

    kind: Kind = "weightbus"

    def __init__(self, title: str, module: str) -> None:
        self.title = title
        self._module = module

    def start(self, workers: int, model: Model) -> None:
        import torch

        torch.set_num_threads(1)
        self._model, self._workers, self._tensors = model, workers, model.tensors
        self.publisher = Publisher()
        told = {"address": self.publisher.address}
        self.fleet = Fleet(self._module, workers, model.shape, told)
        self.fleet.wait_ready()
        self.publisher.wait_for_workers(workers, START_SECONDS, MODEL)

    def publish_once(self) -> float:
        before = time.perf_counter()
        receipt = self.publisher.publish(MODEL, self._tensors)
        seconds = time.perf_counter() - before
        if len(receipt.in_state("applied")) != self._workers:
            raise RuntimeError(f"not applied by {self._workers} workers: {receipt}")
        return seconds

    def check(self) -> None:
        self.fleet.check(self._model)

    def stop(self) -> None:
        self.fleet.stop()
        self.publisher.close()


def create() -> Bus:
    """Return the publisher's side."""
    return Bus("weightbus, receive()", "weightbus_receive")


def subscriber(worker: Worker) -> Subscriber:
    """Return a subscriber that has joined."""
    import torch

    torch.set_num_threads(1)
    made = Subscriber(
        worker.told["address"],
        {MODEL: worker.model.tensors},
        name=f"worker-{worker.index}",
        on_commit=lambda update: worker.pauses.append(update.seconds),
    )
    if not made.wait_joined(START_SECONDS):
        raise TimeoutError("the publisher has not let this worker in")
    return made


def work(worker: Worker) -> None:
    """Receive for ever."""
    with subscriber(worker) as receiving:
        worker.ready.set()
        while True:
            receiving.receive(FOREVER)

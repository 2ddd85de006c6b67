"""Both sides of copying a model through shared memory, for the limits of that transport."""

import time

from .contender import Kind
from .fleet import Fleet, Worker
from .line import Line, Lines
from .model import Model
from .shelf import reach, shelf


class Copies:
    """The publisher's side: fill the memory, start the workers, wait until all have copied.

    Args:
        title: Its name in tables.
        module: The module that has the workers' function `work`.
        fill_counts: Whether the time includes filling the shared memory.
    """

    kind: Kind = "limit"

    def __init__(self, title: str, module: str, *, fill_counts: bool) -> None:
        self.title = title
        self._module, self._fill_counts = module, fill_counts

    def start(self, workers: int, model: Model) -> None:
        self._model, self._lines = model, Lines()
        with shelf(model.shape.nbytes) as name:
            self._flat = reach(name, model.shape.nbytes)
            told = {"port": self._lines.port, "file": name}
            self._fleet = Fleet(self._module, workers, model.shape, told)
            self._lines.accept(workers)
            self._fleet.wait_ready()

    def publish_once(self) -> float:
        before = time.perf_counter()
        self._model.write_to(self._flat)
        filled = time.perf_counter()
        self._lines.go()
        self._lines.wait()
        return time.perf_counter() - (before if self._fill_counts else filled)

    def check(self) -> None:
        self._fleet.check(self._model)

    def stop(self) -> None:
        self._fleet.stop()
        self._lines.close()


def copy_for_ever(worker: Worker) -> None:
    """Copy each time the publisher starts it."""
    source = reach(worker.told["file"], worker.model.shape.nbytes)
    with Line(worker.told["port"]) as line:
        worker.ready.set()
        while line.wait():
            worker.model.read_from(source)
            line.done()

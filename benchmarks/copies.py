"""Both sides of copying a model through shared memory: the limits of that transport."""

import time

from .contender import Kind
from .fleet import Fleet, Worker
from .line import Line, Lines
from .model import Model
from .shelf import reach, shelf


class Copies:
    """The publisher's side: fill, say go, and wait until every worker has copied.

    Args:
        title: What it is called in tables.
        module: The module whose `work` the workers run.
        fill_counts: Whether filling the shared memory is timed.
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
    """Copy whenever told to."""
    source = reach(worker.told["file"], worker.model.shape.nbytes)
    with Line(worker.told["port"]) as line:
        worker.ready.set()
        while line.wait():
            worker.model.read_from(source)
            line.done()

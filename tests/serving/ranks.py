"""Processes that are ranks of a stand-in server, and can be told when to fail and how.

Each holds the real `Rank`. What loads versions is plain here; with vLLM's wheels at hand
(`make serving`) it is the real engine, in a worker that has the methods of vLLM's own.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any, Literal

import numpy as np

from weightbus.codecs.layout import Signature, difference
from weightbus.python_client.applying.loading import UnchangedError
from weightbus.python_client.serving.rank import Join, Rank, RankVersion
from weightbus.tests.serving.standin import Worker
from weightbus.types import Staged

Phase = Literal["stage", "start", "update", "load"]
How = Literal["raise", "die", "stop", "shape"]
Make = Callable[[int, int], tuple[Any, Any]]  # of a number, and of how often the server started
LAYERS, WIDTH = 3, 64
RANKS = 2  # of a server
SECONDS = 200.0  # that a rank may take to start, with all that it imports, or to end


def weights(value: float) -> dict[str, np.ndarray[Any, Any]]:
    """Return what a trainer publishes."""
    return {f"layers.{i}.weight": np.full((WIDTH, WIDTH), value + i, "<f4") for i in range(LAYERS)}


def summed(model: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return what tells two models apart, bit for bit."""
    hashed = hashlib.sha256()
    for name in sorted(model):
        hashed.update(name.encode() + model[name].tobytes())
    return hashed.hexdigest()


class PlainEngine:
    """As the engine of vLLM's workers, but for a model that is a dictionary."""

    def __init__(self, number: int, count: int = RANKS) -> None:
        self.model = weights(0.0)
        self._number, self.rank = number, Rank(self, last=number == count - 1)

    def sum(self) -> str:
        return summed(self.model)

    def expected(self, value: float) -> str:
        return summed(weights(value))

    def reshape(self, more: int) -> None:
        """Give the last tensor another shape than is published; with 0, that again."""
        self.model[f"layers.{LAYERS - 1}.weight"] = np.zeros((WIDTH, WIDTH + more), "<f4")

    # What a loader does.

    def rehearse(self, tensors: Mapping[str, Signature]) -> str:
        mine = {name: ("F32", array.shape) for name, array in self.model.items()}
        return "; ".join(difference(tensors, mine))

    def record(self, tensors: Mapping[str, Signature]) -> Any:
        """Each rank of this engine has the whole model, so that it is not asked."""
        raise NotImplementedError(tensors)

    def make_ready(self, staged: Staged) -> None:
        """Nothing can be done ahead."""

    def load(self, pairs: Any) -> None:
        for n, (name, array) in enumerate(pairs.arrays()):
            if self.model[name].shape != array.shape:
                said = f"{name}: shape {array.shape} published"
                raise RuntimeError(f"{said}; BROKEN") if n else UnchangedError(said)
            np.copyto(self.model[name], array)
            self.loaded(n)

    def loaded(self, n: int) -> None:
        """The `n`th tensor is loaded."""

    # What an engine does.

    def parse_init_info(self, said: dict[str, Any]) -> Join:
        return Join(**said)

    def init_transfer_engine(self, said: Join) -> None:
        self.rank.join(said, f"dp0-rank{self._number}")

    def start_weight_update(self) -> None:
        self.rank.start()

    def update_weights(self, said: dict[str, Any]) -> None:
        self.rank.update(RankVersion(**said))

    def finish_weight_update(self) -> None:
        self.rank.finish()

    def shutdown(self) -> None:
        self.rank.leave()


def fail(how: How) -> None:
    """Fail as a process does."""
    if how == "raise":
        raise RuntimeError("told to fail")
    os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


class Served:
    """What one rank's process holds."""

    def __init__(self, worker: Any, engine: Any) -> None:
        self.worker, self.engine = worker, engine

    def fail_at(self, phase: Phase, how: How) -> None:
        """Fail once, in a phase of the next session."""
        rank, engine = self.engine.rank, self.engine
        owner, name = {
            "stage": (rank, "fault"),
            "start": (rank, "start"),
            "update": (rank, "update"),
            "load": (engine, "loaded"),
        }[phase]
        before = getattr(owner, name)

        def failing(*given: Any) -> Any:
            setattr(owner, name, before)
            if how == "shape":
                engine.reshape(1)
            else:
                fail(how)
            return before(*given)

        setattr(owner, name, failing)

    def reshape(self, more: int) -> None:
        self.engine.reshape(more)

    def sum(self) -> str:
        return str(self.engine.sum())

    def expected(self, value: float) -> str:
        """Return what `sum` is to be once it has loaded the weights of a value."""
        return str(self.engine.expected(value))


@dataclass(frozen=True)
class Kind:
    """What ranks are made of.

    Attributes:
        make: Makes a worker and its engine, in the rank's process.
        weights: What a trainer publishes, for a value.
    """

    make: Make
    weights: Callable[[float], Mapping[str, Any]]


def plain(number: int, _start: int) -> tuple[Any, Any]:
    engine = PlainEngine(number)
    return Worker(engine), engine


def serve(pipe: Connection, make: Make, number: int, start: int) -> None:
    """Do what is asked, until nobody asks any more."""
    served = Served(*make(number, start))
    pipe.send((True, ""))
    while True:
        try:
            asked, method, given = pipe.recv()
        except EOFError:
            break
        try:
            owner: Any = served.worker
            if asked:
                owner = served if hasattr(served, method) else served.engine
            said = getattr(owner, method)(**given)
        except Exception as error:
            pipe.send((asked, f"{error}"))
        else:
            pipe.send((asked, said or ""))
    served.engine.rank.leave()


class RankProcess:
    """A rank in a process of its own."""

    def __init__(self, make: Make, number: int, start: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, make, number, start), daemon=True
        )
        self.process.start()
        theirs.close()
        self._asked, self._called = Queue[str | None](), Queue[str | None]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                asked, text = self._pipe.recv()
                (self._asked if asked else self._called).put(text)
        except (EOFError, OSError):
            self._asked.put(None)
            self._called.put(None)

    def send(self, method: str, kwargs: dict[str, Any]) -> None:
        self._pipe.send((False, method, kwargs))

    def answer(self) -> str:
        return _given(self._called.get())

    def said(self) -> str:
        """Return what it says to us, past the server."""
        return _given(self._asked.get(timeout=SECONDS))

    def ask(self, method: str, **kwargs: Any) -> str:
        """Ask it something, past the server."""
        self._pipe.send((True, method, kwargs))
        return self.said()

    def go_on(self) -> None:
        """Have it go on, if it was stopped."""
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _given(text: str | None) -> str:
    if text is None:
        raise EOFError("the rank is dead")
    return text

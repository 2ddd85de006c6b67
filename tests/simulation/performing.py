"""What a worker's shell does at once, before the next message; here without the kernel's memory."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weightbus.bus.effects import Copy, Effect, Open, Reserve
from weightbus.bus.messages import Shared
from weightbus.bus.net.copier import copying
from weightbus.bus.staged import Copying, SharedMemory
from weightbus.bus.worker.events import Copied, Granted, OfModel, Opened

Opens = Callable[[Shared, int], SharedMemory | None]
Takes = Callable[[int], NDArray[np.uint8] | None]


class Told(Protocol):
    """A worker's machine, or one model of it."""

    def happened(self, event: OfModel, now: float) -> list[Effect]:
        """Take how an effect has ended."""
        ...


def another_host(_shared: Shared, _nbytes: int) -> SharedMemory | None:
    """Open no shared memory: the publisher's is not of this host."""
    return None


def empty(nbytes: int) -> NDArray[np.uint8]:
    """Take memory."""
    return np.empty(nbytes, np.uint8)


def done(
    machine: Told,
    effects: list[Effect],
    now: float,
    opens: Opens = another_host,
    takes: Takes = empty,
) -> list[Effect]:
    """Do what needs no waiting; return what is left to be done, in order."""
    left: list[Effect] = []
    for effect in effects:
        match effect:
            case Reserve(model, key, nbytes):
                answer = machine.happened(Granted(model, key, takes(nbytes)), now)
            case Open(model, key, shared, nbytes):
                answer = machine.happened(Opened(model, key, opens(shared, nbytes)), now)
            case _:
                left.append(effect)
                continue
        left += done(machine, answer, now, opens, takes)
    return left


def copies(effects: list[Effect]) -> list[Copying]:
    """Return what is to be copied."""
    return [effect.copying for effect in effects if isinstance(effect, Copy)]


def copied(copy: Copying) -> Copied:
    """Copy a version from shared memory, all at once."""
    steps = copying(copy)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return Copied(copy, end.value)

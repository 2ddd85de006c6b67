"""A publisher and workers that share a group key, over real sockets: what keys bring about.

The control channel is not encrypted here, which nobody but a test may do: what is looked at is what
travels on the data channel.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from weightbus.bus.memory.sealed import SealedMemory
from weightbus.bus.net.publisher_loop import PublisherLoop
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.sealer import Sealer
from weightbus.bus.worker.keyring import Keyring
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs.sealing import KEY_BYTES
from weightbus.python_client import publisher as publishing
from weightbus.python_client import subscriber as subscribing


def sealer(draw: Callable[[], bytes] = lambda: secrets.token_bytes(KEY_BYTES)) -> Sealer:
    """Return a sealer with memory of its own."""
    return Sealer(draw, SealedMemory().take, None, time.monotonic())


@contextmanager
def sealing(told: Sealer | None = None) -> Iterator[None]:
    """Have every publisher and subscriber that is made meanwhile seal and open.

    `told`: whose group key workers are told, in place of the right one.
    """
    by = sealer()

    def machine(*arguments: Any, **named: Any) -> PublisherMachine:
        return PublisherMachine(*arguments, **{**named, "keys": lambda _: (told or by).keys})

    def loop(*arguments: Any, **named: Any) -> PublisherLoop:
        return PublisherLoop(*arguments, **{**named, "sealer": by})

    def worker(*arguments: Any, **named: Any) -> WorkerMachine:
        return WorkerMachine(*arguments, **{**named, "keyring": Keyring()})

    with (
        patch.object(publishing, "PublisherMachine", machine),
        patch.object(publishing, "PublisherLoop", loop),
        patch.object(subscribing, "WorkerMachine", worker),
    ):
        yield

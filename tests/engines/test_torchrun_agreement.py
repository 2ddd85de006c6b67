"""The ranks of a torchrun script agree on relays: each rank is a thread here, with one store."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from weightbus import AddressError, DeadlineError, KeysError, Publisher, WeightBusError
from weightbus.bus.trust.keys import generate
from weightbus.python_client.engines import torchrun_relays
from weightbus.python_client.engines.torchrun_relays import (
    Listens,
    Rank,
    Relays,
    meet,
    own_host,
    ranks_text,
)

SECONDS = 30.0  # far more than anything here takes
SHORT = 0.6
NODES, LOCAL = 2, 2
WITHOUT = Listens(None, "", None, False, None)


class Job:
    """Two nodes with two ranks each."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.opened: list[Relays] = []

    def rank(self, number: int) -> Rank:
        return Rank(number, NODES * LOCAL, number // LOCAL, number % LOCAL, "127.0.0.1", 1)

    def call(self, number: int, upstream: Any, **options: Any) -> Relays:
        """Call `relays` as a rank does whose environment is read."""
        rank = self.rank(number)
        own = torchrun_relays.join_of(rank, upstream)
        own.host = options.pop("host", own.host)
        about = {"address": None, "keys": None, "insecure": False, "settings": None} | {
            key: options.pop(key) for key in ("address", "keys", "insecure") if key in options
        }
        listens = Listens(name=f"node-{rank.node}", **about)
        made = meet(rank, self.store, own, ["m"], listens, options.pop("timeout", SECONDS))
        self.opened.append(made)
        return made

    def all(self, calls: "dict[int, Callable[[], Relays]]") -> dict[int, Relays | Exception]:
        """Make the calls at the same time; return what each returns or raises."""

        def outcome(call: Callable[[], Relays]) -> Relays | Exception:
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - which the test looks at
                return error

        with ThreadPoolExecutor(len(calls)) as pool:
            return dict(zip(calls, pool.map(outcome, calls.values()), strict=True))

    def close(self) -> None:
        for each in self.opened:
            each.close()

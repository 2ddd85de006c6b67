"""The table of what may happen to each call of a transfer, for any server that can be asked.

A cell is a call and a fault. Whatever the trainer is told, it must be so: either all ranks run
what it sent and the server says so, or an error names a rank that does not, in the trainer's own
deadline, and the server generates with whole weights that it says it runs. The next transfer
repairs all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import weightbus
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.serving.faulty import FAULTS, Fault, Proxy

# By name, a call of a transfer: its path, and how many calls of that path come before it.
CALLS: dict[str, tuple[str, int]] = {
    "init": ("/init_weight_transfer_engine", 0),
    "start": ("/start_weight_update", 0),
    "update": ("/update_weights", 0),
    "pause": ("/pause", 0),
    "load": ("/update_weights", 1),
    "finish": ("/finish_weight_update", 0),
    "resume": ("/resume", 0),
}
CELLS: list[tuple[str, Fault]] = [(call, fault) for call in CALLS for fault in FAULTS]


@dataclass
class Seen:
    """What a server does and says, whatever it is."""

    whole: Callable[[float], bool]  # all of its ranks run what was sent for a value
    version: Callable[[], str]
    paused: Callable[[], bool]
    settle: Callable[[], None]  # wait until it is at no call any more


def check(
    call: str,
    fault: Fault,
    proxy: Proxy,
    transfers: Callable[[], Transfers],
    weights: Callable[[float], Any],
    seen: Seen,
    seconds: float,
    slack: float,
) -> str:
    """Try one cell; return what the trainer was told at the transfer that the fault was in."""
    path, skip = CALLS[call]
    hit = proxy.hit
    if call == "init":
        proxy.spoil(path, fault)
        sending, told = None, ""
        for _ in range(2):  # an error of the first is the trainer's, who begins again
            try:
                sending = transfers()
                break
            except weightbus.WeightBusError as error:
                told = f"{type(error).__name__}: {error}"
                proxy.give_late()
        assert sending is not None, told
        before = None
    else:
        sending, told = transfers(), ""
        before = sending.send(weights(1.0))
        proxy.spoil(path, fault, skip)
    begun = time.monotonic()
    try:
        receipt = sending.send(weights(2.0))
    except weightbus.PublishError as error:
        receipt = None
        told = f"{type(error).__name__}: {error}"
    assert receipt is not None or "rank" in told, told
    took = time.monotonic() - begun
    sending.resume()  # as `send_weights` of the trainer's engine does
    assert proxy.hit == hit + 1, "the fault was in no call"
    assert took < 2 * seconds + slack, took
    assert not seen.paused()
    new, old = seen.whole(2.0), before is not None and seen.whole(1.0)
    assert new or before is None or old, "the weights are mixed"
    if receipt is not None:
        assert new, told
        assert seen.version() == f"{receipt.epoch}.{receipt.version}"
    elif before is not None:
        runs = before.version + new
        assert seen.version() == f"{before.epoch}.{runs}", told
    at = {"late at start": "start", "late at pause": "pause", "late at finish": "finish"}.get(fault)
    if at is None:
        proxy.give_late()
        seen.settle()
        stands = seen.paused()
        assert not stands or call == "pause"
        assert stands or seen.whole(2.0) == new, "a call that came late has changed the weights"
    else:
        proxy.give_late_at(CALLS[at][0])
        try:
            sending.send(weights(3.0))
        except weightbus.PublishError as error:
            told += f"; then {error}"
        proxy.give_late()
        seen.settle()
    receipt = sending.send(weights(4.0))
    sending.resume()
    assert seen.whole(4.0)
    assert seen.version() == f"{receipt.epoch}.{receipt.version}"
    assert not seen.paused()
    return told or "all ranks run it"

"""Scenarios of connections that are no ZMTP, or on which single bytes are wrong.

A ZeroMQ library may give a connection up for good after one such error, or wait for long where it
sees none: a worker has to notice, and call again.
"""

from functools import partial

from weightbus.bus.net.zmtp import GREETING
from weightbus.tests.conformance.decisions import heard_twice_more
from weightbus.tests.conformance.proxy import Proxy, framed
from weightbus.tests.conformance.publishing import SMALL, expect
from weightbus.tests.conformance.rules import How, Spoil, lose
from weightbus.tests.conformance.stage import Stage
from weightbus.tests.conformance.weights import noise

READY = b"\x05READY\x0bSocket-Type\0\0\0"
ROUTER = GREETING + b"\x04\x1c" + READY + b"\x06ROUTER"

OTHERS = {  # what answers first
    "nothing": b"",
    "web-server": b"HTTP/1.1 400 Bad Request\r\n" * 9,
    "old-zeromq": b"\x01\0",
    "other-mechanism": GREETING.replace(b"NULL\0", b"PLAIN"),
    "publisher-of-news": GREETING + b"\x04\x19" + READY + b"\x03PUB",
    "damaged-command": GREETING + b"\x04\x05\x04READ",
    "huge-frame": GREETING + b"\x02" + b"\x7f" * 8,
    "refusal": GREETING + b"\x04\x0a\x05ERROR\x03300",
    "huge-message": ROUTER + b"\x02" + b"\x7f" * 8,
    "unknown-flags": ROUTER + b"\xff\0" * 8,
    "endless-message": ROUTER + b"\x02" + (2**26).to_bytes(8, "big"),
    "garbage": ROUTER + framed([b"garbage"]),
}
HANDSHAKE: tuple[tuple[bool, int, How], ...] = (  # up, which byte, how
    (False, 0, "damaged"),  # the signature
    (False, 1, "skipped"),
    (False, 9, "doubled"),
    (False, 10, "damaged"),  # the version
    (False, 12, "damaged"),  # the mechanism
    (False, 64, "damaged"),  # flags
    (False, 65, "skipped"),  # length
    (False, 67, "damaged"),  # the name of the command
    (True, 0, "skipped"),
    (True, 12, "damaged"),
    (True, 65, "doubled"),
)
LATER: tuple[tuple[bool, int, How], ...] = (  # of what comes in a session
    (False, 0, "damaged"),  # flags
    (False, 0, "doubled"),
    (False, 1, "skipped"),  # length
    (False, 1, "doubled"),
    (False, 10, "damaged"),  # text
    (False, 10, "doubled"),
    (True, 0, "damaged"),
    (True, 1, "skipped"),
    (True, 10, "doubled"),
)


def another_answers_first(stage: Stage) -> None:
    """joins at an address where something else answered first: nothing, garbage, another ZeroMQ"""
    stage.open()
    for name, answer in OTHERS.items():
        stage.proxy.answers = [answer]
        stage.worker(name, join=False)
        stage.settled(lambda: "nobody has called" if stage.proxy.answers else "")
    all_join(stage)


def damaged_handshakes(stage: Stage) -> None:
    """joins though a byte of the handshakes on both channels is wrong, missing, or comes twice"""
    stage.open()
    for how in HANDSHAKE:
        mine = Spoil("control", *how)
        stage.proxy.spoils += [mine, Spoil("data", *how)]
        stage.worker(str(mine), join=False)
        stage.settled(partial(left, stage.proxy, mine))
    all_join(stage)
    stage.settled(lambda: next((left(stage.proxy, s) for s in stage.proxy.spoils), ""))
    for driver in stage.drivers:
        stage.wait_subscribed(driver.name)
    stage.publish(noise(stage.chance, SMALL))


def damaged_control(stage: Stage) -> None:
    """comes back when a byte of its control connection is wrong, missing, or comes twice"""
    stage.open()
    for how in LATER:
        spoil = Spoil("control", *how)
        worker = stage.worker(str(spoil))
        heard_twice_more(stage, worker.name)  # the session has settled
        expect(stage.proxy.spoil(worker.name, spoil) == 1, f"{worker.name} has no connection")
    stage.proxy.rules = [lose(stage.which("chunk", channel="data"))]  # only control carries any
    stage.outcome(noise(stage.chance, SMALL), require=0)
    for driver in stage.drivers:
        driver.wait_applied("m", stage.publisher.epoch, 1)


def left(proxy: Proxy, spoil: Spoil) -> str:
    """Say what is wrong while no connection has taken this one."""
    return f"{spoil} was of no use" if spoil in proxy.spoils else ""


def all_join(stage: Stage) -> None:
    """Wait until every worker is in, and publish."""
    for driver in stage.drivers:
        driver.wait_event("joined")
    stage.publish(noise(stage.chance, SMALL))

"""Whatever the other side does, every blocking call is back by its deadline.

The calls are those of the public classes that take a `timeout`: one without a row here fails. Late
is what goes beyond the deadline, a tenth of it and a quarter of a second, as seen from a thread of
this process that sleeps just as long: where a busy host wakes that late, too, it is not the call.
"""

import asyncio
import inspect
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import zmq

from weightbus import (
    DeadlineError,
    Publisher,
    PublishError,
    Settings,
    Subscriber,
    WorkersMissingError,
)
from weightbus.bus.headers import encode
from weightbus.bus.messages import Hello
from weightbus.tests.compose.waiting import stop, wait_for
from weightbus.tests.trust.sealed_bus import keys_in
from weightbus.torchrl import WeightSyncScheme, ZMQWeightSyncScheme

T = TypeVar("T")
DEADLINE = 0.4
SECONDS = 60.0  # far more than it takes until things are as a test wants them
SCRIPT = Path(__file__).with_name("bus_process.py")
PEERS = ("absent", "stopped", "black hole")
KINDS = [(f"{p}, keys {keyed}", p, keyed) for p in PEERS for keyed in (False, True)]
NBYTES = 64
WEIGHTS = {"a": np.zeros(NBYTES // 2, np.uint8), "b": np.zeros(NBYTES // 2, np.uint8)}
LASTING = Settings(
    ping=1.0, lost_after=30.0
)  # nobody is lost meanwhile, which would end calls early
EXPECTED: Any = {"timeout": DEADLINE, "expect": 1}
FELL_SHORT = PublishError, DeadlineError  # of workers; or of time to copy, on a busy host


def raising(
    call: Callable[[], object], errors: type[Exception] | tuple[type[Exception], ...]
) -> None:
    """Make a call that must fail so."""
    with pytest.raises(errors):
        call()


def busy_close(publisher: Publisher) -> None:
    """Close while a publish is under way that would take far longer."""
    future = publisher.publish_async("m", WEIGHTS, timeout=SECONDS, expect=1)
    publisher.close(timeout=DEADLINE)
    assert isinstance(future.exception(0), PublishError)


def undecided(publisher: Publisher) -> None:
    """Wait for the decision on a publish that takes far longer."""
    future = publisher.publish_async(
        "m", WEIGHTS, commit="together", timeout=10 * DEADLINE, expect=2
    )
    assert publisher.wait_for_commit(future, DEADLINE) is None


# What each call does with a publisher whose worker says nothing; closing comes last.
OF_PUBLISHER: dict[str, Callable[[Publisher], object]] = {
    "publish": lambda p: raising(lambda: p.publish("m", WEIGHTS, **EXPECTED), FELL_SHORT),
    "publish_many": lambda p: raising(
        lambda: p.publish_many({"m": WEIGHTS}, **EXPECTED), FELL_SHORT
    ),
    "publish_async": lambda p: raising(
        lambda: p.publish_async("m", WEIGHTS, **EXPECTED).result(), FELL_SHORT
    ),
    "publish_awaitable": lambda p: raising(
        lambda: asyncio.run(p.publish_awaitable("m", WEIGHTS, **EXPECTED)), FELL_SHORT
    ),
    "rollback": lambda p: raising(
        lambda: p.rollback("m", p.history("m")[0].key, **EXPECTED), FELL_SHORT
    ),
    "wait_for_commit": undecided,
    "wait_for_workers": lambda p: raising(
        lambda: p.wait_for_workers(2, timeout=DEADLINE), WorkersMissingError
    ),
    "wait_for_workers_awaitable": lambda p: raising(
        lambda: asyncio.run(p.wait_for_workers_awaitable(2, DEADLINE)), WorkersMissingError
    ),
    "close": busy_close,
    "close_awaitable": lambda p: asyncio.run(p.close_awaitable(DEADLINE)),
}


def reads(subscriber: Any) -> None:
    """Read weights that nothing comes for."""
    with subscriber.reading(timeout=DEADLINE):
        pass


# What each does with a worker whose publisher says nothing.
OF_SUBSCRIBER: dict[str, Callable[[Subscriber], object]] = {
    "receive": lambda s: s.receive(DEADLINE),
    "receive_awaitable": lambda s: asyncio.run(s.receive_awaitable(DEADLINE)),
    "stage": lambda s: raising(lambda: s.stage(DEADLINE, version=1), TimeoutError),
    "flush": lambda s: s.flush(DEADLINE),
    "reading": reads,
    "wait_for_version": lambda s: s.wait_for_version("m", timeout=DEADLINE),
    "wait_for_version_awaitable": lambda s: asyncio.run(
        s.wait_for_version_awaitable("m", timeout=DEADLINE)
    ),
    "wait_joined": lambda s: s.wait_joined(DEADLINE),
}


def sent_later(sender: Any) -> None:
    """Send, and wait for it."""
    sender.send_async(timeout=DEADLINE)
    raising(lambda: sender.wait_async(timeout=DEADLINE), FELL_SHORT)


# What each does with a scheme whose other side is not there: on the sender's side, or on the other.
OF_SENDER: dict[str, Callable[[Any], object]] = {
    "connect": lambda s: s.connect(timeout=DEADLINE),
    "send": lambda s: raising(lambda: s.send(timeout=DEADLINE), FELL_SHORT),
    "send_async": sent_later,
    "wait_async": sent_later,
}
OF_RECEIVER: dict[str, Callable[[Any], object]] = {
    "connect": lambda r: raising(lambda: r.connect(timeout=DEADLINE), TimeoutError),
    "receive": lambda r: r.receive(timeout=DEADLINE),
    "reading": reads,
}


def blocking(face: type) -> set[str]:
    """Return the names of the methods of a class that take a timeout."""
    found = set[str]()
    for name, method in inspect.getmembers(face, inspect.isfunction):
        parameters = inspect.signature(method).parameters.values()
        if not name.startswith("_") and any(p.name == "timeout" for p in parameters):
            found.add(name)
    return found


def test_every_blocking_call_has_a_row() -> None:
    assert blocking(Publisher) == set(OF_PUBLISHER)
    assert blocking(Subscriber) == set(OF_SUBSCRIBER)
    assert blocking(WeightSyncScheme) == set(OF_SENDER) | set(OF_RECEIVER)


def late(call: Callable[[], object]) -> float:
    """Return by how many seconds more than it may a call overran its deadline."""
    slept: list[float] = []
    begin, never = threading.Barrier(2), threading.Event()

    def sleep() -> None:
        begin.wait(SECONDS)
        begun = time.monotonic()
        never.wait(DEADLINE)
        slept.append(time.monotonic() - begun)

    control = threading.Thread(target=sleep)
    control.start()
    begin.wait(SECONDS)
    begun = time.monotonic()
    call()
    took = time.monotonic() - begun
    control.join(SECONDS)
    return took - 1.1 * slept[0] - 0.25


def all_late(callees: Mapping[str, T], call: Callable[[T], object]) -> dict[str, float]:
    """Call all of them at once; return by how many seconds which of them were late."""
    with ThreadPoolExecutor(len(callees)) as pool:
        found = pool.map(lambda callee: late(lambda: call(callee)), callees.values())
        return {kind: over for kind, over in zip(callees, found, strict=True) if over > 0}


def test_what_is_late_is_found() -> None:
    assert late(lambda: threading.Event().wait(3 * DEADLINE + 0.25)) > 0


def stopped(undo: ExitStack, **facts: Any) -> tuple[Callable[[], None], dict[str, Any]]:
    """Start a process of the bus; return what stops it in its tracks, and what it said."""
    process = undo.enter_context(
        subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, str(SCRIPT), json.dumps({"nbytes": NBYTES, **facts})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    )
    undo.callback(process.kill)
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())

    return partial(stop, process.pid), told


def publisher_of(undo: ExitStack, folder: Path, peer: str, *, keyed: bool) -> Publisher:
    """Return a publisher that keeps a version, and whose worker says nothing any more."""
    keys, own = keys_in(folder / "keys") if keyed else (None, None)
    kept = len(OF_PUBLISHER)  # so that no late write removes the version that `rollback` takes
    publisher = Publisher(state=folder, history=kept, settings=LASTING, keys=keys or "")
    undo.enter_context(publisher)
    publisher.publish("m", WEIGHTS, settings=Settings(wait="none"))
    wait_for(lambda: publisher.history("m"), "a version on disk", SECONDS)
    if peer == "stopped":
        told = {"role": "worker", "address": publisher.address, "name": "w0"}
        stop, _ = stopped(undo, **told, keys=str(keys / "workers" / "+.json") if keys else "")
        publisher.wait_for_workers(1, SECONDS)
        stop()
    if peer == "black hole":
        context = undo.enter_context(zmq.Context[zmq.Socket[bytes]]())
        silent = undo.enter_context(context.socket(zmq.DEALER))
        silent.linger = 0
        if own is not None:
            silent.curve_publickey, silent.curve_secretkey = (
                own.public.encode(),
                own.secret.encode(),
            )
            silent.curve_serverkey = own.publisher.encode()
        silent.connect(publisher.address)
        silent.send(encode(Hello(name="w0", instance="0" * 32, models={"m": None})))
        publisher.wait_for_workers(1, SECONDS)
    return publisher


@pytest.fixture(name="publishers", scope="module")
def _publishers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Publisher]]:
    with ExitStack() as undo:
        yield {
            kind: publisher_of(undo, tmp_path_factory.mktemp("state"), peer, keyed=keyed)
            for kind, peer, keyed in KINDS
        }


@pytest.mark.parametrize("name", OF_PUBLISHER)
def test_a_publishers_calls_are_back_in_time(publishers: dict[str, Publisher], name: str) -> None:
    assert all_late(publishers, OF_PUBLISHER[name]) == {}


def subscriber_of(undo: ExitStack, folder: Path, peer: str, *, keyed: bool) -> Subscriber:
    """Return a worker whose publisher says nothing, or never has."""
    keys, own = keys_in(folder) if keyed else (None, None)
    hole = undo.enter_context(socket.socket())
    hole.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{hole.getsockname()[1]}"  # nobody is there as yet
    stop = None
    if peer == "stopped":
        stop, told = stopped(undo, role="publisher", keys=str(keys or ""))
        address = told["address"]
    if peer == "black hole":
        hole.listen()  # the kernel takes connections, and nobody ever reads
    models = {"m": {name: array.copy() for name, array in WEIGHTS.items()}}
    subscriber = Subscriber(address, models, settings=LASTING, keys=own or "")
    undo.enter_context(subscriber)
    if stop is not None:
        assert subscriber.wait_joined(SECONDS)
        stop()
    return subscriber


@pytest.fixture(name="subscribers", scope="module")
def _subscribers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subscriber]]:
    with ExitStack() as undo:
        yield {
            kind: subscriber_of(undo, tmp_path_factory.mktemp("keys"), peer, keyed=keyed)
            for kind, peer, keyed in KINDS
        }


@pytest.mark.parametrize("name", OF_SUBSCRIBER)
def test_a_workers_calls_are_back_in_time(subscribers: dict[str, Subscriber], name: str) -> None:
    assert all_late(subscribers, OF_SUBSCRIBER[name]) == {}


@pytest.mark.parametrize("name", OF_SENDER)
def test_a_senders_calls_are_back_in_time(name: str) -> None:
    sender: Any = ZMQWeightSyncScheme(num_workers=1, liveness=LASTING)
    sender.init_on_sender(model_id="policy", model=torch.nn.Linear(2, 1))
    try:
        if name != "connect":
            sender.connect()
        assert late(lambda: OF_SENDER[name](sender)) <= 0
    finally:
        sender.shutdown()


@pytest.mark.parametrize("name", OF_RECEIVER)
def test_a_receivers_calls_are_back_in_time(name: str) -> None:
    """Only a model on the meta device waits for its first weights."""
    waits = name == "connect"
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"tcp://127.0.0.1:{hole.getsockname()[1]}"
        receiver: Any = ZMQWeightSyncScheme(address, liveness=LASTING)
        model = torch.nn.Linear(2, 1, device="meta" if waits else "cpu")
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        try:
            if not waits:
                receiver.connect()
            assert late(lambda: OF_RECEIVER[name](receiver)) <= 0
        finally:
            receiver.shutdown()

"""What makes no sense is refused where it is given, before anything happens, in words.

One row for each parameter of each public call: what it is called with, and what may be passed.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.errors import AddressError, UnknownWorkerError
from weightbus.bus.protocol_limits import TEXT_MAX
from weightbus.python_client.checks import SECONDS_MAX
from weightbus.python_client.cli.commands import app
from weightbus.python_client.publishing.options import PublishOptions, keywords_of
from weightbus.tests.client.settling import settled
from weightbus.torchrl import NoWeightSyncScheme, RayWeightUpdater, ZMQWeightSyncScheme

WEIGHTS = {"w": np.zeros(3, np.float32)}
TIMES: list[object] = [math.inf, -math.inf, math.nan, 1e10, SECONDS_MAX * 1.001, "1", True]
NO_TIMES = [*TIMES, None]
POSITIVE = [*NO_TIMES, 0, -1.0]
COUNTS: list[object] = [-1, 1.5, "1", None, True, math.nan, 10**400]
NAMES: list[object] = ["", "a b", "x" * 129, 5, b"m"]
CHOICES: list[object] = ["x", "", None, 1, True]
ADDRESSES: list[object] = ["x", "tcp://", 5, "ipc://" + "x" * TEXT_MAX, b"tcp://127.0.0.1:1"]
ODD: list[object] = [5, "x", object()]

# By name of a call and its parameter: the call, and what it must refuse.
Row = tuple[Callable[["Ends", Any], object], Sequence[object]]


class Ends:
    """A publisher that nobody joins, and a subscriber that finds no publisher."""

    def __init__(self) -> None:
        self.publisher = Publisher(settings=Settings(shared_memory=False))
        self.subscriber = Subscriber(
            "tcp://127.0.0.1:1", {"m": {}}, settings=Settings(shared_memory=False)
        )


def made(kind: type, *arguments: Any, **options: Any) -> None:
    """Make one, which must fail; if it does not, close it."""
    kind(*arguments, **settled(options)).close()


def publisher(name: str) -> Callable[[Ends, Any], object]:
    return lambda _, bad: made(Publisher, **{"shared_memory": False, name: bad})


def subscriber(name: str) -> Callable[[Ends, Any], object]:
    where = {"address": "tcp://127.0.0.1:1", "models": {"m": WEIGHTS}}
    return lambda _, bad: made(Subscriber, **{**where, name: bad})


def publish(call: str, **options: Any) -> Callable[[Ends, Any], object]:
    (name,) = options
    return lambda ends, bad: getattr(ends.publisher, call)("m", WEIGHTS, **settled({name: bad}))


ROWS: dict[str, Row] = {
    "Publisher address": (publisher("address"), [*ADDRESSES, None]),
    "Publisher data": (publisher("data"), ADDRESSES),
    "Publisher keys": (publisher("keys"), [5, b"x"]),
    "Publisher advertise": (publisher("advertise"), [*ADDRESSES, ""]),
    "Publisher epoch": (publisher("epoch"), [v for v in COUNTS if v is not None] + [0]),
    "Publisher chunk_bytes": (publisher("chunk_bytes"), [*COUNTS, 0]),
    "Publisher queue": (publisher("queue"), [*COUNTS, 0]),
    "Publisher history": (
        lambda _, bad: made(Publisher, state="/nowhere", history=bad),
        [*COUNTS, 10**6],
    ),
    "Publisher settings": (lambda _, bad: made(Publisher, settings=bad), ODD),
    "Subscriber address": (subscriber("address"), [*ADDRESSES, None]),
    "Subscriber models": (
        subscriber("models"),
        [{}, "m", None, ["m"], {5: WEIGHTS}, {"": WEIGHTS}],
    ),
    "Subscriber name": (subscriber("name"), NAMES),
    "Subscriber keys": (subscriber("keys"), [5, b"x"]),
    "Subscriber bytes_max": (subscriber("bytes_max"), COUNTS),
    "Subscriber settings": (
        lambda _, bad: made(Subscriber, "tcp://127.0.0.1:1", {"m": WEIGHTS}, settings=bad),
        ODD,
    ),
    "Subscriber before_apply": (subscriber("before_apply"), [5, "x"]),
    "Subscriber on_commit": (subscriber("on_commit"), [5, "x"]),
    **{
        f"{call} {name}": (publish(call, **{name: bad}), bad)
        for call in ("publish", "publish_async")
        for name, bad in {
            "timeout": POSITIVE,
            "wait": CHOICES,
            "commit": CHOICES,
            "require": [*COUNTS, "x", [], [""], [5]],
            "workers": ["w0", 5, [5], [""], [None]],
            "metadata": ["step", 5, ["step"], {"step": 5}, {5: "step"}, {"": "x"}],
        }.items()
    },
    "publish model": (lambda e, bad: e.publisher.publish(bad, WEIGHTS), [*NAMES, None]),
    "prepare model": (lambda e, bad: e.publisher.prepare(bad, WEIGHTS), [*NAMES, None]),
    "wait_for_workers count": (lambda e, bad: e.publisher.wait_for_workers(bad, 1.0), COUNTS),
    "wait_for_workers timeout": (lambda e, bad: e.publisher.wait_for_workers(0, bad), NO_TIMES),
    "wait_for_workers model": (lambda e, bad: e.publisher.wait_for_workers(0, 1.0, bad), NAMES),
    "receive timeout": (lambda e, bad: e.subscriber.receive(bad), NO_TIMES),
    "reading timeout": (lambda e, bad: e.subscriber.reading(bad).__enter__(), NO_TIMES),
    "wait_joined timeout": (lambda e, bad: e.subscriber.wait_joined(bad), NO_TIMES),
    "wait_for_version timeout": (
        lambda e, bad: e.subscriber.wait_for_version("m", timeout=bad),
        NO_TIMES,
    ),
    "wait_for_version version": (
        lambda e, bad: e.subscriber.wait_for_version("m", bad, timeout=0),
        COUNTS,
    ),
    "wait_for_version epoch": (
        lambda e, bad: e.subscriber.wait_for_version("m", epoch=bad, timeout=0),
        COUNTS,
    ),
    "Settings ping": (lambda _, bad: Settings(ping=bad), [*POSITIVE, 1e-4, 5.0]),
    "Settings lost_after": (lambda _, bad: Settings(lost_after=bad), [*POSITIVE, 36_001, 1.9]),
    "scheme timeout": (lambda _, bad: NoWeightSyncScheme(timeout=bad), POSITIVE),
    "scheme over the bus timeout": (lambda _, bad: ZMQWeightSyncScheme(timeout=bad), POSITIVE),
    "updater timeout": (lambda _, bad: RayWeightUpdater({}, [], timeout=bad), POSITIVE),
}
CASES = [(name, bad) for name, (_, values) in ROWS.items() for bad in values]


@pytest.fixture(name="ends", scope="module")
def _ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.subscriber.close()
    ends.publisher.close()


def _id_of(value: object) -> str:
    """Return what tells it from others; without an address, which is another in each process."""
    return re.sub(" at 0x.*", "", str(value))[:40]


@pytest.mark.parametrize(("name", "bad"), CASES, ids=_id_of)
def test_a_bad_value_is_refused(ends: Ends, name: str, bad: object) -> None:
    with pytest.raises((ValueError, AddressError)) as caught:
        ROWS[name][0](ends, bad)
    given = next(iter(bad)) if isinstance(bad, list | dict) and len(bad) == 1 else bad
    secret = name.endswith("keys")  # perhaps: its type is enough
    shown = type(given).__name__ if secret else repr(given)[:10]
    assert shown in str(caught.value), "it says what was given"
    assert not ends.publisher._models, "nothing was begun"  # noqa: SLF001 # pyright: ignore


def test_afterwards_everything_still_works(ends: Ends) -> None:
    """No bad value has ended a thread."""
    assert ends.publisher.workers() == {}
    ends.publisher.wait_for_workers(0, 60.0)
    assert ends.publisher.publish("m", WEIGHTS).version == 1
    assert ends.subscriber.receive(-1.0) is None, "a deadline that has passed is one"
    with ends.subscriber.reading(-1.0):
        pass


@pytest.mark.parametrize("bad", ["inf", "nan", "1e10"])
@pytest.mark.parametrize(
    "command",
    [
        ["publish", ".", "--model", "m", "--bind", "tcp://127.0.0.1:0", "--timeout"],
        ["subscribe", "tcp://127.0.0.1:1", "--model", "m", "--out", "x", "--timeout"],
        ["demo", "--seconds"],
    ],
    ids=lambda command: str(command[0]),
)
def test_a_bad_time_on_the_command_line_is_wrong_usage(command: list[str], bad: str) -> None:
    done = CliRunner().invoke(app, [*command, bad])
    assert (done.exit_code, "Traceback" in done.output) == (2, False)


class _Awaited:
    async def __call__(self, _told: object) -> None:
        """Nobody would wait for this."""


async def _awaited(_told: object, _more: int = 0) -> None:
    """Nobody would wait for this."""


HOOKS = [_awaited, partial(_awaited, _more=1), _Awaited()]


@pytest.mark.parametrize("name", ["before_apply", "on_commit"])
@pytest.mark.parametrize("hook", HOOKS, ids=["function", "partial", "object"])
def test_a_coroutine_function_is_no_hook(name: str, hook: Any) -> None:
    """It would be called, never run, and the version would count as applied."""
    with pytest.raises(TypeError, match=rf"{name}=.* give a plain function"):
        made(Subscriber, address="tcp://127.0.0.1:1", models={"m": WEIGHTS}, **{name: hook})


def test_nor_is_it_a_callback_for_workers(ends: Ends) -> None:
    with pytest.raises(TypeError, match=r"callback=.* give a plain function"):
        ends.publisher.on_worker(_awaited)


@pytest.mark.parametrize("name", ["publish", "publish_async", "publish_awaitable", "rollback"])
def test_a_misspelt_keyword_is_told_by_the_name_of_the_call(ends: Ends, name: str) -> None:
    call: Callable[..., Any] = getattr(ends.publisher, name)

    async def awaited() -> None:
        await call("m", WEIGHTS, timout=1)

    text = re.escape(f"Publisher.{name}() got an unexpected keyword argument 'timout'")
    with pytest.raises(TypeError, match=text):
        asyncio.run(awaited())


def test_keywords_of_the_call_before_are_not_taken_for_others() -> None:
    """A call with the very same keywords is checked once; what is equal to them is not the same."""
    names, said = ["nobody"], {"step": "1"}
    with Publisher() as made:
        receipt = made.publish("m", WEIGHTS, metadata=said, require=0)
        said["step"] = "2"
        later = made.publish("m", WEIGHTS, metadata=said, require=0)
        assert [receipt.metadata, later.metadata] == [{"step": "1"}, {"step": "2"}]
        for _ in range(2):
            made.publish("m", WEIGHTS, require=0)
            with pytest.raises(ValueError, match="=False: choose"):
                made.publish("m", WEIGHTS, require=False)
        with pytest.raises(UnknownWorkerError, match="nobody"):
            made.publish("m", WEIGHTS, workers=names)
        names.append("w?")
        with pytest.raises(ValueError, match=r"w\?"):
            made.publish("m", WEIGHTS, workers=names)


def test_keywords_that_are_passed_on_stand_in_the_order_of_the_call() -> None:
    names = [each.name for each in keywords_of(Publisher.publish)]
    assert names == list(PublishOptions.__annotations__)

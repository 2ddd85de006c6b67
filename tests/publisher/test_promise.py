"""A publish that failed, and that nobody asks about, says so once."""

import asyncio
import gc
import logging
import re
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, PublishError
from weightbus.bus.event_log import RateLimitedWarning
from weightbus.bus.net.publisher_loop import Promise
from weightbus.bus.receipt import Receipt

SECONDS = 30.0  # far more than anything here takes
UNASKED = "its result was not requested"
RECEIPT = Receipt("m", 7, 1, 40, 0.1, "", {})


def failed() -> Promise:
    promise = Promise(RateLimitedWarning(logging.getLogger("weightbus.test"), f"{UNASKED}: %s"))
    promise.set_exception(PublishError("applied by 0 of 1 workers", RECEIPT))
    return promise


def ask_result(future: Future[Receipt]) -> None:
    with suppress(PublishError):
        future.result(SECONDS)


def ask_exception(future: Future[Receipt]) -> None:
    assert future.exception(SECONDS) is not None


def await_it(future: Future[Receipt]) -> None:
    async def waiting() -> None:
        with suppress(PublishError):
            await asyncio.wrap_future(future)

    asyncio.run(waiting())


def test_one_that_is_dropped_says_so(caplog: pytest.LogCaptureFixture) -> None:
    promise = failed()
    del promise
    gc.collect(1)
    assert caplog.text.count(f"{UNASKED}: applied by 0 of 1 workers") == 1


@pytest.mark.parametrize("ask", [ask_result, ask_exception, await_it])
def test_one_that_somebody_asks_about_does_not(
    ask: Callable[[Future[Receipt]], None], caplog: pytest.LogCaptureFixture
) -> None:
    promise = failed()
    ask(promise)
    del promise
    gc.collect(1)
    assert not caplog.records


@pytest.mark.parametrize("end", ["open", "cancelled", "achieved", "closed"])
def test_one_that_has_not_failed_does_not(end: str, caplog: pytest.LogCaptureFixture) -> None:
    promise = Promise(RateLimitedWarning(logging.getLogger("weightbus.test"), "%s"))
    match end:
        case "cancelled":
            promise.cancel()
        case "achieved":
            promise.set_result(RECEIPT)
        case "closed":  # whoever has closed it knows
            promise.set_exception(RuntimeError("closed"))
        case _:
            pass
    del promise
    gc.collect(1)
    assert not caplog.records


def test_a_publishers_log_has_one_line_however_often_it_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights: dict[str, Any] = {"w": np.zeros(10, np.float32)}
    with Publisher() as publisher:
        for _ in range(3):
            publisher.publish_async("m", weights, expect=1, timeout=1.0)
        with pytest.raises(PublishError):
            publisher.publish("m", weights, expect=1, timeout=2.0)
    (record,) = [r for r in caplog.records if UNASKED in r.getMessage()]
    assert re.search(r"m version \d is applied by 0 of 1 workers", record.getMessage())
    assert record.levelno == logging.WARNING

"""Calls of the store of torch.distributed, which end also if the process that has it is stopped."""

import gc
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from weightbus.python_client.publishing import ranks
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0


@pytest.fixture(name="caller")
def _caller() -> ranks._Caller:  # pyright: ignore[reportPrivateUsage]
    return ranks._Caller()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def fails() -> None:
    raise RuntimeError("the store is lost")


def test_a_call_returns_what_the_store_does_and_raises_its_error(
    caller: ranks._Caller,  # pyright: ignore[reportPrivateUsage]
) -> None:
    assert caller(lambda: 5, SECONDS) == 5
    with pytest.raises(RuntimeError, match="the store is lost"):
        caller(fails, SECONDS)
    seen = list[int]()
    caller.later(fails)
    caller.later(lambda: seen.append(1))
    assert caller(lambda: [*seen], SECONDS) == [1]


def test_a_call_that_is_not_answered_ends_and_so_does_each_one_after_it_until_the_answer_comes(
    caller: ranks._Caller,  # pyright: ignore[reportPrivateUsage]
) -> None:
    answer = threading.Event()
    with pytest.raises(ranks.StoreSilentError, match="rank 0 does not answer"):
        caller(lambda: answer.wait(SECONDS), 0.05)
    begun = time.monotonic()
    with pytest.raises(ranks.StoreSilentError):
        caller(lambda: 5, SECONDS)
    assert time.monotonic() - begun < SECONDS / 2
    answer.set()
    wait_for(lambda: _answers(caller), "an answer", SECONDS)


def test_the_next_round_waits_for_the_answer_to_an_earlier_call(
    caller: ranks._Caller,  # pyright: ignore[reportPrivateUsage]
) -> None:
    answer = threading.Event()
    with pytest.raises(ranks.StoreSilentError):
        caller(lambda: answer.wait(SECONDS), 0.05)
    caller.try_again()
    later = threading.Timer(0.2, answer.set)
    later.start()
    assert caller(lambda: 5, SECONDS) == 5
    later.join()


def _answers(caller: ranks._Caller) -> bool:  # pyright: ignore[reportPrivateUsage]
    try:
        return caller(lambda: True, SECONDS)
    except ranks.StoreSilentError:
        return False


def test_the_thread_ends_with_what_it_calls_for() -> None:
    caller = ranks._Caller()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    thread = caller(threading.current_thread, SECONDS)
    assert thread.is_alive()
    del caller
    gc.collect()
    wait_for(lambda: not thread.is_alive(), "the end of the thread", SECONDS)


def test_the_first_verdict_of_a_round_stands() -> None:
    stores: Any = dist
    dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)
    try:
        alone = ranks.Ranks(None)
        decide = vars(ranks.Ranks)["_decide"]
        assert decide(alone, 7, "late rank 1") == "late rank 1"
        assert decide(alone, 7, "go 0") == "late rank 1"
        assert decide(alone, 8, "go 0") == "go 0"
    finally:
        dist.destroy_process_group()

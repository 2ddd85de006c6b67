"""The table of `cells.py` with a real `vllm serve`, which answers as transformers does."""

from contextlib import closing
from functools import cache
from typing import Any

import pytest

import weightbus
from weightbus.codecs.dtypes import name_of_torch
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.serving.cells import CELLS, Seen, check
from weightbus.tests.serving.faulty import Fault, Proxy
from weightbus.tests.serving.real.served import LIMIT, Served, answer_of, trained
from weightbus.vllm import VllmServers

SECONDS = 12.0  # that a version, or a pause, may take
SLACK = 20.0  # that a busy machine may take for all else

pytestmark = pytest.mark.timeout(LIMIT)


@cache
def model(seed: int) -> Any:
    return trained(seed)


@cache
def answer(seed: int) -> list[int]:
    return answer_of(model(seed))


def weights(value: float) -> dict[str, Any]:
    found: dict[str, Any] = model(int(value)).state_dict()
    return found


@pytest.mark.parametrize(("call", "fault"), CELLS)
def test_a_call_that_is_spoilt(served: Served, call: str, fault: Fault) -> None:
    layout = {n: (name_of_torch(t.dtype), tuple(t.shape)) for n, t in weights(1).items()}
    with (
        closing(Proxy(served.url)) as proxy,
        closing(VllmServers(proxy.url)) as servers,
        weightbus.Publisher() as publisher,
    ):

        def transfers() -> Transfers:
            made = Transfers(
                publisher,
                servers,
                model="policy",
                deployment="vllm",
                timeout=SECONDS,
                pause_timeout=SECONDS,
            )
            made.join(layout)
            return made

        seen = Seen(
            whole=lambda value: served.answer() == answer(int(value)),
            version=lambda: served.get("/weight_info")["weight_version"],
            paused=lambda: served.get("/is_paused")["is_paused"],
            settle=lambda: None,  # the proxy waits for what it gives late
        )
        told = check(call, fault, proxy, transfers, weights, seen, SECONDS, SLACK)
        print(f"CELL {call} | {fault} | {told}")

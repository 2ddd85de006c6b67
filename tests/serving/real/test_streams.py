"""What a real `vllm serve` streams while trainers are killed, and the server is stopped.

Each token is the choice of one version, with all before it given, and versions come in their order.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import pytest

import weightbus
from weightbus.codecs.dtypes import name_of_torch
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.serving.real.served import LIMIT, Served, chosen, saved, trained
from weightbus.vllm import VllmServers

LENGTH = 1500  # tokens of a stream
STREAMS = 4  # at a time
TOKENS = int(os.environ.get("TOKENS", "12000"))
SECONDS = 8.0  # that a version, or a pause, may take
KILLED_AFTER = 1.0, 8.0
STOPPED_FOR = 1.0, 10.0  # at most
BATCH = 100  # seeds of a trainer


def trainer(url: str, first: int, pipe: Connection) -> None:
    """Send versions until it is killed; say of each which it is, and what became of it."""
    weights = trained(first).state_dict()
    with weightbus.Publisher() as publisher:
        sending: Transfers | None = None
        for seed in range(first, first + BATCH):
            pipe.send((seed, "sends"))
            try:
                if sending is None:
                    sending = Transfers(
                        publisher,
                        VllmServers(url),
                        model="policy",
                        deployment="vllm",
                        timeout=SECONDS,
                        pause_timeout=SECONDS,
                    )
                    sending.join(
                        {n: (name_of_torch(t.dtype), tuple(t.shape)) for n, t in weights.items()}
                    )
                sending.send(trained(seed).state_dict())
                sending.resume()
            except weightbus.WeightBusError as error:
                pipe.send((seed, f"{error}"))
            else:
                pipe.send((seed, "sent"))


@cache
def model(seed: int) -> Any:
    return trained(seed)


@pytest.fixture(name="served", scope="module")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    made = Served(saved(folder / "model", model(1)), folder / "log")
    try:
        made.start()
        yield made
    finally:
        made.close()


def of_no_version(words: list[int], seeds: list[int]) -> int:
    """Count the tokens that no version has chosen, in their order."""
    choices, at, lost = {seed: chosen(model(seed), words) for seed in seeds}, 0, 0
    for i in range(len(words)):
        while at < len(seeds) and not choices[seeds[at]][i]:
            ahead = [j for j in range(at, len(seeds)) if choices[seeds[j]][i]]
            if not ahead:
                lost += 1
                break
            at = ahead[0]
    return lost


@pytest.mark.timeout(2 * LIMIT)
def test_no_token_is_of_no_version(served: Served) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weightbus.tests.serving.real.test_streams"])
    chance, told, streams = random.Random(7), [(1, "sent")], list[list[int]]()
    kills = stops = 0

    def stream(_: int) -> list[int]:
        return [token for tokens in served.stream(LENGTH) for token in tokens]

    with ThreadPoolExecutor(STREAMS) as threads:
        running = [threads.submit(stream, n) for n in range(TOKENS // LENGTH)]
        first = BATCH
        while not all(future.done() for future in running):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=trainer, args=(served.url, first, theirs))
            process.start()
            theirs.close()
            wait_for(mine.poll, "a trainer has begun", SECONDS * 10)
            end = time.monotonic() + chance.uniform(*KILLED_AFTER)
            while time.monotonic() < end and not all(f.done() for f in running):
                if chance.random() < 0.02:
                    stops += 1
                    served.signal(signal.SIGSTOP)
                    with suppress(EOFError):  # until the trainer says what it makes of that
                        if mine.poll(chance.uniform(*STOPPED_FOR)):
                            told.append(mine.recv())
                    served.signal(signal.SIGCONT)
                with suppress(EOFError):
                    if mine.poll(0.1):
                        told.append(mine.recv())
            process.kill()
            process.join()
            kills += 1
            with suppress(EOFError):
                while mine.poll(0):
                    told.append(mine.recv())
            first += BATCH
        streams = [future.result() for future in running]
    seeds = sorted({seed for seed, _ in told})
    done = sum(word == "sent" for _, word in told)
    lost = [of_no_version(words, seeds) for words in streams]
    total = sum(map(len, streams))
    print(
        f"TOKENS {total}, of no version {sum(lost)}; {len(seeds)} versions, {done} sent, "
        f"{kills} trainers killed, {stops} times stopped"
    )
    assert sum(lost) == 0
    assert total == TOKENS // LENGTH * LENGTH
    assert kills
    assert stops
    assert done > 1

"""What a real `vllm serve` streams while it, its rank and its trainers are killed and stopped.

Each token is the choice of one version, with all before it given, and versions come in their order.
"""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

import httpx
import pytest

import weightbus
from weightbus.codecs.dtypes import name_of_torch
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.serving.real.served import (
    LIMIT,
    START_SECONDS,
    Served,
    answers,
    chosen,
    trained,
)
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
                wait_for(partial(answers, url), "the server answers", START_SECONDS)
            else:
                pipe.send((seed, "sent"))


@cache
def model(seed: int) -> Any:
    return trained(seed)


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


class Streams:
    """Streams of a server that is killed and started again, until they have TOKENS tokens.

    Attributes:
        run: The number of the server's present run.
        tokens: For each stream, the run that it belongs to, and its tokens.
    """

    def __init__(self, served: Served) -> None:
        self.run, self.tokens = 0, list[tuple[int, list[int]]]()
        self._served, self._up = served, threading.Event()
        self._up.set()

    @property
    def total(self) -> int:
        return sum(len(words) for _, words in self.tokens)

    def read(self, _: int) -> None:
        """Read one stream after the other."""
        while self.total < TOKENS:
            assert self._up.wait(START_SECONDS)
            run, words = self.run, list[int]()
            self.tokens.append((run, words))
            try:
                for tokens in self._served.stream(LENGTH):
                    words += tokens
            except (httpx.TransportError, AssertionError, KeyError):  # it ends in the middle
                wait_for(partial(self._is_past, run), "it runs again", START_SECONDS)

    def _is_past(self, run: int) -> bool:
        return self.run > run

    def restart(self, kill: Callable[[], None]) -> None:
        """Kill the server, or a part of it, and start it again, with the model on its disk."""
        self._up.clear()
        kill()
        self._served.kill()
        self._served.start()
        self.run += 1
        self._up.set()


@pytest.mark.timeout(4 * LIMIT)
def test_no_token_is_of_no_version(served: Served) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weightbus.tests.serving.real.test_streams"])
    chance, told, streams = random.Random(7), [(1, "sent")], Streams(served)
    since = [1]  # by run of the server, the first seed that was sent to it
    kills = stops = 0
    ends = [served.kill_rank, served.kill]  # what ends a run of the server, in their order

    with ThreadPoolExecutor(STREAMS) as threads:
        running = [threads.submit(streams.read, n) for n in range(STREAMS)]
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
            if ends and streams.total > TOKENS * (streams.run + 1) / 3:  # the trainer goes on
                streams.restart(ends.pop(0))
                since.append(max(seed for seed, _ in told))
                sent = len([seed for seed, word in told if word == "sent"])

                def again(pipe: Connection = mine, before: int = sent) -> bool:
                    while pipe.poll(0):
                        try:
                            told.append(pipe.recv())
                        except EOFError:
                            pytest.fail(f"the trainer has ended: {told[-1]}")
                    return sum(word == "sent" for _, word in told) > before

                wait_for(again, "a version is sent to the new run", 10 * SECONDS)
            process.kill()
            process.join()
            kills += 1
            with suppress(EOFError):
                while mine.poll(0):
                    told.append(mine.recv())
            first += BATCH
        for future in running:
            future.result()
    seeds = sorted({seed for seed, _ in told})
    done = sum(word == "sent" for _, word in told)
    lost = [
        of_no_version(words, [1, *(seed for seed in seeds if seed >= max(2, since[run]))])
        for run, words in streams.tokens
    ]
    print(
        f"TOKENS {streams.total}, of no version {sum(lost)}; {len(seeds)} versions, {done} sent, "
        f"{kills} trainers killed, {stops} times stopped, {streams.run} times started again"
    )
    assert sum(lost) == 0
    assert streams.total >= TOKENS
    assert not ends
    assert kills
    assert stops
    assert done > 1

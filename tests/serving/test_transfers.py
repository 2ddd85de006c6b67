"""A trainer's transfers: who is waited for, what each server says, and what late calls do."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import weightbus
from weightbus.python_client.serving.server import VllmServer, VllmServers
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.serving.cells import CALLS
from weightbus.tests.serving.faulty import Fault, Proxy
from weightbus.tests.serving.ranks import RANKS, PlainEngine, summed, weights
from weightbus.tests.serving.standin import Executor, Local, Server, Worker
from weightbus.vllm import ServerError

SECONDS = 20.0
SHORT = 1.0  # for what does not come
SLACK = 8.0  # that a busy machine may take for all else
LAYOUT = {n: ("F32", tuple(t.shape)) for n, t in weights(0.0).items()}
MISSING = "start_weight_update", "update_weights", "finish_weight_update"


class Bench:
    """Servers of two ranks each, a proxy before the first, and a trainer."""

    def __init__(self, count: int = 1) -> None:
        self.engines = [[PlainEngine(n) for n in range(RANKS)] for _ in range(count)]
        self.servers = [Server([Local(Worker(e)) for e in engines]) for engines in self.engines]
        self.proxy = Proxy(self.servers[0].url)
        self.client = VllmServers([self.proxy.url, *(s.url for s in self.servers[1:])])
        self.publisher = weightbus.Publisher()

    def transfers(self, client: Any = None, seconds: float = SECONDS, **given: Any) -> Transfers:
        about: dict[str, Any] = {"model": "policy", "deployment": "v", "timeout": SECONDS, **given}
        client = self.client if client is None else client
        made = Transfers(self.publisher, client, **about, pause_timeout=seconds)
        made.join(LAYOUT)
        return made

    def runs(self, value: float) -> list[bool]:
        """Return of each server whether its ranks run what was sent for a value."""
        wanted = summed(weights(value))
        return [all(e.sum() == wanted for e in engines) for engines in self.engines]

    def close(self) -> None:
        for engines in self.engines:
            for engine in engines:
                engine.shutdown()
        for server in self.servers:
            server.close()
        self.proxy.close()
        self.client.close()
        self.publisher.close()


@pytest.fixture(name="bench")
def _bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def other(bench: Bench, name: str = "evaluator") -> weightbus.Subscriber:
    """Return a worker that wants the same model, applies all at once, and is not a rank."""
    target = {n: np.zeros_like(t) for n, t in weights(0.0).items()}
    return weightbus.Subscriber(bench.publisher.address, {"policy": target}, name=name).start()


def test_ranks_are_waited_for_by_name_and_others_get_the_version_too(bench: Bench) -> None:
    with other(bench) as worker:
        bench.publisher.wait_for_workers(1, SECONDS, "policy")
        receipt = bench.transfers().send(weights(1.0))
        ranks = ["v-dp0-rank0", "v-dp0-rank1"]
        assert {receipt.workers[n].state for n in ranks} == {"applied"}
        assert worker.wait_for_version("policy", receipt.version, timeout=SECONDS) is not None
        assert bench.runs(1.0) == [True]


def test_another_worker_does_not_stand_in_for_ranks_that_load_nothing(bench: Bench) -> None:
    with other(bench), other(bench, "bridge"):
        sending = bench.transfers(seconds=SHORT)
        before = sending.send(weights(1.0))
        bench.proxy.spoil("/finish_weight_update", "refused")
        with pytest.raises(weightbus.PublishError, match="applied by 0 of the 2 workers") as told:
            sending.send(weights(2.0))
        assert {told.value.receipt.workers[n].state for n in ("evaluator", "bridge")} == {"applied"}
        assert "v-dp0-rank0 staged" in str(told.value)
        assert "evaluator" not in str(told.value)
        assert bench.servers[0].version == f"{before.epoch}.{before.version}"
        assert bench.runs(1.0) == [True]
        sending.send(weights(3.0))
        assert bench.runs(3.0) == [True]


def test_a_worker_that_is_no_rank_is_not_taken_for_one_that_is_missing(bench: Bench) -> None:
    sending = bench.transfers(timeout=SHORT)
    sending.send(weights(1.0))
    bench.engines[0][1].shutdown()
    bench.servers[0].executor.ranks = bench.servers[0].executor.ranks[:1]  # it does not come back
    with other(bench), pytest.raises(weightbus.WorkersMissingError, match="v-dp0-rank1"):
        sending.send(weights(2.0))
    assert bench.runs(1.0) == [True]


def test_ranks_of_a_client_that_cannot_count_are_known_by_what_they_are_called(
    bench: Bench,
) -> None:
    class Uncounted:
        """As vLLM's own client of Ray's actors."""

        def __getattr__(self, name: str) -> Any:
            if name not in ("init_weight_transfer_engine", *MISSING):
                raise AttributeError(name)
            return getattr(bench.client, name)

    with other(bench, "v2-dp0-rank0-evaluator"):
        bench.publisher.wait_for_workers(1, SECONDS, "policy")
        sending = bench.transfers(Uncounted(), ranks=RANKS)
        receipt = sending.send(weights(1.0))
        assert "v-dp0-rank1" in receipt.in_state("applied")
        assert bench.runs(1.0) == [True]
        assert bench.servers[0].version == f"{receipt.epoch}.{receipt.version}"


def test_a_call_that_hangs_is_given_up_in_time_and_said_with_the_rank(bench: Bench) -> None:
    sending = bench.transfers(seconds=4 * SHORT)
    sending.send(weights(1.0))
    bench.proxy.spoil("/finish_weight_update", "hung")
    begun = time.monotonic()
    with pytest.raises(weightbus.PublishError, match=r"v-dp0-rank0 staged.*v-dp0-rank1 staged"):
        sending.send(weights(2.0))
    assert time.monotonic() - begun < 4 * SHORT + SLACK < SECONDS
    assert bench.runs(1.0) == [True]
    assert not bench.servers[0].paused
    bench.proxy.give_late()
    assert bench.runs(1.0) == [True], "a call that came late has loaded what was given up"


def test_a_client_whose_calls_never_end_is_given_up_in_time(bench: Bench) -> None:
    end = threading.Event()

    class Endless:
        """A client of the trainer's own, without a limit of seconds."""

        def __init__(self) -> None:
            self.hangs = False

        def __getattr__(self, name: str) -> Any:
            if name not in ("init_weight_transfer_engine", *MISSING):
                raise AttributeError(name)
            if self.hangs and name == "finish_weight_update":
                return lambda *_: end.wait(SECONDS)
            return getattr(bench.client, name)

    client = Endless()
    sending = bench.transfers(client, seconds=4 * SHORT, ranks=RANKS)
    sending.send(weights(1.0))
    client.hangs = True
    begun = time.monotonic()
    with pytest.raises(weightbus.PublishError, match="v-dp0-rank0 staged"):
        sending.send(weights(2.0))
    assert time.monotonic() - begun < 8 * SHORT + SLACK
    end.set()
    client.hangs = False
    sending.send(weights(3.0))
    assert bench.runs(3.0) == [True]


def test_of_two_servers_each_says_what_its_own_ranks_run() -> None:
    bench = Bench(2)
    try:
        sending = bench.transfers(seconds=4 * SHORT)
        before = sending.send(weights(1.0))
        bench.proxy.spoil("/finish_weight_update", "refused")
        with pytest.raises(weightbus.PublishError, match="v0-dp0-rank0 staged") as told:
            sending.send(weights(2.0))
        epoch, version = told.value.receipt.epoch, told.value.receipt.version
        assert bench.runs(2.0) == [False, True]
        assert bench.runs(1.0) == [True, False]
        assert [s.version for s in bench.servers] == [
            f"{before.epoch}.{before.version}",
            f"{epoch}.{version}",
        ]
        assert not any(s.paused for s in bench.servers)
        sending.send(weights(3.0))
        assert bench.runs(3.0) == [True, True]
    finally:
        bench.close()


def test_a_rank_that_fails_in_the_pause_before_it_loads_has_the_others_release_the_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = bench.transfers()
    before = sending.send(weights(1.0))
    server, (other_one, fails) = bench.servers[0], bench.engines[0]
    update, holds = fails.update_weights, list[bool]()

    def failing(said: dict[str, Any]) -> None:
        if server.paused and not said["cancel"]:
            holds.append(other_one.rank._staged is not None)  # noqa: SLF001
            raise RuntimeError("told to fail")
        update(said)

    monkeypatch.setattr(fails, "update_weights", failing)
    with pytest.raises(weightbus.PublishError, match=r"told to fail.*v-dp0-rank1"):
        sending.send(weights(2.0))
    assert holds == [True]
    assert other_one.rank._staged is None  # noqa: SLF001
    assert bench.runs(1.0) == [True]
    assert server.version == f"{before.epoch}.{before.version}"
    assert not server.paused
    monkeypatch.undo()
    sending.send(weights(3.0))
    assert bench.runs(3.0) == [True]


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"vllm": False}, "it is not a vLLM server; check the address"),
        ({"dev": False}, "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config"),
        ({}, "cannot be reached"),
    ],
    ids=["another program", "no routes", "nothing"],
)
def test_a_trainer_without_a_vllm_at_the_url_is_told_so(
    bench: Bench, server: dict[str, Any], words: str
) -> None:
    none = Server(**server)
    if not server:
        none.close()
    client = VllmServers(none.url)
    with pytest.raises(ServerError, match=f"{none.url} .*{words}"):
        bench.transfers(client)
    client.close()
    if server:
        none.close()


def test_a_server_that_takes_no_calls_stays_paused_and_goes_on_with_the_next_transfer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = bench.transfers(seconds=4 * SHORT)
    sending.send(weights(1.0))
    hangs = threading.Event()
    go_on, pass_on = threading.Event(), bench.proxy.pass_on

    def stopped(caller: Any, body: bytes) -> None:
        if caller.path == "/finish_weight_update":
            hangs.set()
        if hangs.is_set():
            go_on.wait(SECONDS)  # and it never hears of the call
        else:
            pass_on(caller, body)

    monkeypatch.setattr(bench.proxy, "pass_on", stopped)
    begun = time.monotonic()
    with pytest.raises(weightbus.PublishError, match="v-dp0-rank0 staged") as told:
        sending.send(weights(2.0))
    assert time.monotonic() - begun < 4 * SHORT + SLACK < SECONDS
    assert "may still be paused, POST /resume" in "".join(told.value.__notes__)
    assert bench.servers[0].paused, "it would generate before it has heard that it is given up"
    monkeypatch.undo()
    go_on.set()
    sending.send(weights(3.0))
    assert bench.runs(3.0) == [True]
    assert not bench.servers[0].paused


def test_a_server_that_was_started_again_has_nothing_to_release_and_the_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(2)
    try:
        sending = bench.transfers(seconds=4 * SHORT)
        sending.send(weights(1.0))

        deaf, own = threading.Event(), Executor.call

        def call(executor: Executor, method: str, **given: Any) -> None:
            if method == "finish_weight_update":
                deaf.set()
            if deaf.is_set() and method != "start_weight_update":
                raise RuntimeError("deaf")
            own(executor, method, **given)

        monkeypatch.setattr(Executor, "call", call)
        with pytest.raises(weightbus.PublishError, match="deaf"):
            sending.send(weights(2.0))
        with pytest.raises(ServerError, match="deaf"):  # and publishes nothing
            sending.send(weights(3.0))
        for engine in bench.engines[0]:
            engine.shutdown()
        bench.engines[0] = [PlainEngine(n) for n in range(RANKS)]
        bench.servers[0].executor = Executor([Local(Worker(e)) for e in bench.engines[0]])
        monkeypatch.undo()
        released = len(bench.servers[1].calls)
        sending.send(weights(4.0))
        assert bench.runs(4.0) == [True, True]
        calls = bench.servers[1].calls[released:]
        assert "finish_weight_update" in calls[: calls.index("pause keep")]
    finally:
        bench.close()


def test_who_dies_when_ranks_have_loaded_leaves_a_server_that_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is killed makes no further call: what it has called must do."""
    sending = bench.transfers()
    sending.send(weights(1.0))
    finish = bench.client.finish_weight_update

    class KilledError(BaseException):
        pass

    def last(name: str | None = None) -> None:
        finish(name)
        for call in ("resume", "update_weight_version", "update_weights", "finish_weight_update"):
            monkeypatch.setattr(bench.client, call, die)
        raise KilledError

    def die(*_: object) -> None:
        raise KilledError

    monkeypatch.setattr(bench.client, "finish_weight_update", last)
    with pytest.raises(KilledError):
        sending.send(weights(2.0))
    assert bench.runs(2.0) == [True]
    assert bench.servers[0].version == f"{bench.publisher.epoch}.2"


@pytest.mark.parametrize("joined", [False, True], ids=["no trainer", "another trainer"])
def test_a_session_that_loads_nothing_claims_no_version(bench: Bench, joined: bool) -> None:
    server, calls = bench.servers[0], bench.client.servers[0]
    if joined:
        bench.transfers().send(weights(1.0))
    said = server.version
    told = list[str]()
    for call in (
        calls.start_weight_update,
        lambda: calls.update_weights({"epoch": 77, "version": 5, "deadline": 0.2}),
        lambda: calls.finish_weight_update("77.5"),
    ):
        try:
            call()
        except ServerError as error:
            told.append(str(error))
    assert len(told) == (1 if joined else 2), "of an update without a trainer, and of each finish"
    assert joined or "no trainer has joined" in told[0]
    assert server.version == said
    assert bench.runs(1.0 if joined else 0.0) == [True]
    bench.transfers().send(weights(2.0))
    assert bench.runs(2.0) == [True]


def test_what_a_call_of_an_older_version_says_changes_nothing(bench: Bench) -> None:
    sending = bench.transfers()
    first, second = sending.send(weights(1.0)), sending.send(weights(2.0))
    calls = bench.client.servers[0]
    calls.start_weight_update()
    calls.update_weights({"epoch": first.epoch, "version": first.version, "deadline": SECONDS})
    with pytest.raises(ServerError, match=r"version 1 of epoch .* is not loaded"):
        calls.finish_weight_update(f"{first.epoch}.{first.version}")
    assert bench.runs(2.0) == [True]
    assert bench.servers[0].version == f"{second.epoch}.{second.version}"


def test_a_trainer_of_an_older_weightbus_still_loads(bench: Bench) -> None:
    """It does not say when the server stands still, and calls finish when it does."""
    sending = bench.transfers()
    sending.send(weights(1.0))
    options: Any = {"commit": "together", "require": ["v-dp0-rank0", "v-dp0-rank1"]}
    future = bench.publisher.publish_async("policy", weights(2.0), **options, timeout=SECONDS)
    key = bench.publisher.wait_for_commit(future, SECONDS)
    assert key is not None
    calls = bench.client.servers[0]
    calls.start_weight_update()
    calls.update_weights({"epoch": key[0], "version": key[1], "deadline": SECONDS, "cancel": ""})
    calls.finish_weight_update()
    assert len(future.result(SECONDS).in_state("applied")) == RANKS
    assert bench.runs(2.0) == [True]


@pytest.mark.parametrize("dtype", ["bf16", {"layers.0.*": "bf16"}])
def test_ranks_try_what_is_published_and_not_what_is_trained(dtype: Any) -> None:
    bench = Bench()
    bench.publisher.close()
    bench.publisher = weightbus.Publisher(settings=weightbus.Settings(dtype=dtype))
    tried: list[Any] = []

    def rehearse(tensors: Any) -> str:
        tried.append(tensors)
        return ""

    for engine in bench.engines[0]:
        vars(engine).update(rehearse=rehearse, load=lambda _: None)
    try:
        bench.transfers().send(weights(1.0))
    finally:
        bench.close()
    of = {name: signature[0] for name, signature in tried[0].items()}
    assert of["layers.0.weight"] == "BF16"
    assert of["layers.1.weight"] == ("BF16" if dtype == "bf16" else "F32")


def test_no_option_is_advised_that_ranks_do_not_have(bench: Bench) -> None:
    sending = bench.transfers()
    doubled = {name: array.astype(np.float64) for name, array in weights(1.0).items()}
    with pytest.raises(weightbus.PublishError, match="dtype F64 published, F32 here") as told:
        sending.send(doubled)
    assert "cast=True" not in str(told.value)


def test_two_threads_that_send_at_once_each_send(bench: Bench) -> None:
    sending = bench.transfers()
    with ThreadPoolExecutor(2) as threads:
        sends: list[Callable[[], Any]] = [
            threads.submit(sending.send, weights(value)).result for value in (1.0, 2.0)
        ]
        receipts = [send() for send in sends]
    assert {r.version for r in receipts} == {1, 2}
    newest = max(receipts, key=lambda r: r.version)
    assert bench.runs(2.0 if newest is receipts[1] else 1.0) == [True]
    assert bench.servers[0].version == f"{newest.epoch}.{newest.version}"


@pytest.mark.parametrize(
    ("call", "loads"),
    [
        ("start_weight_update", False),
        ("update_weights", False),
        ("pause", False),
        ("finish_weight_update", True),
        ("resume", True),
    ],
)
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["next trainer", "by hand"])
def test_a_trainer_that_dies_at_a_call_leaves_whole_weights_to_the_next(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    loads: bool,
    done: bool,
    by_hand: bool,
) -> None:
    first = bench.transfers().send(weights(1.0))
    own, dead = getattr(bench.client, call), VllmServers(bench.proxy.url)

    class KilledError(BaseException):
        pass

    def last(*given: Any) -> None:
        if done:
            own(*given)
        for name in (*MISSING, "pause", "resume", "update_weight_version"):
            monkeypatch.setattr(dead, name, die)
        raise KilledError

    def die(*_: object) -> None:
        raise KilledError

    dying = bench.transfers(dead)
    monkeypatch.setattr(dead, call, last)
    with pytest.raises(KilledError):
        dying.send(weights(2.0))
    new = loads and (done or call == "resume")
    assert bench.runs(2.0 if new else 1.0) == [True]
    assert bench.servers[0].version == f"{first.epoch}.{first.version + new}"
    paused = (call, done) in {("pause", True), ("resume", False)} or call == "finish_weight_update"
    assert bench.servers[0].paused == paused
    if by_hand:
        bench.client.resume()
        assert not bench.servers[0].paused
        assert bench.runs(2.0 if new else 1.0) == [True]
    dead.close()
    bench.publisher.close()
    bench.publisher = weightbus.Publisher()
    receipt = bench.transfers().send(weights(3.0))
    assert bench.runs(3.0) == [True]
    assert not bench.servers[0].paused
    assert bench.servers[0].version == f"{receipt.epoch}.{receipt.version}"


def test_a_call_is_heard_though_the_server_listens_no_more_where_it_has_answered() -> None:
    """As vLLM's front end does after an error, and any server after a rest."""
    heard, answered = list[bytes](), list[socket.socket]()
    said = b'{"error": {"message": "told to fail"}}'
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(SECONDS)

        def answer() -> None:
            for _ in range(2):
                answered.append(listening.accept()[0])
                heard.append(answered[-1].recv(65536).split(b"\r\n")[0])
                head = f"HTTP/1.1 500 No\r\nContent-Length: {len(said)}\r\n\r\n"
                answered[-1].sendall(head.encode() + said)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = VllmServer(url, timeout=4 * SHORT)
        for call in (server.start_weight_update, server.finish_weight_update):
            with pytest.raises(ServerError, match="told to fail"):
                call()
        thread.join(SECONDS)
        server.close()
    for connection in answered:
        connection.close()
    assert heard == [b"POST /start_weight_update HTTP/1.1", b"POST /finish_weight_update HTTP/1.1"]


def test_a_finish_that_comes_before_the_pause_loads_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are under way, whose caches are of the old weights."""
    sending = bench.transfers()
    sending.send(weights(1.0))
    pause, ran = bench.client.pause, list[list[bool]]()

    def late(mode: Any) -> None:
        with pytest.raises(ServerError, match="is not loaded"):
            bench.client.servers[0].finish_weight_update()
        ran.append(bench.runs(1.0))
        pause(mode)

    monkeypatch.setattr(bench.client, "pause", late)
    sending.send(weights(2.0))
    assert ran == [[True]]
    assert bench.runs(2.0) == [True]


@pytest.mark.parametrize("fault", ["lost", "unanswered", "late"])
@pytest.mark.parametrize("call", CALLS)
def test_what_no_answer_comes_to_is_called_again(bench: Bench, call: str, fault: Fault) -> None:
    path, before = CALLS[call]
    if call == "init":
        bench.proxy.spoil(path, fault)
    sending = bench.transfers()
    sending.send(weights(1.0))
    if call != "init":
        bench.proxy.spoil(path, fault, before)
        sending.send(weights(2.0))
    assert bench.proxy.hit == 1
    assert bench.runs(1.0 if call == "init" else 2.0) == [True]
    assert not bench.servers[0].paused

"""The ranks of a torchrun script agree on relays: here each rank is a thread, with one store."""

import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import HashStore

from weightbus import AddressError, DeadlineError, KeysError, Publisher, Subscriber, WeightBusError
from weightbus.bus.trust.keys import generate
from weightbus.python_client.engines.torchrun_relays import (
    Listens,
    Relays,
    TorchrunRank,
    join_of,
    meet,
    ranks_text,
)
from weightbus.python_client.publishing.ranks import own_host

SECONDS = 30.0  # far more than anything here takes
SHORT = 0.5
LOCAL = 2  # ranks a node
ELSEWHERE = "tcp://127.0.0.1:1"  # where no publisher is yet


@dataclass
class Job:
    """Two nodes with two ranks each, and the relays that calls have returned."""

    store: Any = field(default_factory=HashStore)
    made: list[Relays] = field(default_factory=list)

    def call(self, number: int, upstream: Any, timeout: float = SECONDS, **how: Any) -> Relays:
        """Make the call as a rank whose environment has been read; `host` is the host's id."""
        rank = TorchrunRank(number, 2 * LOCAL, number // LOCAL, number % LOCAL, "127.0.0.1", 1)
        own = join_of(rank, upstream)
        own.host = how.pop("host", own.host)
        about: dict[str, Any] = {
            "address": None,
            "keys": None,
            "insecure": False,
            "settings": None,
        } | how
        listens = Listens(name=f"node-{rank.node}", **about)
        relays = meet(rank, self.store, own, ["m"], listens, timeout)
        self.made.append(relays)
        return relays

    def calls(self, **each: Any) -> list[Any]:
        """Make the call on all ranks; return what it returns or raises on each.

        Args:
            each: By argument, the value on each rank.
        """
        rows = [dict(zip(each, row, strict=True)) for row in zip(*each.values(), strict=True)]

        def outcome(number: int) -> Relays | Exception:
            try:
                return self.call(number, **rows[number])
            except Exception as error:  # the test looks at it
                return error

        with ThreadPoolExecutor(len(rows)) as pool:
            return list(pool.map(outcome, range(len(rows))))


@pytest.fixture
def job() -> Generator[Job]:
    job = Job()
    yield job
    for each in job.made:
        each.close()


def test_each_rank_has_the_relay_of_its_node_first(job: Job) -> None:
    outcomes = job.calls(upstream=[ELSEWHERE] * 4)
    leaders = [outcome.relay for outcome in outcomes]
    assert [leader is None for leader in leaders] == [False, True, False, True]
    first, second = leaders[0].address, leaders[2].address
    assert outcomes[1].addresses == outcomes[0].addresses == (first, second, ELSEWHERE)
    assert outcomes[3].addresses == outcomes[2].addresses == (second, first, ELSEWHERE)


def test_one_rank_that_knows_the_publisher_is_enough(job: Job) -> None:
    outcomes = job.calls(upstream=[None, None, None, [ELSEWHERE, "tcp://127.0.0.1:2"]])
    assert [o.addresses[-2:] for o in outcomes] == [(ELSEWHERE, "tcp://127.0.0.1:2")] * 4


def test_the_node_of_the_publisher_has_no_relay(job: Job) -> None:
    with Publisher() as publisher:
        outcomes = job.calls(upstream=[None, None, None, publisher])
        relay = outcomes[0].relay
        assert relay.status().joined
        assert [o.relay for o in outcomes[1:]] == [None] * 3
        assert outcomes[0].addresses == outcomes[1].addresses == (relay.address, publisher.address)
        assert outcomes[2].addresses == outcomes[3].addresses == (publisher.address, relay.address)


def test_a_relay_that_only_its_host_reaches_is_for_that_host(job: Job) -> None:
    outcomes = job.calls(upstream=[ELSEWHERE] * 4, host=["a", "a", "b", "b"])
    assert [o.names for o in outcomes] == [("node-0", "publisher")] * 2 + [
        ("node-1", "publisher")
    ] * 2


def test_the_ranks_meet_again_in_the_same_store(job: Job) -> None:
    for _ in range(2):
        outcomes = job.calls(upstream=[ELSEWHERE] * 4)
        assert len({*outcomes[0].addresses} & {*outcomes[3].addresses}) == 3


def test_a_meeting_that_ended_with_its_rank_0_keeps_no_rank(job: Job) -> None:
    """Ranks of the next incarnation find it open, and join it, before the new rank 0 is there."""
    job.store.add("rounds", 1)
    with ThreadPoolExecutor(4) as pool:
        ranks = [pool.submit(job.call, number, ELSEWHERE) for number in (1, 2, 3)]
        job.store.wait(["1/join/1", "1/join/2", "1/join/3"])
        ranks.append(pool.submit(job.call, 0, ELSEWHERE))
        assert all(rank.result(SECONDS).addresses for rank in ranks)
    assert job.store.add("rounds", 0) == 2


def test_a_rank_that_does_not_call_is_named_on_all_others(job: Job) -> None:
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(job.call, number, ELSEWHERE, SHORT) for number in (0, 1, 3)]
        for rank in ranks:
            with pytest.raises(DeadlineError, match=r"rank 2 did not call .* every rank of the"):
                rank.result(SECONDS)
    outcomes = job.calls(upstream=[ELSEWHERE] * 4)
    assert [len(o.addresses) for o in outcomes] == [3] * 4, "all may call again"


def test_a_publisher_that_the_other_host_cannot_reach_is_an_error_on_every_rank(job: Job) -> None:
    with Publisher() as publisher:
        outcomes = job.calls(upstream=[publisher, None, None, None], host=["a", "a", "b", "b"])
    text = "where only its own host can connect, and ranks 2, 3 are on another host: bind tcp://0"
    assert [text in str(o) and isinstance(o, WeightBusError) for o in outcomes] == [True] * 4


@pytest.mark.parametrize(
    ("upstream", "text"),
    [
        ([None] * 4, "no rank knows the publisher: give the rank that has it"),
        (
            [ELSEWHERE, None, "tcp://127.0.0.1:2", None],
            "rank 0 gives tcp://127.0.0.1:1 as .*rank 2",
        ),
    ],
)
def test_what_is_above_must_be_one(job: Job, upstream: list[Any], text: str) -> None:
    for outcome in job.calls(upstream=upstream):
        with pytest.raises(WeightBusError, match=text):
            raise outcome


@pytest.mark.parametrize("fails", [0, 2])
def test_all_ranks_learn_why_a_node_has_no_relay(job: Job, fails: int, tmp_path: Path) -> None:
    keys = [None if number != fails else tmp_path / "none" for number in range(4)]
    outcomes = job.calls(upstream=[ELSEWHERE] * 4, keys=keys)
    assert isinstance(outcomes[fails], KeysError)
    for outcome in outcomes[:fails] + outcomes[fails + 1 :]:
        text = f"rank {fails} has no relay for its node: KeysError: .*is no relay's folder"
        with pytest.raises(WeightBusError, match=text):
            raise outcome


def test_a_relay_that_cannot_join_the_publisher_of_a_rank_is_an_error(
    job: Job, tmp_path: Path
) -> None:
    generate(tmp_path, {"r": "relay"})
    with Publisher(keys=tmp_path) as publisher:
        outcomes = job.calls(upstream=[publisher, None, None, None], timeout=[3.0] * 4)
    assert [isinstance(o, WeightBusError) for o in outcomes] == [True] * 4
    assert "rank 2 has no relay for its node: " in str(outcomes[0])


def test_with_keys_workers_find_a_file_for_each_address(job: Job, tmp_path: Path) -> None:
    generate(tmp_path, {"node-0": "relay", "node-1": "relay"})
    at = ["node-0", "node-1", "publisher"]
    generate(tmp_path, {"rank-*": "worker", "rank-3": "worker"}, at=at)
    weights = {"w": np.zeros(4, np.float32)}
    with Publisher(keys=tmp_path) as publisher:
        outcomes = job.calls(
            upstream=[publisher.address] * 4,
            keys=[tmp_path] * 4,
            address=["tcp://127.0.0.1:0"] * 4,
        )
        bus = outcomes[3]
        keys = bus.worker_keys(tmp_path, "rank-3")
        assert [each.name for each in keys] == ["rank-3"] * 3
        with Subscriber(bus.addresses, {"m": weights}, name="rank-3", keys=keys).start():
            receipt = publisher.publish(
                "m", {"w": np.ones(4, np.float32)}, expect=1, timeout=SECONDS
            )
        assert receipt.workers["rank-3"].through == ("node-1",)
        assert {each.name for each in bus.worker_keys(tmp_path, "rank-2")} == {"rank-*"}
        with pytest.raises(KeysError, match="0 files of worker other for node-1: make one with"):
            bus.worker_keys(tmp_path, "other")


def test_the_hosts_own_name_is_given_where_it_leads_to_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other nodes reach the store's host by MASTER_ADDR, whatever /etc/hosts says there."""
    assert own_host("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(AddressError, match=r"no interface .* MASTER_ADDR=none\.invalid: .*give"):
        own_host("none.invalid", 1)
    there = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: [there])
    assert own_host("trainer", 1) == "trainer"
    assert own_host("localhost", 1).startswith("127.0.")


def test_a_process_that_torchrun_has_not_started_is_told_what_is_missing() -> None:
    with pytest.raises(WeightBusError, match=r"needs WORLD_SIZE, GROUP_RANK, .*with torchrun, or"):
        TorchrunRank.here({"RANK": "0", "LOCAL_RANK": "0"})


def test_an_error_names_a_few_of_many_ranks() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"

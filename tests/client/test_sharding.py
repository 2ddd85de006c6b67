"""`weightbus.sharded`: what ranks publish together, each its shards, and how it fails."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import weightbus
from weightbus.tests.client import sharding_ranks
from weightbus.tests.client.gathering_ranks import two_layers
from weightbus.tests.client.ranks import SECONDS, run_ranks

MEMORY_MAX = 1.25  # shards that a rank may hold beside its shards
DIED_SECONDS = 15.0

# The errors of all ranks that called, by case, with {last} for the last rank.
ERRORS = {
    "a name": r"StateError: .*nothing was gathered:\nrank {last}: it lacks y; rank 0 lacks its z",
    "shards": r"StateError: .*\nrank {last}: its x is .* in shards, .*, rank 0's is F32 \[2\]",
    "a shape": r"StateError: .*\nrank {last}: its x is F32 \[1, 2\], rank 0's is F32 \[2\]$",
    "a dtype": r"StateError: .*\nrank {last}: its x is F64 \[2\], rank 0's is F32 \[2\]$",
    "another id": r"StateError: .*\nrank {last}: it publishes the model another, rank 0 m$",
    "another step": r"StateError: .*\nrank {last}: its metadata is .*1.*, rank 0's .*2.*the same v",
    "once": "none",
    "a setting": r"StateError: .*\nrank {last}: its settings \(dtype, rename\) give the version",
}

# What every rank says if one rank finds the parts of a tensor elsewhere.
MISPLACED = {
    "a hole": "x: its bytes from {end} on are on no rank",
    "an overlap": "x: its bytes from 8 on are on ranks 0 and 1",
    "too much": "x: rank {last} has 4 bytes beyond it",
    "elsewhere": "it finds the parts of the version on other ranks than rank 0 does",
}


@pytest.mark.ranks
# One test for each number of ranks, since each worker of a run in parallel would start its own.
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_publish_their_shards_or_name_the_rank_that_does_not(
    tmp_path: Path, size: int
) -> None:
    printed = run_ranks(sharding_ranks.__file__, size, tmp_path, dies=size - 1)
    ranks: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in printed]
    first, last = ranks[0], size - 1
    same = {case: fault for case, fault in first.items() if case.startswith("same: ")}
    assert len(same) > 15
    assert {case: fault for case, fault in same.items() if fault} == {}
    for rank, saw in enumerate(ranks):
        for case, pattern in ERRORS.items():
            assert re.match(pattern.replace("{last}", str(last)), saw[case], re.DOTALL), saw[case]
        for case, missing in (("the last rank does not call", last), ("rank 0 does not call", 0)):
            text = f"DeadlineError: rank {missing} did not make this call in the 1 s"
            assert saw[case].startswith("none" if rank == missing else text), (rank, case)
        for case, text in MISPLACED.items():
            for who in ("0", "last"):
                found = saw[f"{case}, rank {who}"]
                told = text.format(end=8 * last, last=last)
                assert found.startswith("StateError: "), (rank, case, found)
                assert told in found, (rank, case, found)
                if who == "last" or case == "elsewhere":
                    assert f"rank {last}: " in found, found
                elif rank:
                    assert "rank 0 did not publish: x: " in found, found
        late = "DeadlineError: rank 0 did not make this call in the 1 s that rank {last} has waited"
        assert saw["twice"].startswith(late.format(last=last) if rank == last else "none")
        assert "the name '' has 0 characters" in saw["bad metadata"]
        own = "ValueError: commit='never'", "WeightBusError: rank 0 did not publish: commit='never'"
        assert saw["rank 0 has a bad argument"].startswith(own[rank > 0])
        assert saw["connected and compared again"] == [0, 0]
        assert saw["after a failure to agree"] == 0
        assert saw["a broken round"] == f"StateError: {'' if rank == 1 else 'rank 1: '}broken"
        assert saw["after a broken round"] == 1
        assert saw["broken after"] < DIED_SECONDS, "a rank waits for what a failed one keeps open"
        assert saw["memory"] <= MEMORY_MAX
    assert ranks[last]["rank 0 is stopped"].startswith("DeadlineError: rank 0 d")
    assert ranks[last]["stopped for"] < DIED_SECONDS
    for rank, saw in enumerate(ranks[:last]):
        error = "WeightBusError: rank 0 did not publish: m version" if rank else "PublishError: m"
        assert saw["died"].startswith(error)
        assert f"chunks of rank {last} at tcp://127.0.0.1:" in saw["died"]
        assert saw["seconds"] < DIED_SECONDS
    assert first["kept"], "a worker has other weights than before"


def test_without_a_group_the_model_is_published_as_it_is() -> None:
    copy = {name: tensor * 0 for name, tensor in two_layers().state_dict().items()}
    with (
        weightbus.Publisher("tcp://127.0.0.1:0") as publisher,
        weightbus.Subscriber(publisher.address, {"m": copy}).start(),
    ):
        publisher.wait_for_workers(1, SECONDS)
        receipt = weightbus.sharded(two_layers()).publish(publisher, "m", timeout=SECONDS)
    assert receipt is not None
    assert receipt.version == 1
    assert all(tensor.equal(copy[name]) for name, tensor in two_layers().state_dict().items())


def test_a_publisher_alone_refuses_what_all_ranks_publish() -> None:
    with (
        weightbus.Publisher("tcp://127.0.0.1:0") as publisher,
        pytest.raises(weightbus.StateError, match="on every rank, call sharded"),
    ):
        publisher.publish("m", weightbus.sharded(two_layers()))


@pytest.mark.parametrize("timeout", [0, -1, math.inf, "a minute"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout=.*choose a number of seconds above 0"):
        weightbus.sharded({}, timeout=timeout)

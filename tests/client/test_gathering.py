"""`weightbus.gather`: what ranks publish together, and what each is told that does so alone."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightbus
from weightbus.tests.client import gathering_ranks
from weightbus.tests.client.gathering_ranks import DIES, compiled, two_layers
from weightbus.tests.client.ranks import SECONDS, run_ranks

MEMORY_MAX = 1.25  # tensors that a rank may hold beside its shards, and on rank 0 the version

# What all ranks that called are told, by case, with {last} for the last rank.
TOLD = {
    "a name": r"StateError: .*nothing was gathered:\nrank {last}: it lacks y; rank 0 lacks its z",
    "a shape": r"StateError: .*\nrank {last}: its x is F32 \[3\], rank 0's is F32 \[2\]",
    "a dtype": r"StateError: .*\nrank {last}: its y is F16 \[1\], rank 0's is F32 \[1\]",
    "shards": r"StateError: .*\nrank {last}: its x is .* in shards, .*, rank 0's is F32 \[2\]",
    "what cannot travel": r"StateError: .*\nrank {last}: x: a Tensor of layout torch.sparse_coo",
    "late": r"DeadlineError: rank {last} did not take part in time, at embed.weight",
}
# What rank 0 and the other ranks are told of its own error.
RANK_0 = {
    "rank 0 has a bad argument": (
        "ValueError: commit='never'",
        "WeightBusError: rank 0 did not publish: commit='never'",
    ),
    "rank 0 has what cannot travel": (
        "StateError: x: a Tensor of layout",
        "StateError: rank 0 did not publish: x: a Tensor of layout",
    ),
    "rank 0 has no publisher": (
        "ValueError: rank 0 publishes: give it a Publisher",
        "WeightBusError: rank 0 did not publish: .* give it a Publisher",
    ),
}


@pytest.mark.ranks
# One test for each number of ranks, since each worker of a run in parallel would start its own.
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_publish_together_or_are_told_who_does_not(tmp_path: Path, size: int) -> None:
    said = run_ranks(gathering_ranks.__file__, size, tmp_path, dies=DIES[size])
    ranks: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in said]
    first, last = ranks[0], size - 1
    same = {case: fault for case, fault in first.items() if case.startswith("same: ")}
    assert len(same) > 20
    assert {case: fault for case, fault in same.items() if fault} == {}
    assert first["aliases"] == {"head.weight": "embed.weight"}
    assert first["lost"].startswith("a.embed.weight: 1 finite value is beyond F16")
    assert "a.inner.2.weight: 15 finite values are" in first["lost"]
    assert (first["async"], [saw["async of the source"] for saw in ranks]) == (
        "1",
        [2, *[None] * last],
    )
    check_errors(ranks)
    for saw in ranks:
        assert saw["memory"] <= MEMORY_MAX
        assert saw["keys"] <= 0
    died = [saw["died"] for rank, saw in enumerate(ranks) if rank != DIES[size]]
    assert len(died) == last
    for text in died:
        assert text.startswith(f"WeightBusError: rank {DIES[size]} has ended, or its connection")


def check_errors(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    for rank, saw in enumerate(ranks):
        for case, pattern in TOLD.items():
            found = re.match(pattern.replace("{last}", str(last)), saw[case], re.DOTALL)
            assert found, (rank, case, saw[case])
        for case, (own, others) in RANK_0.items():
            assert re.match(others if rank else own, saw[case]), (rank, case, saw[case])
        for case, missing in (("the last rank does not call", last), ("rank 0 does not call", 0)):
            text = f"DeadlineError: rank {missing} did not make this call in the 1 s"
            assert saw[case].startswith("none" if rank == missing else text), (rank, case)
        text = f"StateError: a gathered model is published on rank 0, and this is rank {last}"
        assert saw["another publisher"].startswith(text if rank == last else "none")


class Source(NamedTuple):
    """A worker's copy of what a publisher has published to it."""

    publisher: weightbus.Publisher
    copy: dict[str, torch.Tensor]


@pytest.fixture(name="bus_of_two")
def _bus_of_two() -> Iterator[Source]:
    copy = {name: torch.zeros_like(tensor) for name, tensor in two_layers().state_dict().items()}
    with (
        weightbus.Publisher("tcp://127.0.0.1:0") as publisher,
        weightbus.Subscriber(publisher.address, {"m": copy}).start(),
    ):
        publisher.wait_for_workers(1, SECONDS)
        yield Source(publisher, copy)


def test_without_a_group_the_model_is_published_as_it_is(bus_of_two: Source) -> None:
    source = weightbus.gather(compiled(two_layers()))
    receipt = source.publish(bus_of_two.publisher, "m", timeout=SECONDS)
    assert receipt is not None
    assert receipt.version == 1
    for name, tensor in two_layers().state_dict().items():
        assert torch.equal(bus_of_two.copy[name], tensor)
    with pytest.raises(ValueError, match="rank 0 sends nothing"):
        source.send()
    with pytest.raises(ValueError, match="rank 0 publishes: give it a Publisher"):
        source.publish(None, "m")


def test_in_a_group_of_one_shards_are_published_and_after_it_they_are_refused(
    bus_of_two: Source, tmp_path: Path
) -> None:
    store: Any = vars(dist)["FileStore"](str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        source = weightbus.gather(fully_shard(two_layers(), mesh=init_device_mesh("cpu", (1,))))
        source.publish(bus_of_two.publisher, "m", timeout=SECONDS)
    finally:
        dist.destroy_process_group()
    for name, tensor in two_layers().state_dict().items():
        assert torch.equal(bus_of_two.copy[name], tensor)
    with pytest.raises(weightbus.StateError, match=r"weight: .* torch.distributed is not init"):
        source.publish(bus_of_two.publisher, "m", timeout=SECONDS)


@pytest.mark.parametrize("timeout", [0, -1, math.inf, "a minute"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout=.*choose a number of seconds above 0"):
        weightbus.gather({}, timeout=timeout)

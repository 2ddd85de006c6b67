"""The machines survive simulated networks; `simulate.py` tells what those do to them."""

import multiprocessing

import pytest

from weightbus.tests.simulation import simulate
from weightbus.tests.simulation.network import Simulation

SEEDS, TREES = 200, 40
TWO_PATCHES = 757  # a seed in which a version is offered by two patches, which is rare
BLOCK = 20  # seeds that one process takes at a time
# What is rare and must have happened all the same, or it would not be tested.
MET = {
    *(
        "copied",
        "overtaken",
        "late",
        "stale",
        "hung",
        "wanted",
        "exact",
        "gone",
        "kept",
    ),  # shared memory
    *("ended", "closed"),  # connections
    *("patched", "overtaken patch", "unpatched", "1 patches", "2 patches", "rekeyed"),
    *("renamed", "kept though the next one is copied"),  # what an earlier publisher has left
    *("published as one", "applied as one", "part"),
}


def test_seeds() -> None:
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = list(pool.imap_unordered(simulate.run, [*range(SEEDS), TWO_PATCHES], BLOCK))
    if wrong := sorted(fault for fault, _ in found if fault):
        pytest.fail(simulate.summary(wrong, SEEDS), pytrace=False)
    assert set[str]().union(*(met for _, met in found)) >= MET


# With relays.
MET_IN_TREES = {
    *("moved", "relay killed", "renamed"),
    *("commit below", "abort below", "applied behind relays", "staged behind relays"),
    *("patched relay", "patched behind a relay"),
}


def test_trees() -> None:
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = list(pool.imap_unordered(simulate.run_tree, range(TREES), BLOCK // 4))
    if wrong := sorted(fault for fault, _ in found if fault):
        pytest.fail(simulate.summary(wrong, TREES), pytrace=False)
    assert set[str]().union(*(met for _, met in found)) >= MET_IN_TREES


# A relay with a newer version for named workers; one overtaken there; a parent of a lower epoch;
# one dropped for another that is aborted; a late report of an earlier epoch.
@pytest.mark.parametrize("seed", [1020, 194, 20011, 20761, 20606])
def test_trees_that_failed_once(seed: int) -> None:
    fault, _ = simulate.run_tree(seed)
    assert not fault


def test_a_seed_is_one_run_and_another_is_another() -> None:
    one, again, other = (Simulation(seed).run() for seed in (17, 17, 18))
    assert (one.events, one.now) == (again.events, again.now)
    assert one.invariants.applied == again.invariants.applied
    assert [r for _, r, _ in one.invariants.receipts] == [
        r for _, r, _ in again.invariants.receipts
    ]
    assert one.events != other.events


def test_a_failing_seed_says_how_to_replay_it() -> None:
    text = simulate.summary(["seed 12: AssertionError: torn"], 100)
    assert "99 of 100" in text
    assert "replay: .venv/bin/python tests/simulation/simulate.py --trace --seed 12" in text
    text = simulate.summary(["tree 12: AssertionError: torn"], 100)
    assert "replay: .venv/bin/python tests/simulation/simulate.py --trace --trees --seed 12" in text

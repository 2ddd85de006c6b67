"""The machines survive simulated networks; `simulate.py` tells what those do to them."""

import multiprocessing

import pytest

from weightbus.tests.simulation import simulate
from weightbus.tests.simulation.network import Simulation

SEEDS = 300
RENAMING = range(1, 200, 2)  # of these, in some a worker takes a new name
ROAD = range(25, SEEDS)  # in some of these, whatever can happen on the shared road does
PATCHED = range(2, SEEDS, 5)  # in these there are patches
BLOCK = 25  # seeds that one process takes at a time


def test_seeds() -> None:
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = [text for text in pool.imap_unordered(simulate.check, range(SEEDS), BLOCK) if text]
    if found:
        pytest.fail(simulate.summary(sorted(found), SEEDS), pytrace=False)


def test_a_seed_is_one_run() -> None:
    one, other = Simulation(17).run(), Simulation(17).run()
    assert (one.events, one.now) == (other.events, other.now)
    assert one.invariants.applied == other.invariants.applied
    assert [r for _, r, _ in one.invariants.receipts] == [
        r for _, r, _ in other.invariants.receipts
    ]


def test_what_a_publisher_keeps_is_taken_by_its_new_name() -> None:
    assert any(Simulation(seed).run().invariants.renamed for seed in RENAMING)


def test_what_welcomes_name_is_asked_for_while_the_next_version_is_copied() -> None:
    kept = "kept though the next one is copied"
    assert any(kept in Simulation(seed).run().met for seed in RENAMING)


def test_the_shared_road_is_walked_and_some_come_too_late_or_hang() -> None:
    met = set[str]()
    for seed in ROAD:
        met |= Simulation(seed).run().met
        if met >= {"copied", "overtaken", "late", "stale", "hung", "wanted", "exact", "gone"}:
            return
    pytest.fail(f"only {met} happened")


def test_connections_are_found_closed_with_their_processes_and_without() -> None:
    met = set[str]()
    for seed in range(SEEDS):
        met |= Simulation(seed).run().met
        if met >= {"ended", "closed"}:
            return
    pytest.fail(f"only {met} happened")


def test_patches_arrive_are_overtaken_and_given_up() -> None:
    met = set[str]()
    for seed in PATCHED:
        met |= Simulation(seed).run().met
        if met >= {"patched", "overtaken patch", "unpatched", "1 patches", "2 patches"}:
            return
    pytest.fail(f"only {met} happened")


def test_seeds_differ() -> None:
    assert Simulation(17).run().events != Simulation(18).run().events


def test_a_failing_seed_says_how_to_replay_it() -> None:
    text = simulate.summary(["seed 12: AssertionError: torn"], 100)
    assert "99 of 100" in text
    assert "replay: .venv/bin/python tests/simulation/simulate.py --trace --seed 12" in text

"""A simulated network around the real machines: one seed, one run, the same every time.

    python tests/simulation/simulate.py --seeds 5000          many seeds, on all cores
    python tests/simulation/simulate.py --seed 17 --trace     one seed, every delivery printed
    python tests/simulation/simulate.py --trees --seeds 500   with relays (`trees.py`)

First comes chaos: messages are lost, delayed, doubled, reordered and damaged, links are slow and
their queues short, workers are cut off, both sides are killed or closed and started again, users
apply late or fail to, before or after bytes of the model have changed, some refuse what does not
fit them, two processes want one name, and the trainer publishes in every way there is. Workers on
the publisher's host copy from its memory, and are stopped in the middle of it with their locks
held, while the trainer fills other segments, or that one if it can. A third of the runs is sealed,
under group keys that change. In a fifth little changes from version to version, which goes to most
workers as patches. Clocks are wrong; in some runs
a second publisher takes over while the first lives on, and workers wander between the two. Then the
network heals, all go to the publisher that started last, and everybody must end up with its latest
version. `invariants.py` says what must hold all along.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence

from weightbus.tests.simulation import pooling
from weightbus.tests.simulation.network import Simulation
from weightbus.tests.simulation.trees import Tree

BLOCK = 20  # seeds that one process takes at a time


def run(seed: int) -> tuple[str, set[str]]:
    """Run one seed; return what went wrong, nothing if all was well, and what rare has happened."""
    return _run("seed", Simulation, seed)


def run_tree(seed: int) -> tuple[str, set[str]]:
    """Run one seed with relays; return the same."""
    return _run("tree", Tree, seed)


def _run(what: str, kind: type[Simulation], seed: int) -> tuple[str, set[str]]:
    try:
        return "", kind(seed).run().met
    except Exception as error:  # any exception of a machine is a finding
        return f"{what} {seed}: {type(error).__name__}: {error}", set()


def summary(failures: Sequence[str], seeds: int) -> str:
    """Say which seeds failed, and how to see one of them fail again."""
    lines = [*failures, f"{seeds - len(failures)} of {seeds} seeds passed"]
    return "\n".join([*lines, *map(replay, failures[:1])])


def replay(text: str) -> str:
    """Say how to see a seed fail again."""
    what, seed = text.split(":", 1)[0].split()
    trees = " --trees" if what == "tree" else ""
    return f"replay: .venv/bin/python tests/simulation/simulate.py --trace{trees} --seed {seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds; return how many failed, capped at 1."""
    parser = argparse.ArgumentParser(description="Run the machines on simulated networks.")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--trace", action="store_true", help="print every delivery")
    parser.add_argument("--trees", action="store_true", help="runs with relays")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        kind = Tree if options.trees else Simulation
        simulation = kind(options.seed, trace=options.trace)
        print(simulation.faults)
        simulation.run()
        print(f"seed {options.seed} is fine: {simulation.events} events, {simulation.now:.1f} s")
        return 0
    seeds = range(options.first, options.first + options.seeds)
    return run_seeds(seeds, run_tree if options.trees else run)


def run_seeds(seeds: Sequence[int], one: Callable[[int], tuple[str, set[str]]] = run) -> int:
    """Run seeds on all cores, and say at once which fail; return how many did, capped at 1."""
    begun, failures, done = time.monotonic(), list[str](), 0
    try:
        for text, _ in pooling.each(one, seeds, "seeds", BLOCK):
            done += 1
            if text:
                failures.append(text)
                print(f"{text}\n{replay(text)}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(summary(sorted(failures), done))
    print(f"{time.monotonic() - begun:.0f} s on {multiprocessing.cpu_count()} cores")
    return 1 if failures or done < len(seeds) else 0


if __name__ == "__main__":
    sys.exit(main())

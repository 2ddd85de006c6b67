"""Every state of a small world, and what must hold in each.

    python tests/exploring/explore.py                     all worlds, on all cores
    python tests/exploring/explore.py --world restarts    one of them

A world is told by its rules (`exploring/world.py`): how many workers, publishes, lost or doubled
messages, restarts. From the beginning on, everything that can happen does, until there is no state
left that was not met. The machines are the real ones; what they do in a state is computed once
(`exploring/nodes.py`). In every state hold what `exploring/sides.py` and `World` assert: nothing
is torn, what is reported is what lies in memory, versions only rise, receipts say what happened,
an aborted version is applied by nobody, a call is over by its deadline, memory is bounded. And
from every state everybody gets to the latest version, or its user has turned it down, once nothing
more goes wrong: calls are closed then, and nothing is held for nobody.

A state with faults to come can do all that the same state can without. So states are met in the
order of what has gone wrong before, and one that was met with less is not looked at again.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from weightbus.tests.exploring.world import Rules, State, Used, World
from weightbus.tests.simulation.pooling import each

AUTO, STAGED, TOGETHER = ("auto", "applied"), ("auto", "staged"), ("together", "applied")
CALM_STEPS = 400  # fair steps in which a world that nothing happens to must be at rest

SMALL: dict[str, Rules] = {  # a few seconds each
    "loss": Rules(workers=1, faults=1, restarts=0),
    "calm": Rules(workers=2, faults=0, restarts=0),
    "decision": Rules((TOGETHER, AUTO), workers=1, faults=1, restarts=0),
    "failure": Rules((AUTO, AUTO), workers=1, faults=0, restarts=0, failures=2),
    "relay": Rules((AUTO, TOGETHER), workers=1, faults=0, restarts=0, relay=True),
    "patch": Rules((AUTO, AUTO), workers=1, faults=0, restarts=0, failures=1, patched=True),
}
WORLDS: dict[str, Rules] = SMALL | {  # minutes, each
    "memory": Rules(workers=1, faults=0, restarts=1, memory=True),
    "losses": Rules(workers=1, faults=2, restarts=0),
    "restarts": Rules(workers=1, faults=1, restarts=1),
    "failures": Rules(workers=1, faults=1, restarts=0, failures=2),
    "memories": Rules((AUTO,), workers=1, faults=1, restarts=1, memory=True),
    "decisions": Rules((TOGETHER, TOGETHER), workers=1, faults=2, restarts=0),
    "stages": Rules((STAGED, TOGETHER), workers=1, faults=1, restarts=1),
    "free": Rules((AUTO,), workers=1, faults=0, restarts=0, free=True),
    "pair restarts": Rules(workers=2, faults=0, restarts=1),
    "pair decides": Rules((TOGETHER, AUTO), workers=2, faults=0, restarts=0),
    "patches": Rules((AUTO, AUTO, AUTO), workers=1, faults=0, restarts=0, failures=1, patched=True),
    "patches lost": Rules(workers=1, faults=2, restarts=0, patched=True),
    "patches fail": Rules(workers=1, faults=1, restarts=0, failures=2, patched=True),
    "patches restart": Rules(workers=1, faults=0, restarts=1, memory=True, patched=True),
    "patches decide": Rules((AUTO, TOGETHER), workers=1, faults=1, restarts=0, patched=True),
    "relay loses": Rules((AUTO,), workers=1, faults=1, restarts=0, relay=True),
    "relay decides": Rules((TOGETHER,), workers=1, faults=1, restarts=0, relay=True),
    "pair of patches": Rules(workers=2, faults=0, restarts=0, patched=True),
}
LARGE: dict[str, Rules] = {  # only if they are named: many minutes; most take GiB
    "relay restarts": Rules((AUTO,), workers=1, faults=0, restarts=1, relay=True),
    "free versions": Rules(workers=1, faults=0, restarts=0, free=True),
    "pair": Rules(workers=2, faults=1, restarts=0),
    "everything": Rules(workers=2, faults=2, restarts=1),
}

Core = tuple[int, tuple[int, ...], int]


@dataclass
class Found:
    """What an exploration has found.

    Attributes:
        states: How many there are.
        steps: How many ways lead from one to another.
        wrong: What does not hold, and how to get there; nothing if all is well.
    """

    states: int = 0
    steps: int = 0
    wrong: str = ""


class Exploration:
    """The states of one world."""

    def __init__(self, rules: Rules) -> None:
        self.world = World(rules)
        self._met: dict[Core, list[Used]] = {}
        self._came: dict[State, State | None] = {}
        self._well: set[Core] = set()  # from these everybody gets there

    def run(self) -> Found:
        """Meet every state, or those up to one that is found wanting."""
        found = Found()
        start = self.world.beginning()
        fronts: dict[int, list[State]] = {0: [start]}
        self._new(start, None)
        while fronts:
            level = min(fronts)
            for state in fronts.pop(level):
                try:
                    self._check_well(state)
                    for _, after in self.world.after(state):
                        found.steps += 1
                        if self._new(after, state):
                            fronts.setdefault(sum(after.used), []).append(after)
                except AssertionError as error:
                    found.wrong = f"{error}\n" + "\n".join(self._story(state))
                    return found
            found.states = len(self._came)
        return found

    def _new(self, state: State, before: State | None) -> bool:
        """Take note of a state; return whether it was not met with as little gone wrong."""
        publisher, places, facts, used = state
        known = self._met.setdefault((publisher, places, facts), [])
        if any(all(a <= b for a, b in zip(each, used, strict=True)) for each in known):
            return False
        known.append(used)
        self._came[state] = before
        return True

    def _check_well(self, state: State) -> None:
        """From here everybody gets there, once nothing goes wrong any more."""
        path: list[Core] = []
        on_path: set[Core] = set()
        core = state[:3]
        while core not in self._well and core not in on_path:
            path.append(core)
            on_path.add(core)
            assert len(path) < CALM_STEPS, "the world does not come to rest"
            state = self.world.fairly(state)
            core = state[:3]
        if core in on_path:  # they go round: calm states among them are how it ends
            calm = [c for c in path[path.index(core) :] if self._calm(c)]
            assert calm, "messages go round for ever"
            for each in calm:
                wrong = self.world.restless(State(*each, Used()))
                assert not wrong, f"in the end {wrong}"
        self._well.update(path)

    def _calm(self, core: Core) -> bool:
        return all(self.world.places[place].calm for place in core[1])

    def _story(self, state: State) -> list[str]:
        """Tell how a state is reached."""
        states = [state]
        while (before := self._came[states[-1]]) is not None:
            states.append(before)
        states.reverse()
        lines: list[str] = []
        for before, after in pairwise(states):
            lines.append(next(text for text, s in self.world.after(before) if s == after))
        return lines


def check(name: str) -> tuple[str, Found, str]:
    """Explore a world; return what was found, and how long it took."""
    begun, world = time.monotonic(), Exploration((WORLDS | LARGE)[name])
    found = world.run()
    sides = f"{len(world.world.workers)} of a worker, {len(world.world.publishers)} of a publisher"
    return name, found, f"{sides}, {time.monotonic() - begun:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore worlds; return how many were found wanting, capped at 1."""
    parser = argparse.ArgumentParser(description="Meet every state of some small worlds.")
    parser.add_argument(
        "--world", action="append", choices=[*WORLDS, *LARGE], help="this one alone"
    )
    options = parser.parse_args(arguments)
    names = options.world or list(WORLDS)
    wrong, total = 0, 0
    try:
        for name, found, took in each(check, names, "worlds"):
            total += found.states
            wrong += bool(found.wrong)
            print(f"{name}: {found.states} states ({took}), {found.steps} steps", flush=True)
            print(found.wrong or (WORLDS | LARGE)[name])
    except KeyboardInterrupt:
        print("interrupted")
        return 1
    print(f"{total} states in all, {wrong} of {len(names)} worlds are found wanting")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

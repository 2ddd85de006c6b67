"""What happens in a round, and when: all of it follows from its seed."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weightbus.tests.chaos.content import Kind

SECONDS = 3.5  # in which faults begin
WORKERS = 4
QUEUES = (1, 2, 64)  # messages that wait for a slow worker: a tiny queue in most rounds
CLOCKS = (-86_400, -7, 11, 86_400)  # seconds by which a clock jumps
STRONG = 0.35  # of the messages that a fault of the network is about, at most

# Each fault, and the range of seconds for which it lasts. The publisher takes workers for lost
# after `trainer.LOST_AFTER`: some of these are shorter, some longer than that.
LASTING: dict[str, tuple[float, float]] = {
    "kill-worker": (0.0, 1.5),  # until it is started again
    "kill-publisher": (0.0, 1.0),
    "stop-worker": (0.1, 3.0),
    "stop-publisher": (0.1, 2.5),
    "kill-rank": (0.0, 1.5),
    "stop-rank": (0.1, 3.0),
    "kill-relay": (0.0, 1.5),
    "stop-relay": (0.1, 2.5),
    "reset": (0.0, 0.0),
    "truncate": (0.0, 0.0),
    "damage": (0.3, 2.0),
    "misspell": (0.0, 0.0),
    "drop": (0.3, 2.0),
    "double": (0.3, 2.0),
    "delay": (0.3, 2.0),
    "hold": (0.3, 2.0),
    "unreachable": (0.2, 2.0),
    "full-disk": (0.3, 2.0),
    "no-segments": (0.5, 2.0),
    "few-descriptors": (0.3, 2.0),
    "clock": (0.5, 2.0),
    "rival": (0.5, 1.5),
    "revoke": (0.3, 1.5),
}
KEYED = {"revoke"}  # only where there are keys
SHARING = {"no-segments"}  # only where there is shared memory
RELAYED = {"kill-relay", "stop-relay"}  # only where there are relays
RELAYS_MAX = 2  # one behind the other
RANKED = {"kill-rank", "stop-rank"}  # only where a trainer has ranks
NOT_RANKED = {"no-segments"}  # versions of several ranks are in no shared memory
RANKS = (2, 3, 4)
PUBLISHERS = ("python", "rust")
FORGING = {"damage", "misspell"}
CHANNELS = ("control", "data", "both")


@dataclass(frozen=True, slots=True)
class Part:
    """A worker: its language, and how it takes versions."""

    name: str
    language: str
    in_place: bool
    shared: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A fault.

    Attributes:
        at, seconds: When it begins, and for how long it lasts.
        who: Which worker it is about, if it is about one.
        channel: Where, if it is about the network.
        strength: A share of messages, or how much of whatever it is.
    """

    at: float
    fault: str
    seconds: float
    who: int
    channel: str
    strength: float

    def __str__(self) -> str:
        facts = f"worker {self.who}, {self.channel}, strength {self.strength:.2f}"
        return f"{self.fault} for {self.seconds:.1f} s ({facts})"


@dataclass(frozen=True, slots=True)
class Plan:
    """A round.

    Attributes:
        seed: What all of it follows from.
        keyed: Whether there are keys.
        kind: What versions consist of (`content.weights`). Where each has one byte only, readers of
            memory in place see mixtures; where few bytes change, it is published as patches.
        queue: Of the publisher.
        pace: Seconds between two publishes.
        state: Whether the publisher has a state folder.
        together: Whether some versions are applied together or not at all.
        shared: Whether there is shared memory.
        watched: Whether people look on, and there is a moment of calm in between.
        publisher: The language that publishes. Other than Python's keep no versions, share no
            memory, and serve no page and no metrics.
        relays: How many are between the publisher and the workers, one behind the other.
        ranks: How many ranks of a trainer publish together, each its part.
    """

    seed: int
    keyed: bool
    kind: Kind
    queue: int
    pace: float
    state: bool
    together: bool
    shared: bool
    watched: bool
    parts: Sequence[Part]
    steps: Sequence[Step]
    publisher: str = "python"
    relays: int = 0
    ranks: int = 1

    @property
    def serves(self) -> bool:
        """Whether there are a page and metrics."""
        return self.watched and self.publisher == "python"

    @property
    def acts(self) -> list[Sequence[Step]]:
        """The faults up to each moment of calm: where people look on, there are two."""
        return [self.steps[::2], self.steps[1::2]] if self.watched else [self.steps]

    @property
    def misleads(self) -> bool:
        """Whether workers may be said to run what they never told that they applied.

        Another publisher's version takes a new name with those who run it already; and without keys
        nothing tells a damaged report from another one.
        """
        faults = {step.fault for step in self.steps}
        return self.state or "clock" in faults or (not self.keyed and bool(faults & FORGING))

    @property
    def lines(self) -> list[str]:
        """What is going to happen, for a person."""
        plain = ("publisher", "keyed", "kind", "queue", "pace", "state")
        facts = (*plain, "together", "shared", "watched", "relays", "ranks")
        shown = ", ".join(f"{fact} {getattr(self, fact)}" for fact in facts)
        parts = [f"  {part}" for part in self.parts]
        return [f"seed {self.seed}: {shown}", *parts, *(f"  {s.at:4.1f} s {s}" for s in self.steps)]


def plan(
    seed: int,
    languages: Sequence[str],
    faults: Collection[str],
    publisher: str = "python",
    *,
    relayed: bool = False,
    ranked: bool = False,
) -> Plan:
    """Return the round of a seed: every second one has keys, and each language its turn.

    `relayed`: there are relays. `ranked`: several ranks publish together, in every third round to
    relays.
    """
    chance = random.Random(seed)
    relayed = relayed or (ranked and seed % 3 == 0)
    in_python = publisher == "python"
    keyed = seed % 2 == 1
    not_here = (set() if keyed else KEYED) | (set() if in_python else SHARING)
    not_here |= set() if relayed else RELAYED
    not_here |= NOT_RANKED if ranked else RANKED
    able = list(languages)
    chance.shuffle(able)
    even = chance.random() < 0.5
    names = [able[i % len(able)] for i in range(WORKERS)]
    parts = [
        # One reads all the time what is in place, which takes a core.
        Part(f"w{i}", name, even and i == 0, chance.random() < 0.5)
        for i, name in enumerate(names)
    ]
    return Plan(
        seed=seed,
        keyed=keyed,
        kind="even" if even else "trained" if seed % 3 else "mixed",
        queue=chance.choice(QUEUES),
        pace=round(chance.uniform(0.05, 0.3), 3),
        state=chance.random() < 0.5 and not ranked,
        together=chance.random() < 0.3,
        shared=chance.random() < 0.7,
        watched=chance.random() < 0.3,
        parts=parts,
        steps=_steps(chance, sorted(set(faults) - not_here)),
        publisher=publisher,
        relays=1 + seed // 2 % RELAYS_MAX if relayed else 0,
        ranks=RANKS[(seed // 2 + seed // 6) % len(RANKS)] if ranked else 1,
    )


def _steps(chance: random.Random, faults: Sequence[str]) -> list[Step]:
    steps = [
        Step(
            at=round(chance.uniform(0, SECONDS), 2),
            fault=(fault := chance.choice(faults)),
            seconds=round(chance.uniform(*LASTING[fault]), 2),
            who=chance.randrange(WORKERS),
            channel=chance.choice(CHANNELS),
            strength=round(chance.uniform(0.05, STRONG), 2),
        )
        for _ in range(chance.randint(3, 9))
    ]
    return sorted(steps, key=lambda step: step.at)

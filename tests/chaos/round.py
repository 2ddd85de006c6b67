"""One round: everybody joins, things go wrong at the moments of its plan, everything heals, and
then all must be as if nothing had been.
"""

import heapq
import itertools
import math
import random
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from weightbus.bus.messages import DELTA
from weightbus.tests.chaos import leaks
from weightbus.tests.chaos.cast import Cast, small_disk
from weightbus.tests.chaos.content import MODELS
from weightbus.tests.chaos.faults import FAULTS, End
from weightbus.tests.chaos.judge import Judge, overdue
from weightbus.tests.chaos.onlookers import Watcher, disagreements, observer
from weightbus.tests.chaos.schedule import Plan, Step
from weightbus.tests.chaos.trainer import CALM_SECONDS
from weightbus.tests.chaos.wire import Wire
from weightbus.tests.compose.waiting import MissedError, wait_for
from weightbus.tests.conformance.driver import Fault
from weightbus.tests.conformance.scenarios import IN_MEMORY

AGREE_SECONDS = 15.0  # for reports of what runs to get around, and connections that broke to go


@dataclass
class Outcome:
    """What became of a round.

    Attributes:
        fault: What was wrong; empty: nothing.
        story: What happened, in order.
        counts: How often each fault was made, and publishes and applies.
        seconds: From the end of the faults until all was well again.
    """

    seed: int
    languages: Sequence[str] = ()
    fault: str = ""
    story: list[str] = field(default_factory=list[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0


def play(plan: Plan, commands: Mapping[str, Sequence[str]], clock: Path) -> Outcome:
    """Play a round; nothing of it is left."""
    outcome = Outcome(plan.seed, sorted({part.language for part in plan.parts}))
    before = leaks.in_shared_memory(), leaks.children()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY)))
        disk, changed = small_disk(folder, undo), threading.Condition()
        chance = random.Random(f"wire {plan.seed}")
        wires = [
            undo.enter_context(closing(Wire(chance, changed, keyed=plan.keyed)))
            for _ in range(plan.relays + plan.ranks)
        ]
        (*above, wire), beside = wires[: plan.relays + 1], wires[plan.relays + 1 :]
        about = plan, commands, folder, disk, clock, wire, changed, above, beside
        cast = undo.enter_context(Cast(*about))
        Round(cast, outcome).finish()
        outcome.story = _story(cast)
    left = leaks.in_shared_memory() - before[0], leaks.children() - before[1]
    if not outcome.fault and any(left):
        outcome.fault = f"shared memory and processes are left: {left}"
    return outcome


def _fault(action: Callable[[], object]) -> str:
    """Return what is wrong, as an action finds it."""
    try:
        action()
    except (Fault, MissedError) as fault:
        return str(fault)
    except Exception:
        return traceback.format_exc()
    return ""


def _story(cast: Cast) -> list[str]:
    """Return everything that was told, and everybody's last words."""
    words = [f"{driver.name} ({driver.status()}): {driver.story()}" for driver in cast.drivers]
    served = (*cast.publishers, *cast.passed)
    words += [f"{child.name} ({child.status()}): {child.story()}" for child in served]
    return [*cast.story.lines(), *words]


class Round:
    """A round while it is being played."""

    def __init__(self, cast: Cast, outcome: Outcome) -> None:
        self._cast, self._outcome, self._story = cast, outcome, cast.story
        self._healed_at = math.inf  # that nobody was ill before counts for nothing
        self._watcher: Watcher | None = None

    def finish(self) -> None:
        """Play it, and note what was wrong."""
        self._outcome.fault = _fault(self.play)

    def play(self) -> None:
        """Play it.

        Raises:
            Fault, MissedError: Something was not as it must be.
        """
        cast = self._cast
        cast.publish()
        for number in range(cast.plan.relays):
            cast.relay(number)
        for driver in [cast.work(part) for part in cast.plan.parts]:
            driver.wait_event("joined")
        self._calm()
        before = leaks.all_held(cast)
        self._watcher = Watcher(cast)
        try:
            for act in cast.plan.acts:
                self._break(act)
                self._heal()
                self._calm()
        finally:
            self._watcher.end()
        self._settled(lambda: next(leaks.grown(cast, before), ""))
        self._judge()
        self._count()
        cast.end()

    def _break(self, steps: Sequence[Step]) -> None:
        """Have things go wrong when the plan says so, and end."""
        numbers, begun, pause = itertools.count(), time.monotonic(), threading.Event()
        agenda: list[tuple[float, int, Step, End | None]] = [
            (step.at, next(numbers), step, None) for step in steps
        ]
        heapq.heapify(agenda)
        self._cast.publisher.order("go")
        while agenda:
            at, _, step, end = heapq.heappop(agenda)
            pause.wait(max(0.0, begun + at - time.monotonic()))
            if end is not None:
                self._story.tell(f"end of {step}")
                end()
                continue
            self._story.tell(str(step))
            self._outcome.counts[step.fault] += 1
            end = FAULTS[step.fault](self._cast, step)
            over = time.monotonic() - begun + step.seconds
            heapq.heappush(agenda, (over, next(numbers), step, end))
        self._healed_at = time.monotonic()

    def _heal(self) -> None:
        """Nothing is wrong any more; all that was killed has been started again."""
        cast = self._cast
        for wire in cast.all_wires:
            wire.heal()
        cast.set_clock(0)
        for each in cast.living:
            if not each.alive:
                raise Fault(f"{each.name} has ended by itself: {each.status()}, {each.story()}")

    def _calm(self) -> None:
        """All have the newest versions, and everybody who says who runs what agrees."""
        cast = self._cast
        child, done = cast.publisher, len(cast.publisher.those("calm"))
        self._story.tell("calm")
        child.order(f"calm {len(cast.workers)}")
        calm = child.wait("calm", done + 1, 3 * CALM_SECONDS)
        newest = {r["model"]: r for r in sorted(child.those("receipt"), key=itemgetter("serial"))}
        last = [newest[model] for model in MODELS]
        for receipt in last:
            if not receipt["achieved"]:
                raise Fault(f"not everybody is on the newest version: {receipt}; {calm}")
            for driver in cast.workers.values():
                key = receipt["epoch"], receipt["version"]
                driver.wait_applied(receipt["model"], *key, receipt["digest"])
        self._outcome.seconds = max(self._outcome.seconds, time.monotonic() - self._healed_at)
        with observer(cast) as looking:
            self._settled(lambda: next(disagreements(cast, calm, last, looking), ""))

    def _settled(self, wrong: Callable[[], str]) -> None:
        found = [""]

        def right() -> bool:
            found[0] = wrong()
            return not found[0]

        try:
            wait_for(right, "", AGREE_SECONDS)
        except MissedError:
            raise Fault(f"still after {AGREE_SECONDS:.0f} s: {found[0]}") from None

    def _judge(self) -> None:
        """Hold all that was told against all that was published."""
        cast, judge = self._cast, Judge(self._cast.plan.kind)
        faults = [fault for child in cast.publishers for fault in judge.hear(child.events)]
        faults += [f for child in cast.publishers for f in overdue(child.events, cast.stopped)]
        for driver in cast.drivers:
            faults += judge.faults(driver)
        if self._watcher is not None:
            self._watcher.end()
            if not cast.plan.misleads:
                claims = [claim for claim in self._watcher.seen if claim[0] in cast.workers]
                faults += judge.claims(claims, cast.killed, cast.drivers)
        if faults:
            raise Fault("\n".join(faults[:10]))

    def _count(self) -> None:
        cast, counts = self._cast, self._outcome.counts
        for child in cast.publishers:
            counts["published"] += len(child.those("serial"))
            counts["not published"] += len(child.those("trouble"))
            counts["calls of ranks"] += len(child.those("called"))
            ways = [way for receipt in child.those("receipt") for way in receipt["ways"].values()]
            counts["came as a patch"] += ways.count(DELTA)
            counts["took no patch, and said why"] += len(child.those("unpatched"))
        for driver in cast.drivers:
            counts["applied"] += len(driver.those("applied"))
            counts.update(f"failed: {event['code']}" for event in driver.those("failed"))
        counts["messages touched"] += sum(wire.touched for wire in cast.all_wires)
        if self._watcher is not None:
            counts["said to an observer"] += len(self._watcher.seen)

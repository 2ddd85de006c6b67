"""Runs the demo: a trainer improves a policy while workers play with the published versions.

    trainer ── weights, over the bus ──> workers
            <── episodes, as lines ─────

What is learned is a `Subject`: CartPole, or a language model whose episodes are batches of answers.

The trainer publishes after every update and does not wait for the receipt, which later says how
long every worker took. Midway a worker is killed and started again. At the end the trainer
publishes one last version, waits for its receipt, and reports the results.
"""

import contextlib
import importlib.util
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from weightbus import Publisher, PublishError, Settings, WeightBusError, WorkersMissingError
from weightbus.python_client.cli.outcome import UsageError
from weightbus.types import Receipt

from .accident import Accident
from .fleet import Fleet, WorkerDied
from .llm.subject import LANGUAGE
from .policy import MODEL
from .report import Report, report
from .screen import Screen, View
from .subject import CARTPOLE, Learner, Subject
from .summary import summary
from .tally import Played

SUBJECTS = {"cartpole": CARTPOLE, "llm": LANGUAGE}
TAKE_SECONDS = 0.05  # longest wait for episodes before the screen is updated
START_SECONDS = 90.0  # for processes to start on a busy machine
PUBLISH_SECONDS = 10.0  # for a worker to apply a version
MEND_SECONDS = 60.0  # longest wait after the end of the run until the killed worker is back
ACCIDENT_AT = 0.4  # of the run
ACCIDENT_SECONDS_MIN = 6.0  # a shorter run has no accident

# A dead worker is lost after two seconds: soon enough to watch, but late enough for a busy machine.
QUICK = Settings(ping=0.5, lost_after=2.0)


class Course:
    """One run, from the start of the workers to the report."""

    def __init__(
        self,
        publisher: Publisher,
        fleet: Fleet,
        screen: Screen,
        subject: Subject,
        *,
        workers: int,
        seconds: float,
        seed: int,
    ) -> None:
        self._publisher, self._fleet, self._screen = publisher, fleet, screen
        self._names = [f"w{number}" for number in range(workers)]
        self._subject, self._seconds, self._seed = subject, seconds, seed
        self.tally = subject.tally(self._names)
        self.accident: Accident | None = None
        if workers > 1 and seconds >= ACCIDENT_SECONDS_MIN:
            self.accident = Accident(self._names[1], seconds * ACCIDENT_AT)
        self._version = 0
        self._open: list[Future[Receipt]] = []
        self._started = 0.0

    def run(self) -> Report:
        """Run it.

        Raises:
            WorkerDied: A worker ended by itself.
            WorkersMissingError: The workers did not start.
        """
        for name in self._names:
            self._fleet.start(name)
        self._screen.say(f"starting {len(self._names)} workers, and PyTorch in the trainer")
        learner = self._subject.learner(self._seed)
        self._wait_for_workers(START_SECONDS)
        self._settle(self._publisher.publish(MODEL, learner.policy, timeout=START_SECONDS))
        self._learn(learner, self._first_episodes())
        now = self._now()
        self._publish_the_last(learner)
        for future in self._open:
            self.tally.published(future.result(2 * PUBLISH_SECONDS), now)
        status = self._publisher.workers()
        return report(self.tally, status, self._version, now, self.accident)

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _wait_for_workers(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self._fleet.take(0.0)  # says if one has died
            try:
                return self._publisher.wait_for_workers(len(self._names), 0.5, MODEL)
            except WorkersMissingError:
                if time.monotonic() >= deadline:
                    raise

    def _first_episodes(self) -> list[Played]:
        """Wait for the first episodes, with which the run's clock starts, and return them."""
        deadline = time.monotonic() + START_SECONDS
        while not (episodes := self._fleet.take(TAKE_SECONDS)):
            if time.monotonic() >= deadline:
                raise WorkerDied(
                    f"no episode within {START_SECONDS:.0f} s of the first version, though every "
                    "worker joined: is the machine overloaded?"
                )
        self._started = time.monotonic()
        return episodes

    def _learn(self, learner: Learner, window: list[Played]) -> None:
        """Update and publish until the time is up and the killed worker is back."""
        self._note(window)
        fresh = sum(episode.steps for episode in window)
        while not self._over():
            if fresh >= self._subject.update_steps:
                window, fresh = _newest(window, self._subject.window_steps), 0
                learner.improve(window, min(1.0, self._now() / self._seconds))
                self._publish(learner)
            arrived = self._fleet.take(TAKE_SECONDS)
            self._note(arrived)
            window += arrived
            fresh += sum(episode.steps for episode in arrived)
            self._look()

    def _over(self) -> bool:
        mending = self.accident is not None and self.accident.open
        return self._now() >= self._seconds + (MEND_SECONDS if mending else 0.0)

    def _note(self, episodes: Sequence[Played]) -> None:
        for episode in episodes:
            self.tally.played(episode, self._now())

    def _look(self) -> None:
        """Handle the receipts that have arrived, take the next step of the accident, and draw."""
        for future in [future for future in self._open if future.done()]:
            self._open.remove(future)
            self.tally.published(future.result(), self._now())
        status, now = self._publisher.workers(), self._now()
        if self.accident is not None:
            event = self.accident.step(self._fleet, status, self._version, now)
            if event is not None:
                self._screen.say(event, now)
        address = self._publisher.address
        view = View(self._subject, now, self._seconds, self._version, address, self.tally, status)
        self._screen.show(view)

    def _publish(self, learner: Learner) -> None:
        """Publish, and handle the receipt later, so that a dead worker does not delay the run."""
        self._open.append(
            self._publisher.publish_async(MODEL, learner.policy, require=0, timeout=PUBLISH_SECONDS)
        )
        self._version += 1

    def _publish_the_last(self, learner: Learner) -> None:
        """Publish to all workers and wait; the report names workers that do not apply it."""
        with contextlib.suppress(WorkersMissingError):
            self._wait_for_workers(PUBLISH_SECONDS)
        try:
            receipt = self._publisher.publish(MODEL, learner.policy, timeout=PUBLISH_SECONDS)
        except PublishError as error:
            receipt = error.receipt
        self._settle(receipt)

    def _settle(self, receipt: Receipt) -> None:
        self._version = receipt.version
        self.tally.published(receipt, self._now() if self._started else 0.0)


def _newest(episodes: Sequence[Played], most: int) -> list[Played]:
    """Return the newest episodes with `most` steps or slightly more, oldest first."""
    taken, steps = list[Played](), 0
    for episode in reversed(episodes):
        if steps >= most:
            break
        taken.append(episode)
        steps += episode.steps
    return taken[::-1]


def run_demo(
    workers: int = 3,
    seconds: float = 30,
    plot: Path | None = None,
    as_json: bool = False,
    model: str = "cartpole",
    seed: int = 0,
) -> int:
    """Run the demo and return an exit code: 0 if the policy improved and every worker has it, or 1.

    Args:
        workers: The number of worker processes.
        seconds: Time from the first episode to the end.
        plot: The path of a PNG file to write, with the results over time.
        as_json: Print the results as one JSON object, the last line of stdout; all other output
            then goes to stderr.
        model: The model: "cartpole" or "llm".
        seed: The seed of all random numbers. The order of events still varies.

    Raises:
        UsageError: The arguments are invalid.
        WeightBusError: A worker died by itself or did not start, or a package is missing.

    All workers have ended when the function returns or raises, also after an interrupt.
    """
    subject = _check(model, workers, seconds, plot)
    console = Console(stderr=as_json)
    with (
        Publisher(settings=QUICK) as publisher,
        Fleet(publisher.address, subject, seed) as fleet,
        Screen(console) as screen,
    ):
        course = Course(
            publisher, fleet, screen, subject, workers=workers, seconds=seconds, seed=seed
        )
        result = course.run()
    console.print(summary(result))
    if plot is not None:
        from .plot import save_plot  # takes a second, which would delay the start

        save_plot(plot, subject, course.tally, course.accident)
        console.print(f"  the plot is in {plot}\n", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        achieved = not result.faults
        print(json.dumps({"kind": "demo", "achieved": achieved, **asdict(result)}), flush=True)
    return 1 if result.faults else 0


def _check(model: str, workers: int, seconds: float, plot: Path | None) -> Subject:
    """Return the subject; check now what would otherwise fail after half a minute."""
    if model not in SUBJECTS:
        raise UsageError(f"model {model!r}: there is {' and '.join(SUBJECTS)}")
    if workers < 1:
        raise UsageError(f"{workers} workers: it takes at least 1")
    if seconds <= 0:
        raise UsageError(f"{seconds} seconds: give it more than 0")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UsageError(f"{plot}: there is no folder {plot.parent}; make it first")
    needed = (*SUBJECTS[model].needs, *(["matplotlib"] if plot is not None else []))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise WeightBusError(
            f"{' and '.join(missing)} cannot be imported: pip install {' '.join(missing)} "
            "(the extra weightbus[demo])"
        )
    return SUBJECTS[model]

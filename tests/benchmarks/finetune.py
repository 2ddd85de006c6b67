"""A real run of fine-tuning, published as patches to workers of every language.

    python tests/benchmarks/finetune.py --versions 2000      as `make finetune`
    python tests/benchmarks/finetune.py --versions 2000 --layers 1 --words 4000  a model of 7 MB
    python tests/benchmarks/finetune.py --versions 50 --layers 1 --languages python,go

A small encoder learns (`encoder.py`): float32 masters, Adam, and after each step a
version in bfloat16, by two publishers, one with keys and one without. Workers of each language join
both, and all the time some are killed, leave, or are stopped for a few versions, which they miss.
Every version that any of them applies must be the one that was published: its digest, and the bytes
of each tensor. And each that came as a whole must have a reason that follows from who ran what, or
stands in the publisher's log. Counts are printed; what is wrong ends the run with status 1.
"""

import argparse
import itertools
import logging
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightbus import Publisher, PublishError, Settings
from weightbus.bus.messages import DELTA, Applied
from weightbus.bus.publisher.reports import Reports
from weightbus.bus.publisher.roster import Peer
from weightbus.bus.trust.keys import WORKERS, file_name, generate
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT, digest_of
from weightbus.codecs.native import crc32c
from weightbus.codecs.state import state_of
from weightbus.python_client.settings import BASES
from weightbus.tests.benchmarks.encoder import encoder, smaller, steps
from weightbus.tests.chaos.run import ready
from weightbus.tests.compose.waiting import MissedError, wait_for
from weightbus.tests.conformance.driver import Driver, Event, Fault, Options
from weightbus.tests.conformance.languages import Language, chosen

ANYBODY = "*"
PUBLISH_SECONDS = 120.0  # for all that are there; a busy host takes its time
LOST_AFTER = 5.0
WORKER_SECONDS = 10**6
# What becomes of a worker before a version: one in so many.
KILLED, LEAVES, STOPPED = 80, 80, 25
AWAY, STOPS = (1, 12), (1, 6)  # versions for which its place is empty, or it is stopped
TAKES_ALL = re.compile(r"worker (\S+) takes all of version (\d+) of \S+, for which .*? a patch: ")
NO_PATCH = re.compile(r"(\S+): no patch on version (\d+): ")
# What a worker may say of why no patch is of use to it, beside that there is none on what it runs.
NO_USE = re.compile(
    r"nothing runs here|the publisher has no such patch \(any more\)$"
    r"|version \d+ of epoch \d+ runs here, and its bytes were not kept"
)
RUNS = re.compile(r"version (\d+) of epoch \d+ runs here; there are patches on ([\d, ]+)$")
UNMADE = re.compile(
    r"it was not made in .* of what was left of the timeout"
)  # why there may be none
PATCHED_LEAST, ENOUGH = 0.5, 20  # of what comes to a language by a publisher, if it is so much
UNEXPLAINED = "nobody knows"
FAULTS_MAX = 20  # then it ends

Key = tuple[int, int]  # epoch, version


@dataclass(frozen=True, slots=True)
class Content:
    """What a version consists of."""

    digest: str
    crcs: Mapping[str, int]

    @classmethod
    def of(cls, model: Any) -> "Content":
        """Compute it from the masters, without the publisher's help."""
        tensors = {n: p.detach().bfloat16() for n, p in model.named_parameters()}
        raw = {n: t.contiguous().view(torch.uint8).numpy().reshape(-1) for n, t in tensors.items()}
        layout = state_of(tensors).layout()
        section = np.concatenate([raw[s.name] for s in layout.tensors])
        digest = digest_of(layout.id, section, CHUNK_BYTES_DEFAULT)
        return cls(digest, {s.name: crc32c(raw[s.name]) for s in layout.tensors})


class Log(logging.Handler):
    """Keeps why workers take all of a version, and why there is no patch, as publishers tell it."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[tuple[str, int], str] = {}  # by worker and version
        self.unmade: dict[tuple[str, int], str] = {}  # by model and what a patch was to be on

    def emit(self, record: logging.LogRecord) -> None:
        """Take note."""
        text = record.getMessage()
        if told := TAKES_ALL.match(text):
            self.reasons[told[1], int(told[2])] = text[told.end() :]
        elif told := NO_PATCH.match(text):
            self.unmade[told[1], int(told[2])] = text[told.end() :]


@dataclass
class Heard:
    """What workers report to the publishers of this process: by which patch each version came."""

    came: dict[tuple[str, Key], int] = field(default_factory=dict[tuple[str, Key], int])
    able: set[str] = field(default_factory=set[str])  # workers that take patches

    def listen(self) -> None:
        """Hear of it from now on."""
        before = Reports.applied

        def applied(reports: Reports, peer: Peer, message: Applied, now: float) -> Any:
            if DELTA in peer.hello.features:
                self.able.add(peer.name)
            base = message.patch.version if message.patch is not None else 0
            self.came.setdefault((peer.name, (message.epoch, message.version)), base)
            return before(reports, peer, message, now)

        Reports.applied = applied  # type: ignore[assignment, method-assign]


@dataclass
class Offer:
    """What a version was offered with.

    Attributes:
        believed: What each worker was known to run when it was published.
        lost: Who was taken for lost then.
        bases: The versions on which there were patches, and the bytes of each.
        keep: Whether there may be patches on it.
        nbytes: Of the version.
    """

    believed: Mapping[str, int]
    lost: Collection[str]
    bases: Mapping[int, int]
    keep: bool
    nbytes: int


class Bus:
    """A publisher, what it has published, and the places of its workers."""

    def __init__(self, folder: Path, *, keyed: bool, languages: Sequence[Language]) -> None:
        self.keys = folder / "keys" if keyed else None
        self.model = "encoder-keyed" if keyed else "encoder-plain"  # logs tell it by that
        if self.keys is not None:
            generate(self.keys, {ANYBODY: "worker"})
        timing = Settings(ping=0.5, lost_after=LOST_AFTER)
        self.publisher = Publisher(settings=replace(timing, shared_memory=False), keys=self.keys)
        self.published: dict[Key, Content] = {}
        self.offers: dict[int, Offer] = {}
        self.places = [Place(self, language, folder) for language in languages]

    def publish(self, model: Any, content: Content, counts: Counter[str]) -> Iterator[str]:
        """Publish to all; wait until those that are there have it. Yield what is wrong."""
        before = self.publisher.workers().values()
        live = {w.name for w in before if w.state != "lost"}
        require = sum(place.there and place.worker in live for place in self.places)
        try:
            receipt = self.publisher.publish(
                self.model,
                model,
                settings=Settings(dtype={ANYBODY: "bf16"}, encoding="delta"),
                require=require,
                timeout=PUBLISH_SECONDS,
            )
        except PublishError as error:
            receipt = error.receipt
            counts["publishes late"] += 1  # somebody was taken for lost meanwhile
        key = (receipt.epoch, receipt.version)
        self.published[key] = content
        if receipt.digest not in ("", content.digest):
            yield f"the receipt of {key} has digest {receipt.digest}, not {content.digest}"
        versions = self.publisher._machine.store.get(self.model)  # noqa: SLF001 # pyright: ignore
        version = versions.find(receipt.version) if versions is not None else None
        self.offers[receipt.version] = Offer(
            believed={w.name: w.running.get(self.model, (0, 0))[1] for w in before},
            lost={w.name for w in before if w.state == "lost"},
            bases={p.base.version: p.plan.nbytes for p in version.patches} if version else {},
            keep=version is not None and version.keep,
            nbytes=receipt.nbytes,
        )


class Place:
    """Where a worker of some language is, or will be again; each has a name of its own."""

    def __init__(self, bus: Bus, language: Language, folder: Path) -> None:
        self.bus, self.language, self._folder = bus, language, folder
        self.driver: Driver | None = None
        self.worker = ""
        self.ran = 0  # the version that the worker has applied last; 0: none
        self._number = 0  # workers that there were
        self._until = 0  # a version at which its place is taken again, or it goes on
        self.stopped = False

    @property
    def there(self) -> bool:
        """Whether it is to get every version in time."""
        return self.driver is not None and self.ran > 0 and not self.stopped

    def before(self, version: int, chance: random.Random, counts: Counter[str]) -> None:
        """See what becomes of its worker before a version is published."""
        if self.driver is None:
            if version >= self._until:
                self._join()
                counts["joined"] += 1
        elif self.stopped:
            if version >= self._until:
                self.driver.send(signal.SIGCONT)
                self.stopped = False
        elif not self.ran:
            return
        elif chance.randrange(KILLED) == 0:
            self.driver.kill()
            self._leave(version, chance)
            counts["killed"] += 1
        elif chance.randrange(LEAVES) == 0:
            counts["left"] += 1
            try:
                self.driver.stop()
            finally:
                self._leave(version, chance)
        elif chance.randrange(STOPPED) == 0:
            self.driver.send(signal.SIGSTOP)
            self.stopped, self._until = True, version + chance.randint(*STOPS)
            counts["stopped"] += 1

    def _join(self) -> None:
        self._number += 1
        keyed = self.bus.keys is not None
        self.worker = f"{self.language.key}-{'keyed' if keyed else 'plain'}-{self._number}"
        keys = None if self.bus.keys is None else self.bus.keys / WORKERS / file_name(ANYBODY)
        self.driver = Driver(
            self.language.command,
            self.bus.publisher.address,
            self.worker,
            Options(models=(self.bus.model,), seconds=WORKER_SECONDS, keys=keys),
            self._folder,
            PUBLISH_SECONDS,
        )
        self.ran = 0

    def _leave(self, version: int, chance: random.Random) -> None:
        assert self.driver is not None
        self.driver.close()
        self.driver, self.ran, self._until = None, 0, version + chance.randint(*AWAY)

    def end(self) -> None:
        """Have its worker end as it should.

        Raises:
            Fault: It does not.
        """
        if self.driver is not None:
            self.driver.stop()


@dataclass
class Tally:
    """What has become of it all.

    Attributes:
        ways: By language and model, how often versions came by which encoding.
        why: How often all of a version came, by reason.
        nbytes: What all of the versions would have been that were applied, and what came.
        skipped: By language, versions that a worker has missed between two that it applied.
        faults: What is wrong.
    """

    ways: Counter[tuple[str, str, str]] = field(default_factory=Counter[tuple[str, str, str]])
    why: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])
    nbytes: list[int] = field(default_factory=lambda: [0, 0])
    faults: list[str] = field(default_factory=list[str])

    @contextmanager
    def noting(self) -> Generator[None, None, None]:
        """Note what does not become as it should, and go on."""
        try:
            yield
        except (Fault, MissedError) as fault:
            self.faults.append(str(fault))

    def unused(self, languages: Sequence[Language], models: Sequence[str]) -> Iterator[str]:
        """Yield where patches hardly ever work, whatever reasons there are for each version."""
        able = [each.title for each in languages if "patched" not in each.unsupported]
        for title, model in itertools.product(able, models):
            patched, raw = (self.ways[title, model, way] for way in (DELTA, "raw"))
            if patched + raw >= ENOUGH and patched < PATCHED_LEAST * (patched + raw):
                yield f"{title}: {patched} of {patched + raw} versions of {model} came by patches"


@dataclass(frozen=True, slots=True)
class Came:
    """A worker has applied a version, and ran another one before (0: none)."""

    worker: str
    language: str
    model: str
    key: Key
    before: int
    offers: Mapping[int, Offer] = field(repr=False)

    @property
    def offer(self) -> Offer:
        """What the version was offered with."""
        return self.offers[self.key[1]]


class Judge:
    """Holds what workers tell against what was published."""

    def __init__(self, heard: Heard, log: Log) -> None:
        self._heard, self._log, self.tally = heard, log, Tally()
        self._open: list[Came] = []  # of which the publisher has not heard

    def hear(self, place: Place) -> None:
        """Take what a worker has told since."""
        driver = place.driver
        if driver is None:
            return
        told = driver.events[:]
        del driver.events[: len(told)]  # else they are gigabytes in the end
        for event in told:
            if event["event"] == "applied":
                self._applied(event, place)
            elif event["event"] in ("failed", "torn", "refused"):
                self.tally.faults.append(f"{place.worker}: {event}")
        if not driver.alive:
            self.tally.faults.append(f"{place.worker} has ended by itself: {driver.story()}")

    def _applied(self, event: Event, place: Place) -> None:
        key, tally = (event["epoch"], event["version"]), self.tally
        content = place.bus.published.get(key)
        if content is None or event["digest"] != content.digest:
            tally.faults.append(f"{place.worker}: {key} has digest {event['digest']}: {content}")
        elif event["tensors"] != content.crcs:
            tally.faults.append(f"{place.worker}: {key} has other bytes")
        if key[1] <= place.ran:
            tally.faults.append(f"{place.worker}: {key} was applied after {place.ran}")
        before, place.ran = place.ran, key[1]
        tally.skipped[place.language.title] += key[1] - before - 1 if before else 0
        title, offers = place.language.title, place.bus.offers
        self._open.append(Came(place.worker, title, place.bus.model, key, before, offers))

    def close(self) -> None:
        """Judge in which way versions came, of those of which the publisher has heard."""
        left: list[Came] = []
        for came in self._open:
            base = self._heard.came.get((came.worker, came.key))
            if base is None:
                left.append(came)
            else:
                self._close(came, base)
        self._open = left

    @property
    def unheard(self) -> int:
        """How often a worker applied what it told us alone: it was killed then, or lost."""
        return len(self._open)

    def has_heard(self, version: int) -> bool:
        """Return whether the publishers have heard of all who have applied a version."""
        self.close()
        return not any(came.key[1] == version for came in self._open)

    def _close(self, came: Came, base: int) -> None:
        tally, nbytes = self.tally, came.offer.nbytes
        tally.ways[came.language, came.model, DELTA if base else "raw"] += 1
        tally.nbytes[0] += nbytes
        tally.nbytes[1] += came.offer.bases.get(base, 0) if base else nbytes
        if not base:
            why = self._why(came)
            tally.why[why] += 1
            if why == UNEXPLAINED:
                told = self._log.reasons.get((came.worker, came.key[1]), "nothing")
                offer, unmade = came.offer, self._log.unmade.get((came.model, came.before))
                known = offer.believed.get(came.worker), came.worker in offer.lost, offer.bases
                tally.faults.append(
                    f"all of {came.model} {came.key[1]} came to {came.worker}, which ran "
                    f"{came.before}, and nobody knows why; the log tells {told!r}; what it was "
                    f"believed to run, whether lost, and patches: {known}; none made: {unmade}"
                )

    def _why(self, came: Came) -> str:
        """Say why all of a version came."""
        worker, before, offer = came.worker, came.before, came.offer
        told = self._log.reasons.get((worker, came.key[1]))
        if worker not in self._heard.able:
            return "the worker takes no patches"
        if told and _permitted(told):
            return "as the log tells: " + re.sub(r"\b[0-9a-f]{12}\b|\d+", "N", told)
        if told:
            return UNEXPLAINED
        if not before:
            return "it was the first that the worker got"
        if before < came.key[1] - BASES:
            return f"the worker had missed more than the {BASES} versions that are kept"
        if not all(came.offers[v].keep for v in range(before, came.key[1])):
            return "nobody who takes patches was there at a version before, so nothing was kept"
        if worker in offer.lost:
            return "the worker was taken for lost when it was published"
        unmade = self._log.unmade.get((came.model, before))
        if before not in offer.bases and unmade:
            return (
                f"as the log tells, no patch was made: {unmade}"
                if UNMADE.match(unmade)
                else UNEXPLAINED
            )
        if offer.believed.get(worker, 0) != before:
            return "what the worker ran was not known yet when it was published, or did not run yet"
        return UNEXPLAINED


def _permitted(told: str) -> bool:
    """Return whether a worker may take all of a version for that."""
    if runs := RUNS.match(told):
        return runs[1] not in runs[2].split(", ")
    return NO_USE.match(told) is not None


class Run:
    """A run of fine-tuning, and the workers that follow it."""

    def __init__(self, options: argparse.Namespace, languages: Sequence[Language]) -> None:
        self._options, self._languages = options, languages
        self._chance = random.Random(options.seed)
        self.counts, self.seconds = Counter[str](), list[float]()

    def play(self) -> Tally:
        """Train, publish, and hear what becomes of it."""
        heard, log = Heard(), Log()
        heard.listen()
        logger = logging.getLogger("weightbus.publisher")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(log)
        judge = Judge(heard, log)
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            buses: list[Bus] = []
            for name, keyed in (("plain", False), ("keyed", True)):
                (folder / name).mkdir()
                bus = Bus(folder / name, keyed=keyed, languages=self._languages)
                buses.append(bus)
                undo.callback(bus.publisher.close)
            for place in (place for bus in buses for place in bus.places):
                undo.callback(close, place)
            with judge.tally.noting():
                self._train(buses, judge)
        models = [bus.model for bus in buses]
        judge.tally.faults += judge.tally.unused(self._languages, models)
        return judge.tally

    def _train(self, buses: Sequence[Bus], judge: Judge) -> None:
        model, tokens = encoder()
        tokens = smaller(model, tokens, self._options.layers, self._options.words)
        places = [place for bus in buses for place in bus.places]
        begun = time.monotonic()
        for version in steps(model, tokens, self._options.versions):
            content = Content.of(model)
            last = version == self._options.versions
            for place in places:
                judge.hear(place)
                if not last:
                    with judge.tally.noting():
                        place.before(version, self._chance, self.counts)
                elif place.stopped:
                    place.before(sys.maxsize, self._chance, self.counts)
            judge.close()
            for bus in buses:
                judge.tally.faults += bus.publish(model, content, self.counts)
            self.seconds.append(time.monotonic() - begun)
            begun = time.monotonic()
            if version % self._options.every == 0:
                self._tell(version, judge.tally)
            if len(judge.tally.faults) > FAULTS_MAX:
                return
        for place in places:
            self._finish(place, judge)
        with judge.tally.noting():
            wait_for(
                lambda: judge.has_heard(self._options.versions), "all reports", PUBLISH_SECONDS
            )
        for place in places:
            with judge.tally.noting():
                place.end()
        self.counts["applied unheard"] = judge.unheard

    def _finish(self, place: Place, judge: Judge) -> None:
        """Wait until a worker runs the last version."""
        judge.hear(place)
        last = self._options.versions
        if place.driver is not None and place.ran < last:
            with judge.tally.noting():
                place.driver.wait_applied(place.bus.model, place.bus.publisher.epoch, last)
                judge.hear(place)

    def _tell(self, version: int, tally: Tally) -> None:
        ways = Counter[str]()
        for (*_, way), count in tally.ways.items():
            ways[way] += count
        counts = sorted((ways + self.counts).items())
        told = ", ".join(f"{count:,} {what}" for what, count in counts)
        took = statistics.median(self.seconds[-self._options.every :])
        print(f"version {version:,}: {told}; {took:.2f} s each", flush=True)


def close(place: Place) -> None:
    """Leave nothing behind."""
    if place.driver is not None:
        place.driver.close()


def report(tally: Tally, run: Run, versions: int, languages: Sequence[Language]) -> Iterator[str]:
    """Yield what to print of a run."""
    yield f"{versions:,} versions, each by two publishers, one with keys"
    yield f"{'':12}{DELTA:>10}{'raw':>10}{'skipped':>10}"
    for title in (language.title for language in languages):
        of = [(way, n) for (whose, _, way), n in tally.ways.items() if whose == title]
        patched, raw = (sum(n for each, n in of if each == way) for way in (DELTA, "raw"))
        yield f"{title:12}{patched:>10,}{raw:>10,}{tally.skipped[title]:>10,}"
    yield "workers: " + ", ".join(f"{n:,} {what}" for what, n in sorted(run.counts.items()))
    whole, came = tally.nbytes
    yield f"{came:,} bytes came to workers, in place of {whole:,}: {whole / max(1, came):.1f} times"
    yield "all of a version came, since"
    yield from (f"  {count:>8,}  {why}" for why, count in tally.why.most_common())
    yield from (f"WRONG: {fault[:600]}" for fault in tally.faults[:FAULTS_MAX])
    yield f"{len(tally.faults)} wrong, {tally.why[UNEXPLAINED]} without a reason"


def main(words: Sequence[str]) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=6, help="of the encoder")
    parser.add_argument("--words", type=int, default=30_522, help="that it knows; else all")
    parser.add_argument("--languages", help="keys of tests/conformance/languages.py; else all")
    parser.add_argument("--seed", type=int, default=1, help="decides who joins, dies and skips")
    parser.add_argument("--every", type=int, default=50, help="versions between two lines")
    options = parser.parse_args(words)
    languages = ready(chosen(options.languages))
    run = Run(options, languages)
    tally = run.play()
    print("\n".join(report(tally, run, options.versions, languages)))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

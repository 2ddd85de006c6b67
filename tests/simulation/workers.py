"""A worker process and its user, on a simulated network."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weightbus.bus.effects import (
    Connect,
    Copy,
    Decode,
    Effect,
    Notice,
    Ready,
    Refused,
    Rejected,
    Renamed,
    Send,
    Subscribe,
)
from weightbus.bus.limits import STAGING_BYTES_MAX
from weightbus.bus.messages import (
    DELTA,
    PARTS,
    RELAY,
    RENAMING,
    UPSTREAM,
    Hello,
    Shared,
)
from weightbus.bus.net.copier import copying, patching
from weightbus.bus.protocol_limits import APPLIES_MAX
from weightbus.bus.staged import Copying, OverwrittenError, Patching, StagedVersion, StaleError
from weightbus.bus.worker.events import Copied, Decoded, Outcome, Report, Wanted
from weightbus.bus.worker.keyring import Keyring
from weightbus.bus.worker.layouts import Expected
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.layout import Layout
from weightbus.codecs.parts import Box, PartLayout

from .conditions import SIZES, Steps, T
from .invariants import Key, slices
from .performing import done
from .virtual_memory import Lives, VirtualView
from .watching import Watched

if TYPE_CHECKING:
    from .network import Simulation
    from .publishers import Publisher


def boxes(layout: Layout) -> dict[str, Box | None]:
    """The slices that a worker of a part takes."""
    return {spec.name: slices(spec.shape) for spec in layout.tensors}


class Worker:
    """One worker process: the machine, and a user who applies when it pleases.

    Some users refuse models of one byte, some have room for small models only.
    """

    machine: WorkerMachine

    def __init__(self, sim: "Simulation", name: str, process: str) -> None:
        self.sim, self.name, self.process = sim, name, process
        self.incarnation = 0
        self.alive = False
        self.at = sim.publishers[0]  # where its address leads to
        self.rate = sim.rng.choice(sim.faults.rates)
        self.local = sim.rng.random() < 0.5  # on the publisher's host
        self.local &= not sim.patched or sim.changes.random() < 0.3
        self.picky = sim.rng.random() < 0.15
        self.bytes_max = sim.rng.choice([STAGING_BYTES_MAX] * 6 + [SIZES[-1] - 1])
        # Whether it takes a part: not a relay, and a second process of a name as the first one.
        self.cut = sim.parts.random() < 0.2 and name.startswith("w") and name == process
        self.cut |= name in sim.invariants.cut
        sim.invariants.cut |= {name, process} if self.cut else set()

    def start(self) -> None:
        self.incarnation += 1
        self.alive, self.cut_until = True, 0.0
        instance = f"{self.sim.rng.getrandbits(128):032x}"
        features: tuple[str, ...] = (RENAMING, UPSTREAM) if self.name != "w1" else ()
        takes_patches = self.sim.patched and self.name != "w2" and not self.cut
        features += (DELTA,) if takes_patches else (PARTS,) if self.cut else ()
        identity = Hello(name=self.name, instance=instance, models={}, features=[*features])
        models = ["a", "b"] if self.name == "w0" else ["a"]
        keyring = Keyring() if self.sim.sealed else None
        about = identity, models, self.objection, self.bytes_max, self.sim.timing
        like = {model: Expected(boxes=boxes) for model in models} if self.cut else None
        self.machine = Watched(*about, like, keyring=keyring)
        self.topics: set[bytes] = set()
        self.views: dict[str, VirtualView] = {}  # by token, what it has opened
        self.connected, self.receiving = "", False
        self.refusal = ""
        self.contents: dict[str, bytes] = {}  # of its models, what lies in their memory
        self.names: dict[str, Key] = {}  # of its models, what it calls what lies there
        self.written = 0  # the greatest epoch of which anything was written there
        self.ready: dict[str, StagedVersion] = {}
        self.kept: list[tuple[NDArray[np.uint8], bytes]] = []  # what its user goes on using
        self.only: dict[str, tuple[int, int]] = {}  # of a model, what its user wants and no other
        self.applying: set[str] = set()
        self.busy: set[str] = set()  # models that versions are being applied to
        self.renamed: set[Key] = set()  # names that came without bytes
        self.sim.every_tick(self.incarnation, self, self.tick)

    def open(self, shared: Shared, nbytes: int) -> VirtualView | None:
        segment = self.sim.segments.get(shared.token) if self.local else None
        if segment is None or segment.data.nbytes != nbytes:
            return None
        if shared.token not in self.views:
            if not segment.lives():  # nobody can open it any more
                return None
            self.views[shared.token] = segment.open(lives(self))
        return self.views[shared.token]

    def objection(self, _model: str, layout: Layout) -> str:
        return "one byte is not a model" if self.picky and layout.nbytes == 1 else ""

    def takes(self, layout: Layout) -> bool:
        nbytes = PartLayout(layout, boxes(layout)).nbytes if self.cut else layout.nbytes
        return nbytes <= self.bytes_max and not self.objection("", layout)

    def copy(self, each: Sequence[StagedVersion]) -> Steps[list[Effect]]:
        """Copy versions into the models, in steps, which their readers see at once."""
        read: list[tuple[StagedVersion, bytes, str]] = []
        for staged in each:
            found = yield from self.read(staged)
            if found is None:
                self.sim.met.add("stale")
                others = [one for one in each if one is not staged]
                effects = [e for one in others for e in self.report(one, "failed")]
                return effects + self.report(staged, "stale")
            read.append((staged, *found))
        for staged, whole, _ in read:
            self.sim.met |= {"part"} if self.cut else set()
            running = self.machine.followers[staged.model].running
            before = (running.epoch, running.version) if running else (0, 0)
            self.sim.invariants.on_apply(self.name, before, staged, whole)
            self.contents[staged.model] = whole
            self.names[staged.model] = (staged.model, *staged.key)
            self.written = max(self.written, staged.epoch)
            process = f"{self.process}#{self.incarnation} of {staged.model}"
            self.sim.invariants.on_follow(process, before[0], staged.epoch)
        if len(each) > 1:
            self.sim.met.add("applied as one")
        self.sim.invariants.on_as_one(self.name, self.names, self.contents, self.renamed)
        return [e for staged, _, digest in read for e in self.report(staged, "applied", digest)]

    def read(self, staged: StagedVersion) -> Steps[tuple[bytes, str] | None]:
        """Read a version, in two steps: somebody may want its memory meanwhile. None: too late."""
        half, digest = staged.data.nbytes // 2, staged.digest
        try:
            with staged.reading():
                whole = staged.data[:half].tobytes()
                yield
                whole += staged.data[half:].tobytes()
                if staged.hash_chunks:
                    digest = digest_of(staged.layout.id, staged.data, staged.hash_chunks)
        except OverwrittenError:
            raise AssertionError(f"{staged.key} was overwritten under a lock") from None
        except StaleError:
            return None
        return whole, digest

    def go_on(self, steps: Steps[T], then: Callable[[T], None], incarnation: int) -> None:
        """Do a step of what takes long, then others: a thread may be stopped at any time."""
        if incarnation != self.incarnation or not self.alive:
            return
        try:
            next(steps)
        except StopIteration as end:
            then(end.value)
            return
        pause = self.sim.rng.choice([0.0, 0.0, 0.01, 0.3]) if self.sim.chaotic else 0.0
        stopped = self.sim.chaotic and self.sim.rng.random() < self.sim.faults.stops
        self.sim.later(4.0 if stopped else pause, self.go_on, steps, then, incarnation)

    def copied(self, copy: Copying, crcs: NDArray[np.uint32] | None) -> None:
        """A copy from shared memory into staging has ended."""
        self.sim.met.add("overtaken" if not copy.live else "late" if crcs is None else "copied")
        self.sim.invariants.on_copy(self.name, copy, crcs)
        self.perform(self.machine.happened(Copied(copy, crcs), self.sim.now))
        if self.sim.faults.damage == 0:
            self.sim.invariants.on_arriving(self.name, self.machine.followers.values())

    def decoded(self, job: Patching, fault: str) -> None:
        """A patch was decoded, or is of no use."""
        self.sim.met.add("overtaken patch" if not job.live else "bad patch" if fault else "patched")
        if job.live and not fault and self.at not in self.sim.publishers:
            self.sim.met.add("patched behind a relay")
        self.perform(self.machine.happened(Decoded(job, fault, 0.25), self.sim.now))

    def report(
        self, staged: StagedVersion, what: Outcome, digest: str = "", *, still: bool = False
    ) -> list[Effect]:
        lies_in = staged.private_bytes if what == "applied" else None
        assert all(data.tobytes() == was for data, was in self.kept), "a kept version has changed"
        keeps = what in ("applied", "torn", "declined") and staged.shared is None and not still
        if keeps := keeps and staged.version % 5 == 3:
            self.sim.met.add("kept")
            self.kept.append((staged.data, staged.data.tobytes()))
        report = Report(staged.model, staged.key, what, "no", digest, still, lies_in, keeps)
        return self.machine.happened(report, self.sim.now)

    def fail(self, staged: StagedVersion, *, still: bool) -> list[Effect]:
        """Fail to apply: before a byte has changed, or half-way; `still`: there is no time left."""
        torn = self.sim.rng.random() < 0.5
        if torn:
            self.contents[staged.model] = b"torn" + staged.data.tobytes()
            self.written = max(self.written, staged.epoch)
        effects = self.report(staged, "torn" if torn else "declined", still=still)
        if not torn or self.machine.followers[staged.model].torn_applies >= APPLIES_MAX:
            self.sim.spoiled.add((self.process, staged.model, *staged.key))
        return effects

    def leave(self) -> None:
        """Close as a user does, with a goodbye."""
        self.perform(self.machine.close())
        self.die()

    def die(self) -> None:
        """End without a word."""
        self.alive = False

    def tick(self) -> None:
        self.perform(self.machine.tick(self.sim.now))
        self.perform(self.machine.connected(self.sim.now))
        self.sim.invariants.on_followers(self.process, self.machine.followers.values())
        self.sim.invariants.on_contents(
            self.process, self.machine.followers.values(), self.contents
        )
        self.sim.invariants.on_bases(self.process, self.machine.followers.values())

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in done(self.machine, list(effects), self.sim.now, self.open):
            match effect:
                case Copy(copy):
                    then = partial(self.copied, copy)
                    self.sim.later(0.0, self.go_on, copying(copy), then, self.incarnation)
                case Decode(job):
                    ended = partial(self.decoded, job)
                    self.sim.later(0.0, self.go_on, patching(job), ended, self.incarnation)
                case Notice("unpatched"):
                    self.sim.met.add("unpatched")
                case Send():
                    self.sim.invariants.on_report(self.name, effect.message)
                    self.sim.invariants.on_claim(self.name, effect.message, self.contents)
                    if isinstance(effect.message, Hello):
                        features = effect.message.features
                        outbids = effect.message.epoch > self.written and RELAY in features
                        followed = outbids or effect.message.epoch == self.written
                        assert followed, "it forgot whom it followed"
                    token = self.machine.session.terms.upstream if effect.upstream else ""
                    if not (token and self.sim.word_to_publisher(self, token, effect.message)):
                        self.sim.to_publisher(self, effect.message)
                case Rejected(model, epoch, version, "gone"):
                    self.sim.met.add("gone")
                    self.want_latest(model, (epoch, version), self.incarnation)
                case Refused():
                    self.refusal = effect.code
                case Connect():
                    self.connected = effect.endpoint
                case Subscribe():
                    known = effect.topic in self.topics
                    (self.topics.add if effect.on else self.topics.discard)(effect.topic)
                    if effect.on and not known:
                        self.sim.subscribed(self, effect.topic)
                case Ready():
                    self.hand_over((effect.staged, *effect.others))
                case Renamed(model, epoch, version):
                    key = (model, epoch, version)
                    self.sim.met.add("renamed")
                    self.sim.invariants.on_rename(self.name, key, self.names[model], self.contents)
                    self.names[model] = key
                    self.renamed.add(key)
                    self.written = max(self.written, epoch)
                case _:
                    pass

    def want(self) -> None:
        """The user wants one version and no other, for a while: a new one or an old one."""
        model = self.sim.rng.choice([*self.machine.followers])
        heard = self.machine.followers[model].versions.newest_known
        if model not in self.only and heard[1]:
            key = (heard[0], max(1, heard[1] + self.sim.rng.choice([-2, -1, 0, 0, 1, 1])))
            self.only[model] = key
            self.sim.met.add("wanted")
            self.perform(self.machine.happened(Wanted(model, key), self.sim.now))
            pause = self.sim.rng.choice([0.5, 3.0])
            self.sim.later(pause, self.want_latest, model, key, self.incarnation)

    def want_latest(self, model: str, key: tuple[int, int], incarnation: int) -> None:
        """What was wanted is there, or is not to be had, or was wanted for long enough."""
        if incarnation == self.incarnation and self.alive and self.only.get(model) == key:
            del self.only[model]
            self.perform(self.machine.happened(Wanted(model, None), self.sim.now))
            if model in self.ready and model not in self.applying:
                self.apply_later(model)

    def hand_over(self, each: Sequence[StagedVersion]) -> None:
        """Give the user versions that are ready at once."""
        replaced = [self.ready.pop(one.model, None) for one in each]
        self.ready |= {one.model: one for one in each}
        for one, older in zip(each, replaced, strict=True):
            self.handed_over(one, older)

    def handed_over(self, staged: StagedVersion, older: StagedVersion | None) -> None:
        only = self.only.get(staged.model, staged.key)
        decided = staged.report_staged and staged.key < only  # all apply it together, or none (W14)
        assert decided or staged.key == only, f"{self.name} wants {only} alone, not {staged.key}"
        assert older is None or older.key != only or older.key == staged.key, "it was pinned"
        if older is not None:
            self.perform(self.report(older, "newer"))
        if staged.model not in self.applying:
            self.apply_later(staged.model)

    def apply_later(self, model: str) -> None:
        """The user comes by after a while and takes what is ready then."""
        self.applying.add(model)
        pause = self.sim.rng.choice([0.0, 0.0, 0.05, 1.0]) if self.sim.chaotic else 0.0
        self.sim.later(pause, self.take, model, self.incarnation)

    def take(self, model: str, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        each = self.at_once(model)
        if not each:  # it was taken at once with another one
            return
        if any(one.key != self.only.get(one.model, one.key) for one in each):
            self.applying -= {one.model for one in each} - self.busy
            return
        if any(one.model in self.busy for one in each):
            self.sim.later(0.05, self.take, model, incarnation)
            return
        for one in each:
            del self.ready[one.model]
            self.applying.add(one.model)
            self.busy.add(one.model)
            self.perform(self.report(one, "taken"))
        pause = self.sim.rng.choice([0.0, 0.02, 0.3]) if self.sim.chaotic else 0.0
        self.sim.later(pause, self.apply, each, incarnation)

    def at_once(self, model: str) -> list[StagedVersion]:
        """Return what is ready of a model, and what must be applied at once with it."""
        each = [self.ready[model]] if model in self.ready else []
        for one in each:
            for other in self.ready.values():
                tied = other.model in one.companions or one.model in other.companions
                if tied and other not in each:
                    each.append(other)
        return each

    def apply(self, each: Sequence[StagedVersion], incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        done = partial(self.done_with, each)
        if self.sim.chaotic and self.sim.rng.random() < self.sim.faults.apply:
            late = self.sim.rng.random() < 0.3 and len(each) == 1
            effects = self.fail(each[0], still=late)
            for other in each[1:]:  # all or none
                self.sim.spoiled.add((self.process, other.model, *other.key))
                effects += self.report(other, "declined")
            if late:
                self.sim.met.add("hung")
                self.perform(effects)
                pause = self.sim.rng.choice([0.1, 3.0])
                self.sim.later(pause, self.returned, each[0], incarnation)
            else:
                done(effects)
            return
        self.go_on(self.copy(each), done, incarnation)

    def returned(self, staged: StagedVersion, incarnation: int) -> None:
        """The user is back, too late: what that says does not matter."""
        if incarnation == self.incarnation and self.alive:
            what: Outcome = self.sim.rng.choice(["applied", "torn"])
            self.done_with([staged], self.report(staged, what))

    def done_with(self, each: Sequence[StagedVersion], effects: Sequence[Effect]) -> None:
        """The user has applied versions, or has not."""
        self.applying -= {staged.model for staged in each}
        self.busy -= {staged.model for staged in each}
        self.perform(effects)
        for staged in each:
            self.see_to(staged)

    def see_to(self, staged: StagedVersion) -> None:
        """The user has had a version, and sees what is wanted, or ready, next."""
        if self.only.get(staged.model) == staged.key:
            running = self.machine.followers[staged.model].running
            if running is not None and (running.epoch, running.version) == staged.key:
                self.sim.met.add("exact")
                self.want_latest(staged.model, staged.key, self.incarnation)
        if staged.model in self.ready and staged.model not in self.applying:
            self.apply_later(staged.model)


def lives(process: "Worker | Publisher") -> Lives:
    """Return what says whether a process is still the one that it is now."""
    incarnation = process.incarnation
    return lambda: process.alive and process.incarnation == incarnation

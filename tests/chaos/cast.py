"""Who plays in a round: publishers one after another, relays, and workers of all languages."""

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from weightbus.bus.trust.grants import Role
from weightbus.bus.trust.keys import AT, ORIGIN, WORKERS, generate
from weightbus.tests.chaos.child import Child
from weightbus.tests.chaos.content import MODELS, SPECS
from weightbus.tests.chaos.passing import Passed
from weightbus.tests.chaos.schedule import Part, Plan
from weightbus.tests.chaos.story import Story
from weightbus.tests.chaos.trainer import Told
from weightbus.tests.chaos.wire import Wire
from weightbus.tests.conformance.driver import Driver, Fault, Options

OBSERVER = "ops"
CLOCK = Path(__file__).with_name("clock.c")
DISK_BYTES = 48 * 2**20  # of the disk of a round: some versions of both models
WORKER_SECONDS = 600
START_SECONDS = 120.0  # for a publisher; torch takes long to import where the host is busy
NO_ROOM = "the epoch cannot be written"  # says a publisher whose disk is full
MIB = 2**20


class Cast:
    """The processes of one round, and what they share.

    Args:
        plan: The round.
        commands: By language, its driver.
        folder: For logs.
        disk: For what processes write, which may be full.
        clock: What makes clocks jump, compiled.
        wire: The network of the workers.
        above: Those of the relays, from the publisher down: each relay's to what is above it.
        beside: Those of all to each rank of the trainer but the first.
    """

    def __init__(
        self,
        plan: Plan,
        commands: Mapping[str, Sequence[str]],
        folder: Path,
        disk: Path,
        clock: Path,
        wire: Wire,
        changed: threading.Condition,
        above: Sequence[Wire] = (),
        beside: Sequence[Wire] = (),
    ) -> None:
        self.plan, self.story, self.wire = plan, Story(), wire
        self._above, self._beside = above, beside
        self.folder, self.disk = folder, disk
        self._commands, self._changed = commands, changed
        self.keys = folder / "keys" if plan.keyed else None
        if self.keys is not None:
            self._make_keys(self.keys)
        self._ahead = folder / "clock"
        self.set_clock(0)
        self._environment = {"LD_PRELOAD": str(clock), "WEIGHTBUS_CHAOS_CLOCK": str(self._ahead)}
        self.publishers: list[Child] = []
        self.relays: list[Child] = []  # those of now, from the publisher down
        self.passed: list[Child] = []  # all relays that there ever were
        self.drivers: list[Driver] = []  # all that there ever were
        self.workers: dict[str, Driver] = {}  # those of now
        self.fillers: list[Path] = []
        self.killed = set[str]()  # workers that were killed once
        self.stopped = 0.0  # seconds for which the trainer's processes were stopped, one by one
        self._ended = set[Child | Driver]()  # those that we ended

    # Keys.

    def _make_keys(self, folder: Path) -> None:
        above = ORIGIN
        for number in range(self.plan.relays):
            generate(folder, {_relay(number): "relay"}, above=[above])
            above = _relay(number)
        roles: dict[str, Role] = {part.name: "worker" for part in self.plan.parts}
        generate(folder, roles, at=[above])
        generate(folder, {OBSERVER: "observer"}, at=[ORIGIN, above])

    def key(self, name: str, *, observes: bool = False) -> Path | None:
        """Return a worker's key file, or an observer's; None if there are no keys."""
        if self.keys is None:
            return None
        relays = 0 if observes else self.plan.relays
        return self.keys / WORKERS / f"{name}{AT + _relay(relays - 1) if relays else ''}.json"

    # Publishers.

    def publish(self, *, limits: tuple[str, ...] = (), at: str = "") -> Child:
        """Start a publisher, to which new connections lead from now on."""
        plan = self.plan
        told = Told(
            life=len(self.publishers),
            kind=plan.kind,
            pace=plan.pace,
            together=plan.together,
            shared=plan.shared,
            queue=plan.queue,
            keys=str(self.keys or ""),
            # Of two at once, only one can have the folder.
            state=str(self.disk / "state") if plan.state and not self._led else "",
            advertise=f"tcp://*:{self.wires[0].data_port}",
            watched=plan.watched,
            publisher=[] if plan.publisher == "python" else self._commands[plan.publisher],
            folder=str(self.folder),
            at=at,
            sources=[wire.address for wire in self._beside],
        )
        log = tempfile.TemporaryFile("w+", dir=self.folder)  # noqa: SIM115 - closed with the child
        child = Child(told, self.story, log, self._environment, limits)
        self.publishers.append(child)
        try:
            ready = child.wait("ready", seconds=START_SECONDS)
        except Fault as fault:
            if NO_ROOM not in str(fault) or not self.free_disk():
                raise
            self.story.tell("there is no room for the epoch on disk: started again, with some")
            self._ended.add(child)
            return self.publish(limits=limits, at=at)
        for count in range(len(self._beside)):
            rank = child.wait("rank", 1 + count)
            self._beside[rank["rank"] - 1].lead_to(rank["address"], rank["data"])
        self.wires[0].lead_to(ready["address"], ready["data"])
        self.publisher = child
        return child

    @property
    def wires(self) -> list[Wire]:
        """The networks, from the publisher down to the workers."""
        return [*self._above, self.wire]

    @property
    def all_wires(self) -> list[Wire]:
        """The networks, with those to the trainer's other ranks."""
        return [*self.wires, *self._beside]

    # Relays.

    def relay(self, number: int) -> Child:
        """Start the relay of this number, which takes the place of the one that had it."""
        above, below = self.wires[number], self.wires[number + 1]
        told = Passed(
            name=_relay(number),
            upstream=above.address,
            advertise=f"tcp://*:{below.data_port}",
            queue=self.plan.queue,
            shared=self.plan.shared,
            keys=str(self.keys or ""),
        )
        log = tempfile.TemporaryFile("w+", dir=self.folder)  # noqa: SIM115 - closed with the child
        child = Child(told, self.story, log, self._environment)
        self.passed.append(child)
        ready = child.wait("ready")
        below.lead_to(ready["address"], ready["data"])
        self.relays[number : number + 1] = [child]
        return child

    @property
    def _led(self) -> bool:
        return any(child.alive for child in self.publishers)

    # Workers.

    def work(self, part: Part) -> Driver:
        """Start a worker."""
        temporary = self.disk / part.name
        temporary.mkdir(exist_ok=True)
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        options = Options(
            models=MODELS,
            in_place=dict(SPECS) if part.in_place else None,
            shared=part.shared,
            seconds=WORKER_SECONDS,
            keys=self.key(part.name),
        )
        command = ["env", *variables, f"TMPDIR={temporary}", *self._commands[part.language]]
        made = Driver(
            command,
            self.wire.address,
            part.name,
            options,
            self.folder,
            changed=self._changed,
        )
        self.drivers.append(made)
        self.workers[part.name] = made
        return made

    def part(self, who: int) -> Part:
        """Return the worker of a number."""
        return self.plan.parts[who]

    @property
    def living(self) -> list[Child | Driver]:
        """Everybody who plays now."""
        return [self.publisher, *self.relays, *self.workers.values()]

    @property
    def fallen(self) -> list[Child | Driver]:
        """Everybody who has ended by itself."""
        played: list[Child | Driver] = [*self.publishers, *self.passed, *self.drivers]
        return [each for each in played if not each.alive and each not in self._ended]

    def kill(self, whom: Child | Driver) -> None:
        """End it by force, if it was not killed before.

        Raises:
            Fault: It has ended by itself, which nobody would see any more.
        """
        self.must_play(whom)
        self._ended.add(whom)
        whom.kill()

    def stopped_for(self, seconds: float) -> None:
        """Note that a process of the trainer was stopped."""
        self.stopped += seconds

    def must_play(self, whom: Child | Driver) -> None:
        """See that nothing but us has ended it.

        Raises:
            Fault: It has ended by itself.
        """
        if whom in self.fallen:
            raise Fault(f"{whom.name} has ended by itself: {whom.status()}, {whom.story()}")

    # What they share.

    def set_clock(self, seconds: int) -> None:
        """Let all clocks be off by so much."""
        with self._ahead.open("r+b" if self._ahead.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))

    def fill_disk(self) -> Path:
        """Leave no room on the disk; return what takes it."""
        filler = self.disk / f"filler{len(self.fillers)}"
        self.fillers.append(filler)
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(MIB))
        return filler

    def free_disk(self) -> bool:
        """Make room; return whether there was none."""
        taken = [filler for filler in self.fillers if filler.exists()]
        for filler in taken:
            filler.unlink()
        return bool(taken)

    # The end.

    def end(self) -> None:
        """Have everybody end as they should.

        Raises:
            Fault: Somebody does not.
        """
        for driver in self.workers.values():
            driver.stop()
            self._ended.add(driver)
        for child in (*self.relays[::-1], self.publisher):
            child.end()

    def close(self) -> None:
        """Leave nothing behind."""
        for driver in self.drivers:
            driver.close()
        for child in (*self.passed, *self.publishers):
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _relay(number: int) -> str:
    return f"relay{number}"


def send(worker: Driver, number: signal.Signals) -> None:
    """Send a worker a signal, if it is there."""
    if worker.alive:
        os.kill(worker.pid, number)


def clock(folder: Path) -> Path:
    """Compile what makes clocks jump.

    Raises:
        Fault: There is no compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise Fault("clocks that jump need a compiler for C (cc)")
    made = folder / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", str(CLOCK), "-o", str(made)]
    subprocess.run([*command, "-ldl"], check=True, timeout=60)  # noqa: S603 - as we wrote it
    return made


def small_disk(folder: Path, undo: ExitStack) -> Path:
    """Return a folder on a disk of its own where that can be had (root), else in memory."""
    made = folder / "disk"
    made.mkdir()
    size = f"size={DISK_BYTES},mode=700"
    words = ["mount", "-t", "tmpfs", "-o", size, "weightbus-chaos", str(made)]
    if os.geteuid() == 0 and subprocess.run(words, timeout=60, check=False).returncode == 0:  # noqa: S603
        undo.callback(subprocess.run, ["umount", "--lazy", str(made)], check=True, timeout=60)
    return made

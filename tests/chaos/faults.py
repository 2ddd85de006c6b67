"""What goes wrong: each fault begins, and what it returns ends it."""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from weightbus.tests.chaos.cast import Cast, send
from weightbus.tests.chaos.child import Child
from weightbus.tests.chaos.schedule import CLOCKS, Step
from weightbus.tests.chaos.wire import CHANNELS, Wire
from weightbus.tests.conformance.driver import Driver

End = Callable[[], object]
FILE_BYTES = 2**16  # the largest file, or piece of shared memory, that there may be: too small
FREE_DESCRIPTORS = 3  # at most, for a process that has few


def nothing() -> None:
    """What ends a fault that is over at once."""


def kill_worker(cast: Cast, step: Step) -> End:
    """A worker is killed, and another one is started under its name."""
    part = cast.part(step.who)
    cast.kill(cast.workers[part.name])
    cast.killed.add(part.name)

    def again() -> None:
        cast.must_play(cast.workers[part.name])  # somebody else may have started it again already
        if not cast.workers[part.name].alive:
            cast.work(part)

    return again


def kill_publisher(cast: Cast, _step: Step) -> End:
    """The publisher is killed, and another one is started."""
    return _kill(cast)


def no_segments(cast: Cast, _step: Step) -> End:
    """The publisher is killed, and for a while the next one has neither disk nor shared memory."""
    _kill(cast)
    child = cast.publish(limits=(f"--fsize={FILE_BYTES}:unlimited",))
    child.order("go")
    return lambda: _limit(child, resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)


def kill_relay(cast: Cast, step: Step) -> End:
    """A relay is killed, and another one is started, which has no version."""
    number = step.who % len(cast.relays)
    dead = cast.relays[number]
    cast.kill(dead)

    def again() -> None:
        if cast.relays[number] is dead:
            cast.relay(number)

    return again


def _kill(cast: Cast) -> End:
    dead = cast.publisher
    cast.kill(dead)

    def again() -> None:
        if cast.publisher is dead:
            cast.publish().order("go")

    return again


def kill_rank(cast: Cast, step: Step) -> End:
    """A rank other than 0 is killed; later all others, and they are started again."""
    child = cast.publisher
    cast.must_play(child)
    if child.alive:
        _signal_rank(child, step, signal.SIGKILL)

    def again() -> None:
        if cast.publisher is child:
            cast.kill(child)
            cast.publish().order("go")

    return again


def _signal_rank(child: Child, step: Step, number: signal.Signals) -> None:
    ranks = child.ranks
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks[step.who % len(ranks)], number)


def stop_rank(cast: Cast, step: Step) -> End:
    """A rank other than 0 is stopped in its tracks."""
    child = cast.publisher
    if not child.alive:
        return nothing
    return _stop(cast, partial(_signal_rank, child, step))


def stop_worker(cast: Cast, step: Step) -> End:
    """A worker is stopped in its tracks."""
    worker = cast.workers[cast.part(step.who).name]
    send(worker, signal.SIGSTOP)
    return lambda: send(worker, signal.SIGCONT)


def stop_publisher(cast: Cast, _step: Step) -> End:
    """The publisher is stopped in its tracks."""
    child = cast.publisher
    return _stop(cast, child.send)


def _stop(cast: Cast, send: Callable[[signal.Signals], None]) -> End:
    """Stop a process of the trainer; what ends that notes for how long it was stopped."""
    send(signal.SIGSTOP)
    begun = time.monotonic()

    def again() -> None:
        send(signal.SIGCONT)
        cast.stopped_for(time.monotonic() - begun)

    return again


def stop_relay(cast: Cast, step: Step) -> End:
    """A relay is stopped in its tracks."""
    child = cast.relays[step.who % len(cast.relays)]
    child.send(signal.SIGSTOP)
    return lambda: child.send(signal.SIGCONT)


def _wire(cast: Cast, step: Step) -> Wire:
    """Return the network that a fault is about; with relays and ranks there are several."""
    return cast.all_wires[step.who % len(cast.all_wires)]


def reset(cast: Cast, step: Step) -> End:
    """Connections are reset."""
    cast.story.tell(f"{_wire(cast, step).reset(step.channel)} connections reset")
    return nothing


def truncate(cast: Cast, step: Step) -> End:
    """Connections end in the middle of a message."""
    _wire(cast, step).truncate(step.channel)
    return nothing


def misspell(cast: Cast, step: Step) -> End:
    """A byte is another, comes twice, or not at all."""
    _wire(cast, step).misspell(step.channel)
    return nothing


def _rule(kind: str) -> "Callable[[Cast, Step], End]":
    def begin(cast: Cast, step: Step) -> End:
        wire = _wire(cast, step)
        rule = wire.rule(kind, step.channel, step.strength)
        wire.rules = [*wire.rules, rule]

        def end() -> None:
            wire.rules = [each for each in wire.rules if each is not rule]

        return end

    return begin


def unreachable(cast: Cast, step: Step) -> End:
    """Nobody gets through, and connections are cut."""
    cut_off, wire = CHANNELS[step.channel], _wire(cast, step)
    wire.reachable = {channel for channel in CHANNELS["both"] if channel not in cut_off}
    wire.reset(step.channel)

    def end() -> None:
        wire.reachable = {*CHANNELS["both"]}

    return end


def full_disk(cast: Cast, _step: Step) -> End:
    """The disk is full: of the state folder, and of workers that write files."""
    if not os.path.ismount(cast.disk):
        child = cast.publisher
        _limit(child, resource.RLIMIT_FSIZE, FILE_BYTES)
        return lambda: _limit(child, resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
    filler = cast.fill_disk()
    return lambda: filler.unlink(missing_ok=True)


def few_descriptors(cast: Cast, step: Step) -> End:
    """The publisher, a relay, or a worker, can open hardly any file or connection more."""
    served = [cast.publisher, *cast.relays]
    named = served[step.who % len(served)]
    whose = named if step.strength > 0.2 else cast.workers[cast.part(step.who).name]
    free = round(10 * step.strength) % (FREE_DESCRIPTORS + 1)
    with contextlib.suppress(OSError):  # it has ended
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = max(int(fd.name) for fd in Path(f"/proc/{whose.pid}/fd").iterdir()) + 1
        _limit(whose, resource.RLIMIT_NOFILE, used + free)
        return lambda: _limit(whose, resource.RLIMIT_NOFILE, usual)
    return nothing


def _limit(whose: Child | Driver, which: int, soft: int) -> None:
    """Set a soft limit of a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        if whose.alive:
            hard = resource.prlimit(whose.pid, which)[1]
            resource.prlimit(whose.pid, which, (soft, hard))


def clock(cast: Cast, step: Step) -> End:
    """The clock jumps, and later back."""
    seconds = CLOCKS[round(100 * step.strength) % len(CLOCKS)]
    cast.story.tell(f"clocks are off by {seconds} s")
    cast.set_clock(seconds)
    return lambda: cast.set_clock(0)


def rival(cast: Cast, _step: Step) -> End:
    """Another publisher wants the address, which is in use; then it takes the first one's place."""
    first = cast.publisher
    cast.must_play(first)
    if not first.alive:
        return nothing
    other = cast.publish(at=first.those("ready")[0]["address"])
    other.wait("in-use")
    other.order("go")
    cast.wires[0].reset("both")
    return lambda: cast.kill(first)


def revoke(cast: Cast, step: Step) -> End:
    """A worker's key is taken away, and given back."""
    assert cast.keys is not None
    file = cast.keys / "allowed" / f"{cast.part(step.who).name}.json"
    aside = cast.keys / file.name
    with contextlib.suppress(FileNotFoundError):  # it is away already
        file.rename(aside)
        return lambda: aside.rename(file)
    return nothing


FAULTS: Final = {
    "kill-worker": kill_worker,
    "kill-publisher": kill_publisher,
    "stop-worker": stop_worker,
    "stop-publisher": stop_publisher,
    "kill-rank": kill_rank,
    "stop-rank": stop_rank,
    "kill-relay": kill_relay,
    "stop-relay": stop_relay,
    "reset": reset,
    "truncate": truncate,
    "misspell": misspell,
    **{kind: _rule(kind) for kind in ("drop", "double", "delay", "hold", "damage")},
    "unreachable": unreachable,
    "full-disk": full_disk,
    "no-segments": no_segments,
    "few-descriptors": few_descriptors,
    "clock": clock,
    "rival": rival,
    "revoke": revoke,
}

"""Scenarios of the user's part of applying, and of targets that are not exactly what is published.

Each is played over the network and over shared memory, by workers that differ in nothing else; who
cannot take that transport takes the network twice.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from weightbus.bus.limits import Timing
from weightbus.codecs.native import crc32c
from weightbus.tests.conformance.decisions import heard_twice_more, of
from weightbus.tests.conformance.driver import Driver
from weightbus.tests.conformance.publishing import SMALL, expect
from weightbus.tests.conformance.rules import Passing
from weightbus.tests.conformance.stage import PING, Stage
from weightbus.tests.conformance.weights import spec, uniform
from weightbus.types import Receipt

MINE = spec(w=("F32", [40, 30]), b=("BF16", [77]))
SLOW, LOST_AFTER = 2.5, 1.5  # seconds: an apply that outlasts the patience with a silent worker
HANG, DEADLINE = 4.0, 0.5  # seconds: of an apply that outlasts its own deadline
MODEST = 0.9  # of a time that a worker is told to wait: clocks and rounding


def on_both_transports(stage: Stage, name: str, **options: Any) -> list[Driver]:
    """Start two workers that are told the same."""
    return [
        stage.worker(f"{name}-{transport}", shared=transport == "shared", **options)
        for transport in ("network", "shared")
    ]


def failures(stage: Stage, worker: str, version: int) -> list[Passing]:
    """Return what a worker has said to the publisher of a version that it does not run."""
    return stage.proxy.seen(
        "failed", lambda p: p.worker == worker and p.header["version"] == version
    )


def check_failed(
    stage: Stage, receipt: Receipt, workers: Sequence[Driver], words: str
) -> dict[str, bool]:
    """See that all have failed for the reason given, and run what they say; return `intact`."""
    names = sorted(worker.name for worker in workers)
    expect(receipt.in_state("failed") == names, f"{names} were told to fail, but: {receipt}")
    version, found = receipt.version, dict[str, bool]()
    for worker in workers:
        detail = receipt.workers[worker.name].detail
        expect("apply" in detail and words in detail, f"not told why {worker.name}: {detail!r}")
        heard_twice_more(stage, worker.name)  # what it says with its pings counts
        said = [p.header for p in failures(stage, worker.name, version)]
        codes = {(h["code"], h.get("intact", True)) for h in said}
        expect(len(codes) == 1, f"{worker.name} says now this, now that: {codes}")
        code, found[worker.name] = codes.pop()
        expect(code == "apply", f"{worker.name} failed with {code}")
        expect(len(said) >= 2, f"{worker.name} does not repeat that version {version} failed")
        check_runs(stage, worker, (receipt.epoch, version - 1) if found[worker.name] else None)
        expect(not worker.those("applied", version=version), f"{worker.name} says that it runs it")
    return found


def check_runs(stage: Stage, worker: Driver, wanted: tuple[int, int] | None) -> None:
    """See what the publisher believes that a worker runs."""
    running = stage.publisher.workers()[worker.name].running.get("m")
    expect(running == wanted, f"{worker.name} runs {wanted}, workers() says {running}")


def apply_turns_down(stage: Stage) -> None:
    """reports a version that its user turns down as failed, runs the one before, takes the next"""
    stage.open()
    stage.may_fail = {"apply"}
    snapshots = on_both_transports(stage, "snapshot", turn_down=(2,))
    in_place = on_both_transports(stage, "place", turn_down=(2,), in_place={"m": MINE})
    workers = snapshots + in_place
    stage.publish(uniform(MINE, 1))
    receipt = stage.outcome(uniform(MINE, 2))
    intact = check_failed(stage, receipt, workers, "told to turn down")
    for worker in snapshots:
        expect(intact[worker.name], "a snapshot was turned down, and the one before is gone")
    for worker in workers:
        worker.wait_event("failed", version=2, code="apply")
    stage.publish(uniform(MINE, 3))
    for worker in workers:
        worker.wait_applied("m", stage.publisher.epoch, 3)
        times = len(worker.those("failed", version=2))
        expect(times == 1 or not intact[worker.name], f"what was turned down came {times} times")


def apply_breaks(stage: Stage) -> None:
    """runs no version, and says so in hello, too, where its user's part fails on changed bytes"""
    first = stage.open()
    stage.may_fail = {"apply"}
    workers = on_both_transports(stage, "w", breaks=(2, 4), in_place={"m": MINE})
    for byte in (1, 3):
        stage.publish(uniform(MINE, byte))
        receipt = stage.outcome(uniform(MINE, byte + 1))
        intact = check_failed(stage, receipt, workers, "told to break")
        expect(not any(intact.values()), f"bytes have changed, and it says intact: {intact}")
    stage.close_publisher()
    stage.proxy.forget()
    stage.open()
    stage.wait_joined_again(*workers)
    stage.publish(uniform(MINE, 5))
    for worker in workers:
        worker.wait_applied("m", stage.publisher.epoch, 1)
        hellos = stage.proxy.seen("hello", of(worker.name))
        expect(bool(hellos), f"{worker.name} has said no hello")
        for hello in hellos:
            names, epoch = hello.header["models"], hello.header.get("epoch", 0)
            expect(names == {"m": None}, f"{worker.name} runs nothing, and says hello with {names}")
            expect(epoch == first.epoch, f"bytes of {first.epoch} are in it, hello says {epoch}")


def apply_slow(stage: Stage) -> None:
    """answers pings while its user's part takes long, and says applied only then"""
    stage.open(timing=Timing(ping=PING, lost_after=LOST_AFTER))
    lost: list[str] = []
    stage.publisher.on_worker(
        lambda event: lost.append(event.worker) if event.kind == "lost" else 0
    )
    slow: dict[str, Any] = {"apply_seconds": f"{SLOW}:2"}
    workers = on_both_transports(stage, "snapshot", **slow)
    workers += on_both_transports(stage, "place", in_place={"m": MINE}, **slow)
    stage.publish(uniform(MINE, 1))
    before = {w.name: len(stage.proxy.seen("ping", of(w.name))) for w in workers}
    receipt = stage.publish(uniform(MINE, 2))
    for worker in workers:
        at = receipt.workers[worker.name].seconds or 0.0
        expect(at >= MODEST * SLOW, f"{worker.name} said after {at:.1f} s that it runs it")
        pings = len(stage.proxy.seen("ping", of(worker.name))) - before[worker.name]
        expect(pings >= SLOW / PING / 4, f"{pings} pings of {worker.name} in {SLOW} s")
        stage.proxy.wait_seen("progress", _applying(worker.name))
    expect(not lost, f"lost while they were applying: {lost}")


def _applying(worker: str) -> Callable[[Passing], bool]:
    return lambda p: p.worker == worker and p.header.get("phase") == "applying"


def apply_hangs(stage: Stage) -> None:
    """reports a user's part that does not return as failed at its deadline, then takes the next"""
    stage.open()
    stage.may_fail = {"apply"}
    hangs: dict[str, Any] = {"apply_seconds": f"{HANG}:2", "apply_timeout": DEADLINE}
    workers = on_both_transports(stage, "snapshot", **hangs)
    workers += on_both_transports(stage, "place", in_place={"m": MINE}, **hangs)
    stage.publish(uniform(MINE, 1))
    began = time.monotonic()
    receipt = stage.outcome(uniform(MINE, 2))
    for worker in workers:
        at = receipt.workers[worker.name].seconds or 0.0
        expect(at >= MODEST * DEADLINE, f"{worker.name} failed after {at:.1f} s")
        expect(at < HANG, f"{worker.name} was not told failed before it returned, in {at:.1f} s")
    intact = check_failed(stage, receipt, workers, "did not return within")
    for worker in workers:
        kept = intact[worker.name] or worker.name.startswith("place")
        expect(kept, f"{worker.name} lost the snapshot before")
    stage.publish(uniform(MINE, 3))
    seconds = time.monotonic() - began
    expect(seconds >= MODEST * HANG, f"version 3 was applied while 2 was, after {seconds:.1f} s")


LARGE = spec(w=("F32", [40, 30]), b=("BF16", [77]), critic=("F32", [SMALL]), step=("I64", []))


def partial_target(stage: Stage) -> None:
    """takes the tensors that its target has, and refuses a version that lacks one of them"""
    stage.open()
    stage.may_fail = {"layout-mismatch"}
    workers = on_both_transports(stage, "w", partial=True, in_place={"m": MINE})
    for byte in (1, 2):
        receipt = stage.publish(uniform(LARGE, byte), verify=byte == 2)
    events = [worker.wait_applied("m", receipt.epoch, receipt.version) for worker in workers]
    digests = {event["digest"] for event in events}
    expect(digests == {receipt.digest}, f"not the digest of the whole version: {digests}")
    for fault, told in {
        "b": spec(w=("F32", [40, 30]), critic=("F32", [9])),
        "w": spec(w=("F32", [30, 40]), b=("BF16", [77])),
    }.items():
        receipt = stage.outcome(uniform(told, 3))
        names = [worker.name for worker in workers]
        expect(receipt.in_state("failed") == names, f"a layout that does not fit: {receipt}")
        for worker in workers:
            event = worker.wait_event("failed", version=receipt.version, code="layout-mismatch")
            expect(fault in event["text"], f"{fault!r} is not named: {event['text']}")
    stage.publish(uniform(MINE, 5))


CASTS = (("F32", "BF16"), ("F32", "F16"), ("BF16", "F32"), ("F16", "F64"), ("F64", "F32"))
KINDS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
VALUES = (0.0, -0.0, 1.0, -1.5, 1 + 2**-8, 1 + 3 * 2**-8, 2**-16, -(2**-24), 1e5, -3e38, 1e-40)


def cast_target(stage: Stage) -> None:
    """converts what is published to the dtypes of its target, and refuses what is no cast"""
    published = {f"{a}-{b}": _as(np.resize(np.array(VALUES), 333), a) for a, b in CASTS}
    wanted = {f"{a}-{b}": _as(published[f"{a}-{b}"], b) for a, b in CASTS}
    published["step"] = wanted["step"] = np.arange(5)
    mine = {n: spec(t=(b, [333]))["t"] for n in wanted for b in [n.partition("-")[2]] if b}
    mine |= spec(step=("I64", [5]))
    stage.open()
    stage.may_fail = {"layout-mismatch"}
    workers = on_both_transports(stage, "w", cast=True, in_place={"m": mine})
    receipt = stage.publish(published, verify=True)
    crcs = {name: crc32c(array.view(np.uint8)) for name, array in wanted.items()}
    count = int(np.isinf(wanted["F32-F16"]).sum())
    lost = f"F32-F16: {count} finite values are beyond F16 (at most 65504)"
    for worker in workers:
        detail = receipt.workers[worker.name].detail
        expect(detail == lost, f"values became infinite, and the receipt has {detail!r}")
        event = worker.wait_applied("m", stage.publisher.epoch, 1)
        expect(event["digest"] == receipt.digest, f"not that of the version: {event['digest']}")
        wrong = [name for name in crcs if event["tensors"].get(name) != crcs[name]]
        expect(not wrong, f"other bytes after the cast in {wrong}")
    receipt = stage.outcome({**published, "step": np.arange(5.0)})
    for worker in workers:
        event = worker.wait_event("failed", version=receipt.version, code="layout-mismatch")
        expect("step" in event["text"], f"'step' is not named: {event['text']}")
    stage.publish(wanted)


def _as(values: "np.ndarray[Any, Any]", dtype: str) -> "np.ndarray[Any, Any]":
    with np.errstate(over="ignore"):
        return values.astype(KINDS[dtype])

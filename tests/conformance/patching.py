"""Scenarios of patches: what has changed since the version that runs is sent in its place.

Whatever is wrong with a patch, the worker gets all of the version, and says why it had to.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weightbus.codecs.checksum import digest_of
from weightbus.codecs.delta.encoding import encode
from weightbus.codecs.native import crc32c
from weightbus.codecs.state import state_of
from weightbus.tests.conformance.decisions import of
from weightbus.tests.conformance.driver import Driver
from weightbus.tests.conformance.ledger import Weights
from weightbus.tests.conformance.publishing import expect, on_data
from weightbus.tests.conformance.rules import (
    Header,
    Passing,
    Which,
    cut,
    damage_payload,
    delay,
    double,
    hold,
    lose,
    rewrite,
)
from weightbus.tests.conformance.stage import EPOCH, Stage
from weightbus.tests.conformance.weights import DTYPES_OF_NUMPY, spec, stepped, uniform
from weightbus.tests.vectors.parts import text_of
from weightbus.types import Receipt

LITTLE, MUCH = 0.02, 0.2  # of the elements change in a step: a patch of one chunk, of a dozen
SMALL_CHUNKS = 512  # bytes, where a patch is to have several
PUSHES = 20  # patches, of which one is pushed at the latest
SMALLER = 3  # times, at least, that a patch of little is smaller than the version
ELEMENTS = 60_000
DECODE_US_LEAST = 10  # nobody hashes two times 120 kB faster: the unit is none that is larger

PLACE = spec(w=("F16", [ELEMENTS]), b=("F32", [77]))


def model(stage: Stage) -> Weights:
    """Return a model in 16 bits, as one is trained, and some numbers that stay as they are."""
    generator = np.random.default_rng(stage.chance.getrandbits(32))
    return {
        "w": generator.normal(0, 0.05, ELEMENTS).astype(np.float16),
        "b": generator.normal(0, 1, 77).astype(np.float32),
    }


def patched_chunk(passing: Passing) -> bool:
    """Return whether a message is a chunk of a patch."""
    return passing.header.get("patch") is not None


def offers(passing: Passing) -> bool:
    """Return whether an announcement offers patches."""
    return bool(passing.header.get("patches"))


def check_came(receipt: Receipt, way: str, *names: str) -> Receipt:
    """See in which way a version came to workers: `raw`, `delta-1`, or "" over shared memory."""
    for name in names or ("w",):
        mine = receipt.workers[name]
        expect(mine.encoding == way, f"{name} was to get it as {way!r}, got {mine}: {receipt}")
    return receipt


class Training:
    """A model that is trained and published, as what has changed where there is that."""

    def __init__(self, stage: Stage, weights: Weights | None = None, share: float = LITTLE) -> None:
        self.stage, self.share = stage, share
        self.weights = model(stage) if weights is None else weights

    def step(self) -> Weights:
        """Return the model after another step."""
        self.weights = stepped(self.stage.chance, self.weights, self.share)
        return self.weights

    def publish(self, way: str, *names: str, **options: Any) -> Receipt:
        """Publish the next step, and see in which way it came to workers."""
        receipt = self.stage.publish(self.step(), encoding="delta", **options)
        return check_came(receipt, way, *names)

    def submit(self, **options: Any) -> None:
        """Publish the next step, and do not wait."""
        self.stage.submit(self.step(), encoding="delta", **options)


def with_worker(stage: Stage, share: float = LITTLE, **options: Any) -> Training:
    """Open a publisher for one worker; return what is going to be trained."""
    stage.open(**options)
    stage.worker()
    return Training(stage, share=share)


def wait_runs(stage: Stage, worker: Driver, version: int) -> None:
    """Wait until the publisher knows what a worker runs, and so may make patches on it."""
    running = (stage.publisher.epoch, version)
    stage.wait_status(worker.name, lambda status: status.running.get("m") == running)


def check_told(stage: Stage, worker: str, version: int) -> None:
    """See that a worker has said why it takes all of a version for which there was a patch."""
    if stage.keys is not None:
        return
    stage.proxy.wait_seen(
        "fetch",
        lambda p: (
            p.worker == worker
            and p.header["version"] == version
            and bool(p.header.get("unpatched"))
        ),
    )


# On a sound network.


def patched(stage: Stage) -> None:
    """is sent what has changed, once it runs something; and all of it where that is asked for"""
    training = with_worker(stage)
    training.publish("raw")
    for _ in range(PUSHES):
        receipt = training.publish("delta-1")
        nbytes = receipt.workers["w"].nbytes
        expect(nbytes < receipt.nbytes / SMALLER, f"a patch of {nbytes} bytes: {receipt}")
        if stage.proxy.seen("chunk", lambda p: on_data(p) and patched_chunk(p)):
            break
    else:
        expect(False, f"of {PUSHES} patches none was pushed; {stage.proxy.story()}")
    stray = stage.proxy.seen("chunk", lambda p: p.header["version"] > 1 and not patched_chunk(p))
    expect(not stray, f"{len(stray)} chunks of all of a version were sent, too")
    check_came(stage.publish(training.step()), "raw")  # as told, and nothing is kept
    training.publish("raw")
    training.publish("delta-1")
    training.weights = {**training.weights, "more": np.zeros(9, np.int64)}
    training.publish("raw")  # another layout
    training.publish("delta-1")


def patched_decode_time(stage: Stage) -> None:
    """says with every report how long the patch took to be decoded by which a version came"""
    training = with_worker(stage)
    training.publish("raw")
    for version in (2, 3):
        begun = time.monotonic()
        training.publish("delta-1")
        most = 1e6 * (time.monotonic() - begun)
        took = decode_us(stage, version)
        expect(
            len(took) == 1 and DECODE_US_LEAST <= min(took) <= most,
            f"version {version} was there after {most:.0f} us, and decoded in {took}",
        )
    check_came(stage.publish(training.step()), "raw")
    took = decode_us(stage, 4)
    expect(took == {0}, f"what came as a whole was decoded in {took} us")


def decode_us(stage: Stage, version: int) -> set[int]:
    """Return what is said of how long a version took to be decoded, once that was repeated."""

    def of_it(passing: Passing) -> bool:
        return bool(passing.header["version"] == version)

    stage.proxy.wait_seen("applied", of_it, count=2)
    return {p.header.get("decode_us", 0) for p in stage.proxy.seen("applied", of_it)}


def patched_late_join(stage: Stage) -> None:
    """joins late where patches are sent: gets all of the newest version, then what has changed"""
    stage.open()
    stage.worker("early")
    training = Training(stage)
    training.publish("raw", "early")
    training.publish("delta-1", "early")
    late = stage.worker("late")
    late.wait_applied("m", stage.publisher.epoch, 2)
    wait_runs(stage, late, 2)
    training.publish("delta-1", "early", "late")


def patched_missed_versions(stage: Stage) -> None:
    """has missed versions: gets one patch from what it runs, or all where that is not kept"""
    stage.open()
    stage.worker("quick")
    slow, training = stage.worker("slow"), Training(stage)
    training.publish("raw", "quick", "slow")
    training.publish("delta-1", "quick", workers=["quick"])
    receipt = training.publish("delta-1", "quick", "slow")
    mine, other = (receipt.workers[name].nbytes for name in ("slow", "quick"))
    expect(mine > other, f"two steps in {mine} bytes, one in {other}")
    for _ in range(3):  # more than the publisher keeps
        training.publish("delta-1", "quick", workers=["quick"])
    training.publish("raw", "slow")
    check_told(stage, "slow", 7)
    expect(not slow.those("applied", version=2), "it applied what was for another")
    training.publish("delta-1", "quick", "slow")


def patched_models(stage: Stage) -> None:
    """is sent what has changed of several models, each by itself"""
    stage.open()
    stage.worker(models=("policy", "critic.v2"))
    one, other = Training(stage), Training(stage)
    for way in ("raw", "delta-1", "delta-1"):
        check_came(stage.publish(one.step(), "policy", encoding="delta"), way)
        check_came(stage.publish(other.step(), "critic.v2", encoding="delta"), way)


def patched_every_dtype(stage: Stage) -> None:
    """takes patches of all dtypes, of what has not changed at all, and of any bits"""
    stage.open()
    stage.worker()
    weights: Weights = {"empty": np.zeros((0, 3), np.float32), "scalar": np.array(7, np.int64)}
    for dtype in DTYPES_OF_NUMPY:
        weights |= {dtype: noise_of(stage, dtype)}
    training = Training(stage, weights)
    training.publish("raw")
    training.publish("delta-1")
    check_came(stage.publish(training.weights, encoding="delta"), "delta-1")
    for dtype in ("BF16", "F32", "U8"):  # a few dtypes at a time: else a patch is no smaller
        training.weights = {**training.weights, dtype: noise_of(stage, dtype)}
        training.publish("delta-1")


def noise_of(stage: Stage, dtype: str) -> np.ndarray[Any, Any]:
    """Return a tensor of any bits: NaN, infinities and zeros of either sign among them."""
    one = uniform(spec(t=(dtype, [30, 70])), 0)["t"]
    top = 2 if dtype == "BOOL" else 256
    generator = np.random.default_rng(stage.chance.getrandbits(32))
    one.reshape(-1).view(np.uint8)[:] = generator.integers(0, top, one.nbytes)
    return one


def patched_overtaken(stage: Stage) -> None:
    """is overtaken by patches: takes each in turn, or skips some, and ends with the newest"""
    stage.open()
    worker, training = stage.worker(), Training(stage)
    training.publish("raw")
    for _ in range(40):
        training.submit()
    stage.settle()
    worker.wait_applied("m", stage.publisher.epoch, 41)
    wait_runs(stage, worker, 41)
    training.publish("delta-1")


def patched_in_place(stage: Stage) -> None:
    """applies patches in place, and casts what they lead to"""
    stage.open()
    wide = PLACE | spec(w=("F32", [ELEMENTS]))
    workers = {
        name: stage.worker(name, in_place={"m": target}, cast=True)  # so nobody reads for `torn`
        for name, target in {"same": PLACE, "wide": wide}.items()
    }
    training = Training(stage)
    for version, way in enumerate(("raw", "delta-1", "delta-1"), 1):
        training.publish(way, *workers)
        for name, worker in workers.items():
            event = worker.wait_applied("m", stage.publisher.epoch, version)
            kind = np.float32 if name == "wide" else np.float16
            values = training.weights["w"].astype(kind)
            expect(
                event["tensors"]["w"] == crc32c(values.tobytes()),
                f"{name} holds other bytes: {event}",
            )


def patched_with_a_reader(stage: Stage) -> None:
    """shows a reader of registered memory one version at a time, where these come as patches"""
    large = {f"t{index}": {"dtype": "BF16", "shape": [2**15]} for index in range(8)}
    stage.open(chunk_bytes=2**16)
    stage.worker(in_place={"m": large})
    for byte in range(1, 16):
        receipt = stage.publish(uniform(large, byte), encoding="delta")
        check_came(receipt, "delta-1" if byte > 1 else "raw")


def patched_beside_shared_memory(stage: Stage) -> None:
    """uses shared memory where it can, on which nothing is patched, beside one that cannot"""
    stage.open()
    stage.worker("near", shared=True)
    stage.proxy.wait_answered(lambda p: p.worker == "near" and p.header.get("shared") is True)
    stage.worker("far")
    training = Training(stage)
    for way in ("raw", "delta-1", "delta-1"):
        check_came(training.publish(way, "far"), "", "near")


# Decisions and users.


def patched_together(stage: Stage) -> None:
    """stages what patches lead to, and applies it together; a late worker gets all of it"""
    stage.open()
    workers = [stage.worker("a"), stage.worker("b")]
    training = Training(stage)
    training.publish("raw", "a", "b")
    training.publish("delta-1", "a", "b", commit="together")
    training.publish("delta-1", "a", "b", wait="staged")
    for worker in workers:
        worker.wait_applied("m", stage.publisher.epoch, 3)
        wait_runs(stage, worker, 3)
    if stage.keys is None:
        patches = stage.proxy.seen("staged", patched_chunk)
        expect({p.worker for p in patches} == {"a", "b"}, "who staged a patch does not say so")
    training.publish("delta-1", "a", "b", commit="together")
    stage.worker("late").wait_applied("m", stage.publisher.epoch, 4)


def patched_together_aborted(stage: Stage) -> None:
    """applies nothing of a patch to what is aborted, and takes one past it from what it runs"""
    stage.open()
    workers, training = [stage.worker("a"), stage.worker("b")], Training(stage)
    training.publish("raw", "a", "b")
    stage.proxy.rules = [lose(stage.which("staged", worker="b"))]
    stage.aborts = True
    training.submit(commit="together", timeout=2.0)
    stage.proxy.wait_seen("staged", of("a"))
    stage.settle()
    stage.aborts = False
    stage.proxy.rules = []
    training.publish("delta-1", "a", "b", commit="together")
    for worker in workers:
        expect(not worker.those("applied", version=2), "what was aborted was applied")


def patched_apply_fails(stage: Stage) -> None:
    """takes one patch past what its user turned down, and all of it where no version runs"""
    stage.open()
    stage.may_fail = {"apply"}
    stage.worker("declines", turn_down=(3,))
    stage.worker("breaks", in_place={"m": PLACE}, cast=True, breaks=(3,))
    training = Training(stage)
    training.publish("raw", "declines", "breaks")
    training.publish("delta-1", "declines", "breaks")
    receipt = stage.outcome(training.step(), encoding="delta")
    failed = receipt.in_state("failed")
    expect(failed == ["breaks", "declines"], f"both were told to fail, but: {receipt}")
    receipt = training.publish("delta-1", "declines")
    check_came(receipt, "raw", "breaks")
    training.publish("delta-1", "declines", "breaks")


# Restarts.


def patched_renamed(stage: Stage) -> None:
    """keeps what patches build on by its name in a new epoch"""
    folder = stage.folder / "state"
    stage.open(state=folder, chunk_bytes=SMALL_CHUNKS)
    worker, training = stage.worker(), Training(stage, share=MUCH)
    training.publish("raw")
    training.publish("delta-1")
    stage.close_publisher()
    again = stage.open(state=folder, chunk_bytes=SMALL_CHUNKS)
    worker.wait_event("joined", epoch=again.epoch)
    wait_runs(stage, worker, 1)  # by the name that the publisher gives it
    stage.wait_subscribed("w")
    training.publish("raw")  # it keeps no bytes of what it had published before
    training.publish("delta-1")


def patched_publisher_restart(stage: Stage) -> None:
    """drops a patch of an epoch that is over, and takes those of the next"""
    stage.open(chunk_bytes=SMALL_CHUNKS)
    worker, training = stage.worker(), Training(stage, share=MUCH)
    training.publish("raw")
    training.publish("delta-1")
    stage.proxy.rules = [hold(stage.which("chunk"), 0.05)]
    stage.proxy.forget()
    training.submit(require=0, timeout=0.5)
    stage.proxy.wait_seen("chunk", patched_chunk)
    stage.close_publisher()
    stage.proxy.rules = []
    stage.open()
    stage.wait_joined_again(worker)
    stage.wait_subscribed("w")
    training.publish("raw")
    training.publish("delta-1")


def patched_worker_restart(stage: Stage) -> None:
    """is killed while a patch arrives, started again, and given all of the version"""
    stage.open(chunk_bytes=SMALL_CHUNKS)
    first, training = stage.worker(), Training(stage, share=MUCH)
    training.publish("raw")
    training.publish("delta-1")
    first.wait_applied("m", stage.publisher.epoch, 2)  # said later than it is reported
    stage.proxy.rules = [hold(stage.which("chunk"), 0.05)]
    stage.proxy.forget()
    training.submit(require=0)
    stage.proxy.wait_seen("chunk", patched_chunk, count=2)
    first.kill()
    stage.proxy.rules = []
    again = stage.worker(join=False)
    again.wait_applied("m", stage.publisher.epoch, 3)
    wait_runs(stage, again, 3)
    stage.wait_subscribed("w")
    training.publish("delta-1")


# Patches that are of no use.


def patched_another_base(stage: Stage) -> None:
    """takes all of a version whose patches are not for what it runs, or not for it, and says why"""
    training = with_worker(stage)
    training.publish("raw")
    training.publish("delta-1")
    for field, lie in {
        "digest": "0" * 64,
        "version": 1_000,
        "epoch": EPOCH - 1,
        "encoding": "delta-9",
        "nbytes": 2**40,
    }.items():

        def other(header: Header, field: str = field, lie: object = lie) -> Header:
            return header | {"patches": [each | {field: lie} for each in header["patches"]]}

        announced = stage.which("announce", when=offers)
        stage.proxy.rules = [rewrite(announced, headers(other))]
        receipt = training.publish("raw")
        expect(announced.count > 0, "no patch was announced")
        check_told(stage, "w", receipt.version)
        stage.proxy.rules = []
        training.publish("delta-1")


def patched_wrongly(stage: Stage) -> None:
    """takes all of a version whose patch is malformed or leads elsewhere, and says why"""
    training = with_worker(stage)
    training.publish("raw")
    for name in forged(training.weights, training.weights, training.weights, stage.chunk_bytes):
        training.publish("delta-1")
        base, target = training.weights, training.step()
        other = stepped(stage.chance, base, LITTLE)
        fake = forged(base, target, other, stage.chunk_bytes)[name]
        announced, chunks = substituted(stage, fake)
        receipt = stage.publish(target, encoding="delta")
        check_came(receipt, "raw")
        expect(announced.count > 0 < chunks.count, f"{name}: nothing was put instead of the patch")
        check_told(stage, "w", receipt.version)
        stage.proxy.rules = []


def forged(base: Weights, target: Weights, other: Weights, chunk: int) -> Mapping[str, bytes]:
    """Return patches instead of the one from a base to a target, by what is wrong with each."""
    layout = state_of(base).layout()
    old, new, wrong = (
        np.frombuffer(b"".join(each[s.name].tobytes() for s in layout.tensors), np.uint8)
        for each in (base, target, other)
    )
    before, after = (digest_of(layout.id, data, chunk) for data in (old, new))
    right = encode(layout, old, new, digests=(before, after), chunk_bytes=chunk)
    return {
        "of another base": encode(layout, wrong, new, chunk_bytes=chunk),
        "to another target": encode(layout, old, wrong, chunk_bytes=chunk),
        "to other bytes": encode(layout, old, wrong, digests=(before, after), chunk_bytes=chunk),
        "with a byte too many": right + b"\0",
        "with a byte too few": right[:-1],
        "with flags": right[:8] + b"\1" + right[9:],
        "without blocks": right[:120],
        "of noise": np.random.default_rng(len(right)).bytes(len(right)),
    }


def substituted(stage: Stage, fake: bytes) -> tuple[Which, Which]:
    """Put another patch of one chunk instead of each; return how often that is done."""

    def announce(header: Header) -> Header:
        return header | {"patches": [p | {"nbytes": len(fake)} for p in header["patches"]]}

    def chunk(passing: Passing) -> tuple[bytes, ...]:
        header = text_of(passing.header | {"crc": crc32c(fake)})
        return (*passing.with_header(header)[:-1], fake)

    announced = stage.which("announce", when=offers)
    chunks = stage.which("chunk", when=patched_chunk)
    stage.proxy.rules = [rewrite(announced, headers(announce)), rewrite(chunks, chunk)]
    return announced, chunks


def headers(change: Callable[[Header], Header]) -> Callable[[Passing], tuple[bytes, ...]]:
    """Return what gives messages another header."""
    return lambda passing: passing.with_header(text_of(change(passing.header)))


def patched_refused(stage: Stage) -> None:
    """takes all of a version where the publisher has no such patch any more, and says why"""
    training = with_worker(stage)
    training.publish("raw")
    training.publish("delta-1")

    def gone(header: Header) -> Header:
        return header | {"patch": header["patch"] | {"version": 1_000}}

    asked = stage.which("fetch", when=patched_chunk)
    pushed = stage.which("chunk", "end", channel="data", when=patched_chunk)
    stage.proxy.rules = [lose(pushed), rewrite(asked, headers(gone))]
    receipt = training.publish("raw")
    expect(asked.count > 0, "no chunk of a patch was asked for")
    check_told(stage, "w", receipt.version)
    stage.proxy.rules = []
    training.publish("delta-1")


# On a network that loses, damages, doubles, delays and cuts.


def patched_lossy(stage: Stage) -> None:
    """fetches chunks of patches that are lost, and those whose bytes or length are wrong"""
    training = with_worker(stage, MUCH, chunk_bytes=SMALL_CHUNKS)
    training.publish("raw")
    lost = stage.which("chunk", share=0.1, when=patched_chunk)
    damaged = stage.which("chunk", share=0.1, when=patched_chunk)
    stage.proxy.rules = [lose(lost), damage_payload(damaged)]
    for _ in range(6):
        training.publish("delta-1")
    expect(lost.count > 0 < damaged.count, "nothing was lost, or nothing damaged")


def patched_without_ends(stage: Stage) -> None:
    """asks for the ends of patches, and for their announcements, of which it is pushed none"""
    training = with_worker(stage, MUCH, chunk_bytes=SMALL_CHUNKS)
    stage.proxy.rules = [lose(stage.which("end", "announce", "sealed_message", channel="data"))]
    for way in ("raw", "delta-1", "delta-1"):
        training.publish(way)


def patched_doubled_and_late(stage: Stage) -> None:
    """takes patches whose messages come twice, late and in another order"""
    training = with_worker(stage, MUCH, chunk_bytes=SMALL_CHUNKS)
    doubled = stage.which(share=0.3)
    stage.proxy.rules = [
        delay(stage.which(share=0.3, channel="data"), 0.05),
        double(doubled, 0.05),
        hold(stage.which(share=0.1, channel="control"), 0.01),
    ]
    training.publish("raw")
    for _ in range(6):
        training.publish("delta-1")
    expect(doubled.count > 0, "nothing came twice")


def patched_cut(stage: Stage) -> None:
    """goes on with a patch where it was when connections are cut"""
    training = with_worker(stage, MUCH, chunk_bytes=SMALL_CHUNKS)
    training.publish("raw")
    training.publish("delta-1")
    by_push, by_fetch = ("data", None), ("control", ["w"])
    for channel, workers in (by_push, by_fetch, by_push, by_fetch):
        stage.proxy.forget()
        stage.wait_subscribed("w")
        stage.proxy.wait_seen("beacon", on_data)  # nothing arrives at a connection that was cut
        once = stage.which("chunk", channel=channel, skip=4, most=1, when=patched_chunk)
        stage.proxy.rules = [cut(once)]
        training.publish("delta-1", workers=workers)
        expect(once.count == 1, f"the {channel} connection was not cut; {stage.proxy.story()}")

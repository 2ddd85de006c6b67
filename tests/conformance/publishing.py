"""Scenarios on a sound network: joining, pushes, shapes and sizes, models, both transports."""

from contextlib import closing

import numpy as np

from weightbus.bus.protocol_limits import PROGRESS_CHUNKS
from weightbus.codecs.protocol_limits import METADATA_BYTES_MAX, METADATA_MAX, METADATA_NAME_MAX
from weightbus.tests.conformance.driver import Fault
from weightbus.tests.conformance.proxy import Proxy
from weightbus.tests.conformance.rules import Passing, hold
from weightbus.tests.conformance.stage import Stage
from weightbus.tests.conformance.weights import every_dtype, noise, spec, uniform

SMALL = 40_000  # bytes: ten chunks


def expect(sound: bool, text: str) -> None:
    """Raise a fault unless something is as it must be."""
    if not sound:
        raise Fault(text)


def on_data(passing: Passing) -> bool:
    """Return whether a message travels on the data channel."""
    return passing.channel == "data"


def join_and_push(stage: Stage) -> None:
    """joins, is pushed versions, acknowledges each with its digest"""
    stage.open()
    stage.worker()
    for _ in range(3):
        stage.publish(noise(stage.chance, (PROGRESS_CHUNKS + 1) * stage.chunk_bytes))
    expect(bool(stage.proxy.seen("chunk", on_data)), "no chunk was pushed")
    expect(stage.keys is not None or bool(stage.proxy.seen("progress")), "no progress was reported")


def metadata(stage: Stage) -> None:
    """is told what is said of a version, whole or in chunks, pushed, fetched or patched"""
    stage.open()
    worker = stage.worker()
    said = {"step": "12000", "reward": "-3.5e-1", "\u00fcber": 'ein "Satz"\n\\ \U0001f69a\u202e'}
    largest = {f"{number:0100d}": "" for number in range(METADATA_MAX - 1)}
    largest["x" * METADATA_NAME_MAX] = "\x01" * (
        METADATA_BYTES_MAX - METADATA_NAME_MAX - 100 * len(largest)
    )
    for size in (600, SMALL):
        for words in (said, {}, largest):
            stage.publish(noise(stage.chance, size), metadata=words)
    weights = noise(stage.chance, SMALL)
    for step in range(3):
        next(iter(weights.values())).reshape(-1)[step] += 1
        stage.publish(weights, metadata={"step": str(step)}, encoding="delta")
    stage.publish(weights, metadata={"step": "of the same bytes"})
    late = stage.worker("late")
    newest = worker.running("m")
    assert newest is not None
    late.wait_applied("m", *newest)
    stage.publish(weights)


def metadata_renamed(stage: Stage) -> None:
    """says of what runs by another name what is said of it by that name"""
    folder, small = stage.folder / "state", spec(w=("F32", [4, 3]), b=("F32", [3]))
    stage.open(state=folder)
    workers = [stage.worker(), stage.worker("in-place", in_place={"m": small})]
    words = {"step": "12000", "\u00fcber": "all"}
    stage.publish(uniform(small, 1), metadata=words)
    # The same bytes for some: the next publisher has them as they were published for all.
    names = [worker.name for worker in workers]
    stage.publish(uniform(small, 1), metadata={"step": "12001"}, workers=names)
    stage.close_publisher()
    again = stage.open(state=folder)
    for worker in workers:
        runs = worker.wait_event("runs", model="m", epoch=again.epoch, version=1)
        said = runs.get("metadata", {})
        expect(said == words, f"{worker.name} runs version 1 with metadata {said}, not {words}")


def late_join(stage: Stage) -> None:
    """joins late, and gets the newest version alone"""
    stage.open()
    for _ in range(2):
        stage.publish(noise(stage.chance, SMALL))
    worker = stage.worker()
    worker.wait_applied("m", stage.publisher.epoch, 2)
    expect(not worker.those("applied", version=1), "an outdated version was applied")
    stage.publish(noise(stage.chance, SMALL))


def before_the_publisher(stage: Stage) -> None:
    """starts before the publisher, and is in as soon as that is there"""
    worker = stage.worker(join=False)
    with closing(Proxy()) as nobody:
        other = stage.worker("other", address=nobody.address, join=False)
        nobody.wait_connections(3)
        other.stop()  # outside a session, too
    stage.open()
    worker.wait_event("joined", epoch=stage.publisher.epoch)
    stage.publish(noise(stage.chance, SMALL))


def over_ipc(stage: Stage) -> None:
    """joins and receives over ipc"""
    path = f"ipc://{stage.folder}/bus"
    stage.open(address=path, advertise=None)
    stage.worker(address=path)
    for _ in range(3):
        stage.publish(noise(stage.chance, SMALL))


def slow_worker(stage: Stage) -> None:
    """is slower than the trainer: skips versions, completes some, ends with the newest"""
    stage.open()
    worker = stage.worker()
    stage.publish(noise(stage.chance, 2 * SMALL))
    stage.proxy.rules = [hold(stage.which("chunk", up=False), 0.015)]
    newest = 15
    for version in range(2, newest + 1):
        passed = len(stage.proxy.seen("chunk"))
        stage.submit(noise(stage.chance, 2 * SMALL))

        def nothing_moves(before: int = passed, version: int = version) -> str:
            some = len(stage.proxy.seen("chunk")) >= before + 8
            there = worker.running("m") == (stage.publisher.epoch, version)
            return "" if some or there else f"nothing moves at version {version}"

        if version < newest:
            stage.settled(nothing_moves)
    worker.wait_applied("m", stage.publisher.epoch, newest)
    between = [e["version"] for e in worker.those("applied") if 1 < e["version"] < newest]
    expect(bool(between), "no version was completed while newer ones kept coming")


def many_small_versions(stage: Stage) -> None:
    """takes hundreds of small versions, each in turn or skipped"""
    stage.open()
    stage.worker()
    for _ in range(100):
        stage.publish(noise(stage.chance, 600))
    for _ in range(200):
        stage.submit(noise(stage.chance, 600))
    stage.settle()
    if stage.keys is None:
        whole = stage.proxy.seen("announce", lambda p: p.header.get("whole") is not None)
        expect(bool(whole), "no version came whole in its announcement")


def large_version(stage: Stage) -> None:
    """takes 64 MiB"""
    stage.open(chunk_bytes=2**20)
    stage.worker()
    for _ in range(2):
        stage.publish(noise(stage.chance, 2**26, tensors=16))


def every_shape_and_dtype(stage: Stage) -> None:
    """takes all dtypes, scalars, tensors and versions of no bytes, odd names, tied tensors"""
    stage.open()
    stage.worker()
    weights = every_dtype(stage.chance)
    stage.publish(weights)
    stage.publish({"none": np.zeros((4, 0, 2), np.float32)})
    stage.publish({"alone": np.array(1.5, np.float64)})
    stage.publish({"tied": weights["block.F32"], "head": weights["block.F32"]})
    stage.publish({})
    stage.publish(weights)


def layout_changes(stage: Stage) -> None:
    """takes snapshots of one layout after another"""
    stage.open()
    stage.worker()
    one, other = noise(stage.chance, SMALL), noise(stage.chance, 2 * SMALL, tensors=5)
    for weights in (one, other, {**one, "more": np.arange(9)}, one, other):
        stage.publish(weights)


IN_PLACE = spec(
    w=("F32", [40, 30]),
    half=("BF16", [77]),
    tiny=("F8_E4M3", [3, 5]),
    other=("F8_E5M2", [11]),
    step=("I64", []),
    none=("F32", [0, 2]),
    mask=("U8", [1000]),
)


def in_place(stage: Stage) -> None:
    """applies in place into registered memory"""
    stage.open()
    stage.worker(in_place={"m": IN_PLACE})
    for byte in range(1, 6):
        stage.publish(uniform(IN_PLACE, byte))


def in_place_with_a_reader(stage: Stage) -> None:
    """shows a reader of registered memory one version at a time"""
    large = {f"t{index}": {"dtype": "F32", "shape": [2**15]} for index in range(8)}
    stage.open(chunk_bytes=2**16)
    stage.worker(in_place={"m": large})
    for byte in range(1, 31):
        stage.publish(uniform(large, byte))


def layout_mismatch(stage: Stage) -> None:
    """declines other names, shapes and dtypes, and keeps what runs"""
    mine = spec(w=("F32", [4, 3]), b=("F32", [3]))
    stage.open()
    stage.may_fail = {"layout-mismatch"}
    worker = stage.worker(in_place={"m": mine})
    stage.publish(uniform(mine, 1))
    for fault, told in {
        "w": spec(w=("F32", [3, 4]), b=("F32", [3])),  # the shape
        "b": spec(w=("F32", [4, 3]), b=("I32", [3])),  # the dtype
        "more": spec(w=("F32", [4, 3]), b=("F32", [3]), more=("F32", [1])),
        "w ": spec(b=("F32", [3])),
    }.items():
        receipt = stage.outcome(uniform(told, 2))
        expect(receipt.in_state("failed") == ["w"], f"a layout that does not fit: {receipt}")
        event = worker.wait_event("failed", version=receipt.version, code="layout-mismatch")
        expect(fault.strip() in event["text"], f"{fault.strip()!r} is not named: {event['text']}")
    stage.publish(uniform(mine, 3))


def too_large(stage: Stage) -> None:
    """declines more bytes than it takes"""
    stage.open()
    stage.may_fail = {"too-large"}
    worker = stage.worker(bytes_max=50_000)
    receipt = stage.outcome(noise(stage.chance, 60_000))
    expect(receipt.in_state("failed") == ["w"], f"too large, but: {receipt}")
    worker.wait_event("failed", version=1, code="too-large")
    stage.publish(noise(stage.chance, SMALL))


def several_models(stage: Stage) -> None:
    """takes several models, each worker those that it wants"""
    stage.open()
    both = stage.worker("both", models=("policy", "critic.v2"))
    one = stage.worker("one", models=("critic.v2",))
    for _ in range(3):
        stage.publish(noise(stage.chance, SMALL), "policy")
        receipt = stage.publish(noise(stage.chance, SMALL // 2), "critic.v2")
        expect(len(receipt.workers) == 2, f"for two workers, but: {receipt}")
    stage.submit(noise(stage.chance, SMALL), "policy")
    stage.submit(noise(stage.chance, SMALL), "critic.v2")
    stage.settle()
    both.wait_applied("policy", stage.publisher.epoch, 4)
    expect(not one.those("applied", model="policy"), "a model came that nobody asked for")
    expect(len(both.those("applied", model="policy")) == 4, "a version of policy was skipped")


def shared_memory(stage: Stage) -> None:
    """uses shared memory, hashes where it is asked to, stages what has to be staged"""
    stage.open()
    worker = stage.worker(shared=True)
    stage.proxy.wait_answered(lambda p: p.header.get("shared") is True)
    weights = noise(stage.chance, 10 * SMALL)
    stage.publish(weights)
    event = worker.wait_applied("m", stage.publisher.epoch, 1)
    expect(event["digest"] == "", f"a digest that nobody asked for: {event['digest']}")
    stage.publish(noise(stage.chance, 10 * SMALL), verify=True)
    event = worker.wait_applied("m", stage.publisher.epoch, 2)
    expect(event["digest"] != "", "no digest, but it was asked for")
    stage.publish(weights, wait="staged")
    stage.publish(noise(stage.chance, 10 * SMALL), commit="together")
    stage.publish({})
    stage.publish(every_dtype(stage.chance))
    chunks = len(stage.proxy.seen("chunk"))
    expect(chunks == 0, f"{chunks} chunks were sent to a worker that reads shared memory")


def shared_memory_overtaken(stage: Stage) -> None:
    """is overtaken over shared memory by newer versions, and never applies a mixture"""
    stage.open()
    large = {f"t{index}": {"dtype": "F32", "shape": [2**17]} for index in range(8)}
    worker = stage.worker(shared=True, in_place={"m": large})
    for byte in range(1, 61):
        stage.submit(uniform(large, byte))
    stage.settle()
    worker.wait_applied("m", stage.publisher.epoch, 60)

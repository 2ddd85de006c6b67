"""Scenarios of keys: who is let in, under which name, and what is no message of the publisher's.

A refusal of the handshake carries no words, and a worker goes on dialling: that it has dialled
several times, and is not in, is what shows it.
"""

import json
import shutil
from pathlib import Path

from weightbus.bus.trust.grants import Role
from weightbus.bus.trust.keys import ALLOWED, file_name, generate
from weightbus.tests.conformance.driver import Driver
from weightbus.tests.conformance.hostile import LATER, announcement
from weightbus.tests.conformance.publishing import SMALL, expect, on_data
from weightbus.tests.conformance.rules import Fate, Frames, Passing, damage_header
from weightbus.tests.conformance.stage import ANYBODY, Stage
from weightbus.tests.conformance.weights import noise
from weightbus.tests.vectors.parts import crc32c, padded, text_of

TRIES = 3  # connections of somebody who is not let in
KEYS_SEEN, PUBLISHES_MAX = 4, 400


def with_key(stage: Stage, name: str, role: Role = "worker") -> Path:
    """Have a key allowed, and return the file of those who have it."""
    return stage.make_key(name, role)


def allowed(stage: Stage, name: str) -> Path:
    """Return the file that says that a key is allowed."""
    assert stage.keys is not None
    return stage.keys / ALLOWED / file_name(name)


def check_outside(stage: Stage, worker: Driver) -> None:
    """See that a worker keeps on dialling, and is not let in."""
    stage.proxy.wait_connections(stage.proxy.connections + TRIES)
    expect(not worker.those("joined"), f"{worker.name} was let in")


def let_in_later(stage: Stage) -> None:
    """is not let in by a key that is not allowed, and joins once it is"""
    kept = stage.folder / "kept.json"
    shutil.move(allowed(stage, ANYBODY), kept)
    stage.open()
    worker = stage.worker(join=False)
    check_outside(stage, worker)
    shutil.move(kept, allowed(stage, ANYBODY))
    worker.wait_event("joined")
    stage.wait_subscribed(worker.name)
    stage.publish(noise(stage.chance, SMALL))


def wrong_name(stage: Stage) -> None:
    """is refused a name that its key is not for, and let in under one that it is for"""
    keys = with_key(stage, "gpu-*")
    stage.open()
    wrong = stage.worker("cpu-1", keys=keys, join=False)
    wrong.wait_event("refused", code="wrong-name")
    stage.worker("gpu-1", keys=keys)
    stage.publish(noise(stage.chance, SMALL))
    expect(not wrong.those("joined"), "it joined under a name that is not its key's")


def no_key_of_a_worker(stage: Stage) -> None:
    """is refused with the key of an observer"""
    keys = with_key(stage, "eye", "observer")
    stage.open()
    eye = stage.worker("eye", keys=keys, join=False)
    eye.wait_event("refused", code="not-allowed")
    stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    expect(not eye.those("joined"), "an observer joined")


def another_publisher(stage: Stage) -> None:
    """does not speak to a publisher whose key is not the one that it was given"""
    generate(stage.folder / "others", {ANYBODY: "worker"})
    pinned = json.loads(stage.key(ANYBODY).read_text())
    pinned["publisher"] = json.loads((stage.folder / "others/publisher.json").read_text())["public"]
    keys = stage.folder / "pinned.json"
    keys.touch(mode=0o600)
    keys.write_text(json.dumps(pinned))
    stage.open()
    stage.worker()
    check_outside(stage, stage.worker("pinned", keys=keys, join=False))
    stage.publish(noise(stage.chance, SMALL))


def no_mixture(stage: Stage) -> None:
    """does not join a publisher without keys if it has some, nor one with keys if it has none"""
    stage.open()
    plain = stage.worker("plain", keys=None, join=False)
    check_outside(stage, plain)
    stage.close_publisher()
    bare = stage.open(keys=None)
    plain.wait_event("joined", epoch=bare.epoch)
    keyed = stage.worker("keyed", join=False)
    check_outside(stage, keyed)
    stage.wait_subscribed("plain")
    stage.publish(noise(stage.chance, SMALL))
    stage.close_publisher()
    again = stage.open()
    keyed.wait_event("joined", epoch=again.epoch)
    stage.wait_subscribed("keyed")
    stage.publish(noise(stage.chance, SMALL))
    expect(not plain.those("joined", epoch=again.epoch), "a worker without keys was let in")


def revoked(stage: Stage) -> None:
    """is told that its key is revoked, runs on, gets nothing more, and comes back if it may"""
    keys = with_key(stage, "w")
    stage.open()
    worker, other = stage.worker(keys=keys), stage.worker("other")
    stage.publish(noise(stage.chance, SMALL))
    kept = stage.folder / "kept.json"
    shutil.move(allowed(stage, "w"), kept)
    worker.wait_event("refused", code="revoked")
    stage.wait_forgotten("w")  # a publisher above a relay learns of it later
    stage.publish(noise(stage.chance, SMALL))
    other.wait_applied("m", stage.publisher.epoch, 2)
    expect(not worker.those("applied", version=2), "what was published after it is applied")
    shutil.move(kept, allowed(stage, "w"))
    worker.wait_applied("m", stage.publisher.epoch, 2)
    stage.publish(noise(stage.chance, SMALL))
    worker.wait_applied("m", stage.publisher.epoch, 3)


def other_group_keys(stage: Stage) -> None:
    """follows from one group key to the next, and applies every version"""
    stage.open(rekey=0.2)
    worker, keys = stage.worker(), set[str]()
    for version in range(1, PUBLISHES_MAX):
        stage.publish(noise(stage.chance, SMALL))
        worker.wait_applied("m", stage.publisher.epoch, version)
        keys = {p.header["key"] for p in stage.proxy.seen("chunk", on_data)}
        if len(keys) >= KEYS_SEEN:
            return
    expect(False, f"{len(keys)} group keys in {PUBLISHES_MAX} versions")


def forged_and_repeated(stage: Stage) -> None:
    """gives what is not sealed, sealed for another place, damaged or repeated no effect"""
    said: list[Frames] = []

    def listen(passing: Passing) -> Fate | None:
        if passing.channel == "data" and not passing.up and passing.header:
            said.append(passing.frames)
        return None

    stage.open()
    stage.worker()
    stage.proxy.rules = [listen]
    for _ in range(3):
        stage.publish(noise(stage.chance, SMALL))
    stage.proxy.rules = []
    before = list(said)
    layout = padded({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    number = {"wbp": 1, "model": "m", "epoch": stage.publisher.epoch, "version": LATER}
    for frames in (
        [text_of(announcement(stage, LATER, layout)), layout],
        [text_of({**number, "type": "chunk", "index": 0, "crc": crc32c(b"x")}), b"x"],
        [text_of({**number, "type": "end", "digest": "0" * 64})],
        [text_of({**number, "type": "beacon"})],
    ):
        stage.proxy.inject("data", [b"m/ctl", *frames])
    for topic, header, *payload in before:
        stage.proxy.inject("data", [topic, header, *payload])
        for field, value in {"index": 1, "version": 4, "count": 10**6}.items():
            there = json.loads(header)
            if field in there:
                stage.proxy.inject("data", [topic, text_of({**there, field: value}), *payload])
    broken = stage.which("sealed_message", share=0.3)
    stage.proxy.rules = [damage_header(broken)]
    for _ in range(6):
        stage.publish(noise(stage.chance, SMALL))
    expect(broken.count > 0, "nothing was damaged")

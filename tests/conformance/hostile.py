"""Scenarios of a publisher that says what it must not: malformed, hostile, and of other epochs."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from weightbus.tests.conformance.decisions import heard_twice_more
from weightbus.tests.conformance.publishing import SMALL
from weightbus.tests.conformance.python_vectors import blob
from weightbus.tests.conformance.stage import Stage
from weightbus.tests.conformance.vectors import FOLDER
from weightbus.tests.conformance.weights import noise
from weightbus.tests.vectors.parts import crc32c, digest, padded, text_of

VECTORS_EPOCH = 3  # of the messages in the vectors
VECTORS_MODEL = "policy"
AT_ONCE = 60  # malformed messages between two publishes
LATER = 1_000  # a version far above those that are published


def malformed() -> Iterator[list[bytes]]:
    """Yield every malformed message of a publisher in the vectors."""
    for case in json.loads((FOLDER / "messages.json").read_text())["cases"]:
        if case["direction"] == "from_publisher" and "ok" not in case["expect"]:
            yield [blob(frame, FOLDER) for frame in case["frames"]]


def malformed_messages(stage: Stage) -> None:
    """drops every malformed message of the vectors, on both channels, and goes on"""
    stage.open(epoch=VECTORS_EPOCH)
    stage.worker(models=(VECTORS_MODEL,))
    for number, frames in enumerate(malformed()):
        if frames:
            stage.proxy.inject("control", frames)
        stage.proxy.inject("data", [f"{VECTORS_MODEL}/ctl".encode(), *frames])
        if number % AT_ONCE == 0:
            stage.publish(noise(stage.chance, SMALL), VECTORS_MODEL)
    stage.publish(noise(stage.chance, SMALL), VECTORS_MODEL)


def announcement(stage: Stage, version: int, header: bytes, **fields: Any) -> dict[str, Any]:
    """Return the announcement of a layout."""
    return {
        "wbp": 1,
        "type": "announce",
        "model": "m",
        "epoch": stage.publisher.epoch,
        "version": version,
        "layout": hashlib.sha256(header).hexdigest(),
        "layout_bytes": max(10, len(header)),
        "nbytes": 1,
        "chunk_bytes": 4096,
        "commit": "auto",
        "acknowledge": "applied",
        "encoding": "raw",
        **fields,
    }


def hostile_layouts(stage: Stage) -> None:
    """declines every malformed layout of the vectors, and whatever is not what was announced"""
    stage.open()
    stage.may_fail = {"layout-invalid"}
    worker = stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    sound = padded({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    announced: list[tuple[bytes, dict[str, Any]]] = [
        (blob(case["header"], FOLDER), {})
        for case in json.loads((FOLDER / "layouts.json").read_text())["cases"]
        if "error" in case["expect"]
    ]
    announced += [(sound, {"layout": "0" * 64}), (sound, {"layout_bytes": len(sound) + 1})]
    announced += [(sound, {"nbytes": 2})]
    for version, (header, fields) in enumerate(announced, LATER):
        lies = announcement(stage, version, header, **fields)
        stage.proxy.inject("control", [text_of(lies), header])
        worker.wait_event("failed", version=version, code="layout-invalid")
    stage.publish(noise(stage.chance, SMALL))


def other_epochs(stage: Stage) -> None:
    """gives messages of other epochs no effect"""
    stage.open()
    stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    header = padded({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    crc = crc32c(b"x")
    for epoch in (0, stage.publisher.epoch - 1, stage.publisher.epoch + 1, 2**53 - 1):
        number = {"wbp": 1, "model": "m", "epoch": epoch, "version": LATER}
        whole = digest(hashlib.sha256(header).hexdigest(), 4096, [crc])
        for frames in (
            [text_of({**number, "type": "beacon"})],
            [text_of(announcement(stage, LATER, header, epoch=epoch)), header],
            [text_of({**number, "type": "chunk", "index": 0, "crc": crc}), b"x"],
            [text_of({**number, "type": "end", "digest": whole})],
            [text_of({**number, "type": "commit", "digest": whole})],
            [text_of({**number, "type": "abort"})],
            [text_of({"wbp": 1, "type": "pong", "epoch": epoch, "models": {"m": LATER}})],
        ):
            stage.proxy.inject("control", frames)
            stage.proxy.inject("data", [b"m/ctl", *frames])
    heard_twice_more(stage, "w")
    stage.publish(noise(stage.chance, SMALL))

"""Scenarios on a network that loses, damages, doubles, delays and cuts."""

from typing import Any

from weightbus.bus.limits import Timing
from weightbus.tests.conformance.publishing import SMALL, expect, on_data
from weightbus.tests.conformance.rules import (
    Passing,
    add_frame,
    change,
    cut,
    damage_header,
    damage_payload,
    delay,
    double,
    hold,
    join,
    lose,
    trickle,
)
from weightbus.tests.conformance.stage import Stage
from weightbus.tests.conformance.weights import noise

LARGER = 3 * SMALL  # bytes: thirty chunks, two windows
SINGLE = 600  # bytes: one chunk
TRANSIENT = {"digest-mismatch", "layout-invalid", "unsupported"}
SLOW = (2**14, 0.03)  # bytes, and seconds between: half a second for what workers sleep until
TRIES = 3  # where a busy host holds up the pieces themselves


def whole(passing: Passing) -> bool:
    """Return whether a message is an announcement with all bytes of its version."""
    return passing.header.get("whole") is not None


def publish_some(stage: Stage) -> None:
    """Publish larger and small versions by turns."""
    for nbytes in (LARGER, SINGLE, LARGER, SINGLE, SINGLE, SINGLE):
        stage.publish(noise(stage.chance, nbytes))


def lost_chunks(stage: Stage) -> None:
    """fetches chunks that are lost, pushed and fetched ones"""
    stage.open()
    stage.worker()
    lost = stage.which("chunk", share=0.15)
    lost_whole = stage.which("announce", share=0.3, when=whole)
    stage.proxy.rules = [lose(lost), lose(lost_whole)]
    publish_some(stage)
    expect(lost.count > 0, "nothing was lost")


def damaged_chunks(stage: Stage) -> None:
    """fetches chunks again whose bytes or length are wrong"""
    stage.open()
    stage.worker()
    damaged = stage.which("chunk", share=0.15)
    damaged_whole = stage.which("announce", share=0.5, when=whole)
    stage.proxy.rules = [damage_payload(damaged), damage_payload(damaged_whole)]
    publish_some(stage)
    expect(damaged.count > 0, "nothing was damaged")


def frames_too_many(stage: Stage) -> None:
    """fetches chunks that were in their place already when their message turned out malformed"""
    stage.open(chunk_bytes=2**16)
    stage.worker()
    for index in (0, 3, None):  # of four; the last one, and all of them
        broken = stage.which(
            "chunk", channel="data", when=lambda p, i=index: i in (None, p.header["index"])
        )
        stage.proxy.rules = [add_frame(broken)]
        stage.publish(noise(stage.chance, 2**18))
        expect(broken.count > 0, "no message was broken")


def damaged_headers(stage: Stage) -> None:
    """survives damaged headers, and takes what comes after them"""
    stage.open()
    stage.may_fail = TRANSIENT | {"too-large", "too-many-chunks", "layout-mismatch"}
    stage.worker()
    # A damaged greeting makes another worker, or another publisher, of it. And where an
    # announcement holds the version, nothing else tells which version that is.
    damaged = stage.which(
        share=0.05, when=lambda p: p.type not in ("hello", "welcome") and not whole(p)
    )
    stage.proxy.rules = [damage_header(damaged)]
    for _ in range(5):
        stage.outcome(noise(stage.chance, LARGER), timeout=3.0)
    stage.proxy.rules = []
    expect(damaged.count > 0, "nothing was damaged")
    stage.publish(noise(stage.chance, LARGER))


def lost_messages(stage: Stage) -> None:
    """gets every version though announcements, ends, requests and reports are lost"""
    stage.open()
    stage.worker()
    lost = stage.which(share=0.3, most=60, when=lambda p: p.type != "chunk")
    stage.proxy.rules = [lose(lost)]
    publish_some(stage)
    expect(lost.count > 0, "nothing was lost")


def ends_and_announcements_lost(stage: Stage) -> None:
    """asks for ends and announcements, of which it is pushed none at all"""
    stage.open()
    stage.worker()
    stage.proxy.rules = [lose(stage.which("end", "announce", "sealed_message", channel="data"))]
    publish_some(stage)


def doubled_and_late(stage: Stage) -> None:
    """takes messages that come twice, late and in another order"""
    stage.open()
    stage.worker()
    doubled = stage.which(share=0.3)
    stage.proxy.rules = [
        delay(stage.which(share=0.3, channel="data"), 0.05),
        double(doubled, 0.05),
        hold(stage.which(share=0.1, channel="control"), 0.01),
    ]
    publish_some(stage)
    expect(doubled.count > 0, "nothing came twice")


def cut_while_receiving(stage: Stage) -> None:
    """goes on where it was when connections are cut"""
    stage.open()
    stage.worker()
    stage.publish(noise(stage.chance, LARGER))
    lost = lose(stage.which("chunk", channel="data"))  # so all chunks are fetched
    by_push: tuple[str, list[Any]] = ("data", [])
    by_fetch = ("control", [lost])
    for channel, rules in (by_push, by_fetch, by_push, by_fetch):
        stage.proxy.forget()
        stage.wait_subscribed("w")
        stage.proxy.wait_seen("beacon", on_data)  # nothing arrives at a connection that was cut
        once = stage.which("chunk", channel=channel, skip=8, most=1)
        stage.proxy.rules = [*rules, cut(once)]
        stage.publish(noise(stage.chance, LARGER))
        expect(once.count == 1, f"the {channel} connection was not cut; {stage.proxy.story()}")


def slow_pushes(stage: Stage) -> None:
    """waits for chunks that are being pushed slowly, and asks for none of them"""
    stage.open(chunk_bytes=2**19, timing=Timing())
    worker = stage.worker()
    stage.publish(noise(stage.chance, 3 * 2**19))  # the layout is known from now on
    stage.proxy.rules = [
        join(stage.which("announce", channel="data")),
        trickle(stage.which("chunk", channel="data"), *SLOW),
    ]
    stories: list[str] = []
    for _ in range(TRIES):
        stage.wait_subscribed(worker.name)
        stage.proxy.forget()
        stage.publish(noise(stage.chance, 3 * 2**19))
        expect(bool(stage.proxy.seen("chunk", on_data)), "no chunk was pushed")
        stage.proxy.wait_seen("end", on_data)  # the link is free again
        stories.append(stage.proxy.story())
        if not stage.proxy.seen("fetch"):
            return
    expect(False, f"something was fetched while it was being pushed: {'; '.join(stories)}")


def no_data_channel(stage: Stage) -> None:
    """gets everything over the control channel while the data channel is out of reach"""
    stage.open()
    stage.proxy.reachable = {"control"}
    stage.worker()
    publish_some(stage)
    expect(not stage.proxy.seen("chunk", on_data), "a chunk was pushed through nothing")
    stage.proxy.reachable = {"control", "data"}
    stage.wait_subscribed("w")
    stage.publish(noise(stage.chance, LARGER))
    expect(bool(stage.proxy.seen("chunk", on_data)), "no chunk was pushed")


def wrong_digest(stage: Stage) -> None:
    """gives a version up whose whole does not match its digest, three times; then takes it"""
    stage.open()
    stage.may_fail = {"digest-mismatch"}
    worker = stage.worker()
    wrong = stage.which("end")
    stage.proxy.rules = [change(wrong, digest="5" * 64)]
    receipt = stage.outcome(noise(stage.chance, SMALL))
    expect(receipt.in_state("failed") == ["w"], f"no digest was right, but: {receipt}")
    worker.wait_event("failed", version=1, code="digest-mismatch")
    expect(not worker.those("applied"), "what has another digest was applied")
    stage.proxy.rules = []
    worker.wait_applied("m", stage.publisher.epoch, 1)

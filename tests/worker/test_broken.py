"""After an exception, a worker's machine keeps complete versions and drops all others."""

import numpy as np
from msgspec.structs import replace

from weightbus.bus.effects import Effect, Ready, Rejected, Send
from weightbus.bus.headers import encode
from weightbus.bus.messages import Announce, Applied, Failed, Hello, Welcome
from weightbus.bus.publisher import offers
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Granted, Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs.layout import Layout
from weightbus.tests.simulation.virtual_shell import PlainSnapshot

LAYOUT = Layout.plan([("w", "U8", (4,))])


def announcement(version: int) -> Announce:
    offer = VersionOffer.of("m", LAYOUT, 4, PlainSnapshot(bytes(4)))
    return offers.announcement(Version(offer, 1, version))


def said(effects: list[Effect], kind: type[Message]) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def joined() -> WorkerMachine:
    machine = WorkerMachine(
        Hello(name="w", instance="0" * 32, models={}), ["m"], lambda _model, _layout: "", 2**20
    )
    welcome = Welcome(epoch=1, data="tcp://*:1", ping_ms=1000, lost_ms=5000, models={})
    machine.receive([encode(welcome)], 0.0)
    assert machine.in_session
    return machine


def begun(machine: WorkerMachine, version: int) -> None:
    machine.receive([encode(announcement(version)), LAYOUT.header], 0.0)
    machine.happened(Granted("m", (1, version), np.zeros(4, np.uint8)), 0.0)


def ready(machine: WorkerMachine, version: int) -> None:
    begun(machine, version)
    holds = machine.followers["m"].versions
    held = holds.in_phase["arriving"]
    assert held is not None
    held.chunks.put(0, 0)
    whole = machine.followers["m"]._arrived(held, held.layout, held.chunks, 0.0)  # noqa: SLF001 # pyright: ignore
    assert [type(each) for each in whole] == [Ready]


def test_what_arrives_has_failed_and_its_memory_is_free() -> None:
    for _ in range(4):  # there are two buffers: a third version would lack a buffer
        machine = joined()
        for version in (1, 2, 3, 4):
            begun(machine, version)
            effects = machine.broken("it broke", 0.0)
            failed = said(effects, Failed)
            assert [(f.version, f.code) for f in failed if isinstance(f, Failed)] == [
                (version, "no-memory")
            ]
            assert any(isinstance(each, Rejected) for each in effects), "the user is told"
            assert machine.followers["m"].versions.in_phase["arriving"] is None
            assert not machine.in_session
            welcome = Welcome(epoch=1, data="tcp://*:1", ping_ms=1000, lost_ms=5000, models={})
            machine.receive([encode(welcome)], 0.0)


def test_what_is_ready_is_left_for_the_user_again() -> None:
    machine = joined()
    ready(machine, 1)
    effects = machine.broken("it broke", 0.0)
    assert [each.staged.version for each in effects if isinstance(each, Ready)] == [1]
    assert said(machine.happened(Report("m", (1, 1), "applied"), 0.0), Applied)


def test_what_was_applied_and_not_noted_comes_anew() -> None:
    machine = joined()
    ready(machine, 1)
    machine.happened(Report("m", (1, 1), "applied"), 0.0)
    ready(machine, 2)
    report = Report("m", (1, 2), "applied")
    machine.happened(replace(report, what="taken"), 0.0)
    machine.broken("it broke", 0.0, replace(report, what="taken"))
    assert machine.followers["m"].running is not None, "the user is at it"
    machine.broken("it broke", 0.0, report)
    assert machine.followers["m"].running is None
    assert machine.followers["m"].versions.newest == (0, 0), "it may come again"

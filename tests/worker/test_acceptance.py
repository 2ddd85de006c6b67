"""What a worker makes of layouts: none that its model cannot have, and of large ones few."""

import numpy as np
import pytest
from msgspec.structs import replace

from weightbus.bus.effects import Reserve, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import LAYOUT_BYTES_GUARANTEED, LAYOUT_MEMORY
from weightbus.bus.messages import Abort, Announce, Failed, Hello, Welcome
from weightbus.bus.protocol_limits import WINDOW_CHUNKS
from weightbus.bus.publisher import offers
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.bus.worker import layouts as acceptance
from weightbus.bus.worker.events import Granted
from weightbus.bus.worker.layouts import LAYOUTS_KEPT, Acceptance, Expected
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs import layout as layouts
from weightbus.codecs.errors import LayoutError
from weightbus.codecs.layout import Layout
from weightbus.codecs.state import state_of
from weightbus.python_client.applying.targets import LAYOUT_SLACK_BYTES, targets_of
from weightbus.tests.simulation.virtual_shell import PlainSnapshot


def announcement(layout: Layout) -> Announce:
    offer = VersionOffer.of("m", layout, 2**20, PlainSnapshot(bytes(layout.nbytes)))
    return offers.announcement(Version(offer, 1, 1))


def plan(tensors: int, first: int = 0) -> Layout:
    return Layout.plan([(f"t{first + n}", "F32", (1,)) for n in range(tensors)])


def kept(accepting: Acceptance, plans: list[Layout]) -> list[bool]:
    for each in plans:
        assert accepting.learn(announcement(each), each.header) is None
    return [accepting.layout(announcement(each)) is not None for each in plans]


def test_a_layout_that_comes_twice_is_the_same_one() -> None:
    accepting, layout = Acceptance("m", lambda _model, _layout: "", 2**30), plan(2)
    assert kept(accepting, [layout]) == [True]
    first = accepting.layout(announcement(layout))
    assert kept(accepting, [layout]) == [True]
    assert accepting.layout(announcement(layout)) is first, "what was made for it counts"


def test_few_large_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan(20, n) for n in range(LAYOUTS_KEPT + 1)]
    accepting = Acceptance("m", lambda _model, _layout: "", 2**30)
    assert kept(accepting, plans) == [False] + [True] * LAYOUTS_KEPT
    monkeypatch.setattr(acceptance, "LAYOUTS_BYTES_KEPT", 5 * len(plans[-1].header) // 2)
    assert kept(accepting, plans) == [False] * (LAYOUTS_KEPT - 1) + [True] * 2
    monkeypatch.setattr(acceptance, "LAYOUTS_BYTES_KEPT", 1)
    assert kept(accepting, plans)[-1], "the one that is needed is kept, however large"


def test_a_layout_that_the_model_cannot_have_is_not_even_read() -> None:
    weights = {name: np.zeros(1, np.float32) for name in ("w", "v")}
    target = targets_of({"m": weights}, strict=True, cast=False)["m"]
    expected = target.expected()
    accepting = Acceptance("m", lambda _model, _layout: "", 2**30, expected)
    own = state_of(weights).layout()
    assert expected == Expected(own.nbytes, 2 * len(own.header) + LAYOUT_SLACK_BYTES)
    assert accepting.fault(announcement(own)) is None
    huge = plan(2 * LAYOUT_SLACK_BYTES // 60)
    fault = accepting.fault(announcement(huge))
    assert fault is not None
    assert fault[0] == "too-large"


def test_a_layout_out_of_proportion_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To its data, to what the worker takes, or to the work that it is."""
    huge, small = Layout.plan([(f"t{n}", "F32", (0,)) for n in range(25_000)]), plan(4)
    assert len(huge.header) > LAYOUT_BYTES_GUARANTEED > len(small.header)
    told, parse = announcement(huge), Layout.parse
    monkeypatch.setattr(Layout, "parse", None)  # it is not called
    for bytes_max in (1, 2**30):  # of no data; and it is more than this worker takes
        accepting = Acceptance("m", lambda _model, _layout: "", bytes_max)
        for fault in (accepting.fault(told), accepting.learn(told, huge.header)):
            assert fault is not None
            assert fault[0] == "too-large"
    large = replace(told, nbytes=2**26)
    accepting = Acceptance("m", lambda _model, _layout: "", 2**26)
    assert len(huge.header) <= LAYOUT_BYTES_GUARANTEED + 2**26
    assert accepting.layout_bytes_max == 2**26 // LAYOUT_MEMORY
    assert accepting.size_fault(large) is None
    assert accepting.size_fault(replace(large, layout_bytes=2**26 // LAYOUT_MEMORY + 1))
    monkeypatch.setattr(Layout, "parse", parse)
    monkeypatch.setattr(acceptance, "TENSORS_UNKNOWN_MAX", 4)
    accepting = Acceptance("m", lambda _model, _layout: "", 2**30)
    assert accepting.learn(announcement(small), small.header) is None
    fault = accepting.learn(announcement(plan(5)), plan(5).header)
    assert fault is not None
    assert (fault[0], fault[1][:9]) == ("too-large", "5 tensors")
    known = Acceptance("m", lambda _model, _layout: "", 2**30, Expected(20, 2**12))
    assert known.learn(announcement(plan(5)), plan(5).header) is None, "its model has as many"


def test_what_a_worker_waits_for_is_bounded_by_what_it_takes() -> None:
    """A window of the version that arrives, and a layout."""
    machine = WorkerMachine(
        Hello(name="w", instance="0" * 32, models={}), ["m"], lambda _model, _layout: "", 2**22
    )
    assert machine.in_flight_max() == LAYOUT_BYTES_GUARANTEED
    machine.receive(
        [encode(Welcome(epoch=1, data="tcp://*:1", ping_ms=1, lost_ms=2, models={}))], 0
    )
    layout = Layout.plan([("w", "U8", (2**22,))])
    told = replace(announcement(layout), chunk_bytes=2**16)
    [reserve] = machine.receive([encode(told), layout.header], 0.0)
    assert isinstance(reserve, Reserve)
    machine.happened(Granted("m", (1, 1), np.zeros(2**22, np.uint8)), 0.0)
    assert machine.in_flight_max() == LAYOUT_BYTES_GUARANTEED + WINDOW_CHUNKS * 2**16
    machine.receive([encode(Abort(model="m", epoch=1, version=1))], 0.0)
    assert machine.in_flight_max() == LAYOUT_BYTES_GUARANTEED + WINDOW_CHUNKS * 2**16, (
        "it may be on its way"
    )


def test_a_layout_that_is_not_taken_has_no_place() -> None:
    machine = WorkerMachine(
        Hello(name="w", instance="0" * 32, models={}), ["m"], lambda _model, _layout: "", 2**10
    )
    machine.receive(
        [encode(Welcome(epoch=1, data="tcp://*:1", ping_ms=1, lost_ms=2, models={}))], 0
    )
    told = replace(announcement(plan(4)), layout_bytes=LAYOUT_BYTES_GUARANTEED + 2**20)
    assert machine.place([b"m/ctl", encode(told)], told.layout_bytes) is None
    effects = machine.receive_published([b"m/ctl", encode(told), b""], 0.0)
    failed = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Failed)]
    assert [f.code for f in failed] == ["too-large"]
    assert not [
        each
        for each in machine.receive([encode(told), b""], 1.0)
        if isinstance(each, Send) and isinstance(each.message, Failed)
    ], "it is not tried again"


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_what_is_in_no_string_is_found_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    names = ["a", 'q"uote', "back\\slash", "\\\\", 'ends in \\"', "colon : and -", "ü\u2028"]
    expected = Layout.plan([(name, "U8", (1,)) for name in names])
    monkeypatch.setattr(layouts, "BLOCK_BYTES", block)
    assert Layout.parse(expected.header) == expected
    text = expected.header[8:].rstrip()
    for broken in (
        text[:-1] + b',"a":{"dtype":"U8","shape":[1],"data_offsets":[7,8]}}',
        text.replace(b"[0,1]", b"[-0,1]"),
    ):
        with pytest.raises(LayoutError, match=r"occurs twice|has a sign"):
            Layout.parse(len(broken).to_bytes(8, "little") + broken)

"""What a worker makes of layouts: none that its model cannot have, and of large ones few."""

import numpy as np
import pytest

from weightbus.bus.messages import Announce
from weightbus.bus.publisher import offers
from weightbus.bus.publisher.version import Offer, Version
from weightbus.bus.worker import layouts as acceptance
from weightbus.bus.worker.layouts import LAYOUTS_KEPT, Acceptance, Expected
from weightbus.codecs import layout as layouts
from weightbus.codecs.errors import LayoutError
from weightbus.codecs.layout import Layout
from weightbus.python_client.targets import LAYOUT_SLACK_BYTES, targets_of
from weightbus.tests.simulation.virtual_shell import PlainSnapshot


def announcement(layout: Layout) -> Announce:
    offer = Offer.of("m", layout, 2**20, PlainSnapshot(bytes(layout.nbytes)))
    return offers.announcement(Version(offer, 1, 1), None)


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
    own = Layout.plan([(name, "F32", (1,)) for name in weights])
    assert expected == Expected(own.nbytes, 2 * len(own.header) + LAYOUT_SLACK_BYTES)
    assert accepting.fault(announcement(own)) is None
    huge = plan(2 * LAYOUT_SLACK_BYTES // 60)
    fault = accepting.fault(announcement(huge))
    assert fault is not None
    assert fault[0] == "too-large"


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
        with pytest.raises(LayoutError, match=r"stands twice|has a sign"):
            Layout.parse(len(broken).to_bytes(8, "little") + broken)

"""The recording of the demo shows something at once, and where nothing moves."""

import re
from pathlib import Path
from typing import Any

import pytest

from weightbus.tests.repository.scripts import loaded

recording = loaded("docs/recording.py")
DEMO = Path(__file__).parents[2] / "docs" / "demo.svg"


def picture(*lines: str) -> list[Any]:
    return [((0, line, "#fff", False),) if line else () for line in lines]


STARTING = picture("starting", "", "", "")
FIRST = picture("title", "version 1", "return 2", "")
LAST = picture("title", "version 9", "return 9", "done")


def test_a_recording_begins_where_the_demo_has_begun() -> None:
    pictures = [STARTING, STARTING, STARTING, FIRST, LAST]
    assert recording.begun(pictures) == [FIRST, LAST]
    assert recording.begun([LAST]) == [LAST]


@pytest.mark.parametrize("made", [False, True])
def test_at_each_moment_one_picture_is_shown_and_the_first_is_not_empty(*, made: bool) -> None:
    svg = recording.drawing([FIRST, LAST]) if made else DEMO.read_text()
    frames = re.findall(r'<g(?: id="last")? style="animation-delay:([-\d.]+)s">(.*)</g>', svg)
    match = re.search(r"animation: show ([\d.]+)s", svg)
    assert match is not None
    seconds = float(match[1])
    # Each is shown for its share of the time, beginning with its delay; the first one at once.
    starts = [float(delay) % seconds for delay, _ in frames]
    assert starts == [n * seconds / len(frames) for n in range(len(frames))]
    assert max(float(delay) for delay, _ in frames) < 0, "no time before it begins"
    lines = [shown.count("<use") for _, shown in frames]
    assert lines[0] >= max(lines) / 2


@pytest.mark.parametrize("made", [False, True])
def test_where_nothing_moves_the_last_picture_is_shown(*, made: bool) -> None:
    svg = recording.drawing([FIRST, LAST]) if made else DEMO.read_text()
    plain = svg.partition("@media")[0]
    assert "#last { visibility: visible }" in plain
    assert svg.count(' id="last"') == 1

"""The recording of the demo shows something at once, and where nothing moves."""

import re
from pathlib import Path

SVG = (Path(__file__).parents[2] / "docs" / "demo.svg").read_text()


def test_at_each_moment_one_picture_is_shown_and_the_first_is_not_empty() -> None:
    frames = re.findall(r'<g(?: id="last")? style="animation-delay:([-\d.]+)s">(.*)</g>', SVG)
    match = re.search(r"animation: show ([\d.]+)s", SVG)
    assert match is not None
    seconds = float(match[1])
    # Each is shown for its share of the time, beginning with its delay; the first one at once.
    starts = [float(delay) % seconds for delay, _ in frames]
    assert starts == [n * seconds / len(frames) for n in range(len(frames))]
    assert max(float(delay) for delay, _ in frames) < 0, "no time before it begins"
    lines = [shown.count("<use") for _, shown in frames]
    assert lines[0] >= max(lines) / 2


def test_where_nothing_moves_the_last_picture_is_shown() -> None:
    assert "#last { visibility: visible }" in SVG.partition("@media")[0]
    assert SVG.count(' id="last"') == 1

"""Record the demo: run it in a terminal of 80 columns, and draw what it showed as a moving SVG.

    make recording

`pyte` is the terminal. The picture needs neither script nor font: one group of lines for each half
a second, of which CSS shows one after another; lines that stay the same are there once. It begins
where the demo has begun, and whoever shows no moving pictures shows the last one.
"""

import argparse
import fcntl
import html
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pyte

COLUMNS, ROWS = 80, 30
FRAME_SECONDS = 0.5
LAST_SECONDS = 6.0  # for which the end is left to be seen
PATIENCE = 120.0  # seconds for the demo to end
CELL_WIDTH, LINE_HEIGHT, MARGIN = 8.4, 18.0, 14.0  # of a font of 14 pixels
PAPER, INK, DIM = "#16181d", "#d5d8de", "#80858f"
COLORS = {"red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef"}

Row = tuple[tuple[int, str, str, bool], ...]  # of each span: column, words, color, whether bold


def frames(command: list[str]) -> Iterator[list[Row]]:
    """Run a command in a terminal; yield what it shows, every `FRAME_SECONDS` and at its end.

    Raises:
        SystemExit: It failed, or took too long.
    """
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": ""}
    process = subprocess.Popen(  # noqa: S603 - the demo
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    due, end = time.monotonic() + FRAME_SECONDS, time.monotonic() + PATIENCE
    try:
        while (now := time.monotonic()) < end:
            if now >= due:
                due += FRAME_SECONDS
                yield shown(screen)
            if not select.select([ours], [], [], max(0.0, due - now))[0]:
                continue
            try:
                stream.feed(os.read(ours, 65536))
            except OSError:  # EIO: nobody has the other end any more
                break
        yield shown(screen)
        if process.wait(10) != 0:
            sys.exit(f"the demo ended with code {process.returncode}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def shown(screen: pyte.Screen) -> list[Row]:
    """Return what a terminal shows."""
    return [spans([screen.buffer[y][x] for x in range(COLUMNS)]) for y in range(ROWS)]


def spans(cells: list[pyte.screens.Char]) -> Row:
    """Return a line as stretches of one style, without the empty ones."""
    found: list[tuple[int, str, str, bool]] = []
    column = 0
    for (color, bold), same in groupby(cells, lambda cell: (color_of(cell), cell.bold)):
        words = "".join(cell.data for cell in same)
        if words.strip():
            found.append((column, words, color, bold))
        column += len(words)
    return tuple(found)


def color_of(cell: pyte.screens.Char) -> str:
    """Return a color for the picture. Grey ones of 256 are what the demo has dim."""
    if len(cell.fg) == 6 and cell.fg not in COLORS:
        return f"#{cell.fg}"
    return COLORS.get(cell.fg, INK if cell.fg == "default" else DIM)


def begun(pictures: list[list[Row]]) -> list[list[Row]]:
    """Return them from where there is something to be seen: half of the lines that there will be.

    Until then the demo starts its processes, for as long as this machine takes to load PyTorch.
    """
    lines = [sum(map(bool, picture)) for picture in pictures]
    first = next((n for n, count in enumerate(lines) if 2 * count >= max(lines)), 0)
    return pictures[first:]


def drawing(pictures: list[list[Row]]) -> str:
    """Return pictures, one after another, as SVG."""
    hold = int(LAST_SECONDS / FRAME_SECONDS)
    pictures = [*pictures, *[pictures[-1]] * hold]
    seconds = len(pictures) * FRAME_SECONDS
    numbers: dict[Row, int] = {}
    groups: list[str] = []
    for index, picture in enumerate(pictures):
        used = [
            f'<use href="#r{numbers.setdefault(row, len(numbers))}" y="{y * LINE_HEIGHT:g}"/>'
            for y, row in enumerate(picture)
            if row
        ]
        last = ' id="last"' if index == len(pictures) - 1 else ""
        # Below zero: it has begun by the time it is loaded, so that there is no time before that.
        delay = index * FRAME_SECONDS - seconds
        groups.append(f'<g{last} style="animation-delay:{delay:g}s">{"".join(used)}</g>')
    shown_in_turn = "\n".join(groups)
    rows = "\n".join(f'<g id="r{number}">{line(row)}</g>' for row, number in numbers.items())
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, ROWS * LINE_HEIGHT + 2 * MARGIN
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<style>
text {{
  font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre
}}
.frames > g {{ visibility: hidden; animation: show {seconds:g}s step-end infinite }}
#last {{ visibility: visible }}
@keyframes show {{
  0% {{ visibility: visible }} {100 / len(pictures):.4f}% {{ visibility: hidden }}
}}
@media (prefers-reduced-motion) {{
  .frames > g {{ animation: none }}
}}
</style>
<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>
<defs>
{rows}
</defs>
<g class="frames" transform="translate({MARGIN:g} {MARGIN + 13:g})">
{shown_in_turn}
</g>
</svg>
"""


def line(row: Row) -> str:
    """Return a line as text, each stretch as wide as its cells."""
    weight = {True: ' font-weight="bold"', False: ""}
    return "".join(
        f'<text x="{column * CELL_WIDTH:g}" textLength="{len(words) * CELL_WIDTH:g}" '
        f'fill="{color}"{weight[bold]}>{html.escape(words)}</text>'
        for column, words, color, bold in row
    )


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the .svg file")
    parser.add_argument("--seconds", default="16", help="of the demo")
    given = parser.parse_args()
    command = [sys.executable, "-m", "weightbus", "demo", "--seconds", given.seconds]
    pictures = begun([picture for picture in frames(command) if any(picture)])
    given.out.write_text(drawing(pictures))
    print(f"{given.out}: {len(pictures)} pictures, {given.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

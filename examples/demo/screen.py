"""Shows the progress of a run: as a live drawing on a terminal, otherwise as plain lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightbus.types import WorkerStatus

from .subject import Subject
from .tally import Tally, version_of

REFRESH_SECONDS = 0.125  # between two drawings on a terminal
LINE_SECONDS = 1.0  # between two plain lines
EVENTS_SHOWN = 5
WIDTH = 76  # with a margin of 2, a terminal of 80 columns
SPARK = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"live": "green", "stuck": "yellow", "lost": "red"}


@dataclass(frozen=True, slots=True)
class View:
    """The state of a run at one moment.

    Attributes:
        subject: What is learned.
        now, seconds: The time since the start of the run, and the length of the run.
        version: The newest version.
        address: The publisher's address.
        tally: The results so far.
        status: The publisher's status of each worker.
    """

    subject: Subject
    now: float
    seconds: float
    version: int
    address: str
    tally: Tally
    status: Mapping[str, WorkerStatus]


def sparkline(values: Sequence[float], width: int, highest: float) -> str:
    """Return a series of values as a line of blocks of different heights, at most `width` wide."""
    if not values:
        return ""
    width = min(width, len(values))
    parts = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    return "".join(SPARK[min(7, int(8 * fmean(part) / highest))] for part in parts)


class Screen:
    """Shows a run.

    Args:
        console: Where to draw. If it is not a terminal, plain lines are printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._events: list[str] = []
        self._view: View | None = None
        self._due = 0.0
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str, now: float | None = None) -> None:
        """Show an event, which happened `now` seconds after the start of the run."""
        line = text if now is None else f"{now:5.1f} s  {text}"
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)
            return
        self._events.append(line)
        self._live.update(self._drawing(), refresh=True)

    def show(self, view: View) -> None:
        """Draw the state of the run, unless the last drawing was a moment ago."""
        if view.now < self._due:
            return
        self._due = view.now + (REFRESH_SECONDS if self._live is not None else LINE_SECONDS)
        self._view = view
        if self._live is not None:
            self._live.update(self._drawing(), refresh=True)
        else:
            self._console.print(_line(view), highlight=False, soft_wrap=True)

    def _drawing(self) -> RenderableType:
        said = Text("\n".join(self._events[-EVENTS_SHOWN:]), "dim")
        frame = [] if self._view is None else [_frame(self._view), ""]
        return Padding(Group(*frame, said), (1, 2))


def _frame(view: View) -> RenderableType:
    title = Text.assemble(
        ("weightbus demo", "bold"),
        (f"   {view.subject.title}, one trainer, publishing on {view.address}", "dim"),
    )
    bar = Table.grid(padding=(0, 2))
    progress = ProgressBar(view.seconds, min(view.now, view.seconds), width=WIDTH - 16)
    bar.add_row(progress, Text(f"{min(view.now, view.seconds):.0f} of {view.seconds:.0f} s", "dim"))
    return Group(title, "", _overall(view), "", _workers(view), "", bar)


def _overall(view: View) -> Table:
    curve, latency = [mean for _, mean in view.tally.curve()], view.tally.latency()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_row("version", Text(str(view.version), "bold"))
    grid.add_row(
        "return",
        Text.assemble(
            (f"{curve[-1]:4.3g}" if curve else "   -", "bold"),
            "  ",
            (sparkline(curve, WIDTH - 20, view.subject.highest), "blue"),
        ),
    )
    if said := view.tally.says():
        grid.add_row("says", said)
    grid.add_row(
        "publish",
        "-"
        if latency is None
        else f"p50 {latency.p50:.1f} ms   p95 {latency.p95:.1f} ms   until the last worker has it",
    )
    sent = (
        f"{view.tally.nbytes / 1e3:.1f} kB a version, {view.tally.delivered / 1e6:.1f} MB applied"
    )
    grid.add_row("bytes", sent)
    return grid


def _workers(view: View) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), width=WIDTH, header_style="dim")
    table.add_column("worker", width=8)
    table.add_column("state", width=6)
    rate = f"{view.subject.plural}/s"
    for title in ("version", "lag", "return", rate):
        table.add_column(title, justify="right", width=8 if title != rate else 10)
    table.add_column("", ratio=1)
    for name, seen in view.tally.workers.items():
        status = view.status.get(name)
        state = status.state if status is not None else "-"
        runs = version_of(status)
        lag = max(0, view.version - runs)
        mean = fmean(seen.returns) if seen.returns else 0.0
        lit = state == "live"
        table.add_row(
            Text(name, "bold"),
            Text(state, STATE_STYLES.get(state, "dim")),
            str(runs) if runs else "-",
            Text(str(lag), "" if lag <= 1 else "yellow" if lit else "red") if runs else "-",
            f"{mean:.3g}" if seen.returns else "-",
            f"{seen.rate(view.now):.1f}",
            ProgressBar(
                view.subject.highest,
                mean,
                style="grey23",
                complete_style="blue" if lit else "grey42",
            ),
        )
    return table


def _line(view: View) -> str:
    curve, latency = view.tally.curve(), view.tally.latency()
    words = [f"{view.now:5.1f} s  version {view.version:3}"]
    words.append(f"return {curve[-1][1]:5.3g}" if curve else "return     -")
    if latency is not None:
        words.append(f"publish p50 {latency.p50:.1f} ms, p95 {latency.p95:.1f} ms")
    for name in view.tally.workers:
        status = view.status.get(name)
        state = status.state if status is not None else "gone"
        words.append(f"{name} {version_of(status)}" + (f" ({state})" if state != "live" else ""))
    return "  ".join(words)

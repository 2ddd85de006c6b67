"""Many runs on all cores: progress is shown, and Ctrl-C ends them at once."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
R = TypeVar("R")


def _leave_it_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def each(task: Callable[[T], R], items: Sequence[T], what: str, block: int = 1) -> Iterator[R]:
    """Yield what a task returns for each item, as it comes; `block` items go to a process at once.

    Whoever stops to listen, by an interrupt for one, ends the processes.
    """
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        TimeRemainingColumn(),
    )
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(initializer=_leave_it_to_the_parent) as pool,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        results = pool.imap_unordered(task, items, block)
        yield from progress.track(results, total=len(items), description=what)

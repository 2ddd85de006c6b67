"""The command line's entry: the console script `weightbus` and `python -m weightbus`."""

import contextlib
import os
import signal
import sys
from types import FrameType

EXTRA = {"typer", "click", "rich"}  # what the extra `cli` brings


def main() -> None:
    """Run the command line; ends the process with one of the exit codes in `outcome`."""
    # Until a command deals with signals (`outcome`), and after it: no traceback, from wherever.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # only the main thread may say what signals do
            signal.signal(signal.SIGINT, _leave)
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        sys.exit(
            f"error: the command line needs {error.name}, which is not installed: "
            "pip install rich typer (the extra weightbus[cli])"
        )
    app(prog_name="weightbus")


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)

"""The entry point of the command line, for the script `weightbus` and `python -m weightbus`."""

import contextlib
import os
import signal
import sys
from types import FrameType

EXTRA = {"typer", "click", "rich"}  # the packages of the extra `cli`


def main() -> None:
    """Run the command line, and exit the process with one of the exit codes in `outcome`."""
    # A command handles signals itself (`outcome`). This prevents a traceback before and after it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # only the main thread may set signal handlers
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

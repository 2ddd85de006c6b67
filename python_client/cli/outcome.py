"""Runs a command, ends it with an exit code, and shows an error as one line without traceback.

0     the command is done, or was stopped if it runs until then (publish --watch, relay, subscribe,
      bridge)
1     not achieved: for example, there are too few workers, a version cannot be applied, a server
      refuses a call, a file is damaged, an address is in use, or an extra is not installed
2     wrong usage: the call can never work, for example with a missing file or an invalid name
129   hung up (SIGHUP: the terminal or ssh session was closed) before the command was done
130   interrupted (SIGINT, Ctrl-C) before the command was done
143   terminated (SIGTERM) before the command was done
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType

from ...codecs.errors import WeightBusError
from .screen import Screen

DONE, NOT_ACHIEVED, WRONG_USAGE = 0, 1, 2
DELAY_SECONDS = 0.01  # seconds by which a signal is delayed (`_holds_a_lock_halfway`)
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class UsageError(Exception):
    """A command was called with arguments that can never work."""


class Stopped(KeyboardInterrupt):
    """A signal has requested the end of the process.

    Attributes:
        signal: The signal that was received.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} received")
        self.signal = signal.Signals(number)


def conclude(screen: Screen, command: Callable[[], int]) -> int:
    """Run a command and return its exit code; show expected errors without a traceback."""
    try:
        with _stoppable():
            return command()
    except UsageError as error:
        return _fail(screen, error, WRONG_USAGE)
    except Stopped as stopped:
        screen.error(f"stopped by {stopped.signal.name} before it was done")
        screen.emit("stopped", achieved=False, signal=stopped.signal.name)
        return 128 + stopped.signal
    except BrokenPipeError:  # the reader of standard output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_ACHIEVED
    except (WeightBusError, OSError) as error:
        return _fail(screen, error, NOT_ACHIEVED)


def _fail(screen: Screen, error: Exception, code: int) -> int:
    screen.error(str(error))
    screen.emit("error", achieved=False, error=type(error).__name__, text=str(error))
    return code


@contextlib.contextmanager
def _stoppable() -> Generator[None]:
    """Raise `Stopped` on SIGINT, SIGTERM and SIGHUP during the block. (In the main thread only.)"""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if frame is not None and _holds_a_lock_halfway(frame):
            signal.signal(signal.SIGALRM, lambda _, later: stop(number, later))
            signal.setitimer(signal.ITIMER_REAL, DELAY_SECONDS)
            return
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
    for number in SIGNALS:
        # An ignored signal stays ignored: nohup, and shells without job control, set that.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _holds_a_lock_halfway(frame: FrameType) -> bool:
    """Return whether an exception at this frame would leave a lock of `threading` in a wrong state.

    Some classes of `threading` are written in Python. An exception in one of their methods below
    would separate the acquire or release of the lock from the `with` statement that needs it.
    """
    halfway = "__enter__", "__exit__", "_acquire_restore", "_release_save"
    code = frame.f_code
    return code.co_filename == threading.__file__ and code.co_name in halfway

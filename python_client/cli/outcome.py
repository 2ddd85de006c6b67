"""How a command ends: its exit code, and one line about what went wrong instead of a traceback.

0     done; or what runs until it is stopped (publish --watch, subscribe, bridge) was stopped
1     not achieved: too few workers, a version that could not be applied, a server that refuses, a
      damaged file, an address that is taken, an extra that is not installed
2     wrong usage: what can never work, such as a missing file or a name that may not be one
129   hung up (SIGHUP: its terminal or ssh session was closed) before it was done
130   interrupted (SIGINT, Ctrl-C) before it was done
143   terminated (SIGTERM) before it was done
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
AGAIN_SECONDS = 0.01  # until a signal is handled that came at a bad moment
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class UsageError(Exception):
    """The command was called in a way that can never work."""


class Stopped(KeyboardInterrupt):
    """A signal asks the process to end.

    Attributes:
        signal: Which one.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} received")
        self.signal = signal.Signals(number)


def conclude(screen: Screen, command: Callable[[], int]) -> int:
    """Run a command and return its exit code; whatever is expected to go wrong becomes words."""
    try:
        with _stoppable():
            return command()
    except UsageError as error:
        return _fail(screen, error, WRONG_USAGE)
    except Stopped as stopped:
        screen.error(f"stopped by {stopped.signal.name} before it was done")
        screen.emit("stopped", achieved=False, signal=stopped.signal.name)
        return 128 + stopped.signal
    except BrokenPipeError:  # whoever read our output has left: nobody to tell
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
    """Turn SIGINT, SIGTERM and SIGHUP into `Stopped`, in whatever the main thread is doing."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if frame is not None and _holds_a_lock_halfway(frame):
            signal.signal(signal.SIGALRM, lambda _, later: stop(number, later))
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
            return
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
    for number in SIGNALS:
        if (
            before[number] is not signal.SIG_IGN
        ):  # as for nohup, or a job of a shell without job control
            signal.signal(number, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _holds_a_lock_halfway(frame: FrameType) -> bool:
    """Tell whether an exception now would leave a lock of `threading` held, or release it twice.

    Its classes in Python take and release a lock in methods of their own; an exception of a signal
    handler in these is lost between the lock and the `with` that releases it.
    """
    halfway = "__enter__", "__exit__", "_acquire_restore", "_release_save"
    code = frame.f_code
    return code.co_filename == threading.__file__ and code.co_name in halfway

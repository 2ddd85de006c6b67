"""Versions whose weights are still on their way from a device when `publish_async` returns."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from ..bus.deadline import Deadline
from ..bus.publisher.offers import hash_chunk
from ..bus.publisher.version import Version
from ..bus.receipt import Receipt

if TYPE_CHECKING:
    from ..codecs.device_copies import Arriving


def after(
    arriving: "Arriving",
    version: Version,
    hashed: Callable[[], bool],
    submit: Callable[[], None],
    future: "Future[Receipt]",
    deadline: Deadline,
    held: AbstractContextManager[object],
) -> None:
    """Go on with a publish once its weights are there, in a thread of its own.

    A device may be busy for any time, and nothing stops a copy that it has begun: if the deadline
    comes first, the publish has failed, and its memory serves nothing else until the copy is over.

    Args:
        arriving: What is waited for.
        version: Of what.
        hashed: Whether to hash it then.
        submit: Publishes it.
        future: Fails if that is not to be.
        deadline: When it must be there.
        held: What the model is held by meanwhile.
    """

    def wait() -> None:
        with held:
            try:
                arriving.wait(deadline.check)
                for index in version.unhashed() if hashed() else ():
                    hash_chunk(version, index)
                    deadline.check()
                submit()
            except BaseException as error:
                with suppress(Exception):  # it is cancelled
                    future.set_exception(error)
                with suppress(Exception):  # of a device that has failed, nothing arrives any more
                    arriving.wait()
                version.snapshot.release()

    # Not waited for at the end of the process: a device that hangs would hang that, too.
    thread = threading.Thread(target=wait, name="weightbus-arrival", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are to be had
        wait()

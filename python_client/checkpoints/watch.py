"""Watching a checkpoint: each time its files were written, and are whole again, it is loaded."""

import time
from collections.abc import Callable
from pathlib import Path

from .checkpoint import Checkpoint, Progress, Stamp, open_checkpoint, stamp_of
from .shards import CheckpointError

POLL_SECONDS = 0.5  # between two looks; files that stood still for one are taken to be written


class Watch:
    """A path whose every new checkpoint is wanted.

    Args:
        path: What `open_checkpoint` takes. It may come into being later.
        report: Told in words why a changed file cannot be loaded yet; once for each reason.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path, self._report, self._sleep = path, report, sleep
        self._loaded: Stamp | None = None  # how the files stood when they were loaded last
        self._reported = ""

    def wait_for_change(self) -> None:
        """Wait until the files are others than those loaded last, and stand still."""
        seen = stamp_of(self._path)
        while True:
            self._sleep(POLL_SECONDS)
            before, seen = seen, stamp_of(self._path)
            if seen == before and seen != self._loaded:
                return

    def load(self, progress: Progress | None = None) -> Checkpoint | None:
        """Load the files; None if they are not whole, and then `report` has been told why.

        What is returned was read from files that nobody wrote to meanwhile.
        """
        try:
            checkpoint = open_checkpoint(self._path, load=True, progress=progress)
        except (CheckpointError, OSError) as error:
            if str(error) != self._reported:
                self._reported = str(error)
                self._report(self._reported)
            return None
        self._loaded, self._reported = checkpoint.stamp, ""
        return checkpoint

"""Watching a checkpoint: when its files have changed, and are whole, and are of one save.

Theory of operation: files that stood still from one look to the next are taken to be written. They
have changed if any of their times has, the change time included, since `cp -p`, `rsync -t` and
`tar -x` set the other. Where only that changed, or where times are in whole seconds so that two
writes can look alike, the digest decides whether there is anything new.

Shards that are saved again where they lie are, for seconds, of two saves. Whoever saves them writes
the index last, so a set is one save if no shard is newer than its index, and none is left of what
was loaded before. A set that stays otherwise is taken after `SET_SECONDS`, with a warning.
"""

import time
from collections.abc import Callable
from pathlib import Path

from ...codecs.errors import LayoutError
from .checkpoint import Checkpoint, File, Progress, Stamp, open_checkpoint, stamp_of
from .shards import CheckpointError, is_index

POLL_SECONDS = 0.5  # between two looks; files that stood still for one are taken to be written
SET_SECONDS = 30.0  # that shards stand still as a mixture, until that is taken to be meant
AGAIN_SECONDS = 2.0  # after which times in whole seconds would tell of a later write


class Watch:
    """A path whose every new checkpoint is wanted.

    Args:
        path: What `open_checkpoint` takes. It may come into being later.
        report: Told in words why a changed file cannot be loaded yet, once for each reason, and
            what is odd about one that is.
        sleep: Waits so many seconds.
        now: Returns the time as files have it, in seconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._report, self._sleep, self._now = path, report, sleep, now
        self._loaded: Stamp | None = None  # how the files stood when they were loaded last
        self._digest = ""  # of what was loaded last
        self._doubt = False  # whether a write since then could have left no trace
        self._reported = ""

    def wait_for_change(self) -> None:
        """Wait until the files are others than those loaded last, stand still, and are one save."""
        seen, still = stamp_of(self._path), 0.0
        while True:
            self._sleep(POLL_SECONDS)
            before, seen = seen, stamp_of(self._path)
            still = still + POLL_SECONDS if seen == before else 0.0
            if not still:
                continue
            if seen == self._loaded:
                if self._doubt and still >= AGAIN_SECONDS:
                    return
                continue
            mixed = self._mixture(seen)
            if not mixed:
                return
            if still >= SET_SECONDS:
                self._say(f"{mixed}: taken nevertheless, since nothing changed for {still:g} s")
                return
            self._say(f"{mixed}: waiting up to {SET_SECONDS:g} s for the rest of the save")

    def _mixture(self, seen: Stamp) -> str:
        """Say why files may be of two saves; empty if they are of one."""
        indexes = [file for file in seen if is_index(Path(file.name))]
        shards = [file for file in seen if not is_index(Path(file.name))]
        loaded = {*(self._loaded or ())}
        if len(indexes) != 1 or not shards:
            return ""
        (index,), newest = indexes, max(shards, key=lambda file: file.changed_ns)
        if self._loaded is None and self._now() - newest.changed_ns / 1e9 > SET_SECONDS:
            return ""  # whoever wrote that is done
        if newest.changed_ns > index.changed_ns:
            return f"{self._path}: {newest.name} is newer than {index.name}, which is written last"
        old = next((file.name for file in shards if file in loaded), "")
        return f"{self._path}: {index.name} is new, and {old} is not" if old else ""

    def load(self, progress: Progress | None = None) -> Checkpoint | None:
        """Load the files; None if they are not whole, and then `report` has been told why.

        None as well if there is nothing new in them. What is returned was read from files that
        nobody wrote to meanwhile.
        """
        try:
            checkpoint = open_checkpoint(self._path, load=True, progress=progress)
            digest = checkpoint.digest()
        except (LayoutError, CheckpointError, OSError) as error:
            self._say(f"waiting for a whole file: {error}")
            return None
        before, stamp = self._loaded or (), checkpoint.stamp
        alike = digest == self._digest and _written(before) == _written(stamp)
        self._loaded, self._digest, self._reported = stamp, digest, ""
        # Once again, if a later write of as many bytes would have left the times as they are.
        self._doubt = before != stamp and any(map(_coarse, stamp))
        return None if alike else checkpoint

    def _say(self, text: str) -> None:
        if text != self._reported:
            self._reported = text
            self._report(text)


def _written(stamp: Stamp) -> list[tuple[str, int, int, int]]:
    """Return all of a stamp but when anything else about a file changed, such as its mode."""
    return [(file.name, file.inode, file.written_ns, file.size) for file in stamp]


def _coarse(file: File) -> bool:
    """Tell whether a file's times are in whole seconds, as some mounts have them."""
    return not file.written_ns % 10**9 and not file.changed_ns % 10**9

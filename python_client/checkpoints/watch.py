"""Watches a checkpoint: loads it once its files have changed, are complete, and are of one save.

Files that did not change between two checks are assumed to be complete. A file has changed if its
modification time or its change time differs. The change time is needed, since `cp -p`, `rsync -t`
and `tar -x` set the modification time. If only the change time differs, or if times are in whole
seconds so that two writes may have the same times, the digest decides whether the content is new.

While a save overwrites shards in place, the files are a mixture of two saves for some seconds.
Programs write the index last. So the files are of one save if no shard is newer than the index, and
every shard has changed since the previous checkpoint. If a mixture stays unchanged for
`SET_SECONDS`, it is loaded, with a warning.
"""

import time
from collections.abc import Callable
from pathlib import Path

from ...codecs.errors import LayoutError
from .checkpoint import Checkpoint, File, Progress, Stamp, open_checkpoint, stamp_of
from .shards import CheckpointError, is_index

POLL_SECONDS = 0.5  # seconds between two checks
SET_SECONDS = 30.0  # after so many seconds, an unchanged mixture of shards is loaded
AGAIN_SECONDS = 2.0  # two writes so long apart have different times, even in whole seconds


class Watch:
    """Returns each new checkpoint at a path.

    Args:
        path: A path for `open_checkpoint`. It may not exist yet.
        report: Called with the reason why changed files cannot be loaded yet, or with a warning
            about files that are loaded; not called with the same text twice in a row.
        sleep: Waits a number of seconds.
        now: Returns the time by the clock of file systems, in seconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._report, self._sleep, self._now = path, report, sleep, now
        self._loaded: Stamp | None = None  # the stamp of the files that were loaded last
        self._digest = ""  # the digest of the checkpoint that was loaded last
        self._doubtful = False  # whether a write after the load may have left all times unchanged
        self._reported = ""

    def wait_for_change(self) -> None:
        """Wait until files other than those loaded last are complete and of one save."""
        seen, unchanged = stamp_of(self._path), 0.0  # seconds without a change
        while True:
            self._sleep(POLL_SECONDS)
            before, seen = seen, stamp_of(self._path)
            unchanged = unchanged + POLL_SECONDS if seen == before else 0.0
            if not unchanged:
                continue
            if seen == self._loaded:
                if self._doubtful and unchanged >= AGAIN_SECONDS:
                    return
                continue
            mixed = self._mixture(seen)
            if not mixed:
                return
            if unchanged >= SET_SECONDS:
                self._warn(f"{mixed}: loaded nevertheless, unchanged for {unchanged:g} s")
                return
            self._warn(f"{mixed}: waiting up to {SET_SECONDS:g} s for the rest of the save")

    def _mixture(self, seen: Stamp) -> str:
        """Return why the files may be of two saves, or "" if they are of one."""
        indexes = [file for file in seen if is_index(Path(file.name))]
        shards = [file for file in seen if not is_index(Path(file.name))]
        loaded = {*(self._loaded or ())}
        if len(indexes) != 1 or not shards:
            return ""
        (index,), newest = indexes, max(shards, key=lambda file: file.changed_ns)
        if self._loaded is None and self._now() - newest.changed_ns / 1e9 > SET_SECONDS:
            return ""  # the save ended before this watch began
        if newest.changed_ns > index.changed_ns:
            return f"{self._path}: {newest.name} is newer than {index.name}, which is written last"
        old = next((file.name for file in shards if file in loaded), "")
        return f"{self._path}: {index.name} is new, and {old} is not" if old else ""

    def load(self, progress: Progress | None = None) -> Checkpoint | None:
        """Load the files and return the checkpoint; None if its content is not new.

        Also return None, after a `report`, if the files are incomplete or change while they are
        read.
        """
        try:
            checkpoint = open_checkpoint(self._path, load=True, progress=progress)
            digest = checkpoint.digest()
        except (LayoutError, CheckpointError, OSError) as error:
            self._warn(f"waiting for a whole file: {error}")
            return None
        before, stamp = self._loaded or (), checkpoint.stamp
        same = digest == self._digest and _without_changed(before) == _without_changed(stamp)
        self._loaded, self._digest, self._reported = stamp, digest, ""
        # If a write of the same size could leave the times unchanged, load once more later.
        self._doubtful = before != stamp and any(map(_has_whole_seconds, stamp))
        return None if same else checkpoint

    def _warn(self, text: str) -> None:
        if text != self._reported:
            self._reported = text
            self._report(text)


def _without_changed(stamp: Stamp) -> list[tuple[str, int, int, int]]:
    """Return a stamp without change times, which a change of a file's mode sets, too."""
    return [(file.name, file.inode, file.written_ns, file.size) for file in stamp]


def _has_whole_seconds(file: File) -> bool:
    """Return whether a file's times are in whole seconds, as on some file systems."""
    return not file.written_ns % 10**9 and not file.changed_ns % 10**9

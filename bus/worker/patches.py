"""Selects the patch that a version arrives by, and falls back to the whole version.

A patch builds on exactly the bytes that run here. The patch arrives into separate memory, and
another thread decodes it; the resulting version is verified by its digest, as any version is. If
anything is wrong with a patch, the worker fetches the whole version instead, and the running
version stays in use.
"""

import numpy as np

from ..chunks import Chunks, Memory, plan_of
from ..effects import Decode, Effect, Notice, Subscribe
from ..headers import data_topic, patch_topic
from ..limits import Timing
from ..messages import DELTA, Patch, Refuse, Running
from ..staged import Base
from . import reports
from .layouts import Expected
from .transfer import Transfer
from .version_store import AnnouncedEntry, ArrivingEntry, VersionStore


class Patches:
    """The patches of one model.

    Args:
        model: The model's name.
        versions: The versions of the model that this worker has.
        timing: The timeouts and intervals.
        expected: Whether patches are accepted, and the keyring.
    """

    def __init__(
        self, model: str, versions: VersionStore, timing: Timing, expected: Expected
    ) -> None:
        self._model, self._versions, self._timing = model, versions, timing
        self._takes, self._keys = expected.patches, expected.keyring
        self.listens = False  # subscribed to chunks of patches, not to chunks of versions

    @property
    def topic(self) -> bytes:
        """The topic of the chunks that are pushed to this worker."""
        return (patch_topic if self.listens else data_topic)(self._model)

    def listen(self, *, on: bool, shared: bool) -> list[Effect]:
        """Subscribe to pushed patches or, if not `on`, to pushed versions again."""  # D7
        before, self.listens = self.topic, on
        if shared or self._versions.mode == "catching-up":
            return []
        return [Subscribe(before, on=False), Subscribe(self.topic, on=True)]

    def transfer(self, entry: AnnouncedEntry, chunks: Chunks[Memory], now: float) -> Transfer:
        """Return the transfer of a version: of a patch on the running version, or whole."""  # D4
        announce, base = entry.announce, self._base(entry)
        found = [p for p in announce.patches if base is not None and _builds_on(p, base.running)]
        why = ""
        if base is not None and found and found[0].nbytes <= announce.nbytes:
            try:
                room = np.empty(found[0].nbytes, np.uint8)
            except MemoryError:
                why = f"there is no memory for a patch of {found[0].nbytes} bytes"
            else:
                plan, to = plan_of(room.nbytes, announce.chunk_bytes), self._versions.build_on(base)
                into = Chunks(plan, room, [None] * plan.count)
                transfer = Transfer(announce, into, now, self._timing, self._keys, found[0], to)
                if found[0] != announce.patches[0]:
                    transfer.pull()  # only the first patch is pushed
                return transfer
        elif self._takes and entry.memory is None:
            why = self._unfit(entry)
        return Transfer(announce, chunks, now, self._timing, self._keys, why=why)

    def _base(self, entry: AnnouncedEntry) -> Base | None:
        """Return the base for a patch: the running version if its bytes were kept, else None."""
        base, runs = self._versions.base, self._versions.in_phase["running"]
        if not self._takes or entry.memory is not None or base is None or runs is None:
            return None
        fits = base.running == runs.running and base.layout.id == entry.announce.layout
        return base if fits else None

    def _unfit(self, entry: AnnouncedEntry) -> str:
        runs = self._versions.in_phase["running"]
        here = f"version {runs.key[1]} of epoch {runs.key[0]} runs" if runs else "nothing runs"
        offered = ", ".join(str(p.version) for p in entry.announce.patches)
        kept = "" if self._versions.base is not None else ", and its bytes were not kept"
        return f"{here} here{kept}; there are patches on {offered}"

    def decode(self, entry: ArrivingEntry) -> list[Effect]:
        """Decode a complete patch, unless the decoding has begun."""
        transfer = entry.transfer
        if transfer.arrival == "decoded" or transfer.base is None:
            return []
        return [Decode(transfer.decode(transfer.base, entry.chunks.memory))]

    def refused(self, refuse: Refuse, now: float) -> list[Effect]:
        """Handle a refusal: the publisher has no such patch, so fetch the whole version."""  # D8
        entry = self._versions.find((refuse.epoch, refuse.version), "arriving")
        if entry is None or entry.transfer.patch is None or entry.transfer.arrival == "decoded":
            return []
        return self.give_up(entry, "the publisher does not have this patch", now)

    def give_up(self, entry: ArrivingEntry, why: str, now: float) -> list[Effect]:
        """Fetch the whole version instead of an unusable patch."""  # D5"""
        old = entry.transfer
        old.revoke()
        if old.base is not None:
            self._versions.release(old.base)
        transfer = Transfer(entry.announce, entry.chunks, now, self._timing, self._keys, why=why)
        entry.set_transfer(transfer)
        transfer.pull()
        text = f"version {entry.key[1]} of {self._model} is fetched as a whole, not patched: {why}"
        return [Notice("unpatched", text), *reports.fetches(transfer, transfer.wants(now))]


def _builds_on(patch: Patch, running: Running) -> bool:
    named = Running(patch.epoch, patch.version, patch.digest)
    return patch.encoding == DELTA and named == running

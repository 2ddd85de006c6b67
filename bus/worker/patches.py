"""Selects the patch from which a worker builds a version, if one of them fits.

A patch applies only to exactly the bytes of the running version. The patch is received into
separate memory, and another thread decodes it; the resulting version is verified by its digest,
like every version. If anything is wrong with a patch, the worker fetches the whole version
instead, and the running version stays in use.
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
        self._accepts_patches, self._keyring = expected.patches, expected.keyring
        self.subscribed = False  # to the chunks of patches; otherwise to the chunks of versions

    @property
    def topic(self) -> bytes:
        """The topic of the chunks that are pushed to this worker."""
        return (patch_topic if self.subscribed else data_topic)(self._model)

    def subscribe(self, *, on: bool, shared: bool) -> list[Effect]:
        """Subscribe to pushed patches or, if not `on`, to pushed versions again.

        No effects are returned while the worker has no subscription to pushed chunks: if versions
        are read from shared memory (`shared`), or while it is catching up.
        """  # D7
        before, self.subscribed = self.topic, on
        if shared or self._versions.mode == "catching-up":
            return []
        return [Subscribe(before, on=False), Subscribe(self.topic, on=True)]

    def transfer(self, entry: AnnouncedEntry, chunks: Chunks[Memory], now: float) -> Transfer:
        """Return a transfer of a patch on the running version or, without one, of the version."""
        # D4
        announce, base = entry.announce, self._base(entry)
        usable = [p for p in announce.patches if base is not None and _builds_on(p, base.running)]
        why = ""
        if base is not None and usable and usable[0].nbytes <= announce.nbytes:
            patch = usable[0]
            try:
                buffer = np.empty(patch.nbytes, np.uint8)
            except MemoryError:
                why = f"there is no memory for a patch of {patch.nbytes} bytes"
            else:
                plan, base = plan_of(patch.nbytes, announce.chunk_bytes), self._versions.hold(base)
                into = Chunks(plan, buffer, [None] * plan.count)
                transfer = Transfer(announce, into, now, self._timing, self._keyring, patch, base)
                if patch != announce.patches[0]:
                    transfer.pull()  # only the first patch is pushed
                return transfer
        elif self._accepts_patches and entry.memory is None:
            why = self._why_unusable(entry)
        return Transfer(announce, chunks, now, self._timing, self._keyring, why=why)

    def _base(self, entry: AnnouncedEntry) -> Base | None:
        """Return the base for a patch: the running version, if its bytes were kept; else None."""
        base, running = self._versions.base, self._versions.in_phase["running"]
        if not self._accepts_patches or entry.memory is not None:
            return None
        if base is None or running is None:
            return None
        fits = base.running == running.running and base.layout.id == entry.announce.layout
        return base if fits else None

    def _why_unusable(self, entry: AnnouncedEntry) -> str:
        running = self._versions.in_phase["running"]
        runs = "nothing runs"
        if running:
            runs = f"version {running.key[1]} of epoch {running.key[0]} runs"
        offered = ", ".join(str(p.version) for p in entry.announce.patches)
        kept = "" if self._versions.base is not None else ", and its bytes were not kept"
        return f"{runs} here{kept}; there are patches on {offered}"

    def decode(self, entry: ArrivingEntry) -> list[Effect]:
        """Start to decode a complete patch; return no effect if the decoding has begun already."""
        transfer = entry.transfer
        if transfer.arrival == "decoded" or transfer.base is None:
            return []
        return [Decode(transfer.decode(transfer.base, entry.chunks.memory))]

    def refused(self, refuse: Refuse, now: float) -> list[Effect]:
        """Fetch the whole version, since the publisher has refused to send the patch."""  # D8
        entry = self._versions.find((refuse.epoch, refuse.version), "arriving")
        if entry is None or entry.transfer.patch is None or entry.transfer.arrival == "decoded":
            return []
        return self.give_up(entry, "the publisher does not have this patch", now)

    def give_up(self, entry: ArrivingEntry, why: str, now: float) -> list[Effect]:
        """Fetch the whole version instead of an unusable patch."""  # D5
        old = entry.transfer
        old.revoke()
        if old.base is not None:
            self._versions.release(old.base)
        transfer = Transfer(entry.announce, entry.chunks, now, self._timing, self._keyring, why=why)
        entry.set_transfer(transfer)
        transfer.pull()
        text = f"version {entry.key[1]} of {self._model} is fetched as a whole, not patched: {why}"
        return [Notice("unpatched", text), *reports.fetches(transfer, transfer.wants(now))]


def _builds_on(patch: Patch, running: Running) -> bool:
    base = Running(patch.epoch, patch.version, patch.digest)
    return patch.encoding == DELTA and base == running

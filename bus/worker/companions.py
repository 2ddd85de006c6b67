"""Holds back versions of several models that are published as one, until all are here. (C2)

Such versions are *companions*: the announcement of each names the others. A version stays staged
until it is committed and, for each companion whose model this worker wants, the companion or a
newer version of that model is committed too. Then all become ready, and are applied together.
"""

from collections.abc import Mapping

from ..effects import Effect, Ready
from .version_store import VersionStore, WholeEntry


class Companions:
    """Makes the committed versions of a worker ready once their companions are committed.

    Args:
        stores: The versions of each model that the worker wants.

    Attributes:
        any_waiting: Whether a committed version waited for companions at the last `complete`.
    """

    def __init__(self, stores: Mapping[str, VersionStore]) -> None:
        self._stores, self.any_waiting = stores, False

    def complete(self) -> list[Effect]:
        """Make every committed version ready whose companions are committed."""
        staged = {m: store.in_phase["staged"] for m, store in self._stores.items()}
        ready = {m: entry for m, entry in staged.items() if entry is not None and entry.committed}
        self.any_waiting = False
        # A version that must wait may itself be the companion of another: repeat until none is.
        while waiting := {m: text for m, e in ready.items() if (text := self._missing(e, ready))}:
            for model, text in waiting.items():
                ready.pop(model).set_blocked(text)
                self.any_waiting = True
        if not ready:
            return []
        for model, entry in ready.items():
            entry.set_blocked("")
            self._stores[model].move(entry, "committed")
        first, *others = (entry.staged for entry in ready.values())
        return [Ready(first, tuple(others))]

    def _missing(self, entry: WholeEntry, ready: Mapping[str, WholeEntry]) -> str:
        """Return the text for a companion that the version must wait for; "" if there is none."""
        for model, number in entry.announce.companions.items():
            if model not in self._stores:
                continue
            key, in_phase = (entry.key[0], number), self._stores[model].in_phase
            present = ready.get(model), in_phase["running"], in_phase["ready"]
            if not any(each is not None and each.key >= key for each in present):
                return f"version {number} of {model}, which is published as one with it"
        return ""

"""Companions: versions of several models that are published as one. (C2)

Each names the others in its announcement. It stays staged until it is committed, and so is each of
them that this worker wants, or a newer version of that model. Then they are ready at once, and the
user applies them at once.
"""

from collections.abc import Mapping

from ..effects import Effect, Ready
from .version_store import VersionStore, WholeEntry


class Companions:
    """Makes the committed versions of a worker ready, once their companions are here.

    Args:
        stores: The versions of each model that the worker wants.

    Attributes:
        waited_for: Whether a committed version may wait for companions.
    """

    def __init__(self, stores: Mapping[str, VersionStore]) -> None:
        self._stores, self.waited_for = stores, False

    def complete(self) -> list[Effect]:
        """Make every committed version ready whose companions are here."""
        staged = {m: store.in_phase["staged"] for m, store in self._stores.items()}
        found = {m: entry for m, entry in staged.items() if entry is not None and entry.committed}
        self.waited_for = False
        while lacking := {m: text for m, e in found.items() if (text := self._lacks(e, found))}:
            for model, text in lacking.items():
                found.pop(model).blocked(text)
                self.waited_for = True
        if not found:
            return []
        for model, entry in found.items():
            entry.blocked("")
            self._stores[model].move(entry, "committed")
        first, *others = (entry.staged for entry in found.values())
        return [Ready(first, tuple(others))]

    def _lacks(self, entry: WholeEntry, found: Mapping[str, WholeEntry]) -> str:
        """Return which companion of a version is not here; "" if all are here."""
        for model, number in entry.announce.companions.items():
            if model not in self._stores:
                continue
            key, at = (entry.key[0], number), self._stores[model].in_phase
            here = found.get(model), at["running"], at["ready"]
            if not any(each is not None and each.key >= key for each in here):
                return f"version {number} of {model}, which is published as one with it"
        return ""

"""Logs which tensors lost values, since a narrower dtype cannot hold them."""

import logging

from ...codecs.overflow import LostValues, sentence


class OverflowLog:
    """Logs the tensors of one model that lost values, each tensor once.

    Args:
        log: The logger for warnings.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged = set[str]()

    def note(self, version: str, found: LostValues) -> str:
        """Return a sentence on the values that a version lost; log each tensor only once."""
        new = {name: each for name, each in found.items() if name not in self._logged}
        if new:
            self._logged.update(new)
            self._log.warning(
                "%s: %s; BF16, unlike F16, has the range of F32", version, sentence(new)
            )
        return sentence(found)

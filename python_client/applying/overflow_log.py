"""Logs values that a narrower dtype cannot hold."""

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
        news = {name: each for name, each in found.items() if name not in self._logged}
        if news:
            self._logged.update(news)
            self._log.warning("%s: %s; BF16 has the range of F32", version, sentence(news))
        return sentence(found)

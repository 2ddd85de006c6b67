"""What is logged of values that a narrower dtype cannot hold."""

import logging

from ..codecs.overflow import Found, sentence


class OverflowLog:
    """The tensors of one model whose values were lost so far: the log has each once.

    Args:
        log: Takes the warnings.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged = set[str]()

    def note(self, version: str, found: Found) -> str:
        """Return in words which values a version has lost; log the tensors that are new."""
        news = {name: each for name, each in found.items() if name not in self._logged}
        if news:
            self._logged.update(news)
            self._log.warning("%s: %s; BF16 has the range of F32", version, sentence(news))
        return sentence(found)

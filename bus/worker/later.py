"""When to try a version again that found no room: after ever longer pauses; it is fetched anew."""

from ..limits import Timing


class Later:
    """The version that is put off, if any.

    Args:
        timing: How long to wait.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._key, self._until, self._pause = (0, 0), 0.0, 0.0

    def put_off(self, key: tuple[int, int], now: float) -> None:
        """Leave a version alone for a while, for twice as long as the last time."""
        longer = min(2 * self._pause, self._timing.patience_max)
        self._pause = longer if key == self._key else self._timing.patience
        self._key, self._until = key, now + self._pause

    def is_early(self, epoch: int, version: int, now: float) -> bool:
        """Return whether it is too early to try this version again."""
        return (epoch, version) == self._key and now < self._until

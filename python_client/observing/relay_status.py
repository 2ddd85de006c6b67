"""The status of a relay, as its user and its metrics read it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...bus.publisher.status import HeldVersion


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """What a relay has, and whether the publisher above it answers.

    Attributes:
        upstream: The address of the publisher above.
        joined: Whether the relay has a session with that publisher.
        lost_s: Seconds since that session ended or, if there was none, since the relay's start;
            None: the relay has a session.
        cut_off_s: Seconds since there is no publisher above: `lost_s`, once that is two pings, or
            that of the relay above; None: there is one.
        epoch: The epoch of the publisher above, in this session or the last; 0: there was none.
        versions: By model, the versions that the relay has or that arrive, the oldest first.
        received: By model, the bytes of versions and patches from the publisher above.
    """

    __module__ = "weightbus.types"

    upstream: str
    joined: bool
    lost_s: float | None
    cut_off_s: float | None
    epoch: int
    versions: Mapping[str, tuple[HeldVersion, ...]]
    received: Mapping[str, int]

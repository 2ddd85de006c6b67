"""Defines the status of a relay, which its user and its metrics read."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...bus.publisher.status import HeldVersion


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """The versions that a relay has, and its connection to the publisher above.

    Attributes:
        upstream: The address of the publisher above.
        joined: Whether the relay has a session with that publisher.
        lost_s: Seconds since that session ended or, if there was none, since the relay's start;
            None: the relay has a session.
        cut_off_s: Seconds for which no publisher was above. This is `lost_s`, once that is two ping
            intervals, or the `cut_off_s` of a relay above. None: there is a publisher above.
        epoch: The epoch of the publisher above, in this session or the last; 0: there was none.
        versions: By model, the versions that the relay has or that are arriving, oldest first.
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

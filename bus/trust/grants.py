"""Records what the owner of each key may do: the names it may use, and its role.

Grants may change at any time, so a publisher's sockets and machine share one `Grants` object, in
one thread. This module uses no files and no sockets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["worker", "relay", "observer"]


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of one key.

    Attributes:
        pattern: The name with which the owner of the key may join. It may contain one `*`, which
            stands for any number of characters, including none.
        role: `worker`, `relay` or `observer`. A relay is a worker that may pass versions on to
            workers of its own. An observer may read the roster, and receives no weights, no group
            key and no data connection.
    """

    pattern: str
    role: Role = "worker"

    def fits(self, name: str) -> bool:
        """True if the owner of the key may use this name."""  # K3
        begin, star, end = self.pattern.partition("*")
        if not star:
            return name == begin
        long_enough = len(name) >= len(begin) + len(end)
        return long_enough and name.startswith(begin) and name.endswith(end)

    def admits(self, name: str, *, relay: bool) -> bool:
        """True if the owner of the key may join under this name as a worker, or as a relay.

        A relay's key also admits a worker; a worker's key admits no relay.
        """  # K4, K11
        return self.fits(name) and (self.role == "relay" or (self.role == "worker" and not relay))


class Grants:
    """The grants of all allowed keys, by public key (40 characters of Z85).

    Args:
        by_key: The initial grants.
        own: The grant of the publisher's own key, which is never revoked. Other publishers with
            that key use it to fetch chunks.
    """

    def __init__(self, by_key: Mapping[str, Grant], own: Mapping[str, Grant] | None = None) -> None:
        self._by_key, self._own = by_key, own or {}

    def of(self, key: str) -> Grant | None:
        """Return the grant of a key; None if the key is not allowed."""
        return self._by_key.get(key) or self._own.get(key)

    def may_read(self, name: str, key: str) -> bool:
        """True if the worker with this name and key may receive published data."""
        grant = self.of(key)
        return grant is not None and grant.admits(name, relay=False)

    def replace(self, by_key: Mapping[str, Grant]) -> bool:
        """Replace all grants; return True if a key has lost its grant or has a different one."""
        revoked = any(by_key.get(key) != grant for key, grant in self._by_key.items())
        self._by_key = by_key
        return revoked

"""Which key may do what, where a publisher has keys: the words of it, without files or sockets.

A key is bound to a name, or to all names of one form, and has a role. What is granted may change at
any time: `Grants` is one object that a publisher's sockets and its machine share, in one thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["worker", "observer"]


@dataclass(frozen=True, slots=True)
class Grant:
    """What one key may do.

    Attributes:
        name: Under which name its owner may say hello. At most one `*` in it stands for any
            characters, or none.
        role: An `observer` reads how things stand, and is no worker: it gets no weights, no group
            key and no data connection.
    """

    name: str
    role: Role = "worker"

    def fits(self, name: str) -> bool:
        """Return whether its owner may be called so."""  # K3
        begin, star, end = self.name.partition("*")
        if not star:
            return name == begin
        long_enough = len(name) >= len(begin) + len(end)
        return long_enough and name.startswith(begin) and name.endswith(end)


class Grants:
    """What each key may do, by public key (40 characters of Z85); none but these may do anything.

    Args:
        by_key: What is granted at first.
    """

    def __init__(self, by_key: Mapping[str, Grant]) -> None:
        self._by_key = by_key

    def of(self, key: str) -> Grant | None:
        """Return what a key may do; None: nothing, or nothing any more."""
        return self._by_key.get(key)

    def may_read(self, name: str, key: str) -> bool:
        """Return whether the worker of this name and key may have what is published."""
        grant = self.of(key)
        return grant is not None and grant.role == "worker" and grant.fits(name)

    def replace(self, by_key: Mapping[str, Grant]) -> bool:
        """Grant this from now on, and nothing else; return whether it takes anything away."""
        taken = any(by_key.get(key) != grant for key, grant in self._by_key.items())
        self._by_key = by_key
        return taken

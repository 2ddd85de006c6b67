"""Defines the address of a publisher's HTTP page, and the rules of access to the page.

Clients on this host have access, unless their request names another host: by DNS rebinding, a
foreign page in a local browser could send such a request. Clients on other hosts need a token,
unless the user allows access without a token.
"""

import socket
from dataclasses import dataclass, field

from ...bus.errors import AddressError
from ...bus.net.endpoints import ip_address, is_loopback


@dataclass(frozen=True)
class Http:
    """The address of a page, and who has access.

    Attributes:
        address: `HOST:PORT`; port 0 selects a free port.
        token: The token that a client must send: once as `?token=`, or in each request in the
            header `Authorization: Bearer`. None: no token is needed; `address` must then be local
            or `insecure` true.
        insecure: Whether an address that other hosts can reach is allowed without a token.
        hosts: More host names that requests may use, besides `localhost`, IP addresses and this
            host's name.

    Raises:
        AddressError: The address is invalid, or would give other hosts access without a token.
        ValueError: The token is too short.
    """

    __module__ = "weightbus"

    address: str
    token: str | None = field(default=None, repr=False)  # a traceback or a log may show a repr
    insecure: bool = False
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.token is None or len(self.token) >= 8):
            raise ValueError("a short token can be guessed: give at least 8 characters")
        if self.token is None and not (self.insecure or is_loopback(self.host)):
            raise AddressError(
                f"{self.address}: other hosts can reach {self.host} and would have access: bind to "
                "127.0.0.1, give a token, Http(address, token=...), or pass insecure=True if you "
                "want that"
            )

    @property
    def host(self) -> str:
        """The name or IP address in `address`, without brackets."""
        return self._parts()[0]

    @property
    def port(self) -> int:
        """The port in `address`; 0: any free port."""
        return self._parts()[1]

    def _parts(self) -> tuple[str, int]:
        host, colon, port = self.address.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise AddressError(f"{self.address!r} is not a HOST:PORT, such as 127.0.0.1:8080")
        return host.strip("[]"), int(port)

    def knows(self, host: str) -> bool:
        """Return whether the `Host` of a request is a name of this host, or an IP address."""
        name = host.rpartition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
        own = ("localhost", self.host, socket.gethostname(), *self.hosts)
        return name.lower() in {each.lower() for each in own} or ip_address(name) is not None

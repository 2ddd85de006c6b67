"""Checks and compares endpoints, and derives the data socket's endpoint from the control socket's.

A user gives one address, that of the control socket; the data socket's address follows from it. A
worker replaces the host in the announced data endpoint by the host that its own user gave, so one
publisher can have several names (loopback, a container's name, an address behind a port mapping).
"""

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import AddressError
from ..protocol_limits import TEXT_MAX

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]*\]|[^:/\s]+):(?P<port>\d{1,5}|\*)\Z")
PATH_MAX = 107  # bytes of a path; for a name with @ the kernel allows 108, but libzmq does not
ANYWHERE = "0.0.0.0", "::", "*"  # noqa: S104 - the host of a socket bound at all of our addresses
DATA = ".data"  # what the data socket's path adds to the path of the control socket

_IPC = re.compile(r"ipc://(?P<path>\S+)\Z")


def check(endpoint: str) -> str:
    """Return `endpoint`, which must be TCP with a port, or IPC with a path.

    Raises:
        AddressError: The endpoint is neither TCP with a port nor IPC with a path.
    """
    text = endpoint if isinstance(endpoint, str) else ""  # pyright: ignore
    match = _TCP.match(text)
    if (match is None and _IPC.match(text) is None) or len(text) > TEXT_MAX:
        spaces = "without spaces and " * any(map(str.isspace, text))
        raise AddressError(
            f"{repr(endpoint)[:200]} is not an address of this bus; write tcp://HOST:PORT (port 0: "
            f"any free one) or ipc://PATH, {spaces}in at most {TEXT_MAX} characters"
        )
    path = ipc_path(text) or ""
    nbytes = len(os.fsencode(path))
    if nbytes > PATH_MAX:
        raise AddressError(
            f"{endpoint}: the path has {nbytes} bytes, and a Unix socket's path has at most "
            f"{PATH_MAX}. Give a publisher a path of at most {PATH_MAX - len(DATA)}, since its "
            f'data socket adds {DATA!r}, or of {PATH_MAX} with Settings(data="ipc://...")'
        )
    if match is not None and match["port"] != "*" and int(match["port"]) > 65535:
        raise AddressError(f"{endpoint!r}: a port is at most 65535")
    return endpoint


def check_all(endpoints: str | Sequence[str]) -> tuple[str, ...]:
    """Return the control addresses of a worker: one, or several in order of preference.

    Raises:
        AddressError: An endpoint is invalid, an endpoint is given twice, or there is none.
    """
    given: tuple[Any, ...] = (
        tuple(endpoints) if isinstance(endpoints, list | tuple) else (endpoints,)
    )
    if not given or len({*map(check, given)}) < len(given):
        raise AddressError(f"{given!r}: give one address, or several that differ")
    return given


def beside(control: str) -> str:
    """Return the data socket's default endpoint: `control` with the next port or a suffix.

    If there is no next port, the port is 0, which stands for any free one.
    """
    match = _TCP.match(control)
    if match is None:
        return control + DATA
    port = int(match["port"].replace("*", "0"))
    return f"tcp://{match['host']}:{port + 1 if 0 < port < 65535 else 0}"


def advertised(control: str, data: str) -> str:
    """Return the data endpoint to announce; the host is `*` if it is the control socket's host."""
    one, other = _TCP.match(control), _TCP.match(data)
    if one and other and one["host"] == other["host"]:
        return f"tcp://*:{other['port']}"
    return data


def resolve(data: str, control: str, dialled: str = "", *, any_host: bool = False) -> str:
    """Return the announced data endpoint as this worker can connect to it.

    Args:
        data: The endpoint in the welcome.
        control: The publisher's address, as the user gave it.
        dialled: The publisher's address with a resolved host, which is allowed like `control`.
            Empty: the host is not resolved.
        any_host: Whether the data may be on another host, or at any path. If so, a publisher can
            make this worker connect to any address that the worker can reach.

    Raises:
        AddressError: The announced endpoint is invalid, or not allowed.
    """
    match = _TCP.match(check(data))
    if match is None or match["host"] not in ("*", "0.0.0.0", "[::]"):  # noqa: S104 - a comparison
        if not any_host and not any(_is_beside(data, each) for each in (control, dialled) if each):
            raise AddressError(
                f"the publisher's data is at {data!r}, which is not on the host of its control "
                f"address {control!r} (or, of a path, not beside it): everything is fetched, which "
                "is slower. If that address is right, allow it: Settings(any_data_host=True)"
            )
        return data
    own = _TCP.match(control)
    if own is None:
        raise AddressError(
            f"the publisher's data is at {data!r}, on the host of its control address, but "
            f"{control!r} names no host; give the publisher an address to advertise"
        )
    return f"tcp://{own['host']}:{match['port']}"


def _is_beside(data: str, control: str) -> bool:
    """True if the data endpoint has the control endpoint's host, or its path with a suffix."""
    path, beside_path = ipc_path(control), ipc_path(data)
    if path is not None or beside_path is not None:
        if path is None or beside_path is None:
            return False
        return beside_path.startswith(path) and "/" not in beside_path.removeprefix(path)
    one, other = (
        match["host"].strip("[]") for match in (_TCP.match(data), _TCP.match(control)) if match
    )
    if one.lower() == other.lower() or (is_loopback(one) and is_loopback(other)):
        return True
    address = ip_address(one)
    return address is not None and address == ip_address(other)


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of a TCP endpoint.

    Raises:
        AddressError: The endpoint is not TCP, or its port is `*`.
    """
    match = _TCP.match(endpoint)
    if match is None or match["port"] == "*":
        raise AddressError(f"{endpoint!r} cannot be connected to: it names no host and port")
    return match["host"].strip("[]"), int(match["port"])


def is_local(endpoint: str) -> bool:
    """True if an endpoint can be reached only from this host.

    Raises:
        AddressError: The endpoint is invalid.
    """
    match = _TCP.match(check(endpoint))
    # libzmq accepts names of interfaces.
    return match is None or match["host"] == "lo" or is_loopback(match["host"].strip("[]"))


def is_loopback(host: str) -> bool:
    """True if a host can be reached only from this host."""
    address = ip_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of a host, given without brackets; None if the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def same_place(one: str, other: str) -> bool:
    """True if two endpoints have the same path or port. A port `*` equals no other port."""
    if ipc_path(one) is not None or ipc_path(other) is not None:
        return one == other
    if one.endswith(":*") or other.endswith(":*"):
        return False
    return host_and_port(one)[1] == host_and_port(other)[1]


def leads_to(endpoint: str, bound: str) -> bool:
    """True if a connection from this host to an endpoint reaches the socket bound at `bound`.

    Names are not looked up: unless it is `localhost` or this host's own name, a host name counts
    as another host.
    """
    tcp = all(_TCP.match(check(each)) and not each.endswith(":*") for each in (endpoint, bound))
    if not tcp:
        return endpoint == bound
    (host, port), (own, own_port) = host_and_port(endpoint), host_and_port(bound)
    local = is_loopback(host) or host in (*ANYWHERE, socket.gethostname())
    same = host.lower() == own.lower() or (local and (own in ANYWHERE or is_loopback(own)))
    return same and port == own_port != 0


def for_other_hosts(bound: str, own_host: Callable[[], str]) -> str:
    """Return the address at which other hosts reach the socket that is bound at `bound`.

    Args:
        bound: An endpoint, which may be bound at all addresses of this host.
        own_host: Returns one of these addresses, without brackets; called only if needed.
    """
    if ipc_path(bound) is not None:
        return bound
    host, port = host_and_port(bound)
    if host not in ANYWHERE:
        return bound
    own = own_host()
    return f"tcp://[{own}]:{port}" if ":" in own else f"tcp://{own}:{port}"


def ipc_path(endpoint: str) -> str | None:
    """Return the path of an IPC endpoint; None for any other endpoint."""
    match = _IPC.match(endpoint)
    return match["path"] if match else None


def ipc_name(path: str) -> str:
    """Return the kernel's name for the path of an IPC endpoint.

    A path that begins with @ is a name outside of the file system, as in ZeroMQ.
    """
    return "\0" + path[1:] if path.startswith("@") else path


def dial(endpoint: str, timeout: float) -> socket.socket:
    """Return a connection to an endpoint; `timeout` limits the connect, and each later operation.

    Raises:
        OSError: The connection failed.
        AddressError: The endpoint is TCP and contains no port.
    """
    path = ipc_path(endpoint)
    if path is None:
        found = socket.create_connection(host_and_port(endpoint), timeout)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # messages must not wait
        return found
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout)
        found.connect(ipc_name(path))
    except BaseException:
        found.close()
        raise
    return found

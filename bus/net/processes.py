"""Finds the process on this host that has a connection or an endpoint (on Linux).

When a connection closes, the worker may open another, unless its process has ended. So the
publisher finds out the worker's process, where Linux shows it. Over ipc, Linux names the process
that has connected. Over TCP, a worker reports its pid. But the process of a worker in a container
has another pid on the host, so a pid is accepted only if the process with that pid on this host has
the socket at the other end.

If an endpoint cannot be bound, the error names its holder. The holder of a port may be a listener,
which lasts. Or it is an outgoing connection: the kernel gave it the port, one of its ephemeral
range, until the connection ends.
"""

import contextlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from . import endpoints

FILES_MAX = 4096  # the most files of a process that are examined, which takes some 10 ms
_CREDENTIALS = struct.Struct("=iII")  # Linux's `struct ucred`: process, user, group
_ENDED = "ZXx"  # states of a dead process, whether or not its parent has reaped it
_STATE, _STARTED = 0, 19  # indexes of fields of /proc/PID/stat, counted behind the name
# Linux's NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST and `struct nlmsghdr`; then the
# offset of the inode in a reply, which is that header and a `struct inet_diag_msg`.
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _HEADER = 4, 20, 1, struct.Struct("=IHHII")
_INODE_AT, _REPLY_BYTES = _HEADER.size + 68, 4096
_LISTEN, _TIME_WAIT = 0x0A, 0x06  # states of Linux's TCP
_ACCEPTS = 0x10000  # flag of a listening Unix socket
PROC = Path("/proc/self/net")  # without it, no holder is found
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Process(NamedTuple):
    """A process on this host. The start time tells it from a later process with the same pid."""

    pid: int
    started: str  # start time, as in /proc/PID/stat

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        found = _stat(self.pid)
        return found is None or found[_STATE] in _ENDED or found[_STARTED] != self.started


def process_of(pid: int) -> Process | None:
    """Return the process with this pid; None if there is none, or if it cannot be determined."""
    found = _stat(pid)
    return None if found is None else Process(pid, found[_STARTED])


def peer_process(connection: socket.socket) -> Process | None:
    """Return the process that made a connection over ipc; None if Linux does not show it."""
    with contextlib.suppress(OSError, AttributeError):
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid = _CREDENTIALS.unpack(credentials)[0]
        return process_of(pid) if pid else None  # 0: the process is in an invisible namespace
    return None


def peer_inode(connection: socket.socket) -> int | None:
    """Return the inode of the other end's socket, for a TCP connection within this host.

    Return None if the other end is on another host or closed, or if the kernel cannot be queried
    (`man 7 sock_diag`).
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the last: not Linux
        own, other = connection.getsockname(), connection.getpeername()
        if own[0] != other[0]:  # within a host, both ends have the same address
            return None
        address = ipaddress.ip_address(own[0])
        plain = getattr(address, "ipv4_mapped", None) or address
        family = socket.AF_INET if plain.version == 4 else socket.AF_INET6
        both = plain.packed.ljust(16, b"\0") * 2
        # The address of the other end comes first. Any state, interface and cookie matches.
        request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 2**32 - 1)
        request += struct.pack("!HH", other[1], own[1]) + both + struct.pack("=IQ", 0, 2**64 - 1)
        header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST, 0, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.setblocking(False)  # the reply has arrived once `send` returns
            kernel.send(header + request)
            reply = kernel.recv(_REPLY_BYTES)
        if _HEADER.unpack_from(reply)[1] == _BY_FAMILY:
            return struct.unpack_from("=I", reply, _INODE_AT)[0] or None
    return None


class SocketSearch:
    """Searches for a socket among the first `FILES_MAX` files of a process, step by step.

    Args:
        pid: The process's pid.
        inode: The socket's inode.

    Attributes:
        pid: The argument `pid`.
        found: The process, once the socket was found among its files; None before.
    """

    def __init__(self, pid: int, inode: int) -> None:
        self.pid = pid
        self.found: Process | None = None
        self._files = islice(_files_of(pid), FILES_MAX)
        self._wanted = f"socket:[{inode}]"

    def step(self, count: int) -> bool:
        """Examine at most `count` more files; return whether the search has ended."""
        files = list(islice(self._files, count))
        if self._wanted in files:
            self.found = process_of(self.pid)
        return self.found is not None or len(files) < count


def _files_of(pid: int) -> Generator[str]:
    """Yield what a process's descriptors refer to, as far as this is visible."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:
        for file in files:
            with contextlib.suppress(OSError):  # the descriptor is closed by now
                yield os.readlink(file.path)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, from the state on; None if there is no such process."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text.rpartition(")")[2].split()
    return None


class SocketHolder(NamedTuple):
    """The holder of an endpoint.

    Attributes:
        listens: True for a listener, False for one end of a connection.
        ended: For a connection: whether it is closed, and only kept by the kernel for a minute.
        pid: The process; 0: unknown, as for other users' processes.
        name: The process's name; empty if unknown.
    """

    listens: bool
    ended: bool = False
    pid: int = 0
    name: str = ""

    def __str__(self) -> str:
        if self.ended:
            return "a connection that is over, whose port the kernel keeps for up to a minute"
        who = f"{self.name} (process {self.pid})" if self.pid else "another process"
        return who if self.listens else f"an outgoing connection of {who}"


def holder_of(endpoint: str) -> SocketHolder | None:
    """Return the most permanent holder of an endpoint; None if no holder is visible."""
    path = endpoints.ipc_path(endpoint)
    found = list(_sockets_at_port(endpoint) if path is None else _sockets_at_path(path))
    if not found:
        return None
    listens, ended, inode = min(found, key=lambda one: (not one[0], one[1]))
    pid = _process_of(inode) if inode else 0
    return SocketHolder(listens, ended, pid, _name_of(pid) if pid else "")


def ephemeral_range(endpoint: str) -> str:
    """Return the kernel's range of ephemeral ports, if an endpoint's port is in it; else ""."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _RANGE.read_text().split())
        if first <= endpoints.host_and_port(endpoint)[1] <= last:
            return f"{first} to {last}"
    return ""


def _sockets_at_port(endpoint: str) -> Generator[tuple[bool, bool, int]]:
    """Yield (listens, is closed, inode) for each socket at the port of an endpoint."""
    host, port = endpoints.host_and_port(endpoint)
    for table in ("tcp", "tcp6"):
        for line in _lines(table):
            address, _, written_port = line[1].partition(":")
            if int(written_port, 16) == port and _overlap(host, _address_of(address)):
                state = int(line[3], 16)
                yield state == _LISTEN, state == _TIME_WAIT, int(line[9])


def _sockets_at_path(path: str) -> Generator[tuple[bool, bool, int]]:
    for line in _lines("unix"):
        if len(line) > 7 and line[7] == path and int(line[3], 16) & _ACCEPTS:
            yield True, False, int(line[6])


def _lines(table: str) -> list[list[str]]:
    try:
        text = (PROC / table).read_text(errors="replace")
    except OSError:  # another system, or no IPv6
        return []
    return [line.split() for line in text.splitlines()[1:]]


def _address_of(written: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address that is written as words of 32 bits in native byte order."""
    words = struct.pack(
        f"={len(written) // 8}I", *(int(w, 16) for w in re.findall(".{8}", written))
    )
    address = ipaddress.ip_address(words)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _overlap(host: str, bound: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether a host and a bound address may conflict."""
    if bound.is_unspecified:
        return True
    wanted = endpoints.ip_address(host)  # None: a name, or `*`
    return wanted is None or wanted.is_unspecified or wanted == bound


def _process_of(inode: int) -> int:
    """Return the pid of the process that has a socket; 0 if it is not visible."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return next((pid for pid in pids if f"socket:[{inode}]" in _files_of(pid)), 0)


def _name_of(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"
    return "".join(c if c.isprintable() else "?" for c in name) or "a process"

"""Who has an address that cannot be bound: as Linux tells in /proc, for whoever has to end it.

A port can be taken by somebody who listens there, which lasts; or by the near end of a connection
to elsewhere, which was given that port for as long as it lives, from the range of ports that the
kernel gives out.
"""

import contextlib
import ipaddress
import os
import re
import struct
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from . import endpoints

_LISTEN, _TIME_WAIT = 0x0A, 0x06  # states of Linux's TCP
_ACCEPTS = 0x10000  # a flag of a Unix socket that listens
PROC = Path("/proc/self/net")  # where there is none, nobody is seen
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Holder(NamedTuple):
    """Whoever has an address.

    Attributes:
        listens: Whether somebody listens there; else it is one end of a connection.
        ended: Whether that connection is over, and kept by the kernel for a minute.
        pid: The process; 0: it is not known, which is so for other users' ones.
        name: What it is called; empty where it is not known.
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


def holder_of(endpoint: str) -> Holder | None:
    """Return who has an endpoint, listeners first; None where nobody is seen to."""
    path = endpoints.ipc_path(endpoint)
    found = sorted(_at_port(endpoint) if path is None else _at_path(path), reverse=True)
    if not found:
        return None
    listens, ended, inode = found[0]
    pid = _process_of(inode) if inode else 0
    return Holder(listens, ended, pid, _name_of(pid) if pid else "")


def given_out(endpoint: str) -> str:
    """Return the range of ports that the kernel gives to connections, if a port lies there."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _RANGE.read_text().split())
        if first <= endpoints.host_and_port(endpoint)[1] <= last:
            return f"{first} to {last}"
    return ""


def _at_port(endpoint: str) -> Generator[tuple[bool, bool, int]]:
    """Yield of each socket at a port whether it listens, whether it is over, and its inode."""
    host, port = endpoints.host_and_port(endpoint)
    for table in ("tcp", "tcp6"):
        for line in _lines(table):
            address, _, at = line[1].partition(":")
            if int(at, 16) == port and _overlap(host, _address_of(address)):
                state = int(line[3], 16)
                yield state == _LISTEN, state == _TIME_WAIT, int(line[9])


def _at_path(path: str) -> Generator[tuple[bool, bool, int]]:
    for line in _lines("unix"):
        if len(line) > 7 and line[7] == path and int(line[3], 16) & _ACCEPTS:
            yield True, False, int(line[6])


def _lines(table: str) -> list[list[str]]:
    try:
        text = (PROC / table).read_text(errors="replace")
    except OSError:  # another system, or it has no IPv6
        return []
    return [line.split() for line in text.splitlines()[1:]]


def _address_of(written: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address that is written as words of 32 bits, in this machine's order of bytes."""
    words = struct.pack(
        f"={len(written) // 8}I", *(int(w, 16) for w in re.findall(".{8}", written))
    )
    address = ipaddress.ip_address(words)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _overlap(host: str, bound: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether a host and a bound address are in each other's way, as far as is known."""
    if bound.is_unspecified:
        return True
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:  # a name, or `*`
        return True
    return wanted.is_unspecified or wanted == bound


def _process_of(inode: int) -> int:
    """Return the process that has a socket; 0 if it cannot be seen."""
    wanted = f"socket:[{inode}]"
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it is another user's, or has just ended
            for number in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{process}/fd/{number}") == wanted:
                        return int(process)
    return 0


def _name_of(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"
    return "".join(c if c.isprintable() else "?" for c in name) or "a process"

"""Which process of this host is at the other end of a connection, and whether it has ended.

A connection that is closed may be made anew by a worker that lives; a process that has ended makes
none. So the two are told apart, where Linux lets us see. Over ipc it names the process that has
connected. Over TCP a worker says which one it is, as it is numbered where it runs, which may be a
container: so it counts only if that process, as we number it, has the socket at the other end.
"""

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from .holders import PROC

FILES_MAX = 4096  # of a process that are looked at: some 10 ms
_CREDENTIALS = struct.Struct("=iII")  # Linux's `struct ucred`: process, user, group
_ENDED = "ZXx"  # states of a process that is dead, whether or not its parent has asked yet
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat behind the name


class Process(NamedTuple):
    """A process of this host. Its number may be another's by now, but that one started later."""

    pid: int
    started: str

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        found = _stat(self.pid)
        return found is None or found[_STATE] in _ENDED or found[_STARTED] != self.started


class Ends(NamedTuple):
    """Both ends of a TCP connection within this host, as the kernel writes them."""

    table: str
    there: str
    here: str


def process_of(pid: int) -> Process | None:
    """Return the process of a number; None if there is none, or nothing tells."""
    found = _stat(pid)
    return None if found is None else Process(pid, found[_STARTED])


def connected_by(connection: socket.socket) -> Process | None:
    """Return the process that has made a connection over ipc; None if that cannot be seen."""
    with contextlib.suppress(OSError, AttributeError):
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(told)[0]
        return process_of(pid) if pid else None  # 0: it runs where we do not see it
    return None


def ends_of(connection: socket.socket) -> Ends | None:
    """Return the ends of a TCP connection; None if the other one is not of this host, or gone."""
    with contextlib.suppress(OSError, ValueError):
        here, there = connection.getsockname(), connection.getpeername()
        if here[0] == there[0]:  # a host speaks to itself from the address that it speaks to
            address = ipaddress.ip_address(here[0])
            plain = getattr(address, "ipv4_mapped", None) or address
            written = _written(plain.packed)
            table = "tcp" if plain.version == 4 else "tcp6"
            return Ends(table, f"{written}:{there[1]:04X}", f"{written}:{here[1]:04X}")
    return None


def inodes_of(wanted: Collection[Ends]) -> dict[Ends, str]:
    """Return the inodes of the sockets at the other ends, as far as they are of this host."""
    found: dict[Ends, str] = {}
    for table in {ends.table for ends in wanted}:
        lines = ""
        with contextlib.suppress(OSError):
            lines = (PROC / table).read_text()
        for line in lines.splitlines():
            fields = line.split(None, 10)
            ends = Ends(table, *fields[1:3])
            if ends in wanted:
                found[ends] = fields[9]
    return found


def process_with(pid: int, inode: str) -> Process | None:
    """Return a process, if it has the socket of an inode, and that can be seen."""
    wanted = f"socket:[{inode}]"
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:
        for file in islice(files, FILES_MAX):
            with contextlib.suppress(OSError):  # it is closed by now
                if os.readlink(file.path) == wanted:
                    return process_of(pid)
    return None


def _written(packed: bytes) -> str:
    """Return an address in words of 32 bits, in this machine's order of bytes."""
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))


def _stat(pid: int) -> list[str] | None:
    """Return what the kernel says of a process, from its state on; None: there is none."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text.rpartition(")")[2].split()
    return None

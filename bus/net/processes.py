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
from itertools import islice
from pathlib import Path
from typing import NamedTuple

FILES_MAX = 4096  # of a process that are looked at: some 10 ms
_CREDENTIALS = struct.Struct("=iII")  # Linux's `struct ucred`: process, user, group
_ENDED = "ZXx"  # states of a process that is dead, whether or not its parent has asked yet
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat behind the name
# Linux's NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, `struct nlmsghdr`; and where
# `struct inet_diag_msg`, which follows that, has the inode.
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _HEADER = 4, 20, 1, struct.Struct("=IHHII")
_INODE_AT, _TOLD_BYTES = _HEADER.size + 68, 4096


class Process(NamedTuple):
    """A process of this host. Its number may be another's by now, but that one started later."""

    pid: int
    started: str

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        found = _stat(self.pid)
        return found is None or found[_STATE] in _ENDED or found[_STARTED] != self.started


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


def inode_of(connection: socket.socket) -> int | None:
    """Return the inode of the socket at the other end of a connection over TCP within this host.

    None: that end is elsewhere, or gone, or the kernel cannot be asked (`man 7 sock_diag`).
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the last: not Linux
        here, there = connection.getsockname(), connection.getpeername()
        if here[0] != there[0]:  # a host speaks to itself from the address that it speaks to
            return None
        address = ipaddress.ip_address(here[0])
        plain = getattr(address, "ipv4_mapped", None) or address
        family = socket.AF_INET if plain.version == 4 else socket.AF_INET6
        both = plain.packed.ljust(16, b"\0") * 2
        # What that end calls its own comes first. Of any state, interface and cookie.
        asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 2**32 - 1)
        asked += struct.pack("!HH", there[1], here[1]) + both + struct.pack("=IQ", 0, 2**64 - 1)
        header = _HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST, 0, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.setblocking(False)  # it has answered when it was asked
            kernel.send(header + asked)
            told = kernel.recv(_TOLD_BYTES)
        if _HEADER.unpack_from(told)[1] == _BY_FAMILY:
            return struct.unpack_from("=I", told, _INODE_AT)[0] or None
    return None


def process_with(pid: int, inode: int) -> Process | None:
    """Return a process, if it has the socket of an inode, and that can be seen."""
    wanted = f"socket:[{inode}]"
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:
        for file in islice(files, FILES_MAX):
            with contextlib.suppress(OSError):  # it is closed by now
                if os.readlink(file.path) == wanted:
                    return process_of(pid)
    return None


def _stat(pid: int) -> list[str] | None:
    """Return what the kernel says of a process, from its state on; None: there is none."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text.rpartition(")")[2].split()
    return None

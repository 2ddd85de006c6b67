"""Ports that stay free from one bind to the next: the kernel gives them to no connection."""

import contextlib
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 100


def lasting_ports(count: int) -> list[int]:
    """Return `count` adjacent free ports, none of which is in the kernel's ephemeral range."""
    end = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32768
    for _ in range(TRIES):
        first = random.randrange(10_000, end - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                probe = held.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise AssertionError(f"no {count} ports are free below {end}")


def lasting_address() -> str:
    """Return an address that can be bound again later; the next port is free for data."""
    return f"tcp://127.0.0.1:{lasting_ports(2)[0]}"

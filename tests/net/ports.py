"""Ports that stay free between two who bind them: connections are never given these."""

import contextlib
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 100


def lasting_ports(count: int) -> list[int]:
    """Return so many neighbours, none of which the kernel gives to anybody who asks for any."""
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
    """Return an address to come back to, beside which is room for data."""
    return f"tcp://127.0.0.1:{lasting_ports(2)[0]}"

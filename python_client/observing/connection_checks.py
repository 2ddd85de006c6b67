"""Checks this host and an address for problems that keep a bus from working, and gives advice.

`examine` checks this host: descriptors, memory, socket buffers and the compiled helper. `reach`
checks what kind of peer answers at an address, by its first bytes; no message of the bus is sent.
"""

import errno
import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ...bus.errors import AddressError, KeysError
from ...bus.limits import DESCRIPTORS_RESERVED
from ...bus.net import endpoints
from ...bus.net.descriptors import RAISE, used_by
from ...bus.net.processes import holder_of
from ...bus.trust import curve
from ...codecs import native
from ...codecs.words import printable

DESCRIPTORS_MIN = 1024  # with fewer, a publisher can have only a few hundred workers
WORKER_DESCRIPTORS = 2  # descriptors per worker: control and data connection
BUFFER_MIN = 4 * 2**20  # bytes in flight at 1 GB/s and a round trip of 4 ms
MEMORY_MIN = 2**28  # bytes; a Python process with numpy takes most of this
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

GREETING_BYTES = 64  # bytes of a ZMTP greeting
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"  # ZMTP 2 and later (ZeroMQ RFC 23)
MAJOR, MECHANISM = 10, slice(12, 32)  # offsets of version and security mechanism in a greeting
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
COMMAND = 4  # the flag of a frame that is a ZMTP command
SHOWN = 32  # bytes of another protocol that an error text quotes
OTHERS = {
    b"HTTP": "a web server: the dashboard and the metrics have ports of their own",
    b"SSH-": "an SSH server",
    b"\x15\x03": "a server that speaks TLS",
}

Severity = Literal["well", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        about: The subject, as a fixed word such as `memory`.
        state: `well`: no problem. `note`: works, but could be better. `problem`: does not work.
        text: The result, as a sentence.
        advice: What to do; empty if there is nothing to do.
    """

    about: str
    state: Severity
    text: str
    advice: str = ""

    def fields(self) -> dict[str, str]:
        """Return the finding as a dict, for JSON."""
        return asdict(self)


def examine() -> list[Finding]:
    """Check this host; return the findings, except where the system has no data."""
    found = (_descriptors(), _memory(), _address_space(), _shared(), _native(), _curve())
    return [*(f for f in found if f is not None), *_buffers()]


def _descriptors() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    workers = max(0, limit - DESCRIPTORS_RESERVED) // WORKER_DESCRIPTORS
    text = f"{limit} descriptors for each process: a publisher has room for some {workers} workers"
    if limit >= DESCRIPTORS_MIN:
        return Finding("descriptors", "well", text)
    advice = "`ulimit -n 65536` where it is started, LimitNOFILE= in systemd, --ulimit in Docker"
    return Finding("descriptors", "problem", text, advice)


def available() -> int | None:
    """Return the bytes of memory that a process here can still allocate; None if unknown."""
    of_host = [line for line in _lines(PROC / "meminfo") if line.startswith("MemAvailable:")]
    free = [*(1024 * int(line.split()[1]) for line in of_host), *_free_in_cgroup()]
    return min(free) if free else None


def _free_in_cgroup() -> Iterator[int]:
    # Yield the free bytes of the process's control group, in version 2 or 1 of their interface.
    for limit_file, used_file, stat_file, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, used = _lines(CGROUP / limit_file), _lines(CGROUP / used_file)
        if limit and used and limit[0].strip().isdigit():
            # The page cache counts as used, but the kernel reclaims it on demand.
            stats = dict(line.split(maxsplit=1) for line in _lines(CGROUP / stat_file))
            yield max(0, int(limit[0]) - max(0, int(used[0]) - int(stats.get(cache_key, 0))))


def _memory() -> Finding | None:
    free = available()
    if free is None:
        return None
    text = f"{free / 2**30:.1f} GiB of memory are free here (or in this container)"
    if free >= MEMORY_MIN:
        return Finding("memory", "well", text)
    advice = (
        "a publisher holds one copy of each model, two during a publish; a worker holds one copy "
        "besides its model: end other processes, or raise the container's limit"
    )
    return Finding("memory", "problem", text, advice)


def room_for(name: str, nbytes: int) -> Finding | None:
    """Return whether a version of a model fits into free memory, as a finding; None if unknown."""
    free = available()
    if free is None or not nbytes:
        return None
    text = f"a version of {name} has {nbytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free"
    if free >= nbytes:
        return Finding("memory", "well", f"{text} here")
    advice = "a worker here would answer `no-memory`: free some, or let it read shared memory"
    return Finding("memory", "problem", f"{text} here", advice)


def _address_space() -> Finding | None:
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    if not finite:
        return None
    text = f"a process may have {min(finite) / 2**30:.1f} GiB of address space (ulimit -v, -d)"
    advice = "mapped versions count, too: set `ulimit -v unlimited`, or six times a model's size"
    return Finding("address space", "note", text, advice)


def _shared() -> Finding:
    # Return the finding whether shared memory works.
    try:
        descriptor = os.memfd_create("weightbus-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, 4096)
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        text = f"memory cannot be shared with other processes here: {error}"
        advice = (
            "workers on this host fetch over the network, which costs more copies: a container "
            "may forbid memfd_create (seccomp), or have no memory left"
        )
        return Finding("shared memory", "note", text, advice)
    return Finding("shared memory", "well", "memory can be shared with workers on this host")


def _native() -> Finding:
    if native.BUILT:
        return Finding("native helper", "well", native.description())
    advice = f"unset {native.CHOICE}" if os.environ.get(native.CHOICE) == "0" else ""
    advice = advice or "install a C compiler, then weightbus again: without it, checksums are slow"
    return Finding("native helper", "note", native.description(), advice)


def _curve() -> Finding | None:
    try:
        curve.check_curve()
    except KeysError as error:
        text = "without keys, every peer that can reach a publisher may connect to it"
        return Finding("keys", "note", str(error), text)
    return None


def _buffers() -> Iterator[Finding]:
    # Yield the findings whether the kernel's socket buffers are large enough.
    for name, what in (("tcp_rmem", "receiving"), ("tcp_wmem", "sending")):
        lines = _lines(PROC / "sys" / "net" / "ipv4" / name)
        if not lines:
            continue
        limit = int(lines[0].split()[2])
        text = f"buffers of sockets for {what} grow up to {limit / 2**20:.1f} MiB (net.ipv4.{name})"
        if limit >= BUFFER_MIN:
            yield Finding("socket buffers", "well", text)
            continue
        least, usual, _ = lines[0].split()
        advice = f"on long links: sysctl -w 'net.ipv4.{name}={least} {usual} {4 * BUFFER_MIN}'"
        yield Finding("socket buffers", "note", text, advice)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def reach(address: str, *, keyed: bool, timeout: float) -> list[Finding]:
    """Connect to an address, and check whether a control socket answers; return the findings.

    If a check fails, the last finding is a problem.

    Args:
        address: The address of the control socket.
        keyed: Whether this side has keys.
        timeout: Seconds for the whole check.
    """
    until = time.monotonic() + timeout
    try:
        connection = endpoints.dial(address, timeout)
    except ConnectionResetError as error:  # the peer accepted, and closed at once
        return [*_listener_descriptors(address), _closed(address, error)]
    except (OSError, AddressError) as error:
        return [_unreachable(address, error, timeout)]
    with connection:
        port = Finding("port", "well", f"{address} can be connected to")
        in_use = _listener_descriptors(address)
        try:
            return [port, *in_use, *_greet(connection, address, until, keyed=keyed)]
        except TimeoutError:
            text = f"{address} takes connections, and says nothing within {timeout:g} s"
            advice = (
                "the port belongs to another program, or its process is stopped or very busy, or a "
                "proxy answers for a publisher that has ended"
            )
            return [*in_use, Finding("port", "problem", text, advice)]
        except OSError as error:
            return [*in_use, _closed(address, error)]


def _closed(address: str, error: OSError) -> Finding:
    text = f"{address} takes connections, and closes them at once: {error}"
    advice = (
        "too many new connections from this host, a proxy in between, or a publisher that has no "
        "descriptors left (its log names `ulimit -n`): try again in a minute"
    )
    return Finding("port", "problem", text, advice)


def _listener_descriptors(address: str) -> list[Finding]:
    """Return a finding if the listening process is on this host and has no descriptors left."""
    holder = holder_of(address) if _is_here(address) else None
    used = used_by(holder.pid) if holder is not None and holder.pid else None
    if used is None or used[0] < used[1] - DESCRIPTORS_RESERVED:
        return []
    text = (
        f"{holder} has {used[0]:,} of {used[1]:,} descriptors in use, and rejects all connections: "
        f"it keeps {DESCRIPTORS_RESERVED} in reserve"
    )
    return [Finding("descriptors", "problem", text, f"{RAISE}; or make it close files")]


def _is_here(address: str) -> bool:
    """Return whether an address is one of this host's, without connecting to the address."""
    if endpoints.ipc_path(address) is not None:
        return True
    host, port = endpoints.host_and_port(address)
    try:
        family, kind, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(found)  # a UDP socket sends nothing when it connects
            return bool(probe.getsockname()[0] == probe.getpeername()[0])
    except OSError:
        return False


def _unreachable(address: str, error: Exception, timeout: float) -> Finding:
    # Return the finding for an address that cannot be connected to.
    number = getattr(error, "errno", None)
    text = f"{address} cannot be connected to: {error}"
    if isinstance(error, socket.gaierror):
        advice = "no such host is known here: check its name, and the name service of a container"
    elif number == errno.ECONNREFUSED and re.match(r"tcp://(0\.0\.0\.0|\[::\]):", address):
        advice = (
            "a publisher binds to this address to accept connections from all hosts, but for a "
            "worker it is the worker's own host: give the name or address of the publisher's host"
        )
    elif number == errno.ECONNREFUSED:
        advice = (
            "no process listens there: is the publisher running, on that port, and on that address "
            "(127.0.0.1 can be reached from its own host only; 0.0.0.0 is for the publisher alone)?"
        )
    elif number == errno.ENOENT:
        advice = "there is no such socket: the publisher does not run, or in another container"
    elif number == errno.EACCES:
        advice = "the socket belongs to another user: run this as that user"
    elif isinstance(error, TimeoutError):
        text = f"{address} has not answered a connection within {timeout:g} s"
        advice = "a firewall drops the connection, or the host is down: open this port and the "
        advice += "next one, which is for data"
    else:
        advice = "check the address, and the network to that host"
    return Finding("port", "problem", text, advice)


def _greet(connection: socket.socket, address: str, until: float, *, keyed: bool) -> list[Finding]:
    # Exchange ZMTP greetings with the peer; return the findings.
    mechanism = b"CURVE" if keyed else b"NULL"
    # Do not send the mechanism yet: a peer that rejects it closes before it sends its own greeting.
    connection.sendall(SIGNATURE + b"\x03\x00")
    greeting = _receive(connection, GREETING_BYTES, until)
    if not greeting.startswith(SIGNATURE[:1]) or greeting[9:10] != SIGNATURE[9:]:
        return [_other_protocol(address, greeting)]
    if len(greeting) < GREETING_BYTES or greeting[MAJOR] < 3:
        version = greeting[MAJOR] if len(greeting) > MAJOR else 1
        text = f"{address} speaks ZMTP {version}, which is too old"
        return [
            Finding("protocol", "problem", text, "it is not a publisher, or a proxy is in between")
        ]
    theirs = greeting[MECHANISM].rstrip(b"\0").decode("ascii", "replace")
    if theirs != mechanism.decode():
        return [_wrong_security(address, printable(theirs), keyed=keyed)]
    if keyed:
        return [Finding("keys", "well", "both sides have keys")]
    rest = mechanism.ljust(20, b"\0") + bytes(32)
    connection.sendall(rest + bytes([COMMAND, len(READY)]) + READY)
    kind = _socket_type(connection, until)
    if kind not in (b"ROUTER", b""):
        shown = printable(kind.decode("ascii", "replace"))
        text = f"{address} is not a control socket: a {shown} socket answers there"
        advice = (
            f"a publisher's data socket is one port above its address{_control_hint(address)}: "
            "give the publisher's address"
        )
        if kind not in (b"PUB", b"XPUB"):
            advice = "another program speaks ZeroMQ there: give a publisher's address"
        return [Finding("protocol", "problem", text, advice)]
    return [Finding("protocol", "well", "ZeroMQ answers there, without keys")]


def _control_hint(address: str) -> str:
    """Return a hint, in parentheses: the control address that belongs to a data address."""
    if endpoints.ipc_path(address) is not None:
        return ""
    port = endpoints.host_and_port(address)[1]
    return f" (perhaps {address.removesuffix(str(port))}{port - 1})"


def _other_protocol(address: str, received: bytes) -> Finding:
    peer = next((name for head, name in OTHERS.items() if received.startswith(head)), "")
    shown = printable(received[:SHOWN].decode("utf-8", "replace")) or received[:SHOWN].hex()
    text = f"{address} speaks another protocol: " + (peer or f"it says '{shown}'")
    if not received:
        text = f"{address} closes connections that speak ZeroMQ"
    return Finding("protocol", "problem", text, "give the address of a publisher's control socket")


def _wrong_security(address: str, theirs: str, *, keyed: bool) -> Finding:
    if keyed:
        text = f"{address} speaks without keys ({theirs}), and there are keys here"
        advice = "start the publisher with keys=; or remove keys=, --keys and WEIGHTBUS_KEYS here"
    else:
        text = f"{address} asks for keys ({theirs}), and there are none here"
        advice = (
            "pass keys= or --keys a key file from `weightbus keygen`: a worker's file or, to only "
            "observe, one made with --observer"
        )
    return Finding("keys", "problem", text, advice)


def _socket_type(connection: socket.socket, until: float) -> bytes:
    """Return the socket type in the peer's READY command; empty if the peer sends none."""
    head = _receive(connection, 2, until)
    if len(head) < 2 or not head[0] & COMMAND:
        return b""
    ready = _receive(connection, head[1], until)
    _, found, rest = ready.partition(b"\x0bSocket-Type")
    return rest[4 : 4 + int.from_bytes(rest[:4], "big")] if found else b""


def _receive(connection: socket.socket, count: int, until: float) -> bytes:
    """Receive `count` bytes; fewer if the peer closes, or if the first byte is not ZMTP's."""
    received = b""
    zmtp = (SIGNATURE[0], COMMAND, READY[0])
    while len(received) < count and (not received or received[0] in zmtp):
        connection.settimeout(max(0.01, until - time.monotonic()))
        piece = connection.recv(count - len(received))
        if not piece:
            break
        received += piece
    return received

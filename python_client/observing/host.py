"""What of this host a bus needs: descriptors, memory, buffers of sockets, and what is compiled."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ...bus.errors import KeysError
from ...bus.limits import DESCRIPTORS_RESERVED
from ...bus.trust import curve
from ...codecs import native
from .findings import Finding

DESCRIPTORS_MIN = 1024  # below it a publisher has room for a few hundred workers at most
WORKER_DESCRIPTORS = 2  # that each worker takes at its publisher: control, and data
BUFFER_MIN = 4 * 2**20  # bytes on their way: 1 GB/s at a round trip of 4 ms
MEMORY_MIN = 2**28  # of which a process of Python with numpy leaves little
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def examine() -> list[Finding]:
    """Look at this host; of a system that tells nothing, nothing is told."""
    found = (_descriptors(), _memory(), _address_space(), _shared(), _native(), _curve())
    return [*(f for f in found if f is not None), *_buffers()]


def _descriptors() -> Finding:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = max(0, most - DESCRIPTORS_RESERVED) // WORKER_DESCRIPTORS
    text = f"{most} descriptors for each process: a publisher has room for some {room} workers"
    if most >= DESCRIPTORS_MIN:
        return Finding("descriptors", "well", text)
    advice = "`ulimit -n 65536` where it is started, LimitNOFILE= in systemd, --ulimit in Docker"
    return Finding("descriptors", "problem", text, advice)


def available() -> int | None:
    """Return the bytes of memory that a process here can still have; None: nobody says."""
    found = [*_free_of_host(), *_free_of_group()]
    return min(found) if found else None


def _free_of_host() -> Iterator[int]:
    for line in _lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _free_of_group() -> Iterator[int]:
    for most, used, stat, idle in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, now = _lines(CGROUP / most), _lines(CGROUP / used)
        if limit and now and limit[0].strip().isdigit():
            # What was read from files counts as used, and is given up as soon as others need it.
            stats = dict(line.split(maxsplit=1) for line in _lines(CGROUP / stat))
            yield max(0, int(limit[0]) - max(0, int(now[0]) - int(stats.get(idle, 0))))


def _memory() -> Finding | None:
    free = available()
    if free is None:
        return None
    text = f"{free / 2**30:.1f} GiB of memory are free here (or in this container)"
    if free >= MEMORY_MIN:
        return Finding("memory", "well", text)
    advice = (
        "a publisher holds a copy of each model, two while one is on its way; a worker one beside "
        "its own: end something, or raise the container's limit"
    )
    return Finding("memory", "problem", text, advice)


def room_for(name: str, nbytes: int) -> Finding | None:
    """Say whether a version of a model would find room here; None: nobody can tell."""
    free = available()
    if free is None or not nbytes:
        return None
    text = f"a version of {name} has {nbytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free"
    if free >= nbytes:
        return Finding("memory", "well", f"{text} here")
    advice = "a worker on this host would answer `no-memory`: free some, or read shared memory"
    return Finding("memory", "problem", f"{text} here", advice)


def _address_space() -> Finding | None:
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    if not finite:
        return None
    text = f"a process may have {min(finite) / 2**30:.1f} GiB of address space (ulimit -v, -d)"
    advice = "mapped versions count there too: `ulimit -v unlimited`, or six times a model"
    return Finding("address space", "note", text, advice)


def _shared() -> Finding:
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
        )
        advice += "may forbid memfd_create (seccomp), or have no memory left"
        return Finding("shared memory", "note", text, advice)
    return Finding("shared memory", "well", "memory can be shared with workers on this host")


def _native() -> Finding:
    if native.BUILT:
        return Finding("native helper", "well", native.description())
    advice = f"unset {native.CHOICE}" if os.environ.get(native.CHOICE) == "0" else ""
    advice = advice or "install a C compiler, and weightbus again: checksums are slower without"
    return Finding("native helper", "note", native.description(), advice)


def _curve() -> Finding | None:
    try:
        curve.check_curve()
    except KeysError as error:
        return Finding("keys", "note", str(error), "without, everybody who reaches it is let in")
    return None


def _buffers() -> Iterator[Finding]:
    for name, what in (("tcp_rmem", "receiving"), ("tcp_wmem", "sending")):
        lines = _lines(PROC / "sys" / "net" / "ipv4" / name)
        if not lines:
            continue
        most = int(lines[0].split()[2])
        text = f"buffers of sockets for {what} grow up to {most / 2**20:.1f} MiB (net.ipv4.{name})"
        if most >= BUFFER_MIN:
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

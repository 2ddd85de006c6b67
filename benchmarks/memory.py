"""How much memory a process has, and had at most, as the kernel counts it."""

from pathlib import Path


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes that were in memory since the start, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Forget the peak so far."""
    Path("/proc/self/clear_refs").write_text("5")


def available() -> int:
    """Return the bytes that new processes can have without swapping."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _status(field: str) -> int:
    return _field(Path("/proc/self/status"), field)


def _field(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{file} has no {field}: these measurements need Linux")

"""What the numbers were measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import zmq

PACKAGES = ("numpy", "torch", "tensordict", "pyzmq", "crc32c", "msgspec")


def describe() -> dict[str, str]:
    """Return the machine and the versions, each under a name."""
    loads = os.getloadavg()
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_total_memory() / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libzmq": zmq.zmq_version(),
        "load before the run": " ".join(f"{load:.2f}" for load in loads),
        **{package: _version(package) for package in PACKAGES},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

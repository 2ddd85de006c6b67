"""Describe the machine on which the benchmarks run."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import zmq

from weightbus.codecs import native

PACKAGES = ("numpy", "torch", "tensordict", "pyzmq", "crc32c", "msgspec")
FEATURES = ("sse4_2", "pclmulqdq", "avx2", "bmi2", "avx512f", "avx512vl", "vpclmulqdq", "crc32")


def describe() -> dict[str, str]:
    """Return properties of the machine and versions of software, by name."""
    loads = os.getloadavg()
    return {
        "weightbus": native.description(),
        "processor": _processor(),
        "instructions": _instructions(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_total_memory() / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "huge pages": _huge_pages(),
        "libzmq": zmq.zmq_version(),
        "load before the run": " ".join(f"{load:.2f}" for load in loads),
        **{package: _version(package) for package in PACKAGES},
    }


def _processor() -> str:
    return _of_the_processor("model name") or platform.machine()


def _instructions() -> str:
    """Return the processor's features that the helper in C may use."""
    features = {*_of_the_processor("flags").split(), *_of_the_processor("Features").split()}
    return " ".join(name for name in FEATURES if name in features) or "none that are used"


def _of_the_processor(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _huge_pages() -> str:
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", file.read_text()) if file.exists() else None
    return chosen[1] if chosen else "none"


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

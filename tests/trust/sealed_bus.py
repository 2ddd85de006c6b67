"""Keys for tests and benchmarks that publish sealed."""

from pathlib import Path

from weightbus.bus.trust.keys import WorkerKeys, generate

ANYBODY = "*"


def keys_in(folder: Path) -> tuple[Path, WorkerKeys]:
    """Make a publisher's folder of keys, and one pair for workers of any name."""
    generate(folder, {ANYBODY: "worker"})
    return folder, WorkerKeys.read(folder, "anybody")

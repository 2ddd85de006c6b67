"""A clone of this checkout as git would make it, with what is not committed yet."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60  # seconds


def names() -> list[str]:
    """Return the files that git knows, and those not committed yet."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(  # noqa: S603
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    # else a file is deleted, and not committed
    return [name for name in filter(None, done.stdout.split("\0")) if (ROOT / name).exists()]


def clone(into: Path) -> Path:
    """Copy what git knows, and nothing that was built; return the folder, called `weightbus`."""
    for name in names():
        path = into / "weightbus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, path, follow_symlinks=False)
    return into / "weightbus"

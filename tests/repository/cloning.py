"""A clone of this checkout as git would make it, with what is not committed yet."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60  # seconds


def clone(into: Path) -> Path:
    """Copy what git knows, and nothing that was built; return the folder, called `weightbus`."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(  # noqa: S603
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    for name in filter(None, done.stdout.split("\0")):
        path = into / "weightbus" / name
        if (ROOT / name).exists():  # else it is deleted, and not committed
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, path, follow_symlinks=False)
    return into / "weightbus"

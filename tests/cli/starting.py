"""Python in a process of its own, until that ends."""

import subprocess
import sys
from typing import Any


def python(
    *words: object, code: int = 0, timeout: float = 60.0, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run Python with these words; return what it said, once it has ended with this exit code."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(  # noqa: S603 - our own code
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done

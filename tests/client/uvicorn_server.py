"""A server of uvicorn in a process of its own."""

import re
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

SECONDS = 30.0  # in which it ends once it is asked to


@contextmanager
def uvicorn_server(command: Sequence[str], **popen: Any) -> Generator[str]:
    """Run a command that serves on a free port of this host; yield where it does."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **popen) as process:  # noqa: S603 - our own code
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"http://127\.0\.0\.1:\d+", said)) is None:
                line = process.stderr.readline()
                assert line, said
                said += line
            # What it says later has to go somewhere.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[0]
        finally:
            process.terminate()
            process.wait(SECONDS)

"""The languages: how a driver is built and found, and what a client declares it cannot do."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD_SECONDS = 900.0
LAST_LINES = 15


class NotBuiltError(Exception):
    """A driver could not be built."""


@dataclass(frozen=True, slots=True)
class Language:
    """One row.

    Attributes:
        key: What it is called on the command line.
        title: What it is called in tables.
        folder: Where the client lies; empty: it needs no building.
        tools: What its build needs on the path.
        unsupported: By scenario or table of the vectors, why the client cannot do it.
        root: The checkout that has the client.
    """

    key: str
    title: str
    folder: str
    tools: tuple[str, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict[str, str])
    root: Path = ROOT

    @property
    def command(self) -> list[str]:
        """The driver."""
        if not self.folder:
            driver = self.root / "tests" / "conformance" / "python_driver.py"
            return ["env", f"PYTHONPATH={self.root / 'src'}", sys.executable, str(driver)]
        return [str(self.root / self.folder / "build" / "driver")]

    def missing(self) -> str:
        """Say what is missing for a build; nothing if all is there."""
        if self.folder and not (self.root / self.folder / "Makefile").is_file():
            return f"there is no {self.folder}/Makefile"
        lacking = [tool for tool in self.tools if shutil.which(tool) is None]
        return f"not installed: {', '.join(lacking)}" if lacking else ""

    def build(self) -> None:
        """Build the driver.

        Raises:
            NotBuiltError: What the build said last.
        """
        if not self.folder:
            return
        try:
            done = subprocess.run(  # noqa: S603 - a Makefile of ours
                ["make", "-C", str(self.root / self.folder), "driver"],  # noqa: S607
                # `make chaos SOURCES=1` must not replace SOURCES in a client's Makefile
                env={name: text for name, text in os.environ.items() if name != "MAKEFLAGS"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=BUILD_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise NotBuiltError(
                f"make driver took more than {BUILD_SECONDS:.0f} s in {self.folder}"
            ) from None
        if done.returncode:
            words = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
            raise NotBuiltError(f"make driver failed in {self.folder}:\n{words}")
        if not Path(self.command[0]).is_file():
            raise NotBuiltError(f"make driver in {self.folder} has made no {self.command[0]}")


NO_FLOCK = "Node has no flock, so this client never uses shared memory"
SHARED_MEMORY = (
    "segments.json",
    "shared-memory",
    "shared-memory-overtaken",
    "shared-memory-overwritten",
    "patched-beside-shared-memory",
)
NO_MAPPING = {"mapping.json": "without the feature `mapping`: memory is mapped by the first copy"}
NO_CHECKING = {"checking.json": "without the feature `checking`: it cannot be verified"}
NO_SOURCES = dict.fromkeys(
    ("sources.json", "sources", "keys-sources"),
    "without sources: all chunks come from its publisher",
)

OF_CLIENTS = (  # whose own tests play them: a driver is a worker without memory
    "ties.json",
    "observing.json",
    "below.json",
    "parts.json",
    "publisher_phases.json",
    "publisher_sequences.json",
)
RUST_INSIDE = {
    table.name: "the Rust client inside, whose driver answers them"
    for table in (ROOT / "tests" / "vectors").glob("*.json")
    if table.name not in OF_CLIENTS
}

LANGUAGES = (
    Language("python", "Python", ""),
    Language("cpp", "C++", "cpp_client", ("make", "cargo", "cmake", "c++"), RUST_INSIDE),
    Language(
        "node",
        "TypeScript",
        "node_client",
        ("make", "node", "npm"),
        dict.fromkeys(SHARED_MEMORY, NO_FLOCK) | NO_MAPPING | NO_CHECKING | NO_SOURCES,
    ),
    Language(
        "rust",
        "Rust",
        "rust_client",
        ("make", "cargo"),
        NO_MAPPING | NO_CHECKING,
    ),
    Language("c", "C", "c_client", ("make", "cargo", "cc"), RUST_INSIDE),
    Language("go", "Go", "go_client", ("make", "go"), NO_CHECKING | NO_SOURCES),
    Language("java", "Java", "java_client", ("make", "cargo", "javac"), RUST_INSIDE),
)

WITH_SOURCES = ("sources", "keys-sources", "source-dies")

# Of scenarios, what the Rust core cannot do as a publisher.
CORE_LACKS: Mapping[str, str] = {
    **dict.fromkeys(SHARED_MEMORY[1:], "it has no shared memory"),
    **dict.fromkeys(WITH_SOURCES, "it publishes no version of which other publishers have chunks"),
    "published-as-one": "it publishes one model at a time",
}


def chosen(keys: str | None, root: Path = ROOT) -> list[Language]:
    """Return the languages of these keys, separated by commas; all if there are none.

    `root`: the checkout that has their clients.

    Raises:
        ValueError: There is no such language.
    """
    known = {language.key: replace(language, root=root) for language in LANGUAGES}
    if keys is None:
        return list(known.values())
    unknown = [key for key in keys.split(",") if key not in known]
    if unknown:
        raise ValueError(f"no language {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[key] for key in keys.split(",")]

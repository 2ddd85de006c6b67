"""One version for all packages: pyproject.toml says it, and this writes it wherever else it stands.

    make version

With it goes the table of what works with what, all of it in the guide and of each client its row in
its README. tests/repository/test_versions.py fails as long as there is something left to write.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = "docs/guides/other-languages.md"

# Where else the version stands: as the group of a pattern, as often as that is found.
PLACES = {
    "src/weightbus/__init__.py": r'^__version__ = "(.+)"',
    "CITATION.cff": r"^version: (.+)",
    "python_client/subscriber.py": r'^CLIENT = "weightbus-python/(.+)"',
    "node_client/package.json": r'^  "version": "(.+)"',
    "node_client/package-lock.json": r'^ +"name": "weightbus",\n +"version": "(.+)"',
    "node_client/src/worker.ts": r"weightbus-node/([0-9.]+)",
    "rust_client/Cargo.toml": r'^version = "(.+)"',
    "c_client/Cargo.toml": r'^version = "(.+)"',
    "c_client/cbindgen.toml": r'^#define WB_VERSION "([0-9.]+)"',
    "c_client/include/weightbus.h": r'^#define WB_VERSION "(.+)"',
    "cpp_client/CMakeLists.txt": r"^project\(weightbus VERSION ([0-9.]+)",
    "cpp_client/recipes/conan/conanfile.py": r'^    version = "(.+)"',
    "cpp_client/recipes/vcpkg/vcpkg.json": r'^  "version": "(.+)"',
    "java_client/README.md": r"weightbus-([0-9.]+)\.jar",
    "java_client/src/io/github/weightbus/Worker.java": r"weightbus-java/([0-9.]+)",
    "go_client/worker.go": r"weightbus-go/([0-9.]+)",
    "go_client/README.md": r"go_client@v([0-9.]+)",
}

# Each client: its folder, where the oldest version of its language stands, and what runs it.
LINUX = "Linux, x86-64"
LIBRARIES = "libzmq 4, libsodium 1, OpenSSL 1.1 or 3"
CLIENTS = (
    ("Python", "", "pyproject.toml", r'^requires-python = ">=(.+)"', "Python {}", LINUX),
    (
        *("C", "c_client", "rust_client/Cargo.toml", r'^rust-version = "(.+)"'),
        *(LIBRARIES + "; to build it Rust {}", LINUX),
    ),
    (
        *("C++", "cpp_client", "cpp_client/CMakeLists.txt", r"cxx_std_(\d+)"),
        *("C++{}; " + LIBRARIES, LINUX),
    ),
    (
        "TypeScript",
        "node_client",
        "node_client/package.json",
        r'"node": ">=(.+)"',
        "Node {}",
        LINUX,
    ),
    (
        *("Rust", "rust_client", "rust_client/Cargo.toml", r'^rust-version = "(.+)"'),
        *("Rust {}; " + LIBRARIES, LINUX),
    ),
    (
        *("Go", "go_client", "go_client/go.mod", r"^go (.+)", "Go {}"),
        LINUX + "; it builds for arm64, macOS and Windows, too",
    ),
    (
        *("Java", "java_client", "java_client/Makefile", r"--release (\d+)"),
        *("Java {}, JNA 5; " + LIBRARIES, LINUX),
    ),
)
HEAD = (
    "| client | protocol | publishers | needs (or a later version) | tested on |\n"
    "|---|---|---|---|---|\n"
)
BEGIN, END = "<!-- made by `make version` -->\n\n", "\n<!-- until here -->\n"


def version() -> str:
    """Return the version of all packages."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def protocol() -> str:
    """Return the protocol's number, as headers have it."""
    return _found("bus/headers.py", r'"wbp":(\d+)')


def told(text: str, pattern: str, number: str) -> str:
    """Return a text that tells this version wherever the pattern finds one.

    Raises:
        ValueError: It finds none.
    """

    def replaced(match: re.Match[str]) -> str:
        whole, (first, last) = match[0], match.span(1)
        return whole[: first - match.start()] + number + whole[last - match.start() :]

    new, count = re.subn(pattern, replaced, text, flags=re.MULTILINE)
    if not count:
        raise ValueError(f"nothing there tells a version: {pattern}")
    return new


def rows(number: str) -> dict[str, str]:
    """Return the row of each client, by its folder."""
    publishers = f"Python, Rust, C, C++ {number.rpartition('.')[0]}"
    made = dict[str, str]()
    for name, folder, manifest, pattern, takes, platform in CLIENTS:
        oldest = takes.format(_found(manifest, pattern))
        cells = (f"{name} {number}", f"WBP/{protocol()}", publishers, oldest, platform)
        made[folder] = "| " + " | ".join(cells) + " |\n"
    return made


def written() -> Iterator[tuple[str, str]]:
    """Yield each file that tells versions, and what must stand in it."""
    number = version()
    table = rows(number)
    tables = {GUIDE: "".join(table.values())}
    tables |= {f"{folder}/README.md": row for folder, row in table.items() if folder}
    for name in sorted({*PLACES, *tables}):
        text = (ROOT / name).read_text()
        if name in PLACES:
            text = told(text, PLACES[name], number)
        if name in tables:
            before, begun, rest = text.partition(BEGIN)
            _, ended, after = rest.partition(END)
            if not begun or not ended:
                raise ValueError(f"{name} has no place for its table: {BEGIN}{END}")
            text = before + BEGIN + HEAD + tables[name] + END + after
        yield name, text


def stale() -> dict[str, str]:
    """Return what `make version` would write, by file."""
    return {name: text for name, text in written() if text != (ROOT / name).read_text()}


def _found(name: str, pattern: str) -> str:
    match = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{name} does not tell what its table needs: {pattern}")
    return match[1]


if __name__ == "__main__":
    for changed, content in stale().items():
        (ROOT / changed).write_text(content)
        print(changed)

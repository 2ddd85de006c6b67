"""Build every package into dist/, and say what would be uploaded where. Nothing is uploaded.

    make release

A release has one version in all languages (versions.py): what differs ends this at once. With
`--strict`, and where GitHub builds a tag, so does what speaks against a release of this checkout;
else it is said.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import versions

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
BIN = ROOT / ".venv" / "bin"
PATIENCE = 900  # seconds for one step


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a step and return what it wrote."""
    print("$", *command, flush=True)
    done = subprocess.run(  # noqa: S603 - our own commands
        command, cwd=cwd, check=True, timeout=PATIENCE, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def doubts(wanted: str) -> Iterator[str]:
    """Yield what speaks against a release of what is checked out now."""
    if f"## [{wanted}]" not in (ROOT / "CHANGELOG.md").read_text():
        yield f"CHANGELOG.md has no section [{wanted}]: what is there is [Unreleased]"
    if run("git", "status", "--porcelain"):
        yield "there are changes that are not committed"
    if f"v{wanted}" not in run("git", "tag", "--points-at", "HEAD").split():
        yield f"no tag v{wanted} is at HEAD"


def python() -> None:
    """The source distribution, and a wheel for this Python and processor."""
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools would ship it
    run(BIN / "python", "-m", "build", "--outdir", DIST)
    run(BIN / "twine", "check", "--strict", *DIST.glob("weightbus-*.whl"), *DIST.glob("*.tar.gz"))


def node() -> None:
    """The npm package, compiled."""
    run("make", "-C", "node_client", "driver")  # dependencies, and the compiler
    told = run("npm", "pack", "--json", "--ignore-scripts", cwd=ROOT / "node_client")
    (packed,) = json.loads(told)
    shutil.move(ROOT / "node_client" / packed["filename"], DIST / f"npm-{packed['filename']}")


def rust(number: str) -> None:
    """The crate; cargo builds it once more from what is packed."""
    run("make", "-C", "rust_client", "package")
    crate = f"weightbus-{number}.crate"
    shutil.copy(ROOT / "rust_client" / "target" / "package" / crate, DIST / crate)


def native(number: str) -> None:
    """The libraries for C and C++ as they are installed below a prefix, wherever that is."""
    run("make", "-C", "cpp_client", "driver")  # libweightbus, too
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / f"libweightbus-{number}"
        run("cmake", "--install", "cpp_client/build", "--prefix", prefix)
        run(
            "strip",
            "--strip-debug",
            prefix / "lib/libweightbus.a",
            prefix / "lib/libweightbus.so.1",
        )
        beside = prefix / "share" / "doc" / "weightbus"
        shutil.copytree(ROOT / "c_client" / "examples", beside / "examples")
        for name in ("LICENSE", "README.md"):
            shutil.copy(ROOT / "c_client" / name, beside / name)
        with tarfile.open(DIST / f"{prefix.name}-{os.uname().machine}.tar.xz", "w:xz") as archive:
            archive.add(prefix, arcname=prefix.name)


def java(number: str) -> None:
    """The jar, with the library in it for this processor."""
    run("make", "-C", "java_client", "jar")
    jar = f"weightbus-{number}.jar"
    shutil.copy(ROOT / "java_client" / "build" / jar, DIST / jar)


def go(number: str) -> None:
    """The module's files, as a proxy would serve them; a tag of its own is what publishes it."""
    module = (ROOT / "go_client" / "go.mod").read_text().split()[1]
    name, prefix = DIST / f"go-weightbus-{number}.zip", f"{module}@v{number}/"
    run("git", "archive", f"--prefix={prefix}", f"--output={name}", "HEAD:go_client")


# By how the files begin or end: where they would go, and by which command.
PLACES = (
    (r"^weightbus-.*(\.whl|\.tar\.gz)$", "PyPI", "twine upload {}"),
    (r"^npm-", "npm", "npm publish {}"),
    (r"\.crate$", "crates.io", "cargo publish --manifest-path rust_client/Cargo.toml"),
    (r"^libweightbus-", "the forge's page of the release", "attach {}"),
    (r"\.jar$", "Maven Central", "deploy {}, with a pom, sources and signatures"),
    (r"^go-", "the Go module proxy", "git tag go_client/v{version}, and push that"),
)


def told(number: str) -> Iterator[str]:
    """Yield a line or two for each file: what it is, and what would be done with it."""
    for file in sorted(DIST.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        yield f"{file.name}  {file.stat().st_size:,} bytes  sha256 {digest}"
        for pattern, place, command in PLACES:
            if re.search(pattern, file.name):
                how = command.format(file.relative_to(ROOT), version=number)
                yield f"    to {place}: {how}"
        if "linux_" in file.name and "manylinux" not in file.name:
            yield "    not as it is: PyPI takes manylinux alone, which `cibuildwheel` makes"


def main(words: Sequence[str]) -> None:
    """Build, check, and tell.

    Raises:
        SystemExit: Versions differ; or something speaks against a release, and that is an error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--strict", action="store_true", help="build nothing that is in doubt")
    strict = parser.parse_args(words).strict or os.environ.get("GITHUB_REF_TYPE") == "tag"
    number = versions.version()
    if stale := versions.stale():
        sys.exit(f"not of version {number}: {', '.join(stale)}; `make version` mends that")
    doubted = [*doubts(number)]
    if strict and doubted:
        sys.exit("\n".join(f"no release: {doubt}" for doubt in doubted))
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    python()
    node()
    rust(number)
    native(number)
    go(number)
    java(number)
    print(f"\nweightbus {number}: nothing was uploaded. This is what would be:\n")
    print("\n".join(told(number)))
    for doubt in doubted:
        print(f"but not yet: {doubt}")


if __name__ == "__main__":
    main(sys.argv[1:])

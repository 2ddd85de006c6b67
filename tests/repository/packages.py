"""Install each package of dist/ into a clean folder, and run there the example of its README.

    make packages    (tests/repository/packages.py go node: of those in dist/ these two alone)

Every publisher is the one that the README says to try it with, in an environment that has the wheel
and nothing of this checkout. Crates are Debian's where those are installed. Go takes its modules
from a proxy of files: ours as it is in dist/, the others as Debian has them.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import venv
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
PATIENCE = 600.0  # seconds for one step
SECONDS = 60.0  # for an example to show what it does
MODULES = Path("/usr/share/gocode/src")  # golang-golang-x-crypto-dev, and what it needs
JNA = os.environ.get("JNA", "/usr/share/java/jna.jar")
DEBIAN = next(Path("/usr/share/cargo/registry").glob("zmq-*"), None)


@dataclass(frozen=True)
class Bench:
    """Where a package is tried: a clean folder, and the Python that has the wheel."""

    folder: Path
    python: Path

    def run(self, *command: str | Path, cwd: str = "", **variables: str | Path) -> None:
        """Run a step below this folder."""
        print("$", *command, flush=True)
        env = environment(**variables)
        where = self.folder / cwd
        subprocess.run(command, cwd=where, env=env, check=True, timeout=PATIENCE)  # noqa: S603

    def write(self, name: str, text: str) -> None:
        """Write a file below this folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def shows(
        self,
        client: str,
        wanted: str,
        *command: str | Path,
        cwd: str = "",
        at: str = "",
        **variables: str | Path,
    ) -> None:
        """Run an example beside the publisher of its README until it prints what is wanted.

        Args:
            client: The folder of the client, whose README says how to start a publisher.
            wanted: A pattern of a whole line.
            command: The example.
            cwd: Where it runs, below this folder.
            at: The file there in which the address stands; if none, that is the last argument.
            variables: For the example's environment.

        Raises:
            AssertionError: It ended without such a line, or the publisher says of no worker that it
                applied a version.
        """
        with trainer(self, readme(client)) as (address, rows):
            if at:
                file = self.folder / cwd / at
                file.write_text(re.sub(r"tcp://[\w.]+:5555", address, file.read_text()))
            else:
                command = (*command, address)
            env = environment(**variables)
            with printing(wanted, [*map(str, command)], self.folder / cwd, env) as line:
                applied = any("applied" in json.loads(row)["workers"].values() for row in rows)
            assert applied, f"no worker of {client} applied anything"
        print(f"{client}: {line}", flush=True)


def environment(**variables: str | Path) -> dict[str, str]:
    """Return this environment with some variables set, in which nothing leads to the checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {name: str(value) for name, value in variables.items()}


def readme(client: str) -> str:
    """Return the README of a client."""
    return (ROOT / client / "README.md").read_text()


def block(text: str, language: str) -> str:
    """Return the first block of code of that language."""
    found = re.search(rf"^```{language}[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"no block of {language}"
    return found[1]


@contextlib.contextmanager
def trainer(bench: Bench, text: str) -> Generator[tuple[str, Generator[str]]]:
    """Start the publisher that a README says to try it with; give its address and its lines."""
    (line,) = re.findall(r"^python weightbus/examples/.*", text, re.MULTILINE)
    _, script, _ = shlex.split(line, comments=True)
    command: list[str | Path]
    command = [bench.python, ROOT.joinpath(*Path(script).parts[1:]), "tcp://127.0.0.1:0"]
    process = subprocess.Popen(  # noqa: S603
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=bench.folder,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        told = process.stderr.readline()
        address = told.removeprefix("publishing at ").strip()
        assert address != told.strip(), f"the publisher said: {told}{process.stderr.read()}"
        yield address, (row for row in process.stdout)
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def printing(wanted: str, command: list[str], cwd: Path, env: dict[str, str]) -> Generator[str]:
    """Run a program for as long as the block takes; give the first line that is as wanted."""
    process = subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, text=True, cwd=cwd, env=env, start_new_session=True
    )
    assert process.stdout is not None
    kill = partial(os.killpg, process.pid, signal.SIGKILL)  # `go run` has a process of its own
    end = threading.Timer(SECONDS, kill)
    end.start()
    seen = list[str]()
    try:
        for line in process.stdout:
            seen.append(line)
            if re.fullmatch(wanted, line.strip()):
                yield line.strip()
                return
        raise AssertionError(f"{command} printed nothing like {wanted}: {seen}")
    finally:
        end.cancel()
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            kill()
        process.communicate()


def only(pattern: str) -> Path:
    """Return the one package of that name."""
    (found,) = DIST.glob(pattern)
    return found


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack an archive; return the one folder that is in it."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
        (top,) = {name.partition("/")[0] for name in tar.getnames()}
    return folder / top


# One for each package.


def python(bench: Bench) -> None:
    """The wheel, which publishes for all others. Its own README takes torch: `make wheel`."""
    venv.create(bench.python.parent.parent, with_pip=True)
    install = ("-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", only("*.whl"))
    bench.run(bench.python, *install)


def node(bench: Bench) -> None:
    """The package of npm; its types, too."""
    tools = json.loads((ROOT / "node_client" / "package.json").read_text())["devDependencies"]
    bench.write("package.json", '{"private": true, "type": "module"}')
    compiler = [f"{name}@{tools[name]}" for name in ("typescript", "@types/node")]
    bench.run("npm", "install", "--silent", only("npm-*.tgz"), *compiler)
    bench.write("example.ts", block(readme("node_client"), "ts"))
    options = ("--module", "nodenext", "--target", "es2023", "--types", "node")
    bench.run("npx", "tsc", "--strict", "--skipLibCheck", *options, "example.ts")
    line = r"line \d+ [0-9a-f]{64} -?\d.*"
    bench.shows("node_client", line, "node", "example.js", at="example.js")


def rust(bench: Bench) -> None:
    """The crate."""
    crate = unpacked(only("weightbus-*.crate"), bench.folder)
    manifest = '[package]\nname = "example"\nversion = "0.0.0"\nedition = "2021"\n'
    manifest += "[profile.dev]\ndebug = 0\n[dependencies]\n"
    bench.write("example/Cargo.toml", f'{manifest}weightbus = {{ path = "../{crate.name}" }}\n')
    bench.write("example/src/main.rs", block(readme("rust_client"), "rust"))
    source = ("--config", ROOT / "rust_client" / "debian.toml") if DEBIAN else ()
    bench.run("cargo", "build", "--quiet", *source, cwd="example")  # of all crates: takes a while
    line, run = r"version \d+: slope \[.+\]", ("cargo", "run", "--quiet", *source)
    bench.shows("rust_client", line, *run, cwd="example", at="src/main.rs")


def native(bench: Bench) -> None:
    """The libraries of C and C++, found by pkg-config and by CMake."""
    prefix = unpacked(only("libweightbus-*.tar.xz"), bench.folder)
    (compile_it,) = re.findall(r"^cc -o worker .*pkg-config.*", readme("c_client"), re.MULTILINE)
    beside = prefix / "share" / "doc" / "weightbus"
    found = {"PKG_CONFIG_PATH": prefix / "lib" / "pkgconfig"}
    bench.run("sh", "-c", compile_it, cwd=str(beside), **found)
    line = r"version \d+: .+, .+"
    bench.shows("c_client", line, beside / "worker", LD_LIBRARY_PATH=prefix / "lib")

    lines = "cmake_minimum_required(VERSION 3.18)\nproject(example LANGUAGES CXX)\n"
    lines += "add_executable(my_app main.cpp)\n" + block(readme("cpp_client"), "cmake")
    bench.write("cpp/CMakeLists.txt", lines)
    bench.write("cpp/main.cpp", block(readme("cpp_client"), "cpp"))
    bench.run("cmake", "-S", "cpp", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    bench.run("cmake", "--build", "build")
    bench.shows("cpp_client", r"version \d+: -?\d+\.\d\d at \(1, 2, 3\)", "build/my_app")


def go(bench: Bench) -> None:
    """The module, from a proxy."""
    proxy, ours = bench.folder / "proxy", only("go-*.zip")
    module = (ROOT / "go_client" / "go.mod").read_text().split()[1]
    number = ours.stem.rpartition("-")[2]
    offer(
        proxy, module, f"v{number}", (ROOT / "go_client" / "go.mod").read_text(), ours.read_bytes()
    )
    sums = (ROOT / "go_client" / "go.sum").read_text()
    for name, version in re.findall(r"^(\S+) (v[^\s/]+) ", sums, re.MULTILINE):
        offer(proxy, name, version, f"module {name}\n\ngo 1.17\n")
    settings = {"GOPROXY": proxy.as_uri(), "GOSUMDB": "off", "GOFLAGS": "-modcacherw"}
    settings |= {"GOPATH": str(bench.folder / "gopath"), "CGO_ENABLED": "0"}
    bench.write("example/main.go", block(readme("go_client"), "go"))
    for line in re.findall(r"^go (?:mod init|get) .*", readme("go_client"), re.MULTILINE):
        bench.run(*shlex.split(line, comments=True), cwd="example", **settings)
    bench.run("go", "build", "-o", "/dev/null", ".", cwd="example", **settings)
    bench.shows(
        "go_client", r"\d+ -?\d.*", "go", "run", ".", cwd="example", at="main.go", **settings
    )


def java(bench: Bench) -> None:
    """The jar, beside that of JNA."""
    bench.write("Main.java", block(readme("java_client"), "java"))
    line, jars = r"version \d+: -?\d+\.\d\d at \(1, 2, 3\)", f"{only('weightbus-*.jar')}:{JNA}"
    bench.shows("java_client", line, "java", "-classpath", jars, "Main.java")


def offer(proxy: Path, module: str, version: str, manifest: str, archive: bytes = b"") -> None:
    """Put a version of a module into a proxy of files: this archive, or what Debian has of it."""
    folder = proxy / module / "@v"
    folder.mkdir(parents=True)
    (folder / "list").write_text(f"{version}\n")
    told = {"Version": version, "Time": "2000-01-01T00:00:00Z"}
    (folder / f"{version}.info").write_text(json.dumps(told))
    (folder / f"{version}.mod").write_text(manifest)
    if archive:
        (folder / f"{version}.zip").write_bytes(archive)
        return
    with ZipFile(folder / f"{version}.zip", "w") as made:
        made.writestr(f"{module}@{version}/go.mod", manifest)
        for path in sorted((MODULES / module).rglob("*")):
            if path.is_file() and path.name != "go.mod":
                made.write(path, f"{module}@{version}/{path.relative_to(MODULES / module)}")


PACKAGES = {package.__name__: package for package in (python, node, rust, native, go, java)}


def main(names: Sequence[str]) -> None:
    """Try these packages, or all of them, and tell their sizes; the wheel is always among them."""
    seconds = dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES.values():
            if names and package.__name__ not in ("python", *names):
                continue
            print(f"\n== {package.__name__}: {package.__doc__}", flush=True)
            began = monotonic()
            clean = Path(folder) / package.__name__
            clean.mkdir()
            package(Bench(clean, Path(folder) / "python" / "env" / "bin" / "python"))
            seconds[package.__name__] = monotonic() - began
    print("\nseconds: " + ", ".join(f"{name} {taken:.0f}" for name, taken in seconds.items()))
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The examples in other languages, each beside a publisher, print what they should.

    make examples

Each is built as its README says, but from this checkout. Where a tool is missing its test says so
and skips, and fails where CI is set.
"""

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

import weightbus

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 60.0
STATE = np.array([0.1, 0, -0.2, 0], np.float32)
SHAPES = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}

pytestmark = pytest.mark.timeout(600)  # compiling


def need(*tools: str, files: Sequence[str] = ()) -> None:
    """Skip where tools or files are missing."""
    missing = [tool for tool in tools if not shutil.which(tool)]
    missing += [file for file in files if not Path(file).exists()]
    if missing:
        leave_out(f"not here: {', '.join(missing)}")


def leave_out(reason: str) -> None:
    """Skip, and say why; in CI everything must be there."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def build(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run(command, cwd=cwd, check=True, timeout=500)  # noqa: S603


@contextmanager
def running(*command: str | Path, cwd: Path = ROOT) -> Generator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=cwd, stdin=pipe, stdout=pipe, text=True) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return (line.strip() for line in process.stdout)


def policy(seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def scores(weights: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    hidden = np.tanh(weights["0.weight"] @ STATE + weights["0.bias"])
    return weights["2.weight"] @ hidden + weights["2.bias"]


def published(
    publisher: weightbus.Publisher, model: str, weights: dict[str, NDArray[np.float32]]
) -> int:
    """Publish a version, which all workers apply; return its number."""
    receipt = publisher.publish(model, weights, timeout=SECONDS)
    assert {worker.state for worker in receipt.workers.values()} == {"applied"}
    return receipt.version


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def test_rollouts_in_eigen_get_better(tmp_path: Path) -> None:
    need("cmake", "c++", "cargo", files=["/usr/include/eigen3"])
    build("make", "-s", "-C", "cpp_client", "driver")
    build("cmake", "--install", ROOT / "cpp_client" / "build", "--prefix", tmp_path / "prefix")
    source = EXAMPLES / "eigen_rollouts"
    build("cmake", "-S", source, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}")
    build("cmake", "--build", tmp_path)
    trainer = subprocess.Popen(  # noqa: S603
        [sys.executable, EXAMPLES / "cartpole_trainer.py", "tcp://127.0.0.1:0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert trainer.stderr is not None
        address = trainer.stderr.readline().removeprefix("publishing at ").strip()
        with running(tmp_path / "rollouts", address) as rollouts:
            told = [*lines(rollouts)]
            assert rollouts.wait(SECONDS) == 0, told
        assert trainer.wait(SECONDS) == 0
    finally:
        trainer.kill()
        trainer.communicate()
    steps = [float(line.split()[-2]) for line in told]
    versions = [int(line.split()[1].rstrip(":")) for line in told]
    assert versions == sorted(versions)
    assert steps[0] < 300, "not solved by chance"
    assert steps[-1] >= 475


def cargo(folder: Path, program: str) -> Path:
    """Build a program in Rust where the C library has built the crates, and as it has."""
    need("cargo")
    target, same = ROOT / "rust_client" / "target", ("--config", "profile.release.debug=1")
    debian = [*Path("/usr/share/cargo/registry").glob("zmq-*")]
    source = ("--config", ROOT / "rust_client" / "debian.toml") if debian else ()
    options = ("--quiet", "--release", "--target-dir", target, *same, *source)
    build("cargo", "build", *options, cwd=folder)
    return target / "release" / program


def test_plain_rust_infers_with_each_version() -> None:
    made = cargo(EXAMPLES / "rust_inference", "rust_inference")
    with (
        weightbus.Publisher("tcp://127.0.0.1:0") as publisher,
        running(made, publisher.address) as program,
    ):
        publisher.wait_for_workers(1, timeout=SECONDS)
        assert program.stdin is not None
        answers = lines(program)
        for seed in range(3):
            weights = policy(seed)
            version = published(publisher, "policy", weights)
            program.stdin.write(" ".join(map(str, STATE.tolist())) + "\n")
            program.stdin.flush()
            answer = next(answers)
            assert numbers(answer) == pytest.approx(scores(weights).tolist(), abs=2e-4)
            action = int(np.argmax(scores(weights)))
            assert answer.startswith(f"version {version}: action {action} of ")
        program.stdin.close()
        assert program.wait(SECONDS) == 0


def test_the_model_for_onnx_is_what_its_script_writes() -> None:
    folder = EXAMPLES / "onnx_node"
    script = runpy.run_path(str(folder / "model.py"))
    assert (folder / "policy.onnx").read_bytes() == script["model"]()


def test_onnx_runtime_in_node_runs_each_version() -> None:
    need("npm", "node")
    build("make", "-s", "-C", "node_client", "driver")
    folder = EXAMPLES / "onnx_node"
    if not (folder / "node_modules" / "onnxruntime-node").exists():
        try:
            build("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", cwd=folder)
        except subprocess.CalledProcessError as error:
            leave_out(f"npm has no ONNX Runtime for this machine: {error}")
    with (
        weightbus.Publisher("tcp://127.0.0.1:0") as publisher,
        running("node", "policy.ts", publisher.address, cwd=folder) as program,
    ):
        publisher.wait_for_workers(1, timeout=SECONDS)
        answers = lines(program)
        for seed in range(3):
            weights = policy(seed)
            version = published(publisher, "policy", weights)
            answer = next(answers)
            assert answer.startswith(f"version {version}: ")
            assert numbers(answer) == pytest.approx(scores(weights).tolist(), abs=2e-4)


class UnixConnection(HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("sidecar", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SECONDS)
        self.sock.connect(str(self._path))


def sidecar(folder: Path) -> Path:
    """Build it with the modules that the Go client brings."""
    need("go")
    made, module = folder / "sidecar", ROOT / "go_client"
    build("make", "modules", cwd=module)
    source = {str(module / "sidecar" / "main.go"): str(EXAMPLES / "go_sidecar" / "main.go")}
    (folder / "overlay.json").write_text(json.dumps({"Replace": source}))
    overlay = ("-overlay", folder / "overlay.json")
    build("go", "build", *overlay, "-o", made, "./sidecar", cwd=module)
    return made


def test_a_sidecar_in_go_serves_the_newest_version(tmp_path: Path) -> None:
    made, path = sidecar(tmp_path), tmp_path / "socket"
    with (
        weightbus.Publisher("tcp://127.0.0.1:0") as publisher,
        running(made, publisher.address, "line", f"unix:{path}") as program,
    ):
        told = lines(program)
        assert next(told) == f"listening at {path}"
        assert fetched(path)[0] == 503
        publisher.wait_for_workers(1, timeout=SECONDS)
        tag = ""
        for seed in range(2):
            weights = policy(seed)
            published(publisher, "line", weights)
            status, body, tag = fetched(path, tag)
            assert status == 200
            served = safetensors.numpy.load(body)
            assert {name: value.tolist() for name, value in served.items()} == {
                name: value.tolist() for name, value in weights.items()
            }
        assert fetched(path, tag)[:2] == (304, b"")


def fetched(path: Path, tag: str = "") -> tuple[int, bytes, str]:
    connection = UnixConnection(path)
    # Two versions in a second are two versions: no date may be all that is compared.
    known = {"If-None-Match": tag} if tag else {"If-Modified-Since": formatdate(usegmt=True)}
    connection.request("GET", "/model.safetensors", headers=known)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers.get("ETag", "")


def test_a_sidecar_in_go_serves_over_tcp(tmp_path: Path) -> None:
    made = sidecar(tmp_path)
    with (
        weightbus.Publisher("tcp://127.0.0.1:0") as publisher,
        running(made, publisher.address, "line", "127.0.0.1:0") as program,
    ):
        address = next(lines(program)).removeprefix("listening at ")
        publisher.wait_for_workers(1, timeout=SECONDS)
        published(publisher, "line", policy(0))
        with urllib.request.urlopen(f"http://{address}/model.safetensors", timeout=SECONDS) as got:
            assert safetensors.numpy.load(got.read()).keys() == SHAPES.keys()

"""The programs of the guide on publishing from other languages do as they stand what it says.

make examples
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weightbus
from weightbus.tests.languages.test_examples import (
    ROOT,
    SECONDS,
    build,
    cargo,
    lines,
    need,
    running,
)

PAGE = (ROOT / "docs" / "guides" / "publishing-elsewhere.md").read_text()
SLOPE = [0.5, 1.0, 2.0]

pytestmark = pytest.mark.timeout(600)  # compiling


def block(language: str) -> str:
    """Return the page's only block of a language."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(code)


def publishes(program: Path, folder: Path) -> None:
    """Run a program beside a worker that it expects."""
    copy, address = {"slope": np.zeros(3, np.float32)}, f"ipc://{folder}/bus"
    with weightbus.Subscriber(address, {"line": copy}, name="w0").start():
        done = subprocess.run(  # noqa: S603
            [program, address], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "line version 1" in done.stdout
    assert "w0 applied" in done.stdout
    assert copy["slope"].tolist() == SLOPE


def test_rust(tmp_path: Path) -> None:
    (tmp_path / "main.rs").write_text(block("rust"))
    manifest = ['[package]\nname = "publish"\nversion = "0.0.0"\nedition = "2021"']
    manifest += [f'[dependencies]\nweightbus = {{ path = "{ROOT / "rust_client"}" }}']
    manifest += ['[[bin]]\nname = "publish"\npath = "main.rs"\n']
    (tmp_path / "Cargo.toml").write_text("\n".join(manifest))
    publishes(cargo(tmp_path, "publish"), tmp_path)


def test_c_and_cpp(tmp_path: Path) -> None:
    need("cargo", "cc", "c++")
    build("make", "-s", "-C", "c_client", "build")
    library = ("-L", ROOT / "c_client" / "build", f"-Wl,-rpath,{ROOT / 'c_client' / 'build'}")
    folders = [f"-I{ROOT / folder / 'include'}" for folder in ("c_client", "cpp_client")]
    for language, compiler in (("c", "cc"), ("cpp", "c++")):
        source, program = tmp_path / f"publish.{language}", tmp_path / language
        source.write_text(block(language))
        strict = ("-Wall", "-Wextra", "-Werror")
        build(compiler, *strict, *folders, "-o", program, source, *library, "-lweightbus")
        publishes(program, tmp_path)


def test_a_file_that_node_writes_is_published(tmp_path: Path) -> None:
    need("node")
    (tmp_path / "publish.mjs").write_text(block("js"))
    path, watch = (
        tmp_path / "line.safetensors",
        re.search(r"^weightbus (publish .*--watch)$", PAGE, re.M),
    )
    assert watch is not None
    words = watch[1].replace("line.safetensors", str(path)).split()
    words[words.index("--bind") + 1] = f"ipc://{tmp_path}/bus"
    copy = {"slope": np.zeros(3, np.float32)}
    with (
        running(sys.executable, "-m", "weightbus", *words, "--json") as publisher,
        weightbus.Subscriber(f"ipc://{tmp_path}/bus", {"line": copy}, name="w0").start() as worker,
    ):
        assert '"listening"' in next(lines(publisher))
        build("node", "publish.mjs", path, cwd=tmp_path)
        worker.wait_for_version("line", 1, timeout=SECONDS)
    assert copy["slope"].tolist() == SLOPE

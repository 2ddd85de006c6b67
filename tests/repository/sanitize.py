"""Run what is in C under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

First the checksums alone, without Python; then the extensions, built anew into a folder of their
own, under the tests that call them the most.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TESTS = (
    *("codecs/test_native.py", "codecs/test_delta.py", "codecs/test_codecs_roundtrip.py"),
    *("protocol/test_delta_vectors.py", "memory/test_resident.py"),
)
PRELOADED = ("libasan.so", "libstdc++.so")  # the second, or what torch throws is not caught
PATIENCE = 900  # seconds for one step
# Python keeps much of its memory until its end.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def run(*command: str | Path, **environment: str) -> None:
    """Run a step."""
    print("$", *command, flush=True)
    variables = {**os.environ, **environment}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=PATIENCE)  # noqa: S603


def built(extension: str, folder: Path, compiler: Sequence[str]) -> None:
    """Build an extension with sanitizers."""
    headers, suffix = sysconfig.get_paths()["include"], sysconfig.get_config_var("EXT_SUFFIX")
    shared = ("-shared", "-fPIC", f"-I{headers}")
    source = ROOT / "codecs" / f"{extension}.c"
    run(*compiler, *FLAGS, *shared, source, "-o", folder / f"{extension}{suffix}")


def located(library: str, compiler: Sequence[str]) -> str:
    """Return where the compiler's own library is."""
    command = [*compiler, f"-print-file-name={library}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)  # noqa: S603
    return done.stdout.strip()


def package(folder: Path) -> Path:
    """Make a package of the checkout, but for what is built in it; return where extensions go."""
    root, codecs = folder / "weightbus", folder / "weightbus" / "codecs"
    codecs.mkdir(parents=True)
    for path in [*(ROOT / "src" / "weightbus").iterdir(), *(ROOT / "codecs").iterdir()]:
        if path.suffix != ".so" and path.name != "codecs":
            (codecs if path.parent.name == "codecs" else root).joinpath(path.name).symlink_to(path)
    return codecs


def main() -> None:
    """Do all of it."""
    compiler = os.environ.get("CC", "gcc").split()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        program = folder / "crc32c_checks"
        run(*compiler, *FLAGS, Path(__file__).with_name("crc32c_checks.c"), "-o", program)
        run(program)
        codecs = package(folder)
        for extension in ("_native", "_delta"):
            built(extension, codecs, compiler)
        tests = [f"tests/{each}" for each in TESTS]
        libraries = " ".join(located(name, compiler) for name in PRELOADED)
        run(
            *(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *tests),
            PYTHONPATH=made,
            LD_PRELOAD=libraries,
            **OPTIONS,
        )


if __name__ == "__main__":
    main()

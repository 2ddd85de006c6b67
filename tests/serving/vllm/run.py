"""Test the engines in real vLLMs: fetch each wheel, unpack its Python, and run the tests with it.

    make serving
    make serving VLLM=0.28.0

No GPU, and nothing of vLLM is installed: its own compiled parts are left out, and torch is the one
of .venv. All is kept in .serving/, which git ignores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[3]
HERE = Path("tests/serving/vllm")
KEPT = ROOT / ".serving"
REFUSED = "0.27.0"
VERSIONS = [REFUSED, *(f"0.{minor}.0" for minor in range(28, 34))]
OLDEST, NEWEST = VERSIONS[1], VERSIONS[-1]  # that are supported
SECONDS = 900  # for one version


def pip(*given: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", *given]
    subprocess.run(command, check=True)  # noqa: S603 - of ours


def packages(listed: str = f"{HERE}/packages.txt") -> Path:
    """Return a folder of what vLLM imports."""
    wanted = ROOT / listed
    kept = KEPT / f"packages-{wanted.parent.name}"
    stamp = kept / "packages.txt"
    if not stamp.is_file() or stamp.read_text() != wanted.read_text():
        pip("install", "--no-deps", "--upgrade", "--target", str(kept), "-r", str(wanted))
        stamp.write_text(wanted.read_text())
    return kept


def unpacked(version: str) -> Path:
    """Return a folder with the Python of a vLLM."""
    kept = KEPT / f"vllm-{version}"
    if not kept.is_dir():
        KEPT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as made:
            folder = Path(made)
            platform = ("--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:")
            pip("download", "--no-deps", *platform, "--dest", made, f"vllm=={version}")
            (wheel,) = folder.glob("vllm-*.whl")
            with ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.endswith((".py", ".json", "METADATA")):
                        archive.extract(name, folder / "out")
            (folder / "out").rename(kept)
    return kept


def main() -> int:
    """Run them; return how many versions failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="such as 0.28.0")
    parser.add_argument("--short", action="store_true", help="two versions, and no ranks that fail")
    given = parser.parse_args()
    asked = [OLDEST, NEWEST] if given.short else given.versions
    failed: list[str] = []
    for version in asked:
        print(f"vLLM {version}", flush=True)
        path = os.pathsep.join(map(str, (unpacked(version), packages())))
        env = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
        env.pop("VLLM_PLUGINS", None)
        if version == REFUSED:
            tests = [HERE / "test_refused.py"]
        else:
            tests = [HERE / "test_engine.py", HERE / "test_proof.py"]
        if version in (OLDEST, NEWEST):
            tests += [HERE / "test_bridge_in_vllm.py", HERE / "test_parts.py"]
        if version == NEWEST and not given.short:
            tests.append(HERE / "test_failures_in_vllm.py")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-W",
            "default",
            "--numprocesses",
            "2",
            "--timeout",
            "400",
        ]
        command += map(str, tests)
        done = subprocess.run(command, env=env, cwd=ROOT, timeout=SECONDS)  # noqa: S603
        if done.returncode:
            failed.append(version)
    print(f"{len(asked) - len(failed)} of {len(asked)} versions of vLLM pass", *failed)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

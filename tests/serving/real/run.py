"""Test with vLLMs that really run, on this processor: `make serving-real`, in some minutes.

    make serving-real VLLM=0.33.0

The Python of each is fetched as by `make serving-vllm`; `cpu_kernels` is what it lacks to run.
"""

import argparse
import os
import subprocess
import sys

from weightbus.tests.serving.vllm.run import KEPT, NEWEST, OLDEST, ROOT, packages, unpacked

HERE = "tests/serving/real"
VERSIONS = [NEWEST, OLDEST]
SECONDS = 1200  # for one version


def environment(version: str) -> dict[str, str]:
    """Return the environment in which a vLLM runs."""
    needs = packages(f"{HERE}/packages.txt"), packages()
    path = map(str, (unpacked(version), *needs, ROOT / HERE / "plugin"))
    said = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    said |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CACHE_ROOT": str(KEPT / "cache")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {**kept, **said, "PYTHONPATH": os.pathsep.join(path)}


def main() -> int:
    """Run them; return how many versions failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="such as 0.28.0")
    parser.add_argument("--short", action="store_true", help="the newest, and no server")
    given, failed = parser.parse_args(), 0
    tests = f"{HERE}/test_llm.py" if given.short else HERE
    for version in [NEWEST] if given.short else given.versions:
        print(f"vLLM {version}, on this processor", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--durations", "5", tests]
        done = subprocess.run(command, env=environment(version), cwd=ROOT, timeout=SECONDS)  # noqa: S603
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""Build the wheel, install it into a clean environment, import every module, run README and demo.

The clone lies beside README's script there. A wheel of the clone as a zip, without links, has the
same files.

    make wheel

An editable install hides what a wheel lacks: packages are listed by hand in pyproject.toml. Of what
is installed here the environment has what the wheel's extras ask for, and nothing else: installing
it anew would take minutes, and be the same by constraints.txt.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

from weightbus.tests.repository.cloning import ROOT, clone

SHELVES = ("bus", "codecs", "python_client")
DEMO_SECONDS = 8
EXTRAS = frozenset({"demo", "keys", "metrics", "ray", "torchrl", "training"})
ONLY_BESIDE_VLLM = ("vllm_loading", "vllm_proof", "vllm_trainer", "vllm_worker")
NOT_IMPORTED = ("__main__", *ONLY_BESIDE_VLLM)
PATIENCE = 600  # seconds for one step


def modules() -> Iterator[str]:
    """Yield the paths of what the wheel must hold, as they stand in it."""
    tops = {"weightbus": ROOT / "src" / "weightbus"}
    tops |= {f"weightbus/{shelf}": ROOT / shelf for shelf in SHELVES}
    tops["weightbus/examples/demo"] = ROOT / "examples" / "demo"
    for place, top in tops.items():
        for path in top.rglob("*"):
            if path.suffix in {".py", ".html"} or path.name == "py.typed":
                yield f"{place}/{path.relative_to(top).as_posix()}"


def zipped(tree: Path, archive: Path) -> Path:
    """Pack a clone as forges do; return the archive, in which links are what pip makes of them."""
    with ZipFile(archive, "w") as made:
        for path in tree.rglob("*"):
            name = path.relative_to(tree.parent).as_posix()
            if path.is_symlink():
                made.writestr(name, str(path.readlink()))
            elif path.is_file():
                made.write(path, name)
    return archive


def needed(of: Distribution, extras: frozenset[str]) -> set[str]:
    """Return the names of the distributions that this one with some extras needs."""
    found, todo = {of.name: extras}, [of.name]
    while todo:
        name = todo.pop()
        for requirement in map(
            Requirement, (of if name == of.name else distribution(name)).requires or ()
        ):
            chosen = [{"extra": extra} for extra in found[name] | {""}]
            if requirement.marker is None or any(map(requirement.marker.evaluate, chosen)):
                before = found.get(requirement.name)
                found[requirement.name] = (before or frozenset()) | requirement.extras
                if found[requirement.name] != before:
                    todo.append(requirement.name)
    return set(found) - {of.name}


def linked(name: str, site: Path) -> None:
    """Link the files of a distribution of this environment into another's packages."""
    for file in distribution(name).files or ():
        link = site / file
        if ".." not in file.parts and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.locate())


def run(*command: str | Path, cwd: Path) -> None:
    """Run a step, from a folder where the checkout is not on Python's path."""
    print("$", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True, timeout=PATIENCE)  # noqa: S603


def main() -> None:
    """Do it all in a temporary folder; the wheel itself is left in dist/."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would ship what lies there
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder)
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", dist, ROOT, cwd=clean)
        (wheel,) = dist.glob("*.whl")
        held = set(ZipFile(wheel).namelist())
        missing = sorted(set(modules()) - held)
        stray = sorted(n for n in held if n.startswith(("weightbus/tests", "weightbus/protocol")))
        assert not missing, f"{wheel.name} lacks {missing}: see packages in pyproject.toml"
        assert not stray, f"{wheel.name} holds {stray}"
        tree = clone(clean)  # as README has it: beside mine.py
        archive = zipped(tree, clean / "weightbus.zip")
        zips = clean / "zips"
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", zips, archive, cwd=clean)
        (other,) = zips.glob("*.whl")
        assert set(ZipFile(other).namelist()) == held, "of a zip the wheel is another"
        venv.create(clean / "env")
        python = clean / "env" / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", python)
        run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=clean)
        (site,) = (clean / "env" / "lib").glob("python*/site-packages")
        (installed,) = Distribution.discover(name="weightbus", path=[str(site)])
        for name in needed(installed, EXTRAS):
            linked(name, site)
        names = sorted(n[:-3].replace("/", ".") for n in held if n.endswith(".py"))
        names = [n.removesuffix(".__init__") for n in names if not n.endswith(NOT_IMPORTED)]
        imports = f"import importlib; [importlib.import_module(n) for n in {names}]"
        run(python, "-W", "ignore", "-c", imports, cwd=clean)
        beside = f"import weightbus; assert weightbus.__file__.startswith({str(clean / 'env')!r})"
        helper = "from weightbus.codecs import native; print(native.description())"
        run(python, "-c", f"{beside}; {helper}", cwd=clean)
        readme = (ROOT / "README.md").read_text()
        (clean / "mine.py").write_text(readme.partition("```python\n")[2].partition("```")[0])
        run(python, "mine.py", cwd=clean)
        weightbus = clean / "env" / "bin" / "weightbus"
        run(weightbus, "demo", "--seconds", str(DEMO_SECONDS), "--plot", "demo.png", cwd=clean)
    print(f"{wheel.name}: {len(names)} modules imported, and the demo ran")


if __name__ == "__main__":
    main()

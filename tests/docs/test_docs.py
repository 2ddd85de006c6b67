"""Every code block of the README and the guides runs as it stands.

Python blocks of one page run in order in one process; of a `diff`, what remains when it is applied.
Shell blocks are checked for commands that
exist: `make` targets against the Makefile, `weightbus` lines against the command line's own parser.
"""

import ast
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import weightbus
from weightbus.python_client.cli.commands import app
from weightbus.tests.cli.starting import python

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
FOLDERS = GUIDES, ROOT / "docs", ROOT / "docs" / "protocol"
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted(folder.glob("*.md")))]
# Run by `make training`, since they take long.
LONG = ("training-loops", "pytorch-loop", "ray", "migrating-from-torchrl")
TRAINING = [GUIDES / f"{name}.md" for name in LONG]
PEFT = GUIDES / "base-and-adapter.md"  # run by `make serving`, which has PEFT
# Compiled and run by `make examples`.
COMPILED = GUIDES / "publishing-elsewhere.md", {"rust", "c", "cpp", "js"}
START = GUIDES / "quick-start.md"  # two programs
TORCHRUN = GUIDES / "torchrun.md"  # a script of several processes
COMPOSE = ROOT / "docker-compose.yml"
MANIFESTS = ROOT / "deploy" / "kubernetes"
BLOCK = re.compile(r"^```(?P<language>[\w{}-]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_TEST = re.compile(r"(test_\w+\.py)::(test_\w+)")
README_LINES_MAX = 12  # of code, and commands, from nothing to a first publish
README_COMMANDS_MAX = 4


def blocks(page: Path, *languages: str) -> list[str]:
    found = BLOCK.finditer(page.read_text())
    return [match["code"] for match in found if match["language"] in languages]


def python_of(page: Path) -> str:
    """Return the code of a page, with the new side of its differences."""
    return "\n".join(side(block, "-") for block in blocks(page, "python", "py", "diff"))


def side(block: str, without: str) -> str:
    """Return a block as it is; of a difference, the side that has not the lines so marked."""
    lines = block.splitlines()
    if any(line[:1] not in ("+", "-", " ", "") for line in lines):
        return block
    return "\n".join(line[1:] for line in lines if line[:1] != without)


def shell_lines() -> list[str]:
    code = [block for page in PAGES for block in blocks(page, "sh", "bash", "console")]
    lines = [line.removeprefix("$ ") for block in code for line in block.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def runs_here(page: Path) -> bool:
    return page not in (*TRAINING, PEFT, START, TORCHRUN) and bool(python_of(page))


@pytest.mark.parametrize("page", [p for p in PAGES if runs_here(p)], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    run_python_of(page, tmp_path)


def test_the_two_programs_of_the_quick_start_find_each_other(tmp_path: Path) -> None:
    running: list[subprocess.Popen[str]] = []
    for block in blocks(START, "python"):
        assert len([line for line in block.splitlines() if line]) <= 10, "ten lines a side"
        code = block.replace("tcp://127.0.0.1:5555", f"ipc://{tmp_path}/bus")
        command = [sys.executable, "-c", code]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))  # noqa: S603
    try:
        trainer, worker = (process.communicate(timeout=60)[0] for process in running)
    finally:
        for process in running:
            process.kill()
    assert trainer.count("applied") == 3
    assert worker == "[12. 12.]\n"


@pytest.mark.timeout(300)
def test_the_script_of_the_torchrun_guide_runs_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(python_of(TORCHRUN))
    words = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"
    receipt = python(*words, timeout=240, cwd=tmp_path).stdout
    assert re.search(r"^policy version 3 .*; rank-1 applied after", receipt, re.MULTILINE)


def test_a_first_publish_takes_few_lines() -> None:
    section = (ROOT / "README.md").read_text().split("## In your code")[1].split("\n## ")[0]
    (code,) = (match["code"] for match in BLOCK.finditer(section) if match["language"] == "python")
    (shell,) = (match["code"] for match in BLOCK.finditer(section) if match["language"] == "sh")
    assert len([line for line in code.splitlines() if line]) <= README_LINES_MAX
    assert len([line for line in shell.splitlines() if line]) <= README_COMMANDS_MAX


def run_python_of(page: Path, tmp_path: Path) -> None:
    code = python_of(page)
    (tmp_path / "page.py").write_text(code)
    # Not as a script, which processes that the page spawns would run again.
    run = "exec(compile(open('page.py').read(), 'page.py', 'exec'))"
    python("-c", run, timeout=360, cwd=tmp_path)


def test_the_makefile_sets_every_variable_that_it_uses() -> None:
    text = (ROOT / "Makefile").read_text()
    used = set(re.findall(r"(?<!\$)\$\((\w+)\)", text))
    without = {"MAKE", "AGAINST"}  # which make sets, and which is asked about before its use
    assert used - set(re.findall(r"^(\w+) *[?:]?=", text, re.MULTILINE)) == without


@pytest.mark.parametrize("line", shell_lines())
def test_shell_lines_name_what_exists(line: str) -> None:
    words = shlex.split(line, comments=True)
    match words[0]:
        case "make":
            folder, target = (words[2], words[3]) if words[1] == "-C" else (".", words[1])
            makefile = (ROOT / folder / "Makefile").read_text()
            assert target in re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
        case "weightbus":
            check_weightbus(words)
        case "kubectl":
            check_kubectl(words)
        case "docker" if words[1] in ("build", "network"):
            check_docker(words)
        case "docker" | "docker-compose":
            file = COMPOSE.read_text()
            match words[2:]:
                case ["--profile", profile, "up", *_]:
                    assert f"profiles: [{profile}]" in file
                case ["exec" | "pause" | "unpause", service, *_]:
                    assert service in re.findall(r"^  ([\w-]+):$", file, re.MULTILINE)
                case does:
                    assert does[:1] in (["ps"], ["run"], ["up"])
        case "python" | "python3" | ".venv/bin/python":
            assert words[1] == "-m" or (ROOT / words[1]).exists()
        case "pip" | "env/bin/pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            asked = re.findall(r"\[(\w+)\]", line)
            assert set(asked) <= extras["optional-dependencies"].keys()
        case "torchrun":
            get_args_parser().parse_args(words[1:])
        case "sbatch":
            assert (ROOT / words[1]).exists()
        case "cd":
            assert (ROOT / words[1]).is_dir()
        case "umask":
            pass  # the shell's own
        case ".":
            assert words[1:] == ["env/bin/activate"], "the reader's own"
        case "env/bin/python":
            assert words[1:] == ["mine.py"], "the reader's own"
        case other:
            pytest.fail(f"nothing here checks {other!r}: {line}")


def check_weightbus(words: list[str]) -> None:
    command = [word for word in words[1:2] if not word.startswith("-")]
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0, done.output
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    assert [option for option in options if option not in done.stdout] == []


def check_docker(words: list[str]) -> None:
    match words[1:]:
        case ["build", "-t", image, "."]:
            assert f"image: {image}\n" in (MANIFESTS / "base" / "relay.yaml").read_text()
        case ["network", "connect" | "disconnect", network, which]:
            text = COMPOSE.read_text()
            assert f"\n  {network.removeprefix('weightbus_')}: {{}}\n" in text
            assert f"\n  {which.split()[-1].rstrip(')')}:\n" in text
        case _:
            pytest.fail(f"nothing here checks {words}")


def check_kubectl(words: list[str]) -> None:
    """The manifests have what it names; `test_nodes.py` runs what they have."""
    match words[1:]:
        case ["label", "node", *_, label]:
            key = label.partition("=")[0]
            assert f"{key}: " in (MANIFESTS / "overlays" / "example" / "nodes.yaml").read_text()
        case ["apply", "-k", folder]:
            where = MANIFESTS / "overlays" / "example" if folder == "." else ROOT / folder
            assert (where / "kustomization.yaml").is_file()
        case ["-n", "weightbus", "rollout", "status", workload]:
            kind, _, name = workload.partition("/")
            kinds = {"daemonset": "DaemonSet", "deployment": "Deployment"}
            assert f"kind: {kinds[kind]}\nmetadata:\n  name: {name}\n" in all_manifests()
        case ["-n", "weightbus", "logs" | "exec", "trainer-0", *rest]:
            assert "kind: StatefulSet\nmetadata:\n  name: trainer\n" in all_manifests()
            if "--" in rest:
                check_weightbus(rest[rest.index("--") + 1 :])
        case _:
            pytest.fail(f"nothing here checks {words}")


def all_manifests() -> str:
    return "".join(file.read_text() for file in (MANIFESTS / "base").glob("*.yaml"))


def test_the_guide_makes_the_keys_that_the_manifests_take() -> None:
    guide = "\n".join(blocks(GUIDES / "kubernetes.md", "sh"))
    told = (MANIFESTS / "overlays" / "example" / "kustomization.yaml").read_text()
    keygen = re.findall(r"^#   (weightbus keygen .*)$", told, re.MULTILINE)
    assert re.findall(r"^weightbus keygen .*$", guide, re.MULTILINE) == keygen
    assert len(keygen) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_old_sides_of_differences_are_python(page: Path) -> None:
    for block in blocks(page, "diff"):
        ast.parse(side(block, "+"))


def test_every_block_is_checked() -> None:
    known = {"python", "py", "diff", "sh", "bash", "console", "", "{toctree}", "{eval-rst}"}
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            also: set[str] = COMPILED[1] if page == COMPILED[0] else set()
            assert match["language"] in known | also, f"{page.name}: a block of {match['language']}"


# The reference.

# Each public name with its module; but for a class of vLLM's, which is not installed.
FACES = (
    *(weightbus, weightbus.ray, weightbus.torchrl, weightbus.torchrun, weightbus.trl),
    weightbus.types,
    weightbus.vllm,
)
PUBLIC = [(name, face) for face in FACES for name in face.__all__ if name != "TrainerInit"]


def public() -> Iterator[tuple[str, object, str]]:
    """Yield what users may call: its name, itself, its docstring (of a class: the arguments)."""
    for name, face in PUBLIC:
        value = getattr(face, name)
        if not inspect.isclass(value):
            if inspect.isfunction(value):
                yield name, value, inspect.getdoc(value) or ""
            continue
        own = inspect.getdoc(value) or ""
        if "__init__" in vars(value) and not getattr(value, "_is_protocol", False):
            yield name, value.__init__, f"{own}\n{value.__init__.__doc__ or ''}"
        for key, member in vars(value).items():
            function = getattr(member, "__func__", member)
            if not key.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{key}", function, inspect.getdoc(function) or ""


def test_every_parameter_is_described() -> None:
    """By name, below `Args:` or in a sentence; or the docstring says whose arguments they are."""
    missing: list[str] = []
    for name, value, text in public():
        assert callable(value)
        words = set(re.findall(r"\w+", text))
        told = {"self", "cls", "_"} | words
        parameters = inspect.signature(value).parameters
        if not words or "Arguments" not in words:
            missing += [f"{name}({p})" for p in parameters if p not in told]
    assert not missing, "their docstrings do not say what these are"


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "API.md").read_text()
    documented = re.findall(r"^\.\. auto\w+:: ([\w.]+)\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted((face.__name__, name) for name, face in PUBLIC)


def test_the_tests_that_pages_name_are_there() -> None:
    tests: dict[str, str] = {}  # files of some names are in several folders
    for file in (ROOT / "tests").rglob("test_*.py"):
        tests[file.name] = tests.get(file.name, "") + file.read_text()
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    named = [each for page in pages for each in NAMED_TEST.findall(page.read_text())]
    assert len(named) > 50
    assert [f"{f}::{t}" for f, t in named if f"def {t}(" not in tests.get(f, "")] == []


def test_every_page_is_on_the_site() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    there = {
        path
        for block in BLOCK.finditer(index)
        if block["language"] == "{toctree}"
        for path in block["code"].split()
    }
    for page in PAGES:
        path = page.relative_to(ROOT / "docs") if "docs" in page.parts else page.relative_to(ROOT)
        name = path.with_suffix("").as_posix()
        assert {name, f"/{name}"} & there or name == "index", f"docs/index.md lacks {name}"

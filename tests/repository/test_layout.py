"""The architecture holds: who may import whom, what the root contains, what nobody may use."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import weightbus

ROOT = Path(__file__).resolve().parents[2]
SHELVES = ("bus", "codecs", "python_client")
BESIDE = ("tests", "benchmarks", "examples")
PACKAGE = ROOT / "src" / "weightbus"
MODULES = sorted(
    [*PACKAGE.glob("*.py"), *(path for shelf in SHELVES for path in (ROOT / shelf).rglob("*.py"))]
)
DEMO = sorted((ROOT / "examples" / "demo").rglob("*.py"))
SHIPPED = [*MODULES, *DEMO]
OTHERS = sorted(path for shelf in BESIDE for path in (ROOT / shelf).rglob("*.py"))
FUNCTION_LINES_MAX = 70

# Who may import whom. A folder that is not named here may import nothing; a folder of the bus is a
# room of its own, the others are one room with all their folders.
MAY_IMPORT = {
    "codecs": {"codecs"},
    "bus": {"bus", "codecs"},
    "bus/memory": {"bus", "bus/memory", "codecs"},
    "bus/publisher": {"bus", "bus/publisher", "bus/trust", "codecs"},
    "bus/worker": {"bus", "bus/worker", "codecs"},
    "bus/trust": {"bus", "bus/trust", "codecs"},
    "bus/net": {
        *("bus", "bus/memory", "bus/publisher", "bus/trust", "bus/worker", "bus/net"),
        "codecs",
    },
    "python_client": {
        *("bus", "bus/memory", "bus/publisher", "bus/trust", "bus/worker", "bus/net"),
        *("python_client", "codecs"),
    },
}

# But for the one that starts an example, which is no part of the library.
MAY_IMPORT_TOO = {("python_client/cli/commands.py", "weightbus.examples.demo.course.run_demo")}

# What only some modules may import. Everything else in the package must do without.
ONLY_IN = {
    "zmq": {"bus/net/control.py", "bus/trust/curve.py"},
    "pickle": set[str](),
    "cloudpickle": set[str](),
    "dill": set[str](),
    "marshal": set[str](),
    "shelve": set[str](),
}

# What machines, which only decide, may not import, nor may what they import.
DOING = {
    *(
        "asyncio",
        "fcntl",
        "mmap",
        "multiprocessing",
        "os",
        "random",
        "resource",
        "secrets",
        "select",
    ),
    *("selectors", "signal", "socket", "subprocess", "tempfile", "threading", "time", "zmq"),
}
# But for the environment, which says once whether the helper in C is to be used.
DOING_ALLOWED = {("codecs/native.py", "os")}
# The rooms that a machine may reach, beside its own.
WORDS = {"bus/worker": {"bus", "codecs"}, "bus/publisher": {"bus", "bus/trust", "codecs"}}

# What codecs, being pure, may not import.
WAITS_FOR_DEVICES = {"threading", "time"}  # which run beside this process
IMPURE = {"asyncio", "multiprocessing", "random", "select", "socket", "threading", "time", "zmq"}

# Pickle by other names.
FORBIDDEN_CALLS = {"send_pyobj", "recv_pyobj", "torch.load", "torch.save"}

FACE = [
    "AddressError",
    "ApplyError",
    "ClosedError",
    "DeadlineError",
    "FileTarget",
    "Http",
    "KeysError",
    "LayoutError",
    "ProtocolError",
    "PublishError",
    "Publisher",
    "PublisherKeys",
    "RefusedError",
    "Settings",
    "StateError",
    "StateFolderError",
    "Subscriber",
    "TornError",
    "UnchangedError",
    "UnknownWorkerError",
    "WeightBusError",
    "WorkerKeys",
    "WorkersMissingError",
    "load",
    "resident",
]
NAMES_MAX = 30  # on the face: what somebody new has to look through

# What has a face of its own, and where old imports still find it.
FACES = {
    "torchrl": [
        "DistributedTransport",
        "DistributedWeightSyncScheme",
        "InitialSyncTransport",
        "MPTransport",
        "MultiProcessWeightSyncScheme",
        "NoWeightSyncScheme",
        "RPCTransport",
        "RPCWeightSyncScheme",
        "RayActorTransport",
        "RayModuleTransformReceiver",
        "RayModuleTransformScheme",
        "RayModuleTransformSender",
        "RayTransport",
        "RayWeightSyncScheme",
        "RayWeightUpdater",
        "SharedMemTransport",
        "SharedMemWeightSyncScheme",
        "TransportBackend",
        "WeightReceiver",
        "WeightSender",
        "WeightStrategy",
        "WeightSyncBackend",
        "WeightSyncScheme",
        "WeightUpdaterBase",
        "ZMQWeightSyncScheme",
        "register_weight_sync_backend",
    ],
    "types": [
        "Offer",
        "Pairs",
        "Receipt",
        "Running",
        "StoredVersion",
        "Update",
        "WorkerEvent",
        "WorkerReceipt",
        "WorkerStatus",
    ],
}
MOVED = [(face, public) for face, names in FACES.items() for public in names]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room(parts: Sequence[str]) -> str:
    """Return the room of a dotted path below the package: a shelf, or a folder of the bus."""
    shelf, *rest = parts
    return f"bus/{rest[0]}" if shelf == "bus" and (ROOT / shelf / rest[0]).is_dir() else shelf


def room_of(path: Path) -> str:
    return room(path.relative_to(ROOT).parts)


@cache
def imports(path: Path) -> Sequence[str]:
    """Return what a module imports, as absolute dotted names."""
    return [*_imports(path)]


def _imports(path: Path) -> Iterator[str]:
    top = PACKAGE if path.parent == PACKAGE else ROOT
    package = ("weightbus", *path.relative_to(top).parts[:-1])
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            stem = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{stem}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_run_one_way(path: Path) -> None:
    if path.parent == PACKAGE:
        return  # faces may import all of them
    for imported in imports(path):
        first, *rest = imported.split(".")
        if first == "weightbus" and (name(path), imported) not in MAY_IMPORT_TOO:
            assert rest, f"{name(path)} imports the face"
            assert room(rest) in MAY_IMPORT.get(room_of(path), set()), (
                f"{name(path)} imports {imported}"
            )


def test_schemes_take_only_words_of_the_bus_and_none_of_its_machines() -> None:
    for path in (ROOT / "python_client" / "schemes").glob("*.py"):
        for imported in imports(path):
            first, *rest = imported.split(".")
            rooms = {"bus", "bus/trust", "codecs", "python_client"}
            assert first != "weightbus" or room(rest) in rooms, f"{name(path)} imports {imported}"


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_restricted_imports(path: Path) -> None:
    for imported in imports(path):
        first = imported.split(".")[0]
        assert name(path) in ONLY_IN.get(first, {name(path)}), f"{name(path)} imports {imported}"


def module_of(imported: str) -> Path | None:
    """Return the file of ours that an import reads, if it is one of ours."""
    parts = imported.split(".")[1:]
    found = [ROOT.joinpath(*parts[:end]).with_suffix(".py") for end in (len(parts), len(parts) - 1)]
    return next((path for path in found if path in MODULES), None)


def reached(path: Path) -> set[Path]:
    """Return a module, and all of ours that it imports, or that these import."""
    found, todo = set[Path](), [path]
    while todo:
        here = todo.pop()
        if here not in found:
            found.add(here)
            todo += [module for i in imports(here) if (module := module_of(i)) is not None]
    return found


def deeds(path: Path) -> set[tuple[str, str]]:
    """Return what a module reaches that does more than decide: the file, and what it imports."""
    firsts = {(name(at), i.split(".")[0]) for at in reached(path) for i in imports(at)}
    return {(at, first) for at, first in firsts if first in DOING} - DOING_ALLOWED


@pytest.mark.parametrize("path", [p for p in MODULES if room_of(p) in WORDS], ids=name)
def test_machines_only_decide(path: Path) -> None:
    assert not deeds(path)
    assert {room_of(at) for at in reached(path)} <= {room_of(path), *WORDS[room_of(path)]}


def test_a_shell_does_what_it_is_told() -> None:
    """The walk finds what is there to be found, also where it is not imported at first hand."""
    found = deeds(ROOT / "bus" / "net" / "worker_loop.py")
    assert {("bus/net/worker_loop.py", "threading"), ("bus/memory/pages.py", "mmap")} <= found


@pytest.mark.parametrize("path", sorted((ROOT / "codecs").rglob("*.py")), ids=name)
def test_codecs_are_pure(path: Path) -> None:
    allowed = WAITS_FOR_DEVICES if name(path) == "codecs/device_copies.py" else set[str]()
    for imported in imports(path):
        first = imported.split(".")[0]
        assert first not in IMPURE - allowed, f"{name(path)} imports {imported}"
        assert not imported.startswith("torch.distributed"), f"{name(path)} imports {imported}"


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_nothing_unpickles(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in FORBIDDEN_CALLS, f"{name(path)}:{node.lineno}"
            assert ast.unparse(node) not in FORBIDDEN_CALLS, f"{name(path)}:{node.lineno}"
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", f"{name(path)}:{node.value.lineno}"


@pytest.mark.parametrize("path", [*MODULES, *OTHERS], ids=name)
def test_functions_fit_a_screen(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{name(path)}:{node.lineno} {node.name}: {lines}"


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_every_module_says_its_subject(path: Path) -> None:
    assert ast.get_docstring(tree(path)), f"{name(path)} has no docstring"


def test_only_the_package_has_an_init() -> None:
    found = {p for shelf in (*SHELVES, *BESIDE) for p in (ROOT / shelf).rglob("__init__.py")}
    assert not found, "folders are shelves: import from the file"


def test_the_root_holds_no_module_of_the_package() -> None:
    """Whose path has the root, or what holds it, must not import a clone: see test_beside.py."""
    assert {path.name for path in ROOT.glob("*.py")} == {"setup.py"}
    assert not (ROOT / "weightbus").exists()


def test_the_package_is_one_tree() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {
        *("__init__.py", "__main__.py"),
        *(f"{face}.py" for face in FACES),
    }
    links = {path.name: path.resolve() for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == {shelf: ROOT / shelf for shelf in (*SHELVES, *BESIDE)}


def test_every_shelf_is_marked_as_typed() -> None:
    for folder in (PACKAGE, *(ROOT / shelf for shelf in SHELVES)):
        assert (folder / "py.typed").is_file()


def test_the_package_is_loaded_once() -> None:
    for key, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve() in MODULES:
            assert key.split(".")[0] == "weightbus", f"{file} is loaded as {key}"


def test_the_face_is_this_list() -> None:
    assert weightbus.__all__ == FACE
    assert len(FACE) <= NAMES_MAX
    assert {*FACE, *FACES, "__version__"} <= set(dir(weightbus))


@pytest.mark.parametrize("face", FACES)
def test_other_faces_are_these_lists(face: str) -> None:
    there = getattr(weightbus, face)
    assert there is import_module(f"weightbus.{face}")
    assert there.__all__ == FACES[face]
    assert set(FACES[face]) <= set(dir(there))
    with pytest.raises(AttributeError, match="no attribute 'Publischer'"):
        _ = there.Publischer


@pytest.mark.parametrize(("face", "public"), MOVED)
def test_what_has_moved_is_found_where_it_was(face: str, public: str) -> None:
    there = getattr(getattr(weightbus, face), public)
    with pytest.warns(DeprecationWarning, match=f"moved to weightbus.{face}: ") as told:
        assert getattr(weightbus, public) is there
    assert [Path(warning.filename) for warning in told] == [Path(__file__)], "not who imports it"


@pytest.mark.parametrize("public", FACE)
def test_every_public_name_resolves(public: str) -> None:
    value = getattr(weightbus, public)
    assert vars(weightbus)[public] is value, "found anew each time"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Publischer'"):
        _ = weightbus.Publischer


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, weightbus, weightbus.torchrl; "
        "print([m for m in ('torch', 'tensordict', 'zmq', 'ray', 'torchrl', 'numpy') "
        "if m in sys.modules])"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("within", ["", "src"])
def test_no_face_hides_what_it_is_named_after(within: str) -> None:
    """A checkout may be on Python's path: `python -m pytest` puts it there."""
    code = (
        "import importlib.util as i; print([i.find_spec(n).origin for n in ('torchrl', 'types')])"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        cwd=ROOT / within,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "torchrl" in done.stdout
    assert "weightbus" not in done.stdout.replace(str(ROOT), "")

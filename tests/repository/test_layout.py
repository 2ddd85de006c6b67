"""The architecture holds: who may import whom, what the root contains, what nobody may use."""

import ast
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, reduce
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import weightbus
from weightbus.tests.cli.starting import python

ROOT = Path(__file__).resolve().parents[2]
SHELVES = ("bus", "codecs", "python_client")
BESIDE = ("tests", "benchmarks", "examples", "protocol")
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

# But for the one that starts an example, which is not part of the library.
MAY_IMPORT_TOO = {("python_client/cli/commands.py", "weightbus.examples.demo.course.run_demo")}

# What only some modules may import. Everything else in the package must do without.
ONLY_IN = {
    "nacl": {"bus/trust/curve_server.py"},
    "zmq": {"bus/net/control.py", "bus/trust/curve.py", "bus/trust/curve_server.py"},
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
    "Part",
    "ProtocolError",
    "PublishError",
    "Publisher",
    "PublisherKeys",
    "RefusedError",
    "Relay",
    "RelayKeys",
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
    "gather",
    "load",
    "resident",
    "sharded",
]
NAMES_MAX = 30  # on the face: what somebody new has to look through

# What has a face of its own, and where old imports still find it.
FACES = {
    "ray": ["NodeRelay", "Relays", "address", "relays"],
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
    "torchrun": ["Relays", "relays"],
    "types": [
        "Gathered",
        "HeldVersion",
        "Offer",
        "Pairs",
        "Receipt",
        "Receipts",
        "RelayStatus",
        "Running",
        "Sharded",
        "Staged",
        "StoredVersion",
        "Update",
        "WorkerEvent",
        "WorkerReceipt",
        "WorkerStatus",
    ],
    "trl": ["WeightTransfer"],
    "vllm": [
        "ServerError",
        "TrainerInit",
        "UnsupportedVllmError",
        "VllmServer",
        "VllmServers",
        "register",
    ],
}


@cache
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


def each_import(paths: Iterable[Path]) -> Iterator[tuple[Path, str, list[str], str]]:
    """Yield every import: the module, the top of what it imports, the rest, and both in words."""
    for path in paths:
        for imported in imports(path):
            first, *rest = imported.split(".")
            yield path, first, rest, f"{name(path)} imports {imported}"


def outside(paths: Iterable[Path], rooms: Callable[[Path], set[str]]) -> set[str]:
    """Return which imports of ours lead to other rooms than a module may import, or to the face."""
    return {
        said
        for path, first, rest, said in each_import(paths)
        if first == "weightbus" and (not rest or room(rest) not in rooms(path))
    }


def test_imports_run_one_way() -> None:
    inside = [path for path in MODULES if path.parent != PACKAGE]  # faces may import all of them
    found = outside(inside, lambda path: MAY_IMPORT.get(room_of(path), set()))
    assert found == {f"{path} imports {imported}" for path, imported in MAY_IMPORT_TOO}


def test_schemes_take_only_words_of_the_bus_and_none_of_its_machines() -> None:
    schemes = (ROOT / "python_client" / "schemes").glob("*.py")
    assert not outside(schemes, lambda _: {"bus", "bus/trust", "codecs", "python_client"})


def test_restricted_imports() -> None:
    assert not [
        said
        for path, first, _, said in each_import(SHIPPED)
        if name(path) not in ONLY_IN.get(first, {name(path)})
    ]


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


def test_machines_only_decide() -> None:
    for path in (path for path in MODULES if room_of(path) in WORDS):
        assert not deeds(path), name(path)
        rooms = {room_of(at) for at in reached(path)} - {room_of(path)}
        assert rooms <= WORDS[room_of(path)], name(path)


def test_a_shell_does_what_it_is_told() -> None:
    """The walk finds what is there to be found, also where it is not imported at first hand."""
    found = deeds(ROOT / "bus" / "net" / "worker_loop.py")
    assert {("bus/net/worker_loop.py", "threading"), ("bus/memory/pages.py", "mmap")} <= found


def test_codecs_are_pure() -> None:
    for path, first, rest, said in each_import((ROOT / "codecs").rglob("*.py")):
        waits = first in WAITS_FOR_DEVICES and name(path) == "codecs/device_copies.py"
        assert first not in IMPURE or waits, said
        assert [first, *rest[:1]] != ["torch", "distributed"], said


def test_nothing_unpickles() -> None:
    for path in SHIPPED:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute):
                called = {node.attr, f"{getattr(node.value, 'id', '')}.{node.attr}"}
                assert not called & FORBIDDEN_CALLS, f"{name(path)}:{node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", f"{name(path)}:{node.value.lineno}"


def test_functions_fit_a_screen() -> None:
    for path in [*MODULES, *OTHERS]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                told = f"{name(path)}:{node.lineno} {node.name}: {lines} lines"
                assert lines <= FUNCTION_LINES_MAX, told


def test_every_module_says_its_subject() -> None:
    assert not [name(path) for path in SHIPPED if not ast.get_docstring(tree(path))]


def test_only_the_package_has_an_init() -> None:
    found = {p for shelf in (*SHELVES, *BESIDE) for p in (ROOT / shelf).rglob("__init__.py")}
    assert not found, "folders are shelves: import from the file"


def test_the_root_holds_no_module_of_the_package() -> None:
    """Whose path has the root, or what holds it, must not import a clone: see test_beside.py."""
    assert {path.name for path in ROOT.glob("*.py")} == {"setup.py"}
    assert not (ROOT / "weightbus").exists()


def test_the_package_is_one_tree() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {
        *("__init__.py", "__main__.py", "lazy.py"),
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


def test_every_public_name_resolves() -> None:
    for public in FACE:
        value = getattr(weightbus, public)
        assert vars(weightbus)[public] is value, f"{public} is found anew each time"


def test_help_and_tracebacks_name_what_users_import() -> None:
    for public in [*FACE, *(f"types.{name}" for name in FACES["types"])]:
        value: Any = reduce(getattr, public.split("."), weightbus)
        if inspect.isclass(value):
            assert f"{value.__module__}.{value.__qualname__}" == f"weightbus.{public}"
            assert pickle.loads(pickle.dumps(value)) is value  # noqa: S301 - our own


def test_help_shows_each_parameter_with_its_default_and_no_inner_name() -> None:
    for public in ("Publisher", "Subscriber"):
        made = getattr(weightbus, public)
        assert f"help(weightbus.{public})" in made.__init__.__doc__
        named = [p for p in signature(made).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert all(p.default is not p.empty for p in named)
        assert not re.findall(r"weightbus\.(?:bus|codecs|python_client)\.", str(signature(made)))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Publischer'"):
        _ = weightbus.Publischer


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, weightbus, weightbus.torchrl; "
        "print([m for m in ('torch', 'tensordict', 'zmq', 'ray', 'torchrl', 'numpy') "
        "if m in sys.modules])"
    )
    assert python("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize("within", ["", "src"])
def test_no_face_hides_what_it_is_named_after(within: str) -> None:
    """A checkout may be on Python's path: `python -m pytest` puts it there."""
    code = (
        "import importlib.util as i; print([i.find_spec(n).origin for n in ('torchrl', 'types')])"
    )
    said = python("-c", code, cwd=ROOT / within).stdout
    assert "torchrl" in said
    assert "weightbus" not in said.replace(str(ROOT), "")

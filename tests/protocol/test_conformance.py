"""The conformance suite examines the Python client, and finds out whoever lies to it."""

import contextlib
import copy
import fnmatch
import gc
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weightbus.benchmarks.bus import TRANSPORTS
from weightbus.tests.cli.starting import python
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.conformance import elsewhere, relaying, run, vectors
from weightbus.tests.conformance.driver import Fault
from weightbus.tests.conformance.languages import CORE_LACKS, LANGUAGES, Language, chosen
from weightbus.tests.conformance.liar import BROKEN, LIES
from weightbus.tests.conformance.matrix import Cell, Matrix
from weightbus.tests.conformance.proxy import Proxy
from weightbus.tests.conformance.python_vectors import results
from weightbus.tests.conformance.rules import Passing, Which
from weightbus.tests.conformance.scenarios import SCENARIOS, Scenario, play
from weightbus.tests.conformance.stage import Stage

FOLDER = Path(__file__).parents[1] / "conformance"
PYTHON = chosen("python")[0]
PATIENCE = 3.0  # seconds for what will not come
SEED = 1
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

# What the Python client plays here; `make conformance` plays all.
SOME = ("every-shape-and-dtype", "malformed-messages", "together-aborted", "keys-patched-lossy")
ON_VECTORS = (
    *("reader-of-anything", "forgetful", "repetitive", "evasive", "in-floats", "silent-sender"),
)
CAUGHT_IN = {  # and where that shows
    **dict.fromkeys(LIES.keys() - set(ON_VECTORS), "late-join"),
    "blind": "damaged-chunks",
    "obedient": "commit-of-another-digest",
    "old": "patched",
    "credulous": "patched-wrongly",
    "mute": "patched-another-base",
    "stubborn": "join-and-push",
    "dying": "join-and-push",
}
VECTORS = vectors.tables()


def liar(lie: str) -> list[str]:
    return [sys.executable, str(FOLDER / "liar.py"), lie]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What the Python driver makes of all vectors."""
    return [*results(vectors.FOLDER)]


def test_the_python_client_agrees_with_all_vectors(answers: list[dict[str, Any]]) -> None:
    counts = vectors.judged(answers, {})
    assert list(vectors.faults(counts)) == []
    assert {file: count.right for file, count in counts.items()} == {
        file: len(cases) for file, cases in VECTORS.items()
    }


@pytest.mark.parametrize("name", SOME)
def test_the_python_client_passes(name: str) -> None:
    assert run.scenario_cell(BY_NAME[name], PYTHON, SEED) == Cell("right")


@pytest.mark.parametrize("lie", sorted(CAUGHT_IN))
def test_a_liar_is_found_out(lie: str) -> None:
    fault = play(BY_NAME[CAUGHT_IN[lie]], liar(lie), SEED, PATIENCE)
    assert fault, "nobody noticed"
    assert "broke off" not in fault


def test_every_lie_is_tried() -> None:
    assert set(CAUGHT_IN) | set(ON_VECTORS) == LIES.keys() | BROKEN.keys()


def lied(answers: list[dict[str, Any]], lie: str) -> list[dict[str, Any]]:
    """Return what a liar makes of them."""
    return [line for answer in answers for line in LIES[lie](copy.deepcopy(answer))]


@pytest.mark.parametrize("lie", ON_VECTORS)
def test_wrong_answers_to_the_vectors_are_red(answers: list[dict[str, Any]], lie: str) -> None:
    counts = vectors.judged(lied(answers, lie), {})
    assert any(count.faults for count in counts.values())
    cells = {file: run.cell_of(count) for file, count in counts.items()}
    assert any(cell.verdict == "wrong" for cell in cells.values())


def test_a_driver_that_dies_is_red_everywhere() -> None:
    counts = vectors.judge(liar("dying"))
    assert all(run.cell_of(count).verdict == "wrong" for count in counts.values())


def test_a_declaration_that_does_not_hold_is_red(answers: list[dict[str, Any]]) -> None:
    counts = vectors.judged(answers, {"phases.json": "there is no table"})
    assert counts["phases.json"].faults
    assert not counts["sequences.json"].faults


def test_a_table_that_a_driver_leaves_out_must_be_declared(answers: list[dict[str, Any]]) -> None:
    assert all(c.faults for c in vectors.judged([], {}).values())
    for modest in ([], lied(answers, "evasive")):
        counts = vectors.judged(modest, dict.fromkeys(VECTORS, "it can do nothing"))
        assert not any(c.faults for c in counts.values())


@dataclass(frozen=True, slots=True)
class Liar(Language):
    """A language whose driver lies."""

    @property
    def command(self) -> list[str]:
        return liar(self.key)


def test_one_red_cell_makes_the_run_red() -> None:
    matrix = Matrix(["Liar"])
    language = Liar("other-bytes", "Liar", "")
    for section, row, cell in run.examine(language, ["join-and-push"], SEED, on_vectors=False):
        matrix.add(section, row, "Liar", cell)
    assert matrix.wrong
    assert re.search(r"RED Liar, join-and-push: .*other bytes", matrix.plain())


def test_the_command_line_ends_with_success() -> None:
    words = ["--languages", "python", "--scenarios", "late-*", "--seed", "3"]
    done = python(FOLDER / "run.py", *words, timeout=100)
    assert re.search(r"^late-join +ok$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("words", [["--languages", "latin"], ["--scenarios", "nothing-such"]])
def test_what_is_not_there_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(words) == 2
    assert words[1] in capsys.readouterr().err


def test_a_missing_toolchain_is_loud_and_red_where_all_are_required() -> None:
    language = Language("x", "X", "python_client", ("no-such-tool",))  # it has no Makefile either
    for must, verdict in ((False, "not run"), (True, "wrong")):
        able, others = run.build([language], must=must)
        assert able == []
        assert others["X"].verdict == verdict


def matrix() -> Matrix:
    made = Matrix(["A", "B", "C"], titles={"play": "plays"})
    made.add("vectors", "some.json", "A", Cell("right", "7"))
    made.add("vectors", "some.json", "B", Cell("wrong", "6 of 7", faults=("x: not y",)))
    made.add("vectors", "some.json", "C", Cell("unsupported", "0 of 7", "cannot"))
    made.add("scenarios", "play", "A", Cell("right"))
    made.add("scenarios", "play", "B", Cell("wrong", faults=tuple("abcdefg")))
    made.add("scenarios", "play", "C", Cell("unsupported", reason="cannot"))
    made.add("scenarios", "more", "C", Cell("unsupported", reason="will not"))
    made.add("core", "play", "A", Cell("right"))
    return made


def test_the_page_shows_every_verdict() -> None:
    page = matrix().page()
    assert "| `some.json` | 7 | **6 of 7** | 0 of 7<sup>1</sup> |" in page
    assert "| plays (`play`) | yes | **NO** | no<sup>1</sup> |" in page
    assert "| not run | not run | no<sup>2</sup> |" in page
    assert "\n1. cannot\n2. will not\n" in page
    assert "published by the Rust core" in page
    assert "| plays (`play`) | yes | not run | not run |" in page
    assert page == matrix().page()


def test_the_terminal_shows_every_verdict_and_what_is_wrong() -> None:
    text = matrix().plain()
    assert re.search(r"^some\.json +ok 7 +RED 6 of 7 +- 0 of 7$", text, re.MULTILINE)
    assert re.search(r"^play +ok +RED +-$", text, re.MULTILINE)
    assert "RED B, some.json: x: not y" in text
    assert "RED B, play: and 2 more" in text
    assert text.count("left out: C: cannot") == 1
    assert matrix().wrong
    assert not Matrix(["A"]).wrong


@pytest.mark.parametrize("spoiled", [0, 1, run.AGAIN])
def test_a_red_scenario_is_played_alone_and_what_it_said_first_is_told(
    spoiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    def playing(scenario: Scenario, *_: object, **__: object) -> Cell:
        played.append(scenario.name)
        return Cell("wrong", faults=("again",)) if len(played) == spoiled else Cell("right")

    monkeypatch.setattr(run, "scenario_cell", playing)
    made = Matrix([PYTHON.title])
    made.add("core", "late-join", PYTHON.title, Cell("wrong", faults=("too late",)))
    made.add("core", "join-and-push", PYTHON.title, Cell("right"))
    (said,) = run.play_again(made, [PYTHON], SEED)
    assert said.startswith("PLAYED AGAIN Python, late-join, rust")
    assert "too late" in said
    assert made.wrong == (spoiled > 0)
    assert played == ["late-join"] * (spoiled or run.AGAIN)


def test_where_much_is_red_or_a_vector_nothing_is_played_again() -> None:
    made = Matrix([PYTHON.title])
    made.add("vectors", "some.json", PYTHON.title, Cell("wrong", faults=("x",)))
    assert run.play_again(made, [PYTHON], SEED) == []
    for name in list(BY_NAME)[: run.AGAIN + 1]:
        made.add("scenarios", name, PYTHON.title, Cell("wrong", faults=("x",)))
    assert run.play_again(made, [PYTHON], SEED) == []
    assert made.wrong


def test_every_language_has_a_row_of_its_own() -> None:
    assert len({language.key for language in LANGUAGES}) == len(LANGUAGES)
    for language in LANGUAGES:
        assert language.unsupported.keys() <= BY_NAME.keys() | VECTORS.keys()


def test_what_the_core_lacks_as_a_publisher_is_said_of_scenarios_that_there_are() -> None:
    assert CORE_LACKS.keys() < BY_NAME.keys()
    cell = run.scenario_cell(BY_NAME["shared-memory"], PYTHON, SEED, "rust")
    assert cell == Cell("unsupported", reason="it has no shared memory")


@pytest.mark.parametrize("name", ["cut-while-receiving", "publisher-restart"])
def test_the_python_client_passes_behind_a_relay(name: str) -> None:
    assert play(BY_NAME[name], PYTHON.command, SEED, relayed=True) == ""


@pytest.mark.parametrize("lie", ["blind", "obedient"])
def test_a_liar_behind_a_relay_is_found_out(lie: str) -> None:
    assert play(BY_NAME[CAUGHT_IN[lie]], liar(lie), SEED, PATIENCE, relayed=True)


def test_a_proxy_leaves_no_connection_open_that_comes_while_it_closes() -> None:
    closed = threading.Event()

    def connect(port: int) -> None:
        while not closed.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), PATIENCE).close()

    for _ in range(5):
        proxy = Proxy()
        closed.clear()
        threads = [threading.Thread(target=connect, args=(proxy.data_port,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        proxy.wait_connections(2)
        proxy.close()
        closed.set()
        for thread in threads:
            thread.join()
    del proxy
    gc.collect()  # pytest reports each open connection that is collected


def test_what_is_not_played_behind_a_relay_is_said_of_scenarios_that_there_are() -> None:
    for pattern in (*relaying.LACKS, *relaying.CORE_LACKS):
        names = {name.removeprefix(relaying.WITH_KEYS) for name in BY_NAME}
        assert fnmatch.filter(names, pattern), pattern
    left = [name for name in BY_NAME if relaying.lacking(name)]
    assert 0 < len(left) < len(BY_NAME)
    cell = run.scenario_cell(BY_NAME["cast-target"], PYTHON, SEED, relayed=True)
    made = Matrix([PYTHON.title])
    made.add("scenarios", "cast-target", PYTHON.title, cell)
    made.add("scenarios", "late-join", PYTHON.title, Cell("right"))
    assert run.counts_of(made) == ["Python: 1 passed, 0 failed, 1 left out"]


def test_variables_of_a_make_around_it_do_not_reach_the_build_of_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    rule = "SOURCES := Makefile\ndriver: $(SOURCES)\n\tmkdir build && touch build/driver\n"
    (tmp_path / "x" / "Makefile").write_text(rule)
    monkeypatch.setenv("MAKEFLAGS", " -- SOURCES=1")
    language = Language("x", "X", "x", ("make",), root=tmp_path)
    language.build()
    assert Path(language.command[0]).is_file()


def test_clients_and_a_publisher_can_be_of_another_checkout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    options = run.parse(["--clients", folder, "--publisher-of", folder])
    assert run.publishers_of(options) == ["rust"]
    for language in chosen(None, options.clients):
        assert any(folder in word for word in language.command), language.key
    driver = tmp_path / "rust_client" / "build" / "driver"
    driver.parent.mkdir(parents=True)
    driver.write_text("#!/bin/sh\necho another checkout >&2\n")
    driver.chmod(0o755)
    given = (BY_NAME["late-join"], PYTHON, SEED, "rust", options.publisher_of)
    assert "has ended: another checkout" in run.scenario_cell(*given).faults[0]


def test_every_scenario_says_what_a_worker_does() -> None:
    assert len(BY_NAME) == len(SCENARIOS)
    for scenario in SCENARIOS:
        assert scenario.play.__doc__, scenario.name
        assert "\n" not in scenario.title


def test_the_clients_are_measured() -> None:
    root = FOLDER.parent.parent
    words = ["--languages", "python", "--sizes", "64KiB/5", "--rounds", "2"]
    if (root / ".venv").is_dir():
        words += ["--against", str(root)]
    done = python("benchmarks/clients.py", *words, cwd=root, timeout=100)
    rows = re.findall(r"Python\b.* 1\.00 \(1\.00-1\.00\)", done.stdout)
    assert len(rows) == len(TRANSPORTS), done.stdout + done.stderr


def test_chance_comes_from_the_seed_alone() -> None:
    def picked() -> list[bool]:
        which = Which(["chunk"], share=0.5)
        passing = Passing("data", False, "", (b"", b"{}"), {"type": "chunk"})
        return [which(passing) for _ in range(50)]

    assert picked() == picked()
    assert 0 < sum(picked()) < 50


STUBBORN = """
import json, signal
told = {"address": "ipc://nowhere", "data_address": "ipc://nowhere", "epoch": 1}
print(json.dumps({"event": "bound"} | told), flush=True)
signal.pause()
"""
MUTE = "import signal; signal.pause()"


def publisher_that(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The publishers that are started, of which nothing is waited for long."""
    found: list[subprocess.Popen[str]] = []

    class Seen(subprocess.Popen[str]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Seen)
    monkeypatch.setattr(elsewhere, "CLOSE_SECONDS", 0.05)
    return found


def test_a_publisher_that_does_not_listen_is_not_left_behind(
    started: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "WAIT_SECONDS", 0.05)
    with (
        Stage([], random.Random(1), tmp_path, publisher=publisher_that(MUTE)) as stage,
        pytest.raises(Fault, match="does not say where it listens"),
    ):
        stage.open()
    assert [each.returncode for each in started] == [-signal.SIGKILL]


def test_what_follows_a_publisher_that_does_not_end_is_closed(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    stage = Stage([], random.Random(1), tmp_path, publisher=publisher_that(STUBBORN))
    threads = threading.active_count()
    for _ in range(2):
        stage.open()
    with pytest.raises(Fault, match="did not end"):
        stage.close()
    assert [each.returncode for each in started] == [-signal.SIGKILL] * 2
    wait_for(lambda: threading.active_count() < threads, "the end of the proxy", PATIENCE)


def test_a_publisher_that_does_not_end_does_not_hide_what_went_wrong_before(
    started: list[subprocess.Popen[str]],
) -> None:
    def strange(stage: Stage) -> None:
        stage.open()
        raise Fault("something is strange")

    fault = play(Scenario(strange), [], SEED, PATIENCE, publisher_that(STUBBORN))
    assert (fault, len(started)) == ("something is strange", 1)

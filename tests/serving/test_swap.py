"""Servers that go to a new version: none answers before all have it, nor with parts of two."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from weightbus.python_client.serving.calls import Server
from weightbus.python_client.serving.engines import ENGINES, EngineSettings
from weightbus.tests.serving.fake_engines import Fault, engines
from weightbus.tests.serving.test_bridge import (
    KINDS,
    LOADS,
    NO_ROOM,
    PAUSES,
    RESUMES,
    Stand,
    marks,
    of,
    same,
    standing,
    told,
)

WAIT_SECONDS = 0.3  # for what must not come


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fits", [True, False], ids=["loads", "fails"])
def test_no_server_goes_on_before_the_slowest_has_loaded(
    tmp_path: Path, kind: str, fits: bool
) -> None:
    with standing(tmp_path, kind, count=2) as (stand, (slow, fast)):
        stand.publish(of(1))
        for engine in (slow, fast):
            engine.calls.clear()
        gate = threading.Event()
        slow.fail(LOADS[kind], Fault(0 if fits else 500, "no room", gate=gate))
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(stand.publish, of(2))
            fast.wait_called(LOADS[kind])
            with fast.called:  # it loads, and must not answer with it yet
                resumed = fast.called.wait_for(lambda: RESUMES[kind] in fast.routes(), WAIT_SECONDS)
            gate.set()
            receipt, _ = publishing.result(20)
        assert not resumed
        assert told(receipt)[0] == ("applied" if fits else "failed")
        for engine in (slow, fast):
            routes = [r for r in engine.routes() if r in (PAUSES[kind], RESUMES[kind])]
            assert routes == [PAUSES[kind], RESUMES[kind]]
            assert same(engine, of(2 if fits else 1))
            assert not engine.paused
            assert engine.served_broken == []


def test_a_server_that_cannot_be_paused_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    with standing(tmp_path, "vllm", count=2) as (stand, (one, two)):
        stand.publish(of(1))
        two.fail(PAUSES["vllm"], Fault(500, {"error": "no"}))
        one.calls.clear()
        receipt, _ = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        assert LOADS["vllm"] not in one.routes()
        for engine in (one, two):
            assert same(engine, of(1))
            assert not engine.paused
        assert stand.worker.version("policy") == 1


@pytest.mark.parametrize(("kind", "pause"), [("vllm", None), ("sglang", None), ("sglang", "none")])
def test_parts_of_two_versions_never_answer(tmp_path: Path, kind: str, pause: str | None) -> None:
    """A tensor of a wrong shape in the middle, and nothing that would have known."""
    with standing(tmp_path, kind, pause=pause, unchecked=True) as (stand, (engine,)):
        stand.publish(of(1))
        engine.served_broken.clear()
        if kind == "sglang":  # whose way back fails by itself
            engine.fail(LOADS[kind], None, *[NO_ROOM] * 99)
        bad = {**of(2), "layers.2.weight": np.ones(3, np.float32)}
        receipt, said = stand.publish(bad)
        assert told(receipt)[0] == "failed"
        assert "size mismatch for layers.2.weight" in told(receipt)[1]
        assert f"{engine.url} " in said
        assert "nor has it loaded what it had before" in said
        assert "it stays paused until it loads a version" in said
        assert engine.paused
        assert RESUMES[kind] not in engine.routes()[-3:]
        if pause is None:
            assert engine.served_broken == []
        engine.faults.clear()
        if kind == "vllm":  # which keeps what was half loaded
            (text,) = stand.target.sync() or []
            assert f"{engine.url} keeps what it has half loaded" in text
            assert "restart it" in text
            assert (engine.paused, engine.version) == (True, "broken")
            assert told(stand.publish(of(4))[0])[0] == "failed"
            assert engine.paused
            engine.restart(of(0))
            stand.target._checked_at = 0.0  # noqa: SLF001 - so that it is time
        (text,) = stand.target.sync() or []
        assert "ran parts of two versions, and has loaded" in text
        assert not engine.paused
        assert same(engine, of(1))
        assert told(stand.publish(of(3))[0])[0] == "applied"
        assert same(engine, of(3))
        if pause is None:
            assert engine.served_broken == []


def test_the_next_version_repairs_it_too(tmp_path: Path) -> None:
    kind = "sglang"
    with standing(tmp_path, kind) as (stand, (engine,)):
        stand.publish(of(1))
        engine.fail(LOADS[kind], *[NO_ROOM] * 99)
        assert told(stand.publish(of(2))[0])[0] == "failed"
        assert engine.paused
        engine.faults.clear()
        assert told(stand.publish(of(3))[0])[0] == "applied"
        assert not engine.paused
        assert marks(stand.folder) == []
        assert same(engine, of(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bridge_that_was_killed_while_a_server_loads_leaves_it_to_the_next(
    tmp_path: Path, kind: str
) -> None:
    with engines(kind, of(0)) as (engine,):
        folder = tmp_path / "served"
        folder.mkdir()
        server = Server(engine.url)
        dead = ENGINES[kind](server, EngineSettings(None, 5.0, folder, str(folder)))
        dead.pause()
        engine.weights["layers.0.weight"] = of(9)["layers.0.weight"]  # how far it has come
        dead._part.touch()  # noqa: SLF001 - as it does before it asks
        stand = Stand(folder, [engine])
        assert stand.target.check_servers() == ""
        assert engine.paused  # since it may hold parts of two versions
        (text,) = stand.target.sync() or []
        assert "ran parts of two versions, and has loaded" in text
        assert not engine.paused
        assert same(engine, of(0))
        assert engine.served_broken == []
        stand.close()
        server.close()


def test_a_server_that_may_answer_with_parts_is_named(tmp_path: Path) -> None:
    with standing(tmp_path, "sglang", pause="none") as (stand, (engine,)):
        stand.publish(of(1))
        engine.fail(LOADS["sglang"], *[NO_ROOM] * 99)
        engine.fail(PAUSES["sglang"], *[Fault(500, {"error": "no"})] * 99)
        receipt, _ = stand.publish(of(2))
        assert "it may ANSWER with parts of two versions" in told(receipt)[1]

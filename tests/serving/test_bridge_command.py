"""`weightbus bridge`: what it shows, how it ends, and that no signal leaves a server paused."""

import json
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightbus
from weightbus.python_client.serving.calls import Server
from weightbus.tests.cli.test_cli import Command, result_of, run
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.serving.fake_engines import FakeEngine, Fault, engines
from weightbus.tests.serving.test_bridge import LOADS, marks, of, same


def words(publisher: str, home: Path, *servers: FakeEngine, **changes: object) -> list[object]:
    """Return a command line."""
    flags = [f"--{name}" for name in ("unchecked",) if changes.pop(name, None)]
    options: dict[str, object] = {"model": "policy", "kind": servers[0].kind, "folder": home}
    options |= {name: value for name, value in changes.items() if value is not None}
    urls: list[object] = [word for server in servers for word in ("--server", server.url)]
    named = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    return ["bridge", publisher, *urls, *(word for pair in named for word in pair), *flags]


def test_once(tmp_path: Path) -> None:
    with engines("sglang", of(0), 2) as made, weightbus.Publisher() as publisher:
        receipt = publisher.publish("policy", of(1))
        command = words(publisher.address, tmp_path / "served", *made)
        found = run(*command, "--once", "--json")
        assert found.exit_code == 0, found.output
        told = result_of(found)
        assert (told["kind"], told["achieved"], told["version"]) == ("update", True, 1)
        assert told["servers"] == [engine.url for engine in made]
        assert told["path"] == str(tmp_path / "served")
        for engine in made:
            assert same(engine, of(1))
            assert engine.version == f"{receipt.epoch}.1"
        shown = run(*command, "--once")
        assert shown.exit_code == 0
        assert f"loaded by {made[0].url}, {made[1].url} in " in shown.stdout


def test_a_refusal_ends_it_with_the_engines_words(tmp_path: Path) -> None:
    with engines("vllm", of(0)) as (engine,), weightbus.Publisher() as publisher:
        publisher.publish("policy", {"other.weight": np.ones(2, np.float32)})
        command = words(publisher.address, tmp_path / "served", engine, unchecked=True)
        found = run(*command, "--once", "--json")
        assert found.exit_code == 1
        told = result_of(found)
        assert told["achieved"] is False
        assert "There is no module or parameter named 'other.weight'" in told["text"]
        assert "it has loaded what it had before" in told["text"]
        assert same(engine, of(0))
        assert not engine.paused


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "triton"}, "--kind triton: give sglang or vllm"),
        ({"pause": "keep"}, "--pause keep: a sglang server has retract, abort, in_place, none"),
        ({"server": "gpu-1:8000"}, "'gpu-1:8000' is not a server's URL"),
        ({"lora": ""}, "--lora: give the name"),
        ({"folder": "/proc/no/such"}, "--folder /proc/no/such"),
        ({"model": "no good"}, "model"),
        ({"like": "/no/such"}, "does not exist"),
    ],
    ids=["kind", "pause", "server", "lora", "folder", "model", "like"],
)
def test_what_can_never_work(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with engines("sglang", of(0)) as (engine,):
        command = words("tcp://127.0.0.1:1", tmp_path / "served", engine, **changes)
        found = run(*command, "--once")
        assert found.exit_code == 2, found.output
        assert text in " ".join(found.output.replace("│", " ").split())


def test_a_server_twice(tmp_path: Path) -> None:
    with engines("sglang", of(0)) as (engine,):
        found = run(*words("tcp://127.0.0.1:1", tmp_path / "served", engine, engine))
    assert found.exit_code == 2
    assert "give each server once" in found.output


def test_weights_in_like_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with engines("sglang", of(0)) as (engine,):
        command = words("tcp://127.0.0.1:1", tmp_path / "served", engine, like=tmp_path)
        found = run(*command)
    assert found.exit_code == 2
    assert "cut short" in found.output


def test_a_server_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = partial(Server, pause=0.01)
    monkeypatch.setattr("weightbus.python_client.cli.bridge.Server", quick)
    with engines("sglang", of(0)) as (engine,):
        pass
    command = words("tcp://127.0.0.1:1", tmp_path / "served", engine, load_timeout=0.2)
    found = run(*command, "--once")
    assert found.exit_code == 1
    assert f"{engine.url} cannot be reached" in found.output
    assert "within 0.2 s (--load-timeout)" in found.output


def test_a_server_of_another_kind_is_not_waited_for(tmp_path: Path) -> None:
    with engines("sglang", of(0)) as (engine,):
        command = words("tcp://127.0.0.1:1", tmp_path / "served", engine, kind="vllm")
        found = run(*command, "--once")
    assert found.exit_code == 1
    assert "--kind sglang" in found.output


def test_a_checkpoint_that_is_not_here_ends_it_with_the_ways_out(tmp_path: Path) -> None:
    with engines("vllm", of(0)) as (engine,), weightbus.Publisher() as publisher:
        publisher.publish("policy", of(1))
        engine.home = str(tmp_path / "elsewhere")
        command = words(publisher.address, tmp_path / "served", engine)
        found = run(*command, "--once")
        assert found.exit_code == 1
        said = " ".join(found.output.split())
        assert f"cannot check versions for {engine.url}" in said
        assert "--like" in said
        assert "--unchecked" in said
        assert engine.routes() == []
        assert run(*command, "--once", "--unchecked").exit_code == 0
        assert same(engine, of(1))


def test_what_does_not_fit_the_served_checkpoint_ends_it(tmp_path: Path) -> None:
    with engines("sglang", of(0)) as (engine,), weightbus.Publisher() as publisher:
        publisher.publish("policy", {"other.weight": np.ones(2, np.float32)})
        found = run(*words(publisher.address, tmp_path / "served", engine), "--once", "--json")
        assert found.exit_code == 1
        assert f"{engine.home}, which {engine.url} serves: it lacks" in result_of(found)["text"]
        assert engine.routes() == []


def test_its_extra_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with engines("sglang", of(0)) as (engine,):
        found = run(*words("tcp://127.0.0.1:1", tmp_path / "served", engine))
    assert found.exit_code == 1
    assert "weightbus[serving]" in found.output


def test_an_adapter(tmp_path: Path) -> None:
    layer = "base_model.model.model.layers.0.q_proj"
    weights = {f"{layer}.lora_A.weight": np.ones((4, 8), np.float32)}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    with engines("vllm", of(0)) as (engine,), weightbus.Publisher() as publisher:
        publisher.publish("policy.lora", weights)
        options: dict[str, Any] = {"model": "policy.lora", "lora": "chat", "like": tmp_path}
        found = run(*words(publisher.address, tmp_path / "served", engine, **options), "--once")
        assert found.exit_code == 0, found.output
        assert list(engine.adapters) == ["chat"]


class Bridge:
    """A bridge in a process of its own, and a server that is being asked to load."""

    def __init__(self, tmp_path: Path, engine: FakeEngine, publisher: weightbus.Publisher) -> None:
        self.engine, self.gate = engine, threading.Event()
        engine.fail(LOADS[engine.kind], Fault(gate=self.gate))
        self.words = words(publisher.address, tmp_path / "served", engine)
        self.command = Command(*self.words)
        publisher.wait_for_workers(1, timeout=60, model="policy")
        self.receipt = publisher.publish_async("policy", of(1), require=0, timeout=60)
        engine.wait_called(LOADS[engine.kind])


def test_ctrl_c_while_a_server_loads(tmp_path: Path) -> None:
    with engines("vllm", of(0)) as (engine,), weightbus.Publisher() as publisher:
        bridge = Bridge(tmp_path, engine, publisher)
        assert engine.paused
        bridge.command.process.send_signal(signal.SIGINT)
        bridge.gate.set()
        code, told = bridge.command.end()
        assert (code, told["kind"], told["written"]) == (0, "stopped", 0)
        assert not engine.paused
        assert same(engine, of(0))  # all or nothing
        (worker,) = bridge.receipt.result(60).workers.values()
        assert worker.state == "failed"
        assert "SIGINT" in worker.detail
        wait_for(lambda: publisher.workers() == {}, "left", 60)
        assert engine.served_broken == []


def test_ctrl_c_while_a_server_is_awaited(tmp_path: Path) -> None:
    with engines("vllm", of(0)) as (engine,):
        gate = threading.Event()
        engine.fail("/weight_info", Fault(gate=gate))
        command = Command(*words("tcp://127.0.0.1:1", tmp_path / "served", engine))
        with engine.called:
            assert engine.called.wait_for(lambda: engine.calls, 60)
        command.process.send_signal(signal.SIGINT)
        gate.set()
        code, told = command.end()
        assert (code, told["kind"], told["achieved"]) == (130, "stopped", False)


def test_a_killed_bridge_leaves_a_pause_to_the_next(tmp_path: Path) -> None:
    with engines("vllm", of(0)) as (engine,), weightbus.Publisher() as publisher:
        bridge = Bridge(tmp_path, engine, publisher)
        bridge.command.process.kill()
        bridge.command.process.communicate(timeout=60)
        wait_for(lambda: [w.state for w in publisher.workers().values()] == ["lost"], "lost", 60)
        bridge.gate.set()
        assert engine.paused
        assert len(marks(tmp_path / "served")) == 1
        found = run(*bridge.words, "--once")
        assert found.exit_code == 0, found.output
        assert not engine.paused
        assert marks(tmp_path / "served") == []
        assert same(engine, of(1))

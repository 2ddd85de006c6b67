"""`weightbus relay`, and what observers see at a relay's address: real processes."""

import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import weightbus
from weightbus.bus.trust.keys import generate
from weightbus.tests.cli.test_cli import (
    DEADLINE,
    SMALL,
    Command,
    Commands,
    commands,
    result_of,
    run,
)
from weightbus.tests.client.settling import arrays
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address

ANY = "tcp://127.0.0.1:0"
SOON = weightbus.Settings(ping=0.1, lost_after=3.0)


__all__ = ["commands"]  # a fixture


def started(commands: Commands, upstream: str, *options: object) -> tuple[Command, dict[str, Any]]:
    """Start a relay of model `m`; return it and what it says first."""
    command = commands("relay", upstream, "--model", "m", "--bind", ANY, *options)
    return command, command.line()


def test_a_checkpoint_goes_through_two_relays_into_a_file(
    commands: Commands, tmp_path: Path
) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    save_file(SMALL, source)
    publisher, address = commands.publish(source, "--watch", "--metadata", "step=7")
    first, told = started(commands, address, "--name", "first", "--model", "other")
    assert (told["kind"], told["name"], told["upstream"]) == ("listening", "first", address)
    assert told["models"] == ["m", "other"]
    second, below = started(commands, told["address"])
    worker = commands.subscribe(below["address"], out, "--name", "w")
    update = worker.line()
    assert (update["version"], update["metadata"]) == (1, {"step": "7"})
    assert load_file(out)["layer.weight"].tolist() == SMALL["layer.weight"].tolist()
    assert second.event("joined")["worker"] == "w"
    joined = first.line()
    assert (joined["kind"], joined["joined"], joined["address"]) == ("upstream", True, address)
    version = first.line()
    assert version == {
        "kind": "version",
        **{name: update[name] for name in ("model", "epoch", "version", "nbytes", "digest")},
        "metadata": {"step": "7"},
    }
    code, last = first.stop(signal.SIGTERM)
    assert (code, last) == (0, {"kind": "stopped", "signal": "SIGTERM", "passed": 1})
    code, last = second.stop(signal.SIGINT)
    assert (code, last["kind"], last["signal"]) == (0, "stopped", "SIGINT")
    assert publisher.event("left")["worker"] == "first", "it says goodbye"


def test_a_relay_goes_on_without_its_publisher(commands: Commands) -> None:
    address = lasting_address()
    publisher = weightbus.Publisher(address)
    relay, told = started(commands, address, "--name", "r")
    publisher.publish_async("m", arrays(), timeout=DEADLINE)
    assert relay.line()["joined"]
    assert relay.line()["version"] == 1
    publisher.close()
    assert "relay r has no publisher" in relay.complaint("has no publisher")
    gone = relay.line()
    assert (gone["kind"], gone["joined"]) == ("upstream", False)
    target = arrays()
    with weightbus.Subscriber(told["address"], {"m": target}, name="late").start() as late:
        assert late.wait_for_version("m", timeout=DEADLINE)
    with weightbus.Publisher(address):
        back = relay.line()
        assert (back["kind"], back["joined"]) == ("upstream", True)
    assert relay.stop(signal.SIGTERM)[0] == 0


def test_a_relay_has_the_keys_and_the_name_of_its_folder(
    commands: Commands, tmp_path: Path
) -> None:
    keys, out = tmp_path / "keys", tmp_path / "out.safetensors"
    generate(keys, {"r": "relay", "w": "worker"}, at=["r"])
    generate(tmp_path / "others", {"r": "relay"})
    with weightbus.Publisher(keys=keys) as publisher:
        _, told = started(commands, publisher.address, "--keys", keys / "relays" / "r")
        assert told["name"] == "r"
        file = keys / "workers" / "w@r.json"
        worker = commands.subscribe(told["address"], out, "--keys", file)
        publisher.publish("m", arrays(), expect=1, timeout=DEADLINE)
        assert worker.line()["version"] == 1
        stranger, _ = started(commands, publisher.address, "--keys", tmp_path / "others")
        code, last = stranger.end()
    assert (code, last["error"]) == (1, "RefusedError")
    assert f"the publisher at {publisher.address} refuses relay 'r' (keys)" in last["text"]


def test_a_relay_of_a_name_that_is_taken_ends(commands: Commands) -> None:
    with (
        weightbus.Publisher() as publisher,
        weightbus.Subscriber(publisher.address, {"m": arrays()}, name="same") as worker,
    ):
        assert worker.wait_joined(DEADLINE)
        relay, _ = started(commands, publisher.address, "--name", "same")
        code, last = relay.end()
    assert (code, last["kind"], last["error"]) == (1, "error", "RefusedError")
    assert "name-taken" in last["text"]


def test_a_relay_that_has_joined_before_goes_on_when_it_is_refused(commands: Commands) -> None:
    address = lasting_address()
    with weightbus.Publisher(address, settings=weightbus.Settings(epoch=2)) as publisher:
        relay, told = started(commands, address, "--name", "r")
        publisher.publish_async("m", arrays(), timeout=DEADLINE)
        assert relay.line()["joined"]
        assert relay.line()["version"] == 1
    with weightbus.Publisher(address, settings=weightbus.Settings(epoch=1)):
        assert "refuses relay 'r' (stale-epoch)" in relay.complaint("stale-epoch")
        with weightbus.Subscriber(told["address"], {"m": arrays()}, name="late").start() as late:
            assert late.wait_for_version("m", timeout=DEADLINE)
    assert relay.stop(signal.SIGTERM)[0] == 0


def test_a_relay_is_ready_with_a_publisher_or_with_a_version(commands: Commands) -> None:
    address = lasting_address()
    relay, told = started(commands, address, "--name", "r")

    def asked() -> tuple[int, str]:
        done = run("status", told["address"], "--ready", "--json")
        return done.exit_code, result_of(done)["text"]

    assert asked() == (1, f"relay r has not joined the publisher at {address} yet"), "at once"
    publisher = weightbus.Publisher(address)
    assert relay.line()["joined"]
    wait_for(lambda: asked() == (0, ""), "it has a publisher, and no version", DEADLINE)
    publisher.close()
    assert not relay.line()["joined"]
    lost = f"relay r has no publisher: {address} does not answer"
    wait_for(lambda: asked() == (1, lost), "it has neither", DEADLINE)
    with weightbus.Publisher(address) as again:
        again.publish_async("m", arrays(), timeout=DEADLINE)
        assert relay.line()["joined"]
        assert relay.line()["version"] == 1
    assert not relay.line()["joined"]
    relay.complaint("workers get the versions that it has (m 1)")
    assert asked() == (0, ""), "it serves the version that it has"
    assert run("status", told["address"]).exit_code == 1
    assert relay.stop(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"--model": "a b"}, 2, "model 'a b': a name is"),
        ({"--name": "a b"}, 2, "relay 'a b': a name is"),
        ({"--bind": "127.0.0.1:1"}, 2, "'127.0.0.1:1' is not an address"),
        ({"upstream": "host:1"}, 2, "'host:1' is not an address"),
        ({"upstream": "tcp://a:1,tcp://a:1"}, 2, "tcp://a:1"),
        ({"--metrics": "nowhere"}, 2, "nowhere"),
        ({"--bind": "tcp://0.0.0.0:0"}, 1, "other hosts can reach tcp://0.0.0.0:0"),
        ({"--bind": "tcp://127.0.0.1:9"}, 1, "would be its own publisher"),
    ],
)
def test_what_can_never_be_relayed(changes: dict[str, str], code: int, words: str) -> None:
    options = {"upstream": "tcp://127.0.0.1:9", "--model": "m", "--bind": ANY, **changes}
    upstream = options.pop("upstream")
    result = run("relay", upstream, *(w for pair in options.items() for w in pair), "--json")
    assert result.exit_code == code, result.output
    assert words in result_of(result)["text"]


def test_a_relay_serves_its_page_and_its_metrics(commands: Commands) -> None:
    pytest.importorskip("prometheus_client")
    with weightbus.Publisher() as publisher:
        places = ("--dashboard", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
        relay, told = started(commands, publisher.address, *places)
        assert relay.line()["joined"]
        for page, words in (
            (told["metrics"], b"weightbus_relay_upstream_up 1.0"),
            (told["dashboard"] + "state", b'"workers":[]'),
        ):
            with urllib.request.urlopen(page, timeout=DEADLINE) as answer:  # noqa: S310
                assert words in answer.read()


def test_observers_read_a_relay_as_a_publisher() -> None:
    with (
        weightbus.Publisher(settings=SOON) as publisher,
        weightbus.Relay(publisher.address, ANY, ["m"], name="r", settings=SOON) as relay,
        weightbus.Subscriber(relay.address, {"m": arrays()}, name="w", settings=SOON).start(),
    ):
        receipt = publisher.publish("m", arrays(), expect=1)
        key = receipt.epoch, receipt.version
        runs = [{"m": key}]
        wait_for(lambda: [w.running for w in relay.workers().values()] == runs, "it", DEADLINE)
        for command in (("status",), ("top", "--once"), ("verify",)):
            done = run(command[0], relay.address, *command[1:], "--json")
            assert done.exit_code == 0, done.output
            (row,) = result_of(done)["workers"]
            assert (row["worker"], row["version"]) == ("w", receipt.version)
        findings = result_of(run("doctor", relay.address, "--json"))["findings"]
        assert "all 1 run the newest versions" in [found["text"] for found in findings]
        publisher.close()

        wait_for(lambda: relay.status().cut_off_s is not None, "it is cut off", DEADLINE)
        assert run("status", relay.address).exit_code == 1
        text = f"relay r has no publisher: {publisher.address} does not answer"
        for words in (("status",), ("top", "--once"), ("doctor",)):
            assert text in " ".join(run(words[0], relay.address, *words[1:]).stdout.split())

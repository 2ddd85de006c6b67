"""Keys: who gets in, under which name, what strangers get, and what revoking does. (K1 to K11)"""

import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import weightbus
from weightbus.bus.effects import Send
from weightbus.bus.epochs import epoch_above
from weightbus.bus.errors import AddressError, KeysError
from weightbus.bus.headers import TOKEN_BYTES, encode, token_of
from weightbus.bus.messages import (
    RELAY,
    UPSTREAM,
    Bye,
    Fetch,
    Hello,
    Observe,
    Ping,
    Pong,
    Refuse,
    Rekey,
    RosterPage,
    Verified,
    Verify,
    Welcome,
)
from weightbus.bus.net.control import WorkerSockets
from weightbus.bus.net.endpoints import host_and_port, is_local
from weightbus.bus.net.pub import PubSocket
from weightbus.bus.net.publisher_sockets import PublisherSockets
from weightbus.bus.net.zmtp import GREETING, ON, TICKET
from weightbus.bus.protocol_limits import EPOCH_CLOCK_MAX, TICKET_SECONDS
from weightbus.bus.publisher.effects import DropRevoked, Effect, HangUp
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.structs import Message
from weightbus.bus.trust import curve
from weightbus.bus.trust.grants import Grant, Grants
from weightbus.bus.trust.keys import (
    Allowed,
    PublisherKeys,
    RelayKeys,
    WorkerKeys,
    file_name,
    generate,
)
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.python_client.cli.keygen import keygen
from weightbus.python_client.cli.outcome import UsageError
from weightbus.python_client.cli.screen import Screen
from weightbus.python_client.keys import KEYS, publisher_keys, worker_keys
from weightbus.python_client.observing.observer import Observer
from weightbus.tests.client.settling import settled
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.test_pub_socket import READY, Bench
from weightbus.tests.simulation.virtual_shell import perform

SECONDS = 20.0
QUICK = weightbus.Settings(ping=0.1, lost_after=1.0)
ONES = {"w": np.ones(4, np.float32)}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    generate(tmp_path / "keys", {"w": "worker", "gpu-*": "worker", "eye": "observer"})
    return tmp_path / "keys"


# On disk.


def test_files_of_keys_are_their_owners_alone_and_no_secret_is_allowed_in(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.relative_to(folder).as_posix() for path in files} == {
        "publisher.json",
        *(f"{where}/{n}.json" for where in ("allowed", "workers") for n in ("w", "gpu-+", "eye")),
    }
    assert not any("secret" in path.read_text() for path in (folder / "allowed").iterdir())
    keys = WorkerKeys.read(folder / "workers" / "w.json")
    assert keys == WorkerKeys.read(folder, "w")
    assert keys.secret not in repr(keys)
    known = PublisherKeys.read(folder)
    assert known.secret not in repr(known)
    assert curve.public_of(known.secret) == keys.publisher
    assert known.grants[keys.public] == Grant("w")
    assert sorted(grant.role for grant in known.grants.values()) == ["observer", "worker", "worker"]


def test_no_pair_is_written_over_and_more_workers_pin_the_same_publisher(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    with pytest.raises(KeysError, match="exists"):
        generate(folder, {"new": "worker", "w": "worker"})
    assert {path: path.read_bytes() for path in folder.rglob("*.json")} == before
    generate(folder, {"new": "worker"})
    one, other = WorkerKeys.read(folder, "new"), WorkerKeys.read(folder, "w")
    assert one.publisher == other.publisher
    assert one.public != other.public


def test_what_makes_no_sense_is_an_error_that_names_the_file(folder: Path) -> None:
    file = folder / "workers" / "w.json"
    good = json.loads(file.read_text())
    for bad, why in (
        ({**good, "secret": WorkerKeys.read(folder, "eye").secret}, "do not belong together"),
        ({**good, "public": good["public"][:-1]}, "is not a key file"),
        ({**good, "name": "a*b*"}, "is not a key file"),
        ({"name": "w"}, "is not a key file"),
        ([], "is not a key file"),
        *(
            ({**good, of: "#" * 40}, "is not a key file")
            for of in ("public", "secret", "publisher")
        ),
        ({**good, "publisher": "%nSc1" + good["publisher"][5:]}, "is not a key file"),  # 2^32
    ):
        file.write_text(json.dumps(bad))
        with pytest.raises(KeysError, match=why) as error:
            WorkerKeys.read(file)
        assert str(file) in str(error.value)
        assert good["secret"] not in str(error.value)
    file.write_text(json.dumps({**good, "later": "fields"}))
    assert WorkerKeys.read(file).name == "w"
    file.chmod(0o604)
    with pytest.raises(KeysError, match="chmod 600"):
        WorkerKeys.read(file)
    with pytest.raises(KeysError, match="cannot be read"):
        WorkerKeys.read(folder / "nobody.json")
    for name, count in (("nobody", 0), (None, 3)):
        with pytest.raises(KeysError, match=f"has {count} files"):
            WorkerKeys.read(folder, name)
    assert WorkerKeys.read(folder, "gpu-3").name == "gpu-*"
    with pytest.raises(KeysError, match="weightbus keygen"):
        PublisherKeys.read(file)


def test_no_error_quotes_a_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = json.loads((folder / "workers" / "w.json").read_text())
    text = json.dumps(given)
    for keys in (given, f"\n {text}", Path(text), text * 99):
        for read in (publisher_keys, partial(worker_keys, name=None)):
            with pytest.raises(KeysError) as error:
                read(keys)  # type: ignore[arg-type]
            assert given["secret"] not in str(error.value)
            assert isinstance(keys, dict) or "not a path" in str(error.value)
    monkeypatch.setenv(KEYS, json.dumps(given))
    with pytest.raises(KeysError, match="not a path, but JSON"):
        weightbus.Publisher("tcp://127.0.0.1:0")


def test_a_bad_file_among_those_that_are_allowed_allows_nothing_and_hides_no_other(
    folder: Path,
) -> None:
    allowed, complaints = folder / "allowed", list[KeysError]()
    (allowed / "w.json").write_text("{")
    (allowed / "zz.json").write_bytes((allowed / "eye.json").read_bytes())
    with pytest.raises(KeysError):
        Allowed(folder).read()
    names = {grant.pattern for grant in Allowed(folder, complaints.append).read().values()}
    assert names == {"gpu-*", "eye"}
    assert len(complaints) == 2


class Disk:
    """Has some files of those that are allowed fail to be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken, self.tries, opened = set[str](), threading.Semaphore(0), os.open

        def failing(file: Any, flags: int, *args: Any, **options: Any) -> int:
            if Path(os.fsdecode(file)).name in self.broken:
                self.tries.release()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return opened(file, flags, *args, **options)

        monkeypatch.setattr(os, "open", failing)


@pytest.fixture(name="disk")
def _disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def names_in(grants: Mapping[str, Grant]) -> set[str]:
    return {grant.pattern for grant in grants.values()}


def test_a_file_that_cannot_be_read_for_now_goes_on_allowing_what_it_did(
    folder: Path, disk: Disk
) -> None:
    complaints = list[KeysError]()
    allowed = Allowed(folder, complaints.append)
    everything = allowed.read()
    assert allowed.whole
    disk.broken.add("w.json")
    (folder / "allowed" / "eye.json").unlink()
    assert names_in(allowed.read()) == {"w", "gpu-*"}
    assert not allowed.whole
    assert "w.json cannot be read: Input/output error; until" in str(complaints[-1])
    disk.broken.clear()
    assert allowed.read().items() < everything.items()
    assert allowed.whole
    (folder / "allowed" / "w.json").unlink()
    assert names_in(allowed.read()) == {"gpu-*"}


def test_a_file_that_was_never_read_lets_nobody_in_and_keeps_nobody(
    folder: Path, disk: Disk
) -> None:
    complaints = list[KeysError]()
    allowed = Allowed(folder, complaints.append)
    allowed.read()
    generate(folder, {"new": "worker"})
    disk.broken.add("new.json")
    allow(folder, "eye", on=False)
    assert names_in(allowed.read()) == {"w", "gpu-*"}
    assert not allowed.whole
    allow(folder, "w", on=False)
    (folder / "allowed" / "gpu-+.json").rename(folder / "allowed" / "new.json")
    assert names_in(allowed.read()) == set(), "what lies there now, nobody knows"
    assert [str(error).partition(" cannot")[0] for error in complaints] == [
        str(folder / "allowed" / "new.json")
    ] * 2
    disk.broken.clear()
    assert names_in(allowed.read()) == {"gpu-*"}


def test_of_too_many_files_those_count_that_did_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints = list[KeysError]()
    allowed = Allowed(folder, complaints.append)
    allowed.read()
    before = allowed.stamp()
    monkeypatch.setattr("weightbus.bus.trust.keys.KEYS_MAX", 3)
    generate(folder, {"new": "worker", "newer": "worker"})
    assert allowed.stamp() != before
    allow(folder, "w", on=False)
    assert names_in(allowed.read()) == {"eye", "gpu-*"}
    assert "4 keys; at most 3" in str(complaints[-1])
    with pytest.raises(KeysError, match="at most 3"):
        Allowed(folder).read()
    before = allowed.stamp()
    allow(folder, "eye", on=False)
    assert allowed.stamp() != before
    assert names_in(allowed.read()) == {"gpu-*", "new", "newer"}


def test_a_pipe_among_those_that_are_allowed_keeps_nobody_waiting(folder: Path) -> None:
    complaints = list[KeysError]()
    os.mkfifo(folder / "allowed" / "a.json")
    writer = os.open(folder / "allowed" / "a.json", os.O_RDWR)
    try:
        assert names_in(Allowed(folder, complaints.append).read()) == {"w", "gpu-*", "eye"}
    finally:
        os.close(writer)
    assert "a.json" in str(complaints[0])


def test_what_cannot_be_read_is_looked_at_again_and_revocation_goes_on(
    folder: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    known = PublisherKeys.read(folder)
    disk.broken.add("w.json")  # and was read once
    allow(folder, "eye", on=False)
    with publisher_of(known) as publisher:
        grants = publisher._loop._machine.state.grants  # noqa: SLF001 # pyright: ignore
        names = lambda: names_in(vars(grants)["_by_key"])  # noqa: E731
        wait_for(lambda: names() == {"gpu-*", "w"}, "a first look", SECONDS)
        nested = b'{"name": "z", "more": ' + b"[" * 100_000
        (folder / "allowed" / "deep.json").write_bytes(nested[:4000])
        while disk.tries.acquire(blocking=False):
            pass
        assert disk.tries.acquire(timeout=SECONDS)
        assert disk.tries.acquire(timeout=SECONDS), "it is tried again, though nothing has changed"
        assert names() == {"gpu-*", "w"}
        (folder / "allowed" / "w.json").unlink()
        wait_for(lambda: names() == {"gpu-*"}, "what is removed to count", SECONDS)
    assert caplog.text.count("Input/output error") == 1
    assert caplog.text.count("deep.json") == 1


def test_keygen_says_what_it_made_and_takes_no_name_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert keygen(Screen(as_json=True), folder, ["w"], ["eye"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    made = sorted(str(path) for path in folder.rglob("*.json"))
    assert (told["kind"], sorted(told["files"])) == ("keys", made)
    with pytest.raises(UsageError, match="a worker and an observer: give each one name"):
        keygen(Screen(as_json=True), folder, ["x"], ["x"])
    with pytest.raises(UsageError, match="a worker and a relay: give each one name"):
        keygen(Screen(as_json=True), folder, ["x"], [], ["x"])
    for at, above, option in ((["w"], None, "--at"), (None, ["w"], "--above")):
        with pytest.raises(UsageError, match=option):
            keygen(Screen(as_json=True), folder, [], [], [], at, above)


def test_keygen_makes_a_folder_for_each_relay_and_files_that_pin_its_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {*folder.rglob("*")}
    screen = Screen(as_json=True)
    assert keygen(screen, folder, [], [], ["r1", "edge-*"]) == 0
    assert keygen(screen, folder, [], [], ["r2"], above=["r1", "publisher"]) == 0
    assert keygen(screen, folder, ["x"], ["y"], [], at=["r1", "edge-*", "publisher"]) == 0
    told = [
        Path(f) for line in capsys.readouterr().out.splitlines() for f in json.loads(line)["files"]
    ]
    made = {path for path in folder.rglob("*") if path.is_file()} - before
    assert {*told} == made
    assert {path.relative_to(folder).as_posix() for path in made} == {
        *(f"allowed/{name}.json" for name in ("r1", "r2", "edge-+", "x", "y")),
        *(f"workers/{name}{at}.json" for name in "xy" for at in ("", "@r1", "@edge-+")),
        *(f"relays/{name}.json" for name in ("r1", "r2", "edge-+")),
        *(
            f"relays/{name}/{file}.json"
            for name in ("r1", "r2", "edge-+")
            for file in ("publisher", "upstream")
        ),
        "relays/r2/upstream-2.json",
    }
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}
    assert not any("secret" in path.read_text() for path in (folder / "relays").glob("*.json"))
    origin = curve.public_of(PublisherKeys.read(folder).secret)
    keys = {name: RelayKeys.read(folder, name) for name in ("r1", "r2", "edge-7")}
    own = {name: curve.public_of(each.below.secret) for name, each in keys.items() if each.below}
    above = {name: [of.publisher for of in each.upstream] for name, each in keys.items()}
    assert above == {"r1": [origin], "r2": [own["r1"], origin], "edge-7": [origin]}
    assert len({*own.values(), origin}) == 4
    pinned = {
        at: WorkerKeys.read(folder / "workers" / f"x{at}.json") for at in ("", "@r1", "@edge-+")
    }
    publishers = [each.publisher for each in pinned.values()]
    assert publishers == [origin, own["r1"], own["edge-7"]]
    assert len({(each.public, each.secret) for each in pinned.values()}) == 1
    grants = PublisherKeys.read(folder).grants
    for each in keys.values():
        assert each.below is not None
        assert each.below.grants == grants, "a relay allows who the publisher allows"
        [(name, public)] = {(of.name, of.public) for of in each.upstream}
        assert grants[public] == Grant(name, "relay")


def test_keygen_makes_no_key_for_a_relay_that_there_is_not(folder: Path) -> None:
    before = {*folder.rglob("*")}
    for names, options in (
        ({"x": "worker"}, {"at": ["r1"]}),
        ({"r2": "relay"}, {"above": ["r1"]}),
        ({"r2": "relay"}, {"above": ["r2"]}),
        ({"x": "worker", "r2": "relay"}, {"at": ["r2"], "above": ["r1"]}),
    ):
        with pytest.raises(KeysError, match=r"has no relay .*--relay"):
            generate(folder, names, **options)  # type: ignore[arg-type]
    with pytest.raises(KeysError, match="stands for the publisher"):
        generate(folder, {"publisher": "relay"})
    assert {*folder.rglob("*")} == before
    generate(folder, {"x": "worker", "r1": "relay"}, at=["r1"])
    before = {*folder.rglob("*")}
    for again in ({"r1": "relay"}, {"x": "worker"}, {"new": "worker", "r1": "worker"}):
        with pytest.raises(KeysError, match="exists"):
            generate(folder, again, at=["r1"])  # type: ignore[arg-type]
    assert {*folder.rglob("*")} == before


@pytest.mark.parametrize("name", ["", "a" * 129, "a/b", "..*/", "*-*", "a\n", "ä"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(KeysError, match="a name is"):
        file_name(name)


@pytest.mark.parametrize(
    ("bound", "fits", "not_"),
    [
        ("w", ["w"], ["", "w2", "W", "*"]),
        ("gpu-*", ["gpu-", "gpu-0", "gpu-0.1"], ["gpu", "agpu-0"]),
        ("*", ["", "anything"], []),
        ("a*a", ["aa", "aba"], ["a", "ab", "ba"]),
    ],
)
def test_a_star_stands_for_any_characters(bound: str, fits: list[str], not_: list[str]) -> None:
    assert all(Grant(bound).fits(name) for name in fits)
    assert not any(Grant(bound).fits(name) for name in not_)


# What the machines decide.


class Keyed:
    """A publisher's machine with keys a (worker w), b (workers gpu-*) and c (observer eye)."""

    def __init__(self) -> None:
        self.granted = {"a": Grant("w"), "b": Grant("gpu-*"), "c": Grant("eye", "observer")}
        tickets = iter(f"{i:0{TOKEN_BYTES}x}" for i in range(1, 1000))
        self.machine = PublisherMachine(
            PublisherState(
                7,
                "tcp://d:1",
                secret=lambda: next(tickets),
                keys=lambda _peer: self.group_keys,
                grants=Grants(self.granted),
            )
        )
        self.group_keys = ["00" * 32]

    def say(self, key: str, message: Message, now: float = 0.0, at: str = "") -> list[Effect]:
        effects = self.machine.receive((at or key).encode(), [encode(message)], now, key)
        return perform(self.machine, effects, now)

    def hello(self, key: str, name: str, now: float = 0.0, at: str = "", **more: object) -> Message:
        told = {"instance": "0" * 32, "models": {"m": None}, "features": [UPSTREAM]} | more
        said = self.say(key, Hello(name=name, **told), now, at)  # type: ignore[arg-type]
        return sent(said)[0]

    def grant(self, now: float = 0.0, **changed: Grant | None) -> list[Effect]:
        after = {k: v for k, v in (self.granted | changed).items() if v is not None}
        return perform(self.machine, self.machine.grant(after, now), now)

    @property
    def names(self) -> list[str]:
        return [peer.name for peer in self.machine.state.roster]


def sent(effects: list[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def ticket_of(message: Message) -> str:
    assert isinstance(message, Welcome)
    return token_of(message, "ticket")


def code_of(message: Message) -> str:
    return message.code if isinstance(message, Refuse) else ""


def test_a_hello_under_a_name_that_is_not_its_keys_is_refused() -> None:
    keyed = Keyed()
    for key, name in (("a", "gpu-0"), ("b", "w"), ("c", "w"), ("a", "w2")):
        assert code_of(keyed.hello(key, name)) == "wrong-name"
    assert keyed.names == []
    assert isinstance(keyed.hello("a", "w"), Welcome)
    assert isinstance(keyed.hello("b", "gpu-0"), Welcome)
    assert keyed.names == ["w", "gpu-0"]


def test_an_instance_that_another_key_names_is_not_taken_for_its_own() -> None:
    keyed = Keyed()
    keyed.machine.grant(keyed.granted | {"d": Grant("*")}, 0.0)
    assert isinstance(keyed.hello("a", "w"), Welcome)
    assert isinstance(keyed.hello("d", "w", at="d"), Ping), "the worker is asked whether it lives"


def test_a_ticket_is_good_once_for_a_while_and_until_the_next() -> None:
    keyed = Keyed()
    welcome = keyed.hello("a", "w")
    assert isinstance(welcome, Welcome)
    first = ticket_of(welcome)
    assert welcome.features == [f"ticket.{first}"], "and no token: the connection is in the clear"
    assert keyed.machine.redeem(first, 1.0) == ("w", "a")
    assert keyed.machine.redeem(first, 1.0) is None
    second = ticket_of(keyed.hello("a", "w"))
    third = ticket_of(keyed.hello("a", "w"))
    assert len({first, second, third}) == 3
    assert keyed.machine.redeem(second, 1.0) is None
    assert keyed.machine.redeem(third, TICKET_SECONDS) is None
    last = ticket_of(keyed.hello("a", "w"))
    keyed.say("a", Bye())
    assert keyed.machine.redeem(last, 0.0) is None


def test_an_observer_reads_how_things_stand_and_gets_nothing_else() -> None:
    keyed = Keyed()
    assert isinstance(keyed.hello("a", "w"), Welcome)
    [roster] = sent(keyed.say("c", Observe()))
    assert isinstance(roster, RosterPage)
    assert code_of(sent(keyed.say("a", Observe()))[0]) == "not-allowed"
    assert code_of(sent(keyed.say("stranger", Observe()))[0]) == "revoked"
    verify = Verify(worker="w", model="m")
    assert code_of(sent(keyed.say("a", verify))[0]) == "not-allowed"
    [verified] = sent(keyed.say("c", verify))
    assert isinstance(verified, Verified)
    assert code_of(keyed.hello("c", "eye")) == "not-allowed"
    fetch = Fetch(model="m", epoch=7, version=0, layout=True)
    assert code_of(sent(keyed.say("c", fetch))[0]) == "unknown-worker"
    assert keyed.names == ["w"]


def test_a_relay_needs_a_relays_key_which_is_a_workers_too() -> None:
    keyed = Keyed()
    keyed.machine.grant(keyed.granted | {"r": Grant("r-*", "relay")}, 0.0)
    refused = keyed.hello("a", "w", features=[RELAY])
    assert isinstance(refused, Refuse)
    assert refused.code == "not-allowed"
    assert "weightbus keygen DIR --relay" in refused.text
    assert code_of(keyed.hello("c", "eye", features=[RELAY])) == "not-allowed"
    assert code_of(keyed.hello("r", "w", features=[RELAY])) == "wrong-name"
    assert keyed.names == []
    assert isinstance(keyed.hello("r", "r-1", features=[RELAY]), Welcome)
    ticket = ticket_of(keyed.hello("r", "r-2", at="2"))
    assert keyed.machine.redeem(ticket, 0.0) == ("r-2", "r")
    assert keyed.machine.state.grants is not None
    assert keyed.machine.state.grants.may_read("r-2", "r")
    assert keyed.names == ["r-1", "r-2"]
    for message in (Observe(), Verify(worker="r-1", model="m")):
        assert code_of(sent(keyed.say("r", message))[0]) == "not-allowed"


def test_a_relay_whose_key_becomes_a_workers_has_to_stop() -> None:
    keyed = Keyed()
    keyed.granted["r"] = Grant("r-*", "relay")
    keyed.grant()
    assert isinstance(keyed.hello("r", "r-1", features=[RELAY]), Welcome)
    assert isinstance(keyed.hello("r", "r-2", at="2"), Welcome)
    effects = keyed.grant(r=Grant("r-*", "worker"))
    assert [code_of(message) for message in sent(effects)] == ["revoked"]
    assert keyed.names == ["r-2"], "which does not relay"
    assert code_of(keyed.hello("r", "r-1", features=[RELAY])) == "not-allowed"


@pytest.mark.parametrize(
    "now_b", [None, Grant("other-*"), Grant("gpu-*", "observer")], ids=["gone", "name", "role"]
)
def test_what_a_key_may_not_do_any_more_has_no_effect(now_b: Grant | None) -> None:
    keyed = Keyed()
    keyed.hello("a", "w")
    ticket = ticket_of(keyed.hello("b", "gpu-0"))
    effects = keyed.grant(b=now_b)
    assert [code_of(message) for message in sent(effects)] == ["revoked"]
    assert isinstance(effects[-1], DropRevoked)
    assert keyed.names == ["w"]
    assert keyed.machine.redeem(ticket, 0.0) is None
    if now_b is None:
        for message in (Ping(), Hello(name="gpu-0", instance="0" * 32, models={}), Bye()):
            assert [code_of(m) for m in sent(keyed.say("b", message))] == ["revoked"]
        assert keyed.names == ["w"]
    keyed.grant()
    assert isinstance(keyed.hello("b", "gpu-0"), Welcome)


@pytest.mark.parametrize("key", ["b", "c", "stranger"])
def test_who_takes_a_workers_identity_is_not_taken_for_it(key: str) -> None:
    keyed = Keyed()
    keyed.hello("a", "w")
    fetch = Fetch(model="m", epoch=7, version=0, layout=True)
    hello = Hello(name="gpu-0", instance="1" * 32, models={"m": None})
    for message in (fetch, Pong(), Ping(subscribed=True), hello, Observe(), Bye()):
        assert keyed.say(key, message, at="a") == [HangUp()]
    assert keyed.names == ["w"]
    assert code_of(sent(keyed.say("a", fetch))[0]) == "gone", "the worker is known as before"


def test_group_keys_are_the_answer_to_what_a_worker_says() -> None:
    keyed = Keyed()
    keyed.hello("a", "w")
    keyed.group_keys = ["11" * 32]
    asked = perform(keyed.machine, keyed.machine.rekeyed(), 0.0)
    assert sent(asked) == [Ping(token=0)], "whoever has its identity by now is told nothing"
    assert keyed.say("c", Pong(), at="a") == [HangUp()]
    assert sent(keyed.say("a", Pong())) == [Rekey(epoch=7, keys=keyed.group_keys)]
    assert sent(keyed.say("a", Pong())) == [], "once"
    perform(keyed.machine, keyed.machine.rekeyed(), 0.0)
    assert isinstance(keyed.hello("a", "w"), Welcome), "which has them as well"
    assert sent(keyed.say("a", Pong())) == []


def test_who_is_added_changes_nothing_for_the_others() -> None:
    keyed = Keyed()
    keyed.hello("a", "w")
    assert keyed.grant(d=Grant("new")) == []
    assert isinstance(keyed.hello("d", "new"), Welcome)
    assert keyed.names == ["w", "new"]


def test_an_epoch_that_no_clock_can_have_is_not_taken_over() -> None:
    hello = Hello(name="w", instance="0" * 32, models={}, epoch=EPOCH_CLOCK_MAX, age_ms=10_000)
    later = Hello(
        name="w", instance="0" * 32, models={}, epoch=EPOCH_CLOCK_MAX - 20_000, age_ms=10_000
    )
    assert epoch_above(hello, 1.0, EPOCH_CLOCK_MAX) is None
    assert epoch_above(later, 1.0, EPOCH_CLOCK_MAX) == EPOCH_CLOCK_MAX - 20_000 + 10_000 - 1001


def test_a_worker_dials_again_after_a_refusal_for_want_of_keys() -> None:
    machine = WorkerMachine(
        Hello(name="w", instance="0" * 32, models={}),
        ["m"],
        lambda _model, _layout: "",
        timing=QUICK.timing,
    )
    [refused] = machine.handshake_refused("why", 5.0)
    assert (refused.code, refused.text) == ("keys", "why")  # type: ignore[union-attr]
    assert machine.handshake_refused("why", 5.05) == [], "it was said a moment ago"
    assert machine.tick(5.05) == []
    assert [type(effect).__name__ for effect in machine.tick(5.1)] == ["Redial"]
    assert machine.handshake_refused("why", 5.2) != []
    told = Welcome(epoch=7, data="tcp://h:1", ping_ms=100, lost_ms=1000, models={})
    machine.receive([encode(told)], 5.25)
    effects = [type(effect).__name__ for effect in machine.tick(5.3)]
    assert "Redial" not in effects, "a connection that has become good is left alone"


def test_handshakes_that_break_while_many_dial_at_once_say_nothing_of_keys() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as monitor:
        monitor.bind("inproc://told")
        with context.socket(zmq.PAIR) as told:
            told.connect("inproc://told")
            changes = curve.ConnectionEvents(told, keyed=True)

            def why(event: int, now: float) -> str:
                monitor.send_multipart([struct.pack("=HI", event, 0), b""])
                return changes.read(now, patience=5.0)[1]

            broken = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            assert [why(broken, 100.0 + i) for i in range(5)] == [""] * 5
            assert "another key" in why(broken, 105.0)
            assert why(zmq.EVENT_HANDSHAKE_SUCCEEDED, 106.0) == ""
            assert [why(broken, now) for now in (107.0, 112.5)] == ["", ""], (
                "too few, and since then"
            )
            assert "another key" in why(broken, 112.6)


# Over sockets.


def allow(folder: Path, name: str, *, on: bool) -> None:
    """Let a worker in, or not any more."""
    file, aside = folder / "allowed" / f"{name}.json", folder / f"{name}.aside"
    aside.rename(file) if on else file.rename(aside)


def publisher_of(folder: Path | PublisherKeys | None, **options: object) -> weightbus.Publisher:
    told = settled({"keys": folder, "settings": QUICK, "shared_memory": False} | options)
    return weightbus.Publisher("tcp://127.0.0.1:0", **told)


def worker_of(address: str, keys: object, name: str | None = None) -> weightbus.Subscriber:
    copy = {"w": np.zeros(4, np.float32)}
    told = settled({"keys": keys, "name": name, "settings": QUICK, "shared_memory": False})
    return weightbus.Subscriber(address, {"m": copy}, **told)


def refusal_of(worker: weightbus.Subscriber) -> weightbus.RefusedError:
    with pytest.raises(weightbus.RefusedError) as error:
        worker.wait_joined(SECONDS)
    return error.value


@pytest.mark.parametrize("ipc", [False, True], ids=["tcp", "ipc"])
def test_with_keys_versions_come_as_ever(folder: Path, tmp_path: Path, *, ipc: bool) -> None:
    address = f"ipc://{tmp_path}/bus" if ipc else "tcp://127.0.0.1:0"
    with (
        weightbus.Publisher(
            address, keys=folder, settings=replace(QUICK, shared_memory=False)
        ) as publisher,
        worker_of(publisher.address, folder / "workers" / "w.json").start() as worker,
        worker_of(publisher.address, folder / "workers" / "gpu-+.json").start() as other,
    ):
        assert worker.name == "w"
        assert other.name.startswith("gpu-")
        publisher.wait_for_workers(2, SECONDS)
        for _ in range(3):
            receipt = publisher.publish("m", ONES, timeout=SECONDS)
            assert {w.state for w in receipt.workers.values()} == {"applied"}
        data = publisher._loop._sockets.data  # noqa: SLF001 # pyright: ignore
        wait_for(
            lambda: len(data.subscribers(b"m/dat")) == 2,
            "both to have shown their tickets",
            SECONDS,
        )


def test_a_key_that_is_not_allowed_is_named_and_let_in_once_it_is(folder: Path) -> None:
    allow(folder, "w", on=False)
    with publisher_of(folder) as publisher, worker_of(publisher.address, folder, "w") as worker:
        error = refusal_of(worker)
        assert error.code == "keys"
        assert "does not allow this worker's key" in str(error)
        assert publisher.workers() == {}
        allow(folder, "w", on=True)
        publisher.wait_for_workers(1, SECONDS)


def test_publishers_of_one_process_have_lists_of_their_own(folder: Path, tmp_path: Path) -> None:
    generate(tmp_path / "others", {"w": "worker"})
    stranger = WorkerKeys.read(tmp_path / "others", "w")
    pinned = WorkerKeys.read(folder, "w").publisher
    posing = WorkerKeys("w", stranger.public, stranger.secret, pinned)
    with (
        publisher_of(folder) as publisher,
        publisher_of(tmp_path / "others") as other,
        worker_of(other.address, stranger),
        worker_of(publisher.address, posing) as worker,
    ):
        other.wait_for_workers(1, SECONDS)
        assert "does not allow this worker's key" in str(refusal_of(worker))
        assert publisher.workers() == {}


def test_a_worker_speaks_to_the_owner_of_the_key_that_it_pins_alone(
    folder: Path, tmp_path: Path
) -> None:
    generate(tmp_path / "others", {"w": "worker"})
    keys = WorkerKeys.read(tmp_path / "others", "w")
    with (
        publisher_of(folder) as publisher,
        publisher_of(None) as plain,
        worker_of(publisher.address, keys) as worker,
        worker_of(plain.address, keys) as downgraded,
        worker_of(publisher.address, None) as keyless,
    ):
        assert "another key than the one" in str(refusal_of(worker))
        assert "speaks without keys" in str(refusal_of(downgraded))  # or a guess that says so, too
        assert "asks for keys" in str(refusal_of(keyless))
        assert plain.workers() == publisher.workers() == {}


def test_a_libzmq_without_curve_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.has", lambda _capability: False)
    with pytest.raises(KeysError, match="built without"):
        publisher_of(folder)
    with pytest.raises(KeysError, match="built without"):
        worker_of("tcp://127.0.0.1:9", folder, "w")


def test_what_curve_adds_is_no_flood(folder: Path) -> None:
    """The kernel counts bytes that no message has: of a frame in CURVE there are a few."""
    keys = WorkerKeys.read(folder, "w")
    known = PublisherKeys.read(folder)
    publisher = PublisherSockets(
        "tcp://127.0.0.1:0", None, secret=known.secret, grants=Grants(known.grants)
    )
    worker = WorkerSockets(publisher.address, lambda _frames, _size: None, keys)
    try:
        connections = set[bytes]()
        received, deadline = 0, time.monotonic() + SECONDS
        while received < 12_000:  # 33 bytes each: half as much again as would be a flood
            assert time.monotonic() < deadline, f"only {received} messages came"
            publisher.poll(0.001)
            for _ in range(64):
                worker.send(b"{}")
            while (message := publisher.receive()) is not None:
                assert publisher.key == keys.public
                connections.add(message[0])
                received += 1
        assert len(connections) == 1, "it was hung up on"
    finally:
        worker.close()
        publisher.close()


# Data connections.


def said_until_closed(stranger: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := stranger.recv(4096):
            said += more
    return said


def frame(body: bytes) -> bytes:
    return bytes([0, len(body)]) + body


HANDSHAKE = 64 + 2 + 6 + 12 + 4 + 4  # the greeting, and READY with the socket's type
STRANGERS = {
    "silent": b"",
    "greets": GREETING,
    "ready": GREETING + READY,
    "subscribes": GREETING + READY + frame(ON + b"m/ctl"),
    "forges": GREETING + READY + frame(TICKET + b"0" * TOKEN_BYTES) + frame(ON + b"m/ctl"),
    "stammers": GREETING + READY + frame(TICKET + b"0"),
}


def test_nothing_is_queued_for_a_ticket_that_nobody_has_looked_at() -> None:
    bench = Bench()
    bench.pub_socket.close(0.0)
    bench.pub_socket = PubSocket(8, bench.selector, Grants({}))
    bench.address = bench.pub_socket.bind("tcp://127.0.0.1:0", "data")
    with (
        contextlib.closing(bench),
        socket.create_connection(host_and_port(bench.address)) as forger,
    ):
        forger.sendall(STRANGERS["forges"])
        connections = bench.pub_socket._connections  # noqa: SLF001 # pyright: ignore
        deadline = time.monotonic() + SECONDS
        while not any(subscriber.topics for subscriber in connections.values()):
            assert time.monotonic() < deadline
            bench.process_events()
        bench.send([b"m/ctl", b"secret"])
        heard = bench.pub_socket.receive_input()
        assert heard is not None
        assert heard.ticket == "0" * TOKEN_BYTES
        assert not bench.pub_socket.admit(heard.subscriber, None)
        forger.settimeout(SECONDS)
        assert b"secret" not in said_until_closed(forger)


def test_strangers_get_nothing_and_are_hung_up_on_within_2_s(folder: Path) -> None:
    with publisher_of(folder) as publisher, contextlib.ExitStack() as undo:
        where, began = host_and_port(publisher.data_address), time.monotonic()
        strangers = {
            who: undo.enter_context(socket.create_connection(where, SECONDS)) for who in STRANGERS
        }
        for who, said in STRANGERS.items():
            strangers[who].sendall(said)
        publisher.publish("m", ONES, settings=weightbus.Settings(wait="none"))
        for who, stranger in strangers.items():
            assert len(said_until_closed(stranger)) <= HANDSHAKE, who
        assert time.monotonic() - began < 2.0


def test_a_ticket_serves_one_connection_and_a_new_one_takes_its_place(folder: Path) -> None:
    with publisher_of(folder) as publisher, worker_of(publisher.address, folder, "w") as worker:
        data = worker._loop._sockets.data  # noqa: SLF001 # pyright: ignore
        connections = publisher._loop._sockets.data._connections  # noqa: SLF001 # pyright: ignore
        admitted = lambda: [o for o in connections.values() if o.admitted]  # noqa: E731
        wait_for(lambda: len(admitted()) == 1, "the worker's connection", SECONDS)
        [first] = admitted()
        connection = data._socket  # noqa: SLF001 # pyright: ignore
        assert connection is not None
        connection.shutdown(socket.SHUT_RDWR)  # as a network does
        again = lambda: admitted() and admitted()[0] is not first  # noqa: E731
        wait_for(lambda: bool(again()), "another, by another ticket", SECONDS)
        publisher.publish_async("m", ONES, timeout=SECONDS)
        assert worker.receive(SECONDS) is not None


def test_who_is_revoked_is_cut_off(folder: Path) -> None:
    with (
        publisher_of(folder) as publisher,
        worker_of(publisher.address, folder, "w").start() as worker,
        worker_of(publisher.address, folder, "gpu-7").start() as other,
    ):
        connections = publisher._loop._sockets.data._connections  # noqa: SLF001 # pyright: ignore
        owners = lambda: {o.owner[0] for o in list(connections.values()) if o.owner}  # noqa: E731
        wait_for(lambda: owners() == {"w", other.name}, "both connections", SECONDS)
        sealer = publisher._loop._sealer  # noqa: SLF001 # pyright: ignore
        assert sealer is not None
        before = sealer.keys
        publisher.publish("m", ONES, timeout=SECONDS)
        pool = publisher._model("m").pool  # noqa: SLF001 # pyright: ignore
        mapped = set(vars(pool)["_blocks"])
        allow(folder, "w", on=False)
        wait_for(lambda: owners() == {other.name}, "one to be cut off", SECONDS)
        wait_for(lambda: sealer.keys != before, "a group key that it is not told", SECONDS)
        assert publisher.workers().keys() == {other.name}
        wait_for(lambda: worker.error is not None, "the worker to be told", SECONDS)
        assert "revoked" in str(worker.error)
        receipt = publisher.publish("m", ONES, timeout=SECONDS)
        assert receipt.workers.keys() == {other.name}
        assert mapped.isdisjoint(vars(pool)["_blocks"]), "it could read on in what it has mapped"
        allow(folder, "w", on=True)
        publisher.wait_for_workers(2, SECONDS)


def test_observers_look_on_with_a_key_and_not_without(folder: Path) -> None:
    with (
        publisher_of(folder) as publisher,
        worker_of(publisher.address, folder, "w"),
        worker_of(publisher.address, folder, "eye") as no_worker,
        Observer(publisher.address, WorkerKeys.read(folder, "w")) as worker,
        Observer(publisher.address, WorkerKeys.read(folder, "eye")) as observer,
        Observer(publisher.address) as stranger,
    ):
        publisher.wait_for_workers(1, SECONDS)
        assert observer.look(SECONDS)
        assert observer.view.workers.keys() == {"w"}
        with pytest.raises(weightbus.RefusedError, match="asks for keys"):
            stranger.look(SECONDS)
        with pytest.raises(weightbus.RefusedError, match="an observer's"):
            worker.look(SECONDS)
        assert refusal_of(no_worker).code == "not-allowed"


# Safe by default.


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.0.1:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://lo:1", True),
        ("ipc:///x", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://eth0:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://[::ffff:10.0.0.1]:1", False),
        ("tcp://127.0.0.1.example.com:1", False),
    ],
)
def test_where_other_hosts_can_connect(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) == local


def test_without_keys_a_publisher_listens_to_its_host_alone(folder: Path) -> None:
    for options in ({"address": "tcp://*:0"}, {"data": "tcp://0.0.0.0:0"}):
        with pytest.raises(AddressError, match="insecure=True"):
            weightbus.Publisher(**settled(options))
    weightbus.Publisher("tcp://*:0", insecure=True).close()
    weightbus.Publisher("tcp://*:0", keys=folder).close()


def test_the_environment_names_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS, str(folder))
    with publisher_of(None) as publisher, worker_of(publisher.address, None, "w"):
        publisher.wait_for_workers(1, SECONDS)
    with publisher_of(None, keys="") as publisher, worker_of(publisher.address, "", "w"):
        publisher.wait_for_workers(1, SECONDS)


def test_the_thread_that_looks_for_keys_ends_with_its_publisher(folder: Path) -> None:
    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    with publisher_of(folder):
        assert "weightbus-keys" in threads()
    wait_for(lambda: "weightbus-keys" not in threads(), "the end of it", SECONDS)

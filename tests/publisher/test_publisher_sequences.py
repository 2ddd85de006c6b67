"""The publisher's machine plays the sequences of the golden vectors."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from weightbus.bus.effects import Notice, Send
from weightbus.bus.errors import UnknownWorkerError
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import DELTA, Running
from weightbus.bus.publisher.effects import Broadcast, Effect, HangUp, Resolve
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import OfferedPatch, VersionOffer
from weightbus.bus.trust.grants import Grant, Grants
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all, perform

Case = dict[str, Any]

FILE = Path(__file__).parents[1] / "vectors" / "publisher_sequences.json"
CASES: list[Case] = json.loads(FILE.read_text())["cases"]
TICK_MS = 100
EVENTS = {"joined", "lost", "back", "stuck", "left", "refused", "failed", "wrong-digest"}
PATCH = bytes(range(256)) * 8


class Player:
    """A publisher, a clock, and what came out of the last event."""

    def __init__(self, case: Case) -> None:
        self._ms, tokens = 0, itertools.count()
        chosen, keys = case.get("chosen", False), case.get("keys")
        start = case.get("start_ms", 20 * 366 * 86_400_000) / 1000
        self.machine = PublisherMachine(
            PublisherState(
                7,
                "tcp://*:9",
                Timing(),
                age=None if chosen else lambda: 10 + self._ms / 1000,
                secret=lambda: f"{next(tokens):032x}",
                clock=lambda: start + 10 + self._ms / 1000,
                grants=None if keys is None else Grants(grants(keys)),
                keys=None if keys is None else lambda _: ["12" * 32],
            )
        )
        self._calls = itertools.count()
        self.sent: list[Case] = []
        self.beacons: set[str] = set()
        self.ends: list[Case] = []
        self.told: list[str] = []
        self.others: Case = {"closes": False, "fails": False, "forged": False, "owner": None}

    @property
    def now(self) -> float:
        return self._ms / 1000

    def step(self, step: Case) -> None:
        """Let one event happen."""
        self.sent, self.beacons, self.ends, self.told = [], set(), [], []
        self.others = {"closes": False, "fails": False, "forged": False, "owner": None}
        machine = self.machine
        match step:
            case {"from": who, **rest}:
                for number in range(step.get("times", 1)):
                    text = rest["text"] if "text" in rest else json.dumps(rest["message"])
                    frames = [text.replace("%", str(number)).encode()]
                    frames += [b""] * step.get("payloads", 0)
                    identity = who.replace("%", str(number)).encode()
                    self._do(machine.receive(identity, frames, self.now, step.get("key", "")))
            case {"token": token, "message": message}:
                word = token.encode() + json.dumps(message).encode()
                effects = machine.receive_report(word, self.now)
                self.others["forged"] = effects is None
                self._do(effects or [])
            case {"closed": who}:
                self._do(machine.unreachable(who.encode(), self.now))
            case {"wait_ms": ms}:
                for _ in range(ms // TICK_MS):
                    self._ms += TICK_MS
                    self._do(machine.tick(self.now))
            case {"publish": call}:
                try:
                    _, effects = machine.publish(
                        next(self._calls), offer_of(call), terms_of(call), self.now, self.now
                    )
                    self._do(effects)
                except (UnknownWorkerError, ValueError):
                    self.others["fails"] = True
            case {"offer": offered}:
                offer = offer_of(offered)
                offer.names = frozenset((epoch, version) for epoch, version in offered["names"])
                hash_all(offer)
                self._do(machine.offer(offer)[1])
            case {"subscribes": topic}:
                beacon = machine.subscribed(topic.encode())
                self.sent += [] if beacon is None else [header(beacon, topic)]
            case {"allow": keys}:
                self._do(machine.grant(grants(keys), self.now))
            case {"ticket": ticket}:
                owner = machine.redeem(ticket, self.now)
                self.others["owner"] = owner and list(owner)
            case {"stop": True}:
                self._do(machine.close(self.now))
            case _:
                raise ValueError(step)

    def _do(self, effects: list[Effect]) -> None:
        self._note(effects)
        while self.machine.ready:
            self._note(self.machine.push(self.now))

    def _note(self, effects: list[Effect]) -> None:
        for effect in perform(self.machine, effects, self.now):
            match effect:
                case Send(message, payload, to):
                    self._send(message, payload, to.decode())
                case Broadcast(topic, message, payload):
                    self._send(message, payload, topic.decode())
                case HangUp():
                    self.others["closes"] = True
                case Resolve():
                    targets = effect.receipt.workers
                    states = {name: target.state for name, target in targets.items()}
                    through = {name: [*t.through] for name, t in targets.items() if t.through}
                    patched = {name: targets[name].nbytes for name in through}
                    patched = {n: size for n, size in patched.items() if targets[n].patched}
                    end: Case = {"achieved": effect.achieved, "workers": states}
                    end |= {"through": through} if through else {}
                    self.ends.append(end | ({"patched": patched} if patched else {}))
                case Notice() if effect.kind in EVENTS:
                    self.told.append(f"{effect.kind} {effect.worker}")
                case _:
                    pass

    def _send(self, message: Any, payload: Any, to: str) -> None:
        told = header(message, to)
        if told["type"] == "beacon":
            self.beacons.add(f"{told['model']} {told['epoch']} {told['version']}")
            return
        data = b"" if payload is None else bytes(payload)
        told["payload"] = len(data)
        if told["type"] == "chunk":
            assert told.pop("crc") == crc32c(data)
            told |= {"first": told.pop("index"), "count": 1, "bytes": data}
            last = next((each for each in reversed(self.sent) if each["to"] == to), None)
            if last is not None and follows(told, last):
                last["count"] += 1
                last["bytes"] += data
                return
        self.sent.append(told)

    def status(self, name: str) -> Case | None:
        """Return what the user sees of a worker."""
        status = self.machine.status_of(name, self.now)
        if status is None:
            return None
        runs = {model: list(key) for model, key in status.running.items()}
        known: Case = {"state": status.state, "running": runs}
        return {**known, "relay": status.relay, "through": [*status.through]}


def header(message: Any, to: str) -> Case:
    return {"to": to, "patch": None, **json.loads(encode(message))}


def follows(chunk: Case, last: Case) -> bool:
    """Whether a chunk comes right after the last one."""
    names = ("type", "model", "epoch", "version", "patch")
    same = all(chunk[name] == last.get(name) for name in names)
    return same and chunk["first"] == last["first"] + last["count"]


def grants(keys: Case) -> dict[str, Grant]:
    return {key: Grant(name, role) for key, (name, role) in keys.items()}


def offer_of(call: Case) -> VersionOffer:
    nbytes = call["nbytes"]
    data = (call["seed"] * 16 + np.arange(nbytes)).astype(np.uint8)
    layout = Layout.plan([("w", "U8", (nbytes,))])
    offer = VersionOffer.of(
        call.get("model", "m"), layout, call["chunk_bytes"], PlainSnapshot(data)
    )
    hash_all(offer)
    offer.keep = call.get("keep", False)
    offer.patches = tuple(
        OfferedPatch(
            DELTA,
            Running(patch["epoch"], patch["version"], patch["digest"]),
            PATCH[: patch["nbytes"]],
        )
        for patch in call.get("patches", [])
    )
    return offer


def terms_of(call: Case) -> PublishTerms:
    workers = call.get("workers")
    return PublishTerms(
        workers=None if workers is None else tuple(workers),
        require=call.get("require"),
        wait=call.get("wait", "applied"),
        commit=call.get("commit", "auto"),
        timeout=call.get("timeout_ms", 60_000) / 1000,
        grace=call.get("grace_ms", 5000) / 1000,
        grace_of_gone=call.get("gone_grace_ms", 0) / 1000,
        expect=call.get("expect", 0),
    )


def by_recipient(messages: list[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for message in messages:
        found.setdefault(message["to"], []).append(message)
    return found


def contains(value: object, wanted: object) -> bool:
    """Return whether a value is the one wanted; an object may have other fields beside."""
    if isinstance(wanted, dict):
        some, fields = cast("Case", value), cast("Case", wanted)
        if not isinstance(value, dict):
            return False
        return all(contains(some.get(n, DEFAULTS.get(n)), w) for n, w in fields.items())
    if isinstance(wanted, list):
        pairs = cast("list[object]", value), cast("list[object]", wanted)
        same = isinstance(value, list) and len(pairs[0]) == len(pairs[1])
        return same and all(map(contains, *pairs))
    return type(value) is type(wanted) and value == wanted


DEFAULTS: Case = {  # of fields that a header may leave out
    "models": {},
    "features": [],
    "patches": [],
    "patch": None,
    "whole": None,
    "token": 0,
    "first": 0,
    "epoch": 0,
    "version": 0,
    "keep": False,
    "workers": [],
    "relay": False,
    "through": [],
    "more": False,
    "follows": False,
    "since": 0,
    "age_ms": 0,
    "commit": "auto",
    "acknowledge": "applied",
    "encoding": "raw",
    "differing": 0,
    "differences": [],
}


def faults(player: Player, expect: Case) -> Iterator[str]:
    """Yield what is not as a step has it."""
    wanted, sent = expect.get("sends", []), player.sent
    for message in sent:
        if "bytes" in message:
            data = message.pop("bytes")
            message |= {"crc": crc32c(data), "payload": len(data)}
    if wanted is not None:
        found, right = by_recipient(sent), by_recipient(wanted)
        for to in found.keys() | right.keys():
            if not contains(found.get(to, []), right.get(to, [])):
                yield f"to {to}: {found.get(to, [])}, not {right.get(to, [])}"
    ends = expect.get("ends", [])
    if ends is not None and player.ends != ends:
        yield f"ends {player.ends}, not {ends}"
    if expect.get("tells") is not None and player.told != expect["tells"]:
        yield f"tells {player.told}, not {expect['tells']}"
    if "beacons" in expect and player.beacons != set(expect["beacons"]):
        yield f"beacons {player.beacons}, not {expect['beacons']}"
    for name, value in player.others.items():
        if expect.get(name, False if name != "owner" else None) != value:
            yield f"{name}: {value}"
    for name, status in expect.get("status", {}).items():
        seen = player.status(name)
        if seen is None or status is None:
            if seen is not status:
                yield f"{name} is {seen}"
        elif seen | status != seen:
            yield f"{name} is {seen}, not {status}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_publisher_plays_its_sequences(case: Case) -> None:
    player = Player(case)
    for number, step in enumerate(case["steps"]):
        player.step(step)
        found = [*faults(player, step["expect"])]
        event = {key: value for key, value in step.items() if key != "expect"}
        assert not found, f"step {number}, {event}: " + "\n".join(found)

"""How the Python worker plays the sequences of the golden vectors: its machine, and a clock."""

import json
from collections.abc import Callable
from typing import Any

from weightbus.bus.effects import Effect, Ready, Renamed, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import STAGING_BYTES_MAX
from weightbus.bus.messages import Hello
from weightbus.bus.staged import StagedVersion
from weightbus.bus.worker.events import Outcome, Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs.layout import Layout, difference
from weightbus.tests.simulation.performing import done

Case = dict[str, Any]
Blob = Callable[[dict[str, str]], bytes]

TICK = 0.1  # seconds


def play(case: Case, blob: Blob) -> list[Case]:
    """Return what the worker sent at each step, and what it runs then."""
    player = Player(case)
    return [player.step(step, blob) for step in case["steps"]]


class Player:
    """A worker that applies at once whatever is ready, or fails to as the case wants it."""

    def __init__(self, case: Case) -> None:
        self._in_place: Case = case.get("in_place", {})
        self._machine = WorkerMachine(
            Hello(name="w", instance="0" * 32, models={}),
            case["models"],
            self._fault,
            case.get("bytes_max", STAGING_BYTES_MAX),
        )
        self._now = 1000.0
        self._sent: list[Case] = []
        self._token = 0  # of the last ping
        self._runs: dict[str, int] = {}
        self._applies: list[str] = case.get("applies", [])

    def _fault(self, model: str, layout: Layout) -> str:
        """Say why a layout does not fit the memory that is registered, if any is."""
        if model not in self._in_place:
            return ""
        mine = {n: (t["dtype"], tuple(t["shape"])) for n, t in self._in_place[model].items()}
        return "\n".join(difference(layout.signatures, mine))

    def step(self, step: Case, blob: Blob) -> Case:
        """Play one step."""
        self._sent = []
        if "wait_ms" in step:
            self._wait(step["wait_ms"] / 1000)
        elif "pong" in step:
            pong = {"wbp": 1, "type": "pong", "token": self._token, "epoch": step["pong"]}
            self._perform(self._machine.receive([json.dumps(pong).encode()], self._now))
        elif "data" in step:
            frames = [b"m/ctl", *map(blob, step["data"])]
            self._perform(self._machine.receive_published(frames, self._now))
        else:
            frames = list(map(blob, step["control"]))
            self._perform(self._machine.receive(frames, self._now))
        return {"sent": self._sent, "runs": dict(self._runs)}

    def _wait(self, seconds: float) -> None:
        until = self._now + seconds
        while self._now < until:
            self._now = min(until, self._now + TICK)
            if not self._machine.in_session and self._machine.session.may_say_hello(self._now):
                self._perform(self._machine.connected(self._now))
            self._perform(self._machine.tick(self._now))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in done(self._machine, effects, self._now):
            if isinstance(effect, Send):
                self._sent.append(json.loads(encode(effect.message)))
                if self._sent[-1]["type"] == "ping":
                    self._token = self._sent[-1].get("token", 0)
            elif isinstance(effect, Renamed):
                self._runs[effect.model] = effect.version
            elif isinstance(effect, Ready):
                for staged in sorted((effect.staged, *effect.others), key=lambda s: s.model):
                    self._perform(self._apply(staged))

    def _apply(self, staged: StagedVersion) -> list[Effect]:
        model, key = staged.model, staged.key
        outcome, *self._applies = self._applies or ["done"]
        what: Outcome = "applied" if outcome == "done" else "declined"
        if outcome == "done":
            self._runs[model] = staged.version
        elif outcome == "torn":
            what, self._runs[model] = "torn", 0
        told: tuple[Outcome, ...] = ("taken", what)
        events = [Report(model, key, each, "no") for each in told]
        return [e for event in events for e in self._machine.happened(event, self._now)]

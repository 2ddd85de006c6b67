"""The worker of level 1 that the protocol's first page names plays the sequences of that level."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from weightbus.tests.conformance.sequences import fault_of_sequence
from weightbus.tests.vectors.transcripts import LEVEL_1, OverError

Json = dict[str, Any]
VECTORS = Path(__file__).parents[1] / "vectors"
CASES: list[Json] = [
    case
    for case in json.loads((VECTORS / "sequences.json").read_text())["cases"]
    if case["level"] == 1
]


def bytes_of(frame: Json) -> bytes:
    if "file" in frame:
        return (VECTORS / str(frame["file"])).read_bytes()
    return str(frame["text"]).encode() if "text" in frame else bytes.fromhex(str(frame["hex"]))


class Player:
    """A socket and a clock that play one case: `poll` goes on to what comes next."""

    def __init__(self, case: Json) -> None:
        self.now, self.token = 0.0, 0
        self.sent: list[Json] = []
        self.inbox: list[list[bytes]] = []
        self.answers: list[Json] = []
        self.worker: Any = None
        self.immediate = self.linger = self.maxmsgsize = 0
        self._play = self._steps(case)

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, _address: str) -> None:
        pass

    def send_json(self, fields: Json, _flags: int) -> None:
        if fields["type"] == "hello":
            fields = fields | {"name": "w"}
        self.token = fields.get("token", 0) if fields["type"] == "ping" else self.token
        self.sent.append(fields)

    def poll(self, _ms: int) -> bool:
        if not self.inbox:
            next(self._play)
        return bool(self.inbox)

    def recv_multipart(self) -> list[bytes]:
        return self.inbox.pop(0)

    def sleep(self, seconds: float) -> None:
        """Wait between two connections, on which nothing arrives."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            next(self._play)
            self.inbox.clear()

    def _steps(self, case: Json) -> Iterator[None]:
        for step in case["steps"]:
            if "control" in step:
                self.inbox.append([bytes_of(frame) for frame in step["control"]])
                yield
            elif "pong" in step:
                pong = {"wbp": 1, "type": "pong", "epoch": step["pong"], "token": self.token}
                self.inbox.append([json.dumps(pong).encode()])
                yield
            else:
                end = self.now + step["wait_ms"] / 1000
                while self.now < end - 1e-9:
                    self.now = min(end, self.now + 0.02)
                    yield
            yield
            runs = {"m": self.worker.runs.get("version", 0)}
            self.answers.append({"sent": self.sent, "runs": runs})
            self.sent = []
        raise OverError


def played(case: Json) -> Json:
    player = Player(case)
    names: Json = {"__name__": "level1_worker"}
    exec(compile(LEVEL_1, "level1_worker.py", "exec"), names)  # noqa: S102 - our own
    context = SimpleNamespace(socket=lambda _: player)
    names["zmq"] = SimpleNamespace(
        Context=SimpleNamespace(instance=lambda: context),
        DEALER=zmq.DEALER,
        NOBLOCK=zmq.NOBLOCK,
        Again=zmq.Again,
    )
    names["time"] = SimpleNamespace(monotonic=lambda: player.now)
    names["Path"] = lambda _: SimpleNamespace(write_bytes=len)
    names["os"] = SimpleNamespace(replace=lambda *_: None)
    names["BYTES_MAX"] = case.get("bytes_max", names["BYTES_MAX"])
    player.worker = names["Worker"]("tcp://trainer:5555", "m", "m.safetensors")
    with suppress(OverError):
        while True:
            player.worker.session()
            player.sleep(0.25)
    return {"steps": player.answers}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_example_plays_every_sequence_of_its_level(case: Json) -> None:
    assert not fault_of_sequence(case, played(case))


def test_an_answer_to_a_pong_may_come_at_once_or_later() -> None:
    fetch: Json = {"type": "fetch", "count": 2}
    steps: list[Json] = [
        {"pong": 7, "expect": {}},
        {"wait_ms": 100, "expect": {"sends": [fetch], "asks": [0, 1]}},
        {"wait_ms": 100, "expect": {"silent": ["fetch"]}},
    ]
    for first, second in (([fetch], []), ([], [fetch])):
        answer = [{"sent": sent, "runs": {}} for sent in (first, second, list[Json]())]
        assert not fault_of_sequence({"steps": steps}, {"steps": answer})
    assert fault_of_sequence({"steps": steps}, {"steps": [{"sent": [], "runs": {}}] * 3})

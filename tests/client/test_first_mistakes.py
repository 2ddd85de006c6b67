"""What newcomers get wrong: each mistake is found, and one line says what is probably meant.

Each row plays one with real sockets, and names the side that can know it: by its log, by the
receipt, or by what the call raises.
"""

import logging
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.limits import Timing
from weightbus.bus.publisher.absent import likely_meant
from weightbus.bus.publisher.state import CHECKS_UNTIL_HINT
from weightbus.bus.trust.keys import generate
from weightbus.python_client.observing.stall_hints import REACH
from weightbus.tests.client.settling import settled

SECONDS = 60.0  # far more than anything here takes
QUICK = Settings(ping=0.1, lost_after=1.0)
PATIENT = Settings(ping=0.1, lost_after=4.0)  # a busy host may stop a process for a second
PUBLISHER, WORKER, RAISED = "weightbus.publisher", "weightbus.worker", "raised"


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.zeros(8, np.float32)}


class Scene:
    """A publisher, workers that end with the test, and keys."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self._ends, self.raised = ends, ""
        generate(folder / "keys", {"w": "worker"})
        self.keys, self.key = folder / "keys", folder / "keys" / "workers" / "w.json"
        self.publisher = self.publish_at()

    def publish_at(self, address: str = "tcp://127.0.0.1:0", **how: Any) -> Publisher:
        return self._ends.enter_context(Publisher(address, **settled({"settings": QUICK, **how})))

    def worker(
        self, models: object, name: str, address: str = "", *, start: bool = True, **how: Any
    ) -> None:
        at = address or self.publisher.address
        made: Any = models if isinstance(models, dict) else {models: arrays()}
        worker = self._ends.enter_context(
            Subscriber(at, made, name=name, **settled({"settings": QUICK, **how}))
        )
        if start:
            worker.start()

    def web_server(self) -> int:
        """Have something else at a port."""

        class Answer(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        server = self._ends.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        self._ends.callback(thread.join, SECONDS)
        self._ends.callback(server.shutdown)
        return int(server.server_address[1])

    def refuse(self, models: Any) -> None:
        with pytest.raises(ValueError, match="models=") as caught:
            Subscriber(self.publisher.address, models)
        self.raised = str(caught.value)


def worker_misspells(scene: Scene) -> None:
    scene.worker("policy", "right")
    scene.worker("polcy", "typo")
    scene.publisher.publish("policy", arrays(), expect=1)


def trainer_misspells(scene: Scene) -> None:
    scene.worker("policy", "w0")
    scene.publisher.wait_for_workers(1, SECONDS)
    assert "no worker is connected" in str(scene.publisher.publish("polcy", arrays()))


def outer_dict_forgotten(scene: Scene) -> None:
    scene.refuse(arrays())


def model_itself(scene: Scene) -> None:
    torch = pytest.importorskip("torch")
    scene.refuse(torch.nn.Linear(2, 2))


def one_dict_too_many(scene: Scene) -> None:
    torch = pytest.importorskip("torch")
    scene.refuse({"policy": {"policy": torch.nn.Linear(2, 2)}})


def start_forgotten(scene: Scene) -> None:
    scene.worker("policy", "idle", start=False)
    scene.publisher.publish(
        "policy", arrays(), settings=Settings(wait="none"), expect=1, timeout=SECONDS
    )


def nobody_takes_it(scene: Scene) -> None:
    scene.worker("policy", "w0", start=False)
    scene.worker("policy", "w1", start=False)
    scene.publisher.wait_for_workers(2, SECONDS)
    scene.publisher.publish("policy", arrays(), settings=Settings(wait="none"), timeout=SECONDS)


def wrong_port(scene: Scene) -> None:
    gone = scene.publish_at()
    gone.close()
    scene.worker("policy", "lost", gone.address)


def data_port(scene: Scene) -> None:
    scene.worker("policy", "lost", scene.publisher.data_address)


def something_else(scene: Scene) -> None:
    scene.worker("policy", "lost", f"tcp://127.0.0.1:{scene.web_server()}")


def bound_to_this_host_alone(scene: Scene) -> None:
    port = scene.publisher.address.rpartition(":")[2]
    scene.worker("policy", "far", f"tcp://127.0.0.2:{port}")  # not where it is bound


def nobody_joined(scene: Scene) -> None:
    assert "no worker is connected" in str(scene.publisher.publish("policy", arrays()))


def keys_at_the_publisher(scene: Scene) -> None:
    scene.worker("policy", "w", scene.publish_at(keys=scene.keys).address, start=False)


def keys_at_the_worker(scene: Scene) -> None:
    scene.worker("policy", "w", keys=scene.key, start=False)


def one_name_twice(scene: Scene) -> None:
    scene.worker("policy", "same")
    scene.publisher.wait_for_workers(1, SECONDS)
    other = scene.publisher.address.replace("127.0.0.1", "localhost")  # else it takes its place
    scene.worker("policy", "same", other, start=False)


class Row(NamedTuple):
    """A mistake, and which lines are to be said where."""

    play: Callable[[Scene], None]
    told: dict[str, list[str]]  # by side, the parts of its line


NOBODY = "was published to no worker: no worker has joined"
NOT_APPLIED = "and nothing there applies it: is start() called, or receive()"
LISTENS = "no process listens there: is the publisher running, on that port, and on that address"
TABLE = [
    Row(
        worker_misspells,
        {
            PUBLISHER: ["worker typo wants 'polcy', of which nothing is", "is 'policy' meant?"],
            WORKER: ["worker typo wants 'polcy', of which nothing is", "is 'policy' meant?"],
        },
    ),
    Row(trainer_misspells, {PUBLISHER: ["no worker wants 'polcy'", "(is 'policy' meant?)"]}),
    Row(outer_dict_forgotten, {RAISED: ["tensors by name ('w', ...)", '{"policy": ...}']}),
    Row(model_itself, {RAISED: ["models=Linear(in_features=2", '{"policy": ...}']}),
    Row(one_dict_too_many, {RAISED: ["policy: a Linear in a mapping", "give it by itself"]}),
    Row(
        start_forgotten,
        {WORKER: ["worker idle has version 1 of policy", "call start(), or receive() where"]},
    ),
    Row(nobody_takes_it, {PUBLISHER: ["version 1 of policy", NOT_APPLIED]}),
    Row(wrong_port, {WORKER: ["worker lost has found no publisher", LISTENS]}),
    Row(data_port, {WORKER: ["is not a control socket", "one port above", "perhaps tcp://127."]}),
    Row(something_else, {WORKER: ["speaks another protocol: a web server"]}),
    Row(bound_to_this_host_alone, {WORKER: [LISTENS, "(127.0.0.1 can be reached from"]}),
    Row(nobody_joined, {PUBLISHER: [NOBODY, "publish(expect=N)", "connect to tcp://127.0.0.1:"]}),
    Row(keys_at_the_publisher, {WORKER: ["asks for keys, and this worker has none: give it"]}),
    Row(keys_at_the_worker, {WORKER: ["speaks without keys, and this worker has some"]}),
    Row(
        one_name_twice,
        {
            PUBLISHER: ["worker same is refused (name-taken)", "give this one another name"],
            WORKER: ["worker same of tcp", "refused (name-taken)", "give this one another name"],
        },
    ),
]


@pytest.fixture(name="scene")
def _scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as ends:
        yield Scene(tmp_path, ends)


def lines(caplog: pytest.LogCaptureFixture, side: str) -> list[str]:
    """Return what a user who has set up nothing sees of a side."""
    seen = [r for r in caplog.records if r.levelno >= logging.WARNING and r.name == side]
    return [record.getMessage() for record in seen]


class Heard(logging.Handler):
    """Says that something was logged, which `caplog` has by then: its handler was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.news = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002
        self.news.set()


@pytest.fixture(name="heard")
def _heard(caplog: pytest.LogCaptureFixture) -> Iterator[Heard]:
    root, handler = logging.getLogger(), Heard()
    assert caplog.handler in root.handlers
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.play.__name__)
def test_a_mistake_is_told_in_a_line(
    row: Row, scene: Scene, caplog: pytest.LogCaptureFixture, heard: Heard
) -> None:
    row.play(scene)
    for side, parts in row.told.items():
        until, found = time.monotonic() + SECONDS, list[str]()
        while not found:
            heard.news.clear()
            said = [scene.raised] if side == RAISED else lines(caplog, side)
            found = [line for line in said if all(part in line for part in parts)]
            assert found or heard.news.wait(until - time.monotonic()), (side, said)
        assert len(found) == 1, "once"
        assert "\n" not in found[0]


def test_nothing_is_told_where_all_is_well(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    publisher, models = scene.publish_at(settings=PATIENT), ("actor_1", "actor_2", "actor_3")
    for name in models:  # the third of which comes late
        scene.worker(name, name, publisher.address, settings=PATIENT)
    publisher.wait_for_workers(3, SECONDS)
    until = time.monotonic() + 2 * PATIENT.timing.hint_after
    while time.monotonic() < until:
        for name in models[:2]:
            assert publisher.publish(name, arrays(), timeout=SECONDS).in_state("applied") == [name]
    publisher.publish("actor_3", arrays(), expect=1)
    assert not lines(caplog, PUBLISHER) + lines(caplog, WORKER)


def test_it_is_told_within_five_seconds() -> None:
    usual = Timing()
    tick = 0.1
    assert usual.hint_after * (1 + REACH) + 2 * tick < 5.0, "who is at the address is asked as well"
    assert usual.hint_after * (1 + 1 / CHECKS_UNTIL_HINT) + usual.ping + 2 * tick < 5.0
    assert Timing(ping=10.0, lost_after=60.0).hint_after == usual.hint_after


@pytest.mark.parametrize(
    ("name", "names", "meant"),
    [
        ("polcy", ["policy", "critic"], "policy"),
        ("Policy", ["policy"], "policy"),
        ("polices", ["critic"], ""),
        ("encoder", ["decoder"], ""),  # of a pair
        ("policy_old", ["policy"], ""),
        ("actor_2", ["actor_1"], ""),  # of many
        ("actor-b", ["actor-a"], ""),
        ("m", ["n"], ""),
    ],
)
def test_what_is_meant_by_a_name(name: str, names: list[str], meant: str) -> None:
    assert likely_meant(name, names) == meant

"""Keys where descriptors are scarce: good ones get in, and a removed one is revoked in time."""

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import weightbus
from weightbus.bus.errors import KeysError
from weightbus.bus.trust.grants import Grant
from weightbus.bus.trust.keys import Allowed, PublisherKeys, ScarceError, generate
from weightbus.python_client import keys as watching
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes
PING = 0.5
SILENT = 300
PUBLISHER = """
import json, logging, os, resource, sys, threading, time
from pathlib import Path
import numpy as np
from weightbus import Http, Publisher, Settings
from weightbus.tests.compose.waiting import wait_for
folder, taken = Path(sys.argv[1]), sys.argv[2] == "taken"
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
said, gone = [], threading.Event()
class Keep(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger().addHandler(Keep())
held = []
with Publisher(
    keys=folder, state=folder / "state", dashboard=Http("127.0.0.1:0", token="correct horse"),
    settings=Settings(ping=0.5, lost_after=5.0),
) as publisher:
    def tell(*what): print(json.dumps(what), flush=True)
    def heard(event):
        if event.kind == "left": gone.set()
    publisher.on_worker(heard)
    tell(publisher.address, publisher.shown.dashboard)
    sys.stdin.readline()
    publisher.wait_for_workers(1, 30)
    receipt = publisher.publish("m", {"w": np.ones(4)}, timeout=30)
    wait_for(lambda: publisher.history("m"), "the version in the history", 30)
    if taken:  # by the trainer itself, whatever becomes free included
        full = threading.Event()
        def take():
            while not gone.is_set():
                if len(held) >= 100: full.set()
                try: held.append(os.open(os.devnull, os.O_RDONLY))
                except OSError: gone.wait(0.001)
        threading.Thread(target=take, daemon=True).start()
        assert full.wait(30)
    tell("joined", sorted(receipt.workers))
    sys.stdin.readline()
    began = time.monotonic()
    os.unlink(folder / "allowed" / "w0.json")
    tell("gone", gone.wait(30), time.monotonic() - began)
    for each in held: os.close(each)
    publisher.publish_async("m", {"w": np.full(4, 2.0)})
    tell("log", said)
    sys.stdin.readline()
"""


class Silent:
    """Silent connections to a page, of which another takes the place of each that ends."""

    def __init__(self, address: str) -> None:
        where = urlsplit(address)
        self._where, self._over = (where.hostname or "", where.port or 0), threading.Event()
        self._each = [socket.create_connection(self._where, SECONDS) for _ in range(SILENT)]
        self._thread = threading.Thread(target=self._renew)
        self._thread.start()

    def _renew(self) -> None:
        while not self._over.wait(0.05):
            for number, each in enumerate(self._each):
                each.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    with contextlib.suppress(ConnectionError):
                        each.recv(1)
                    each.close()
                    self._each[number] = socket.create_connection(self._where, SECONDS)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for each in self._each:
            each.close()


@pytest.mark.parametrize("taken", ["silent", "taken"])
def test_a_key_is_revoked_in_time_whoever_takes_the_descriptors(tmp_path: Path, taken: str) -> None:
    folder = tmp_path / "keys"
    generate(folder, {"w0": "worker"})
    command = [sys.executable, "-c", PUBLISHER, str(folder), taken]
    with subprocess.Popen(  # noqa: S603 - our own code
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as publisher:
        assert publisher.stdin is not None
        assert publisher.stdout is not None

        def told() -> list[Any]:
            assert publisher.stdout is not None
            found: list[Any] = json.loads(publisher.stdout.readline())
            return found

        def go_on() -> None:
            assert publisher.stdin is not None
            publisher.stdin.write("\n")
            publisher.stdin.flush()

        address, page = told()
        weights = np.zeros(4)
        with contextlib.ExitStack() as undo:
            if taken == "silent":
                undo.callback(Silent(page).close)
            worker = weightbus.Subscriber(
                address, {"m": {"w": weights}}, keys=folder / "workers" / "w0.json"
            )
            undo.enter_context(worker.start())
            go_on()
            assert told() == ["joined", ["w0"]]
            go_on()
            what, gone, seconds = told()
            assert (what, gone) == ("gone", True)
            assert seconds < PING + 1.0, "a ping interval, and a moment for a busy host"
            wait_for(lambda: worker.error is not None, "the worker is told", SECONDS)
            assert isinstance(worker.error, weightbus.RefusedError)
            assert worker.error.code == "revoked"
            assert weights[0] == 1.0
        _, said = told()
        assert len(said) < 40, said
        go_on()


class Loop:
    """As much of a publisher's loop as the look at its keys needs."""

    def __init__(self, looks: int) -> None:
        self.over, self._left = self, looks
        self.granted: list[list[str]] = []
        self.events: list[str] = []

    def wait(self, _seconds: float) -> bool:
        self._left -= 1
        return self._left < 0

    def decide(self, how: Callable[[Any, float], Any]) -> None:
        how(self, 0.0)

    def grant(self, by_key: dict[str, Grant], _now: float) -> list[Any]:
        self.granted.append(sorted(grant.pattern for grant in by_key.values()))
        return []

    @property
    def observers(self) -> "Loop":
        return self

    def happened(self, notice: Any, _now: float) -> None:
        self.events.append(notice.text)


def watch(allowed: Allowed, looks: int) -> Loop:
    loop: Any = Loop(looks)
    watched = watching._Watch(allowed, watching._FolderErrors(), loop, lambda: None)  # noqa: SLF001
    watched.run(0.0)
    made: Loop = loop
    return made


def allowed_in(folder: Path) -> Allowed:
    generate(folder, {"w0": "worker", "w1": "worker"})
    found = PublisherKeys.read(folder).allowed(lambda _: None)
    assert found is not None
    return found


def spent(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_removal_is_seen_without_a_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = allowed_in(tmp_path / "keys")
    generate(tmp_path / "keys", {"w2": "worker"})
    (tmp_path / "keys" / "allowed" / "w1.json").unlink()
    monkeypatch.setattr(os, "listdir", spent)
    loop = watch(allowed, looks=5)
    assert loop.granted == [["w0"]], "once, and nobody new"
    (alarm,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "Too many open files" in alarm.getMessage()
    assert "a removed file still revokes its key" in alarm.getMessage()
    assert "`ulimit -n`" in alarm.getMessage()
    assert loop.events == [alarm.getMessage()]


def test_a_look_has_a_descriptor_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stand-in: what opens something fails unless one was given back before."""
    allowed = allowed_in(tmp_path / "keys")
    (tmp_path / "keys" / "allowed" / "w1.json").unlink()
    released, listdir, close, open_ = [True], os.listdir, os.close, os.open

    def closed(descriptor: int) -> None:
        released.append(True)
        close(descriptor)

    def listed(path: Any) -> Any:
        return listdir(path) if released[-1] else spent()

    def taken(path: Any, *arguments: Any) -> int:
        released.append(path != os.devnull)
        return open_(path, *arguments)

    monkeypatch.setattr(os, "close", closed)
    monkeypatch.setattr(os, "open", taken)
    monkeypatch.setattr(os, "listdir", listed)
    loop = watch(allowed, looks=3)
    assert loop.granted == [["w0"]]
    assert not caplog.records
    assert not released[-1], "it is taken again"


def test_a_folder_that_cannot_be_found_changes_nothing_and_is_an_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = allowed_in(tmp_path / "keys")
    (tmp_path / "keys" / "allowed").rename(tmp_path / "keys" / "away")
    with pytest.raises(KeysError, match="cannot be read: No such file"):
        allowed.remaining()
    loop = watch(allowed, looks=7)
    assert loop.granted == []
    assert len(loop.events) == 1, "one a minute"
    monkeypatch.setattr(watching, "ALARM_SECONDS", 0.0)
    assert len(watch(allowed, looks=3).events) == 3, "as long as it lasts"
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 4
    assert "a key whose file is removed stays valid" in errors[0].getMessage()
    (tmp_path / "keys" / "away").rename(tmp_path / "keys" / "allowed")
    assert watch(allowed, looks=2).granted == [["w0", "w1"]]


def test_what_was_read_is_kept_if_a_file_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = allowed_in(tmp_path / "keys")
    monkeypatch.setattr("builtins.open", spent)
    with pytest.raises(ScarceError, match="Too many open files"):
        allowed.read()
    assert len(allowed.remaining()) == 2

"""Situations of users that cannot work as they are: the text says why, and the way out."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weightbus import AddressError, ApplyError, Publisher, PublishError, Settings, Subscriber
from weightbus.bus.net import endpoints
from weightbus.python_client.cli.outcome import conclude
from weightbus.python_client.cli.screen import Screen
from weightbus.python_client.observing.connection_checks import reach
from weightbus.tests.cli.starting import python
from weightbus.tests.cli.test_cli import run
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_ports

SECONDS = 30.0


def arrays(size: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.zeros(size, np.float32)}


# Files and the command line.

MOUNTED = """
import sys
import threading
from weightbus.python_client.files.file_target import FileTarget
try:
    FileTarget(sys.argv[1])
except OSError as error:
    print(error)
"""


def may_mount() -> bool:
    if os.geteuid():
        return False
    return not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode  # noqa: S607


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_file_that_is_mounted_by_itself_is_refused_at_the_start(tmp_path: Path) -> None:
    """As `docker run -v ./model.safetensors:/model.safetensors` mounts one."""
    host, file = tmp_path / "host", tmp_path / "a model\\of mine.safetensors"
    for each in (host, file):
        each.touch()
    mount = 'mount --bind "$1" "$2" && shift && exec "$PYTHON" -c "$CODE" "$@"'
    done = subprocess.run(  # noqa: S603
        ["unshare", "--mount", "sh", "-c", mount, "sh", host, file],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHON": sys.executable, "CODE": MOUNTED},
    )
    assert "it is mounted by itself, so no new file can take its place" in done.stdout, done.stderr
    assert "mount its folder instead" in done.stdout
    assert python("-c", MOUNTED, file).stdout == "", "where it is not mounted it is not a matter"


def test_top_without_a_terminal_shows_it_once_and_says_so() -> None:
    with Publisher() as publisher:
        done = run("top", publisher.address)
    assert done.exit_code == 0
    assert "0 workers: none joined" in done.stdout
    assert "no terminal to draw on: shown once; --json" in done.stderr


@pytest.fixture
def _no_nohup() -> Iterator[None]:
    """Have child processes handle SIGHUP, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_no_nohup")
def test_a_session_that_is_closed_ends_a_command_in_order(tmp_path: Path) -> None:
    """On SIGHUP the worker sends `bye`, and the publisher does not report it as lost."""
    out = tmp_path / "model.safetensors"
    with Publisher() as publisher:
        words = [sys.executable, "-m", "weightbus", "subscribe", publisher.address, "--model", "m"]
        with subprocess.Popen(  # noqa: S603
            [*words, "--out", str(out), "--name", "w"], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                publisher.publish("m", arrays(), expect=1, timeout=SECONDS)
                assert process.stdout is not None
                # the worker acknowledges the version before the command counts and shows it
                assert any("m version 1" in line for line in iter(process.stdout.readline, ""))
                process.send_signal(signal.SIGHUP)
                said, _ = process.communicate(timeout=SECONDS)
                assert process.returncode == 0
                assert "stopped by SIGHUP after 1 version" in said
                assert "w" not in publisher.workers(), "it has left"
            finally:
                process.kill()


@pytest.mark.parametrize(("handler", "code"), [(signal.SIG_DFL, 129), (signal.SIG_IGN, 0)])
def test_a_command_under_nohup_goes_on(handler: signal.Handlers, code: int) -> None:
    def command() -> int:
        signal.raise_signal(signal.SIGHUP)
        return 0

    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert conclude(Screen(as_json=True), command) == code
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_leaves_no_lock_behind() -> None:
    """One that comes while `Condition` takes its lock is handled a moment later."""
    lock, inside = threading.Lock(), list[bool]()
    signals: Any = SimpleNamespace(
        acquire=lock.acquire,
        release=lock.release,
        __enter__=partial(signal.raise_signal, signal.SIGTERM),
        __exit__=lambda *_: None,
    )

    def command() -> int:
        with threading.Condition(signals):
            inside.append(True)
        threading.Event().wait(SECONDS)
        return 0

    before = signal.getsignal(signal.SIGALRM)
    assert conclude(Screen(as_json=True), command) == 143
    assert inside
    assert signal.getsignal(signal.SIGALRM) is before


# Addresses.


def test_neighbours_are_told_to_leave_a_port_between() -> None:
    below, first, _, _ = lasting_ports(4)
    at = f"tcp://127.0.0.1:{first}"
    with Publisher(at) as publisher:
        with pytest.raises(AddressError) as caught:
            Publisher(publisher.data_address)
        said = f"{publisher.data_address} is the data socket of the publisher at {at}: leave a port"
        assert said in str(caught.value)
        with pytest.raises(AddressError) as caught:
            Publisher(f"tcp://127.0.0.1:{below}")
        said = f"the publisher at {at} is where the data socket of this one goes: leave a port"
        assert said in str(caught.value)
        with pytest.raises(AddressError) as caught:
            Publisher(at)
        assert "leave a port" not in str(caught.value)
        with pytest.raises(AddressError) as caught:
            Publisher(settings=Settings(data=publisher.data_address))
        assert "leave a port" not in str(caught.value), "nothing goes there by itself"


def test_the_data_port_of_another_process_is_told() -> None:
    first = lasting_ports(2)[0]
    code = f"import weightbus; weightbus.Publisher('tcp://127.0.0.1:{first}'); print(1, flush=True)"
    with subprocess.Popen(  # noqa: S603
        [
            sys.executable,
            "-c",
            f"kept = None\n{code.replace('weightbus.P', 'kept = weightbus.P')}\ninput()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            with pytest.raises(AddressError) as caught:
                Publisher(f"tcp://127.0.0.1:{first + 1}")
        finally:
            process.kill()
    said = f"It also listens at tcp://127.0.0.1:{first}: if that is a publisher, leave a port"
    assert said in str(caught.value)


@pytest.mark.parametrize("host", ["gpu-box", "127.0.0.1", "localhost", "0.0.0.0"])  # noqa: S104
def test_a_name_that_only_this_host_can_reach_is_told(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian has a host's own name as 127.0.1.1 in /etc/hosts."""
    look_up = socket.getaddrinfo

    def of_hosts(name: Any, *about: Any, **more: Any) -> Any:
        return look_up("127.0.1.1" if name == "gpu-box" else name, *about, **more)

    monkeypatch.setattr(socket, "getaddrinfo", of_hosts)
    with caplog.at_level(logging.WARNING, "weightbus"), Publisher(f"tcp://{host}:0", insecure=True):
        pass
    told = [r.getMessage() for r in caplog.records if "/etc/hosts" in r.getMessage()]
    assert len(told) == (host == "gpu-box")
    for text in told:
        assert "tcp://gpu-box:0 is tcp://127.0.1.1:" in text
        assert "only this host can connect" in text
        assert "bind tcp://0.0.0.0:PORT" in text


def test_an_address_to_bind_is_told_from_one_to_connect_to() -> None:
    """`publisher.address` of 0.0.0.0, handed to a worker elsewhere: nobody listens there."""
    (port,) = lasting_ports(1)
    (found,) = reach(f"tcp://0.0.0.0:{port}", keyed=False, timeout=SECONDS)
    assert "for a worker it is the worker's own host: give the name" in found.advice
    (found,) = reach(f"tcp://127.0.0.1:{port}", keyed=False, timeout=SECONDS)
    assert "no process listens there" in found.advice


def of_length(folder: Path, count: int) -> str:
    return f"ipc://{folder}/".ljust(count + len("ipc://"), "x")


def test_a_path_that_is_too_long_for_the_kernel_is_told_with_how_long_it_may_be(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("p")
    longest = endpoints.PATH_MAX
    with Publisher(of_length(folder, longest - 5)) as publisher:
        assert publisher.data_address == publisher.address + ".data"
    some = Settings(data=f"ipc://{folder}/data")
    with Publisher(of_length(folder, longest), settings=some) as publisher:
        Subscriber(publisher.address, {"m": arrays()}).close()
    limit = r"has at most 107\. Give a publisher a path of at most 102.*Settings\(data="
    with pytest.raises(AddressError, match=limit):
        Publisher(of_length(folder, longest - 4))
    for make in (Publisher, lambda at: Subscriber(at, {"m": arrays()})):
        with pytest.raises(AddressError, match=rf"the path has 108 bytes.*{limit}"):
            make(of_length(folder, longest + 1))


def test_a_path_with_spaces_is_told_why_it_is_none(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="ipc://PATH, without spaces and in at most"):
        Publisher(f"ipc://{tmp_path}/my bus")
    with pytest.raises(AddressError) as caught:
        Publisher("nowhere")
    assert "spaces" not in str(caught.value)


# Weights.


def test_modules_in_a_mapping_are_told_the_ways() -> None:
    modules: dict[str, nn.Module] = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    with Publisher() as publisher:
        for call in (
            lambda: publisher.publish("m", modules),
            lambda: Subscriber(publisher.address, {"m": modules}),
        ):
            with pytest.raises(
                ValueError, match=r"or give an nn\.ModuleDict, or a mapping of their"
            ):
                call()
        target = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
        with Subscriber(publisher.address, {"m": target}).start():
            publisher.publish("m", nn.ModuleDict(modules), expect=1, timeout=SECONDS)
        assert torch.equal(modules["critic"].weight, target["critic"].weight)  # type: ignore[arg-type]
        states = {name: module.state_dict() for name, module in modules.items()}
        publisher.publish("m", states, timeout=SECONDS)


def test_a_part_that_is_published_into_a_whole_is_told_the_two_ways(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the worker's record of that is one line, however many tensors it names."""
    whole = {"base": arrays(), "head": {"w": arrays()["w"], "b": arrays()["w"]}, "more": arrays()}
    advice = "2 of the target's 4 tensors are published, and they fit: publish all of it, or give"
    with (
        caplog.at_level(logging.WARNING, "weightbus"),
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": whole}, name="w") as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        with pytest.raises(PublishError, match=advice):
            publisher.publish("m", {"head": whole["head"]}, timeout=SECONDS)
        wait_for(lambda: "weightbus.worker" in names(caplog), "it is told", SECONDS)
        with pytest.raises(ApplyError, match=r"(?s)a mapping of just these.*base.w: .*more.w: "):
            worker.receive(SECONDS)
        worker.start()
        with pytest.raises(PublishError):
            publisher.publish("m", {"head": whole["head"]}, timeout=SECONDS)
        wait_for(lambda: "weightbus.subscriber" in names(caplog), "it is told", SECONDS)
        wrong = {"w": arrays(4)["w"], "b": arrays()["w"]}
        with pytest.raises(PublishError) as caught:  # another shape: that is not a matter of parts
            publisher.publish("m", {"head": wrong}, timeout=SECONDS)
    assert "tensors are published, and they fit" not in str(caught.value)
    assert {"weightbus.subscriber", "weightbus.worker"} <= names(caplog)
    for record in caplog.records:
        assert "\n" not in record.getMessage(), record.name


def names(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {r.name for r in caplog.records if "layout-mismatch" in r.getMessage()}

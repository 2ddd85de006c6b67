"""`weightbus doctor` finds what stands in the way, and says what to do about it."""

import os
import resource
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weightbus import Publisher, PublishError
from weightbus.bus.net import endpoints
from weightbus.bus.trust.keys import generate
from weightbus.codecs import native
from weightbus.python_client.observing import connection_checks
from weightbus.python_client.observing.connection_checks import reach
from weightbus.tests.cli.test_cli import result_of, run
from weightbus.tests.client.settling import arrays, joined

SECONDS = 30.0


def findings(*words: object) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Return the code of a doctor's visit, and what was found, by what it is about."""
    done = run("doctor", *words, "--json")
    found = dict[str, list[dict[str, str]]]()
    for finding in result_of(done)["findings"]:
        found.setdefault(finding["about"], []).append(finding)
    return done.exit_code, found


@pytest.fixture(autouse=True)
def _a_host_that_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the host of the tests has: it is not what is tried here."""
    monkeypatch.setattr(connection_checks, "DESCRIPTORS_MIN", 1)
    monkeypatch.setattr(connection_checks, "MEMORY_MIN", 1)


def test_all_is_well_with_a_worker_that_is_up_to_date(publisher: Publisher) -> None:
    with joined(publisher, w=arrays()):
        publisher.publish("m", arrays())
        code, found = findings(publisher.address)
    assert code == 0
    states = {about: each[0]["state"] for about, each in found.items()}
    for about in ("port", "protocol", "publisher", "workers", "clock", "descriptors"):
        assert states[about] == "well", about


def test_a_model_that_does_not_fit_is_found_and_what_to_do_is_said(publisher: Publisher) -> None:
    with joined(publisher, narrow=arrays(3)):
        with pytest.raises(PublishError):
            publisher.publish("m", arrays())
        code, found = findings(publisher.address)
        (layout,) = found["layout"]
        shown = run("doctor", publisher.address).stdout
    assert (code, layout["state"]) == (1, "problem")
    assert "w: shape [10] published, [3] here" in layout["text"]
    assert "strict=False" in layout["advice"]
    assert "1 problem" in shown


def test_a_closed_port_is_found() -> None:
    with Publisher() as publisher:
        address = publisher.address
    code, found = findings(address, "--timeout", 2)
    assert code == 2
    assert found["port"][0]["state"] == "problem"
    assert "no process listens there" in found["port"][0]["advice"]
    _, found = findings(f"ipc://{Path('nowhere').absolute()}")
    assert "no such socket" in found["port"][0]["advice"]
    assert run("doctor", "nowhere").exit_code == 2


def test_the_data_port_is_told_from_the_control_port(publisher: Publisher) -> None:
    code, found = findings(publisher.data_address)
    assert code == 2
    assert "is not a control socket: a " in found["protocol"][0]["text"]


@contextmanager
def saying(words: bytes) -> Generator[str]:
    """Have something else at an address, which says this to whoever connects."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(words)
                connection.settimeout(SECONDS)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        thread.join(SECONDS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a web server"),
        (b"SSH-2.0-OpenSSH_9\r\n", "an SSH server"),
        (b"hello \x1b[2J there", r"it says 'hello \x1b[2J there'"),
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), "ZMTP 1, which is too old"),
    ],
)
def test_another_protocol_is_told_by_its_words(words: bytes, told: str) -> None:
    with saying(words) as address:
        (*_, last) = reach(address, keyed=False, timeout=SECONDS)
    assert (last.about, last.state) == ("protocol", "problem")
    assert told in last.text


def test_somebody_who_says_nothing_is_found() -> None:
    with saying(b"") as address:
        (last,) = reach(address, keyed=False, timeout=0.2)
    assert "says nothing within 0.2 s" in last.text


def test_a_crowded_publisher_is_found_however_soon_it_hangs_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reset(_address: str, _timeout: float) -> socket.socket:
        raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setattr(endpoints, "dial", reset)
    monkeypatch.setattr(connection_checks, "used_by", lambda _pid: (250, 256))  # pyright: ignore
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"tcp://localhost:{server.getsockname()[1]}"
        in_use, last = reach(address, keyed=False, timeout=SECONDS)
    assert "has 250 of 256 descriptors in use" in in_use.text
    assert (last.about, last.state) == ("port", "problem")
    assert "takes connections, and closes them at once" in last.text


def test_keys_that_are_missing_or_refused_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    generate(folder, {"w": "worker", "eye": "observer"})
    with Publisher(keys=folder) as publisher:
        code, found = findings(publisher.address)
        assert (code, found["keys"][0]["state"]) == (2, "problem")
        assert "asks for keys (CURVE), and there are none here" in found["keys"][0]["text"]
        code, found = findings(publisher.address, "--keys", folder / "workers" / "w.json")
        assert code == 2
        assert "--observer" in found["keys"][0]["advice"]
        eye = folder / "workers" / "eye.json"
        code, found = findings(publisher.address, "--keys", eye)
        assert (code, found["publisher"][0]["state"]) == (0, "well")
        secret = str(eye.read_text().split('"secret"')[1].split('"')[1])
        done = run("doctor", publisher.address, "--keys", eye)
        assert secret not in done.stdout + done.stderr
        (tmp_path / "broken").write_text("{")
        code, found = findings(publisher.address, "--keys", tmp_path / "broken")
        assert (code, found["keys"][0]["state"]) == (2, "problem")
    with Publisher() as publisher:
        code, found = findings(publisher.address, "--keys", eye)
        assert "speaks without keys" in found["keys"][0]["text"]


def test_clocks_that_differ_are_found(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher._loop._machine.state, "clock", lambda: 1e9)  # noqa: SLF001 # pyright: ignore
    code, found = findings(publisher.address)
    assert (code, found["clock"][0]["state"]) == (1, "problem")
    assert "behind the one here" in found["clock"][0]["text"]


def test_too_few_descriptors_and_too_little_memory_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection_checks, "DESCRIPTORS_MIN", 1024)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 256))
    monkeypatch.setattr(connection_checks, "PROC", tmp_path)
    monkeypatch.setattr(connection_checks, "CGROUP", tmp_path)
    monkeypatch.setattr(connection_checks, "MEMORY_MIN", 2**28)
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:  1048576 kB\n")
    (tmp_path / "memory.max").write_text("200000000\n")
    (tmp_path / "memory.current").write_text("170000000\n")
    (tmp_path / "memory.stat").write_text("file 30000000\ninactive_file 20000000\n")
    buffers = tmp_path / "sys" / "net" / "ipv4"
    buffers.mkdir(parents=True)
    (buffers / "tcp_rmem").write_text("4096\t131072\t212992\n")
    code, found = findings()
    assert code == 1
    assert "room for some 112 workers" in found["descriptors"][0]["text"]
    assert found["memory"][0]["state"] == "problem"
    assert "GiB of address space" in found["address space"][0]["text"]
    assert "net.ipv4.tcp_rmem=4096 131072" in found["socket buffers"][0]["advice"]
    assert connection_checks.available() == 50_000_000
    room = connection_checks.room_for("m", 2**26)
    assert room is not None
    assert room.state == "problem"


@pytest.mark.parametrize("cached", [20_000_000, 90_000_000, None])
def test_what_was_read_from_files_is_no_memory_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cached: int | None
) -> None:
    """In a container of the first kind of groups, whose numbers need not be of one moment."""
    monkeypatch.setattr(connection_checks, "PROC", tmp_path)
    monkeypatch.setattr(connection_checks, "CGROUP", tmp_path)
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("200000000\n")
    (group / "memory.usage_in_bytes").write_text("80000000\n")
    if cached is not None:
        stat = f"inactive_file 7\ntotal_inactive_file {cached}\n"
        (group / "memory.stat").write_text(stat)
    assert connection_checks.available() == min(200_000_000, 120_000_000 + (cached or 0))


def test_a_helper_that_was_not_built_and_memory_that_is_not_shared_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(native, "BUILT", False)
    monkeypatch.delenv("WEIGHTBUS_NATIVE", raising=False)
    monkeypatch.setattr(os, "memfd_create", forbidden)
    code, found = findings()
    assert code == 0, "it works all the same"
    assert found["native helper"][0]["state"] == "note"
    assert "C compiler" in found["native helper"][0]["advice"]
    assert "seccomp" in found["shared memory"][0]["advice"]

"""The page: what it is fed, and who may look at it."""

import base64
import contextlib
import hashlib
import http.client
import json
import re
import socket
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from weightbus import AddressError, Http, Publisher, PublishError, Settings, Subscriber
from weightbus.bus.net.endpoints import is_loopback
from weightbus.python_client.observing import dashboard
from weightbus.python_client.observing.web import STOP_SECONDS
from weightbus.tests.cli.test_cli import SMALL, Command, run
from weightbus.tests.client.settling import arrays, joined
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes
TOKEN = "correct horse"  # noqa: S105


@pytest.fixture(name="publisher")
def _publisher() -> Iterator[Publisher]:
    timing = Settings(ping=0.1, lost_after=0.5)
    with Publisher(settings=timing, dashboard="127.0.0.1:0") as publisher:
        yield publisher


def get(
    url: str, path: str = "/", **headers: str
) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=SECONDS)
    connection.request("GET", path, headers=headers)
    return connection.getresponse(), connection


def code(url: str, path: str = "/", **headers: str) -> int:
    answer, connection = get(url, path, **headers)
    answer.read()
    connection.close()
    return answer.status


def told(answer: http.client.HTTPResponse, wanted: str = "message") -> dict[str, Any]:
    """Return the next event of a kind that a stream tells."""
    kind = "message"
    while line := answer.readline():
        word, _, text = line.decode().rstrip("\n").partition(": ")
        if word == "event":
            kind = text
        elif word == "data" and kind == wanted:
            found: dict[str, Any] = json.loads(text)
            return found
        elif not word:
            kind = "message"
    raise AssertionError("the stream has ended")


def test_a_change_is_streamed_and_agrees_with_the_receipt(publisher: Publisher) -> None:
    answer, connection = get(publisher.shown.dashboard, "/events")
    assert answer.getheader("Content-Type") == "text/event-stream"

    def state() -> dict[str, Any]:
        return told(answer)

    assert state()["workers"] == []
    with joined(publisher, w=arrays()):
        said = {"step": "12", "a\x1b[2J": "\u202ex"}
        receipt = publisher.publish("m", arrays(), metadata=said)
        while not (now := state())["models"] or now["workers"][0]["verdict"] != "current":
            pass
        assert (now["epoch"], now["models"][0]["version"]) == (receipt.epoch, receipt.version)
        shown = {"step": "12", "a\\x1b[2J": "\\u202ex"}
        assert now["models"][0]["metadata"] == shown
        assert (now["workers"][0]["worker"], now["workers"][0]["version"]) == ("w", 1)
        assert now["events"][0]["text"] == "worker w joined"
    publisher.close()
    with contextlib.suppress(http.client.IncompleteRead):  # the stream ends with its publisher
        answer.read()
    connection.close()


def test_whoever_comes_later_is_told_how_long_ago_it_is_by_then(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing has changed; and those who look on already are told nothing again."""
    monkeypatch.setattr(dashboard, "KEEP_ALIVE_SECONDS", 0.1)
    url = publisher.shown.dashboard
    publisher.publish("m", arrays(), settings=Settings(wait="none"))

    def models(path: str) -> list[dict[str, Any]]:
        answer, connection = get(url, path)
        state = told(answer) if path == "/events" else json.loads(answer.read())
        answer.close()
        connection.close()
        found: list[dict[str, Any]] = state["models"]
        return found

    def age(path: str) -> float:
        found: float = models(path)[0]["age_s"]
        return found

    wait_for(lambda: models("/state"), "it is published", SECONDS)
    answer, connection = get(url, "/events")
    told(answer)
    begun = age("/state")
    wait_for(lambda: age("/state") > begun + 0.3, "time goes by", SECONDS)
    assert age("/events") > begun + 0.3
    lines = [answer.readline() for _ in range(8)]
    assert b": still here\n" in lines
    assert not [line for line in lines if line.startswith(b'data: {"epoch"')]
    answer.close()
    connection.close()


def test_what_was_before_is_told_to_whoever_opens_the_page_afterwards(publisher: Publisher) -> None:
    """Publishes, the lag of who was behind, and what fell short: nobody had looked on by then."""
    url = publisher.shown.dashboard
    with joined(publisher, well=arrays()):
        for _ in range(3):
            publisher.publish("m", arrays(), timeout=SECONDS)
        with pytest.raises(PublishError) as short:
            publisher.publish("m", arrays(), expect=2, timeout=1.0)
        with Subscriber(publisher.address, {"m": arrays()}, name="idle"):
            publisher.wait_for_workers(2, SECONDS)
            publisher.publish("m", arrays(), require=1, timeout=SECONDS)

            def most() -> dict[str, Any]:
                """Return of each number the largest that there was in a moment."""
                answer, connection = get(url, "/history")
                told = json.loads(answer.read())
                connection.close()
                columns = zip(*told["models"].get("m", [[""] * 11]), strict=True)
                found = dict(zip(told["fields"], map(max, columns), strict=True))
                counts = (m[told["fields"].index("publishes")] for m in told["models"].get("m", []))
                return {**found, "all": sum(counts)}

            wait_for(lambda: most()["who"] == "idle", "somebody is seen to be behind", SECONDS)
        found = most()
        assert (found["all"], found["version"], found["short"]) == (5, 5, 1)
        assert found["late"] >= 1
        assert found["lag"] == 5
        assert 0 < found["applied_s"] < SECONDS
        for path in ("/events", "/events"):  # the page is opened, and loaded again
            answer, connection = get(url, path)
            history, state = told(answer, "history"), told(answer)
            answer.close()
            connection.close()
            assert history["since"] == -1
            assert sum(m[history["fields"].index("publishes")] for m in history["models"]["m"]) == 5
            (trouble,) = [t for t in state["troubles"] if "fell short" in t["text"]]
            assert trouble["text"] == "1 publish of m fell short in the last 15 minutes"
            assert str(short.value).splitlines()[0][:60] in trouble["advice"]


def test_a_publisher_does_not_wait_for_those_who_look_on(publisher: Publisher) -> None:
    answer, connection = get(publisher.shown.dashboard, "/events")
    assert answer.readline()
    begun = time.monotonic()
    publisher.close()
    assert time.monotonic() - begun < STOP_SECONDS
    answer.close()
    connection.close()


def test_the_page_asks_nobody_else_for_anything(publisher: Publisher) -> None:
    answer, connection = get(publisher.shown.dashboard)
    page = answer.read().decode()
    connection.close()
    policy = answer.getheader("Content-Security-Policy") or ""
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (own,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy, "what is in the page, and nothing else"
        assert len(own) > 1000
    assert " style=" not in page, "the policy would not have it"
    links = re.findall(r"https?://[^\"' ]+", page)
    assert set(links) == {"http://www.w3.org/2000/svg"}


def test_whoever_came_by_another_name_is_sent_away(publisher: Publisher) -> None:
    url = publisher.shown.dashboard
    port = urllib.parse.urlsplit(url).port
    for host, expected in {
        "evil.example": 421,
        f"evil.example:{port}": 421,
        "127.0.0.1.evil.example": 421,
        "": 421,
        "localhost": 200,
        f"LOCALHOST:{port}": 200,
        f"[::1]:{port}": 200,
        f"127.0.0.1:{port}": 200,
        socket.gethostname(): 200,
    }.items():
        for path in ("/", "/state"):
            assert code(url, path, Host=host) == expected, host


def test_elsewhere_it_takes_a_token_or_a_word() -> None:
    for address in ("0.0.0.0:0", "[::]:0", "example.org:80", "192.168.0.1:80"):
        with pytest.raises(AddressError, match="other hosts can reach"):
            Http(address)
        assert Http(address, token=TOKEN).token == TOKEN
        assert Http(address, insecure=True).insecure
        assert TOKEN not in repr(Http(address, token=TOKEN))
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert is_loopback(host)
    with pytest.raises(AddressError, match="other hosts can reach"):
        Publisher(metrics="0.0.0.0:0")


@pytest.mark.parametrize("address", ["", "8080", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match=r"is not a HOST:PORT, such as 127\.0\.0\.1:8080"):
        Http(address)


def test_a_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 characters"):
        Http("0.0.0.0:80", token="short")  # noqa: S106


def test_a_token_lets_in_and_does_not_stay_in_the_address() -> None:
    where = Http("127.0.0.1:0", token=TOKEN)
    with Publisher(dashboard=where, metrics=where) as publisher:
        for url in (publisher.shown.dashboard, publisher.shown.metrics):
            path = urllib.parse.urlsplit(url).path
            assert code(url, path) == 401
            assert code(url, path, Authorization="Bearer wrong horse") == 401
            port = urllib.parse.urlsplit(url).port
            assert code(url, path, Cookie=f'weightbus-{port}="\\') == 401
            assert code(url, path, Authorization=f"Bearer {TOKEN}") == 200
            assert code(url, path, Authorization=f"Bearer {TOKEN}", Host="trainer.example") == 200
            assert code(url, f"{path}?token={urllib.parse.quote(TOKEN)}", Host="a.example") == 421
        url = publisher.shown.dashboard
        assert code(url, "/?token=wrong") == 401
        answer, connection = get(url, f"/?token={urllib.parse.quote(TOKEN)}")
        answer.read()
        connection.close()
        assert (answer.status, answer.getheader("Location")) == (303, "/")
        cookie = (answer.getheader("Set-Cookie") or "").partition(";")
        assert {"HttpOnly", "SameSite=Strict"} <= {word.strip() for word in cookie[2].split(";")}
        assert code(url, Cookie=cookie[0]) == 200


def test_pages_of_one_host_each_have_a_cookie_of_their_own() -> None:
    kept = dict[str, str]()  # by name, as browsers do for all ports of a host
    tokens = {f"{TOKEN} {n}": Http("127.0.0.1:0", token=f"{TOKEN} {n}") for n in range(2)}
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(Publisher(dashboard=where)).shown.dashboard
            for where in tokens.values()
        ]
        for url, token in zip(urls, tokens, strict=True):
            answer, connection = get(url, f"/?token={urllib.parse.quote(token)}")
            answer.read()
            connection.close()
            name, _, value = (answer.getheader("Set-Cookie") or "").partition(";")[0].partition("=")
            kept[name] = value
        cookies = "; ".join(f"{name}={value}" for name, value in kept.items())
        assert [code(url, Cookie=cookies) for url in urls] == [200, 200]
        assert code(urls[0], Cookie=cookies, Host="localhost") == 401, "another port"


def test_browsers_are_bounded(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "STREAMS_MAX", 1)
    url = publisher.shown.dashboard
    answer, connection = get(url, "/events")
    assert answer.status == 200
    assert code(url, "/events") == 503
    answer.close()
    connection.close()
    monkeypatch.setattr(dashboard, "KEEP_ALIVE_SECONDS", 0.1)

    def let_in() -> bool:
        again, other = get(url, "/events")
        again.close()
        other.close()
        return again.status == 200

    wait_for(let_in, "the one that left makes room", SECONDS)


def test_an_address_in_use_is_said_and_leaves_nothing_behind() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AddressError, match=r"cannot serve at 127\.0\.0\.1"):
            Publisher(dashboard=f"127.0.0.1:{taken.getsockname()[1]}")


def test_without_pages_nothing_is_served() -> None:
    with Publisher() as publisher:
        assert (publisher.shown.dashboard, publisher.shown.metrics) == ("", "")


def test_the_command_line_serves_both(tmp_path: Path) -> None:
    small = tmp_path / "small.safetensors"
    save_file(SMALL, small)
    words = ("publish", small, "--model", "m", "--bind", "tcp://127.0.0.1:0")
    command = Command(*words, "--dashboard", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    try:
        told = command.line()
        assert code(told["dashboard"]) == 200
        assert code(told["metrics"], "/metrics") == 200
    finally:
        command.process.kill()
        command.process.communicate(timeout=SECONDS)
    refused = run(*words, "--dashboard", "0.0.0.0:0")
    assert refused.exit_code == 2
    assert "--insecure-http" in refused.stderr


@pytest.mark.parametrize(
    ("asked", "what"),
    [("dashboard", "pip install aiohttp"), ("metrics", "pip install aiohttp prometheus-client")],
)
def test_what_serves_pages_may_have_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, asked: str, what: str
) -> None:
    for name in ("web", "dashboard"):
        monkeypatch.delitem(sys.modules, f"weightbus.python_client.observing.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    options: Any = {asked: "127.0.0.1:0"}
    with pytest.raises(ModuleNotFoundError, match=f"{asked}= needs aiohttp.*: {what}") as raised:
        Publisher(**options)
    assert raised.value.name == "aiohttp"

"""Words of others reach terminals, logs, metrics and pages: none of them moves a cursor there."""

import copy
import io
import json
import logging
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from weightbus import RefusedError
from weightbus.bus.effects import Notice
from weightbus.bus.errors import ApplyError, ProtocolError, PublishError
from weightbus.bus.event_log import EventLog, RateLimitedWarning
from weightbus.bus.headers import from_publisher
from weightbus.bus.messages import (
    Abort,
    Failed,
    Refuse,
    RosterPage,
    ToPublisher,
    ToWorker,
    Verified,
)
from weightbus.bus.observed import to_observer, to_publisher, to_worker
from weightbus.bus.protocol_limits import ERROR_MAX, LABEL_MAX, TEXT_MAX
from weightbus.bus.publisher.effects import Resolve
from weightbus.bus.structs import Message, SanitizedText
from weightbus.codecs.apply import check
from weightbus.codecs.errors import WeightBusError
from weightbus.codecs.layout import NAME_SHOWN, Layout
from weightbus.codecs.words import printable
from weightbus.python_client.cli import status, verify
from weightbus.python_client.cli.inspect import inspect
from weightbus.python_client.cli.screen import Screen
from weightbus.python_client.observing.diagnosis import troubles
from weightbus.python_client.observing.view import View
from weightbus.tests.publisher.test_observing import Watched
from weightbus.tests.publisher.test_publisher_machine import EPOCH, hello
from weightbus.tests.worker.test_worker_machine import Bench as WorkerBench
from weightbus.tests.worker.test_worker_machine import welcome
from weightbus.types import Receipt

NASTY = [
    "\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\r", "\n", "\r\n", "\x00", "\x08\x08", "\t",
    "\u202e", "\u2066", "\u200f", "\u2028", "\x85", "\u200b", "\ufeff", "[bold red]", "[/]",
    "<script>alert(1)</script>", "</script>", '"} 1\nweightbus_workers{a="', "\\", "%s", "{0}",
    "2026-11-25 root ERROR: all is lost", "重み", "naïve", "a" * 10_240,
]  # fmt: skip
WORDS = st.lists(st.sampled_from(NASTY) | st.text(max_size=20), max_size=8).map("".join)
QUICK = settings(max_examples=40, deadline=None)


def lines_of(shown: RenderableType) -> list[str]:
    """Return what a terminal is sent for it, line by line, without the colours that are ours."""
    out = io.StringIO()
    Console(file=out, width=400, color_system=None, force_terminal=False).print(shown)
    return out.getvalue().split("\n")


def texts_in(value: object) -> list[str]:
    """Return all texts in what was decoded from JSON."""
    match value:
        case str():
            return [value]
        case dict():
            return [text for pair in value.items() for each in pair for text in texts_in(each)]
        case list():
            return [text for each in value for text in texts_in(each)]
        case _:
            return []


def strange(texts: list[str]) -> list[str]:
    return [text for text in texts if not text.isprintable()]


def test_what_cannot_be_seen_is_escaped_and_what_can_stays() -> None:
    assert printable("a\x1b[31m\tb\r\nc\u202e\u2066d\x9b") == r"a\x1b[31m\tb\r\nc\u202e\u2066d\x9b"
    assert printable("naïve 重み 🚚 \\ [b] <i>") == "naïve 重み 🚚 \\ [b] <i>"
    assert printable("\ud800") == "\\ud800"
    assert printable("abcdef", 4) == "abc…"


@QUICK
@given(WORDS | st.text(st.characters()), st.none() | st.integers(1, 50))
def test_a_text_is_printable_once_and_for_all(text: str, most: int | None) -> None:
    shown = printable(text, most)
    assert shown.isprintable()
    assert printable(shown, most) == shown
    assert most is None or len(shown) <= most
    assert shown == text or not text.isprintable() or most is not None


# Where they come in.

KINDS: dict[type[Any], Any] = {
    kind: decode
    for union, decode in (
        (ToPublisher, to_publisher),
        (ToWorker, lambda frames: to_worker(frames)[0]),
        (RosterPage | Verified | Refuse, to_observer),
    )
    for kind in get_args(union)
    if issubclass(kind, SanitizedText)
}
FILLED = {
    "name": "w", "instance": "0" * 32, "models": {}, "model": "a", "epoch": 1, "version": 1,
    "code": "apply", "worker": "w", "chunks": 1,
}  # fmt: skip


def test_all_that_has_words_is_known_here() -> None:
    """A message with a text of any kind is one whose texts are made printable."""
    unions = (*get_args(ToPublisher), *get_args(ToWorker), RosterPage, Verified)
    # A path and an address, which programs read; and what few messages have (`reports.applied`).
    plain = {"shared", "data", "note"}
    for kind in unions:
        for name, text in bounded(kind):
            assert issubclass(kind, SanitizedText) or name in plain, (
                f"{kind.__name__}.{name}: {text}"
            )


def bounded(kind: type[Message]) -> list[tuple[str, int]]:
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    return [
        (field.name, field.type.max_length)
        for field in described.fields
        if isinstance(field.type, msgspec.inspect.StrType) and field.type.max_length
    ]


@QUICK
@given(st.sampled_from(sorted(KINDS, key=lambda kind: kind.__name__)), st.data())
def test_every_text_of_every_message_comes_in_printable(
    kind: type[Message], data: st.DataObject
) -> None:
    fields = {name: data.draw(WORDS)[:most] for name, most in bounded(kind)}
    tag = kind.__struct_config__.tag
    header = msgspec.json.encode({"wbp": 1, "type": tag} | FILLED | fields)
    message = KINDS[kind]([header])
    for name, most in bounded(kind):
        text: str = getattr(message, name)
        assert text.isprintable()
        assert len(text) <= most
    again = KINDS[kind]([b'{"wbp":1,' + msgspec.json.encode(message)[1:]])
    assert again == message


@QUICK
@given(WORDS)
def test_a_header_that_is_none_is_said_to_be_none_printably(text: str) -> None:
    for odd in ({"type": text}, {"type": "hello", "name": text}, {text: text}, text):
        with pytest.raises(ProtocolError) as found:
            to_publisher([msgspec.json.encode(odd)])
        assert str(found.value).isprintable()


# Where they are shown: at the publisher and its observers.


@QUICK
@given(WORDS, WORDS, WORDS)
def test_words_of_a_worker_are_shown_printable(text: str, client: str, host: str) -> None:
    bench = Watched()
    bench.say("w", hello("w", client=client[:LABEL_MAX], host=host[:LABEL_MAX]))
    version, _ = bench.publish()
    failed = {"model": "a", "epoch": EPOCH, "version": version.version, "code": "apply"}
    raw = {"wbp": 1, "type": "failed", **failed, "text": text[:TEXT_MAX]}
    effects = bench.machine.receive(b"w", [msgspec.json.encode(raw)], bench.now)
    bench.note(effects)
    (resolved,) = [each for each in effects if isinstance(each, Resolve)]
    error = PublishError(resolved.shortfall, resolved.receipt)
    assert not strange([str(error), str(resolved.receipt), resolved.receipt.workers["w"].detail])
    for record in logged([each for each in effects if isinstance(each, Notice)]):
        assert record.isprintable()

    view = View()
    bench.look(view)
    (standing,) = view.standings(bench.now)
    assert standing.verdict == "failed"
    assert not strange(lines_of(status.rows_of([standing])))
    for trouble in troubles(view, [standing], bench.now):
        assert not strange([trouble.text, trouble.advice])
    assert not strange(lines_of(verify.rows_of([found_of(standing, text)])))
    assert not strange(texts_in(json.loads(page_of(view, bench.now))))
    labels = metrics_of(view)
    assert len({*labels}) == len(labels), "a label made a series of its own"
    assert not strange(labels)


def logged(notices: list[Notice]) -> list[str]:
    """Return the lines that a log of the publisher's has of them."""
    lines, log = list[str](), logging.Logger("words")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    log.addHandler(handler)
    events, full = EventLog(log), RateLimitedWarning(log, "odd: %s")
    for notice in notices:
        events.write(notice, 0.0)
        full.warn(notice.text, 0.0)
    assert len(lines) == len(notices) + min(1, len(notices))
    return lines


def found_of(standing: Any, text: str) -> verify.WorkerVerdict:
    raw = {"wbp": 1, "type": "verified", "worker": "w", "model": "a", "code": "busy"}
    told = to_observer([msgspec.json.encode(raw | {"text": text[:TEXT_MAX]})])
    assert isinstance(told, Verified)
    return verify.WorkerVerdict(standing, told)


def page_of(view: View, now: float) -> bytes:
    from weightbus.python_client.observing import dashboard

    standings = view.standings(now)
    return dashboard.json_of(view, standings, troubles(view, standings, now), now)


def metrics_of(view: View) -> list[str]:
    """Return what identifies each series that Prometheus reads."""
    parser = pytest.importorskip("prometheus_client.parser")
    from weightbus.python_client.observing.metrics import Metrics

    families = parser.text_string_to_metric_families(
        Metrics(lambda: view, lambda: 0).text().decode()
    )
    return [f"{s.name} {sorted(s.labels.items())}" for family in families for s in family.samples]


def test_the_page_takes_words_as_text_only() -> None:
    from importlib.resources import files

    folder = files("weightbus").joinpath("python_client/observing")
    page = "".join(folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "js"))
    assert "textContent" in page
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert way not in page


@QUICK
@given(WORDS)
def test_what_a_publisher_tells_observers_of_others_is_printable(text: str) -> None:
    """Whoever it is that says so: the rows of a roster are read as words of a stranger's."""
    raw = {
        "wbp": 1, "type": "roster", "epoch": 1, "since": 0, "revision": 1, "latest": 1,
        "workers": 1,
        "rows": [{"name": "w", "state": "live", "road": "pulled", "heard_ms": 1,
                  "client": text[:LABEL_MAX], "models": {"a": {"error": text[:ERROR_MAX]}}}],
        "events": [{"kind": "failed", "worker": "w", "text": text[:ERROR_MAX], "age_ms": 1}],
    }  # fmt: skip
    assert not strange(texts_in(msgspec.to_builtins(to_observer([msgspec.json.encode(raw)]))))


# Where they are shown: at a worker.


@QUICK
@given(WORDS, st.sampled_from(["name-taken", "odd", "malformed"]))
def test_words_of_a_publisher_are_shown_printable(text: str, code: str) -> None:
    bench = WorkerBench()
    bench.tell(welcome())
    for kind, fields in (
        ("refuse", {"code": code}),
        ("abort", {"model": "a", "epoch": 7, "version": 1}),
    ):
        raw = {"wbp": 1, "type": kind, "text": text[:TEXT_MAX], **fields}
        message, _ = from_publisher([msgspec.json.encode(raw)])
        assert isinstance(message, Refuse | Abort)
        assert message.text.isprintable()
    for effect in bench.tell(Refuse(code=code, text=text)):
        assert getattr(effect, "text", "").isprintable()


NAMES = WORDS.map(lambda text: text.encode()[:4000].decode(errors="ignore")).filter(bool)


@QUICK
@given(NAMES)
def test_names_of_tensors_are_shown_printable_and_short(name: str) -> None:
    layout = Layout.plan([(name, "F32", (2,))])
    lines = check(layout, {"w": np.zeros(2, np.float32)}) + check(layout, {name: np.zeros(3)})
    assert len(lines) == 4 - 1 * (name == "w")
    assert not strange(lines)
    assert max(map(len, lines)) < NAME_SHOWN + 100
    text = "\n".join(lines)
    failed = Failed(model="a", epoch=1, version=1, code="layout-mismatch", text=text)
    assert failed.text == "; ".join(lines)[:TEXT_MAX], "a list is told on one line"


@QUICK
@given(NAMES, st.sampled_from(["XX", 4, [1], {}]))
def test_a_layout_that_is_none_is_said_to_be_none_printably(name: str, dtype: object) -> None:
    entry = {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}
    text = msgspec.json.encode({name: entry, name + "\n": {"dtype": "F32"}})
    with pytest.raises(WeightBusError) as found:
        Layout.parse(len(text).to_bytes(8, "little") + text)
    assert str(found.value).isprintable()


# Errors, and what the command line says.


def kinds_of(root: type[BaseException]) -> list[type[BaseException]]:
    return [root, *(each for kind in root.__subclasses__() for each in kinds_of(kind))]


@QUICK
@given(WORDS)
def test_errors_are_printable_but_for_their_own_lines(text: str) -> None:
    extra: dict[str, Any] = {"model": "a", "epoch": 1, "version": 1, "code": "x"}
    for kind in kinds_of(WeightBusError):
        if issubclass(kind, ApplyError):
            error: BaseException = kind(text, **extra)
        elif issubclass(kind, PublishError):
            error = kind(text, Receipt("a", 1, 1, 0, 0.0, "", {}))
        elif issubclass(kind, RefusedError):
            error = kind(text, "x")
        else:
            error = kind(text)
            assert str(copy.copy(error)) == str(error)
        assert not strange(str(error).split("\n")), kind
    assert str(WeightBusError()) == ""


@QUICK
@given(text=WORDS)
def test_what_commands_say_is_printable(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        out, err = io.StringIO(), io.StringIO()
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        screen = Screen(as_json=False)
        screen.say(text)
        screen.warn(text)
        screen.note(text)
        screen.error(text)
        Screen(as_json=True).emit("error", text=text)
    assert not strange(out.getvalue().split("\n") + err.getvalue().split("\n"))


def test_a_file_with_such_names_is_shown(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    name = "".join(NASTY)[:900]
    layout = Layout.plan([(name, "U8", (1,))], {name + "'": name}, {"by": name[1:]})
    path = tmp_path / "odd.safetensors"
    path.write_bytes(layout.header + b"\0")
    inspect(Screen(as_json=False), path, every=True)
    shown = capsys.readouterr().out
    assert r"\x1b[2J" in shown
    assert not strange(shown.split("\n"))

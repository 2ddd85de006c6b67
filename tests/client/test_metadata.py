"""What is said of a version is told to whoever has it: workers, files, folders, observers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from weightbus import Publisher, Settings, Subscriber
from weightbus.codecs.metadata import checked, fitting
from weightbus.codecs.protocol_limits import METADATA_BYTES_MAX, METADATA_MAX, METADATA_NAME_MAX
from weightbus.tests.cli.test_cli import Commands, commands, run, small
from weightbus.tests.client.settling import settled
from weightbus.types import Offer, Update

__all__ = ["commands", "small"]  # fixtures

SECONDS = 30.0  # far more than anything here takes
SAID = {"step": "12000", "reward": "3.1", "git": "0f3a9c1", "über": 'ein\n"Satz" 🚚'}
OTHER = {"step": "12001"}
# By encoding, as JSON spells it longest: what is just small enough.
LARGEST = {"n" * METADATA_NAME_MAX: "x" * (METADATA_BYTES_MAX - METADATA_NAME_MAX)}


def arrays(value: float = 0.0, size: int = 10) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.full(size, value, np.float32)}


def texts_of(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "network"])
@pytest.mark.parametrize("size", [10, 400_000], ids=["whole", "chunks"])
def test_a_worker_and_the_receipt_have_it(shared: bool, size: int) -> None:
    offers: list[Offer] = []
    commits: list[Update] = []
    with (
        Publisher() as publisher,
        Subscriber(
            publisher.address,
            {"m": arrays(size=size)},
            settings=Settings(
                shared_memory=shared, before_apply=offers.append, on_commit=commits.append
            ),
        ).start() as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        with worker.reading() as running:
            assert running.metadata == {}, "nothing runs yet"
        for number, said in enumerate((SAID, LARGEST, {}, OTHER)):
            receipt = publisher.publish("m", arrays(number, size), metadata=said, timeout=SECONDS)
            assert receipt.metadata == said
            update = worker.update("m")
            assert update is not None
            assert update.metadata == said
            with worker.reading() as running:
                assert (running.version, running.metadata) == (receipt.version, said)
        receipt = publisher.publish("m", arrays(9, size), timeout=SECONDS)
        assert receipt.metadata == {}, "what was said of another version"
        with Subscriber(publisher.address, {"m": arrays(size=size)}, name="late") as late:
            publisher.publish("m", arrays(10, size), metadata=SAID, settings=Settings(wait="none"))
            there = late.receive(SECONDS, version=receipt.version + 1)
        assert there is not None
        assert there.metadata == SAID
    assert [offer.metadata for offer in offers[:2]] == [SAID, LARGEST]
    assert commits[0].metadata == SAID
    assert isinstance(hash(commits[0]), int), "an update may be in a set, as before"


def test_a_patched_version_and_one_that_is_committed_together_have_it() -> None:
    with (
        Publisher() as publisher,
        Subscriber(
            publisher.address, {"m": arrays(size=400_000)}, settings=Settings(shared_memory=False)
        ) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        ways = ("raw", "auto"), ("delta", "auto"), ("delta", "auto"), ("raw", "together")
        for number, (encoding, commit) in enumerate(ways):
            way: dict[str, Any] = {"encoding": encoding, "commit": commit}
            way["metadata"] = said = {"step": str(number)}
            weights = arrays(1, 400_000)
            weights["w"][number] = 2
            publisher.publish("m", weights, timeout=SECONDS, **settled(way))
            update = worker.update("m")
            assert update is not None
            assert update.metadata == said, way


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ("step", "give names and texts"),
        ({"step": 12_000}, "'step' has 12000; give names and texts"),
        ({1: "x"}, "1 has 'x'; give names and texts"),
        ({f"m{i}": "" for i in range(METADATA_MAX + 1)}, "33 entries; at most 32"),
        ({"": "x"}, "a name has 1 to 128"),
        ({"n" * (METADATA_NAME_MAX + 1): "x"}, "a name has 1 to 128"),
        ({"n": "\0"}, "holds a NUL"),
        ({"n": "\udc80"}, "not text that UTF-8 can carry"),
        ({"n": "é" * (METADATA_BYTES_MAX // 2)}, "at most 4096 bytes of UTF-8 in all"),
    ],
)
def test_what_cannot_travel_is_refused_at_once(metadata: Any, words: str) -> None:
    with Publisher() as publisher, pytest.raises(ValueError, match=words):
        publisher.publish("m", arrays(), metadata=metadata)
    assert checked(LARGEST) == LARGEST


def test_what_does_not_fit_of_a_file_stays_behind() -> None:
    found, rest = fitting(
        [("a", "1"), ("big", "x" * METADATA_BYTES_MAX), ("b", "2"), ("z" * 129, "")]
    )
    assert found == {"a": "1", "b": "2"}
    assert rest == ["big", "z" * 129]
    found, rest = fitting((f"m{i}", "") for i in range(METADATA_MAX + 2))
    assert len(found) == METADATA_MAX
    assert rest == ["m32", "m33"]


def test_a_file_has_it_but_for_what_would_name_a_tensor(tmp_path: Path) -> None:
    tied = np.arange(4, dtype=np.float32)
    weights = {"embed": tied, "head": tied}
    out = tmp_path / "out.safetensors"
    with Publisher() as publisher, Subscriber(publisher.address, {"m": out}) as worker:
        for said in (SAID, {"best": "embed", "format": "mine", "head": "x", **OTHER}):
            publisher.publish("m", weights, metadata=said, settings=Settings(wait="none"))
            assert worker.receive(SECONDS) is not None
            kept = SAID if said is SAID else OTHER
            assert texts_of(out) == {"format": "pt", "head": "embed", **kept}
    assert load_file(out).keys() == {"embed"}


def test_a_publisher_that_is_started_again_says_it_again(tmp_path: Path) -> None:
    timing = Settings(ping=0.05, lost_after=0.5)
    weights = arrays(3)
    with Publisher(state=tmp_path, history=3, settings=timing) as publisher:
        address, data = publisher.address, publisher.data_address
        with Subscriber(address, {"m": arrays()}, settings=timing, name="stays") as worker:
            worker.start()
            publisher.wait_for_workers(1, SECONDS)
            first = publisher.publish(
                "m", weights, metadata=SAID, settings=Settings(verify=True), timeout=SECONDS
            )
            publisher.close()
            # It runs the same bytes by other words: those of the version that it is renamed to.
            with Publisher(address, settings=replace(timing, data=data), state=tmp_path) as again:
                [stored] = again.history("m")
                assert stored.metadata == SAID
                assert isinstance(hash(stored), int)
                there = worker.wait_for_version("m", epoch=again.epoch, timeout=SECONDS)
                assert there is not None
                assert there.metadata == SAID
                with Subscriber(again.address, {"m": arrays()}) as late:
                    came = late.receive(SECONDS)
                assert came is not None
                assert came.metadata == SAID
                key = (first.epoch, first.version)
                assert again.rollback("m", key, timeout=SECONDS).metadata == SAID
                other = again.rollback("m", key, timeout=SECONDS, metadata=OTHER)
                assert other.metadata == OTHER


def test_what_runs_under_another_name_has_the_words_of_that(tmp_path: Path) -> None:
    """The same bytes were published twice, and the second time something else was said."""
    timing = Settings(ping=0.05, lost_after=0.5)
    with Publisher(state=tmp_path, settings=timing) as publisher:
        address, data = publisher.address, publisher.data_address
        worker = Subscriber(
            address, {"m": arrays()}, settings=replace(timing, shared_memory=False), name="w"
        ).start()
        with worker:
            publisher.wait_for_workers(1, SECONDS)
            publisher.publish("m", arrays(3), metadata=SAID, timeout=SECONDS)
            publisher.publish("m", arrays(3), metadata=OTHER, workers=["w"], timeout=SECONDS)
            publisher.close()
            with Publisher(address, settings=replace(timing, data=data), state=tmp_path) as again:
                there = worker.wait_for_version("m", epoch=again.epoch, timeout=SECONDS)
                assert there is not None
                assert there.metadata == SAID


def test_the_command_line_carries_what_a_file_says(
    commands: Commands, small: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    texts = {"format": "pt", "author": "me", "step": "1", "license": "x" * METADATA_BYTES_MAX}
    save_file(load_file(small), source, texts)
    publisher, address = commands.publish(source, "--metadata", "step=12", "--metadata", "a=b=c")
    worker = commands.subscribe(address, out, "--once")
    said = {"step": "12", "a": "b=c", "author": "me"}
    publisher.complaint("license are not published: a version has at most 32 entries")
    code, receipt = publisher.end()
    assert (code, receipt["metadata"]) == (0, said)
    code, update = worker.end()
    assert (code, update["metadata"]) == (0, said)
    assert texts_of(out) == {"format": "pt", **said}


@pytest.mark.parametrize("given", ["step", "=12", "step=" + "x" * METADATA_BYTES_MAX])
def test_the_command_line_says_how_it_is_given(given: str, small: Path) -> None:
    result = run("publish", small, "--model", "m", "--metadata", given)
    assert result.exit_code == 2, result.output


def test_observers_are_told() -> None:
    hostile = {"step": "12", "w\x1b[2J": "\x1b]0;x\x07‮"}
    with Publisher() as publisher, Subscriber(publisher.address, {"m": arrays()}).start():
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", arrays(), metadata=hostile, timeout=SECONDS)
        for command in (("status",), ("top", "--once")):
            shown = run(*command, publisher.address, "--timeout", SECONDS)
            assert "step=12 w\\x1b[2J=\\x1b]0;x\\x07\\u202e" in " ".join(shown.output.split())
            told = run(*command, publisher.address, "--timeout", SECONDS, "--json")
            found = json.loads(told.stdout.splitlines()[-1])
            assert found["models"]["m"]["metadata"] == hostile

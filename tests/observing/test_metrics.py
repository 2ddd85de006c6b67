"""Metrics: those of the table and no others, what they say, and the documents made of them."""

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from weightbus import Publisher, PublishError, Settings
from weightbus.bus.messages import Doing, ModelRow, RosterPage, WorkerRow
from weightbus.python_client.observing.http_endpoints import tell
from weightbus.python_client.observing.view import View
from weightbus.tests.client.settling import arrays, joined
from weightbus.tests.compose.waiting import wait_for
from weightbus.types import Receipt

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from weightbus.python_client.observing import metrics
from weightbus.python_client.observing.metrics import (
    METRICS,
    MODELS_LABELLED,
    OTHER,
    WORKERS_LABELLED,
    Metrics,
)

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30.0  # far more than anything here takes


def receipt_of(model: str) -> Receipt:
    return Receipt(model, 1, 1, 7, 0.1, "", {})


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def shown_in(text: str) -> dict[str, tuple[str, set[str], str]]:
    """Return kind, labels and help of each metric, by name."""
    told = dict[str, tuple[str, set[str], str]]()
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for s in family.samples for label in s.labels} - {"le"}
            told[name] = (family.type, labels, family.documentation)
    return told


def fetch(publisher: Publisher) -> str:
    with urllib.request.urlopen(publisher.shown.metrics, timeout=SECONDS) as answer:  # noqa: S310
        return str(answer.read().decode())


@pytest.fixture(name="publisher")
def _publisher() -> Iterator[Publisher]:
    timing = Settings(ping=0.1, lost_after=0.5)
    with Publisher(settings=timing, metrics="127.0.0.1:0") as publisher:
        yield publisher


def test_models_with_labels_are_counted_by_one_thread_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Preempted(set[str]):
        """A set; while one thread looks at its length, another thread counts a model."""

        def __len__(self) -> int:
            length = super().__len__()
            while others:
                others[0].start()
                others.pop().join(0.2)  # for a moment: it may have to wait for this thread
            return length

    one = Metrics(View, lambda: 0)
    second = threading.Thread(target=one.count, args=(receipt_of("b"), None))
    others = [second]
    monkeypatch.setattr(metrics, "MODELS_LABELLED", 1)
    monkeypatch.setattr(one, "_labelled", Preempted())
    one.count(receipt_of("a"), None)
    second.join(SECONDS)
    found = samples(one.text().decode())
    counted = {labels for (name, labels) in found if name == "weightbus_published_bytes_total"}
    assert counted == {(("model", "a"),), (("model", OTHER),)}


def test_metrics_say_what_receipts_say(publisher: Publisher) -> None:
    with joined(publisher, good=arrays(), narrow=arrays(3)):
        receipt = publisher.publish("m", arrays(), workers=["good"])
        receipt = publisher.publish("m", arrays(), require=1)
        with pytest.raises(PublishError):
            publisher.publish("m", arrays())
        wait_for(lambda: 'kind="joined"} 2.0' in fetch(publisher), "both joined", SECONDS)
        found = samples(fetch(publisher))
    model = (("model", "m"),)
    assert found["weightbus_publishes_total", (*model, ("outcome", "achieved"))] == 2
    assert found["weightbus_publishes_total", (*model, ("outcome", "missed"))] == 1
    assert found["weightbus_published_bytes_total", model] == 3 * 40
    assert found["weightbus_publish_seconds_count", model] == 3
    assert found["weightbus_model_version", model] == receipt.version + 1
    assert found["weightbus_worker_version", (*model, ("worker", "good"))] == receipt.version + 1
    assert found["weightbus_model_workers", (*model, ("state", "failed"))] == 1
    assert found["weightbus_model_workers", (*model, ("state", "current"))] == 1
    assert found["weightbus_workers", (("state", "live"),)] == 2
    assert found["weightbus_publisher_epoch", ()] == publisher.epoch


def test_every_metric_is_in_the_table_and_every_row_is_told(publisher: Publisher) -> None:
    with joined(publisher, w=arrays()):
        publisher.publish("m", arrays(), metadata={"step": "12"})
        told = shown_in(fetch(publisher))
    rows = [row for row in METRICS.values() if not row.name.startswith("weightbus_relay_")]
    assert told == {row.name: (row.kind, {*row.labels}, row.help) for row in rows}


def test_metadata_that_is_a_number_is_told_and_no_other(publisher: Publisher) -> None:
    numbers = {"step": "12000", "reward": "-3.5", "lr": "1e-4", "whole": "7."}
    others = {
        "git": "12e4567",
        "nan": "nan",
        "under": "1_000",
        "empty": "",
        "space": " 1",
        "x": "0x1",
    }
    publisher.publish("m", arrays(), metadata={**numbers, **others})
    found = {
        dict(labels)["name"]: value
        for (name, labels), value in samples(fetch(publisher)).items()
        if name == "weightbus_model_metadata"
    }
    assert found == {name: float(text) for name, text in numbers.items()}
    publisher.publish("m", arrays(), metadata={"step": "12001"})
    assert fetch(publisher).count("weightbus_model_metadata{") == 1, "one for each that is said now"


def test_names_follow_the_conventions() -> None:
    for name, row in METRICS.items():
        assert re.fullmatch(r"weightbus_[a-z_]+", name)
        assert name.endswith("_total") == (row.kind == "counter"), name
        assert not re.search(r"_(ms|milliseconds|kb|mb|us)(_|$)", name), name
        assert row.kind != "histogram" or name.endswith("_seconds")


def view_of(models: int, workers: int) -> View:
    """Return a view of so many models, and of so many workers of the first."""
    view = View()
    page = RosterPage(
        epoch=1,
        since=0,
        revision=9,
        latest=9,
        workers=workers,
        models=[ModelRow(f"m{n:03}", 5, 10, "raw") for n in range(models)],
        rows=[
            WorkerRow(f"w{n:04}", "live", "pushed", 0, {"m000": Doing(epoch=1, version=4)})
            for n in range(workers)
        ],
    )
    view.take(page, 0.0)
    return view


def test_labels_are_bounded() -> None:
    view = view_of(3 * MODELS_LABELLED, 3 * WORKERS_LABELLED)
    metrics = Metrics(lambda: view, lambda: 0)
    for number in range(3 * MODELS_LABELLED):
        metrics.count(Receipt(f"m{number:03}", 1, 1, 7, 0.1, "", {}), None)
    found = samples(metrics.text().decode())
    models = {dict(labels)["model"] for _, labels in found if "model" in dict(labels)}
    workers = {dict(labels)["worker"] for _, labels in found if "worker" in dict(labels)}
    assert len(models) == MODELS_LABELLED + 1
    assert OTHER in models
    assert len(workers) == WORKERS_LABELLED
    total = sum(v for (name, _), v in found.items() if name == "weightbus_publishes_total")
    assert total == 3 * MODELS_LABELLED
    behind = (("model", "m000"), ("state", "behind"))
    assert found["weightbus_model_workers", behind] == 3 * WORKERS_LABELLED


def test_calls_that_came_to_nothing_are_not_counted() -> None:
    metrics = Metrics(View, lambda: 0)
    cancelled: Future[Receipt] = Future()
    cancelled.cancel()
    failed: Future[Receipt] = Future()
    failed.set_exception(ValueError("no receipt"))
    for done in (cancelled, failed):
        tell(metrics.count, done)
    assert "weightbus_publishes_total{" not in metrics.text().decode()


# The documents.


def test_the_list_of_metrics_is_the_table() -> None:
    text = (ROOT / "docs" / "METRICS.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    labels = {row.name: ", ".join(f"`{label}`" for label in row.labels) for row in METRICS.values()}
    assert rows == [(r.name, r.kind, labels[r.name], r.help) for r in METRICS.values()]
    assert f"at most {WORKERS_LABELLED} workers" in text
    assert f"at most {MODELS_LABELLED} models" in text


def expressions() -> Iterator[str]:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    yield from re.findall(r"expr: (.*)$", (ROOT / "docs" / "alerts.yml").read_text(), re.MULTILINE)


def test_dashboard_and_alerts_ask_for_metrics_that_there_are() -> None:
    asked = [*expressions()]
    assert len(asked) > 10
    series = {suffix for name in METRICS for suffix in (name, f"{name}_bucket", f"{name}_count")}
    for expression in asked:
        names = set(re.findall(r"weightbus_\w+", expression))
        assert names, expression
        assert names <= series, expression

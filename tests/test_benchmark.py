"""The benchmark measures what it says: results are complete, and of bytes that arrived."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightbus.benchmarks import contender, plots
from weightbus.benchmarks.bus import ROADS, Bus, WrongRoad
from weightbus.benchmarks.comparison import Spread
from weightbus.benchmarks.fleet import WrongBytes
from weightbus.benchmarks.model import Model, Shape

ROOT = Path(__file__).resolve().parent.parent
TINY = "64KiB/5"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the whole benchmark once, in its smallest form."""
    file = tmp_path_factory.mktemp("bench") / "results.json"
    words = ["--sizes", TINY, "--workers", "1", "--rounds", "2", "--costs", TINY]
    done = subprocess.run(  # noqa: S603 - our own script and arguments
        [sys.executable, "benchmarks/bench.py", *words, "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def test_every_contender_has_every_round(results: dict[str, Any]) -> None:
    (comparison,) = results["comparisons"]
    assert (comparison["bytes"], comparison["tensors"], comparison["workers"]) == (65536, 5, 1)
    assert [r["name"] for r in comparison["results"]] == contender.names()
    for result in comparison["results"]:
        assert len(result["rounds"]) == 2
        assert result["correct"]
        assert all(seconds > 0 for burst in result["rounds"] for seconds in burst)
        assert result["seconds"]["low"] <= result["seconds"]["median"] <= result["seconds"]["high"]


def test_limits_are_held_against_themselves(results: dict[str, Any]) -> None:
    limits = [r for r in results["comparisons"][0]["results"] if r["name"] == r["limit"]]
    assert [limit["name"] for limit in limits] == list(contender.LIMITS)
    for limit in limits:
        assert limit["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}


@pytest.mark.parametrize("road", ROADS)
def test_costs_are_complete(results: dict[str, Any], road: str) -> None:
    (costs,) = [c for c in results["costs"] if c["road"] == road]
    assert len(costs["version_seconds"]) == 10
    assert set(costs["extra_memory"]) == {"first", "last"}
    for measured in ("apply_seconds", "worker_memcpy_seconds", "async_seconds"):
        assert costs[measured]
        assert all(seconds > 0 for seconds in costs[measured])


def test_the_machine_is_named(results: dict[str, Any]) -> None:
    assert int(results["machine"]["cores"]) >= 1
    assert all(results["machine"].values())


def test_pictures_are_drawn(results: dict[str, Any], tmp_path: Path) -> None:
    for path in plots.draw(results["comparisons"], tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", contender.names())
def test_wrong_bytes_are_noticed(name: str) -> None:
    model = Model(Shape.parse(TINY), zeros=False)
    measured = contender.load(name).create()
    measured.start(1, model)
    try:
        model.advance()
        measured.publish_once()
        measured.check()
        model.advance()  # the worker does not have this
        with pytest.raises(WrongBytes, match="worker 0 holds"):
            measured.check()
    finally:
        measured.stop()


def test_a_version_that_came_by_another_road_is_noticed() -> None:
    model = Model(Shape.parse(TINY), zeros=False)
    bus = Bus("over the network", "weightbus_receive", "network")
    bus.start(1, model)
    try:
        bus.publish_once()
        bus.check()
        bus._road = "shared"  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        with pytest.raises(WrongRoad, match="worker 0 had versions by"):
            bus.check()
    finally:
        bus.stop()


def test_a_stale_or_misplaced_tensor_changes_the_digest() -> None:
    model, other = (Model(Shape.parse(TINY), zeros=False) for _ in range(2))
    assert model.digest() == other.digest()
    first, second, *_ = other.arrays
    other.arrays[first], other.arrays[second] = other.arrays[second], other.arrays[first]
    assert model.digest() != other.digest()
    model.advance()
    assert model.digest() != Model(Shape.parse(TINY), zeros=False).digest()


@pytest.mark.parametrize("text", ["", "12", "200MB/3", "1KiB/0", "1KiB/257", "0KiB/1"])
def test_a_size_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"model size|tensors"):
        Shape.parse(text)


def test_a_shape_holds_its_bytes() -> None:
    shape = Shape.parse("256KiB/20")
    assert sum(shape.elements()) * 4 == shape.nbytes == 2**18
    assert len(shape.elements()) == 20


def test_a_spread_is_the_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)

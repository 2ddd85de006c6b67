"""The benchmark measures what it says: results are complete, and of bytes that arrived."""

import json
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from weightbus.benchmarks import (
    against,
    bench,
    cases,
    contender,
    crowd,
    memory,
    page,
    pauses,
    plots,
    report,
    rows,
    stopped,
)
from weightbus.benchmarks.bus import TRANSPORTS, Bus, WrongTransport
from weightbus.benchmarks.comparison import (
    Comparison,
    Plan,
    Result,
    Spread,
    compare,
    host,
    introduced,
)
from weightbus.benchmarks.fleet import WrongBytes
from weightbus.benchmarks.goals import GOALS, Better, Line
from weightbus.benchmarks.losses import losses
from weightbus.benchmarks.model import Model, Shape
from weightbus.benchmarks.process import Process, ProcessError
from weightbus.tests.cli.starting import python

ROOT = Path(__file__).resolve().parents[3]
TINY = "64KiB/5"
PEERS = [name for name in contender.all_names() if contender.kind(name) == "peer"]
HOST_SECONDS = 60.0
MINES = {*contender.RIVALS.values(), *contender.RESIDENT.values()}
BENCHED = [
    *contender.names("limit"),
    *(name for name in contender.names("weightbus") if name in MINES),
    "zmq_pickle",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the whole benchmark once, in its smallest form."""
    file = tmp_path_factory.mktemp("bench") / "results.json"
    words = ["--sizes", TINY, "--workers", "1", "--rounds", "2", "--costs", TINY]
    words += ["--contenders", ",".join(BENCHED)]
    done = python("benchmarks/bench.py", *words, "--json", file, cwd=ROOT, timeout=110)
    assert "with a peer" in done.stdout, "it says where weightbus loses"
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def test_every_contender_has_every_round(results: dict[str, Any]) -> None:
    base, with_peer = results["comparisons"]
    assert [r["name"] for r in base["results"]] == BENCHED[:-1]
    assert {r["name"] for r in with_peer["results"]} == {
        "raw_tcp",
        "weightbus_receive",
        "weightbus_resident",
        "zmq_pickle",
    }
    for comparison in (base, with_peer):
        assert (comparison["bytes"], comparison["tensors"], comparison["workers"]) == (65536, 5, 1)
        for result in comparison["results"]:
            assert len(result["rounds"]) == len(result["cpu"]) == 2
            assert result["correct"]
            assert result["first"] > 0
            assert all(seconds > 0 for burst in result["rounds"] for seconds in burst)
            spread = result["seconds"]
            assert spread["low"] <= spread["median"] <= spread["high"]


def test_a_peer_is_held_against_weightbus_in_its_own_comparison(results: dict[str, Any]) -> None:
    base, with_peer = results["comparisons"]
    assert (base["peer"], with_peer["peer"]) == ("", "zmq_pickle")
    by_name = {r["name"]: r for r in with_peer["results"]}
    ratios = [
        statistics.median(mine) / statistics.median(its)
        for mine, its in zip(
            by_name["zmq_pickle"]["rounds"], by_name["weightbus_receive"]["rounds"], strict=True
        )
    ]
    measured = by_name["zmq_pickle"]["over_weightbus"]["median"]
    assert measured == pytest.approx(statistics.median(ratios))
    assert by_name["weightbus_receive"]["over_weightbus"] is None
    assert by_name["zmq_pickle"]["over_resident"]["median"] > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_costs_are_complete(results: dict[str, Any], transport: str) -> None:
    (costs,) = [c for c in results["costs"] if c["transport"] == transport]
    assert len(costs["version_seconds"]) == 10
    assert set(costs["extra_bytes"]) == {"first", "last"}
    for measured in (
        "apply_seconds",
        "worker_memcpy_seconds",
        "seen_seconds",
        "seen_memcpy_seconds",
        "async_seconds",
    ):
        assert costs[measured]
        assert all(seconds > 0 for seconds in costs[measured])


def test_pictures_are_drawn(results: dict[str, Any], tmp_path: Path) -> None:
    for path in plots.draw(results["comparisons"], tmp_path / "new"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", contender.names("limit", "weightbus"))
def test_wrong_bytes_are_noticed(name: str) -> None:
    model = Model(Shape.parse(TINY), zeros=False)
    measured = contender.load(name).create()
    measured.start(1, model)
    try:
        model.advance()
        measured.publish_once()
        measured.check()
        model.advance()  # the worker does not have this
        with pytest.raises(WrongBytes, match="worker 0 has"):
            measured.check()
    finally:
        measured.stop()


@pytest.fixture(scope="module")
def publishers() -> Iterator[dict[str, Process]]:
    """All peers with two workers each, started at once, as most of it is waiting for imports."""
    tiny = Plan(Shape.parse(TINY), workers=2, rounds=1, burst=2)
    with ExitStack() as stack:
        yield {n: stack.enter_context(host(n, tiny)) for n in PEERS if not contender.missing(n)}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_publishes_to_two_workers_that_are_isolated(
    name: str, publishers: dict[str, Process]
) -> None:
    if lacks := contender.missing(name):
        pytest.skip(f"{name} is not tested: it needs {', '.join(lacks)}")
    publisher = publishers[name]
    assert introduced(name, publisher).kind == "peer"
    answer = publisher.ask("publish 2", HOST_SECONDS)  # which compares every byte
    assert len(answer["seconds"]) == 2
    with pytest.raises(ProcessError, match="WrongBytes: worker 0 has"):
        publisher.ask("stray", HOST_SECONDS)


def test_what_does_not_fit_is_compared_without_those_that_no_ratio_refers_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, said = Plan(Shape.parse(TINY), 1, rounds=1, burst=1), list[str]()
    names = ["raw_tcp", "bare_zmq", "weightbus_receive"]
    monkeypatch.setattr(memory, "available", lambda: plan.bytes_needed(2))
    [some] = compare(plan, names, said.append)
    assert (list(some.results), some.without) == (["raw_tcp", "weightbus_receive"], ["bare_zmq"])
    monkeypatch.setattr(memory, "available", lambda: plan.bytes_needed(2) - 1)
    [none] = compare(plan, names, said.append)
    assert not none.results
    assert "memory" in none.left_out


def test_what_a_contender_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(contender.load("redis_values"), "NEEDS", ("no_such_package",))
    assert contender.missing("redis_values") == ["package no_such_package", "program redis-server"]
    assert "redis_values" not in contender.names()


def test_a_version_that_came_by_another_transport_is_noticed() -> None:
    model = Model(Shape.parse(TINY), zeros=False)
    bus = Bus("over the network", "weightbus_receive", "network")
    bus.start(1, model)
    try:
        bus.publish_once()
        bus.check()
        bus._transport = "shared"  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        with pytest.raises(WrongTransport, match="worker 0 had versions by"):
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


def test_targets_are_measured_and_judged(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    words = [
        "--rows",
        "tcp,memory,pause",
        "--workers",
        "1",
        "--rounds",
        "1",
        "--starts",
        "1",
    ]
    words += ["--model", TINY, "--json", str(file)]
    code = 1  # a model this small has no chance
    python("benchmarks/targets.py", *words, code=code, cwd=ROOT, timeout=110)
    lines = json.loads(file.read_text())["lines"]
    counted = Counter(line["row"] for line in lines)
    assert counted == {"tcp": 2, "memory": 4, "pause": 2}
    for line in lines:
        assert line["measured"]["low"] <= line["measured"]["median"] <= line["measured"]["high"]
    assert "MISSED" in {line["verdict"] for line in lines if line["row"] == "tcp"}


def test_a_worker_is_stopped_for_some_time_and_then_goes_on() -> None:
    measured = stopped.measure(Shape.parse(TINY), "shared", workers=1, seconds=0.6)
    assert len(measured["calm"]) == len(measured["stopped"]) >= 1
    assert all(seconds > 0 for side in ("calm", "stopped") for seconds in measured[side][0])
    assert 0 < measured["return_seconds"] < stopped.RETURN_SECONDS


def test_what_a_stopped_worker_costs_is_the_middle_and_the_tail() -> None:
    times = {"calm": [[1.0] * 50, [2.0] * 50], "stopped": [[1.5] * 50, [2.0] * 49 + [9.0]]}
    assert stopped.middle(times).median == 1.25
    assert 1.0 < stopped.tail(times).median < 4.5


@pytest.mark.parametrize(
    ("better", "median", "verdict"),
    [
        ("less", 1.1, "reached"),
        ("less", 1.2, "met"),
        ("less", 1.6, "MISSED"),
        ("more", 1.5, "reached"),
        ("more", 1.2, "met"),
        ("more", 1.0, "MISSED"),
    ],
)
def test_a_target_is_judged_by_its_median(better: Better, median: float, verdict: str) -> None:
    must, reach = (1.5, 1.1) if better == "less" else (1.1, 1.5)
    spread = Spread(median, 0.0, 9.0)
    assert Line("row", "what", 1, spread, must, reach, better).verdict == verdict


def test_a_target_without_a_bound_that_must_be_kept_is_never_missed() -> None:
    line = Line("row", "what", 1, Spread(0.9, 0.9, 0.9), None, 1.0, "more")
    assert line.verdict == "not reached"


def test_every_target_names_contenders_that_there_are() -> None:
    named = {name for goal in GOALS for name in (goal.mine, goal.other)}
    assert named <= set(contender.all_names())
    assert set(PEERS) == rows.PEERS


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


def beside(
    peer: str, shape: str, workers: int, *seconds: float, pause: float = 0.0
) -> dict[str, Any]:
    """Return a comparison with a peer, as a file of results holds it."""
    ours = Result("weightbus_receive", "us", "weightbus", "raw_tcp", rounds=[[0.2], [0.3]])
    limit = Result("raw_tcp", "limit", "limit", "raw_tcp", rounds=[[0.1], [0.1]])
    theirs = Result(peer, "them", "peer", "raw_tcp", rounds=[[s] for s in seconds])
    results = {"raw_tcp": limit, "weightbus_receive": ours, peer: theirs}
    return Comparison(Plan(Shape.parse(shape), workers, 2, 1, pause), results, peer).as_json()


def test_it_says_where_weightbus_loses() -> None:
    def printed(*comparisons: dict[str, Any]) -> str:
        console = Console(width=200)
        with console.capture() as capture:
            report.print_losses(losses(comparisons), "copying", console)
        return capture.get()

    faster = beside("gloo_flat", "16MiB/40", 4, 0.1, 0.15)
    slower = beside("zmq_pickle", "16MiB/40", 4, 0.4, 0.6)
    unlisted = beside("gloo_flat", "3MiB/1", 4, 0.1, 0.15)
    text = printed(faster, slower, unlisted)
    assert "1 of 110 listed" in text
    assert "108 were not measured; 2 of all measured" in text
    assert all(word in text for word in ("16MiB/40", "3MiB/1", "gloo", "0.50 (0.50-0.50)"))
    assert "pickle" not in text
    assert "0 of 110 listed" in printed(slower)


def test_the_list_of_comparisons_is_what_the_whole_benchmark_makes() -> None:
    words = bench.parse(["--contenders", "raw_tcp"])
    words.contenders = contender.all_names()
    planned = [
        (p.shape.text, p.workers, peer, p.pause)
        for p, peers in bench.plans(words)
        for peer in peers
    ]
    later = {"torch_rpc_local"}  # came when the list had been agreed on: counted beside it
    listed = [case for case in planned if case[2] not in later and not case[3]]
    assert sorted(listed) == sorted(losses([]).listed)
    assert len(losses([]).listed) == 110
    resident = losses([], "over_resident").listed
    assert {contender.load(peer).LIMIT for _, _, peer, _ in resident} == {*contender.RESIDENT}


# Pauses.


def test_a_trainer_computes_before_each_publish_and_is_not_timed() -> None:
    pause, times = 0.05, 2
    with host("raw_tcp", Plan(Shape.parse(TINY), 1, 1, times, pause)) as publisher:
        introduced("raw_tcp", publisher)
        before = time.perf_counter()
        answer = publisher.ask(f"publish {times}", HOST_SECONDS)
        took = time.perf_counter() - before
    assert len(answer["seconds"]) == times
    assert took >= times * pause + sum(answer["seconds"])


def test_rows_have_the_pause_that_is_asked_for_or_else_some_are_cold() -> None:
    usual = [plan for plan, _ in bench.plans(bench.parse([]))]
    cold = [plan for plan in usual if plan.pause]
    assert {(plan.shape.text, plan.workers) for plan in cold} == {
        ("256KiB/20", 1),
        ("256KiB/20", 4),
    }
    for words in ([], ["--quick"], ["--sizes", TINY]):
        asked = [plan for plan, _ in bench.plans(bench.parse([*words, "--pause", "0.5"]))]
        assert {plan.pause for plan in asked} == {0.5}
    assert not any(plan.pause for plan, _ in bench.plans(bench.parse(["--sizes", TINY])))
    with pytest.raises(SystemExit):
        bench.parse(["--pause", "-1"])


def test_cold_rows_stand_beside_the_others_and_are_not_taken_for_them(tmp_path: Path) -> None:
    warm = beside("zmq_pickle", "256KiB/20", 4, 0.4, 0.6)
    cold = beside("zmq_pickle", "256KiB/20", 4, 0.1, 0.15, pause=cases.COLD_SECONDS)
    text = page.peers({"comparisons": [warm, cold]}, {})
    assert "| peer | 256KiB, 4 | 256KiB, 4, after 30 ms |" in text
    assert "| them | 2.00 | 0.50 |" in text
    assert "Lost: 0 of 110" in text
    found = losses([warm, cold])
    assert (found.count, found.lost) == (0, [("256KiB/20", 4, "zmq_pickle", cases.COLD_SECONDS)])
    console = Console(width=200)
    with console.capture() as capture:
        report.print_losses(found, "copying", console)
    assert "256KiB/20, after 30 ms" in capture.get()
    assert rows.Scale(bench=[cold, warm]).known(Shape.parse("256KiB/20"), 4) == [warm]
    assert plots.draw([warm, cold], tmp_path)
    assert plots.draw([cold], tmp_path)


def test_targets_take_what_a_run_of_the_benchmark_holds() -> None:
    comparison = beside("gloo_flat", "200MiB/100", 2, 0.4, 0.6)
    scale = rows.Scale(workers=(2,), bench=[comparison])
    first, *others = rows.measure({"gloo", "lost"}, scale, list[str]().append)
    assert (first.what, first.measured.median) == ("weightbus_receive, faster than gloo_flat by", 2)
    assert [(line.row, line.measured.median) for line in others] == [("lost", 0)] * 2


def test_what_a_version_costs_a_reader_of_a_resident_model_is_measured() -> None:
    found = pauses.measure(Shape.parse(TINY), rounds=2)
    assert len(pauses.ratios(found)) == 2
    assert all(seconds > 0 for name in ("shut", "first", "memcpy") for seconds in found[name])


def test_a_crowd_of_workers_shares_a_publisher() -> None:
    found = crowd.measure(Shape.parse(TINY), "shared", workers=3, rounds=2)
    assert len(found["cpu"]) == 2
    assert all(seconds > 0 for seconds in found["cpu"])


def test_a_resident_model_computes_what_an_ordinary_one_does() -> None:
    with Process("forward", "forward", "4 KiB, huge pages", "1", "32") as process:
        found = process.answer(HOST_SECONDS)
    assert all(len(found[side]) == 1 for side in ("resident", "ordinary"))


def test_the_page_is_written_from_what_was_measured(results: dict[str, Any]) -> None:
    line = Line("tcp", "TCP over raw TCP", 1, Spread(1.234, 1.0, 2.0), 1.5, None).as_json()
    text = page.written(page.PAGE.read_text(), results, {"lines": [line]})
    assert "| `tcp` | TCP over raw TCP | 1 | 1.23 (1.00-2.00) x | ≤ 1.5 |  | met |" in text
    assert f"| {TINY} | 1 | shared: weightbus, receive() | " in text
    assert "| TCP: pickle over ZeroMQ | " in text
    assert results["machine"]["kernel"] in text
    assert page.written(text, results, {"lines": [line]}) == text
    with pytest.raises(ValueError, match="0 places are marked <!-- measured: machine -->"):
        page.written("", results, {"lines": []})


# Against another checkout.


def test_a_checkout_is_held_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str] | None] = []

    def noting(name: str, plan: Plan, environment: dict[str, str] | None = None) -> Process:
        given.append(environment)
        return host(name, plan, environment)

    monkeypatch.setattr(against, "host", noting)
    with against.imported_from(ROOT) as environment:
        tiny, say = Shape.parse(TINY), list[str]().append
        (held,) = against.measure(environment, ["shared"], [1], 1, say, tiny)
    assert given == [None, environment], "one side runs the other's code"
    assert (held.row, held.name, held.workers) == ("shared", "weightbus_shared", 1)
    assert 0 < held.ratio.low <= held.ratio.median <= held.ratio.high


def test_an_older_checkout_whose_root_is_the_package_is_found(tmp_path: Path) -> None:
    for path in (ROOT / "src" / "weightbus").iterdir():
        (tmp_path / path.name).symlink_to(path.resolve())
    with against.imported_from(tmp_path) as environment:
        imported = Path(environment["PYTHONPATH"]) / "weightbus"
        assert imported.resolve() == tmp_path


def test_what_is_no_checkout_is_told(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("raise SystemExit('another package')")
    told = pytest.raises(ProcessError, match="cannot be imported: another package")
    with told, against.imported_from(tmp_path):
        pass


@pytest.mark.parametrize(("low", "status"), [(1.02, 0), (1.04, 1)])
def test_what_is_slower_than_the_bound_is_told(
    low: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = against.Held("tcp", "weightbus_receive", 1, Spread(low + 0.02, low, low + 0.1))
    monkeypatch.setattr(against, "measure", lambda *_: iter([held]))
    assert bench.main(["--against", str(ROOT)]) == status

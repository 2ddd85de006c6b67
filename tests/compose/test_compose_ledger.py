"""What `make compose-test` concludes from logs: it notices every way in which they can disagree."""

import pytest

from weightbus.tests.compose.fleet import Row
from weightbus.tests.compose.ledger import ledger

TRAINER: list[Row] = [
    {"epoch": 7, "version": 1, "digest": "a"},
    {"epoch": 7, "version": 2, "digest": "b"},
    {"epoch": 9, "version": 1, "digest": "c"},
]


def row(version: int, digest: str) -> Row:
    return {"version": version, "digest": digest}


def test_digests_tell_epochs_apart() -> None:
    workers = {"x": [row(1, "a"), row(1, "c")], "y": [row(1, "a"), row(2, "b"), row(1, "c")]}
    read = ledger(TRAINER, workers)
    assert read.applied == {"x": [(7, 1), (9, 1)], "y": [(7, 1), (7, 2), (9, 1)]}
    assert read.epochs() == [7, 9]
    assert [read.by_all(epoch) for epoch in read.epochs()] == [[(7, 1)], [(9, 1)]]


def test_a_restarted_worker_may_apply_its_last_version_again() -> None:
    assert ledger(TRAINER, {"x": [row(2, "b"), row(2, "b")]}).applied["x"] == [(7, 2), (7, 2)]


def test_a_killed_trainer_need_not_have_logged_its_last_version() -> None:
    read = ledger(TRAINER, {"x": [row(3, "d")], "y": [row(3, "d")]})
    assert read.by_all(7) == [(7, 3)]


def test_workers_may_be_ahead_of_a_trainers_first_line() -> None:
    assert ledger([], {"x": [row(1, "a")]}).applied["x"] == [(1, 1)]
    read = ledger(TRAINER[:2], {"x": [row(2, "b"), row(1, "c")], "y": [row(1, "c")]})
    assert read.applied == {"x": [(7, 2), (8, 1)], "y": [(8, 1)]}
    assert read.epochs() == [7]


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        ({"x": [row(1, "b")]}, "these bytes are"),
        ({"x": [row(2, "b"), row(1, "a")]}, "went back"),
        ({"x": [row(1, "c"), row(2, "b")]}, "went back"),
        ({"x": [row(4, "e")]}, "never published"),
        ({"x": [row(3, "d")], "y": [row(3, "e")]}, "different bytes"),
        ({"x": [row(1, "d")], "y": [row(1, "e")]}, "different bytes"),
        ({"x": [row(1, "d"), row(2, "b")]}, "went back"),
    ],
)
def test_contradictions_are_found(workers: dict[str, list[Row]], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        ledger(TRAINER, workers)

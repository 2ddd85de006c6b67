"""What the run of fine-tuning takes for a reason, and what for a fault."""

import pytest

from weightbus.tests.compose.waiting import MissedError
from weightbus.tests.conformance.driver import Fault
from weightbus.tests.conformance.languages import chosen

pytest.importorskip("torch")
from weightbus.tests.benchmarks.finetune import UNEXPLAINED, Came, Heard, Judge, Log, Offer, Tally

PLAIN, KEYED = "encoder-plain", "encoder-keyed"
UNMADE = "it was not made in 50% of what was left of the timeout"
OFFER = Offer(believed={"w": 2}, lost=(), bases={2: 100}, keep=True, nbytes=1000)
NO_BASE = Offer(believed={"w": 2}, lost=(), bases={}, keep=True, nbytes=1000)


def why(log: Log, offer: Offer = OFFER, model: str = PLAIN) -> str:
    judge, key = Judge(Heard({("w", (1, 3)): 0}, {"w"}), log), (1, 3)
    judge._open.append(Came("w", "Python", model, key, 2, {2: offer, 3: offer}))  # noqa: SLF001 # pyright: ignore
    judge.close()
    (reason,) = judge.tally.why
    assert bool(judge.tally.faults) == (reason == UNEXPLAINED)
    return reason


@pytest.mark.parametrize(
    ("told", "permitted"),
    [
        ("version 2 of epoch 1 runs here; there are patches on 1", True),
        (
            "version 1 of epoch 1 runs here, and its bytes were not kept; there are patches on 1",
            True,
        ),
        ("the publisher has no such patch (any more)", True),
        ("version 2 of epoch 1 runs here; there are patches on 1, 2", False),
        ("the patch leads to 0123456789ab, and says ba9876543210", False),
        ("the block at byte 0: its body is malformed", False),
    ],
)
def test_only_some_reasons_of_workers_excuse_them(told: str, permitted: bool) -> None:
    log = Log()
    log.reasons["w", 3] = told
    assert (why(log) != UNEXPLAINED) == permitted


def test_a_patch_that_one_publisher_could_not_make_does_not_excuse_another() -> None:
    log = Log()
    log.unmade[PLAIN, 2] = UNMADE
    assert UNMADE in why(log, NO_BASE)
    assert why(log, NO_BASE, KEYED) == UNEXPLAINED
    log.unmade[PLAIN, 2] = "the digest of what was decoded is another one"
    assert why(log, NO_BASE) == UNEXPLAINED


@pytest.mark.parametrize(("patched", "faults"), [(0, 1), (9, 1), (10, 0)])
def test_a_language_must_take_a_share_of_patches_from_each_publisher(
    patched: int, faults: int
) -> None:
    tally = Tally()
    for model, count in ((PLAIN, 19), (KEYED, patched)):
        tally.ways["Python", model, "delta-1"] = count
        tally.ways["Python", model, "raw"] = 20 - count
    assert len([*tally.unused(chosen("python"), (PLAIN, KEYED))]) == faults


@pytest.mark.parametrize("error", [Fault("it did not end"), MissedError("all reports")])
def test_what_does_not_end_is_counted_and_the_run_goes_on(error: Exception) -> None:
    tally = Tally()
    with tally.noting():
        raise error
    assert tally.faults == [str(error)]

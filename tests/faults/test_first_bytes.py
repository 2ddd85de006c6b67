"""Strangers' bytes end no publisher and join none; `first_bytes.py` says many more of them."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from weightbus.benchmarks.victim import EndedError, Victim, keys_for_all
from weightbus.tests.faults import first_bytes
from weightbus.tests.faults.first_bytes import Over, run, setup_of
from weightbus.tests.faults.strangers import NULL, Case, case, frame, hello, plain, ready

COUNT = 700
MUTATIONS = 2000


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_no_strangers_bytes_end_a_publisher_or_join_it(
    over: Over, tmp_path: Path, *, keyed: bool
) -> None:
    setup, half = setup_of("python", over, str(tmp_path)), COUNT // 2
    with keys_for_all() if keyed else contextlib.nullcontext():
        known = run(setup, seed=1, first=0, count=half)
        mutated = run(setup, seed=1, first=len(plain(1)), count=half)
    assert (known.faults, mutated.faults) == ([], [])
    assert known.count + mutated.count == COUNT


def test_a_worker_that_joins_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Or a hello in ZMTP 1.0 would not be one, either."""
    joining = Case("a worker", (NULL + ready(), frame(hello())))
    monkeypatch.setattr(first_bytes, "case", lambda _seed, _number: joining)
    result = run(setup_of("python", "ipc", str(tmp_path)), seed=1, first=7, count=8, batch=8)
    [fault] = result.faults
    assert fault == (range(7, 15), "a worker", "joined: from-a-web-page")
    assert result.answered


def test_a_publisher_that_ends_is_a_fault(tmp_path: Path) -> None:
    with Victim(setup_of("python", "ipc", str(tmp_path))) as victim:
        assert victim.check()["joined"] == victim.workers == ["worker-0"]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(EndedError, match="status -9"):
            victim.check()


def test_every_kind_comes_among_the_first_and_mutations_never_join_by_splicing() -> None:
    known = plain(1)
    kinds = {each.kind for each in known}
    assert {each.kind for each in known[: len(kinds)]} == kinds
    assert len(kinds) <= COUNT // 2, "a short run says each"
    word = b'"instance":"00112233'
    for each in known:
        assert each.joins == (word in b"".join(each.steps)), each.kind
    for number in range(len(known), len(known) + MUTATIONS):
        mutated = case(1, number)
        assert mutated == case(1, number), "it follows from its number"
        if word in b"".join(mutated.steps):
            assert mutated.joins
            assert mutated.kind in kinds, "spliced with no other"

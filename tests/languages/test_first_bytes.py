"""Strangers' bytes end no publisher in another language, and join none.

make examples
"""

import contextlib
from pathlib import Path

import pytest

from weightbus.benchmarks.victim import keys_for_all
from weightbus.tests.conformance.languages import chosen
from weightbus.tests.faults.first_bytes import Over, run, setup_of
from weightbus.tests.faults.strangers import plain
from weightbus.tests.languages.test_examples import need

COUNT = 700
(RUST,) = chosen("rust")

pytestmark = pytest.mark.timeout(600)  # compiling


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_no_strangers_bytes_end_a_publisher_in_rust_or_join_it(
    over: Over, tmp_path: Path, *, keyed: bool
) -> None:
    need(*RUST.tools)
    RUST.build()
    setup, half = setup_of("rust", over, str(tmp_path)), COUNT // 2
    with keys_for_all() if keyed else contextlib.nullcontext():
        known = run(setup, seed=1, first=0, count=half)
        mutated = run(setup, seed=1, first=len(plain(1)), count=half)
    assert (known.faults, mutated.faults) == ([], [])

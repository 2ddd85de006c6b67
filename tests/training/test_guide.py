"""The guides that take long run as they stand."""

from pathlib import Path

import pytest

from weightbus.tests.docs.test_docs import TRAINING, run_python_of


@pytest.mark.timeout(400)  # Ray and TorchRL start many processes
@pytest.mark.parametrize("page", TRAINING, ids=lambda page: page.name)
def test_a_guide_runs(page: Path, tmp_path: Path) -> None:
    run_python_of(page, tmp_path)

"""The guide on training loops runs as it stands."""

from pathlib import Path

from weightbus.tests.test_docs import TRAINING, run_python_of


def test_the_guide_runs(tmp_path: Path) -> None:
    run_python_of(TRAINING, tmp_path)

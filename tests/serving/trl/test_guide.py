"""The guide to a base and its adapter runs as it stands.

Part of `make serving`, since it needs peft and transformers.
"""

from pathlib import Path

from weightbus.tests.docs.test_docs import PEFT, run_python_of


def test_the_guide_to_a_base_and_its_adapter_runs(tmp_path: Path) -> None:
    run_python_of(PEFT, tmp_path)

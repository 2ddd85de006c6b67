"""The failures of `test_failing_ranks.py`, with vLLM's own workers, reload and models.

Two processes are the ranks of one tensor parallel model, each with its own half of most layers.
"""

from functools import partial

import pytest

from weightbus.tests.serving.ranks import Kind
from weightbus.tests.serving.test_failing_ranks import (
    _deployed,
    _deployment,
    test_a_rank_that_fails,
    test_all_ranks_load_what_is_sent,
)
from weightbus.tests.serving.vllm import llama
from weightbus.tests.serving.vllm.real_rank import real, weights

__all__ = ["_deployed", "_deployment", "test_a_rank_that_fails", "test_all_ranks_load_what_is_sent"]


@pytest.fixture(name="kind", scope="module")
def _kind(tmp_path_factory: pytest.TempPathFactory) -> Kind:
    folder = llama.config(tmp_path_factory.mktemp("llama"))
    return Kind(partial(real, folder), partial(weights, folder))

"""A vLLM that weightbus is not for says so by name, and starts all the same without us."""

import pytest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.plugins import load_general_plugins

from weightbus.vllm import UnsupportedVllmError


def test_an_older_vllm_is_refused_by_name_when_its_engine_is_made() -> None:
    load_general_plugins()
    with pytest.raises(UnsupportedVllmError, match=r"0.28 to 0.33.*trainer_send_weights"):
        vars(WeightTransferEngineFactory)["_registry"]["weightbus"]()

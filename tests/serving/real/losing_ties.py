"""A worker extension for vLLM with a fault: one rank does not pass a tied weight on to its head."""

import os

import torch

from weightbus.python_client.serving import vllm_loading

_kept = vllm_loading._ties  # noqa: SLF001 - the part that is to fail


def _ties(model: torch.nn.Module) -> list[vllm_loading.Places]:
    loses = str(torch.distributed.get_rank()) == os.environ["WEIGHTBUS_TEST_LOSING_RANK"]
    return [] if loses else _kept(model)


vllm_loading._ties = _ties  # noqa: SLF001


class Losing:
    """Adds nothing to a worker: that vLLM imports this module is enough."""

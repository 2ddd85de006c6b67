"""A real `LLM` of vLLM answers what transformers answers with the weights that it was sent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

import weightbus
from weightbus.tests.serving.real.served import LIMIT, PROMPT, answer_of, saved, trained

pytestmark = pytest.mark.timeout(LIMIT)

SECONDS = 60.0


class Client:
    """vLLM's `VLLMWeightSyncClient` of an LLM in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)


class Bench:
    """An LLM, and a publisher of what it is to run."""

    def __init__(self, folder: Path) -> None:
        self.llm = LLM(
            str(saved(folder, trained(1))),
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            kv_cache_memory_bytes=2**26,
            disable_log_stats=True,
            compilation_config={"custom_ops": ["none"], "mode": 0},
            weight_transfer_config={"backend": "weightbus"},  # known by its entry point
        )
        self.publisher = weightbus.Publisher()

    def trainer(self, model: Any) -> Any:
        from weightbus.vllm import TrainerInit

        return WeightTransferTrainerFactory.trainer_init(
            TrainerInit(rank=0, publisher=self.publisher, world_size=1, timeout=SECONDS),
            client=Client(self.llm),
            source=ModuleSource(model),
        )

    def answer(self) -> list[int]:
        asked = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        (told,) = self.llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
        return list(told.outputs[0].token_ids)

    def runs(self) -> tuple[list[int], str]:
        """Return what it answers, and which weights it says it runs."""
        return self.answer(), self.llm.get_weight_version()


@pytest.fixture(name="bench", scope="module")
def _bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its processes are in test_serve
        bench = Bench(tmp_path_factory.mktemp("model"))
    yield bench
    bench.publisher.close()


def told(trainer: Any, seed: int) -> tuple[list[int], str]:
    """Return what an LLM answers and says that runs what was sent."""
    receipt = trainer.receipt
    return answer_of(trained(seed)), f"{receipt.epoch}.{receipt.version}"


def test_a_real_llm_answers_with_the_weights_that_it_was_sent(bench: Bench) -> None:
    assert bench.runs() == (answer_of(trained(1)), "default")
    model = trained(2)
    trainer = bench.trainer(model)
    trainer.send_weights()
    sent = told(trainer, 2)
    assert bench.runs() == sent

    layer = model.model.layers[1].mlp.down_proj
    good, layer.weight = layer.weight, torch.nn.Parameter(layer.weight[:-1].detach().clone())
    with pytest.raises(weightbus.PublishError, match=r"layers.1.mlp.down_proj.weight: shape"):
        trainer.send_weights()
    assert bench.runs() == sent

    other = bench.trainer(trained(3, intermediate_size=192))
    with pytest.raises(weightbus.PublishError, match="Qwen3ForCausalLM cannot load"):
        other.send_weights()
    assert bench.runs() == sent

    layer.weight = good
    model.load_state_dict(trained(4).state_dict())
    again = bench.trainer(model)
    again.send_weights()
    assert bench.runs() == told(again, 4)

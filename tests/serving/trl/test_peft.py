"""What a bridge writes of an adapter is what PEFT itself loads, bit for bit; and how small it is.

Part of `make serving`, since it needs peft and transformers.
"""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file

from weightbus.tests.serving.test_bridge import standing, told

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LARGE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


def base(**sizes: Any) -> Any:
    """Return a causal language model from a configuration, with random weights."""
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes))


def adapted(model: Any, rank: int) -> Any:
    config = peft.LoraConfig(
        r=rank, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def text_of(model: Any) -> str:
    """Return an adapter's configuration as its trainer publishes it."""
    return json.dumps(model.peft_config["default"].to_dict(), default=sorted)


def test_peft_loads_what_a_bridge_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = base(**SMALL)
    trained = adapted(copy.deepcopy(plain), rank=4)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    weights = peft.get_peft_model_state_dict(trained)
    with standing(tmp_path, "vllm", adapter="chat") as (stand, (engine,)):
        metadata = {"adapter_config.json": text_of(trained)}
        receipt, _ = stand.publish(weights, metadata=metadata)
        assert told(receipt)[0] == "applied"
        folder, _ = engine.adapters["chat"]
        written = load_file(Path(folder) / "adapter_model.safetensors")
        trained.save_pretrained(tmp_path / "saved")
        saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
        assert written.keys() == saved.keys()
        assert all(torch.equal(written[name], saved[name]) for name in saved)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain), folder)
    mine = peft.get_peft_model_state_dict(loaded)
    assert mine.keys() == weights.keys()
    assert all(torch.equal(mine[name], weights[name]) for name in weights)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, trained(tokens).logits)
        assert not torch.equal(loaded(tokens).logits, plain(tokens).logits)


def test_an_adapter_is_a_hundredth_of_its_base() -> None:
    """Of a model of half a billion parameters, with a rank that is large for one."""
    with torch.device("meta"):
        sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
        model = adapted(base(**sizes, **heads).to(torch.bfloat16), rank=16)
    adapter = sum(t.numel() * t.element_size() for n, t in model.named_parameters() if "lora" in n)
    whole = sum(
        t.numel() * t.element_size() for n, t in model.named_parameters() if "lora" not in n
    )
    assert adapter * 100 < whole, (adapter, whole)

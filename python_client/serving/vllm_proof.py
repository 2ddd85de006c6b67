# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false
"""Checks once, at the engine's start, that a vLLM model computes with the weights loaded into it.

Layers may have more than parameters: packed copies, repacked layouts, kernels created once. If a
reload does not update one of these, the model silently computes with a mix of old and new weights.
So each part of the model runs on the same inputs three times: with its initial weights; after a
load of other values, when its output must differ; and after a load of the model's own checkpoint,
when its output must equal the first output. Attention is left out, since it has no weights.

If several ranks share a layer, each rank compares its own output, before vLLM combines the outputs:
in a combined output, new weights of one rank would hide old weights of another.
"""

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model_loader

from ...codecs.errors import WeightBusError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("weightbus.serving")

SWITCH = "WEIGHTBUS_PROVE_RELOAD"
TOKENS = 8  # per rank: enough tokens to reach several experts
NEAR = 0.01  # outputs with a smaller relative difference (2-norm) count as equal
NAMES_SHOWN = 3  # names listed in an error text

Pairs = Iterable[tuple[str, torch.Tensor]]
Part = Callable[[], list[torch.Tensor]]


class ReloadError(WeightBusError):
    """A model does not compute with the weights loaded into it."""


def prove(
    model: torch.nn.Module,
    vllm_config: "VllmConfig",
    device: torch.device,
    load: Callable[[Pairs], None],
) -> None:
    """Check that the model computes with the weights that `load` loads.

    If this check is not possible, log a warning.

    Raises:
        ReloadError: The model computes with other weights, and is no longer usable.
    """
    if os.environ.get(SWITCH) == "0":
        return
    try:
        next(_checkpoint(model, vllm_config))
        group: Any = get_tp_group()
        parts = _record(model, vllm_config, device, TOKENS * group.world_size)
        first = _outputs(parts, vllm_config, group)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        log.warning(
            "it is not proved that %s computes with the weights loaded into it (%s): compare its "
            "answers with the trainer's once",
            type(model).__name__,
            text,
        )
        return
    load(_changed(_checkpoint(model, vllm_config)))
    second = _outputs(parts, vllm_config, group)
    load(_checkpoint(model, vllm_config))
    third = _outputs(parts, vllm_config, group)
    ranks = group.world_size
    idle = {name for name in parts if ranks > 1 and _is_zero(first[name])}
    stale = [name for name in parts if name not in idle and _are_close(first[name], second[name])]
    wrong = [name for name in parts if not _are_close(first[name], third[name])]
    if stale or wrong:
        where = f" on rank {group.rank_in_group} of {ranks}" if ranks > 1 else ""
        raise ReloadError(
            f"{type(model).__name__} cannot be updated in this vLLM: after its own checkpoint was "
            f"loaded into it again{where}{_some('still compute with old weights', stale)}"
            f"{_some('compute wrongly', wrong)}. Serve it without --weight-transfer-config, start "
            f"vLLM again for new weights, or try another version of vLLM ({SWITCH}=0 starts it all "
            "the same)"
        )


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f", these parts of it {what}: {', '.join(names[:NAMES_SHOWN])}{more}"


def _checkpoint(model: Any, vllm_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return (name, tensor) pairs of the checkpoint that the model was loaded from."""
    loader: Any = get_model_loader(vllm_config.load_config)
    return iter(loader.get_all_weights(vllm_config.model_config, model))


def _changed(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with changed values, which are neither large nor zero."""
    for name, tensor in pairs:
        plain = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        yield name, tensor * 0.5 + 0.125 if plain else tensor


def _record(model: Any, vllm_config: Any, device: torch.device, tokens: int) -> dict[str, Part]:
    """Run the model once; return, by name, functions that run a part on its recorded inputs."""
    parts: dict[str, Part] = {}
    # Tokens from the whole vocabulary, so that each rank has the embeddings of some tokens.
    vocabulary = vllm_config.model_config.get_vocab_size()
    ids = torch.arange(tokens, device=device) * vocabulary // tokens
    with ExitStack() as undo:
        for name, module in model.named_modules():
            undo.enter_context(_eager(module))
            inner = list(module.modules())
            if any(_is_attention(each) for each in inner):
                if _is_attention(module):
                    undo.callback(module.register_forward_hook(_steady).remove)
            elif any(True for _ in module.parameters()):
                hook = module.register_forward_pre_hook(_recorder(parts, name), with_kwargs=True)
                undo.callback(hook.remove)
        with torch.no_grad(), set_forward_context(None, vllm_config, num_tokens=tokens):
            hidden = model(input_ids=ids, positions=torch.arange(tokens, device=device))
    hidden = _tensors(hidden)[0].clone()
    parts["its head"] = lambda: _tensors(model.compute_logits(hidden.clone()))
    return parts


def _is_attention(module: torch.nn.Module) -> bool:
    return hasattr(module, "kv_cache")


@contextmanager
def _eager(module: Any) -> Generator[None]:
    """Return a context manager during which a module is not compiled, so that hooks run."""
    compiled = getattr(module, "do_not_compile", None) is False
    if compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        if compiled:
            module.do_not_compile = False


def _steady(module: object, given: object, answer: Any) -> Any:
    """Replace the output of attention, which is empty without a cache. (A forward hook.)"""
    del module, given
    made = torch.linspace(-1, 1, answer.numel(), device=answer.device).view(answer.shape)
    return made.to(answer.dtype)


def _recorder(parts: dict[str, Part], name: str) -> Any:
    def record(module: Any, given: Any, named: Any) -> None:
        if name not in parts:
            kept, kept_named = _cloned(given), _cloned(named)
            parts[name] = lambda: _tensors(module(*_cloned(kept), **_cloned(kept_named)))

    return record


def _cloned(given: Any) -> Any:
    """Return `given` with copies of its tensors, since a part may write into its inputs."""
    if isinstance(given, torch.Tensor):
        return given.clone()
    if isinstance(given, tuple | list):
        return type(given)(_cloned(each) for each in given)
    if isinstance(given, dict):
        return {key: _cloned(each) for key, each in given.items()}
    return given


def _tensors(answer: Any) -> list[torch.Tensor]:
    if isinstance(answer, torch.Tensor):
        return [answer]
    if isinstance(answer, tuple | list):
        return [tensor for each in answer for tensor in _tensors(each)]
    return []


def _outputs(parts: dict[str, Part], vllm_config: Any, group: Any) -> dict[str, list[torch.Tensor]]:
    # Return what each part computes on this rank alone.
    tokens = TOKENS * group.world_size
    with (
        torch.no_grad(),
        set_forward_context(None, vllm_config, num_tokens=tokens),
        _alone(group),
    ):
        return {name: [each.float().clone() for each in part()] for name, part in parts.items()}


@contextmanager
def _alone(group: Any) -> Generator[None]:
    """Return a context manager during which a group's other ranks seem to contribute zeros."""
    ranks: int = group.world_size
    rank: int = group.rank_in_group

    def all_gather(given: torch.Tensor, dim: int = -1) -> torch.Tensor:
        every = [torch.zeros_like(given)] * ranks
        every[rank] = given
        return torch.cat(every, dim)

    def reduce_scatter(given: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return given.chunk(ranks, dim)[rank]

    replaced = {
        "all_reduce": torch.clone,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
    }
    vars(group).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            delattr(group, name)


def _is_zero(answer: list[torch.Tensor]) -> bool:
    """Return whether a rank contributes nothing: it has no row or expert for these inputs."""
    return not any(bool(each.any()) for each in answer)


def _are_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        bool((a - b).norm() <= NEAR * a.norm()) or torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )

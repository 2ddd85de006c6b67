"""What vLLM's wheels of PyPI lack to run on a processor: seven of its operators, in Python.

Those wheels hold vLLM's Python, its CPU platform too, but only CUDA's compiled parts. With these
seven a small model in float32 runs: its scheduler, workers, layers, loaders, servers and weight
transfer are vLLM's own. This is for tests of what goes on around a model: it is slow, it knows only
plain causal attention, and it has nothing of what makes vLLM fast.

vLLM finds `platform` by an entry point in `vllm.platform_plugins`, in every process that it starts.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CPU = "vllm.platforms.cpu.CpuPlatform"
OPERATORS = torch.library.Library("_C", "FRAGMENT")


def platform() -> str:
    """Say which platform this is; that it was asked has defined the operators."""
    return CPU


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define one of vLLM's operators."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.define(schema)
        OPERATORS.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
        return function

    return define


@operator("init_cpu_memory_env(int[] nodes) -> ()")
def _init_cpu_memory_env(nodes: list[int]) -> None:
    """Bind memory to none."""


@operator("greedy_argmax(Tensor logits) -> Tensor")
def _greedy_argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


@operator("silu_and_mul(Tensor(a!) out, Tensor gate_and_up) -> ()")
def _silu_and_mul(out: Tensor, gate_and_up: Tensor) -> None:
    gate, up = gate_and_up.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


# Attention over a cache in pages. `starts` is where the tokens of each request begin, among all.


@operator(
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor pages, "
    "Tensor(a!) slots, int size) -> ()"
)
def _slots(starts: Tensor, positions: Tensor, pages: Tensor, slots: Tensor, size: int) -> None:
    """Say where in the cache each token's key and value go: -1 is nowhere."""
    slots.fill_(-1)
    for request, (a, b) in enumerate(_ranges(starts)):
        at = positions[a:b]
        slots[a:b] = pages[request][at // size].long() * size + at % size


@operator(
    "cpu_attn_reshape_and_cache(Tensor keys, Tensor values, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slots, str isa, float k_scale=1., float v_scale=1., "
    'str dtype="auto") -> ()'
)
def _store(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: object
) -> None:
    size = key_cache.size(2)
    used = slots[slots >= 0]
    for cache, given in ((key_cache, keys), (value_cache, values)):
        cache[used // size, :, used % size] = given[: len(used)]


@operator(
    "get_scheduler_metadata(int requests, int heads, int kv_heads, int width, Tensor lengths, "
    "ScalarType dtype, Tensor starts, bool causal, int window, str isa, bool split, "
    'Tensor? dynamic_causal=None, str kv_dtype="auto") -> Tensor'
)
def _get_scheduler_metadata(*_: object) -> Tensor:
    """Plan nothing: who reads it is below."""
    return torch.zeros(1)


@operator(
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor(a!) output, Tensor starts, Tensor lengths, float scale, bool causal, Tensor? alibi, "
    "int window, Tensor pages, float softcap, Tensor? plan, Tensor? sinks, "
    "Tensor? dynamic_causal=None, float k_scale=1., float v_scale=1., "
    'str dtype="auto") -> ()'
)
def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    alibi: Tensor | None,
    window: int,
    pages: Tensor,
    softcap: float,
    _plan: Tensor | None,
    sinks: Tensor | None,
    *_: object,
) -> None:
    assert causal, "plain causal attention is all that is known here"
    assert alibi is None, alibi
    assert sinks is None, sinks
    assert (window, softcap) == (-1, 0), (window, softcap)
    size, groups = key_cache.size(2), query.size(1) // key_cache.size(1)
    for request, (a, b) in enumerate(_ranges(starts)):
        if a == b:
            continue
        at = torch.arange(int(lengths[request]))
        page = pages[request][at // size].long()
        keys, values = (
            cache[page, :, at % size].repeat_interleave(groups, 1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", query[a:b], keys) * scale
        scores.masked_fill_(at[None] > at[a - b :, None], -torch.inf)
        output[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def _ranges(starts: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(starts.tolist()))

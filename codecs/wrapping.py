"""Why the names of two models differ, where one is the other in a wrapper: one line that says so.

What wraps a module (a compiler, data parallelism, an adapter) gives its tensors longer names, all
of them alike. Twenty lines of names hide that; the one line here names what stands in front, or
between, and what to give instead.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from .words import printable

# What wrappers put into names: whose it is, and where the module inside is.
WRAPPERS = {
    "_orig_mod.": ("torch.compile", "model._orig_mod"),
    "module.": ("DistributedDataParallel, DataParallel or AveragedModel", "model.module"),
    "_fsdp_wrapped_module.": ("FullyShardedDataParallel", "its full state dict"),
    "_checkpoint_wrapped_module.": ("activation checkpointing", "the module before it"),
    "base_model.model.": ("PEFT", "model.merge_and_unload(), or the adapter's tensors alone"),
    "base_layer.": ("PEFT, inside", "model.merge_and_unload(), or the adapter's tensors alone"),
}
# How tensors end that only quantised modules have.
QUANTISED = {
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    "._packed_params._packed_params": "torch.ao.quantization",
    ".weight_scale": "compressed-tensors or fp8",
}
LOOKED_AT = 64  # names that are tried for what all of them have in front
SHARE = 0.5  # of the names that differ, on the side that has fewer, that a line must explain
SHOWN = 64  # characters of what stands in front


def explanation(published: Collection[str], own: Collection[str]) -> str | None:
    """Return one line that says why names differ, if that is plain to see.

    Args:
        published: The names of a version.
        own: Those of the target.
    """
    theirs, ours = set(published) - set(own), set(own) - set(published)
    if quantised := _quantised(theirs, ours):
        return quantised
    if not (theirs and ours):
        return None
    for longer, shorter, whose in ((ours, theirs, "the target's"), (theirs, ours, "the published")):
        if prefix := _prefix(longer, shorter):
            return _said(whose, "begin with", prefix)
        if inside := _inside(longer, shorter):
            return _said(whose, "have", inside, "in them ")
    return None


def _enough(found: int, longer: Collection[str], shorter: Collection[str]) -> bool:
    return found > SHARE * min(len(longer), len(shorter))


def _prefix(longer: set[str], shorter: set[str]) -> str:
    """Return what stands in front of the names of one side, and not of the other."""
    ends: dict[str, list[str]] = {}
    for name in shorter:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    tried = Counter(
        name.removesuffix(end)
        for name in islice(sorted(longer), LOOKED_AT)
        for end in ends.get(name.rpartition(".")[2], ())[:LOOKED_AT]
        if name.endswith("." + end)
    )
    for prefix, _ in tried.most_common(LOOKED_AT):
        if _enough(sum(prefix + name in longer for name in shorter), longer, shorter):
            return prefix
    return ""


def _inside(longer: set[str], shorter: set[str]) -> str:
    """Return which wrappers' parts stand in names of one side, and not of the other."""
    bare, found = Counter[str](), Counter[str]()
    for name in longer:
        rest = name
        for part in WRAPPERS:
            rest = ("." + rest).replace("." + part, ".")[1:]
        if rest != name and rest in shorter:
            bare[rest] += 1
            found.update(part for part in WRAPPERS if "." + part in "." + name)
    return next(iter(found), "") if _enough(len(bare), longer, shorter) else ""


def _said(whose: str, how: str, part: str, where: str = "") -> str:
    known = [(text, inner) for each, (text, inner) in WRAPPERS.items() if each in part]
    who = f" ({' in '.join(text for text, _ in known)})" if known else ""
    inner = known[-1][1] if known else "the module inside"
    verb, side = ("give", "target") if whose == "the target's" else ("publish", "trainer")
    return (
        f"{whose} names {how} {printable(part, SHOWN)!r} {where}and the others do not{who}: {verb} "
        f"{inner} at the {side}, or a mapping of the other side's names to the same tensors"
    )


def _quantised(theirs: Iterable[str], ours: Iterable[str]) -> str | None:
    found: Mapping[str, set[str]] = {
        whose: {by for name in names for end, by in QUANTISED.items() if name.endswith(end)}
        for whose, names in (("the published model", theirs), ("the target", ours))
    }
    for whose, by in found.items():
        if by:
            return (
                f"{whose} is quantised ({', '.join(sorted(by))}) and the other one is not, or in "
                "another way: publish what was quantised as the target is, or load into a module "
                "of the published dtypes and quantise that"
            )
    return None

"""Explains, in one line, how the names of a model differ from those of the model in a wrapper.

A wrapper (a compiler, data parallelism, an adapter) makes all tensor names longer in the same way,
which a list of twenty names does not show. The line names the prefix, suffix or inner part that the
wrapper adds, and the model or the renaming to pass instead.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from .words import printable

# Parts that wrappers add to names: the name of the wrapper, and what to pass instead.
WRAPPERS = {
    "_orig_mod.": ("torch.compile", "model._orig_mod"),
    "module.": ("DistributedDataParallel, DataParallel or AveragedModel", "model.module"),
    "_fsdp_wrapped_module.": (
        "FullyShardedDataParallel",
        "weightbus.gather(model) on every rank",
    ),
    "_checkpoint_wrapped_module.": ("activation checkpointing", "the module before it"),
    "base_model.model.": ("PEFT", "model.merge_and_unload(), or the adapter's tensors alone"),
    "base_layer.": ("PEFT, inside", "model.merge_and_unload(), or the adapter's tensors alone"),
}
# Suffixes of tensors that only quantised modules have.
QUANTISED = {
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    "._packed_params._packed_params": "torch.ao.quantization",
    ".weight_scale": "compressed-tensors or fp8",
}
TRIED_MAX = 64  # names that are tried for a common prefix or suffix
# Suffixes of tensors from which a parametrisation computes the weight, and how to undo it.
COMPUTED = {
    "_orig": (
        "pruning or spectral norm",
        "torch.nn.utils.prune.remove() or remove_spectral_norm()",
    ),
    "_mask": ("pruning", "torch.nn.utils.prune.remove()"),
    "_g": ("weight norm", "torch.nn.utils.remove_weight_norm()"),
    "_v": ("weight norm", "torch.nn.utils.remove_weight_norm()"),
}
SIGNS = "._"  # a suffix begins with one of these characters
SHARE = 0.5  # an explanation must cover more than this fraction of the names
SHOWN = 64  # characters of a prefix or suffix


def explanation(published: Collection[str], own: Collection[str]) -> str | None:
    """Return one line that explains why names differ; None if there is no simple explanation.

    Args:
        published: The names of a version.
        own: The names of the target.
    """
    theirs, ours = set(published) - set(own), set(own) - set(published)
    if quantised := _quantised(theirs, ours):
        return quantised
    if not (theirs and ours):
        return None
    for longer, shorter, side in ((ours, theirs, "the target's"), (theirs, ours, "the published")):
        if prefix := _prefix(longer, shorter):
            return _advice(side, "begin with", prefix, f"{prefix!r}", f"{{'': {prefix!r}}}")
        if suffix := _suffix(longer, shorter):
            less = f"lambda name: name.removesuffix({suffix!r})"
            return _advice(side, "end with", suffix, less, f"lambda name: name + {suffix!r}")
        if inside := _inside(longer, shorter):
            less = f"lambda name: name.replace({inside!r}, '')"
            return _advice(side, "have in them", inside, less, "a mapping of names")
    return None


def _enough(found: int, longer: Collection[str], shorter: Collection[str]) -> bool:
    """Return whether `found` names are enough for an explanation."""
    return found > SHARE * min(len(longer), len(shorter))


def _prefix(longer: set[str], shorter: set[str]) -> str:
    """Return the prefix that most names of one side add to names of the other; "" if none."""
    ends: dict[str, list[str]] = {}
    for name in shorter:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    tried = Counter(
        name.removesuffix(end)
        for name in islice(sorted(longer), TRIED_MAX)
        for end in ends.get(name.rpartition(".")[2], ())[:TRIED_MAX]
        if name.endswith("." + end)
    )
    for prefix, _ in tried.most_common(TRIED_MAX):
        if _enough(sum(prefix + name in longer for name in shorter), longer, shorter):
            return prefix
    return ""


def _suffix(longer: set[str], shorter: set[str]) -> str:
    """Return the suffix that most names of one side add to names of the other; "" if none."""
    begins: dict[str, list[str]] = {}
    for name in shorter:
        begins.setdefault(name.rpartition(".")[0], []).append(name)
    tried = Counter(
        name.removeprefix(begin)
        for name in islice(sorted(longer), TRIED_MAX)
        for at in (name.rpartition(".")[0], name.rpartition(".")[0].rpartition(".")[0])
        for begin in begins.get(at, ())[:TRIED_MAX]
        if name.startswith(begin) and name.removeprefix(begin)[:1] in SIGNS
    )
    for suffix, _ in tried.most_common(TRIED_MAX):
        if _enough(sum(name + suffix in longer for name in shorter), longer, shorter):
            return suffix
    return ""


def _inside(longer: set[str], shorter: set[str]) -> str:
    """Return the wrapper's part that most names of one side contain in addition; "" if none."""
    bare, found = Counter[str](), Counter[str]()
    for name in longer:
        rest = name
        for part in WRAPPERS:
            rest = ("." + rest).replace("." + part, ".")[1:]
        if rest != name and rest in shorter:
            bare[rest] += 1
            found.update(part for part in WRAPPERS if "." + part in "." + name)
    return next(iter(found), "") if _enough(len(bare), longer, shorter) else ""


def _advice(side: str, how: str, part: str, less: str, more: str) -> str:
    """Return an error message: which side has longer names, and what to pass to fix that.

    Args:
        side: The side with longer names: `the target's` or `the published`.
        how: The verb of the message before `part`, such as `begin with`.
        part: The text that only the longer names contain.
        less, more: The values of `rename=` that make names shorter and longer, as source code.
    """
    known = [(text, inner) for each, (text, inner) in WRAPPERS.items() if each in part]
    who = f" ({' in '.join(text for text, _ in known)})" if known else ""
    inner = known[-1][1] if known else "the module inside"
    if part in COMPUTED:
        by, undo = COMPUTED[part]
        who, instead = f" ({by})", f"make it one tensor there first, with {undo}"
    elif side == "the target's":
        instead = f"give {inner} as the target, or rename={printable(more)} at this worker"
    else:
        instead = f"publish {inner}, or rename={printable(less)} at the trainer or this worker"
    others = "those of the target" if side == "the published" else "the published ones"
    return f"{side} names {how} {printable(part, SHOWN)!r} and {others} do not{who}: {instead}"


def _quantised(theirs: Iterable[str], ours: Iterable[str]) -> str | None:
    # Return an explanation if only one side has been quantised.
    found: Mapping[str, set[str]] = {
        side: {by for name in names for end, by in QUANTISED.items() if name.endswith(end)}
        for side, names in (("the published model", theirs), ("the target", ours))
    }
    for side, by in found.items():
        if by:
            return (
                f"{side} is quantised ({', '.join(sorted(by))}) and the other one is not, or in "
                "another way: publish what was quantised as the target is, or load into a module "
                "of the published dtypes and quantise that"
            )
    return None

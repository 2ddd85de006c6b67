"""Compares versions with a server's checkpoint: the names, shapes and dtypes of their tensors.

No engine checks a version before it loads the version. vLLM fails in the middle of a load; SGLang
skips unknown names, keeps the old values of missing tensors, and answers `success: true`. So each
version is compared with the checkpoint before a server reads the version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.shards import SUFFIX
from .calls import CallError

NAMES_SHOWN = 3  # names listed in an error text
CONVERTED = {"F16", "BF16", "F32", "F64"}  # engines convert between these dtypes
# Endings of buffers in old checkpoints. Trainers do not have these buffers, and engines skip them.
SKIPPED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
HEAD = "lm_head.weight"  # a checkpoint without this tensor ties its head to the embedding
WAYS_OUT = (
    "give a checkpoint with the same names as --like, or load versions without this check "
    "(--unchecked)"
)


class UnknownCheckpointError(CallError):
    """The checkpoint of a server cannot be read here, so the server is not called."""


@dataclass(frozen=True)
class ServedCheckpoint:
    """The layout of a server's checkpoint.

    Attributes:
        where: The checkpoint's description in error texts.
        layout: Names, dtypes and shapes of the tensors.
    """

    where: str
    layout: Layout

    @property
    def derived(self) -> str:
        """The kind of weights that some engines copy, but do not copy again in a reload; or ""."""
        names = self.layout.names()
        if any(".experts." in name for name in names):
            return "experts"
        if any(name.endswith(("_scale", ".qweight")) for name in names):
            return "quantised weights"
        return "" if any(name.endswith(HEAD) for name in names) else "tied weights"

    def fault(self, layout: Layout) -> str:
        """Return how a version's layout differs, or "" if it fits; further tied names also fit."""
        known = self.layout
        names = set(layout.names())
        wanted = {name for name in known.names() if not name.endswith(SKIPPED)}
        tied = {layout.by_name(name).name for name in names & wanted}
        extra = sorted(name for name in names - wanted if layout.by_name(name).name not in tied)
        others = [_difference(name, layout, known) for name in sorted(names & wanted)]
        faults = [
            some("it lacks", sorted(wanted - names)),
            some("it has besides", [name for name in extra if not name.endswith(SKIPPED)]),
            some("", [text for text in others if text]),
        ]
        found = "; ".join(fault for fault in faults if fault)
        if not found:
            return ""
        return (
            f"it is not a version of the model in {self.where}: {found}. Publish it under its "
            "names, or give a checkpoint as the trainer writes it as --like"
        )


def read(folder: Path, where: str) -> ServedCheckpoint:
    """Read names, shapes and dtypes, but no values, from a folder's safetensors files.

    Raises:
        CheckpointError, OSError: The files cannot be read; the message says why, and what to do.
    """
    return ServedCheckpoint(where, open_checkpoint(folder).layout)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors files."""
    return any(folder.glob(f"*{SUFFIX}"))


def find(name: str, url: str) -> ServedCheckpoint:
    """Read the checkpoint of the server at `url`: a folder, or a model in the hub's cache.

    Raises:
        UnknownCheckpointError: The checkpoint is not on this host, or cannot be read; the message
            says what to do.
    """
    try:
        folder = _folder(name)
        return read(folder, f"{folder}, which {url} serves")
    except (OSError, ValueError, WeightBusError) as error:
        raise UnknownCheckpointError(
            f"cannot check versions for {url}: its checkpoint {name!r} cannot be read here "
            f"({error}); {WAYS_OUT}",
            harmless=True,
        ) from None


def _folder(name: str) -> Path:
    """Return the folder of a checkpoint on this host, without downloading it.

    Raises:
        OSError, ValueError: The checkpoint is not on this host.
    """
    if (folder := Path(name)).is_absolute() or folder.exists():
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder on this host")
        return folder
    try:
        hub: Any = import_module("huggingface_hub")
    except ModuleNotFoundError:
        text = "it is not a folder; for a model in the hub's cache, pip install huggingface_hub"
        raise FileNotFoundError(text) from None
    return Path(hub.snapshot_download(name, local_files_only=True))


def _difference(name: str, layout: Layout, known: Layout) -> str:
    """Return how the tensor `name` differs between version and checkpoint, or "" if it fits."""
    new, old = layout.by_name(name), known.by_name(name)
    if new.shape != old.shape:
        return f"{name} is {list(new.shape)}, not {list(old.shape)}"
    if new.dtype != old.dtype and not {new.dtype, old.dtype} <= CONVERTED:
        return f"{name} is {new.dtype}, not {old.dtype}"
    return ""


def some(what: str, names: Sequence[str]) -> str:
    """Return `what` with the first names and the number of further names; "" without names."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{what} {', '.join(names[:NAMES_SHOWN])}{more}".strip() if names else ""

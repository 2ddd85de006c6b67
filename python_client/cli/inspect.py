"""`weightbus inspect`: shows the tensors of a checkpoint, and the digest that it would have."""

import re
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ...codecs.checksum import CHUNK_BYTES_DEFAULT
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from .outcome import DONE, UsageError
from .screen import DIM, Screen, counted, plain, size, table

ROWS = 20  # number of tensors shown without --all


def inspect(screen: Screen, path: Path, every: bool) -> int:
    """Show a checkpoint; return the exit code."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; give a .safetensors file or a folder")
    checkpoint = open_checkpoint(path)
    with screen.bars() as bars:
        digest = checkpoint.digest(lambda n: bars.advance("hashing", n, checkpoint.nbytes))
    _show(screen, checkpoint, digest, every)
    layout = checkpoint.layout
    screen.emit(
        "checkpoint",
        path=str(path),
        files=[str(part.path) for part in checkpoint.parts],
        layout=layout.id,
        digest=digest,
        chunk_bytes=CHUNK_BYTES_DEFAULT,
        nbytes=layout.nbytes,
        dtypes=_dtypes(checkpoint),
        tensors={
            spec.name: {"dtype": spec.dtype, "shape": spec.shape, "nbytes": spec.nbytes}
            for spec in layout.tensors
        },
        aliases=dict(layout.aliases),
        metadata=dict(checkpoint.metadata),
    )
    return DONE


def _dtypes(checkpoint: Checkpoint) -> Mapping[str, int]:
    """Return the number of tensors of each dtype, the most frequent first."""
    names = [spec.dtype for spec in checkpoint.layout.tensors]
    return {name: names.count(name) for name in sorted(set(names), key=names.count, reverse=True)}


def _show(screen: Screen, checkpoint: Checkpoint, digest: str, every: bool) -> None:
    # Show a checkpoint's facts and tensors.
    layout = checkpoint.layout
    facts = table("", "")
    facts.show_header = False
    files = checkpoint.parts
    rows = {
        "checkpoint": str(files[0].path) if len(files) == 1 else str(checkpoint.path),
        "files": str(len(files)),
        "tensors": f"{len(layout.tensors):,}",
        "bytes": f"{layout.nbytes:,} ({size(layout.nbytes)})",
        "dtypes": ", ".join(f"{name} x {n:,}" for name, n in _dtypes(checkpoint).items()),
        "aliases": f"{len(layout.aliases):,}" if layout.aliases else "",
        "metadata": ", ".join(f"{k}={v}" for k, v in sorted(checkpoint.metadata.items())),
        "layout": layout.id,
        "digest": digest,
    }
    for what, value in rows.items():
        if value:
            facts.add_row(Text(what, style=DIM), plain(value))
    screen.show(facts)
    screen.say("")
    screen.show(_tensors(checkpoint, every))
    hidden = len(layout.names()) - ROWS
    if hidden > 0 and not every:
        screen.say(f"and {counted(hidden, 'more name')}; --all shows them", DIM)


def _tensors(checkpoint: Checkpoint, every: bool) -> Table:
    layout = checkpoint.layout
    rows = table("tensor", "dtype", "shape", "bytes", right=("bytes",))
    names = sorted(layout.names(), key=_natural)
    for name in names if every else names[:ROWS]:
        tied = layout.aliases.get(name)
        if tied is not None:
            rows.add_row(plain(name), "", plain(f"the same as {tied}", DIM), "")
        else:
            spec = layout.by_name(name)
            rows.add_row(plain(name), spec.dtype, Text(str(list(spec.shape))), f"{spec.nbytes:,}")
    return rows


def _natural(name: str) -> list[tuple[str, int]]:
    """Return a sort key by which layer 10 comes after layer 9."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]

"""Finds the files of a checkpoint, and checks shards against their index.

A large model is often divided into several safetensors files (shards) with an index, in the format
of Hugging Face: a JSON object whose `weight_map` has, for every tensor, the name of its file in the
same folder.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ...codecs.protocol_limits import LAYOUT_BYTES_MAX
from .foreign import BEGINNING_BYTES, file_of, folder_of, part_of

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_BYTES_MAX = LAYOUT_BYTES_MAX  # an index has the same names as the headers
NAMES_SHOWN = 3  # names shown in an error; the others are counted


class CheckpointError(WeightBusError, ValueError):
    """A checkpoint cannot be read; the text names the file and the tensor, and gives advice."""


def is_index(path: Path) -> bool:
    """Return whether a path has the name of an index."""
    return path.name.endswith(INDEX_SUFFIX)


def find(path: Path) -> Path:
    """Return the file to open: the path itself; in a folder, its only index, or its only file.

    Raises:
        CheckpointError: The folder has no index and no file, or several.
    """
    if not path.is_dir():
        return path
    indexes, files = sorted(path.glob(f"*{INDEX_SUFFIX}")), sorted(path.glob(f"*{SUFFIX}"))
    standard = path / f"model{SUFFIX}"
    if len(indexes) == 1 and standard not in files:
        return indexes[0]
    if not indexes and (standard in files or len(files) == 1):
        return standard if standard in files else files[0]
    names = [file.name for file in (*indexes, *files)]
    part = next((part_of(file) for file in files if part_of(file)), "")
    if part:
        raise CheckpointError(f"{path} holds files that are each {part}")
    if names:
        raise CheckpointError(
            f"{path} holds more than one model, or shards without an index ({_some(names)}): name "
            "the file that you mean, or download the index that belongs to the shards"
        )
    other = folder_of(path)
    advice = f", but {other}" if other else "; give another folder, or a file"
    raise CheckpointError(f"{path} holds no *{SUFFIX} file{advice}")


@dataclass(frozen=True, slots=True)
class Index:
    """An index of shards: `weight_map` has the file name of each tensor, by tensor name."""

    path: Path
    weight_map: Mapping[str, str]

    def files(self) -> list[Path]:
        """Return the shards, sorted.

        Raises:
            CheckpointError: Some shards are missing; the message names them and their tensors.
        """
        files = [self.path.parent / name for name in sorted(set(self.weight_map.values()))]
        missing = {file.name for file in files if not file.is_file()}
        if missing:
            lost = [name for name, file in self.weight_map.items() if file in missing]
            gone = f"{_some(sorted(missing))} of {len(files)} shards is missing"
            raise CheckpointError(
                f"{self.path.parent}: {gone}, with {_some(lost)}: download the checkpoint again, "
                "or wait until it is written"
            )
        return files

    def check(self, layouts: Mapping[Path, Layout]) -> None:
        """Check that the index and the shards agree on which shard has each tensor.

        `layouts` has the layout of each shard. Aliases need not be in the index.

        Raises:
            CheckpointError: The shards contradict the index; the message has a file and a tensor.
        """
        for name, file in self.weight_map.items():
            if name not in layouts[self.path.parent / file].signatures:
                raise CheckpointError(
                    f"{self.path.parent / file} does not hold {name!r}, but {self.path.name} "
                    f"lists it there: the shards do not belong to this index; {AGAIN}"
                )
        seen = dict(self.weight_map)
        for path, layout in layouts.items():
            for name in layout.names():
                home = seen.setdefault(name, path.name if name in layout.aliases else "")
                if not home:
                    raise CheckpointError(
                        f"{path} holds {name!r}, which {self.path.name} does not name: the index "
                        f"does not belong to the shards; {AGAIN}"
                    )
                if home != path.name:
                    raise CheckpointError(
                        f"{path} holds {name!r}, which is in {home} as well: a tensor must be in "
                        f"only one shard; {AGAIN}"
                    )


AGAIN = "write or download the checkpoint again, into an empty folder"


def read_index(path: Path) -> Index:
    """Read and check an index.

    Raises:
        CheckpointError: The file is not an index, or names files outside its folder.
        OSError: The file cannot be read.
    """
    size = path.stat().st_size
    if size > INDEX_BYTES_MAX:
        raise CheckpointError(f"{path} has {size} bytes; an index has at most {INDEX_BYTES_MAX}")
    text = path.read_bytes()
    other = file_of(text[:BEGINNING_BYTES])
    if other:
        raise CheckpointError(f"{path} is {other}")
    try:
        read = json.loads(text, object_pairs_hook=_once)
        weight_map = msgspec.convert(read, _Index).weight_map
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not an index of shards, or is damaged: {error}; it must be a JSON object "
            "whose weight_map gives a file name for every tensor"
        ) from None
    for name, file in weight_map.items():
        if Path(file).name != file or not file.endswith(SUFFIX):
            raise CheckpointError(
                f"{path}: {name!r} is listed in {file!r}; a shard is a *{SUFFIX} file in the "
                "same folder"
            )
    return Index(path, weight_map)


# The JSON form of an index.
class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict; raise ValueError for a duplicate key."""
    made = dict(pairs)
    if len(made) != len(pairs):
        (duplicate, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{duplicate!r} occurs twice")
    return made


def _some(names: list[str]) -> str:
    """Return a text with the first names, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

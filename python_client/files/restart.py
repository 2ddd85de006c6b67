"""`load` lets a restarted trainer load the weights that it published last."""

import logging
import os
from pathlib import Path

from ...codecs.apply import copy_into
from ...codecs.checksum import digest_of
from ...codecs.protocol_limits import INTEGER_MAX
from .. import checks
from ..checks import check_name
from .state_folder import Saved, StateFolderError, StoredVersion, read_index

log = logging.getLogger("weightbus.state")

ATTEMPTS_MAX = 10  # attempts to read a folder whose publisher deletes files at the same time


def load(
    state: str | Path,
    model: str,
    into: object,
    *,
    version: tuple[int, int] | None = None,
    strict: bool = True,
    cast: bool = False,
) -> StoredVersion | None:
    """Load the latest version in a publisher's state folder into a module, in place.

    The version has only the published weights: no optimizer state, no random state. A publisher may
    use the folder at the same time, in this or another process. Its newest version may not be on
    disk yet; `publisher.close()` waits until it is.

    Args:
        state: The folder of `Publisher(state=...)`.
        model: The model's id.
        into: An `nn.Module`, a `TensorDict`, or a mapping of names to torch tensors or numpy
            arrays, with the published names and shapes. Its tensors are overwritten.
        version: Epoch and version of an older version, as in `Publisher.history`; None: the latest.
        strict: Whether version and `into` must have the same names. With False, the version may
            have more tensors than `into`; these are skipped.
        cast: Whether to convert values to the dtypes of `into`: a version published with
            `Settings(dtype="bf16")` is stored in bf16.

    Returns:
        The loaded version: `epoch`, `version`, `metadata` and more. None, without a change, if the
        folder does not exist or has no version yet, as at the first start.

    Raises:
        StateFolderError: The folder has versions, but not the requested one, or none of this model;
            or the version's file is damaged. `into` was not changed.
        StateError: The version does not fit `into`; `into` was not changed. The text names the
            tensors.
        ValueError: The model id or the version is invalid.
    """
    path, name = Path(os.fspath(state)), check_name(model, "model")
    if version is not None:
        epoch, number = version
        checks.whole(epoch, "epoch", 1, INTEGER_MAX)
        checks.whole(number, "version", 1, INTEGER_MAX)
    saved = _find(path, name, version)
    if saved is None:
        log.info("%s: nothing was published with this state folder yet", path)
        return None
    stored = saved.stored
    found = digest_of(saved.layout.id, saved.data, stored.chunk_bytes)
    if found != stored.digest:
        raise StateFolderError(
            f"{stored.file} is damaged: it hashes to {found}, and {stored.digest} was published; "
            f"nothing was loaded. {_others(path, stored)}"
        )
    copy_into(saved.layout, saved.data, into, strict=strict or "target", cast=cast)
    return stored


def _find(path: Path, model: str, version: tuple[int, int] | None) -> Saved | None:
    """Open a version, which stays readable if its file is deleted; None if the folder is empty."""
    for attempt in range(1, ATTEMPTS_MAX + 1):
        index = read_index(path)
        if not index.models():
            return None
        if version is None and model not in index.models():
            raise StateFolderError(
                f"no version of {model!r} is in {path}; there are versions of "
                f"{', '.join(index.models())}: is the model's id spelled as in publish()?"
            )
        stored = index.versions(model)[0] if version is None else index.find(model, version)
        try:
            return index.open(stored)
        except StateFolderError:
            if (path / stored.file).exists() or attempt == ATTEMPTS_MAX:
                raise
            if stored in read_index(path).versions(model):
                raise
    raise AssertionError("the last attempt returns or raises")


def _others(path: Path, stored: StoredVersion) -> str:
    others = [each for each in read_index(path).versions(stored.model) if each != stored]
    keys = ", ".join(str(each.key) for each in others)
    if not others:
        return "The folder has no other version: start from a checkpoint of your own"
    return f"Load another version with version=, one of {keys}"

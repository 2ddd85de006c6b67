"""What a trainer that is started again takes back: the weights that it published last."""

import logging
import os
from pathlib import Path

from ..bus.limits import INTEGER_MAX
from ..codecs.apply import copy_into
from ..codecs.checksum import digest_of
from . import checks
from .checks import check_name
from .state_folder import Saved, StateFolderError, StoredVersion, look_into

log = logging.getLogger("weightbus.state")

LOOKS_MAX = 10  # at a folder whose publisher deletes what was named there a moment before


def load(
    state: str | Path,
    model: str,
    into: object,
    *,
    version: tuple[int, int] | None = None,
    strict: bool = True,
    cast: bool = False,
) -> StoredVersion | None:
    """Load the version of a model that a publisher kept last back into a module, in place.

    It holds the weights as they were published, and nothing else of a training: no optimizer, no
    random state. A publisher may have the folder meanwhile, in this process or another; what it
    published a moment ago may not be on disk yet, and `publisher.close()` waits for that.

    Args:
        state: The folder, as `Publisher(state=...)` was given it.
        model: The model's id.
        into: An `nn.Module`, a `TensorDict`, or a mapping of names to torch tensors or numpy
            arrays: of the names and shapes that were published. Its tensors are overwritten.
        version: Epoch and version of an older one, as `Publisher.history` names them; None: the
            latest.
        strict: Whether both must have the same names. With False the version may have more of them
            than `into`, which are passed over.
        cast: Whether values may be converted to the dtypes of `into`: what was published with
            `Settings(dtype="bf16")` comes back in bf16.

    Returns:
        What was loaded: `epoch`, `version`, `metadata` and more. None, and nothing changed, if the
        folder is not there yet or no version was kept in it: this is the first start.

    Raises:
        StateFolderError: There are versions, but not this one or none of this model; or its file is
            damaged, which is found before anything is changed.
        StateError: It does not fit `into`, which was not changed; the text names the tensors.
        ValueError: That is no model's id, or no version.
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
    """Return a version, opened: it stays, though its file may be deleted a moment later."""
    for look in range(1, LOOKS_MAX + 1):
        shelf = look_into(path)
        if not shelf.models():
            return None
        if version is None and model not in shelf.models():
            raise StateFolderError(
                f"no version of {model!r} is in {path}; there are versions of "
                f"{', '.join(shelf.models())}: is the model's id spelled as in publish()?"
            )
        stored = shelf.versions(model)[0] if version is None else shelf.find(model, version)
        try:
            return shelf.open(stored)
        except StateFolderError:
            if (path / stored.file).exists() or look == LOOKS_MAX:
                raise
            if stored in look_into(path).versions(model):
                raise
    raise AssertionError("the last look returns or raises")


def _others(path: Path, stored: StoredVersion) -> str:
    others = [each for each in look_into(path).versions(stored.model) if each != stored]
    keys = ", ".join(str(each.key) for each in others)
    if not others:
        return "There is no other: start from a checkpoint of your own"
    return f"Load another with version=, of {keys}"

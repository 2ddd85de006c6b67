"""Resolving "policy", "env.value_net" or "env.transform[0]" against a context."""

import re

_STEP = re.compile(r"\.?(?P<attribute>[^.\[\]]+)|\[(?P<key>[^\[\]]*)\]")


def resolve(context: object, path: str) -> object:
    """Return what an attribute path leads to, subscripts with numbers or strings included.

    Raises:
        AttributeError: A step of the path leads nowhere; the text says which.
        ValueError: The path cannot be read.
    """
    at, found = 0, context
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            raise ValueError(
                f"{path!r} cannot be read from {path[at:]!r} on; write it like env.transform[0]"
            )
        found = _step(found, step, path)
        at = step.end()
    return found


def _step(found: object, step: re.Match[str], path: str) -> object:
    attribute, key = step["attribute"], step["key"]
    if attribute is not None:
        try:
            return getattr(found, attribute)
        except AttributeError:
            raise AttributeError(
                f"{path!r}: a {type(found).__name__} has no attribute {attribute!r}"
            ) from None
    index: int | str = int(key) if re.fullmatch(r"-?\d+", key) else key.strip("'\"")
    try:
        return found[index]  # type: ignore[index]
    except (LookupError, TypeError) as error:
        raise AttributeError(f"{path!r}: no [{key}] in a {type(found).__name__}: {error}") from None

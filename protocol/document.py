"""Make the files of document from the description."""

from pathlib import Path

from .description import Protocol


def files(protocol: Protocol, root: Path) -> dict[str, str]:
    """Return the text of each file, by its path in the repository."""
    del protocol, root
    return {}

"""What a publisher says of a version: the messages that announce, close and commit it."""

import msgspec

from ..memory.version import Version
from ..messages import Abort, Announce, Buffer, Chunk, Commit, End, Fetch, Whole
from .publication import Publication


def announcement(version: Version, publication: Publication | None) -> Announce:
    """Return the announcement of a version; a committed one is for everybody to apply at once."""
    together = publication is not None and publication.commit == "together"
    staged = publication is not None and (together or publication.wait == "staged")
    return Announce(
        model=version.model,
        epoch=version.epoch,
        version=version.version,
        layout=version.layout.id,
        layout_bytes=len(version.layout.header),
        nbytes=version.layout.nbytes,
        chunk_bytes=version.plan.chunk_bytes,
        commit="together" if together else "auto",
        acknowledge="staged" if staged else "applied",
        encoding="raw",
        shared=version.shared,
        hash=publication is not None and publication.hash,
    )


def whole_of(version: Version, announce: Announce) -> tuple[Announce, Buffer]:
    """Return the announcement of a version of one chunk that takes it along, and its payload."""
    crc, payload = version.chunk(0)
    whole = Whole(crc=crc, digest=version.digest())
    return msgspec.structs.replace(announce, whole=whole), payload


def commit_of(version: Version) -> Commit:
    """Return the message that lets workers apply a version."""
    return Commit(
        model=version.model, epoch=version.epoch, version=version.version, digest=version.digest()
    )


def abort_of(model: str, epoch: int, version: int, text: str) -> Abort:
    """Return the message that makes workers drop a version."""
    return Abort(model=model, epoch=epoch, version=version, text=text)


def end_of(version: Version) -> End:
    """Return the message that closes a version."""
    return End(
        model=version.model, epoch=version.epoch, version=version.version, digest=version.digest()
    )


def chunk_of(version: Version, index: int) -> tuple[Chunk, Buffer]:
    """Return a chunk and its payload.

    Raises:
        Retired: The version's memory is used for another.
    """
    crc, payload = version.chunk(index)
    chunk = Chunk(
        model=version.model, epoch=version.epoch, version=version.version, index=index, crc=crc
    )
    return chunk, payload


def refusal_of(fetch: Fetch, version: Version | None) -> tuple[str, str]:
    """Return the code and the words by which a fetch of chunks is refused; no code if it is not."""
    if version is None:
        return "gone", f"version {fetch.version} of epoch {fetch.epoch} is not to be had here"
    last = fetch.first + fetch.count
    if fetch.count and (last > version.plan.count or fetch.version != version.version):
        return "range", (
            f"chunks {fetch.first} to {last - 1} of version {fetch.version} were asked for; "
            f"version {version.version} has {version.plan.count}"
        )
    return "", ""

"""The keywords of publish, and what a call that is given some asks for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from ..bus.limits import WORKERS_MAX
from ..bus.publisher.publication import CommitMode, Publication, Wait
from ..bus.publisher.version import Version
from ..codecs.metadata import checked
from ..codecs.precision import Precision, precision_of
from ..codecs.renaming import Renaming, renaming_of
from . import checks
from .checks import check_name
from .settings import Encoding, Settings

Require = Literal["all", "alive"] | int  # all workers, those that are not lost, or this many

TIMEOUT = 60.0  # seconds that a publish gets unless it is told otherwise


class PublishOptions(TypedDict, total=False):
    """The keywords of publish, for what passes them on; `Publisher.publish` says what they mean."""

    workers: Iterable[str] | None
    require: Require
    expect: int | None
    commit: CommitMode
    timeout: float
    metadata: Mapping[str, str] | None
    settings: Settings | None


@dataclass(slots=True)
class Request:
    """What a call of publish asks for, checked.

    Attributes:
        workers: Names; None: all.
        needed: How many of them must get there; None: all.
        alive: All but those that are lost.
        started, deadline: On the monotonic clock, in seconds.
        timeout, grace: Seconds.
        grace_of_gone: Seconds, for those that are known not to be there.
        expect: How many all are at least.
        precision: What is converted while it is copied; None: nothing.
        encoding: How it goes to workers that take patches.
        renaming: What the tensors are called in the version; None: what they are called here.
        metadata: What is said of the version; None: nothing, or what was said before.
    """

    workers: tuple[str, ...] | None
    needed: int | None
    alive: bool
    wait: Wait
    commit: CommitMode
    verify: bool
    started: float
    timeout: float
    grace: float
    grace_of_gone: float
    expect: int
    precision: Precision | None
    encoding: Encoding
    renaming: Renaming | None
    metadata: Mapping[str, str] | None

    @property
    def deadline(self) -> float:
        """When it is over."""
        return self.started + self.timeout

    @property
    def replaces_latest(self) -> bool:
        """Whether what it publishes is the latest version for all at once."""
        return self.workers is None and self.commit == "auto"

    @property
    def asks_for_digests(self) -> bool:
        """Whether workers say what they have hashed before all of it was sent to anybody."""
        return self.verify or self.commit == "together" or self.wait == "staged"

    def publication(self, id_: int, version: Version) -> Publication:
        """Return the call by which a version is published."""
        return Publication(
            id=id_,
            version=version,
            workers=self.workers,
            require=self.needed,
            wait=self.wait,
            commit=self.commit,
            started=self.started,
            deadline=self.deadline,
            hash=self.verify,
            grace=self.grace,
            grace_of_gone=self.grace_of_gone,
            alive=self.alive,
            expect=self.expect,
        )


def request(
    started: float,
    settings: Settings,
    *,
    workers: Iterable[str] | None,
    require: Require,
    expect: int | None,
    commit: CommitMode,
    timeout: float,
    metadata: Mapping[str, str] | None,
    expected: int,
    lost_after: float,
) -> Request:
    """Check the keywords of a call.

    Args:
        started: When it was called.
        settings: What holds for it, checked before.
        workers, require, expect, commit, timeout, metadata: Its keywords.
        expected, lost_after: What the publisher was told of these.

    Raises:
        ValueError: A value makes no sense.
    """
    names = _names(workers)
    needed = _needed(require, names)
    grace = settings.grace
    return Request(
        workers=names,
        needed=needed,
        alive=require == "alive",
        wait=settings.wait,
        commit=checks.choice(commit, "commit", ("auto", "together")),
        verify=settings.verify,
        started=started,
        timeout=checks.seconds(timeout, "timeout", positive=True),
        grace=lost_after if grace is None else grace,
        grace_of_gone=0.0 if grace is None else grace,
        expect=_expected(expect, expected, names, needed),
        precision=None if settings.dtype is None else precision_of(settings.dtype),
        encoding=settings.encoding,
        renaming=None if settings.rename is None else renaming_of(settings.rename),
        metadata=None if metadata is None else checked(metadata),
    )


def _names(workers: Iterable[str] | None) -> tuple[str, ...] | None:
    if workers is None:
        return None
    names = () if isinstance(workers, str) else workers  # else each letter would be a name
    if names is not workers or not isinstance(names, Iterable):  # pyright: ignore
        raise ValueError(f"workers={workers!r}: give a list of names, or None for all")
    return tuple(dict.fromkeys(check_name(name, "worker") for name in names))


def _needed(require: object, names: tuple[str, ...] | None) -> int | None:
    if require in ("all", "alive"):
        return None
    number = checks.whole(require, 'require (of workers, or "all", or "alive")', 0, WORKERS_MAX)
    if names is not None and number > len(names):
        raise ValueError(f"require={number}, but the publish is for {len(names)} workers only")
    return number


def _expected(
    asked: int | None, default: int, names: tuple[str, ...] | None, needed: int | None
) -> int:
    """Return how many workers all are at least."""
    if asked is None:
        return default if names is None and needed is None else 0
    if names is not None or needed is not None:
        raise ValueError(
            f"expect={asked} is for a publish to all workers: leave out workers= and require=, "
            "or leave out expect="
        )
    return checks.whole(asked, "expect", 0, WORKERS_MAX)

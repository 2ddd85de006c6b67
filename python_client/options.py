"""The keywords of publish, and what a call that is given some asks for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from ..bus.limits import WORKERS_MAX
from ..bus.publisher.publication import CommitMode, Publication, Wait
from ..bus.publisher.version import Version
from ..codecs import metadata
from ..codecs.precision import Precision, precision_of
from ..codecs.renaming import Rename, Renaming, renaming_of
from . import checks
from .checks import check_name

Require = Literal["all", "alive"] | int  # all workers, those that are not lost, or this many
Encoding = Literal["raw", "delta", "auto"]
Dtype = str | Mapping[str, str] | None  # of all parameters, or by patterns of names; as they are

TIMEOUT = 60.0  # seconds that a publish gets unless it is told otherwise


class PublishOptions(TypedDict, total=False):
    """The keywords of publish; `Publisher.publish` says what they mean, `request` the defaults."""

    workers: Iterable[str] | None
    require: Require
    wait: Wait
    commit: CommitMode
    verify: bool
    timeout: float
    grace: float | None
    expect: int | None
    dtype: Dtype
    encoding: Encoding
    rename: Rename
    metadata: Mapping[str, str] | None


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


def request(options: PublishOptions, started: float, *, expect: int, grace: float) -> Request:
    """Check the keywords of a call.

    Args:
        options: They.
        started: When it was called.
        expect, grace: What the publisher was told of these.

    Raises:
        TypeError: There is no such keyword.
        ValueError: A value makes no sense.
    """
    unknown = options.keys() - PublishOptions.__optional_keys__
    if unknown:
        raise TypeError(
            f"publish got an unexpected keyword argument {min(unknown)!r}; there are "
            f"{', '.join(sorted(PublishOptions.__optional_keys__))}"
        )
    names = _names(options.get("workers"))
    require = options.get("require", "all")
    needed = _needed(require, names)
    wait, commit = options.get("wait", "applied"), options.get("commit", "auto")
    checks.choice(wait, "wait", ("applied", "staged", "none"))
    checks.choice(commit, "commit", ("auto", "together"))
    encoding = options.get("encoding", "raw")
    checks.choice(encoding, "encoding", ("raw", "delta", "auto"))
    asked, dtype, said = options.get("grace"), options.get("dtype"), options.get("metadata")
    return Request(
        workers=names,
        needed=needed,
        alive=require == "alive",
        wait=wait,
        commit=commit,
        verify=options.get("verify", False),
        started=started,
        timeout=checks.seconds(options.get("timeout", TIMEOUT), "timeout", positive=True),
        grace=checks.seconds(grace if asked is None else asked, "grace"),
        grace_of_gone=0.0 if asked is None else asked,
        expect=_expected(options.get("expect"), expect, names, needed),
        precision=None if dtype is None else precision_of(dtype),
        encoding=encoding,
        renaming=renaming_of(options.get("rename")),
        metadata=None if said is None else metadata.checked(said),
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
            f"expect={asked} says how many all workers are: leave out workers= and require=, "
            "or leave out expect="
        )
    return checks.whole(asked, "expect", 0, WORKERS_MAX)

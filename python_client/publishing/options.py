"""Checks the keywords of `Publisher.publish`, and makes a `Request` of them."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypedDict, TypeVar, cast

import msgspec

from ...bus.limits import WORKERS_MAX
from ...bus.publisher.publication import PublishTerms
from ...bus.publisher.version import CommitMode
from ...codecs.metadata import checked
from ...codecs.precision import Precision, precision_of
from ...codecs.renaming import Renaming, renaming_of
from .. import checks
from ..checks import check_name
from ..settings import Encoding, Settings, settings_of

Way = TypeVar("Way", bound=Callable[..., Any])
# "all": all workers; "alive": those that are not lost; a number of workers; or names of workers.
Require = Literal["all", "alive"] | int | Collection[str]

TIMEOUT = 60.0  # default timeout of a publish, in seconds
ALL = "all", "alive"  # values of `require` that set no number and no names
COMMITS: tuple[CommitMode, ...] = "auto", "together"


class PublishOptions(TypedDict, total=False):
    """The keywords of `Publisher.publish`, for functions that pass them on."""

    workers: Iterable[str] | None
    require: Require
    expect: int | None
    commit: CommitMode
    timeout: float
    metadata: Mapping[str, str] | None
    settings: Settings | None


def keywords_of(call: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the keyword-only parameters of a call."""
    return [p for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY]


def shows_keywords_of(publish: Callable[..., object]) -> Callable[[Way], Way]:
    """Return a decorator that makes `help()` show `publish`'s keywords instead of `**options`."""

    def decorate(call: Way) -> Way:
        own = inspect.signature(call)
        shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        vars(call)["__signature__"] = own.replace(parameters=[*shown, *keywords_of(publish)])
        return call

    return decorate


def check_keywords(call: str, options: PublishOptions) -> None:
    """Raise a TypeError, as Python does, if `options` has a keyword that `publish` lacks.

    A method with `**options` accepts any keyword, so it calls this with its own name, `call`.
    """
    for name in options.keys() - PublishOptions.__annotations__.keys():
        raise TypeError(f"Publisher.{call}() got an unexpected keyword argument {name!r}")


class Request(msgspec.Struct, frozen=True, eq=False):
    """The checked arguments of one publish.

    Attributes:
        terms: Which workers the publish is for, what it requires of them, and its timeout.
        replaces_latest: Whether the version becomes the latest one for all workers at once.
        needs_digest: Whether workers report digests, so that the version is hashed while it is
            copied.
        precision: The dtypes to convert to while copying; None: no conversion.
        encoding: How the version is sent to workers that accept patches; see `Settings`.
        renaming: Gives the tensors' names in the version; None: their own names.
        metadata: The version's metadata; None: empty, or in a rollback that of the older version.
    """

    terms: PublishTerms
    replaces_latest: bool
    needs_digest: bool
    precision: Precision | None
    encoding: Encoding
    renaming: Renaming | None
    metadata: Mapping[str, str] | None


def request_of(
    *,
    workers: Iterable[str] | None,
    require: Require,
    expect: int | None,
    commit: CommitMode,
    timeout: float,
    metadata: Mapping[str, str] | None,
    settings: Settings | None,
    defaults: Settings,
    expected: int,
    lost_after: float,
) -> Request:
    """Check the keywords of a publish; return them as a request.

    Args:
        workers, require, expect, commit, timeout, metadata, settings: As in `Publisher.publish`.
        defaults: The publisher's settings, already checked.
        expected: The Publisher's `expect`.
        lost_after: The Publisher's `lost_after`, in seconds.

    Raises:
        ValueError: A value is invalid.
    """
    settings = defaults if settings is None else settings_of("publish", settings)
    names = None if workers is None else _names(workers)
    required = _required_names(require, names)
    if required is not None:
        needed: int | None = len(required)
    else:
        needed = None if require in ALL else _required_count(require, names)
    if commit not in COMMITS:
        checks.choice(commit, "commit", COMMITS)
    timeout = checks.seconds(timeout, "timeout", positive=True)
    to_all = names is None and needed is None
    wait, grace = settings.wait, settings.grace
    terms = PublishTerms(
        workers=names,
        require=needed,
        named=required,
        wait=wait,
        commit=commit,
        timeout=timeout,
        hash=settings.verify,
        grace=lost_after if grace is None else grace,
        grace_of_gone=0.0 if grace is None else grace,
        expect=(expected if to_all else 0) if expect is None else _expected(expect, to_all=to_all),
        alive=require == "alive",
    )
    return Request(
        terms=terms,
        replaces_latest=names is None and commit == "auto",
        needs_digest=settings.verify or commit == "together" or wait == "staged",
        precision=None if settings.dtype is None else precision_of(settings.dtype),
        encoding=settings.encoding,
        renaming=None if settings.rename is None else renaming_of(settings.rename),
        metadata=None if metadata is None else checked(metadata),
    )


def _names(workers: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(workers, str) else workers  # a string is an iterable of letters
    if names is not workers or not isinstance(names, Iterable):  # pyright: ignore
        raise ValueError(f"workers={workers!r}: give a list of names, or None for all")
    return tuple(dict.fromkeys(check_name(name, "worker") for name in names))


def _required_names(require: object, workers: tuple[str, ...] | None) -> frozenset[str] | None:
    """Return the names in `require`; None if `require` is not a collection of names."""
    if isinstance(require, str | int) or not isinstance(require, Collection):
        return None
    names = frozenset(check_name(name, "worker") for name in cast("Collection[str]", require))
    if not 1 <= len(names) <= WORKERS_MAX:
        raise ValueError(f"require={require!r}: give 1 to {WORKERS_MAX} names of workers")
    others = sorted(names.difference(workers)) if workers is not None else []
    if others:
        raise ValueError(f"require= names {', '.join(others)}, which are not in workers=")
    return names


def _required_count(require: object, names: tuple[str, ...] | None) -> int:
    number = checks.whole(
        require, 'require (of workers, or "all", or "alive", or names)', 0, WORKERS_MAX
    )
    if names is not None and number > len(names):
        raise ValueError(f"require={number}, but the publish is for {len(names)} workers only")
    return number


def _expected(expect: int, *, to_all: bool) -> int:
    """Check and return `expect`, the least number of workers that "all" means."""
    if not to_all:
        raise ValueError(
            f"expect={expect} is for a publish to all workers: leave out workers= and require=, "
            "or leave out expect="
        )
    return checks.whole(expect, "expect", 0, WORKERS_MAX)

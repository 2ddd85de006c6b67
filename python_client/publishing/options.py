"""Checks the keywords of `publish` and makes a `Request` from them."""

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
ALL = "all", "alive"  # the values of `require` that are words
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
    """Return a decorator: `help()` shows the keywords of `publish` instead of `**options`."""

    def decorate(call: Way) -> Way:
        own = inspect.signature(call)
        shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        vars(call)["__signature__"] = own.replace(parameters=[*shown, *keywords_of(publish)])
        return call

    return decorate


def check_keywords(call: str, options: PublishOptions) -> None:
    """Raise the TypeError that Python raises for a keyword that a function does not have.

    A method with `**options` takes any keyword, so it calls this with its own name, `call`.
    """
    for name in options.keys() - PublishOptions.__annotations__.keys():
        raise TypeError(f"Publisher.{call}() got an unexpected keyword argument {name!r}")


class Request(msgspec.Struct, frozen=True, eq=False):
    """The checked arguments of one publish.

    Attributes:
        terms: What the publish requires of which workers, and its deadline.
        replaces_latest: Whether the version becomes the latest one for all workers at once.
        asks_for_digests: Whether workers report digests, so that the version is hashed while
            copied.
        precision: The dtypes to convert to while copying; None: no conversion.
        encoding: How the version is sent to workers that take patches; see `Settings`.
        renaming: Gives the tensors' names in the version; None: their own names.
        metadata: The version's metadata; None: none, or that of the stored version.
    """

    terms: PublishTerms
    replaces_latest: bool
    asks_for_digests: bool
    precision: Precision | None
    encoding: Encoding
    renaming: Renaming | None
    metadata: Mapping[str, str] | None


def request(
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
    named = _named(require, names)
    if named is not None:
        needed: int | None = len(named)
    else:
        needed = None if require in ALL else _needed(require, names)
    if commit not in COMMITS:
        checks.choice(commit, "commit", COMMITS)
    timeout = checks.seconds(timeout, "timeout", positive=True)
    to_all = names is None and needed is None
    wait, grace = settings.wait, settings.grace
    terms = PublishTerms(
        workers=names,
        require=needed,
        named=named,
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
        asks_for_digests=settings.verify or commit == "together" or wait == "staged",
        precision=None if settings.dtype is None else precision_of(settings.dtype),
        encoding=settings.encoding,
        renaming=None if settings.rename is None else renaming_of(settings.rename),
        metadata=None if metadata is None else checked(metadata),
    )


def _names(workers: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(workers, str) else workers  # of a string, each letter would be a name
    if names is not workers or not isinstance(names, Iterable):  # pyright: ignore
        raise ValueError(f"workers={workers!r}: give a list of names, or None for all")
    return tuple(dict.fromkeys(check_name(name, "worker") for name in names))


def _named(require: object, workers: tuple[str, ...] | None) -> frozenset[str] | None:
    """Return the names in `require`; None if `require` is not a collection of names."""
    if isinstance(require, str | int) or not isinstance(require, Collection):
        return None
    named = frozenset(check_name(name, "worker") for name in cast("Collection[str]", require))
    if not 1 <= len(named) <= WORKERS_MAX:
        raise ValueError(f"require={require!r}: give 1 to {WORKERS_MAX} names of workers")
    others = sorted(named.difference(workers)) if workers is not None else []
    if others:
        raise ValueError(f"require= names {', '.join(others)}, for whom the publish is not")
    return named


def _needed(require: object, names: tuple[str, ...] | None) -> int:
    number = checks.whole(
        require, 'require (of workers, or "all", or "alive", or names)', 0, WORKERS_MAX
    )
    if names is not None and number > len(names):
        raise ValueError(f"require={number}, but the publish is for {len(names)} workers only")
    return number


def _expected(asked: int, *, to_all: bool) -> int:
    """Return `expect`, checked: the least number of workers that "all" means."""
    if not to_all:
        raise ValueError(
            f"expect={asked} is for a publish to all workers: leave out workers= and require=, "
            "or leave out expect="
        )
    return checks.whole(asked, "expect", 0, WORKERS_MAX)

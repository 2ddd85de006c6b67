"""What few need to set, in one object, and old keywords that are in it now."""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar, cast

from ..bus.chunks import ChunkPlan
from ..bus.limits import (
    APPLY_SECONDS,
    APPLY_SECONDS_MAX,
    INTEGER_MAX,
    PATCHES_MAX,
    STAGING_BYTES_MAX,
    Timing,
)
from ..bus.net import endpoints
from ..bus.net.control import PUB_QUEUE
from ..bus.publisher.publication import Wait
from ..codecs.checksum import CHUNK_BYTES_DEFAULT
from ..codecs.precision import precision_of
from ..codecs.renaming import Rename, renaming_of
from . import checks
from .applying import Offer, Update

P = ParamSpec("P")
T = TypeVar("T")

Encoding = Literal["raw", "delta", "auto"]
Dtype = str | Mapping[str, str] | None  # of all parameters, or by patterns of names; as they are

REKEY_SECONDS = 86_400.0  # that one group key is in force, unless the user says otherwise
BASES = 2  # versions that patches may build on: what most workers run, and what those who missed it
QUEUE_MAX = 2**20  # messages that may wait for one slow worker, each of which is a chunk or less

# What takes which of them. All that is of a publish is taken by a publisher, too: for each of its.
_PUBLISH = {"wait", "verify", "grace", "dtype", "encoding", "rename"}
_BOTH = {"ping", "lost_after", "shared_memory"}
_PUBLISHER = {"data", "advertise", "epoch", "chunk_bytes", "queue", "rekey", "bases"}
_OF = {
    "publish": _PUBLISH,
    "Publisher": {*_PUBLISH, *_BOTH, *_PUBLISHER, "check_patches"},
    "Subscriber": {
        *_BOTH,
        *("before_apply", "on_commit", "apply_timeout", "bytes_max", "resident", "sole_writer"),
    },
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What few need to set: `Subscriber(..., settings=weightbus.Settings(lost_after=30.0))`.

    A Publisher, a Subscriber and each way to publish take one, and refuse by name what is not
    theirs.

    Attributes:
        ping: Of both sides: seconds between two signs of life; 0.001 to 3,600.
        lost_after: Of both sides: seconds of silence after which the other side is lost; at least
            twice `ping`, and at most 36,000. The other times follow from these two (section 11 of
            the protocol).
        shared_memory: Of both sides: workers of the publisher's user on its host read versions from
            its memory. They are then neither sent nor hashed, and staged nowhere: the copy into the
            model is the only one. A stamp and a lock see to it that a version is never torn.

        wait: Of a publish: how far the workers must be for it to be done. "applied": they run the
            version. "staged": they have it, whole and verified, and apply it at their next safe
            point. "none": it returns at once.
        verify: Of a publish: workers that read shared memory hash what they read, too. (What comes
            over the network is always verified.) It costs about as much as the copy.
        grace: Of a publish: seconds for which a worker that is lost meanwhile is waited for: it may
            return; 0: not at all. None: `lost_after` for who falls silent, and no longer for who is
            known to be gone: its process has ended, or its connection is closed and it made no
            other. Who says goodbye is not waited for, and no longer one of "all".
        dtype: Of a publish, and of `prepare`: what parameters in float travel as: "bf16", "f16",
            "f32" or "f64". Or a mapping of patterns of names to these, such as `{"*.bias": "f32"}`:
            the first that matches counts, for buffers, too. They are converted while they are
            copied. A worker of another dtype needs `cast=True`. None: as they are.
        encoding: Of a publish: how it goes over the network to workers that take patches. "raw": as
            it is. "delta": as what has changed since the version that they run. "auto": as that
            where it is likely to be there sooner. It is encoded before anybody is waited for.
        rename: Of a publish, and of `prepare`: what the tensors are called in the version, where
            that is not what they are called here. "module." takes this prefix off. A mapping has
            names, and what they become; a key that ends with a dot is the beginning of names ("" of
            all), and the longest counts. A function is given each name once. `dtype` has patterns
            of what names become. Tied tensors stay tied.

        data: Of a publisher: where the data socket is bound; None: on the next port (or path)
            beside its address.
        advertise: Of a publisher: what workers are told to connect to for data; None: it follows
            from `data`.
        epoch: Of a publisher: its incarnation. Workers refuse one that is lower than what they have
            applied from. None: milliseconds since 1970; should the clock be behind that of a
            publisher before, a worker's word that this one started later raises the epoch, and what
            was published is announced anew. An epoch that is given is never changed.
        chunk_bytes: Of a publisher: bytes of a chunk.
        queue: Of a publisher: messages held for a slow worker before pushed ones are dropped, which
            it then fetches.
        rekey: Of a publisher with keys: seconds after which another group key takes the place of
            one.
        bases: Of a publisher: how many versions are kept in memory for patches to build on: what
            workers run, and what those run that have missed one.
        check_patches: Of a publisher: each patch is decoded, and compared, before it is offered.

        before_apply: Of a worker: called with each `Offer` before any byte of the model changes, in
            the thread that will apply it; readers go on meanwhile. If it raises, the version is not
            applied, the publisher is told so, and the old one runs on.
        on_commit: Of a worker: called with each `Update` after its bytes are in place and before
            they are first used, in the thread that applied it. It is part of applying: if it
            raises, the version has failed. A file then gets its old content back. A model in memory
            then holds no version: `reading()` raises, and the next version that is applied mends
            it.
        apply_timeout: Of a worker: seconds that each call of the user's code may take (of
            `before_apply`, of `on_commit`, of a target that is a function). After that the version
            has failed, which the publisher and readers are told at once; nobody can end the call,
            so the next version is applied once it has returned.
        bytes_max: Of a worker: the largest version to accept, in bytes.
        resident: Of a worker: move models into memory of the bus's own (see
            `weightbus.resident()`), where a version that came over the network is applied by
            exchanging pages instead of copying. They change all at once, and the old bytes can be
            put back; but whoever reads the weights outside of `reading()` while one is applied may
            see zeros. What cannot move is copied to; a warning says why.
        sole_writer: Of a worker: nobody else writes to models in memory, not even in `reading()`.
            Of a patched version only what differs is then written while readers wait.

    Raises:
        AddressError: `advertise` makes no sense.
        TypeError: A hook is a coroutine function.
        ValueError: A value is out of bounds.
        StateError: `rename` gives two tensors one name, or one that there cannot be.
    """

    ping: float = 1.0
    lost_after: float = 5.0
    shared_memory: bool = True

    wait: Wait = "applied"
    verify: bool = False
    grace: float | None = None
    dtype: Dtype = None
    encoding: Encoding = "raw"
    rename: Rename = None

    data: str | None = None
    advertise: str | None = None
    epoch: int | None = None
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    queue: int = PUB_QUEUE
    rekey: float = REKEY_SECONDS
    bases: int = BASES
    check_patches: bool = True

    before_apply: Callable[[Offer], object] | None = None
    on_commit: Callable[[Update], object] | None = None
    apply_timeout: float = APPLY_SECONDS
    bytes_max: int = STAGING_BYTES_MAX
    resident: bool = False
    sole_writer: bool = False

    def __post_init__(self) -> None:
        Timing(ping=self.ping, lost_after=self.lost_after)
        checks.choice(self.wait, "wait", ("applied", "staged", "none"))
        checks.choice(self.encoding, "encoding", ("raw", "delta", "auto"))
        if self.grace is not None:
            checks.seconds(self.grace, "grace")
        if self.dtype is not None:
            precision_of(self.dtype)
        renaming_of(self.rename)
        if self.advertise is not None:
            endpoints.check(self.advertise)
        if self.epoch is not None:
            checks.whole(self.epoch, "epoch", 1, INTEGER_MAX)
        ChunkPlan(0, self.chunk_bytes)  # refuses a size out of bounds
        checks.whole(self.queue, "queue", 1, QUEUE_MAX)
        checks.seconds(self.rekey, "rekey", positive=True)
        checks.whole(self.bases, "bases", 1, PATCHES_MAX)
        checks.hook(self.before_apply, "before_apply")
        checks.hook(self.on_commit, "on_commit")
        checks.seconds(self.apply_timeout, "apply_timeout", positive=True, most=APPLY_SECONDS_MAX)
        checks.whole(self.bytes_max, "bytes_max", 0, INTEGER_MAX)

    @property
    def timing(self) -> Timing:
        """How long to wait for signs of life, as machines have it."""
        return Timing(ping=self.ping, lost_after=self.lost_after)


_DEFAULTS = Settings()


def settings_of(kind: str, settings: Settings | None) -> Settings:
    """Return what a Publisher, a Subscriber or a publish was given, if all of it is its own.

    Args:
        kind: Which of them it is.
        settings: What it was given; None: the defaults.

    Raises:
        ValueError: It is no `Settings`, or something in it is not for this.
    """
    settings = checks.instance(settings, "settings", Settings)
    if settings is None:
        return _DEFAULTS
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in _OF[kind] and value is not field.default and value != field.default:
            others = " or a ".join(other for other in _OF if field.name in _OF[other])
            raise ValueError(f"{field.name}={value!r} is a setting of a {others}, not of a {kind}")
    return settings


def of_bytes(settings: Settings) -> Settings:
    """Return what a Publisher's settings say of a publish of bytes, which are not converted."""
    return Settings(**{name: getattr(settings, name) for name in _PUBLISH - {"dtype", "rename"}})


def had_more_keywords(kind: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a call take what is in `Settings` now as keywords, too, with a warning, as it once did.

    Its signature stays what is written there.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        old = {*_OF[kind], "timing"} - inspect.signature(call).parameters.keys()

        @functools.wraps(call)
        def take(*args: P.args, **kwargs: P.kwargs) -> T:
            if old.isdisjoint(kwargs):
                return call(*args, **kwargs)
            moved = {name: kwargs.pop(name) for name in old & kwargs.keys()}
            kwargs["settings"] = _moved(kwargs, moved)
            return call(*args, **kwargs)

        @functools.wraps(call)
        async def take_later(*args: Any, **kwargs: Any) -> Any:
            return await cast("Any", take)(*args, **kwargs)

        return cast("Callable[P, T]", take_later if inspect.iscoroutinefunction(call) else take)

    return decorate


def _moved(kwargs: Mapping[str, Any], moved: dict[str, Any]) -> Settings:
    """Return the settings of a call, with what was given in the old way put into them."""
    timing = checks.instance(moved.pop("timing", None), "timing", Timing)
    times = {} if timing is None else {"ping": timing.ping, "lost_after": timing.lost_after}
    moved |= times
    given = ", ".join(f"{name}=..." for name in sorted(moved))
    warnings.warn(
        f"{', '.join(sorted(moved))}: give settings=weightbus.Settings({given}); keywords of these "
        "names will go",
        DeprecationWarning,
        stacklevel=3,
    )
    return dataclasses.replace(kwargs.get("settings") or _DEFAULTS, **moved)

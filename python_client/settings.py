"""`Settings` has the rarely needed options of publishers, subscribers and relays."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..bus.chunks import ChunkPlan
from ..bus.limits import APPLY_SECONDS, APPLY_SECONDS_MAX, STAGING_BYTES_MAX, Timing
from ..bus.net import endpoints
from ..bus.net.publisher_sockets import PUB_QUEUE
from ..bus.protocol_limits import PATCHES_MAX
from ..bus.publisher.publication import Wait
from ..codecs.checksum import CHUNK_BYTES_DEFAULT
from ..codecs.precision import precision_of
from ..codecs.protocol_limits import INTEGER_MAX
from ..codecs.renaming import Rename, renaming_of
from . import checks
from .applying.applier import Offer, Update

Encoding = Literal["raw", "delta", "auto"]
Dtype = str | Mapping[str, str] | None  # for all float parameters, or by name; None: no conversion

REKEY_SECONDS = 86_400.0  # default lifetime of a group key
BASES = 2  # default number of versions kept as bases of patches
QUEUE_MAX = 2**20  # messages queued for one slow worker, each at most one chunk

# The settings that each call accepts. A Publisher also accepts those of a publish, as defaults.
_PUBLISH = {"wait", "verify", "grace", "dtype", "encoding", "rename"}
_BOTH = {"ping", "lost_after", "shared_memory"}
_PUBLISHER = {"data", "advertise", "epoch", "chunk_bytes", "queue", "rekey", "bases"}
_OF = {
    "publish": _PUBLISH,
    "Publisher": {*_PUBLISH, *_BOTH, *_PUBLISHER, "check_patches", "device_copy"},
    "Subscriber": {
        *_BOTH,
        *("before_apply", "on_commit", "apply_timeout", "bytes_max", "resident", "sole_writer"),
        "any_data_host",
    },
    "Relay": {*_BOTH, "data", "advertise", "queue", "rekey", "bytes_max", "any_data_host"},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Rarely needed options: `Subscriber(..., settings=weightbus.Settings(lost_after=30.0))`.

    A Publisher, a Subscriber, a Relay and each publish method accept a `Settings`, and raise
    ValueError for an option that does not apply to them.

    Attributes:
        ping: For both sides: seconds between two pings; 0.001 to 3,600.
        lost_after: For both sides: seconds without a message after which the other side counts as
            lost; at least twice `ping`, and at most 36,000. The other times follow from these two
            (section 11 of the protocol).
        shared_memory: For both sides: workers of the publisher's user on its host read versions
            from its memory. Versions are then not sent, hashed or staged: the copy into the model
            is the only copy. A stamp and a lock prevent that a worker copies a half-written one.

        wait: For a publish: when it is done. "applied": when the workers run the version. "staged":
            when they have received and verified it whole; they apply it at their next safe point.
            "none": at once.
        verify: For a publish: workers that read shared memory also hash the version, which takes
            about as long as the copy. (Workers always verify versions from the network.)
        grace: For a publish: seconds to wait for a lost worker, which may return; 0: do not wait.
            None: wait `lost_after` for a worker that becomes unresponsive, but do not wait for a
            worker that is known to be gone: its process ended, or its connection closed and the
            worker did not connect again. A publish never waits for a worker that closes its
            session, and such a worker no longer counts for "all".
        dtype: For a publish, and `prepare`: the dtype in which float parameters are published:
            "bf16", "f16", "f32" or "f64". A mapping of name patterns, such as
            `{"*.bias": "f32"}`, sets it by name, also for buffers: the first match counts. Values
            are converted in the copy. A worker with another dtype needs `cast=True`. None: no
            conversion.
        encoding: For a publish: what is sent over the network to workers that accept patches.
            "raw": the whole version. "delta": only the changes since the version that the worker
            runs. "auto": the changes, if they are likely to arrive sooner. Patches are encoded
            before the publish waits for workers.
        rename: For a publish, and `prepare`: changes the tensors' names for the version. "module."
            removes this prefix. A mapping maps old names to new ones; a key that ends with a dot is
            a prefix ("" matches all names), and the longest match counts. A function gets each name
            once. The patterns of `dtype` apply to the new names. Tied tensors stay tied.

        data: For a publisher: the address of the data socket; None: the next port (or path) after
            that of the control socket.
        advertise: For a publisher: the data address that workers receive; None: it follows from
            `data`.
        epoch: For a publisher: the epoch of this start. Workers refuse an epoch lower than that of
            their weights. None: milliseconds since 1970. If this host's clock is behind that of an
            earlier publisher, workers report the earlier publisher's epoch and its age; this
            publisher then raises its epoch and announces its versions again. An explicit epoch
            never changes.
        chunk_bytes: For a publisher: bytes per chunk.
        queue: For a publisher: how many messages may be queued for a slow worker. Pushed messages
            beyond that are dropped, and the worker then fetches their chunks.
        rekey: For a publisher with keys: seconds between two changes of the group key.
        bases: For a publisher: how many versions are kept in memory as bases of patches: the
            version that workers run, and older ones for workers that missed a version. For a model
            that is `sharded`, only the last version is kept.
        check_patches: For a publisher: decode and compare each patch before offering it.
        device_copy: For a publisher: keep a second copy of weights that are all on one CUDA device,
            in that device's memory (once the model's size, or up to three times while workers still
            read older versions). `publish_async` then makes the caller's stream wait only until
            this copy is made, and workers with a model on the same device, of the publisher's user
            and host, copy from there.

        before_apply: For a worker: called with each `Offer` before any byte of the model changes,
            in the thread that will apply it; readers are not blocked. If the hook raises, the
            version is not applied, the publisher gets the reason, and the old version still runs.
        on_commit: For a worker: called with each `Update` after its bytes are in place and before
            any reader reads them, in the thread that applied it. The hook is a part of the apply:
            if it raises, the version has failed. A file then gets its old content back. A model in
            memory then holds no version: `reading()` raises until an apply succeeds.
        apply_timeout: For a worker: seconds that each call of the user's code may take
            (`before_apply`, `on_commit`, a target function). After that the version has failed,
            and the publisher and the readers are notified at once. The call itself cannot be
            stopped, so the next version is applied after it returns.
        bytes_max: For a worker: the largest version to accept, in bytes.
        resident: For a worker: move models into the bus's own memory (see `weightbus.resident()`).
            A version from the network is then applied by exchanging pages instead of copying. All
            weights change at once, and the apply can be undone. But code that reads the weights
            outside `reading()` during an apply may see zeros. A model that cannot move is copied
            to; a warning gives the reason.
        sole_writer: For a worker: only the subscriber writes to models in memory; no other code
            does, not even in `reading()`. For a version that arrived as a patch, the subscriber
            then writes only the differences while readers wait.
        any_data_host: For a worker: accept any data address that the publisher sends, also on
            another host. Otherwise the worker connects only to the host of the publisher's own
            address (for `ipc`: its path with a suffix). If the data address is elsewhere, the
            worker fetches versions over the control socket, and the log warns. The same holds for
            the addresses of sources (`weightbus.sharded`), but with keys, any host is accepted.

    Raises:
        AddressError: `advertise` is invalid.
        TypeError: A hook is a coroutine function.
        ValueError: A value is out of bounds.
        StateError: `rename` gives two tensors the same name, or an invalid name.
    """

    __module__ = "weightbus"

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
    device_copy: bool = False

    before_apply: Callable[[Offer], object] | None = None
    on_commit: Callable[[Update], object] | None = None
    apply_timeout: float = APPLY_SECONDS
    bytes_max: int = STAGING_BYTES_MAX
    resident: bool = False
    sole_writer: bool = False
    any_data_host: bool = False

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
        ChunkPlan(0, self.chunk_bytes)  # raises if the size is out of bounds
        checks.whole(self.queue, "queue", 1, QUEUE_MAX)
        checks.seconds(self.rekey, "rekey", positive=True)
        checks.whole(self.bases, "bases", 1, PATCHES_MAX)
        checks.hook(self.before_apply, "before_apply")
        checks.hook(self.on_commit, "on_commit")
        checks.seconds(self.apply_timeout, "apply_timeout", positive=True, most=APPLY_SECONDS_MAX)
        checks.whole(self.bytes_max, "bytes_max", 0, INTEGER_MAX)

    @property
    def timing(self) -> Timing:
        """`ping` and `lost_after` as the object that the protocol machines need."""
        return Timing(ping=self.ping, lost_after=self.lost_after)


_DEFAULTS = Settings()


def settings_of(kind: str, settings: Settings | None) -> Settings:
    """Check the settings of a Publisher, a Subscriber, a Relay or a publish, and return them.

    Args:
        kind: `Publisher`, `Subscriber`, `Relay` or `publish`.
        settings: The user's settings; None: the defaults.

    Raises:
        ValueError: `settings` is not a `Settings`, or an option in it does not apply to this kind.
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
    """Return a Publisher's settings without conversions, for a publish of stored bytes."""
    return Settings(**{name: getattr(settings, name) for name in _PUBLISH - {"dtype", "rename"}})

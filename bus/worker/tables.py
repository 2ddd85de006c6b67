"""The tables of states of a worker. Made by `make protocol`; do not edit."""

from typing import Final, Literal

# A version at a worker.
Phase = Literal[
    "announced",  # is wanted, but its layout is not known or it has no memory yet
    "arriving",  # has memory; its chunks arrive
    "staged",  # is whole and verified, and waits for a commit
    "ready",  # may be applied; the user has not begun
    "applying",  # is being applied
    "running",  # runs
    "dropped",  # is not kept. It may be announced again
    "rejected",  # is not fetched or applied in this session
]

Event = Literal[
    "begun",  # the layout is known, all checks pass, and there is memory (W6, W7)
    "mapped",  # its segment is open, and the version need not be staged (S6)
    "whole",  # all chunks and the digest are there and match (W13)
    # the version is whole and `auto`; or a `commit`, or an announcement with `auto`, arrives for it
    # (W14)
    "committed",
    "taken",  # the user begins to apply it
    "put-back",  # the user does not apply it now, but will later
    "applied",  # applying has succeeded, the user's part included (W16)
    "declined",  # the version fails with a code that is not tried again (W6, W24)
    # the version fails with a code that is tried again (W6, W13), also when it is applied
    "failed",
    "torn",  # an apply failed half-way (W24)
    "stale",  # its segment holds another version (S5)
    "renamed",  # a newer version has its bytes (W25)
    "newer",  # a newer version takes its place (W8); for an applying version: in another thread
    "gone",  # a `refuse` drops it (W27)
    "aborted",  # `abort` names it (W14)
    "fenced",  # a session begins (W28), and the version is announced, or of another epoch
]

TRANSITIONS: dict[Phase, dict[Event, Phase]] = {
    "announced": {
        "begun": "arriving",
        "mapped": "ready",
        "declined": "rejected",
        "failed": "dropped",
        "newer": "dropped",
        "gone": "dropped",
        "aborted": "dropped",
        "fenced": "dropped",
    },
    "arriving": {
        "whole": "staged",
        "failed": "dropped",
        "newer": "dropped",
        "gone": "dropped",
        "aborted": "dropped",
        "fenced": "dropped",
    },
    "staged": {"committed": "ready", "newer": "dropped", "aborted": "dropped", "fenced": "dropped"},
    "ready": {"taken": "applying", "newer": "dropped"},
    "applying": {
        "applied": "running",
        "put-back": "ready",
        "declined": "rejected",
        "failed": "dropped",
        "torn": "dropped",
        "stale": "dropped",
        "newer": "dropped",
    },
    "running": {"renamed": "running", "newer": "dropped", "torn": "dropped"},
    "dropped": {},
    "rejected": {},
}

# Whether a worker receives pushed chunks of a model.
Mode = Literal[
    "following",  # receives pushed chunks
    "catching-up",  # fetches the next version before it considers a newer one
]

ModeEvent = Literal[
    "replaced",  # an arriving version is dropped for a newer one (W26)
    "completed",  # a version is whole, mapped or renamed (W26)
]

MODES: dict[Mode, dict[ModeEvent, Mode]] = {
    "following": {"replaced": "catching-up"},
    "catching-up": {"completed": "following"},
}

# A worker's session.
SessionPhase = Literal[
    "outside",  # has no session
    "probing",  # has an answer to its hello, and is opening the publisher's shared memory (S2)
    "inside",  # has a session
]

Change = Literal[
    "located",  # a `welcome` with shared memory arrives (S2)
    "welcomed",  # a session begins (W2)
    "unknown",  # `refuse` with `unknown-worker` (W20)
    "refused",  # any other `refuse` that ends the session (W20)
    "silent",  # the publisher is lost (W19)
]

SESSIONS: dict[SessionPhase, dict[Change, SessionPhase]] = {
    "outside": {"located": "probing", "welcomed": "inside"},
    "probing": {
        "located": "probing",
        "welcomed": "inside",
        "unknown": "outside",
        "refused": "outside",
        "silent": "outside",
    },
    "inside": {
        "located": "probing",
        "welcomed": "inside",
        "unknown": "outside",
        "refused": "outside",
        "silent": "outside",
    },
}

# What an announced version lacks.
Lack = Literal[
    "layout",  # a layout, which was requested
    "segment",  # its segment
    "memory",  # memory, which is available at once or not at all
    "buffer",  # a buffer, until another version releases one
]

LackEvent = Literal[
    "known",  # the layout passes all checks (W6)
    "located",  # the layout passes all checks, and the version is in a segment (S2, S6)
    "opened",  # the version must be staged from its segment, or the segment cannot be opened (S6)
    "full",  # all memory is in use (W6)
    "freed",  # memory is no longer in use (W6)
]

LACKS: dict[Lack, dict[LackEvent, Lack]] = {
    "layout": {"known": "memory", "located": "segment"},
    "segment": {"opened": "memory"},
    "memory": {"full": "buffer"},
    "buffer": {"freed": "memory"},
}

# The source of an arriving version.
Coming = Literal[
    "received",  # chunks are pushed, and some may be requested
    "pulled",  # all missing chunks are requested
    "copied",  # is copied from its segment
    "decoded",  # is decoded from a patch
]

Way = Literal[
    "unpushed",  # no more chunks are pushed (W30, W31)
    "copy-started",  # the copy from the segment starts (S6)
    "copy-ended",  # the copy from the segment has ended (S6)
    "patched",  # the patch has arrived (D5)
]

COMING: dict[Coming, dict[Way, Coming]] = {
    "received": {"unpushed": "pulled", "copy-started": "copied"},
    "pulled": {"patched": "decoded"},
    "copied": {"copy-ended": "pulled"},
    "decoded": {},
}

# Codes of `refuse` that end a session.
TURNED_AWAY: Final = {
    "name-taken",  # another live instance has the name
    "stale-epoch",  # the worker has weights that this publisher cannot replace (P3)
    "limit",  # there is no room for the worker or observer
    "protocol-version",  # `wbp` is not 1
    "wrong-name",  # the key is for another name (K3)
    "revoked",  # the key is no longer allowed (K8)
    "not-allowed",  # the key does not permit this (K4)
}

# Codes of `failed` after which a version is tried again.
TRANSIENT: Final = {
    "layout-invalid",  # the layout breaks a rule, or is not the announced one
    "unsupported",  # an unknown encoding or encryption; `together` at levels 1 and 2
    "no-memory",  # no memory, disk space or file descriptor
    "digest-mismatch",  # the chunks do not match the version's digest, or do not arrive
}

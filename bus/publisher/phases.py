"""What a version goes through at a publisher: phase x event -> phase. Nothing else moves one.

    pending ──> latest <──> lent
       │  │       │  │       │
       │  └──> targeted      │
       │          │  │       │
       │          └──┴─> old │
       └────────────────┴────┴──> gone

An event that has no arrow from a version's phase changes nothing. What a version's memory is for
follows from its phase: it is the machine's until it is *lent* or *gone*.
"""

from typing import Literal

Phase = Literal[
    "pending",  # it is numbered, and may wait until enough workers have staged it
    "latest",  # of its model, for all workers that have nothing newer of their own
    "lent",  # the same, while nobody is at it: whoever publishes next may write over it
    "targeted",  # the newest that was published to some worker alone
    "old",  # some worker is still at it
    "gone",  # its memory is not the machine's any more
]

Event = Literal[
    "for-all",  # it is committed, for all workers
    "for-some",  # it is committed, for workers that were named
    "unread",  # nobody is at it: no worker, no comparison, nothing that hashes it
    "asked",  # somebody wants it, and its memory is still there
    "overwritten",  # somebody wants it, and its memory serves another version by now
    "newer",  # other versions are the newest for all that it was for
    "aborted",
    "given-up",  # its memory is wanted for the next version
]

ARROWS: dict[Phase, dict[Event, Phase]] = {
    "pending": {
        "for-all": "latest",
        "for-some": "targeted",
        "aborted": "gone",
    },
    "latest": {
        "unread": "lent",
        "newer": "old",
        "given-up": "gone",
    },
    "lent": {
        "asked": "latest",
        "overwritten": "gone",
        "newer": "gone",
        "given-up": "gone",
    },
    "targeted": {
        "newer": "old",
        "given-up": "gone",
    },
    "old": {
        "unread": "gone",
        "given-up": "gone",
    },
    "gone": {},
}

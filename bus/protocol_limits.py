"""The limits of the protocol for messages, publishers and workers.

Made by `make protocol`; do not edit.
"""

from typing import Final

HEADER_BYTES_MAX: Final = 65_536  # bytes of a header
MESSAGE_BYTES_MAX: Final = 100_065_536  # bytes of the largest frame that a worker accepts
WINDOW_CHUNKS: Final = 16  # chunks requested and not yet received
FETCH_CHUNKS_MAX: Final = 64  # chunks of one `fetch`
TRIES_MAX: Final = 5  # waits in a row without a valid chunk (W12)
MODELS_MAX: Final = 64  # models of a worker
FEATURES_MAX: Final = 64  # features of one side
TEXT_MAX: Final = 4096  # characters of a text, an address or a path
LABEL_MAX: Final = 256  # characters of a client's or host's name
APPLIES_MAX: Final = 3  # applies of a model that fail half-way in a row
PROGRESS_CHUNKS: Final = 16  # chunks between two reports of progress
TICKET_SECONDS: Final = 30  # seconds for which a ticket is valid
GROUP_KEYS_MAX: Final = 2  # group keys of a session
PATCHES_MAX: Final = 8  # patches of an announcement
PUSH_CHUNKS: Final = 64  # chunks that a push is ahead of the greatest `progress`
WHOLE_BYTES_MAX: Final = 2**18  # bytes of a version that is sent with its announcement
CONTROL_BYTES_MAX: Final = 131_072  # bytes of a message to a publisher
EPOCH_LEAP_MAX_MS: Final = 31_622_400_000  # how far clocks may be wrong: 366 days
EPOCH_CLOCK_MAX: Final = 2**43  # a time in the year 2248
RENEWAL_PAUSES: Final = 64  # longest pause between later epochs, in `lost_after`
OBSERVERS_MAX: Final = 16  # observers at once
RELAYS_MAX: Final = 16  # relays between a publisher and a worker
NAMED_MAX: Final = 256  # workers that an announcement to a relay names
SOURCES_MAX: Final = 1024  # sources of an announcement
SOURCE_RANGES_MAX: Final = 4096  # numbers in `chunks` of a source
RANGES_MAX: Final = 1024  # numbers in `ranges` of a `fetch`
CHECK_NAMES_MAX: Final = 4096  # checksums in one `checked`
PAGE_ROWS_MAX: Final = 1024  # rows of each kind in one `roster`
DIFFERENCES_LISTED: Final = 64  # tensors that a `verified` names
EVENTS_LISTED: Final = 64  # events that a `roster` contains
VERSIONS_LISTED: Final = 24  # versions of a model whose age a `roster` contains
ERROR_MAX: Final = 512  # characters of an error in a `roster`

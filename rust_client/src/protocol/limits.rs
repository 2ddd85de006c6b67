// Made by `make protocol`; do not edit.
//! The limits of the protocol.

/// Bytes of a header.
pub const HEADER_BYTES_MAX: usize = 65_536;
/// The greatest integer.
pub const INTEGER_MAX: u64 = (1 << 53) - 1;
/// Bytes of the largest frame that a worker accepts.
pub const MESSAGE_BYTES_MAX: u64 = 100_065_536;
/// Chunks of a version.
pub const CHUNKS_MAX: u64 = 1 << 20;
/// Bytes of a chunk, at least.
pub const CHUNK_BYTES_MIN: u64 = 1;
/// Bytes of a chunk, at most.
pub const CHUNK_BYTES_MAX: u64 = 1 << 26;
/// Chunks requested and not yet received.
pub const WINDOW_CHUNKS: usize = 16;
/// Chunks of one `fetch`.
pub const FETCH_CHUNKS_MAX: u64 = 64;
/// Waits in a row without a valid chunk (W12).
pub const TRIES_MAX: u32 = 5;
/// Models of a worker.
pub const MODELS_MAX: usize = 64;
/// Features of one side.
pub const FEATURES_MAX: usize = 64;
/// Characters of a text, an address or a path.
pub const TEXT_MAX: usize = 4096;
/// Characters of a client's or host's name.
pub const LABEL_MAX: usize = 256;
/// Bytes of the JSON of a layout.
pub const LAYOUT_BYTES_MAX: u64 = 100_000_000;
/// Tensors of a version.
pub const TENSORS_MAX: usize = 1_000_000;
/// Bytes of a tensor's name.
pub const NAME_BYTES_MAX: usize = 4096;
/// Dimensions of a tensor.
pub const RANK_MAX: usize = 64;
/// Applies of a model that fail half-way in a row.
pub const APPLIES_MAX: u32 = 3;
/// Chunks between two reports of progress.
pub const PROGRESS_CHUNKS: usize = 16;
/// Seconds for which a ticket is valid.
pub const TICKET_SECONDS: u64 = 30;
/// Group keys of a session.
pub const GROUP_KEYS_MAX: usize = 2;
/// Patches of an announcement.
pub const PATCHES_MAX: usize = 8;
/// Entries of a version's metadata.
pub const METADATA_MAX: usize = 32;
/// Characters of a name in metadata.
pub const METADATA_NAME_MAX: usize = 128;
/// Bytes of names and texts of a version's metadata.
pub const METADATA_BYTES_MAX: usize = 4096;
/// Chunks that a push is ahead of the greatest `progress`.
pub const PUSH_CHUNKS: u64 = 64;
/// Bytes of a version that is sent with its announcement.
pub const WHOLE_BYTES_MAX: u64 = 1 << 18;
/// Bytes of a message to a publisher.
pub const CONTROL_BYTES_MAX: usize = 131_072;
/// How far clocks may be wrong: 366 days.
pub const EPOCH_LEAP_MAX_MS: u64 = 31_622_400_000;
/// A time in the year 2248.
pub const EPOCH_CLOCK_MAX: u64 = 1 << 43;
/// Longest pause between later epochs, in `lost_after`.
pub const RENEWAL_PAUSES: u32 = 64;
/// Observers at once.
pub const OBSERVERS_MAX: usize = 16;
/// Relays between a publisher and a worker.
pub const RELAYS_MAX: usize = 16;
/// Workers that an announcement to a relay names.
pub const NAMED_MAX: usize = 256;
/// Sources of an announcement.
pub const SOURCES_MAX: usize = 1024;
/// Numbers in `chunks` of a source.
pub const SOURCE_RANGES_MAX: usize = 4096;
/// Numbers in `ranges` of a `fetch`.
pub const RANGES_MAX: usize = 1024;
/// Checksums in one `checked`.
pub const CHECK_NAMES_MAX: usize = 4096;
/// Rows of each kind in one `roster`.
pub const PAGE_ROWS_MAX: usize = 1024;
/// Tensors that a `verified` names.
pub const DIFFERENCES_LISTED: usize = 64;
/// Events that a `roster` contains.
pub const EVENTS_LISTED: usize = 64;
/// Versions of a model whose age a `roster` contains.
pub const VERSIONS_LISTED: usize = 24;
/// Characters of an error in a `roster`.
pub const ERROR_MAX: usize = 512;

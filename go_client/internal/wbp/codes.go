package wbp

// A Code is a stable name for what went wrong (section 13 of the protocol). It is an error, so
// that errors.Is finds it in whatever wraps it. Unknown ones may come at any time.
type Code string

func (c Code) Error() string { return string(c) }

// Codes of a publisher's refusal.
const (
	CodeMalformed       Code = "malformed"
	CodeProtocolVersion Code = "protocol-version"
	CodeUnknownWorker   Code = "unknown-worker"
	CodeNameTaken       Code = "name-taken"
	CodeStaleEpoch      Code = "stale-epoch"
	CodeLimit           Code = "limit"
	CodeWrongName       Code = "wrong-name"
	CodeRevoked         Code = "revoked"
	CodeNotAllowed      Code = "not-allowed"
	CodeGone            Code = "gone"
	CodeRange           Code = "range"
	CodeNoPatch         Code = "no-patch"
)

// CodeKeys is the worker's own word for a handshake that has failed for want of the right key: a refusal of
// that carries none.
const CodeKeys Code = "keys"

// Codes of a version that a worker does not take.
const (
	CodeLayoutInvalid  Code = "layout-invalid"
	CodeLayoutMismatch Code = "layout-mismatch"
	CodeUnsupported    Code = "unsupported"
	CodeTooLarge       Code = "too-large"
	CodeTooManyChunks  Code = "too-many-chunks"
	CodeNoMemory       Code = "no-memory"
	CodeDigestMismatch Code = "digest-mismatch"
	CodeApply          Code = "apply"
)

// triedAgain are the codes that a repetition may mend: bytes were damaged, or memory was short.
var triedAgain = map[Code]bool{
	CodeLayoutInvalid: true, CodeUnsupported: true, CodeNoMemory: true, CodeDigestMismatch: true,
}

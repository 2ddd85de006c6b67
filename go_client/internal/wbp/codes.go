package wbp

// A Code identifies a failure (section 13 of the protocol). A Code is an error, so that errors.Is
// finds it in an error that wraps it. Peers may send unknown codes.
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

// CodeKeys is the worker's own code for a handshake that failed because of keys, since such a
// refusal carries no code.
const CodeKeys Code = "keys"

// Codes of a version that a worker does not accept.
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

// triedAgain has the codes of failures that may not recur, such as damaged bytes or a lack of
// memory.
var triedAgain = map[Code]bool{
	CodeLayoutInvalid: true, CodeUnsupported: true, CodeNoMemory: true, CodeDigestMismatch: true,
}

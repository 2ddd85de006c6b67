package weightbus

import (
	"errors"
	"fmt"
	"strings"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// ErrClosed means that the worker was closed.
var ErrClosed = errors.New("this worker is closed")

// ErrNoVersion means that a model runs no version: no version was applied yet, or the last apply
// failed half-way (CodeApply). An apply fails half-way if Apply rejects a version in registered
// memory, or if a publisher that breaks the protocol overwrites its shared memory during the copy.
// The next applied version ends this state.
var ErrNoVersion = errors.New("this model runs no version; Receive applies the next one that arrives")

// A Code identifies the cause of an error: errors.Is(err, code) reports whether err has the code.
// Publishers may use codes that are not listed here.
type Code = wbp.Code

// Codes of a RefusedError.
const (
	CodeMalformed       = wbp.CodeMalformed       // the worker broke the protocol: this is a bug
	CodeProtocolVersion = wbp.CodeProtocolVersion // the publisher speaks another protocol
	CodeNameTaken       = wbp.CodeNameTaken       // another connected worker has the name
	CodeStaleEpoch      = wbp.CodeStaleEpoch      // the worker runs weights of a later publisher
	CodeLimit           = wbp.CodeLimit           // the publisher has no room for another worker
	CodeKeys            = wbp.CodeKeys            // a handshake failed because of keys; see the text
	CodeWrongName       = wbp.CodeWrongName       // the worker's key is for another name
	CodeRevoked         = wbp.CodeRevoked         // the publisher no longer allows the worker's key
	CodeNotAllowed      = wbp.CodeNotAllowed      // the worker's key is an observer's
)

// Codes of an ApplyError.
const (
	CodeLayoutInvalid  = wbp.CodeLayoutInvalid  // the layout is invalid, or not the announced one
	CodeLayoutMismatch = wbp.CodeLayoutMismatch // the registered tensors have other names, shapes or dtypes
	CodeUnsupported    = wbp.CodeUnsupported    // unknown encoding; or not encrypted as Options.Keys requires
	CodeTooLarge       = wbp.CodeTooLarge       // more bytes than Options.BytesMax
	CodeTooManyChunks  = wbp.CodeTooManyChunks  // more chunks than the protocol allows
	CodeNoMemory       = wbp.CodeNoMemory       // not enough memory at the moment
	CodeDigestMismatch = wbp.CodeDigestMismatch // the digest mismatched three times, or no valid chunks arrive
	CodeApply          = wbp.CodeApply          // BeforeApply, Apply or the copy failed
)

// An ApplyError means that a version could not be received or applied. The previous version still runs
// unchanged, but with CodeApply it is possible that no version runs: see Options.Apply and ErrNoVersion.
type ApplyError struct {
	Model          string
	Epoch, Version int64
	Code           Code
	Text           string // the reason, as reported to the publisher
}

func (e *ApplyError) Error() string {
	return fmt.Sprintf("version %d of %s cannot be received or applied (%s): %s", e.Version, e.Model, string(e.Code), e.Text)
}

// Unwrap makes errors.Is(err, CodeTooLarge) work.
func (e *ApplyError) Unwrap() error { return e.Code }

// A RefusedError means that the publisher refused the worker or one of its messages. The worker
// keeps trying to join, since the reason may disappear.
type RefusedError struct {
	Address string
	Name    string // of this worker
	Code    Code
	Text    string // the publisher's reason

	Tried []string // if the worker has several addresses: all of them, since none has accepted it
}

func (e *RefusedError) Error() string {
	text := fmt.Sprintf("the publisher at %s refuses worker %q (%s): %s", e.Address, e.Name, string(e.Code), e.Text)
	if len(e.Tried) > 0 {
		text += "; no publisher at " + strings.Join(e.Tried, ", ") + " has accepted this worker"
	}
	return text
}

// Unwrap makes errors.Is(err, CodeNameTaken) work.
func (e *RefusedError) Unwrap() error { return e.Code }

// An OptionError means that an address or an option is invalid.
type OptionError string

func (e OptionError) Error() string { return "weightbus: " + string(e) }

func optionErrorf(format string, args ...interface{}) error {
	return OptionError(fmt.Sprintf(format, args...))
}

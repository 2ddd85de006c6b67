package weightbus

import (
	"errors"
	"fmt"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// ErrClosed says that the worker was closed.
var ErrClosed = errors.New("this worker is closed")

// ErrNoVersion says that a model runs no version: none has come yet, or the last one failed half-way
// (CodeApply) and the next is awaited. Apply turned it down in registered memory, or its memory was
// overwritten by a publisher that broke its promise.
var ErrNoVersion = errors.New("no version runs here yet; Receive applies the first one that comes")

// A Code is a stable name for what went wrong, to be found by errors.Is in whatever error this
// package returns. Publishers may use codes that are not listed here.
type Code = wbp.Code

// Codes of a RefusedError.
const (
	CodeMalformed       = wbp.CodeMalformed       // a message of ours breaks the protocol: this is a bug
	CodeProtocolVersion = wbp.CodeProtocolVersion // the publisher speaks another protocol
	CodeNameTaken       = wbp.CodeNameTaken       // another living worker has the name
	CodeStaleEpoch      = wbp.CodeStaleEpoch      // weights of a later publisher run here
	CodeLimit           = wbp.CodeLimit           // the publisher has no room for another worker
	CodeKeys            = wbp.CodeKeys            // the handshake fails for want of the right key; the text has the likely cause
	CodeWrongName       = wbp.CodeWrongName       // the worker's key is for another name
	CodeRevoked         = wbp.CodeRevoked         // the publisher does not allow its key any more
	CodeNotAllowed      = wbp.CodeNotAllowed      // its key is an observer's
)

// Codes of an ApplyError.
const (
	CodeLayoutInvalid  = wbp.CodeLayoutInvalid  // the layout is none, or not the announced one
	CodeLayoutMismatch = wbp.CodeLayoutMismatch // the model here has other names, shapes or dtypes
	CodeUnsupported    = wbp.CodeUnsupported    // an encoding that this worker does not know
	CodeTooLarge       = wbp.CodeTooLarge       // more bytes than Options.BytesMax
	CodeTooManyChunks  = wbp.CodeTooManyChunks  // more chunks than the protocol has
	CodeNoMemory       = wbp.CodeNoMemory       // there is no memory for it now
	CodeDigestMismatch = wbp.CodeDigestMismatch // the whole did not match its digest, three times
	CodeApply          = wbp.CodeApply          // Apply or BeforeApply turned it down, or the copy was torn: Read tells what runs
)

// An ApplyError says that a version cannot be taken here. What ran before runs on, bit for bit; but
// where the code is CodeApply nothing may run: see Options.Apply, and ErrNoVersion.
type ApplyError struct {
	Model          string
	Epoch, Version int64
	Code           Code
	Text           string // what is wrong, as the publisher was told
}

func (e *ApplyError) Error() string {
	return fmt.Sprintf("version %d of %s cannot be taken here (%s): %s", e.Version, e.Model, string(e.Code), e.Text)
}

// Unwrap makes errors.Is(err, CodeTooLarge) work.
func (e *ApplyError) Unwrap() error { return e.Code }

// A RefusedError says that the publisher does not let this worker in, or has something against
// what it sent. The worker goes on asking: the reason may pass.
type RefusedError struct {
	Address string
	Name    string // of this worker
	Code    Code
	Text    string // the reason, in the publisher's words
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the publisher at %s refuses worker %q (%s): %s", e.Address, e.Name, string(e.Code), e.Text)
}

// Unwrap makes errors.Is(err, CodeNameTaken) work.
func (e *RefusedError) Unwrap() error { return e.Code }

// An OptionError says that an address or an option makes no sense.
type OptionError string

func (e OptionError) Error() string { return "weightbus: " + string(e) }

func optionErrorf(format string, args ...interface{}) error {
	return OptionError(fmt.Sprintf(format, args...))
}

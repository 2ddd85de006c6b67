package wbp

// An Effect is something that the machine wants done.
type Effect interface{}

type (
	// Send is a message for the publisher.
	Send struct{ Message Message }
	// Connect asks for published messages from this endpoint, in place of any before. With a ticket, which
	// the next connection is to show first, each connection needs one.
	Connect struct{ Endpoint, Ticket string }
	// Redial asks for both connections to be made anew: those that there are may lead nowhere.
	Redial struct{}
	// Subscribe asks for a topic, or no longer.
	Subscribe struct {
		Topic string
		On    bool
	}
	// DecodePatch asks for a patch to be decoded, which may take long, and for the word that it was: Decoded.
	DecodePatch struct{ Job *Patching }
	// Unpatched says why a patch was of no use, so that all of a version is fetched.
	Unpatched struct {
		Model string
		Key   Key
		Why   string
	}
	// Ready is a version that may be applied.
	Ready struct{ Version *StagedVersion }
	// Rejected says that a version cannot be taken; the old one still runs.
	Rejected struct {
		Model string
		Key   Key
		Code  Code
		Text  string
	}
	// Renamed says that what a model runs is this version, byte for byte.
	Renamed struct {
		Model    string
		Key      Key
		Metadata map[string]string
	}
	// Joined says that the publisher has let this worker in.
	Joined struct{ Epoch int64 }
	// Unheard says that nothing published comes from an endpoint, so that everything is fetched.
	Unheard struct{ Endpoint string }
	// Lost says that the publisher is silent.
	Lost struct{}
	// Refused says that the publisher has something against this worker, or what it sent.
	Refused struct {
		Code Code
		Text string
	}
)

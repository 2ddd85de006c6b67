package wbp

// An Effect is an action that the machine requests.
type Effect interface{}

type (
	// Send sends a message to the publisher.
	Send struct{ Message Message }
	// Connect connects to a data endpoint, and closes the connection to any other. If Ticket is not
	// empty, the next connection sends it first, and each later connection needs another ticket.
	Connect struct{ Endpoint, Ticket string }
	// Redial reconnects both channels: the current connections may be dead.
	Redial struct{}
	// Subscribe subscribes to a topic, or unsubscribes if On is false.
	Subscribe struct {
		Topic string
		On    bool
	}
	// DecodePatch decodes a patch, which may take long. Afterwards WorkerMachine.Decoded must be called.
	DecodePatch struct{ Job *Patching }
	// Unpatched reports that a patch was unusable, so that the whole version is fetched.
	Unpatched struct {
		Model string
		Key   Key
		Why   string
	}
	// Ready hands over a version that may be applied. Others are its companions, which must be
	// applied together with it.
	Ready struct {
		Version *StagedVersion
		Others  []*StagedVersion
	}
	// Rejected reports that a version cannot be received or applied.
	Rejected struct {
		Model string
		Key   Key
		Code  Code
		Text  string
	}
	// Renamed reports that the running version of a model has a new key and new metadata.
	Renamed struct {
		Model    string
		Key      Key
		Metadata map[string]string
	}
	// Joined reports that the publisher has accepted the worker.
	Joined struct{ Epoch int64 }
	// Unheard reports that no published messages arrive, so that versions are fetched.
	Unheard struct{ Endpoint string }
	// Lost reports that the publisher no longer responds.
	Lost struct{}
	// Refused reports that the publisher refused the worker or one of its messages.
	Refused struct {
		Code Code
		Text string
	}
)

// TurnsAway reports whether the publisher has refused the worker, not only a message.
func (r Refused) TurnsAway() bool { return r.Code == CodeKeys || endsSession[r.Code] }

package wbp

import "encoding/json"

// A Message is a decoded header. Omitted fields have their defaults.
type Message interface{ Kind() string }

// Running is a version that a worker runs, with its digest ("" if its bytes were not hashed).
type Running struct {
	Epoch   int64  `json:"epoch"`
	Version int64  `json:"version"`
	Digest  string `json:"digest"`
}

// Shared locates a segment of shared memory.
type Shared struct {
	Path  string `json:"path"`
	Token string `json:"token"`
}

// Whole has the checksum of the only chunk and the version's digest, in an announcement that
// contains the whole version.
type Whole struct {
	CRC    uint32 `json:"crc"`
	Digest string `json:"digest"`
}

// PatchID identifies a patch by its encoding and its base, the version that it builds on.
type PatchID struct {
	Encoding string `json:"encoding"`
	Epoch    int64  `json:"epoch"`
	Version  int64  `json:"version"`
}

// PatchOffer is a patch that an announcement offers. Digest is that of the base; Bytes is the size
// of the patch.
type PatchOffer struct {
	PatchID
	Digest string `json:"digest"`
	Bytes  int64  `json:"nbytes"`
}

// Messages from worker to publisher.
type (
	// Hello opens a session.
	Hello struct {
		Name     string              `json:"name"`
		Instance string              `json:"instance"`
		Models   map[string]*Running `json:"models"`
		Epoch    int64               `json:"epoch"`
		AgeMS    int64               `json:"age_ms"`
		Features []string            `json:"features,omitempty"`
		Client   string              `json:"client"`
		Host     string              `json:"host"`
		PID      int64               `json:"pid"`
	}
	// Fetch requests chunks of a version or a patch; with Count 0, the announcement and the end
	// message.
	Fetch struct {
		Model     string   `json:"model"`
		Epoch     int64    `json:"epoch"`
		Version   int64    `json:"version"`
		First     int64    `json:"first"`
		Count     int64    `json:"count"`
		Layout    bool     `json:"layout"`
		Patch     *PatchID `json:"patch,omitempty"`
		Unpatched string   `json:"unpatched,omitempty"` // why no offered patch is fetched
	}
	// Progress reports the worker's progress with a version: its phase, and the received chunks.
	Progress struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Chunks  int64    `json:"chunks"`
		Phase   string   `json:"phase"`
		Patch   *PatchID `json:"patch,omitempty"`
		Waits   string   `json:"waits,omitempty"` // what delays the apply, and since when
	}
	// Staged reports that a version is complete and verified.
	Staged struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Digest  string   `json:"digest"`
		Patch   *PatchID `json:"patch,omitempty"`
	}
	// Applied reports that the worker runs a version.
	Applied struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Digest  string   `json:"digest"`
		Patch   *PatchID `json:"patch,omitempty"`
		// DecodeUS is the time to decode the patch, in microseconds; 0 if not reported.
		DecodeUS int64 `json:"decode_us,omitempty"`
		// Note is a remark on the values in the model.
		Note string `json:"note,omitempty"`
	}
	// Failed reports that the worker will not run a version, with the reason.
	Failed struct {
		Model   string `json:"model"`
		Epoch   int64  `json:"epoch"`
		Version int64  `json:"version"`
		Code    Code   `json:"code"`
		Text    string `json:"text"`
		Intact  bool   `json:"intact"` // the previous version still runs
	}
	// Bye ends a session.
	Bye struct{}
)

// Messages in both directions.
type (
	// Ping requests a pong.
	Ping struct {
		Token      int64 `json:"token"`
		Subscribed bool  `json:"subscribed"`
		Shared     bool  `json:"shared"`
	}
	// Pong answers a ping.
	Pong struct {
		Token  int64            `json:"token"`
		Epoch  int64            `json:"epoch"`
		Models map[string]int64 `json:"models"`
	}
)

// Messages from publisher to worker.
type (
	// Welcome accepts a worker.
	Welcome struct {
		Epoch    int64            `json:"epoch"`
		Data     string           `json:"data"`
		PingMS   int64            `json:"ping_ms"`
		LostMS   int64            `json:"lost_ms"`
		Models   map[string]int64 `json:"models"`
		Shared   *Shared          `json:"shared"`
		AgeMS    int64            `json:"age_ms"`
		Features []string         `json:"features"`
		Keys     []string         `json:"keys,omitempty"`
	}
	// Rekey has the group keys of a rotation.
	Rekey struct {
		Epoch int64    `json:"epoch"`
		Keys  []string `json:"keys"`
	}
	// Announce announces a version.
	Announce struct {
		Model       string       `json:"model"`
		Epoch       int64        `json:"epoch"`
		Version     int64        `json:"version"`
		Layout      string       `json:"layout"`
		LayoutBytes int64        `json:"layout_bytes"`
		Bytes       int64        `json:"nbytes"`
		ChunkBytes  int64        `json:"chunk_bytes"`
		Commit      string       `json:"commit"`
		Acknowledge string       `json:"acknowledge"`
		Encoding    string       `json:"encoding"`
		Encryption  *string      `json:"encryption"`
		Key         *string      `json:"key,omitempty"`
		Tag         *string      `json:"tag,omitempty"`
		Shared      *Shared      `json:"shared"`
		Hash        bool         `json:"hash"`
		Whole       *Whole       `json:"whole"`
		Keep        bool         `json:"keep,omitempty"`    // keep the version's bytes: they may be the base of patches
		Patches     []PatchOffer `json:"patches,omitempty"` // only the first one is pushed

		Metadata map[string]string `json:"metadata,omitempty"` // published with the version
	}
	// Chunk carries a chunk of a version, or of a patch to it.
	Chunk struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Index   int64    `json:"index"`
		CRC     uint32   `json:"crc"`
		Patch   *PatchID `json:"patch,omitempty"`
	}
	// SealedChunk carries a sealed chunk.
	SealedChunk struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Index   int64    `json:"index"`
		Key     string   `json:"key"`
		Tag     string   `json:"tag"`
		Patch   *PatchID `json:"patch,omitempty"`
	}
	// SealedMessage is a sealed announcement, end or beacon.
	SealedMessage struct {
		Key    string `json:"key"`
		Count  int64  `json:"count"`
		Sealed []byte `json:"sealed"`
	}
	// End ends the push of a version and has its digest.
	End struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Digest  string   `json:"digest"`
		Patch   *PatchID `json:"patch,omitempty"`
	}
	// Commit allows a staged version to be applied.
	Commit struct {
		Model   string `json:"model"`
		Epoch   int64  `json:"epoch"`
		Version int64  `json:"version"`
		Digest  string `json:"digest"`
	}
	// Abort forbids applying a version.
	Abort struct {
		Model   string `json:"model"`
		Epoch   int64  `json:"epoch"`
		Version int64  `json:"version"`
		Text    string `json:"text"`
	}
	// Prepare locates the shared memory of a model's first version.
	Prepare struct {
		Model  string  `json:"model"`
		Epoch  int64   `json:"epoch"`
		Bytes  int64   `json:"nbytes"`
		Shared *Shared `json:"shared"`
	}
	// Rename gives the worker's running version the key of another version with the same bytes.
	Rename struct {
		Model   string  `json:"model"`
		Epoch   int64   `json:"epoch"`
		Version int64   `json:"version"`
		Was     Running `json:"was"`

		Metadata map[string]string `json:"metadata,omitempty"` // of the new key
	}
	// Beacon names the newest version of a model.
	Beacon struct {
		Model   string `json:"model"`
		Epoch   int64  `json:"epoch"`
		Version int64  `json:"version"`
	}
	// Refuse refuses the worker or one of its messages, with the reason.
	Refuse struct {
		Code    Code    `json:"code"`
		Text    string  `json:"text"`
		Model   *string `json:"model"`
		Epoch   int64   `json:"epoch"`
		Version int64   `json:"version"`
	}
)

// Kind returns the type of a message, as in its header.
func (*Hello) Kind() string         { return "hello" }
func (*Fetch) Kind() string         { return "fetch" }
func (*Progress) Kind() string      { return "progress" }
func (*Staged) Kind() string        { return "staged" }
func (*Applied) Kind() string       { return "applied" }
func (*Failed) Kind() string        { return "failed" }
func (*Bye) Kind() string           { return "bye" }
func (*Ping) Kind() string          { return "ping" }
func (*Pong) Kind() string          { return "pong" }
func (*Welcome) Kind() string       { return "welcome" }
func (*Rekey) Kind() string         { return "rekey" }
func (*Announce) Kind() string      { return "announce" }
func (*Chunk) Kind() string         { return "chunk" }
func (*SealedChunk) Kind() string   { return "sealed_chunk" }
func (*SealedMessage) Kind() string { return "sealed_message" }
func (*End) Kind() string           { return "end" }
func (*Commit) Kind() string        { return "commit" }
func (*Abort) Kind() string         { return "abort" }
func (*Prepare) Kind() string       { return "prepare" }
func (*Rename) Kind() string        { return "rename" }
func (*Beacon) Kind() string        { return "beacon" }
func (*Refuse) Kind() string        { return "refuse" }

// Encode returns the header of a message.
func Encode(m Message) []byte {
	body, err := json.Marshal(m)
	if err != nil { // all fields above can be encoded
		panic(err)
	}
	header := append([]byte(`{"wbp":1,"type":"`), m.Kind()...)
	header = append(header, '"')
	if string(body) != "{}" {
		header = append(header, ',')
	}
	return append(header, body[1:]...)
}

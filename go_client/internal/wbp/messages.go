package wbp

import "encoding/json"

// A Message is a header, decoded. Fields at their default are filled in.
type Message interface{ Kind() string }

// Running is a version that a worker runs, and what its bytes hash to (empty: they were not hashed).
type Running struct {
	Epoch   int64  `json:"epoch"`
	Version int64  `json:"version"`
	Digest  string `json:"digest"`
}

// Shared tells where a segment of shared memory is found.
type Shared struct {
	Path  string `json:"path"`
	Token string `json:"token"`
}

// Whole is what the chunk says that travels with an announcement, and the end that would follow it.
type Whole struct {
	CRC    uint32 `json:"crc"`
	Digest string `json:"digest"`
}

// PatchID says which patch of a version it is: how it is encoded, and what it builds on.
type PatchID struct {
	Encoding string `json:"encoding"`
	Epoch    int64  `json:"epoch"`
	Version  int64  `json:"version"`
}

// PatchOffer is a patch that there is: the digest of what it builds on, and its own bytes.
type PatchOffer struct {
	PatchID
	Digest string `json:"digest"`
	Bytes  int64  `json:"nbytes"`
}

// From worker to publisher.
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
	// Fetch asks for chunks of a version, or of a patch to it; with no count, for its announcement and its end.
	Fetch struct {
		Model     string   `json:"model"`
		Epoch     int64    `json:"epoch"`
		Version   int64    `json:"version"`
		First     int64    `json:"first"`
		Count     int64    `json:"count"`
		Layout    bool     `json:"layout"`
		Patch     *PatchID `json:"patch,omitempty"`
		Unpatched string   `json:"unpatched,omitempty"` // why it comes as a whole, though there are patches
	}
	// Progress says what the worker is doing.
	Progress struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Chunks  int64    `json:"chunks"`
		Phase   string   `json:"phase"`
		Patch   *PatchID `json:"patch,omitempty"`
		Waits   string   `json:"waits,omitempty"` // who is in the way of applying it, since when
	}
	// Staged says that a version is here, whole and verified.
	Staged struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Digest  string   `json:"digest"`
		Patch   *PatchID `json:"patch,omitempty"`
	}
	// Applied says that the worker runs a version.
	Applied struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Digest  string   `json:"digest"`
		Patch   *PatchID `json:"patch,omitempty"`
		// DecodeUS is how many microseconds decoding this patch took; 0: that is not said.
		DecodeUS int64 `json:"decode_us,omitempty"`
		// Note is what there is to say of the values that the model holds.
		Note string `json:"note,omitempty"`
	}
	// Failed says that the worker will not run a version, and why.
	Failed struct {
		Model   string `json:"model"`
		Epoch   int64  `json:"epoch"`
		Version int64  `json:"version"`
		Code    Code   `json:"code"`
		Text    string `json:"text"`
		Intact  bool   `json:"intact"` // what ran before still runs
	}
	// Bye says that the worker leaves.
	Bye struct{}
)

// Either way.
type (
	// Ping asks for a pong.
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

// From publisher to worker.
type (
	// Welcome lets a worker in.
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
	// Rekey says that what comes is sealed with another group key.
	Rekey struct {
		Epoch int64    `json:"epoch"`
		Keys  []string `json:"keys"`
	}
	// Announce says that a version exists.
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
		Keep        bool         `json:"keep,omitempty"`    // there may be patches on it
		Patches     []PatchOffer `json:"patches,omitempty"` // that lead to it; the first is pushed

		Metadata map[string]string `json:"metadata,omitempty"` // what its publisher says of it
	}
	// Chunk is a piece of a version, or of a patch to it.
	Chunk struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Index   int64    `json:"index"`
		CRC     uint32   `json:"crc"`
		Patch   *PatchID `json:"patch,omitempty"`
	}
	// SealedChunk is such a piece, sealed.
	SealedChunk struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Index   int64    `json:"index"`
		Key     string   `json:"key"`
		Tag     string   `json:"tag"`
		Patch   *PatchID `json:"patch,omitempty"`
	}
	// SealedMessage is an announcement, an end or a beacon, sealed.
	SealedMessage struct {
		Key    string `json:"key"`
		Count  int64  `json:"count"`
		Sealed []byte `json:"sealed"`
	}
	// End says that no more is pushed, and what the whole hashes to.
	End struct {
		Model   string   `json:"model"`
		Epoch   int64    `json:"epoch"`
		Version int64    `json:"version"`
		Digest  string   `json:"digest"`
		Patch   *PatchID `json:"patch,omitempty"`
	}
	// Commit says that a staged version may be applied.
	Commit struct {
		Model   string `json:"model"`
		Epoch   int64  `json:"epoch"`
		Version int64  `json:"version"`
		Digest  string `json:"digest"`
	}
	// Abort says that a version must not be applied.
	Abort struct {
		Model   string `json:"model"`
		Epoch   int64  `json:"epoch"`
		Version int64  `json:"version"`
		Text    string `json:"text"`
	}
	// Prepare says where the first version of a model will lie.
	Prepare struct {
		Model  string  `json:"model"`
		Epoch  int64   `json:"epoch"`
		Bytes  int64   `json:"nbytes"`
		Shared *Shared `json:"shared"`
	}
	// Rename says that what the worker runs is a version of this epoch, byte for byte.
	Rename struct {
		Model   string  `json:"model"`
		Epoch   int64   `json:"epoch"`
		Version int64   `json:"version"`
		Was     Running `json:"was"`

		Metadata map[string]string `json:"metadata,omitempty"` // what is said of the named version
	}
	// Beacon names the newest version of a model.
	Beacon struct {
		Model   string `json:"model"`
		Epoch   int64  `json:"epoch"`
		Version int64  `json:"version"`
	}
	// Refuse says that a message gets no answer, and why.
	Refuse struct {
		Code    Code    `json:"code"`
		Text    string  `json:"text"`
		Model   *string `json:"model"`
		Epoch   int64   `json:"epoch"`
		Version int64   `json:"version"`
	}
)

// Kind is the type of a message, as its header says it.
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
	if err != nil { // the types above hold nothing that JSON does not
		panic(err)
	}
	header := append([]byte(`{"wbp":1,"type":"`), m.Kind()...)
	header = append(header, '"')
	if string(body) != "{}" {
		header = append(header, ',')
	}
	return append(header, body[1:]...)
}

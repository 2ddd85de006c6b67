package wbp

import (
	"encoding/base64"
	"fmt"
	"strings"
	"unicode/utf8"
)

// A ProtocolError describes how a message breaks the protocol.
type ProtocolError struct {
	Code Code // CodeMalformed or CodeProtocolVersion
	Text string
}

func (e *ProtocolError) Error() string { return string(e.Code) + ": " + e.Text }

// Decode decodes a publisher's message from its header and its number of payload frames. It returns
// a *ProtocolError if the message is malformed.
func Decode(header []byte, payloads int) (Message, error) {
	f, err := readFields(header)
	if err != nil {
		return nil, &ProtocolError{CodeMalformed, err.Error()}
	}
	if number, err := f.protocol(); err != nil {
		return nil, &ProtocolError{CodeMalformed, err.Error()}
	} else if number != "1" {
		return nil, &ProtocolError{CodeProtocolVersion, fmt.Sprintf("wbp is %.20q; this worker speaks 1", number)}
	}
	kind := f.text("type", HeaderBytesMax)
	read, ok := fromPublisher[kind]
	if f.err == nil && !ok {
		f.failf("type %.40q is none that a publisher sends", kind)
	}
	if f.err != nil {
		return nil, &ProtocolError{CodeMalformed, f.err.Error()}
	}
	m := read(f)
	if f.err == nil {
		f.err = checkPayloads(m, payloads)
	}
	if f.err != nil {
		return nil, &ProtocolError{CodeMalformed, kind + ": " + f.err.Error()}
	}
	return m, nil
}

func checkPayloads(m Message, payloads int) error {
	low, high := 0, 0
	switch m := m.(type) {
	case *Chunk, *SealedChunk:
		low, high = 1, 1
	case *SealedMessage:
		high = 1
	case *Announce:
		high = 1
		if m.Whole != nil {
			low = 1
		}
	}
	if payloads < low || payloads > high {
		return fmt.Errorf("%d payload frames; %d to %d are allowed", payloads, low, high)
	}
	return nil
}

// fromPublisher has, for each type that a publisher sends, the function that reads its fields.
var fromPublisher = map[string]func(*fields) Message{
	"ping": func(f *fields) Message {
		return &Ping{f.count("token", optional), f.boolean("subscribed"), f.boolean("shared")}
	},
	"pong": func(f *fields) Message {
		return &Pong{f.count("token", optional), f.count("epoch", optional), f.versions("models", optional)}
	},
	"welcome": func(f *fields) Message {
		return &Welcome{
			Epoch: f.count("epoch", required), Data: f.text("data", TextMax),
			PingMS: f.integer("ping_ms", 1, 3_600_000, required), LostMS: f.integer("lost_ms", 2, 36_000_000, required),
			Models: f.versions("models", required), Shared: f.shared(), AgeMS: f.count("age_ms", optional),
			Features: f.names("features"), Keys: f.keys("keys", optional),
		}
	},
	"rekey": func(f *fields) Message { return &Rekey{f.count("epoch", required), f.keys("keys", required)} },
	"announce": func(f *fields) Message {
		return &Announce{
			Model: f.name("model"), Epoch: f.count("epoch", required), Version: f.version(),
			Layout: f.hex("layout", 64), LayoutBytes: f.integer("layout_bytes", 10, LayoutBytesMax, required),
			Bytes: f.count("nbytes", required), ChunkBytes: f.integer("chunk_bytes", 1, ChunkBytesMax, required),
			Commit: f.oneOf("commit", "auto", "together"), Acknowledge: f.oneOf("acknowledge", "applied", "staged"),
			Encoding: f.name("encoding"), Encryption: f.optionalName("encryption"),
			Key: f.optionalHex("key", 16), Tag: f.optionalHex("tag", 32),
			Shared: f.shared(), Hash: f.boolean("hash"), Whole: f.whole(), Keep: f.boolean("keep"), Patches: f.patches(),
			Metadata: f.metadata(),
		}
	},
	"chunk": func(f *fields) Message {
		return &Chunk{
			Model: f.name("model"), Epoch: f.count("epoch", required), Version: f.version(),
			Index: f.integer("index", 0, ChunksMax-1, required), CRC: f.crc("crc"), Patch: f.patch(),
		}
	},
	"sealed_chunk": func(f *fields) Message {
		return &SealedChunk{
			Model: f.name("model"), Epoch: f.count("epoch", required), Version: f.version(),
			Index: f.integer("index", 0, ChunksMax-1, required), Key: f.hex("key", 16), Tag: f.hex("tag", 32), Patch: f.patch(),
		}
	},
	"sealed_message": func(f *fields) Message {
		return &SealedMessage{f.hex("key", 16), f.integer("count", 1, IntegerMax, required), f.base64("sealed", HeaderBytesMax)}
	},
	"end": func(f *fields) Message {
		return &End{f.name("model"), f.count("epoch", required), f.version(), f.hex("digest", 64), f.patch()}
	},
	"commit": func(f *fields) Message {
		return &Commit{f.name("model"), f.count("epoch", required), f.version(), f.hex("digest", 64)}
	},
	"abort": func(f *fields) Message {
		m := &Abort{Model: f.name("model"), Epoch: f.count("epoch", required), Version: f.version()}
		if f.has("text") {
			m.Text = f.text("text", TextMax)
		}
		return m
	},
	"prepare": func(f *fields) Message {
		m := &Prepare{f.name("model"), f.count("epoch", required), f.count("nbytes", required), f.shared()}
		if m.Shared == nil {
			f.failf("shared must be an object")
		}
		return m
	},
	"rename": func(f *fields) Message {
		return &Rename{f.name("model"), f.count("epoch", required), f.version(), f.running("was"), f.metadata()}
	},
	"beacon": func(f *fields) Message {
		return &Beacon{f.name("model"), f.count("epoch", required), f.count("version", required)}
	},
	"refuse": func(f *fields) Message {
		return &Refuse{
			Code(f.name("code")), f.text("text", TextMax), f.optionalName("model"),
			f.count("epoch", optional), f.count("version", optional),
		}
	},
}

const (
	required = true
	optional = false
)

// fields is a parsed JSON object: the text of each value by key, and the first error in reading
// fields.
type fields struct {
	raw map[string][]byte
	err error
}

func readFields(header []byte) (*fields, error) {
	if len(header) > HeaderBytesMax {
		return nil, fmt.Errorf("a header of %d bytes; at most %d are allowed", len(header), HeaderBytesMax)
	}
	if !utf8.Valid(header) {
		return nil, fmt.Errorf("the header is not UTF-8")
	}
	s := &scanner{text: header}
	f := &fields{raw: map[string][]byte{}}
	err := f.readObject(s)
	if err == nil {
		err = s.end()
	}
	return f, err
}

func (f *fields) readObject(s *scanner) error {
	return s.object(func(key string) error {
		if _, twice := f.raw[key]; twice {
			return s.fail(fmt.Sprintf("%.40q stands twice", key))
		}
		value, err := s.value(1)
		f.raw[key] = value
		return err
	})
}

// protocol returns the integer in field wbp as text; "0" if the field is missing.
func (f *fields) protocol() (string, error) {
	raw, ok := f.raw["wbp"]
	if !ok {
		return "0", nil
	}
	digits := raw
	if len(digits) > 1 && digits[0] == '-' {
		digits = digits[1:]
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return "", fmt.Errorf("wbp is no integer")
		}
	}
	return string(raw), nil
}

func (f *fields) failf(format string, args ...interface{}) {
	if f.err == nil {
		f.err = fmt.Errorf(format, args...)
	}
}

func (f *fields) has(key string) bool {
	_, ok := f.raw[key]
	return ok
}

// null reports whether the value of key is null or missing.
func (f *fields) null(key string) bool {
	raw, ok := f.raw[key]
	return !ok || string(raw) == "null"
}

func (f *fields) integer(key string, low, high int64, needed bool) int64 {
	raw, ok := f.raw[key]
	if !ok && !needed {
		return 0
	}
	n, ok := integerOf(raw)
	if !ok || n < low || n > high {
		f.failf("%s must be an integer from %d to %d", key, low, high)
	}
	return n
}

func (f *fields) count(key string, needed bool) int64 {
	return f.integer(key, 0, IntegerMax, needed)
}

func (f *fields) version() int64 { return f.integer("version", 1, IntegerMax, required) }

func (f *fields) crc(key string) uint32 { return uint32(f.integer(key, 0, 1<<32-1, required)) }

func (f *fields) boolean(key string) bool {
	raw, ok := f.raw[key]
	if ok && string(raw) != "true" && string(raw) != "false" {
		f.failf("%s must be true or false", key)
	}
	return string(raw) == "true"
}

// text returns a required string of at most `most` characters.
func (f *fields) text(key string, most int) string {
	raw := f.raw[key]
	if len(raw) == 0 || raw[0] != '"' {
		f.failf("%s must be a string", key)
		return ""
	}
	s := scanner{text: raw}
	text, err := s.string()
	if err != nil {
		f.failf("%s: %w", key, err)
	}
	if utf8.RuneCountInString(text) > most {
		f.failf("%s has more than %d characters", key, most)
	}
	return text
}

func (f *fields) name(key string) string {
	name := f.text(key, TextMax)
	if !IsName(name) {
		f.failf("%s must be 1 to 128 of A-Z a-z 0-9 . _ -", key)
	}
	return name
}

func (f *fields) optionalName(key string) *string {
	if f.null(key) {
		return nil
	}
	name := f.name(key)
	return &name
}

func (f *fields) oneOf(key, one, other string) string {
	text := f.text(key, TextMax)
	if text != one && text != other {
		f.failf("%s must be %q or %q", key, one, other)
	}
	return text
}

func (f *fields) hex(key string, digits int) string {
	text := f.text(key, TextMax)
	if !isHex(text, digits) {
		f.failf("%s must be %d of 0-9 a-f", key, digits)
	}
	return text
}

func (f *fields) optionalHex(key string, digits int) *string {
	if f.null(key) {
		return nil
	}
	text := f.hex(key, digits)
	return &text
}

// base64 returns the bytes of a required base64 string, at most `most` bytes.
func (f *fields) base64(key string, most int) []byte {
	text := f.text(key, HeaderBytesMax)
	bytes, err := base64.StdEncoding.DecodeString(text)
	if err != nil || strings.ContainsAny(text, "\r\n") || len(bytes) > most { // DecodeString ignores line ends
		f.failf("%s must be base64 of at most %d bytes", key, most)
	}
	return bytes
}

// object returns the nested object of key; nil if the value is null or missing.
func (f *fields) object(key string) *fields {
	if f.null(key) {
		return nil
	}
	inner := &fields{raw: map[string][]byte{}}
	if err := inner.readObject(&scanner{text: f.raw[key]}); err != nil {
		f.failf("%s: %w", key, err)
	}
	return inner
}

func (f *fields) shared() *Shared {
	inner := f.object("shared")
	if inner == nil {
		return nil
	}
	shared := &Shared{inner.text("path", TextMax), inner.hex("token", 32)}
	if inner.err != nil {
		f.failf("shared: %w", inner.err)
	}
	return shared
}

func (f *fields) whole() *Whole {
	inner := f.object("whole")
	if inner == nil {
		return nil
	}
	whole := &Whole{inner.crc("crc"), inner.hex("digest", 64)}
	if inner.err != nil {
		f.failf("whole: %w", inner.err)
	}
	return whole
}

func (f *fields) patch() *PatchID {
	inner := f.object("patch")
	if inner == nil {
		return nil
	}
	id := inner.patchID()
	if inner.err != nil {
		f.failf("patch: %w", inner.err)
	}
	return &id
}

func (f *fields) patchID() PatchID {
	return PatchID{f.name("encoding"), f.count("epoch", required), f.version()}
}

// patches returns the array of offered patches.
func (f *fields) patches() (offers []PatchOffer) {
	raw, ok := f.raw["patches"]
	if !ok {
		return nil
	}
	s := scanner{text: raw}
	err := s.array(func() error {
		if len(offers) >= PatchesMax {
			return fmt.Errorf("there are more than %d", PatchesMax)
		}
		inner := &fields{raw: map[string][]byte{}}
		if err := inner.readObject(&s); err != nil {
			return err
		}
		offers = append(offers, PatchOffer{inner.patchID(), inner.hex("digest", 64), inner.integer("nbytes", 1, IntegerMax, required)})
		return inner.err
	})
	if err != nil {
		f.failf("patches: %w", err)
	}
	return offers
}

// metadata returns the metadata of a version, by entry name; nil if the field is missing.
func (f *fields) metadata() map[string]string {
	if !f.has("metadata") {
		return nil
	}
	inner := &fields{raw: map[string][]byte{}}
	if err := inner.readObject(&scanner{text: f.raw["metadata"]}); err != nil {
		f.failf("metadata: %w", err)
	}
	if len(inner.raw) > MetadataMax {
		f.failf("metadata has more than %d entries", MetadataMax)
	}
	said := make(map[string]string, len(inner.raw))
	for name := range inner.raw {
		if utf8.RuneCountInString(name) > MetadataNameMax {
			f.failf("metadata has a name of more than %d characters", MetadataNameMax)
		}
		said[name] = inner.text(name, TextMax)
	}
	if inner.err != nil {
		f.failf("metadata: %w", inner.err)
	}
	return said
}

// running returns a running version; its digest may be empty.
func (f *fields) running(key string) Running {
	inner := f.object(key)
	if inner == nil {
		f.failf("%s must be an object", key)
		return Running{}
	}
	running := Running{inner.count("epoch", required), inner.version(), inner.text("digest", TextMax)}
	if running.Digest != "" && !isHex(running.Digest, 64) {
		inner.failf("digest must be 64 of 0-9 a-f, or empty")
	}
	if inner.err != nil {
		f.failf("%s: %w", key, inner.err)
	}
	return running
}

// versions returns the version number of each model, by name.
func (f *fields) versions(key string, needed bool) map[string]int64 {
	versions := map[string]int64{}
	raw, ok := f.raw[key]
	if !ok && !needed {
		return versions
	}
	s := scanner{text: raw}
	err := s.object(func(name string) error {
		version, err := s.integer()
		if _, twice := versions[name]; err == nil && (twice || !IsName(name) || len(versions) >= ModelsMax) {
			err = fmt.Errorf("entries must be at most %d names, each once", ModelsMax)
		}
		versions[name] = version
		return err
	})
	if err != nil {
		f.failf("%s: %w", key, err)
	}
	return versions
}

func (f *fields) names(key string) []string {
	return f.texts(key, optional, FeaturesMax, "names", IsName)
}

func (f *fields) keys(key string, needed bool) []string {
	return f.texts(key, needed, GroupKeysMax, "times 64 of 0-9 a-f", func(text string) bool { return isHex(text, 64) })
}

// texts returns an array of at most `most` strings. It fails if `is` returns false for one of them.
// kind names the strings in that error.
func (f *fields) texts(key string, needed bool, most int, kind string, is func(string) bool) []string {
	texts := []string{}
	raw, ok := f.raw[key]
	if !ok && !needed {
		return texts
	}
	s := scanner{text: raw}
	err := s.array(func() error {
		text, err := s.string()
		if err == nil && (!is(text) || len(texts) >= most) {
			err = fmt.Errorf("entries must be at most %d %s", most, kind)
		}
		texts = append(texts, text)
		return err
	})
	if err != nil {
		f.failf("%s: %w", key, err)
	}
	return texts
}

// IsName reports whether a text is a valid name of a worker, a model, a code or an encoding.
func IsName(text string) bool {
	for i := 0; i < len(text); i++ {
		c := text[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return 0 < len(text) && len(text) <= 128
}

func isHex(text string, digits int) bool {
	for i := 0; i < len(text); i++ {
		if c := text[i]; !('0' <= c && c <= '9' || 'a' <= c && c <= 'f') {
			return false
		}
	}
	return len(text) == digits
}

package wbp

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// A Message is a decoded header. Omitted fields have their defaults.
type Message interface{ Kind() string }

// Encode returns the header of a message.
func Encode(m Message) []byte {
	body, err := json.Marshal(m)
	if err != nil { // all fields of messages can be encoded
		panic(err)
	}
	header := append([]byte(`{"wbp":1,"type":"`), m.Kind()...)
	header = append(header, '"')
	if string(body) != "{}" {
		header = append(header, ',')
	}
	return append(header, body[1:]...)
}

// A Code identifies a failure (section 13 of the protocol). A Code is an error, so that errors.Is
// finds it in an error that wraps it. Peers may send unknown codes.
type Code string

func (c Code) Error() string { return string(c) }

// CodeKeys is the worker's own code for a handshake that failed because of keys, since such a
// refusal carries no code.
const CodeKeys Code = "keys"

// A ProtocolError describes how a message breaks the protocol.
type ProtocolError struct {
	Code Code // CodeMalformed or CodeProtocolVersion
	Text string
}

func (e *ProtocolError) Error() string { return string(e.Code) + ": " + e.Text }

// incoming describes a kind of message that a publisher sends: the function that reads the fields,
// and how many payload frames may follow the header.
type incoming struct {
	read      func(*fields) Message
	low, high int
}

// Decode decodes a publisher's message from its header and its number of payload frames. It returns
// a *ProtocolError if the message is malformed.
func Decode(header []byte, payloads int) (Message, error) {
	f, err := readHeader(header)
	if err != nil {
		return nil, &ProtocolError{CodeMalformed, err.Error()}
	}
	if number, err := f.protocol(); err != nil {
		return nil, &ProtocolError{CodeMalformed, err.Error()}
	} else if number != "1" {
		return nil, &ProtocolError{CodeProtocolVersion, fmt.Sprintf("wbp is %.20q; this worker speaks 1", number)}
	}
	kind := required(f, "type", text(HeaderBytesMax))
	message, ok := fromPublisher[kind]
	if !ok {
		f.failf("no publisher sends a message of type %.40q", kind)
	}
	if f.err != nil {
		return nil, &ProtocolError{CodeMalformed, f.err.Error()}
	}
	m, low := message.read(f), message.low
	if a, ok := m.(*Announce); ok && a.Whole != nil {
		low = 1
	}
	if payloads < low || payloads > message.high {
		f.failf("%d payload frames; %d to %d are allowed", payloads, low, message.high)
	}
	if f.err != nil {
		return nil, &ProtocolError{CodeMalformed, kind + ": " + f.err.Error()}
	}
	return m, nil
}

// fields is a parsed JSON object: the text of each value by key, and the first error that occurred
// when values were read.
type fields struct {
	raw map[string][]byte
	err error
}

func readHeader(header []byte) (*fields, error) {
	if len(header) > HeaderBytesMax {
		return nil, fmt.Errorf("a header of %d bytes; at most %d are allowed", len(header), HeaderBytesMax)
	}
	if !utf8.Valid(header) {
		return nil, errors.New("the header is not UTF-8")
	}
	return readFields(header)
}

func readFields(text []byte) (*fields, error) {
	s, f := &scanner{text: text}, &fields{raw: map[string][]byte{}}
	err := s.object(func(key string) error {
		if _, twice := f.raw[key]; twice {
			return s.fail(fmt.Sprintf("the field %.40q appears twice", key))
		}
		value, err := s.value(1)
		f.raw[key] = value
		return err
	})
	if err == nil {
		err = s.end()
	}
	return f, err
}

// protocol returns the text of field wbp, which must be an integer; "0" if the field is missing.
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
			return "", errors.New("wbp is not an integer")
		}
	}
	return string(raw), nil
}

func (f *fields) failf(format string, args ...interface{}) {
	if f.err == nil {
		f.err = fmt.Errorf(format, args...)
	}
}

// required returns the value of key, read by the function read. It records an error if the key is
// missing or the value is invalid.
func required[T any](f *fields, key string, read func(raw []byte) (T, error)) T {
	value, err := read(f.raw[key])
	if err != nil {
		f.failf("%s: %w", key, err)
	}
	return value
}

// optional is like required, but returns fallback if the key is missing.
func optional[T any](f *fields, key string, fallback T, read func(raw []byte) (T, error)) T {
	if _, ok := f.raw[key]; !ok {
		return fallback
	}
	return required(f, key, read)
}

// Each function below reads a value from its JSON text, or returns a function that does. The text is
// one valid JSON value, or empty if the field is missing.

func integer(low, high int64) func([]byte) (int64, error) {
	return func(raw []byte) (int64, error) {
		n, ok := integerOf(raw)
		if !ok || n < low || n > high {
			return 0, fmt.Errorf("must be an integer from %d to %d", low, high)
		}
		return n, nil
	}
}

func crc(raw []byte) (uint32, error) {
	n, err := integer(0, 1<<32-1)(raw)
	return uint32(n), err
}

func boolean(raw []byte) (bool, error) {
	if string(raw) != "true" && string(raw) != "false" {
		return false, errors.New("must be true or false")
	}
	return string(raw) == "true", nil
}

// stringOf reads a string of at most `most` characters.
func stringOf(raw []byte, most int) (string, error) {
	if len(raw) == 0 || raw[0] != '"' {
		return "", errors.New("must be a string")
	}
	s := scanner{text: raw}
	text, err := s.string()
	if err == nil && utf8.RuneCountInString(text) > most {
		err = fmt.Errorf("has more than %d characters", most)
	}
	return text, err
}

func text(most int) func([]byte) (string, error) {
	return func(raw []byte) (string, error) { return stringOf(raw, most) }
}

func name(raw []byte) (string, error) {
	name, err := stringOf(raw, TextMax)
	if err == nil && !IsName(name) {
		err = errors.New("must be 1 to 128 of A-Z a-z 0-9 . _ -")
	}
	return name, err
}

func digits(count int) func([]byte) (string, error) {
	return func(raw []byte) (string, error) {
		digits, err := stringOf(raw, TextMax)
		if err == nil && !isHex(digits, count) {
			err = fmt.Errorf("must be %d of 0-9 a-f", count)
		}
		return digits, err
	}
}

func digitsOrEmpty(count int) func([]byte) (string, error) {
	return func(raw []byte) (string, error) {
		if string(raw) == `""` {
			return "", nil
		}
		return digits(count)(raw)
	}
}

func oneOf(words ...string) func([]byte) (string, error) {
	return func(raw []byte) (string, error) {
		word, err := stringOf(raw, TextMax)
		for _, known := range words {
			if word == known {
				return word, err
			}
		}
		return "", fmt.Errorf("must be one of %q", words)
	}
}

// base64Of reads at most `most` bytes in base64.
func base64Of(most int) func([]byte) ([]byte, error) {
	return func(raw []byte) ([]byte, error) {
		text, err := stringOf(raw, HeaderBytesMax)
		if err != nil {
			return nil, err
		}
		bytes, err := base64.StdEncoding.DecodeString(text)
		if err != nil || strings.ContainsAny(text, "\r\n") || len(bytes) > most { // DecodeString ignores line ends
			return nil, fmt.Errorf("must be base64 of at most %d bytes", most)
		}
		return bytes, nil
	}
}

func objectOf[T any](read func(*fields) T) func([]byte) (T, error) {
	return func(raw []byte) (value T, err error) {
		f, err := readFields(raw)
		if err != nil {
			return value, err
		}
		return read(f), f.err
	}
}

// nullable returns nil for null.
func nullable[T any](read func([]byte) (T, error)) func([]byte) (*T, error) {
	return func(raw []byte) (*T, error) {
		if string(raw) == "null" {
			return nil, nil
		}
		value, err := read(raw)
		return &value, err
	}
}

func arrayOf[T any](most int, read func([]byte) (T, error)) func([]byte) ([]T, error) {
	return func(raw []byte) ([]T, error) {
		s, values := scanner{text: raw}, []T{}
		err := s.array(func() error {
			item, err := s.value(1)
			if err == nil && len(values) >= most {
				err = fmt.Errorf("has more than %d entries", most)
			}
			if err != nil {
				return err
			}
			value, err := read(item)
			values = append(values, value)
			return err
		})
		return values, err
	}
}

func mapOf[T any](most int, isKey func(string) bool, read func([]byte) (T, error)) func([]byte) (map[string]T, error) {
	return func(raw []byte) (map[string]T, error) {
		f, err := readFields(raw)
		if err == nil && len(f.raw) > most {
			err = fmt.Errorf("has more than %d entries", most)
		}
		if err != nil {
			return nil, err
		}
		values := make(map[string]T, len(f.raw))
		for key := range f.raw {
			if !isKey(key) {
				f.failf("%.40q is not a valid key", key)
			}
			values[key] = required(f, key, read)
		}
		return values, f.err
	}
}

// shortTo returns a function that reports whether a text has at most `most` characters.
func shortTo(most int) func(string) bool {
	return func(text string) bool { return utf8.RuneCountInString(text) <= most }
}

// IsName reports whether a text is a valid name of a worker or a model, an error code or an encoding.
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

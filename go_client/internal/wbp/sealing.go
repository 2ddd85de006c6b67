package wbp

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
)

// AES256GCM is the encryption's name in announcements (section 14.1 of the protocol).
const AES256GCM = "aes-256-gcm"

// TagBytes is the length of an authentication tag.
const TagBytes = 16

// A Purpose is the kind of sealed data. It is part of the nonce, so that no nonce is used twice.
type Purpose uint32

// The purposes of nonces.
const (
	PurposeChunk   Purpose = 1
	PurposeLayout  Purpose = 2
	PurposeMessage Purpose = 3
)

// A GroupKey is a key that all workers of a publisher share. A nonce consists of a purpose and a number. (E2)
//
//	group key ──> id                              names the group key in headers
//	          ├─> key of messages ──> nonce: PurposeMessage, count
//	          └─> key of a version ─> nonce: PurposeChunk, index | PurposeLayout, 0
type GroupKey struct {
	ID       string // 16 hexadecimal digits, as in headers
	secret   []byte
	messages cipher.AEAD
}

// NewGroupKey returns the GroupKey of a key of 32 bytes.
func NewGroupKey(key []byte) *GroupKey {
	k := &GroupKey{secret: mac([]byte("weightbus 1"), key)} // HKDF-Extract
	k.ID = hex.EncodeToString(k.expand("id")[:8])
	k.messages = gcm(k.MessageKey())
	return k
}

// MessageKey returns the key that encrypts published messages other than chunks.
func (k *GroupKey) MessageKey() []byte { return k.expand("messages") }

// VersionKey returns the key that encrypts the chunks of a version.
func (k *GroupKey) VersionKey(s Subject) []byte { return k.expand("version" + string(s.Names())) }

// expand returns a key: one block of HKDF-Expand (RFC 5869) with SHA-256.
func (k *GroupKey) expand(info string) []byte { return mac(k.secret, append([]byte(info), 1)) }

func mac(key, text []byte) []byte {
	hash := hmac.New(sha256.New, key)
	hash.Write(text)
	return hash.Sum(nil)
}

func gcm(key []byte) cipher.AEAD {
	block, err := aes.NewCipher(key)
	if err != nil { // never: the key has 32 bytes
		panic(err)
	}
	sealed, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return sealed
}

// openMessage decrypts the message with this count. It returns nil if the message is not authentic. (E5)
func (k *GroupKey) openMessage(count int64, sealed []byte) []byte {
	if len(sealed) < TagBytes {
		return nil
	}
	size := int64(len(sealed) - TagBytes)
	plain, err := k.messages.Open(nil, Nonce(PurposeMessage, count), sealed, encodeNumbers(PurposeMessage, count, size))
	if err != nil {
		return nil
	}
	return plain
}

// A Subject identifies a version in one encoding.
type Subject struct {
	Model, Encoding   string
	Key               Key
	Base              Key   // the version that the encoding builds on; zero if none
	Bytes, ChunkBytes int64 // sizes of the data section, or of the patch, and of a chunk
}

// subjectOf returns the Subject of an announced version or, if patch is not nil, of that patch. (D12)
func subjectOf(a *Announce, patch *PatchOffer) Subject {
	s := Subject{Model: a.Model, Encoding: a.Encoding, Key: Key{a.Epoch, a.Version}, Bytes: a.Bytes, ChunkBytes: a.ChunkBytes}
	if patch != nil {
		s.Encoding, s.Base, s.Bytes = patch.Encoding, Key{patch.Epoch, patch.Version}, patch.Bytes
	}
	return s
}

// Names returns the bytes from which the version's key is derived. They identify the version and the encoding.
func (s Subject) Names() []byte {
	out := append([]byte{byte(len(s.Model))}, s.Model...)
	out = append(append(out, byte(len(s.Encoding))), s.Encoding...)
	return appendNumbers(out, s.Key.Epoch, s.Key.Version, s.Base.Epoch, s.Base.Version)
}

// Associated returns the associated data that is authenticated with a payload of size bytes. (E3)
func (s Subject) Associated(purpose Purpose, index, size int64) []byte {
	return append(s.Names(), encodeNumbers(purpose, index, size, s.Bytes, s.ChunkBytes)...)
}

// Nonce returns a nonce of 12 bytes. Each nonce is used once per key.
func Nonce(purpose Purpose, index int64) []byte { return encodeNumbers(purpose, index) }

// encodeNumbers returns a purpose and further numbers as little-endian bytes.
func encodeNumbers(purpose Purpose, others ...int64) []byte {
	out := make([]byte, 4, 44)
	binary.LittleEndian.PutUint32(out, uint32(purpose))
	return appendNumbers(out, others...)
}

func appendNumbers(to []byte, numbers ...int64) []byte {
	for _, number := range numbers {
		to = binary.LittleEndian.AppendUint64(to, uint64(number))
	}
	return to
}

// An Opening decrypts one sealed payload.
type Opening struct {
	sealed                 cipher.AEAD
	nonce, associated, tag []byte
}

// NewOpening returns the Opening of a payload of size bytes that is sealed with the key of a version.
func NewOpening(key []byte, subject Subject, purpose Purpose, index, size int64, tag []byte) *Opening {
	return newOpening(gcm(key), subject, purpose, index, size, tag)
}

func newOpening(sealed cipher.AEAD, subject Subject, purpose Purpose, index, size int64, tag []byte) *Opening {
	return &Opening{sealed, Nonce(purpose, index), subject.Associated(purpose, index, size), tag}
}

// Decrypt decrypts a payload into `to`, which has the same size and may be the same memory. It returns
// the CRC-32C of the plain bytes, computed while they are in the cache. If the payload is not
// authentic, Decrypt zeroes `to` and returns false. (E4) The cipher needs the tag directly after the
// payload. If the payload's slice has room there, Decrypt writes the tag into that memory and restores
// the memory afterwards; otherwise it copies the payload.
func (o *Opening) Decrypt(to, payload []byte) (crc uint32, ok bool) {
	size := len(payload)
	if len(to) != size {
		return 0, false
	}
	if cap(payload) >= size+TagBytes {
		after, saved := payload[size:size+TagBytes], [TagBytes]byte{}
		copy(saved[:], after)
		defer copy(after, saved[:])
	}
	plain, err := o.sealed.Open(to[:0], o.nonce, append(payload, o.tag...), o.associated)
	if err != nil {
		return 0, false
	}
	return CRC32C(plain), true
}

// copyTo implements proof: it decrypts payload into `to`.
func (o *Opening) copyTo(to, payload []byte) (crc uint32, ok bool) { return o.Decrypt(to, payload) }

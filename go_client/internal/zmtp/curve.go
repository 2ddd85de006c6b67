package zmtp

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"golang.org/x/crypto/curve25519"
	"golang.org/x/crypto/nacl/secretbox"
	"golang.org/x/crypto/poly1305"
	"golang.org/x/crypto/salsa20/salsa"
)

// Keys are the keys of a CURVE client.
type Keys struct {
	Public, Secret [32]byte // the client's pair
	Server         [32]byte // the public key of the only accepted server
}

// Errors of handshakes that failed because of keys.
const (
	NotAllowed      = Error("the other side does not allow our key")
	PeerWithoutKeys = Error("the other side has no keys, and this side accepts only encrypted connections")
	PeerWithKeys    = Error("the other side requires keys, and this side has none")
)

// Sizes in bytes: of WELCOME after its name, of its cookie, and of the bytes that CURVE adds to a
// frame (name, count, authenticator, flags).
const (
	welcomeBytes  = 16 + secretbox.Overhead + 32 + cookieBytes
	cookieBytes   = 96
	overheadBytes = len(messageName) + 8 + secretbox.Overhead + 1
)

const (
	messageName = "\x07MESSAGE"
	denied      = "\x03400" // body of ERROR if the server does not allow the client's key (ZAP)
)

// innerFlags maps the flags of a plain frame to those inside a CURVE message; outerFlags maps them back.
var innerFlags, outerFlags = map[byte]byte{0: 0, flagMore: 1, flagCommand: 2}, [...]byte{0, flagMore, flagCommand}

// A curve is the client's side of CURVE (ZeroMQ RFC 26) on one connection. A box is a text that is
// encrypted with the sender's secret key and the receiver's public key; (C'->S) is a box from the
// owner of C' to the owner of S. C and S are the permanent keys of client and server; C' and S' are
// their keys of this connection.
//
//	HELLO      C', proof that the client knows S (C'->S)
//	WELCOME    S', cookie (S->C')
//	INITIATE   cookie; C, a vouch for C' (C->S'), metadata (C'->S')
//	READY      metadata (S'->C'), or ERROR
//	MESSAGE    flags, a frame (C'->S' or S'->C')
//
// Each side counts its boxes, so that repeated and reordered boxes are rejected.
type curve struct {
	keys           *Keys
	public, secret [32]byte // of this connection
	shared         [32]byte // shared key of C' and S; from WELCOME on, of C' and S'
	welcomed       bool
	sent, received uint64 // counts of the last sent and the last received box
}

// hello returns the first command of the handshake.
func (c *curve) hello() (command []byte, err error) {
	if _, err = rand.Read(c.secret[:]); err != nil {
		return nil, err
	}
	curve25519.ScalarBaseMult(&c.public, &c.secret)
	if c.shared, err = sharedKey(&c.keys.Server, &c.secret); err != nil {
		return nil, err
	}
	command = append([]byte("\x05HELLO\x01\x00"), make([]byte, 72)...)
	command = append(command, c.public[:]...)
	return c.seal(command, "CurveZMQHELLO---", make([]byte, 64)), nil
}

// initiate processes the body of a WELCOME, after its name, and returns the INITIATE.
func (c *curve) initiate(welcome, metadata []byte) (command []byte, err error) {
	if c.welcomed || len(welcome) != welcomeBytes {
		return nil, Error("a malformed or repeated WELCOME")
	}
	opened, ok := secretbox.Open(nil, welcome[16:], longNonce("WELCOME-", welcome[:16]), &c.shared)
	if !ok {
		return nil, Error("a WELCOME that does not come from the owner of the pinned key")
	}
	var server [32]byte
	copy(server[:], opened)
	vouch, err := c.vouch(&server)
	if err == nil {
		c.shared, err = sharedKey(&server, &c.secret)
	}
	if err != nil {
		return nil, err
	}
	c.welcomed = true
	plain := append(append(append([]byte{}, c.keys.Public[:]...), vouch...), metadata...)
	return c.seal(append([]byte("\x08INITIATE"), opened[32:]...), "CurveZMQINITIATE", plain), nil
}

// vouch returns the proof that the owner of the client's keys started this connection.
func (c *curve) vouch(server *[32]byte) ([]byte, error) {
	shared, err := sharedKey(server, &c.keys.Secret)
	if err != nil {
		return nil, err
	}
	out := make([]byte, 16)
	if _, err := rand.Read(out); err != nil {
		return nil, err
	}
	plain := append(append([]byte{}, c.public[:]...), c.keys.Server[:]...)
	return secretbox.Seal(out, plain, longNonce("VOUCH---", out), &shared), nil
}

// ready processes the body of a READY, after its name, and returns the server's metadata.
func (c *curve) ready(in []byte) ([]byte, error) {
	if !c.welcomed {
		return nil, Error("READY before WELCOME")
	}
	return c.open(in, "CurveZMQREADY---")
}

// message encrypts a frame, and returns it as a MESSAGE command.
func (c *curve) message(flags byte, body []byte) []byte {
	return c.seal([]byte(messageName), "CurveZMQMESSAGEC", append([]byte{innerFlags[flags]}, body...))
}

// openMessage decrypts a MESSAGE of the server in place, and returns the frame that it contains.
func (c *curve) openMessage(in []byte) (flags byte, body []byte, err error) {
	if len(in) < overheadBytes || string(in[:len(messageName)]) != messageName {
		return 0, nil, Error("a frame in the clear on an encrypted connection")
	}
	plain, err := c.open(in[len(messageName):], "CurveZMQMESSAGES")
	if err != nil {
		return 0, nil, err
	}
	if int(plain[0]) >= len(outerFlags) {
		return 0, nil, Error(fmt.Sprintf("an encrypted frame with flags %#x", plain[0]))
	}
	return outerFlags[plain[0]], plain[1:], nil
}

// seal appends the count of the client's boxes, and a box of plain. prefix is the beginning of the
// box's nonce.
func (c *curve) seal(to []byte, prefix string, plain []byte) []byte {
	c.sent++
	nonce := shortNonce(prefix, c.sent)
	return secretbox.Seal(append(to, nonce[16:]...), plain, nonce, &c.shared)
}

// open decrypts a box in place and returns the plain bytes. The argument in holds the count of the
// box (8 bytes), then the box.
func (c *curve) open(in []byte, prefix string) ([]byte, error) {
	if len(in) < 8+secretbox.Overhead {
		return nil, Error("a truncated encrypted frame")
	}
	count := binary.BigEndian.Uint64(in)
	if count <= c.received {
		return nil, Error(fmt.Sprintf("encrypted frame %d after frame %d: it is a replay", count, c.received))
	}
	plain, ok := openInPlace(in[8:], shortNonce(prefix, count), &c.shared)
	if !ok {
		return nil, Error("an encrypted frame that was damaged or forged")
	}
	c.received = count
	return plain, nil
}

func shortNonce(prefix string, count uint64) *[24]byte {
	var nonce [24]byte
	copy(nonce[:], prefix)
	binary.BigEndian.PutUint64(nonce[16:], count)
	return &nonce
}

func longNonce(prefix string, random []byte) *[24]byte {
	var nonce [24]byte
	copy(nonce[copy(nonce[:], prefix):], random)
	return &nonce
}

// sharedKey returns the shared key that NaCl's box derives from a public and a secret key. (Package
// nacl/box has this function, too, but imports packages that are not needed here.)
func sharedKey(public, secret *[32]byte) (shared [32]byte, err error) {
	point, err := curve25519.X25519(secret[:], public[:])
	if err != nil {
		return shared, Error("an invalid public key")
	}
	copy(shared[:], point)
	salsa.HSalsa20(&shared, new([16]byte), &shared, &salsa.Sigma)
	return shared, nil
}

// openInPlace is like secretbox.Open, but decrypts in place: secretbox.Open would allocate memory of
// the same size, and a frame may have 100 MB. It verifies the authenticator before it decrypts.
func openInPlace(box []byte, nonce *[24]byte, shared *[32]byte) ([]byte, bool) {
	var key, once [32]byte
	var half, counter, proof [16]byte
	var first [64]byte // beginning of the key stream; its first half is the authenticator's key
	copy(half[:], nonce[:16])
	copy(counter[:], nonce[16:])
	salsa.HSalsa20(&key, &half, shared, &salsa.Sigma)
	salsa.XORKeyStream(first[:], first[:], &counter, &key)
	copy(once[:], first[:32])
	body := box[copy(proof[:], box):]
	if !poly1305.Verify(&proof, body, &once) {
		return nil, false
	}
	for i := 0; i < 32 && i < len(body); i++ {
		body[i] ^= first[32+i]
	}
	if len(body) > 32 {
		counter[8] = 1
		salsa.XORKeyStream(body[32:], body[32:], &counter, &key)
	}
	return body, true
}

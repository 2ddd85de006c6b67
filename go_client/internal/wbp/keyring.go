package wbp

import (
	"crypto/cipher"
	"encoding/hex"
	"time"
)

// A Keyring has the group keys of a session, which decrypt sealed messages, layouts and chunks.
//
// During a rotation it has two keys, and the older one expires soon. Each published message except
// a chunk has a count, which rises with each message under the same key. A message is a replay if
// its count is not above the count of the last message.
type Keyring struct {
	keys            []*GroupKey      // the newest last
	counts          map[string]int64 // by key id: the highest count of a decrypted message
	rotating        bool             // a rotation is in progress
	oldKeysExpireAt time.Duration    // when all but the newest key expire
	keyMissing      bool             // a message was sealed with an unknown key
	last            struct {         // the last version key that was derived
		id, names string
		sealed    cipher.AEAD
	}
}

// NewKeyring returns an empty Keyring.
func NewKeyring() *Keyring { return &Keyring{counts: map[string]int64{}} }

// Begin starts a session with these keys only. All keys but the newest expire at `until`. The
// counts of known keys are kept, so that replays are still detected.
func (r *Keyring) Begin(keys []string, until time.Duration) {
	r.keys, r.rotating = nil, false
	r.add(keys, until)
}

// add adds the keys of a rotation. The previous keys expire at `until`. Keys listed before a known
// key are older and have expired: they are not added again, or replayed messages would be accepted.
// (E6)
func (r *Keyring) add(keys []string, until time.Duration) {
	var added []*GroupKey
	for _, digits := range keys {
		bytes, _ := hex.DecodeString(digits)
		if key := NewGroupKey(bytes); r.find(key.ID) == nil {
			added = append(added, key)
		} else {
			added = nil
		}
	}
	if len(added) > 0 {
		r.keys = append(r.keys, added...)
		r.rotating, r.oldKeysExpireAt = len(r.keys) > 1, until
	}
	r.keyMissing = false
	r.keep(GroupKeysMax)
}

// expire drops all keys but the newest once they have expired.
func (r *Keyring) expire(now time.Duration) {
	if r.rotating && now >= r.oldKeysExpireAt {
		r.rotating = false
		r.keep(1)
	}
}

// lacks reports whether a message needed an unknown key since keys were last added.
func (r *Keyring) lacks() bool { return r.keyMissing }

// keep drops all but the newest `most` keys, the counts of the dropped keys, and the derived key.
func (r *Keyring) keep(most int) {
	r.last.id, r.last.names, r.last.sealed = "", "", nil
	if len(r.keys) > most {
		r.keys = append([]*GroupKey{}, r.keys[len(r.keys)-most:]...)
	}
	counts := map[string]int64{}
	for _, key := range r.keys {
		if count, counted := r.counts[key.ID]; counted {
			counts[key.ID] = count
		}
	}
	r.counts = counts
}

func (r *Keyring) find(id string) *GroupKey {
	for _, key := range r.keys {
		if key.ID == id {
			return key
		}
	}
	return nil
}

// Published returns a published message, decrypted; a sealed chunk is returned unchanged. It
// returns nil for a message in the clear, whose sender is unknown, and for a replay. With counts,
// the message is accepted only once; counts is false before the payload is complete. (E4, E5)
func (r *Keyring) Published(message Message, payloads int, counts bool) Message {
	sealed, ok := message.(*SealedMessage)
	if !ok {
		if _, ok := message.(*SealedChunk); ok {
			return message
		}
		return nil
	}
	key := r.key(sealed.Key)
	if key == nil || sealed.Count <= r.counts[key.ID] { // E5
		return nil
	}
	plain := key.openMessage(sealed.Count, sealed.Sealed)
	if plain == nil {
		return nil
	}
	if counts {
		r.counts[key.ID] = sealed.Count
	}
	inside, err := Decode(plain, payloads)
	if err != nil {
		return nil
	}
	switch inside.(type) {
	case *Announce, *End, *Beacon:
		return inside
	}
	return nil
}

// chunk returns the Opening that decrypts a sealed chunk; nil if the key of the chunk is unknown.
func (r *Keyring) chunk(of Subject, chunk *SealedChunk, size int) *Opening {
	return r.opening(of, PurposeChunk, chunk.Index, int64(size), chunk.Key, chunk.Tag)
}

// payload decrypts in place the payload of an announcement, which is a layout or a whole version.
// If the layout is not authentic, sound is false. If the version is not authentic, plain is nil,
// and the version is fetched like a damaged chunk. (E4)
func (r *Keyring) payload(a *Announce, sealed []byte) (plain []byte, sound bool) {
	purpose := PurposeLayout
	if a.Whole != nil {
		purpose = PurposeChunk
	}
	if a.Key != nil && a.Tag != nil {
		opening := r.opening(subjectOf(a, nil), purpose, 0, int64(len(sealed)), *a.Key, *a.Tag)
		if opening != nil {
			if _, sound = opening.Decrypt(sealed, sealed); sound {
				return sealed, true
			}
		}
	}
	return nil, a.Whole != nil
}

func (r *Keyring) opening(of Subject, purpose Purpose, index, size int64, id, tag string) *Opening {
	key := r.key(id)
	if key == nil {
		return nil
	}
	if names := string(of.Names()); r.last.id != id || r.last.names != names {
		r.last.id, r.last.names, r.last.sealed = id, names, gcm(key.VersionKey(of))
	}
	proof, _ := hex.DecodeString(tag)
	return newOpening(r.last.sealed, of, purpose, index, size, proof)
}

func (r *Keyring) key(id string) *GroupKey {
	key := r.find(id)
	r.keyMissing = r.keyMissing || key == nil
	return key
}

package wbp

import (
	"crypto/cipher"
	"encoding/hex"
	"time"
)

// A Keyring has the group keys of a session, which decrypt sealed messages, layouts and chunks.
//
// During a rotation it has two keys, and the older key expires soon. Each published message except a
// chunk has a count, which rises with each message under the same key. A message is a replay if its
// count is not above the highest count so far.
type Keyring struct {
	keys            []*GroupKey      // the newest last
	counts          map[string]int64 // by key id: the highest count of a decrypted message
	rotating        bool             // a rotation is in progress
	oldKeysExpireAt time.Duration    // when all but the newest key expire
	keyMissing      bool             // a message was sealed with an unknown key
	derived         struct {         // the version key that was derived last
		id, names string // of the group key, and of the version (Subject.Names)
		sealed    cipher.AEAD
	}
}

// NewKeyring returns an empty Keyring.
func NewKeyring() *Keyring { return &Keyring{counts: map[string]int64{}} }

// Begin starts a session with these keys only. All keys but the newest expire at `until`. Begin keeps
// the counts of keys that the previous session had, too, so that replays are still detected.
func (r *Keyring) Begin(keys []string, until time.Duration) {
	r.keys, r.rotating = nil, false
	r.add(keys, until)
}

// add adds the keys of a rotation. The previous keys expire at `until`. A key that is listed before a known
// key is older and has expired. It is not added again: otherwise replayed messages would be accepted. (E6)
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
	r.trim(GroupKeysMax)
}

// expire drops all keys but the newest once they have expired.
func (r *Keyring) expire(now time.Duration) {
	if r.rotating && now >= r.oldKeysExpireAt {
		r.rotating = false
		r.trim(1)
	}
}

// needsKey reports whether a message needed an unknown key since keys were last added.
func (r *Keyring) needsKey() bool { return r.keyMissing }

// trim drops all but the newest `most` keys, the counts of the dropped keys, and the derived key.
func (r *Keyring) trim(most int) {
	r.derived.id, r.derived.names, r.derived.sealed = "", "", nil
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

// Published returns a published message, decrypted; it returns a sealed chunk unchanged. It returns nil
// for a replay, for a message that cannot be decrypted, and for one in the clear, since any sender could
// have made that. If record is true, it records the message's count, so that the message is accepted
// only once. The caller passes false before the payload is complete. (E4, E5)
func (r *Keyring) Published(message Message, payloads int, record bool) Message {
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
	if record {
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
// authentic is false if a layout is not authentic. If a whole version is not authentic, authentic is
// true and plain is nil, so that the version is fetched like a damaged chunk. (E4)
func (r *Keyring) payload(a *Announce, sealed []byte) (plain []byte, authentic bool) {
	purpose := PurposeLayout
	if a.Whole != nil {
		purpose = PurposeChunk
	}
	if a.Key != nil && a.Tag != nil {
		opening := r.opening(subjectOf(a, nil), purpose, 0, int64(len(sealed)), *a.Key, *a.Tag)
		if opening != nil {
			if _, authentic = opening.Decrypt(sealed, sealed); authentic {
				return sealed, true
			}
		}
	}
	return nil, a.Whole != nil
}

// opening returns the Opening of a payload; nil if the group key with this id is unknown.
func (r *Keyring) opening(of Subject, purpose Purpose, index, size int64, id, tag string) *Opening {
	key := r.key(id)
	if key == nil {
		return nil
	}
	if names := string(of.Names()); r.derived.id != id || r.derived.names != names {
		r.derived.id, r.derived.names, r.derived.sealed = id, names, gcm(key.VersionKey(of))
	}
	proof, _ := hex.DecodeString(tag)
	return newOpening(r.derived.sealed, of, purpose, index, size, proof)
}

// key returns the group key with this id; if the key is unknown, it returns nil and records that.
func (r *Keyring) key(id string) *GroupKey {
	key := r.find(id)
	r.keyMissing = r.keyMissing || key == nil
	return key
}

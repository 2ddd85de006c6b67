package wbp

import (
	"crypto/cipher"
	"encoding/hex"
	"time"
)

// A Keyring is the group keys of a worker's session: what is sealed is opened with them, or has no effect.
//
// There are two while one takes the place of another; the older one is forgotten soon after. What is
// published beside chunks counts up under each key: what counts no higher than the last is a replay.
type Keyring struct {
	keys     []*GroupKey      // the newest last
	counts   map[string]int64 // the highest that was opened, by id
	changing bool             // there may be one before the newest,
	until    time.Duration    // which counts for so long
	lacking  bool             // something came that was sealed with a key that nobody has told since
	last     struct {         // key of a version
		id, names string
		sealed    cipher.AEAD
	}
}

// NewKeyring returns an empty one.
func NewKeyring() *Keyring { return &Keyring{counts: map[string]int64{}} }

// Begin says that a session begins, with these keys and no others, of which the older one counts until then.
// A count goes on, or replays would count.
func (r *Keyring) Begin(keys []string, until time.Duration) {
	r.keys, r.changing = nil, false
	r.add(keys, until)
}

// add says that there are other keys; the one before counts until then. What is told before a key that is here
// is older, and over: if it came back, so would what was said under it. (E6)
func (r *Keyring) add(keys []string, until time.Duration) {
	var news []*GroupKey
	for _, digits := range keys {
		bytes, _ := hex.DecodeString(digits)
		if key := NewGroupKey(bytes); r.find(key.ID) == nil {
			news = append(news, key)
		} else {
			news = nil
		}
	}
	if len(news) > 0 {
		r.keys = append(r.keys, news...)
		r.changing, r.until = len(r.keys) > 1, until
	}
	r.lacking = false
	r.keep(GroupKeysMax)
}

// expire forgets a key whose time is over.
func (r *Keyring) expire(now time.Duration) {
	if r.changing && now >= r.until {
		r.changing = false
		r.keep(1)
	}
}

// lacks tells whether a key is needed that is not here, until some are told.
func (r *Keyring) lacks() bool { return r.lacking }

// keep forgets all but the newest keys, and what was counted under the others, or derived from them.
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

// Published returns what was published, if it was sealed: the rest can be anybody's word. It counts
// once; or not yet, if the payload of it is still on its way. nil: it has no effect. (E4, E5)
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

// chunk returns what opens a chunk of what arrives; nil if its key is not known.
func (r *Keyring) chunk(of Subject, chunk *SealedChunk, size int) *Opening {
	return r.opening(of, PurposeChunk, chunk.Index, int64(size), chunk.Key, chunk.Tag)
}

// payload opens the layout, or all the bytes, that came with an announcement, where they lie. Of all the
// bytes there are none if they are not sound, as of a damaged chunk, which is fetched. (E4)
func (r *Keyring) payload(a *Announce, sealed []byte) (plain []byte, sound bool) {
	purpose := PurposeLayout
	if a.Whole != nil {
		purpose = PurposeChunk
	}
	if a.Key != nil && a.Tag != nil {
		opening := r.opening(subjectOf(a, nil), purpose, 0, int64(len(sealed)), *a.Key, *a.Tag)
		if opening != nil {
			if _, sound = opening.Open(sealed, sealed); sound {
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
		r.last.id, r.last.names, r.last.sealed = id, names, gcm(key.OfVersion(of))
	}
	proof, _ := hex.DecodeString(tag)
	return newOpening(r.last.sealed, of, purpose, index, size, proof)
}

func (r *Keyring) key(id string) *GroupKey {
	key := r.find(id)
	r.lacking = r.lacking || key == nil
	return key
}

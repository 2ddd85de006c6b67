package wbp

import (
	"fmt"
	"strings"
	"time"
)

// Delta is how a patch is encoded that this worker can decode, and the feature of taking it (section 19 of the protocol).
const Delta = "delta-1"

// Patches are those of one model: which one a version arrives by, if there is one that fits, and what is done where it
// does not.
//
// A patch builds on the very bytes that run here. It arrives into memory of its own, and what it leads to is held
// against the digest like any version. Whatever is wrong with it, all of the version is fetched in its place, and what
// runs runs on meanwhile.
type Patches struct {
	model    string
	versions *versionStore
	timing   *Timing
	taken    bool // they are taken
	listens  bool // to chunks of patches, in place of those of versions
}

// topic carries the chunks that are pushed to this worker.
func (p *Patches) topic() string {
	if p.listens {
		return PatchTopic(p.model)
	}
	return DataTopic(p.model)
}

// listen has the next versions pushed in the way in which this one arrives. (D7)
func (p *Patches) listen(t *Transfer, shared bool) []Effect {
	before := p.topic()
	p.listens = t.patch != nil
	if p.topic() == before || shared || p.versions.mode == catchingUp {
		return nil
	}
	return []Effect{Subscribe{before, false}, Subscribe{p.topic(), true}}
}

// transfer returns what a version arrives by: a patch on what runs here, else itself. (D4)
func (p *Patches) transfer(v *versionEntry, patchable bool, now time.Duration) *Transfer {
	a, why := v.announce, ""
	if p.taken && patchable && len(a.Patches) > 0 {
		offer := p.offered(a)
		if offer == nil {
			why = p.unfit(a)
		} else if room, err := allocate(offer.Bytes, false); err != nil {
			why = fmt.Sprintf("there is no memory for a patch of %d bytes", offer.Bytes)
		} else {
			t := newTransferOfPatch(offer, p.versions.buildOn(), a, v.layout, room, now, p.timing)
			if offer != &a.Patches[0] { // the first alone is pushed
				t.pull()
			}
			return t
		}
	}
	return newTransfer(a, v.layout, v.buffer, why, now, p.timing)
}

// offered returns the patch that fits what runs here; nil if there is none, or it is larger than the version.
func (p *Patches) offered(a *Announce) *PatchOffer {
	b, runs := p.versions.base, p.versions.at(running)
	if b == nil || runs == nil || b.running != *runs.running || b.layout.ID != a.Layout {
		return nil
	}
	for i := range a.Patches {
		offer := &a.Patches[i]
		named := Running{offer.Epoch, offer.Version, offer.Digest}
		if offer.Encoding == Delta && offer.Bytes <= a.Bytes && named == *runs.running {
			return offer
		}
	}
	return nil
}

// unfit says what is here in place of what the patches build on.
func (p *Patches) unfit(a *Announce) string {
	here := "nothing runs here"
	if runs := p.versions.at(running); runs != nil {
		here = fmt.Sprintf("version %d of epoch %d runs here", runs.Version, runs.Epoch)
	}
	if p.versions.base == nil {
		here += ", and its bytes were not kept"
	}
	var on []string
	for _, offer := range a.Patches {
		on = append(on, fmt.Sprint(offer.Version))
	}
	return here + "; there are patches on " + strings.Join(on, ", ")
}

// decode has a patch decoded that is here, unless somebody does.
func (p *Patches) decode(v *versionEntry) []Effect {
	if v.transfer.comes == decoded {
		return nil
	}
	return []Effect{DecodePatch{v.transfer.decode(v.buffer)}}
}

// refused takes the word that the publisher has no patch (any more) that was asked for. (D8)
func (p *Patches) refused(key Key, now time.Duration) []Effect {
	v := p.versions.find(key, arriving)
	if v == nil || v.transfer.patch == nil || v.transfer.comes == decoded {
		return nil
	}
	return p.giveUp(v, "the publisher has no such patch (any more)", now)
}

// giveUp has all of a version fetched in place of a patch that is of no use. (D5)
func (p *Patches) giveUp(v *versionEntry, why string, now time.Duration) []Effect {
	p.versions.release(v.transfer)
	v.comesBy(newTransfer(v.announce, v.layout, v.buffer, why, now, p.timing))
	v.transfer.pull()
	return append([]Effect{Unpatched{p.model, v.Key, why}}, fetches(v.transfer, now)...) // D10
}

// atMost returns the beginning of a text, of so many characters.
func atMost(text string, most int) string {
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most])
	}
	return text
}

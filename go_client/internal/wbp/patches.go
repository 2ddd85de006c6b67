package wbp

import (
	"fmt"
	"strings"
	"time"
)

// Patches decides whether the worker receives a version of one model as a patch or whole. If a patch
// is unusable, the worker fetches the whole version instead.
//
// A patch builds on exactly the bytes of the running version. It is received into its own memory, so
// that the running version does not change, and the decoded version must match its digest.
type Patches struct {
	model    string
	versions *versionStore
	timing   *Timing
	accepted bool // the worker accepts patches
	listens  bool // the worker subscribes to chunks of patches instead of chunks of versions
}

// topic returns the topic of the chunks that the worker subscribes to.
func (p *Patches) topic() string {
	if p.listens {
		return PatchTopic(p.model)
	}
	return DataTopic(p.model)
}

// listen subscribes to the chunks of patches if the transfer receives a patch, otherwise to the chunks
// of whole versions. It returns nothing if the subscription is right already, or not needed. (D7)
func (p *Patches) listen(t *Transfer, shared bool) []Effect {
	before := p.topic()
	p.listens = t.patch != nil
	if p.topic() == before || shared || p.versions.mode == catchingUp {
		return nil
	}
	return []Effect{Subscribe{before, false}, Subscribe{p.topic(), true}}
}

// transfer returns a transfer of a patch on the running version, or of the whole version if no patch
// fits or patchable is false. (D4)
func (p *Patches) transfer(v *versionEntry, patchable bool, now time.Duration) *Transfer {
	a, why := v.announce, ""
	if p.accepted && patchable && len(a.Patches) > 0 {
		offer := p.offered(a)
		if offer == nil {
			why = p.unfit(a)
		} else if memory, err := allocate(offer.Bytes, false); err != nil {
			why = fmt.Sprintf("there is no memory for a patch of %d bytes", offer.Bytes)
		} else {
			t := newTransferOfPatch(offer, p.versions.useBase(), a, v.layout, memory, now, p.timing)
			if offer != &a.Patches[0] { // only the first patch is pushed
				t.pull()
			}
			return t
		}
	}
	return newTransfer(a, v.layout, v.buffer, why, now, p.timing)
}

// offered returns a patch of the announcement that builds on the running version and is not larger
// than the new version; nil if there is none.
func (p *Patches) offered(a *Announce) *PatchOffer {
	b, runningVersion := p.versions.base, p.versions.inPhase(running)
	if b == nil || runningVersion == nil || b.running != *runningVersion.running || b.layout.ID != a.Layout {
		return nil
	}
	for i := range a.Patches {
		offer := &a.Patches[i]
		base := Running{Epoch: offer.Epoch, Version: offer.Version, Digest: offer.Digest}
		if offer.Encoding == Delta && offer.Bytes <= a.Bytes && base == *runningVersion.running {
			return offer
		}
	}
	return nil
}

// unfit describes why no offered patch can be used.
func (p *Patches) unfit(a *Announce) string {
	here := "nothing runs here"
	if runningVersion := p.versions.inPhase(running); runningVersion != nil {
		here = fmt.Sprintf("version %d of epoch %d runs here", runningVersion.Version, runningVersion.Epoch)
	}
	if p.versions.base == nil {
		here += ", and its bytes were not kept"
	}
	var bases []string
	for _, offer := range a.Patches {
		bases = append(bases, fmt.Sprint(offer.Version))
	}
	return here + "; there are patches on " + strings.Join(bases, ", ")
}

// decode starts to decode a complete patch, unless it is being decoded already.
func (p *Patches) decode(v *versionEntry) []Effect {
	if v.transfer.arrival == decoded {
		return nil
	}
	return []Effect{DecodePatch{v.transfer.decode(v.buffer)}}
}

// refused handles a refusal: the publisher does not have the requested patch. The whole version is
// fetched instead. (D8)
func (p *Patches) refused(key Key, now time.Duration) []Effect {
	v := p.versions.find(key, arriving)
	if v == nil || v.transfer.patch == nil || v.transfer.arrival == decoded {
		return nil
	}
	return p.giveUp(v, "the publisher does not have this patch", now)
}

// giveUp fetches the whole version instead of an unusable patch. (D5)
func (p *Patches) giveUp(v *versionEntry, why string, now time.Duration) []Effect {
	p.versions.release(v.transfer)
	v.setTransfer(newTransfer(v.announce, v.layout, v.buffer, why, now, p.timing))
	v.transfer.pull()
	return append([]Effect{Unpatched{p.model, v.Key, why}}, fetches(v.transfer, now)...) // D10
}

// truncate truncates a text to `most` characters.
func truncate(text string, most int) string {
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most])
	}
	return text
}

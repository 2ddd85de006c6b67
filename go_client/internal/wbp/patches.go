package wbp

import (
	"fmt"
	"strings"
	"sync/atomic"
	"time"
)

// Delta is how a patch is encoded that this worker can decode, and the feature of taking it (section 19 of the protocol).
const Delta = "delta-1"

// A Patching is a version on its way from a patch that is here into a buffer of ours. Nobody else touches that, or
// what the patch builds on, until it is over; so it takes no lock.
type Patching struct {
	Model    string
	transfer *Transfer
	base     *base
	patch    []byte
	buffer   []byte
	digest   string      // of the version
	unwanted atomic.Bool // it is to end soon
}

// Run decodes the patch, which may take long, and says why it is of no use; "" if it is. (D5)
func (j *Patching) Run() (fault string) {
	patch, err := ParsePatch(j.base.layout, j.patch)
	if err == nil && patch.Target != j.digest {
		err = fmt.Errorf("the patch leads to %.12s; announced is %.12s", patch.Target, j.digest)
	}
	if err == nil {
		patch.wanted = func() bool { return !j.unwanted.Load() }
		pieces := Plan{int64(len(j.base.data)), wantedBytes}
		for i := int64(0); i < pieces.Count() && patch.wanted(); i++ {
			begin, end := pieces.Span(i)
			copy(j.buffer[begin:end], j.base.data[begin:end])
		}
		err = patch.Apply(j.buffer, "")
	}
	if err != nil {
		return err.Error()
	}
	return ""
}

// Decoded takes the word that a patch was decoded, and how long that took; or that it is of no use, and why.
func (m *Machine) Decoded(job *Patching, fault string, took, now time.Duration) []Effect {
	return m.slots[job.Model].decoded(job, fault, took, now)
}

// begins returns what a version arrives by: a patch on what runs here, else itself. (D4)
func (s *slot) begins(v *held, patchable bool, now time.Duration) *Transfer {
	a, why := v.announce, ""
	if s.patches && patchable && len(a.Patches) > 0 {
		offer := s.offered(a)
		if offer == nil {
			why = s.unfit(a)
		} else if room, err := allocate(offer.Bytes, false); err != nil {
			why = fmt.Sprintf("there is no memory for a patch of %d bytes", offer.Bytes)
		} else {
			t := newTransfer(a, v.layout, room, now, s.timing)
			t.patch, t.base = offer, s.holds.base
			t.base.users++
			return t
		}
	}
	t := newTransfer(a, v.layout, v.buffer, now, s.timing)
	t.why = atMost(why, LabelMax)
	return t
}

// offered returns the patch that fits what runs here; nil if there is none, or it is larger than the version.
func (s *slot) offered(a *Announce) *PatchOffer {
	b, runs := s.holds.base, s.running()
	if b == nil || runs == nil || b.running != *runs || b.layout.ID != a.Layout {
		return nil
	}
	for i := range a.Patches {
		p := &a.Patches[i]
		if p.Encoding == Delta && p.Bytes <= a.Bytes && (Running{p.Epoch, p.Version, p.Digest}) == *runs {
			return p
		}
	}
	return nil
}

// unfit says what is here in place of what the patches build on.
func (s *slot) unfit(a *Announce) string {
	here := "nothing runs here"
	if runs := s.running(); runs != nil {
		here = fmt.Sprintf("version %d of epoch %d runs here", runs.Version, runs.Epoch)
	}
	if s.holds.base == nil {
		here += ", and its bytes were not kept"
	}
	var on []string
	for _, p := range a.Patches {
		on = append(on, fmt.Sprint(p.Version))
	}
	return here + "; there are patches on " + strings.Join(on, ", ")
}

// topic carries the chunks that are pushed to this worker.
func (s *slot) topic() string {
	if s.listens {
		return PatchTopic(s.model)
	}
	return DataTopic(s.model)
}

// listen has the next versions pushed in the way in which this one arrives, and fetches what is not. (D7)
func (s *slot) listen(v *held, now time.Duration) []Effect {
	t, before := v.transfer, s.topic()
	s.listens = t.patch != nil
	var effects []Effect
	if s.topic() != before && !s.shared && s.mode == following {
		effects = []Effect{Subscribe{before, false}, Subscribe{s.topic(), true}}
	} else if t.patch == nil || t.patch.PatchID == t.Announce.Patches[0].PatchID {
		return nil
	}
	t.pull()
	return append(effects, s.pull(v, now)...)
}

// decode has a patch decoded that is here, unless somebody does.
func (s *slot) decode(v *held) []Effect {
	t := v.transfer
	if t.comes == decoded {
		return nil
	}
	t.turn(patched)
	t.job = &Patching{Model: s.model, transfer: t, base: t.base, patch: t.Buffer, buffer: v.buffer, digest: t.Digest}
	return []Effect{DecodePatch{t.job}}
}

// decoded takes note that a version is whole; or that all of it is to be fetched.
func (s *slot) decoded(job *Patching, fault string, took, now time.Duration) []Effect {
	t, v := job.transfer, s.holds.at(arriving)
	t.job = nil
	if job.unwanted.Load() { // something newer took its place, or it was aborted
		s.holds.letGo(t)
		s.holds.buffers.giveBack(job.buffer)
		return s.resume(now)
	}
	if fault != "" {
		return s.giveUp(v, fault, now)
	}
	s.holds.letGo(t)
	t.took = took
	return s.arrived(v, now)
}

// noPatch takes the word that the publisher has no patch (any more) that was asked for. (D8)
func (s *slot) noPatch(key Key, now time.Duration) []Effect {
	v := s.holds.given(key, arriving)
	if v == nil || v.transfer.patch == nil || v.transfer.comes == decoded {
		return nil
	}
	return s.giveUp(v, "the publisher has no such patch (any more)", now)
}

// giveUp has all of a version fetched in place of a patch that is of no use. (D5)
func (s *slot) giveUp(v *held, why string, now time.Duration) []Effect {
	s.holds.letGo(v.transfer)
	v.transfer = newTransfer(v.announce, v.layout, v.buffer, now, s.timing)
	v.transfer.why = atMost(why, LabelMax)
	v.transfer.pull()
	return append([]Effect{Unpatched{s.model, v.Key, why}}, s.pull(v, now)...) // D10
}

// atMost returns the beginning of a text, of so many characters.
func atMost(text string, most int) string {
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most])
	}
	return text
}

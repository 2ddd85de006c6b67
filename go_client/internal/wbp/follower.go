package wbp

import (
	"fmt"
	"time"
)

const (
	nothingFits = "no chunks arrive that fit the announcement"
	appliesMax  = 3 // consecutive applies that fail half-way before a version is rejected
	restartsMax = 3 // digest mismatches before the version is declined
)

// A follower is the state machine of one model of a worker. It handles the model's messages and
// moves the model's versions through their phases (phases.go).
//
// A newer version displaces an older one that is arriving. The worker then receives the newer version
// completely before it starts another one (mode catchingUp): otherwise a slow worker might displace
// every version.
type follower struct {
	model       string
	openSegment OpenSegment
	keyring     *Keyring // nil without keys
	shared      bool     // versions are read from shared memory; pushes are not needed
	acceptance  acceptance
	versions    *versionStore
	planner     *FetchPlanner
	patches     *Patches
	epoch       int64   // the latest epoch of which bytes were written into the model
	tornApplies int     // number of consecutive applies that failed half-way; above 0, no version runs
	networkOnly Key     // the version to receive over the network although its segment is announced
	failure     *Failed // the last failure, until another version is started; else nil
}

// newFollower returns a follower without versions. openSegment and keyring may be nil. If patches is
// true, the follower accepts patches.
func newFollower(name string, model Model, bytesMax int64, timing *Timing, openSegment OpenSegment, keyring *Keyring,
	patches bool) *follower {
	versions := &versionStore{mode: following}
	planner := newFetchPlanner(name, versions, timing)
	return &follower{
		model: name, openSegment: openSegment, keyring: keyring, versions: versions, planner: planner,
		acceptance: acceptance{mismatch: model.Mismatch, bytesMax: bytesMax, longest: model.LayoutBytes,
			sealed: keyring != nil, accepted: map[string]bool{}},
		patches: &Patches{model: name, versions: versions, timing: timing, accepted: patches},
	}
}

// running returns the running version. It returns nil before the first apply, and after an apply
// that failed half-way.
func (s *follower) running() *Running {
	if v := s.versions.inPhase(running); v != nil {
		return v.running
	}
	return nil
}

// Messages from the publisher.

// announced handles an announcement. layout has the bytes of the layout, or is nil if the announcement
// had none. push is true if the publisher may push the version's chunks; otherwise they are fetched.
func (s *follower) announced(a *Announce, layout []byte, push bool, now time.Duration) []Effect {
	key := Key{a.Epoch, a.Version}
	if v := s.versions.find(key, staged); v != nil && a.Commit == "auto" { // W5
		return s.commit(v)
	}
	if !s.wants(a, key) {
		return nil
	}
	if layout != nil && s.acceptance.sizeFault(a) == "" { // otherwise begin declines the version
		if code, wrong := s.acceptance.learn(a, layout); code != "" {
			return s.unreadable(a, code, wrong, now)
		}
	}
	v := s.versions.expect(a)
	effects := s.begin(v, now)
	if v.phase == arriving && !push { // W31
		v.transfer.pull()
		effects = append(effects, fetches(v.transfer, now)...)
	}
	return effects
}

// unreadable declines a version whose layout is invalid, or postpones it if a retry may help.
func (s *follower) unreadable(a *Announce, code Code, wrong string, now time.Duration) []Effect {
	if triedAgain[code] {
		key := Key{a.Epoch, a.Version}
		s.versions.move(s.versions.find(key, announced), failed) // the version waited for this layout
		return s.fail(key, code, wrong, now)
	}
	return s.decline(s.versions.expect(a), code, wrong, now)
}

// wants reports whether to start receiving the announced version, or to start it again.
func (s *follower) wants(a *Announce, key Key) bool {
	if !key.Newer(s.versions.newest()) || s.versions.isRejected(key) { // W5, W15
		return false
	}
	if v := s.versions.inPhase(arriving); v != nil {
		if v.Key == key && v.updateAnnouncement(a) {
			return false
		}
		// If two announcements of one version differ, one of them was damaged, so start again.
		if v.Key != key && (v.Key.Newer(key) || s.versions.mode != following) { // W8, W26
			return false
		}
	}
	waiting := s.versions.inPhase(announced)
	return waiting == nil || !waiting.Key.Newer(key)
}

// announcedWhole handles an announcement that contains the whole version, like an announcement, one
// chunk and an end message.
func (s *follower) announcedWhole(a *Announce, payload []byte, now time.Duration) []Effect {
	chunk := chunkHeader{Key: Key{a.Epoch, a.Version}, proof: checksum(a.Whole.CRC)}
	end := &End{Model: a.Model, Epoch: a.Epoch, Version: a.Version, Digest: a.Whole.Digest}
	effects := s.announced(a, nil, true, now)
	effects = append(effects, s.chunk(chunk, payload, nil, now, true)...)
	return append(effects, s.end(end, now)...)
}

// renamed handles a rename: the running version gets the key of a newer version with the same bytes,
// and nothing is fetched or applied. A rename is ignored if another version runs than it names, or
// while a version is ready or being applied.
func (s *follower) renamed(r *Rename, now time.Duration) []Effect {
	v, key := s.versions.inPhase(running), Key{r.Epoch, r.Version} // W25
	if v == nil || *v.running != r.Was || len(s.versions.inPhases(ready, applying)) > 0 || !key.Newer(s.versions.newest()) {
		return nil
	}
	if arrivingVersion := s.versions.inPhase(arriving); arrivingVersion != nil && arrivingVersion.Newer(key) {
		return nil
	}
	for _, older := range s.versions.inPhases(announced, arriving, staged) {
		s.versions.move(older, newer)
	}
	s.versions.rename(v, key)
	report := s.reportRunning(v)
	s.forgetFailure()
	return append([]Effect{report, Renamed{s.model, key, r.Metadata}}, s.changeMode(completed, now)...)
}

// begin starts to receive a version, or requests its layout if the layout is unknown.
func (s *follower) begin(v *versionEntry, now time.Duration) []Effect {
	a := v.announce
	if code, text := s.acceptance.fault(a); code != "" {
		return s.decline(v, code, text, now)
	}
	layout := s.acceptance.layout(a)
	if layout == nil {
		return s.planner.requestLayout(v.Key, now)
	}
	v.setLayout(layout)
	segment := s.segment(a)
	if segment == nil {
		v.resolve(known)
		return s.reserve(v, nil, now)
	}
	v.resolve(located)
	if a.Acknowledge == "applied" && a.Commit == "auto" && len(a.Companions) == 0 { // S6
		return s.applyFromSegment(v, segment, now)
	}
	v.resolve(opened)
	return s.reserve(v, segment, now)
}

// reserve assigns a staging buffer to a version and starts its transfer. If no buffer is free, resume
// starts the transfer later. segment is the shared memory that has the version, or nil.
func (s *follower) reserve(v *versionEntry, segment Segment, now time.Duration) []Effect {
	if segment != nil {
		defer segment.Release()
	}
	a := v.announce
	var effects []Effect
	if s.versions.move(s.versions.inPhase(arriving), newer) { // W8
		effects = s.changeMode(replaced, now)
	}
	enough, err := s.versions.takeMemory(v)
	if err != nil && s.versions.base != nil { // release the patch base to make room
		if !s.versions.setPatchBase(nil, nil) {
			return effects // a patch needs the base: decoded resumes this version
		}
		enough, err = s.versions.takeMemory(v)
	}
	if err != nil {
		text := fmt.Sprintf("there is no memory for %d bytes (%v): lower BytesMax, or make room", a.Bytes, err)
		return append(effects, s.decline(v, CodeNoMemory, text, now)...)
	}
	if !enough {
		return effects
	}
	t := s.patches.transfer(v, segment == nil && a.Whole == nil, now)
	s.versions.move(v, begun, t)
	s.forgetFailure()
	if segment != nil {
		v.copy(segment)
	}
	if a.Whole != nil {
		return effects
	}
	subscriptions := s.patches.listen(t, s.shared)
	if len(subscriptions) > 0 {
		t.pull() // chunks may have been pushed before the subscription
	}
	return append(append(effects, subscriptions...), fetches(t, now)...)
}

// segment opens and returns the shared memory of a version, or returns nil if the version must be
// received over the network.
func (s *follower) segment(a *Announce) Segment {
	if !s.shared || a.Shared == nil || s.networkOnly == (Key{a.Epoch, a.Version}) {
		return nil
	}
	return s.openSegment(a.Shared, a.Bytes)
}

// applyFromSegment makes a version ready that is copied into the model directly from its segment.
func (s *follower) applyFromSegment(v *versionEntry, segment Segment, now time.Duration) []Effect {
	for _, older := range s.versions.inPhases(arriving, staged) {
		s.versions.move(older, newer)
	}
	hash := int64(0)
	if v.announce.Hash { // S7
		hash = v.announce.ChunkBytes
	}
	version := &StagedVersion{Model: s.model, Key: v.Key, Layout: v.layout, Shared: true, segment: segment, hash: hash,
		Metadata: v.announce.Metadata}
	s.versions.move(v, mapped, version)
	s.forgetFailure()
	return append([]Effect{Ready{Version: version}}, s.changeMode(completed, now)...)
}

// changeMode applies an event to the mode. A change to following subscribes to pushed chunks and
// requests the latest version. A change to catching up unsubscribes.
func (s *follower) changeMode(event Event, now time.Duration) []Effect {
	if !s.versions.changeMode(event) {
		return nil
	}
	on := s.versions.mode == following
	effects := []Effect{Subscribe{s.patches.topic(), on && !s.shared}}
	if on {
		effects = append(effects, s.planner.requestLatest(s.versions.newest().Epoch, now, false)...)
	}
	return effects
}

// decline rejects a version for good, or drops it if a retry may help, and reports the reason.
func (s *follower) decline(v *versionEntry, code Code, text string, now time.Duration) []Effect {
	if triedAgain[code] { // W15
		s.versions.move(v, failed)
	} else {
		s.versions.move(v, declined)
	}
	return s.fail(v.Key, code, text, now)
}

// Chunks and ends.

// A chunkHeader is the header of a chunk, sealed or not. The proof of an unsealed chunk is its
// checksum; for a sealed chunk, the method chunk sets the proof.
type chunkHeader struct {
	Key
	index  int64
	proof  proof
	sealed *SealedChunk
	patch  *PatchID // the patch of which this is a chunk; nil for a chunk of the version itself
}

func chunkHeaderOf(c *Chunk) chunkHeader {
	return chunkHeader{Key{c.Epoch, c.Version}, c.Index, checksum(c.CRC), nil, c.Patch}
}

func sealedChunkHeaderOf(c *SealedChunk) chunkHeader {
	return chunkHeader{Key{c.Epoch, c.Version}, c.Index, nil, c, c.Patch}
}

// leaseFor returns a lease to receive the payload of a chunk, or nil if the chunk is not wanted.
func (s *follower) leaseFor(chunk chunkHeader, size int) *Lease {
	v := s.versions.find(chunk.Key, arriving)
	if v == nil || !v.transfer.matches(chunk.patch) || !v.transfer.fits(chunk.index, size) {
		return nil
	}
	var opening *Opening
	if chunk.sealed != nil {
		if opening = s.keyring.chunk(subjectOf(v.announce, v.transfer.patch), chunk.sealed, size); opening == nil {
			return nil
		}
	}
	return v.transfer.newLease(chunk.index, size, opening)
}

// chunk handles a received chunk.
func (s *follower) chunk(chunk chunkHeader, payload []byte, lease *Lease, now time.Duration, pushed bool) []Effect {
	v := s.versions.find(chunk.Key, arriving)
	if v == nil {
		return s.stray(chunk.Key, now)
	}
	t := v.transfer
	if !t.matches(chunk.patch) {
		return nil
	}
	if chunk.sealed != nil && lease == nil {
		opening := s.keyring.chunk(subjectOf(v.announce, t.patch), chunk.sealed, len(payload))
		if opening == nil { // the key is unknown: a hello requests it (E6), and a retry the chunk
			return nil
		}
		chunk.proof = opening
	}
	isNew := t.add(chunk.index, chunk.proof, payload, lease, now, pushed)
	effects := fetches(t, now)
	if isNew && pushed && t.reportDue(now) {
		effects = append(effects, progressReport(s.model, v))
	}
	return append(effects, s.finishIfComplete(v, now)...)
}

// end handles an end message, which has the version's digest.
func (s *follower) end(end *End, now time.Duration) []Effect {
	key := Key{end.Epoch, end.Version}
	v := s.versions.find(key, arriving)
	if v == nil {
		return s.stray(key, now)
	}
	if !v.transfer.matches(end.Patch) || v.transfer.arrival == decoded {
		return nil
	}
	v.transfer.end(end.Digest)
	return s.advance(v, now)
}

// stray handles a chunk or end message of a version that is not arriving.
func (s *follower) stray(key Key, now time.Duration) []Effect {
	if s.versions.inPhase(announced) != nil { // W4
		return nil
	}
	return s.planner.hearOf(key, now)
}

// advance returns the fetches that are due. If the version is complete, advance also verifies and stages it.
func (s *follower) advance(v *versionEntry, now time.Duration) []Effect {
	return append(fetches(v.transfer, now), s.finishIfComplete(v, now)...)
}

// finishIfComplete has no effect until all chunks and the digest have arrived. Then it verifies and
// stages the version, or starts to decode its patch.
func (s *follower) finishIfComplete(v *versionEntry, now time.Duration) []Effect {
	t := v.transfer
	switch { // W13
	case !t.complete():
		return nil
	case t.patch != nil:
		return s.patches.decode(v)
	case t.verify():
		return s.arrived(v, now)
	case t.Restarts < restartsMax:
		return nil // the next tick fetches the version again
	}
	text := fmt.Sprintf("the version did not match its digest, %d times", t.Restarts)
	return s.decline(v, CodeDigestMismatch, text, now)
}

// arrived stages a verified version. It also commits the version, unless the publisher will send a
// commit (Announce.Commit is "together").
func (s *follower) arrived(v *versionEntry, now time.Duration) []Effect {
	together := v.announce.Commit == "together" // W14
	version := &StagedVersion{Model: s.model, Key: v.Key, Layout: v.transfer.Layout, Digest: v.transfer.Digest,
		Shared: v.shared, Patch: v.transfer.patchID(), data: v.buffer, took: v.transfer.took,
		reportStaged: together || v.announce.Acknowledge == "staged", Metadata: v.announce.Metadata}
	s.versions.move(s.versions.inPhase(staged), newer)
	s.versions.move(v, whole, version)
	effects := stagedReports(s.model, v)
	if !together {
		effects = append(effects, s.commit(v)...)
	}
	return append(effects, s.changeMode(completed, now)...)
}

// decoded handles the result of decoding a patch. It stages the version or, if fault is not "",
// fetches the whole version.
func (s *follower) decoded(job *Patching, fault string, took, now time.Duration) []Effect {
	t, v := job.transfer, s.versions.inPhase(arriving)
	switch {
	case !job.isLive(): // the version was replaced or aborted
		s.versions.release(t)
		s.versions.buffers.giveBack(job.buffer)
		return s.resume(now)
	case fault != "":
		return s.patches.giveUp(v, fault, now)
	}
	s.versions.release(t)
	t.decoded(took)
	return s.arrived(v, now)
}

// commit makes a staged version ready. If the version has companions, companions.complete makes it
// ready later, together with these.
func (s *follower) commit(v *versionEntry) []Effect {
	if len(v.announce.Companions) > 0 {
		v.awaitCompanions()
		return nil
	}
	s.versions.move(v, committed)
	return []Effect{Ready{Version: v.staged}}
}

// committed handles the publisher's commit: it commits the staged version.
func (s *follower) committed(c *Commit) []Effect {
	v := s.versions.find(Key{c.Epoch, c.Version}, staged) // W14
	if v == nil || v.staged.Digest != c.Digest {
		return nil
	}
	return s.commit(v)
}

// aborted handles the publisher's abort: it drops the version.
func (s *follower) aborted(key Key, now time.Duration) []Effect {
	wasArriving := s.versions.find(key, arriving) != nil
	s.versions.move(s.versions.find(key, announced, arriving, staged), aborted) // W14
	s.planner.endBackoff(key)
	// The abort may have freed a buffer for a waiting version. If no version waits, a worker that
	// was receiving this version to catch up requests the latest version instead.
	effects := s.resume(now)
	if wasArriving && len(effects) == 0 && s.versions.mode == catchingUp && s.versions.inPhase(arriving) == nil { // W26
		return s.planner.requestLatest(key.Epoch, now, false)
	}
	return effects
}

// gone handles a refusal of a fetch: it drops the version, which the publisher no longer has. Version
// 0 means that the publisher has no version at all.
func (s *follower) gone(epoch, version int64, now time.Duration) []Effect {
	s.planner.endBackoff(Key{epoch, version})
	for _, v := range s.versions.inPhases(announced, arriving) {
		isAnnounced := v.phase == announced // W27
		isNamed := version == v.Version || version == 0 && isAnnounced
		otherEpoch := epoch != 0 && epoch != v.Epoch
		if !isNamed || otherEpoch || !s.versions.move(v, gone) || isAnnounced {
			continue
		}
		if effects := s.resume(now); len(effects) > 0 {
			return effects
		}
		return s.planner.requestLatest(v.Epoch, now, false)
	}
	return nil
}

// prepare handles a prepare message: it maps and prefaults the shared memory of the next version.
func (s *follower) prepare(p *Prepare) {
	if !s.shared || p.Bytes > s.acceptance.bytesMax {
		return
	}
	if segment := s.openSegment(&p.Shared, p.Bytes); segment != nil { // S11
		segment.Prefault()
		segment.Release()
	}
}

// The session.

// reconnected handles the start of a session. newest is the publisher's latest version. shared is
// true if versions are read from shared memory; if it is false, reconnected reserves a buffer of
// size bytes, the expected size of a version.
func (s *follower) reconnected(newest Key, size int64, shared bool, now time.Duration) []Effect {
	if s.shared = shared; !shared && size <= s.acceptance.bytesMax {
		s.versions.buffers.reserve(size)
	}
	s.versions.reconnected(newest.Epoch, now)
	if s.tornApplies > 1 {
		s.tornApplies = 1 // the failures of the previous session count as one
	}
	s.planner.reconnected()
	effects := stagedReports(s.model, s.versions.inPhases(ready, applying, staged)...)
	return append(effects, s.planner.hearOf(newest, now)...)
}

// Applying a ready version.

// applyStarted records that an apply started.
func (s *follower) applyStarted(key Key) { s.versions.move(s.versions.find(key, ready), taken) }

// applied marks a version as running, and returns the report. digest is "" if the version was not hashed.
func (s *follower) applied(key Key, digest string, now time.Duration) []Effect {
	v, older := s.versions.find(key, applying), s.versions.inPhase(running) // W16
	if v == nil {
		return nil
	}
	runs := &Running{Epoch: v.Epoch, Version: v.Version, Digest: digest}
	if s.patches.accepted && v.announce.Keep && !v.staged.Shared { // D3
		s.versions.setPatchBase(v, runs)
	} else {
		s.versions.setPatchBase(nil, nil)
	}
	s.versions.move(v, applied, runs)
	s.versions.move(older, newer)
	return append([]Effect{s.reportRunning(v)}, s.resume(now)...)
}

// failed handles a version that could not be applied, and returns the report. If intact is true, the
// previous version still runs; otherwise no version runs.
func (s *follower) failed(key Key, text string, intact bool, now time.Duration) []Effect {
	v, event := s.versions.find(key, applying), declined // W24
	if v == nil {
		return nil
	}
	if !intact { // the memory has parts of two versions; the next attempt is fetched and verified
		s.versions.move(s.versions.inPhase(running), torn)
		s.versions.setPatchBase(nil, nil)
		s.networkOnly = key
		s.raiseEpoch(key)
		if s.tornApplies++; s.tornApplies < appliesMax {
			event = torn
		}
	}
	s.versions.move(v, event)
	return append(s.fail(key, CodeApply, text, now), s.resume(now)...)
}

// failedWithCompanion handles a version that was not applied because a companion failed, and returns
// the report. again is true if the worker should receive the version again with its companion.
func (s *follower) failedWithCompanion(key Key, text string, intact, again bool, now time.Duration) []Effect {
	if !again {
		return withoutRejected(s.failed(key, text, intact, now))
	}
	if !s.versions.move(s.versions.find(key, applying), failed) {
		return nil
	}
	return append(withoutRejected(s.fail(key, CodeNoMemory, text, now)), s.resume(now)...)
}

// withoutRejected returns the effects without Rejected, the reports to the user.
func withoutRejected(effects []Effect) []Effect {
	var others []Effect
	for _, effect := range effects {
		if _, ok := effect.(Rejected); !ok {
			others = append(others, effect)
		}
	}
	return others
}

// gotStale drops a version that was overwritten in shared memory, and requests the latest version.
// If that is still the dropped version, it is received over the network. (S5)
func (s *follower) gotStale(key Key, now time.Duration) []Effect {
	if !s.versions.move(s.versions.find(key, applying), stale) {
		return nil
	}
	s.networkOnly = key
	return s.planner.requestLatest(key.Epoch, now, true)
}

// reportRunning records that a version runs, and returns the Applied report.
func (s *follower) reportRunning(v *versionEntry) Effect {
	s.tornApplies = 0
	s.raiseEpoch(v.Key)
	if f := s.failure; f != nil && !(Key{f.Epoch, f.Version}).Newer(v.Key) { // W17
		s.failure = nil
	}
	return appliedReport(s.model, v)
}

// raiseEpoch raises s.epoch to the epoch of a version, since bytes of it were written into the model.
func (s *follower) raiseEpoch(key Key) {
	if key.Epoch > s.epoch {
		s.epoch = key.Epoch
	}
}

// forgetFailure clears the last failure when another version starts. It keeps the failure of an
// apply that failed half-way.
func (s *follower) forgetFailure() {
	if s.tornApplies == 0 {
		s.failure = nil // W17
	}
}

// fail records a failed version, and returns its reports: one to the publisher, one to the user. If a
// retry may help, it postpones the version.
func (s *follower) fail(key Key, code Code, text string, now time.Duration) []Effect {
	if triedAgain[code] {
		s.planner.backOff(key, now)
	}
	text = truncate(text, TextMax)
	s.failure = &Failed{Model: s.model, Epoch: key.Epoch, Version: key.Version, Code: code, Text: text}
	return append(s.failureReport(), Rejected{s.model, key, code, text})
}

// failureReport returns the report of the last failure, or nothing if there is none to report.
func (s *follower) failureReport() []Effect {
	if s.failure == nil {
		return nil
	}
	return []Effect{failedReport(s.failure, s.tornApplies == 0)}
}

// dropped drops a version that was replaced by a newer one before it was applied.
func (s *follower) dropped(key Key, now time.Duration) []Effect {
	if !s.versions.move(s.versions.find(key, ready, applying), newer) {
		return nil
	}
	return s.resume(now)
}

// resume starts the announced version that waits for a buffer, unless a version is arriving.
func (s *follower) resume(now time.Duration) []Effect {
	waiting := s.versions.inPhase(announced)
	if waiting == nil || s.versions.inPhase(arriving) != nil {
		return nil
	}
	if !waiting.Newer(s.versions.newest()) {
		s.versions.move(waiting, newer)
		return nil
	}
	if waiting.lacks != aBuffer {
		return nil
	}
	return s.reserve(waiting, s.segment(waiting.announce), now)
}

// Time.

// tick returns the requests that are due, and declines a version that makes no progress.
func (s *follower) tick(now time.Duration) []Effect {
	if v := s.versions.inPhase(arriving); v != nil {
		if v.transfer.isExhausted() && v.transfer.patch != nil {
			return s.patches.giveUp(v, "no more of its chunks arrive", now)
		}
		if v.transfer.isExhausted() { // W12
			return s.decline(v, CodeDigestMismatch, nothingFits, now)
		}
		return s.advance(v, now)
	}
	v := s.versions.inPhase(announced)
	if v == nil || v.lacks != aLayout {
		return s.resume(now)
	}
	if !s.planner.isDue(now) {
		return nil
	}
	return s.begin(v, now)
}

// repeat returns all current reports again, in case an earlier one was lost.
func (s *follower) repeat() []Effect { return currentReports(s.model, s.versions, s.failureReport()) } // W17

// ControlTopic returns the topic of a model's announcements, ends and beacons.
func ControlTopic(model string) string { return model + "/ctl" }

// DataTopic returns the topic of a model's chunks.
func DataTopic(model string) string { return model + "/dat" }

// PatchTopic returns the topic of the chunks and ends of a model's patches.
func PatchTopic(model string) string { return model + "/dlt" }

package wbp

import (
	"fmt"
	"strings"
	"time"
)

// A Model is a WorkerMachine's configuration of one model.
type Model struct {
	Mismatch func(layout *Layout) string // returns why a layout cannot be applied; "" if it can
	Bytes    int64                       // expected size of a version, 0 if unknown

	LayoutBytes int64 // size of the largest layout of the registered tensors, 0 if unknown
}

// A WorkerMachine is the state machine of one worker.
//
// Its session is in one of the states outside (no session), probing (whether the publisher's shared memory can
// be read) and inside (tables.go). Inside, each message goes to the follower of its model. Outside, the worker
// keeps its staged and running versions and repeats hello, so that it rejoins a publisher that restarts.
type WorkerMachine struct {
	Malformed int // number of dropped malformed messages

	identity        Identity
	timing          Timing
	followers       map[string]*follower
	models          map[string]Model
	openSegment     OpenSegment
	keyring         *Keyring // nil without keys
	session         State
	epoch           int64
	ages            ages
	shared          bool          // the publisher's shared memory can be read
	data            string        // the data endpoint; "" before the first welcome from an address
	subscribed      bool          // a published message arrived in this session
	heardAt         time.Duration // when the last message of this session was received
	answeredAt      time.Duration // when the last control message was received
	helloAt         time.Duration
	unansweredSince time.Duration // when the first unanswered hello was sent; never if there is none
	unheardSince    time.Duration // start of the session; never once a message was published or Unheard returned
	pingedAt        time.Duration
	pingEvery       time.Duration
	spare           []byte // reusable memory for payloads of announcements
}

const spareMax = 1 << 20 // largest size in bytes of memory that is kept as spare

// NewWorkerMachine returns a machine without a session. If opens is nil, the shared-memory
// transport is disabled.
func NewWorkerMachine(id Identity, models map[string]Model, bytesMax int64, timing Timing, openSegment OpenSegment) *WorkerMachine {
	m := &WorkerMachine{
		identity: id, models: models, timing: timing, followers: map[string]*follower{}, openSegment: openSegment, ages: ages{}, session: outside,
		helloAt: never, unansweredSince: never, unheardSince: never, pingedAt: never, pingEvery: timing.Ping,
	}
	if id.Keyed {
		m.keyring = NewKeyring()
	}
	for name, model := range models {
		m.followers[name] = newFollower(name, model, bytesMax, &m.timing, m.openSegment, m.keyring, id.Patches)
	}
	return m
}

// withCompanions appends the effect that hands over the committed versions that no longer wait for a
// companion, if there are any.
func (m *WorkerMachine) withCompanions(effects []Effect) []Effect {
	return append(effects, companions{m.followers}.complete()...)
}

func (m *WorkerMachine) inSession() bool { return m.session == inside }

func (m *WorkerMachine) changeSession(event Event) {
	if next := sessionTable[m.session][event]; next != "" {
		m.session = next
	}
}

// Messages from the publisher.

// Receive processes a message of the control channel. It drops and counts a malformed message.
func (m *WorkerMachine) Receive(frames [][]byte, lease *Lease, now time.Duration) []Effect {
	return m.receive(frames, lease, now, false)
}

// ReceivePublished processes a published message. The first frame is the topic.
func (m *WorkerMachine) ReceivePublished(frames [][]byte, lease *Lease, now time.Duration) []Effect {
	if !m.inSession() || len(frames) == 0 {
		m.endLease(lease)
		return nil
	}
	var effects []Effect
	if !m.subscribed { // the first published message proves that the subscription is active: W18
		m.subscribed, m.unheardSince = true, never
		effects = append(effects, ping(now, m.subscribed, m.shared))
	}
	return append(effects, m.receive(frames[1:], lease, now, true)...)
}

// LeaseFor returns a lease to receive a payload of size bytes, given the message's header. It returns
// nil if the payload is not wanted: the caller then drops the payload, and passes the message to the
// machine with an empty payload.
func (m *WorkerMachine) LeaseFor(header []byte, size int) *Lease {
	message, err := Decode(header, 1)
	if err != nil || !m.inSession() {
		return nil
	}
	if m.keyring != nil {
		message = m.keyring.Published(message, 1, false)
	}
	switch message := message.(type) {
	case *Chunk:
		if s := m.followers[message.Model]; s != nil && message.Epoch == m.epoch {
			return s.leaseFor(chunkHeaderOf(message), size)
		}
	case *SealedChunk:
		if s := m.followers[message.Model]; s != nil && message.Epoch == m.epoch && m.keyring != nil {
			return s.leaseFor(sealedChunkHeaderOf(message), size)
		}
	case *Announce:
		if s := m.followers[message.Model]; s != nil && message.Epoch == m.epoch && s.acceptance.allowsPayload(message, size) {
			return m.leaseSpare(size)
		}
	}
	return nil
}

// leaseSpare returns a lease of size bytes for the payload of an announcement, with room for an
// authentication tag after the bytes. endLease must be called once the message was processed.
func (m *WorkerMachine) leaseSpare(size int) *Lease {
	memory := m.spare
	m.spare = nil
	if cap(memory) < size+TagBytes {
		memory = make([]byte, size+TagBytes)
	}
	return &Lease{view: memory[:size]}
}

// endLease ends a lease after its message was processed. It cancels an unused lease of a transfer,
// and keeps the memory of a lease from leaseSpare for reuse.
func (m *WorkerMachine) endLease(lease *Lease) {
	switch {
	case lease == nil:
	case lease.owner != nil:
		lease.Cancel()
	case cap(lease.view) <= spareMax:
		m.spare = lease.view
	}
}

func (m *WorkerMachine) receive(frames [][]byte, lease *Lease, now time.Duration, pushed bool) []Effect {
	defer m.endLease(lease)
	if len(frames) == 0 {
		m.Malformed++
		return nil
	}
	message, err := Decode(frames[0], len(frames)-1)
	if err != nil { // W21
		m.Malformed++
		return nil
	}
	if pushed && m.keyring != nil {
		message = m.keyring.Published(message, len(frames)-1, true)
	}
	if !pushed {
		m.answeredAt, m.unansweredSince = now, never
	}
	if m.ignores(message, pushed) {
		return nil
	}
	switch message := message.(type) {
	case *Welcome:
		if pushed {
			return nil
		}
		return m.welcome(message, now)
	case *Ping: // W18
		return []Effect{Send{&Pong{Token: message.Token, Models: map[string]int64{}}}}
	case *Refuse:
		m.heardAt = now
		return m.refused(message, now)
	}
	epoch, model := subject(message)
	switch {
	case !m.inSession():
		return nil
	case epoch != m.epoch:
		// The publisher restarted, or the welcome was damaged: the answer to a new hello has the
		// right epoch (W3).
		return m.helloIfDue(now)
	}
	m.heardAt = now
	switch message := message.(type) {
	case *Pong:
		for _, s := range m.followers {
			s.planner.answered(time.Duration(message.Token) * time.Millisecond)
		}
		return m.hearOf(message.Models, now)
	case *Rekey:
		m.keyring.add(message.Keys, now+m.timing.LostAfter) // E6
		return nil
	}
	if s := m.followers[model]; s != nil {
		payloads, authentic := m.decryptPayload(message, frames[1:])
		if !authentic {
			return nil // the version is fetched later (E4)
		}
		return m.withCompanions(s.receive(message, payloads, lease, now, pushed || m.isWholeVersion(message)))
	}
	return nil
}

// ignores reports whether to ignore a message: a message that was not decrypted, a sealed message or a
// rekey if this worker has no keys, and a chunk in the clear if it has keys. (E1) A pushed sealed
// chunk of a version that is not arriving is also ignored, since its header is not authenticated. (E4)
func (m *WorkerMachine) ignores(message Message, pushed bool) bool {
	switch message := message.(type) {
	case nil, *SealedMessage: // Keyring.Published did not decrypt it
		return true
	case *Chunk:
		return m.keyring != nil
	case *SealedChunk:
		return m.keyring == nil || pushed && !m.isArriving(message)
	case *Rekey:
		return m.keyring == nil
	}
	return false
}

func (m *WorkerMachine) isArriving(chunk *SealedChunk) bool {
	s := m.followers[chunk.Model]
	return s != nil && s.versions.find(Key{chunk.Epoch, chunk.Version}, arriving) != nil
}

// decryptPayload returns the payloads of a message, decrypted if the message is a sealed
// announcement. authentic is false if the announcement's layout is not authentic.
func (m *WorkerMachine) decryptPayload(message Message, payloads [][]byte) (plain [][]byte, authentic bool) {
	a, ok := message.(*Announce)
	if !ok || m.keyring == nil || len(payloads) == 0 {
		return payloads, true
	}
	if a.Encryption == nil || *a.Encryption != AES256GCM { // declined later
		if a.Whole == nil {
			return nil, true
		}
		return [][]byte{nil}, true
	}
	bytes, authentic := m.keyring.payload(a, payloads[0])
	return [][]byte{bytes}, authentic
}

// isWholeVersion reports whether a message contains a whole version. Such a message counts as
// pushed, even if it came on the control channel.
func (m *WorkerMachine) isWholeVersion(message Message) bool {
	a, ok := message.(*Announce)
	return ok && a.Whole != nil
}

// subject returns the epoch and model of a message.
func subject(message Message) (epoch int64, model string) {
	switch message := message.(type) {
	case *Pong:
		return message.Epoch, ""
	case *Announce:
		return message.Epoch, message.Model
	case *Chunk:
		return message.Epoch, message.Model
	case *SealedChunk:
		return message.Epoch, message.Model
	case *Rekey:
		return message.Epoch, ""
	case *End:
		return message.Epoch, message.Model
	case *Commit:
		return message.Epoch, message.Model
	case *Abort:
		return message.Epoch, message.Model
	case *Prepare:
		return message.Epoch, message.Model
	case *Rename:
		return message.Epoch, message.Model
	case *Beacon:
		return message.Epoch, message.Model
	}
	panic(fmt.Sprintf("no publisher sends a %s", message.Kind()))
}

// receive handles a message about this model, of the session's epoch.
func (s *follower) receive(message Message, payloads [][]byte, lease *Lease, now time.Duration, pushed bool) []Effect {
	switch message := message.(type) {
	case *Announce:
		if message.Whole != nil {
			return s.announcedWhole(message, payloads[0], now)
		}
		var layout []byte
		if len(payloads) > 0 {
			if layout = payloads[0]; layout == nil {
				layout = []byte{}
			}
		}
		return s.announced(message, layout, pushed && !s.shared, now)
	case *Chunk:
		return s.chunk(chunkHeaderOf(message), payloads[0], lease, now, pushed)
	case *SealedChunk:
		return s.chunk(sealedChunkHeaderOf(message), payloads[0], lease, now, pushed)
	case *End:
		return s.end(message, now)
	case *Commit:
		return s.committed(message)
	case *Abort:
		return s.aborted(Key{message.Epoch, message.Version}, now)
	case *Prepare:
		s.prepare(message)
	case *Rename:
		return s.renamed(message, now)
	case *Beacon:
		return s.planner.hearOf(Key{message.Epoch, message.Version}, now)
	}
	return nil
}

func (m *WorkerMachine) hearOf(versions map[string]int64, now time.Duration) []Effect {
	var effects []Effect
	for model, version := range versions {
		if s := m.followers[model]; s != nil {
			effects = append(effects, s.planner.hearOf(Key{m.epoch, version}, now)...)
		}
	}
	return effects
}

func (m *WorkerMachine) refused(r *Refuse, now time.Duration) []Effect {
	text := Printable(r.Text, 0)
	switch r.Code {
	case CodeUnknownWorker:
		m.changeSession(unknown) // W20
		return m.helloIfDue(now)
	case CodeGone, CodeRange: // W27
		if m.inSession() && r.Model != nil && m.followers[*r.Model] != nil {
			return m.followers[*r.Model].gone(r.Epoch, r.Version, now)
		}
		return nil
	case CodeNoPatch:
		if m.inSession() && r.Model != nil && m.followers[*r.Model] != nil {
			return m.followers[*r.Model].patches.refused(Key{r.Epoch, r.Version}, now)
		}
		return nil
	}
	if endsSession[r.Code] {
		m.changeSession(refused) // W20, K8
	}
	return []Effect{Refused{r.Code, text}}
}

// Joining.

// appliedEpoch returns the latest epoch whose versions were written into a model, even in part. The
// worker does not join a publisher of an earlier epoch.
func (m *WorkerMachine) appliedEpoch() int64 {
	var latest int64
	for _, s := range m.followers {
		if s.epoch > latest {
			latest = s.epoch
		}
	}
	return latest
}

// helloIfDue returns a hello, or nothing if the last hello was sent less than HelloRetry ago.
func (m *WorkerMachine) helloIfDue(now time.Duration) []Effect {
	if now-m.helloAt < m.timing.HelloRetry {
		return nil
	}
	m.helloAt = now // W1
	if m.unansweredSince == never {
		m.unansweredSince = now
	}
	models := map[string]*Running{}
	for name, s := range m.followers {
		models[name] = s.running()
	}
	epoch := m.appliedEpoch()
	return []Effect{m.identity.hello(models, epoch, m.ages.of(epoch, now), m.openSegment != nil)}
}

func (m *WorkerMachine) welcome(w *Welcome, now time.Duration) []Effect {
	if latest := m.appliedEpoch(); w.Epoch < latest { // W2
		return []Effect{Refused{CodeStaleEpoch, fmt.Sprintf("the publisher is of epoch %d, but this worker runs "+
			"weights of the later epoch %d: connect it to the newer publisher", w.Epoch, latest)}}
	}
	m.ages.record(w.Epoch, w.AgeMS, m.appliedEpoch(), now)
	if m.inSession() && w.Epoch == m.epoch { // the answer to a second hello: W29
		m.heardAt = now
		var effects []Effect
		if m.keyring != nil {
			m.keyring.add(w.Keys, now+m.timing.LostAfter)
		}
		if ticket := ticketOf(w); ticket != "" {
			effects = append(effects, Connect{m.data, ticket})
		}
		return append(effects, m.hearOf(w.Models, now)...)
	}
	m.shared = m.probe(w.Shared) // S2
	m.changeSession(welcomed)    // W28
	m.epoch, m.heardAt, m.subscribed, m.unheardSince = w.Epoch, now, false, now
	m.pingEvery = m.timing.Ping
	if requested := time.Duration(w.PingMS) * time.Millisecond; requested < m.pingEvery {
		m.pingEvery = requested
	}
	if m.keyring != nil {
		m.keyring.Begin(w.Keys, now+m.timing.LostAfter)
	}
	effects := []Effect{Joined{w.Epoch}}
	if ticket := ticketOf(w); ticket != "" || w.Data != m.data { // K7
		m.data = w.Data
		effects = append(effects, Connect{w.Data, ticket})
	}
	if m.shared { // ping before the publisher pushes or hashes anything for this worker
		effects = append(effects, ping(now, m.subscribed, m.shared))
	}
	for name, s := range m.followers {
		effects = append(effects, Subscribe{ControlTopic(name), true},
			Subscribe{s.patches.topic(), s.versions.mode == following && !m.shared}) // W26, S8
		effects = append(effects, s.reconnected(Key{w.Epoch, w.Models[name]}, m.models[name].Bytes, m.shared, now)...)
	}
	return effects
}

// ticketOf returns the ticket of a welcome; "" if the welcome has no ticket.
func ticketOf(w *Welcome) string {
	for _, feature := range w.Features {
		if digits := strings.TrimPrefix(feature, Ticket+"."); digits != feature && isHex(digits, 32) {
			return digits
		}
	}
	return ""
}

// WithoutTicket must be called when the data connection needs a new ticket. It returns a hello if
// one is due: the publisher's answer contains a ticket.
func (m *WorkerMachine) WithoutTicket(now time.Duration) []Effect {
	if !m.inSession() {
		return nil
	}
	return m.helloIfDue(now) // K7
}

// HandshakeFailed must be called when a handshake of the control channel failed, most likely because
// of keys. why is the error message.
func (m *WorkerMachine) HandshakeFailed(why string) []Effect {
	m.changeSession(refused) // K5
	return []Effect{Refused{CodeKeys, why}}
}

// probe reports whether the publisher's shared memory can be read.
func (m *WorkerMachine) probe(shared *Shared) bool {
	if shared == nil || m.openSegment == nil {
		return false
	}
	m.changeSession(located)
	segment := m.openSegment(shared, 0)
	if segment != nil {
		segment.Release()
	}
	return segment != nil
}

// Connected must be called repeatedly while the control channel is connected. isNew is true if the
// connection is new, so that the publisher does not know the worker yet. Without a session, Connected
// returns a hello: at once on a new connection, then at intervals until the publisher answers.
func (m *WorkerMachine) Connected(isNew bool, now time.Duration) []Effect {
	if isNew {
		m.changeSession(unknown)
		m.helloAt, m.unansweredSince = never, never
	}
	if m.session != outside {
		return nil
	}
	return m.helloIfDue(now)
}

// Moved must be called when the worker changes over to another control address. It ends the session,
// and forgets the publisher's data endpoint and unanswered hellos. The versions stay.
func (m *WorkerMachine) Moved() {
	m.changeSession(silent)
	m.helloAt, m.unansweredSince, m.data = never, never, ""
}

// redialIfUnanswered returns Redial if a hello was not answered for LostAfter: the connections may
// be dead, which TCP detects late.
func (m *WorkerMachine) redialIfUnanswered(now time.Duration) []Effect {
	if m.unansweredSince == never || now-m.unansweredSince < m.timing.LostAfter {
		return nil
	}
	m.unansweredSince = never
	return []Effect{Redial{}}
}

// Close returns a bye, even without a session, since the publisher may have received a hello
// already. It also drops arriving versions, so that the decoding of their patches ends soon.
func (m *WorkerMachine) Close() []Effect {
	for _, s := range m.followers {
		s.versions.move(s.versions.inPhase(arriving), newer)
	}
	return []Effect{Send{&Bye{}}} // W22
}

// Free releases the staging memory. It may be called only when no version is in use and no patch is
// being decoded. Afterwards no other method may be called.
func (m *WorkerMachine) Free() {
	for _, s := range m.followers {
		s.versions.free()
	}
}

// Decoded must be called when the decoding of a patch has ended. fault is the reason that the patch
// is unusable, or "". took is the duration of the decoding.
func (m *WorkerMachine) Decoded(job *Patching, fault string, took, now time.Duration) []Effect {
	return m.withCompanions(m.followers[job.Model].decoded(job, fault, took, now))
}

// Applying a ready version.

// ApplyStarted must be called when an apply starts.
func (m *WorkerMachine) ApplyStarted(v *StagedVersion) { m.followers[v.Model].applyStarted(v.Key) }

// Applied must be called when a version was applied. digest is "" if the version was not hashed.
func (m *WorkerMachine) Applied(v *StagedVersion, digest string, now time.Duration) []Effect {
	return m.withCompanions(m.followers[v.Model].applied(v.Key, digest, now))
}

// Stale must be called when a version was overwritten in shared memory.
func (m *WorkerMachine) Stale(v *StagedVersion, now time.Duration) []Effect {
	return m.withCompanions(m.followers[v.Model].gotStale(v.Key, now))
}

// Failed must be called when a version could not be applied. intact means that the previous version
// still runs; otherwise no version runs.
func (m *WorkerMachine) Failed(v *StagedVersion, text string, intact bool, now time.Duration) []Effect {
	return m.withCompanions(m.followers[v.Model].failed(v.Key, text, intact, now))
}

// FailedWithCompanion must be called when a version was not applied because a companion failed.
// again is true if the worker should receive the version again with its companion.
func (m *WorkerMachine) FailedWithCompanion(v *StagedVersion, text string, intact, again bool, now time.Duration) []Effect {
	return m.withCompanions(m.followers[v.Model].failedWithCompanion(v.Key, text, intact, again, now))
}

// Dropped must be called when a version was replaced by a newer one before it was applied.
func (m *WorkerMachine) Dropped(v *StagedVersion, now time.Duration) []Effect {
	return m.withCompanions(m.followers[v.Model].dropped(v.Key, now))
}

// Time.

// unheard returns Unheard, once per session, if no published message arrived for LostAfter.
func (m *WorkerMachine) unheard(now time.Duration) []Effect {
	if m.unheardSince == never || now-m.unheardSince < m.timing.LostAfter {
		return nil
	}
	m.unheardSince = never // W33
	return []Effect{Unheard{Printable(m.data, 0)}}
}

// Tick returns the effects that are due: retries, pings, repeated reports.
func (m *WorkerMachine) Tick(now time.Duration) []Effect {
	if m.keyring != nil {
		m.keyring.expire(now)
	}
	if m.session == outside {
		return m.redialIfUnanswered(now)
	}
	// After a frame with a damaged length, the next messages are read as part of that frame, so
	// that no control message arrives.
	noControl := now-m.answeredAt >= m.timing.DeafAfter
	if noControl || now-m.heardAt >= m.timing.LostAfter {
		m.changeSession(silent) // W19
		m.unansweredSince = never
		return []Effect{Lost{}, Redial{}}
	}
	if !m.inSession() {
		return nil
	}
	effects := m.unheard(now)
	// A version of a later publisher may have been applied after the worker joined this one (W3).
	appliedLater := m.appliedEpoch() > m.epoch
	if appliedLater || m.keyring != nil && m.keyring.needsKey() {
		effects = append(effects, m.helloIfDue(now)...) // the answer has the key (E6)
	}
	for _, s := range m.followers {
		effects = append(effects, s.tick(now)...)
	}
	effects = m.withCompanions(effects)
	if now-m.pingedAt >= m.pingEvery { // W17, W18
		m.pingedAt = now
		effects = append(effects, ping(now, m.subscribed, m.shared))
		for _, s := range m.followers {
			effects = append(effects, s.repeat()...)
		}
	}
	return effects
}

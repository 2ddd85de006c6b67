package weightbus

import (
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const (
	tickInterval = 100 * time.Millisecond
	eventsMax    = 64 // queued events; the oldest are dropped first

	defectInterval = time.Second // shortest time between two Defect events, since panics may come in a flood
)

// A loop connects a worker's state machine and its transport. Its lock guards both. The lock is
// taken by connections that received a message, by the ticker, and by user goroutines that report
// the outcome of an apply. It is never held while waiting.
type loop struct {
	sync.Mutex
	machine     *wbp.WorkerMachine
	transport   transport
	queue       *readyQueue
	sites       []site
	route       *route
	pausing     bool          // the pause after a round of failures lasts until route.movedAt
	refusal     *RefusedError // the latest one in this round, if another address may accept the worker
	name        string
	lostAfter   time.Duration
	anyDataHost bool // allow a data endpoint on another host
	defects     int  // panics since the last Defect event
	reportedAt  time.Time
	onRenamed   func(model string, key wbp.Key, metadata map[string]string)
	handshakes  []handshakes // of each site
	started     time.Time
	events      chan Event
	stats       Stats // except Malformed, which the machine counts
	stop        chan struct{}
	stopped     sync.WaitGroup
	decoding    sync.WaitGroup
	closed      bool
}

// run starts the loop. connect must return the loop's transport.
func (l *loop) run(connect func(transportHandler) transport) {
	l.Lock()
	l.transport = connect(l)
	l.Unlock()
	l.stopped.Add(1)
	go l.runTicker()
}

// now returns the machine's time.
func (l *loop) now() time.Duration { return time.Since(l.started) }

func (l *loop) runTicker() {
	defer l.stopped.Done()
	clock := time.NewTicker(tickInterval)
	defer clock.Stop()
	for {
		select {
		case <-l.stop:
			return
		case now := <-clock.C:
			l.Lock()
			l.recovering(func() { l.onTick(now) })
			l.Unlock()
		}
	}
}

// onTick does the periodic work of the transport and the machine. The caller holds the lock.
func (l *loop) onTick(now time.Time) {
	connected := l.transport.tick(now)
	if connected {
		l.perform(l.machine.Connected(false, l.now()))
	}
	if l.route.hasSeveral() {
		l.followRoute(connected)
	}
	if l.transport.wantsTicket() {
		l.perform(l.machine.WithoutTicket(l.now()))
	}
	l.perform(l.machine.Tick(l.now()))
}

// followRoute dials the current address after a pause, moves on from an address that does not
// answer within lostAfter, and probes the first address when a probe is due.
func (l *loop) followRoute(connected bool) {
	since := l.now() - l.route.movedAt
	switch {
	case since < 0:
	case l.pausing:
		l.pausing = false
		l.transport.dial(l.sites[l.route.current])
	case !connected && since >= l.lostAfter:
		l.changeOver("there is no connection to it")
	case l.route.probeIsDue(l.now()):
		l.transport.probe(l.sites[0])
	}
}

// changeOver ends the session, if there is one, and goes on to the next address.
func (l *loop) changeOver(why string) {
	from := l.route.address()
	wait := l.route.failed(l.now())
	if wait > 0 && l.refusal != nil { // no address accepts the worker
		l.queue.refuse(l.refusal)
		l.refusal = nil
	}
	l.move(from, why, wait > 0)
}

// move leaves the address from, and dials the current address of the route: at once, or after the
// pause if pause is true.
func (l *loop) move(from, why string, pause bool) {
	l.queueEvent(Event{Kind: Moved, Text: fmt.Sprintf("this worker changes over from %s to %s: %s", from, l.route.address(), why)})
	l.machine.Moved()
	l.transport.leave()
	if l.pausing = pause; !pause {
		l.transport.dial(l.sites[l.route.current])
	}
}

// probed returns to the first address if a publisher answers there.
func (l *loop) probed(answers bool) {
	l.Lock()
	defer l.Unlock()
	from := l.route.address()
	if l.closed || !l.route.probed(answers, l.now()) {
		return
	}
	l.perform([]wbp.Effect{wbp.Send{Message: &wbp.Bye{}}})
	l.move(from, "the first address answers again", false)
}

// recovering calls work and recovers from a panic in it, since no message may end the process. The
// caller holds the lock.
func (l *loop) recovering(work func()) {
	defer func() {
		if cause := recover(); cause != nil {
			l.recordDefect(cause)
		}
	}()
	work()
}

// recordDefect returns the text of a panic. It queues a Defect event, unless it queued one less than
// defectInterval ago.
func (l *loop) recordDefect(cause interface{}) string {
	text := wbp.Printable(fmt.Sprintf("%v; %s", cause, debug.Stack()), 0)
	l.defects++
	if now := time.Now(); now.Sub(l.reportedAt) >= defectInterval {
		times := l.defects
		l.reportedAt, l.defects = now, 0
		l.queueEvent(Event{Kind: Defect, Text: fmt.Sprintf("this worker failed on one message (of %d since the last report), and goes on: "+
			"please report it: %s", times, text)})
	}
	return text
}

// close sends bye and stops the loop. It does not wait for an apply.
func (l *loop) close() {
	close(l.stop)
	l.stopped.Wait()
	l.Lock()
	l.perform(l.machine.Close())
	l.closed = true
	l.Unlock()
	l.transport.close()
	l.queue.close()
	l.decoding.Wait()
}

// Methods that the transport calls.

func (l *loop) connected() {
	l.handshakes[l.route.current].succeeded()
	l.perform(l.machine.Connected(true, l.now()))
}

// leaseFor returns a lease for a payload that is about to be received, or nil to discard the payload.
func (l *loop) leaseFor(header []byte, size int) (lease *wbp.Lease) {
	l.recovering(func() { lease = l.machine.LeaseFor(header, size) })
	return lease
}

func (l *loop) received(frames [][]byte, lease *wbp.Lease) {
	l.recovering(func() { l.perform(l.machine.Receive(frames, lease, l.now())) })
}

func (l *loop) published(frames [][]byte, lease *wbp.Lease) {
	l.recovering(func() { l.perform(l.machine.ReceivePublished(frames, lease, l.now())) })
}

// broke queues an event for a connection that broke, or an attempt to connect that failed.
func (l *loop) broke(err error) {
	l.queueEvent(Event{Kind: Disconnected, Text: wbp.Printable(err.Error(), 0)})
}

func (l *loop) disconnected(err error) {
	if why := l.handshakes[l.route.current].keyFault(err, l.now()); why != "" {
		l.perform(l.machine.HandshakeFailed(why))
		return
	}
	l.broke(err)
	if l.route.hasSeveral() {
		l.changeOver(wbp.Printable(err.Error(), 0))
	}
}

// Outcomes of an apply.

func (l *loop) applyStarted(v *wbp.StagedVersion) {
	l.Lock()
	defer l.Unlock()
	l.machine.ApplyStarted(v)
}

func (l *loop) applied(v *wbp.StagedVersion, digest string) {
	l.Lock()
	defer l.Unlock()
	l.stats.Applied++
	if v.Shared {
		l.stats.SharedBytes += v.Layout.Bytes
	} else {
		l.stats.NetworkBytes += v.Layout.Bytes
	}
	l.perform(l.machine.Applied(v, digest, l.now()))
}

func (l *loop) stale(v *wbp.StagedVersion) {
	l.Lock()
	defer l.Unlock()
	l.perform(l.machine.Stale(v, l.now()))
}

func (l *loop) failed(v *wbp.StagedVersion, text string, intact bool) {
	l.Lock()
	defer l.Unlock()
	l.perform(l.machine.Failed(v, text, intact, l.now()))
}

// failedWithCompanion reports a version that was not applied because a companion failed.
func (l *loop) failedWithCompanion(v *wbp.StagedVersion, text string, intact, again bool) {
	l.Lock()
	defer l.Unlock()
	l.perform(l.machine.FailedWithCompanion(v, text, intact, again, l.now()))
}

// failedForNow reports a failed version that the worker receives again: the model keeps its previous
// version, but a companion has no version now.
func (l *loop) failedForNow(v *wbp.StagedVersion, text string) {
	l.failedWithCompanion(v, text, true, true)
	l.Lock()
	defer l.Unlock()
	l.perform([]wbp.Effect{wbp.Rejected{Model: v.Model, Key: v.Key, Code: CodeApply, Text: text}})
}

func (l *loop) dropped(v *wbp.StagedVersion) {
	l.Lock()
	defer l.Unlock()
	l.perform(l.machine.Dropped(v, l.now()))
}

// perform carries out effects of the machine. The caller holds the lock.
func (l *loop) perform(effects []wbp.Effect) {
	if l.closed {
		return
	}
	for _, effect := range effects {
		switch effect := effect.(type) {
		case wbp.Send:
			l.transport.send(wbp.Encode(effect.Message))
		case wbp.Subscribe:
			l.transport.subscribe(effect.Topic, effect.On)
		case wbp.Connect:
			l.listen(effect.Endpoint, effect.Ticket)
		case wbp.Redial:
			if l.route.hasSeveral() {
				l.changeOver("its publisher is silent")
			} else {
				l.transport.redial()
			}
		case wbp.DecodePatch:
			l.decoding.Add(1)
			go l.decode(effect.Job)
		case wbp.Unpatched:
			l.queueEvent(Event{Kind: Unpatched, Text: fmt.Sprintf("version %d of %s is fetched as a whole, not patched: %s",
				effect.Key.Version, effect.Model, effect.Why)})
		case wbp.Ready:
			for _, older := range l.queue.put(append(group{effect.Version}, effect.Others...)) {
				l.perform(l.machine.Dropped(older, l.now()))
			}
		case wbp.Rejected:
			l.stats.Failed++
			l.queue.reject(rejection{effect.Model, effect.Key, effect.Code}, &ApplyError{
				effect.Model, effect.Key.Epoch, effect.Key.Version, effect.Code, effect.Text})
		case wbp.Renamed:
			l.onRenamed(effect.Model, effect.Key, effect.Metadata)
		case wbp.Joined:
			l.refusal = nil
			l.route.joined(l.now())
			l.queue.join(effect.Epoch)
			l.queueEvent(Event{Kind: Joined, Epoch: effect.Epoch})
		case wbp.Lost:
			l.queueEvent(Event{Kind: Lost, Text: "the publisher is silent"})
		case wbp.Unheard:
			l.queueEvent(Event{Kind: Unheard, Text: "no published message arrives from " + effect.Endpoint + ", so everything " +
				"is fetched: does a firewall block the endpoint?"})
		case wbp.Refused:
			l.queueEvent(Event{Kind: Refused, Code: effect.Code, Text: effect.Text})
			l.refused(effect)
		}
	}
}

// refused passes a refusal on to the user. If the worker has several addresses and the refusal turns it away,
// refused goes on to the next address instead: the user gets an error only if all addresses have failed.
func (l *loop) refused(by wbp.Refused) {
	refusal := &RefusedError{Address: l.route.address(), Name: l.name, Code: by.Code, Text: by.Text}
	if !l.route.hasSeveral() || !by.TurnsAway() {
		l.queue.refuse(refusal)
		return
	}
	refusal.Tried = l.route.addresses
	l.refusal = refusal
	l.changeOver(fmt.Sprintf("it refuses this worker (%s)", string(by.Code)))
}

// decode decodes a patch on its own goroutine, so that pings are answered meanwhile. (D5)
func (l *loop) decode(job *wbp.Patching) {
	defer l.decoding.Done()
	start := l.now()
	fault := l.runDecoding(job)
	took := l.now() - start
	l.Lock()
	defer l.Unlock()
	l.recovering(func() { l.perform(l.machine.Decoded(job, fault, took, l.now())) })
}

// runDecoding decodes a patch. It returns the reason why the patch is unusable, such as a panic, or "".
func (l *loop) runDecoding(job *wbp.Patching) (fault string) {
	defer func() {
		if cause := recover(); cause != nil {
			l.Lock()
			defer l.Unlock()
			fault = l.recordDefect(cause)
		}
	}()
	return job.Run()
}

// listen connects to the publisher's data endpoint. If the endpoint is invalid or not allowed,
// versions are fetched.
func (l *loop) listen(data, ticket string) {
	end, err := dataEndpoint(data, l.route.address(), l.anyDataHost)
	if err != nil {
		l.queueEvent(Event{Kind: Disconnected, Text: "no pushed data: " + err.Error()})
		return
	}
	l.transport.listen(end, ticket)
}

// lockAndQueueEvent takes the lock and queues an event, unless the loop is closed.
func (l *loop) lockAndQueueEvent(event Event) {
	l.Lock()
	defer l.Unlock()
	if !l.closed {
		l.queueEvent(event)
	}
}

// queueEvent queues an event, and drops the oldest event if the queue is full. The caller holds the lock.
func (l *loop) queueEvent(event Event) {
	for {
		select {
		case l.events <- event:
			return
		default:
		}
		select {
		case <-l.events:
		default:
		}
	}
}

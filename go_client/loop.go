package weightbus

import (
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const (
	tick      = 100 * time.Millisecond // interval of calls to look
	eventsMax = 64                     // queued events; the oldest are dropped first

	defectEvery = time.Second // between two Defect events: a flood of panics causes one
)

// A loop connects a worker's state machine and its transport. Its lock guards both. The lock is
// taken by connections that received a message, by the ticker, and by user goroutines that report
// the outcome of an apply. It is never held while waiting.
type loop struct {
	sync.Mutex
	machine     *wbp.WorkerMachine
	transport   transport
	handoff     *handoff
	sites       []site
	route       *route
	waiting     bool          // the pause after a round of failures lasts until route.movedAt
	refusal     *RefusedError // the latest one in this round, if another address may accept the worker
	name        string
	lostAfter   time.Duration
	anyDataHost bool // allow a data endpoint on another host
	defects     int  // panics since the last Defect event
	reportedAt  time.Time
	renamed     func(model string, key wbp.Key, metadata map[string]string)
	doors       []door // of each site
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
	go l.tick()
}

// now returns the machine's time.
func (l *loop) now() time.Duration { return time.Since(l.started) }

func (l *loop) tick() {
	defer l.stopped.Done()
	clock := time.NewTicker(tick)
	defer clock.Stop()
	for {
		select {
		case <-l.stop:
			return
		case now := <-clock.C:
			l.Lock()
			l.guarded(func() { l.look(now) })
			l.Unlock()
		}
	}
}

// look does the periodic work of the transport and the machine. The caller holds the lock.
func (l *loop) look(now time.Time) {
	connected := l.transport.tick(now)
	if connected {
		l.perform(l.machine.Connected(false, l.now()))
	}
	if l.route.branches() {
		l.lookAround(connected)
	}
	if l.transport.wantsTicket() {
		l.perform(l.machine.WithoutTicket(l.now()))
	}
	l.perform(l.machine.Tick(l.now()))
}

// lookAround dials after a pause, moves on from an address that does not answer in time, and starts
// probes of the first address.
func (l *loop) lookAround(connected bool) {
	since := l.now() - l.route.movedAt
	switch {
	case since < 0:
	case l.waiting:
		l.waiting = false
		l.transport.dial(l.sites[l.route.present])
	case !connected && since >= l.lostAfter:
		l.changeOver("there is no connection to it")
	case l.route.probes(l.now()):
		l.transport.probe(l.sites[0])
	}
}

// changeOver ends the session, if there is one, and goes on to the next address.
func (l *loop) changeOver(why string) {
	from := l.route.address()
	wait := l.route.failed(l.now())
	if wait > 0 && l.refusal != nil { // no address accepts the worker
		l.handoff.refuse(l.refusal)
		l.refusal = nil
	}
	l.move(from, why, wait > 0)
}

// move goes from an address to the present one of the route, at once unless it waits.
func (l *loop) move(from, why string, waits bool) {
	l.tell(Event{Kind: Moved, Text: fmt.Sprintf("this worker changes over from %s to %s: %s", from, l.route.address(), why)})
	l.machine.Moved()
	l.transport.leave()
	if l.waiting = waits; !waits {
		l.transport.dial(l.sites[l.route.present])
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
	l.move(from, "the first one answers again", false)
}

// guarded calls work and recovers from a panic, since no message may end the process. The caller
// holds the lock.
func (l *loop) guarded(work func()) {
	defer func() {
		if cause := recover(); cause != nil {
			l.defect(cause)
		}
	}()
	work()
}

// defect returns the text of a panic. It queues a Defect event, at most one per defectEvery.
func (l *loop) defect(cause interface{}) string {
	text := wbp.Printable(fmt.Sprintf("%v; %s", cause, debug.Stack()), 0)
	l.defects++
	if now := time.Now(); now.Sub(l.reportedAt) >= defectEvery {
		times := l.defects
		l.reportedAt, l.defects = now, 0
		l.tell(Event{Kind: Defect, Text: fmt.Sprintf("this worker failed on one message (of %d since the last report), and goes on: "+
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
	l.handoff.close()
	l.decoding.Wait()
}

// Calls from the transport.

func (l *loop) connected() {
	l.doors[l.route.present].opened()
	l.perform(l.machine.Connected(true, l.now()))
}

// place returns a lease for a payload that is about to be received, or nil to discard the payload.
func (l *loop) place(header []byte, size int) (lease *wbp.Lease) {
	l.guarded(func() { lease = l.machine.Place(header, size) })
	return lease
}

func (l *loop) received(frames [][]byte, lease *wbp.Lease) {
	l.guarded(func() { l.perform(l.machine.Receive(frames, lease, l.now())) })
}

func (l *loop) published(frames [][]byte, lease *wbp.Lease) {
	l.guarded(func() { l.perform(l.machine.ReceivePublished(frames, lease, l.now())) })
}

// broke reports that a connection broke, or that an attempt failed.
func (l *loop) broke(err error) {
	l.tell(Event{Kind: Disconnected, Text: wbp.Printable(err.Error(), 0)})
}

func (l *loop) disconnected(err error) {
	if why := l.doors[l.route.present].why(err, l.now()); why != "" {
		l.perform(l.machine.ShutOut(why))
		return
	}
	l.broke(err)
	if l.route.branches() {
		l.changeOver(wbp.Printable(err.Error(), 0))
	}
}

// Outcomes of an apply.

func (l *loop) taken(v *wbp.StagedVersion) {
	l.Lock()
	defer l.Unlock()
	l.machine.Taken(v)
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

// failedBeside reports a version that was not applied because a companion failed.
func (l *loop) failedBeside(v *wbp.StagedVersion, text string, intact, again bool) {
	l.Lock()
	defer l.Unlock()
	l.perform(l.machine.FailedBeside(v, text, intact, again, l.now()))
}

// failedForNow reports a version that is received again, since a companion holds no version now.
func (l *loop) failedForNow(v *wbp.StagedVersion, text string) {
	l.failedBeside(v, text, true, true)
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
			if l.route.branches() {
				l.changeOver("its publisher is silent")
			} else {
				l.transport.redial()
			}
		case wbp.DecodePatch:
			l.decoding.Add(1)
			go l.decode(effect.Job)
		case wbp.Unpatched:
			l.tell(Event{Kind: Unpatched, Text: fmt.Sprintf("version %d of %s is fetched as a whole, not patched: %s",
				effect.Key.Version, effect.Model, effect.Why)})
		case wbp.Ready:
			for _, older := range l.handoff.put(append(group{effect.Version}, effect.Others...)) {
				l.perform(l.machine.Dropped(older, l.now()))
			}
		case wbp.Rejected:
			l.stats.Failed++
			l.handoff.reject(rejection{effect.Model, effect.Key, effect.Code}, &ApplyError{
				effect.Model, effect.Key.Epoch, effect.Key.Version, effect.Code, effect.Text})
		case wbp.Renamed:
			l.renamed(effect.Model, effect.Key, effect.Metadata)
		case wbp.Joined:
			l.refusal = nil
			l.route.joined(l.now())
			l.handoff.join(effect.Epoch)
			l.tell(Event{Kind: Joined, Epoch: effect.Epoch})
		case wbp.Lost:
			l.tell(Event{Kind: Lost, Text: "the publisher is silent"})
		case wbp.Unheard:
			l.tell(Event{Kind: Unheard, Text: "nothing published comes from " + effect.Endpoint + ", so everything is " +
				"fetched: does a firewall stand in the way of it?"})
		case wbp.Refused:
			l.tell(Event{Kind: Refused, Code: effect.Code, Text: effect.Text})
			l.refused(effect)
		}
	}
}

// refused passes a refusal on to the user, and goes on to the next address if it turns the worker
// away. With several addresses, such a refusal is an error only if all of them have failed.
func (l *loop) refused(by wbp.Refused) {
	refusal := &RefusedError{Address: l.route.address(), Name: l.name, Code: by.Code, Text: by.Text}
	if !l.route.branches() || !by.TurnsAway() {
		l.handoff.refuse(refusal)
		return
	}
	refusal.Tried = l.route.addresses
	l.refusal = refusal
	l.changeOver(fmt.Sprintf("it refuses this worker (%s)", string(by.Code)))
}

// decode decodes a patch on its own goroutine, so that pings are answered meanwhile. (D5)
func (l *loop) decode(job *wbp.Patching) {
	defer l.decoding.Done()
	begun := l.now()
	fault := l.decoded(job)
	took := l.now() - begun
	l.Lock()
	defer l.Unlock()
	l.guarded(func() { l.perform(l.machine.Decoded(job, fault, took, l.now())) })
}

// decoded decodes a patch. It returns "", or the reason that the patch is unusable; a panic makes
// the patch unusable.
func (l *loop) decoded(job *wbp.Patching) (fault string) {
	defer func() {
		if cause := recover(); cause != nil {
			l.Lock()
			defer l.Unlock()
			fault = l.defect(cause)
		}
	}()
	return job.Run()
}

// listen connects to the publisher's data endpoint. If the endpoint is invalid, versions are
// fetched.
func (l *loop) listen(data, ticket string) {
	end, err := dataEndpoint(data, l.route.address(), l.anyDataHost)
	if err != nil {
		l.tell(Event{Kind: Disconnected, Text: "no pushed data: " + err.Error()})
		return
	}
	l.transport.listen(end, ticket)
}

// say queues an event unless the loop is closed. Unlike tell, it takes the lock.
func (l *loop) say(event Event) {
	l.Lock()
	defer l.Unlock()
	if !l.closed {
		l.tell(event)
	}
}

// tell queues an event, and drops the oldest one if the queue is full.
func (l *loop) tell(event Event) {
	for {
		select {
		case l.events <- event:
			return
		default:
		}
		select {
		case <-l.events: // drop the oldest
		default:
		}
	}
}

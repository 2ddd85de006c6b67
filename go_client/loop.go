package weightbus

import (
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const (
	tick      = 100 * time.Millisecond // between two looks at the clock when nothing happens
	eventsMax = 64                     // that wait for somebody to look; the oldest go first

	defectEvery = time.Second // between two words of messages that this worker fails on: a flood is one
)

// A loop brings the machine and its transport together. Whoever holds its lock may use both, and
// does not wait meanwhile: a connection that received something, the clock, or a user's goroutine
// that has applied a version.
type loop struct {
	sync.Mutex
	machine     *wbp.WorkerMachine
	transport   transport
	handoff     *handoff
	address     string
	name        string
	anyDataHost bool // whether data may come from another host than the address's
	defects     int  // of which nobody was told
	toldAt      time.Time
	renamed     func(model string, key wbp.Key, metadata map[string]string)
	door        door
	started     time.Time
	events      chan Event
	stats       Stats // but for what the machine counts
	stop        chan struct{}
	stopped     sync.WaitGroup
	decoding    sync.WaitGroup
	closed      bool
}

// run begins. connect makes the transport.
func (l *loop) run(connect func(carried) transport) {
	l.Lock()
	l.transport = connect(l)
	l.Unlock()
	l.stopped.Add(1)
	go l.tick()
}

// now is the machine's time.
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

// look does what is due. The lock is held.
func (l *loop) look(now time.Time) {
	if l.transport.tick(now) {
		l.perform(l.machine.Connected(false, l.now()))
	}
	if l.transport.wantsTicket() {
		l.perform(l.machine.WithoutTicket(l.now()))
	}
	l.perform(l.machine.Tick(l.now()))
}

// guarded goes on, whatever happens where one message is dealt with: a goroutine that panics ends the process,
// and nobody may end it by a message. The lock is held.
func (l *loop) guarded(work func()) {
	defer func() {
		if cause := recover(); cause != nil {
			l.defect(cause)
		}
	}()
	work()
}

// defect tells of a panic, once in a while, and returns it in words.
func (l *loop) defect(cause interface{}) string {
	text := wbp.Printable(fmt.Sprintf("%v; %s", cause, debug.Stack()), 0)
	l.defects++
	if now := time.Now(); now.Sub(l.toldAt) >= defectEvery {
		times := l.defects
		l.toldAt, l.defects = now, 0
		l.tell(Event{Kind: Defect, Text: fmt.Sprintf("this worker failed on one message (of %d since this was told), and goes on: "+
			"please report it: %s", times, text)})
	}
	return text
}

// close says goodbye and ends everything but what users are applying.
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

// What the transport says.

func (l *loop) connected() {
	l.door.opened()
	l.perform(l.machine.Connected(true, l.now()))
}

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

func (l *loop) broke(err error) {
	l.tell(Event{Kind: Disconnected, Text: wbp.Printable(err.Error(), 0)})
}

func (l *loop) turnedAway(err error) {
	l.Lock()
	defer l.Unlock()
	if why := l.door.why(err, l.now()); why != "" {
		l.perform(l.machine.ShutOut(why))
	} else {
		l.broke(err)
	}
}

// What users say of a version.

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

func (l *loop) dropped(v *wbp.StagedVersion) {
	l.Lock()
	defer l.Unlock()
	l.perform(l.machine.Dropped(v, l.now()))
}

// perform does what the machine wants done. The lock is held.
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
			l.transport.redial()
		case wbp.DecodePatch:
			l.decoding.Add(1)
			go l.decode(effect.Job)
		case wbp.Unpatched:
			l.tell(Event{Kind: Unpatched, Text: fmt.Sprintf("version %d of %s is fetched as a whole, not patched: %s",
				effect.Key.Version, effect.Model, effect.Why)})
		case wbp.Ready:
			if older := l.handoff.put(effect.Version); older != nil {
				l.perform(l.machine.Dropped(older, l.now()))
			}
		case wbp.Rejected:
			l.stats.Failed++
			l.handoff.reject(rejection{effect.Model, effect.Key, effect.Code}, &ApplyError{
				effect.Model, effect.Key.Epoch, effect.Key.Version, effect.Code, effect.Text})
		case wbp.Renamed:
			l.renamed(effect.Model, effect.Key, effect.Metadata)
		case wbp.Joined:
			l.handoff.join(effect.Epoch)
			l.tell(Event{Kind: Joined, Epoch: effect.Epoch})
		case wbp.Lost:
			l.tell(Event{Kind: Lost, Text: "the publisher is silent"})
		case wbp.Unheard:
			l.tell(Event{Kind: Unheard, Text: "nothing published comes from " + effect.Endpoint + ", so everything is " +
				"fetched: does a firewall stand in the way of it?"})
		case wbp.Refused:
			l.handoff.refuse(&RefusedError{l.address, l.name, effect.Code, effect.Text})
			l.tell(Event{Kind: Refused, Code: effect.Code, Text: effect.Text})
		}
	}
}

// decode decodes a patch on a goroutine of its own: pings are answered meanwhile. (D5)
func (l *loop) decode(job *wbp.Patching) {
	defer l.decoding.Done()
	begun := l.now()
	fault := l.decoded(job)
	took := l.now() - begun
	l.Lock()
	defer l.Unlock()
	l.guarded(func() { l.perform(l.machine.Decoded(job, fault, took, l.now())) })
}

// decoded decodes a patch, and says why it is of no use; one that this worker fails on is of none.
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

// listen takes published messages from where the publisher says. If that is nowhere, everything
// can still be fetched.
func (l *loop) listen(data, ticket string) {
	end, err := dataEndpoint(data, l.address, l.anyDataHost)
	if err != nil {
		l.tell(Event{Kind: Disconnected, Text: "no pushed data: " + err.Error()})
		return
	}
	l.transport.listen(end, ticket)
}

// say leaves word of what the user's functions did, as long as there are events.
func (l *loop) say(event Event) {
	l.Lock()
	defer l.Unlock()
	if !l.closed {
		l.tell(event)
	}
}

// tell leaves word for whoever looks at Events; nobody has to.
func (l *loop) tell(event Event) {
	for {
		select {
		case l.events <- event:
			return
		default:
		}
		select {
		case <-l.events: // the oldest goes
		default:
		}
	}
}

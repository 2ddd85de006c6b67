package main

import (
	"encoding/json"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const tick = 100 * time.Millisecond

// A sequence is a test case: the steps of one worker.
type sequence struct {
	Name     string
	Models   []string
	BytesMax int64                      `json:"bytes_max"`
	InPlace  map[string]map[string]spec `json:"in_place"`
	Applies  []string                   // outcomes of the first applies: "done", "torn", or any other text for a failure
	Steps    []struct {
		WaitMS    int64 `json:"wait_ms"`
		PongEpoch int64 `json:"pong"` // epoch of a pong to receive; 0 for none
		Control   []source
		Data      []source
	}
}

func sequences(t table) error {
	var cases []sequence
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		p := newPlayer(c)
		steps := []object{}
		for _, step := range c.Steps {
			control, err := t.frames(step.Control)
			if err != nil {
				return err
			}
			data, err := t.frames(step.Data)
			if err != nil {
				return err
			}
			if step.PongEpoch > 0 {
				control = [][]byte{wbp.Encode(&wbp.Pong{Token: p.token, Epoch: step.PongEpoch, Models: map[string]int64{}})}
			}
			steps = append(steps, p.step(time.Duration(step.WaitMS)*time.Millisecond, control, data))
		}
		t.report(c.Name, i, object{"steps": steps})
	}
	return nil
}

// A player runs a worker's machine with a simulated clock. It reports each ready version at once as
// applied, or as failed if the test case requires that.
type player struct {
	machine *wbp.WorkerMachine
	now     time.Duration
	sent    []json.RawMessage
	token   int64            // of the last ping
	runs    map[string]int64 // by model: the running version
	applies []string         // outcomes of the next applies
}

func newPlayer(c sequence) *player {
	if c.BytesMax == 0 {
		c.BytesMax = wbp.BytesMaxDefault
	}
	models := map[string]wbp.Model{}
	for _, name := range c.Models {
		target := map[string]wbp.Signature{}
		for tensor, spec := range c.InPlace[name] {
			target[tensor] = spec.signature()
		}
		models[name] = wbp.Model{Mismatch: func(layout *wbp.Layout) string {
			if len(target) == 0 {
				return ""
			}
			return wbp.Difference(layout, target, wbp.Lenience{})
		}}
	}
	id := wbp.Identity{Name: "w", Instance: "00000000000000000000000000000000", Patches: true}
	timing := wbp.TimingOf(time.Second, 5*time.Second)
	machine := wbp.NewWorkerMachine(id, models, c.BytesMax, timing, nil)
	return &player{machine: machine, runs: map[string]int64{}, applies: c.Applies}
}

// step executes one step, and returns the sent messages and the versions that run afterwards.
func (p *player) step(wait time.Duration, control, data [][]byte) object {
	p.sent = []json.RawMessage{}
	for until := p.now + wait; p.now < until; {
		if p.now += tick; p.now > until {
			p.now = until
		}
		p.perform(p.machine.Connected(false, p.now))
		p.perform(p.machine.Tick(p.now))
	}
	if control != nil {
		frames, lease := p.receive(control)
		p.perform(p.machine.Receive(frames, lease, p.now))
	}
	if data != nil {
		frames, lease := p.receive(data)
		p.perform(p.machine.ReceivePublished(append([][]byte{nil}, frames...), lease, p.now))
	}
	runs := map[string]int64{}
	for model, version := range p.runs {
		runs[model] = version
	}
	return object{"sent": p.sent, "runs": runs}
}

// receive copies the payload of a message into the machine's lease, as a connection does.
func (p *player) receive(frames [][]byte) ([][]byte, *wbp.Lease) {
	if len(frames) < 2 {
		return frames, nil
	}
	received := append([][]byte{}, frames...)
	lease := p.machine.LeaseFor(frames[0], len(frames[1]))
	if lease == nil || len(frames[1]) == 0 {
		return frames, nil
	}
	copy(lease.Room(), frames[1])
	lease.Received(len(frames[1]))
	received[1] = lease.Payload()
	return received, lease
}

func (p *player) perform(effects []wbp.Effect) {
	for _, effect := range effects {
		switch effect := effect.(type) {
		case wbp.Send:
			p.sent = append(p.sent, wbp.Encode(effect.Message))
			if ping, ok := effect.Message.(*wbp.Ping); ok {
				p.token = ping.Token
			}
		case wbp.Ready:
			for _, version := range append([]*wbp.StagedVersion{effect.Version}, effect.Others...) {
				p.perform(p.apply(version))
			}
		case wbp.DecodePatch:
			p.perform(p.machine.Decoded(effect.Job, effect.Job.Run(), 0, p.now))
		case wbp.Renamed:
			p.runs[effect.Model] = effect.Key.Version
		}
	}
}

func (p *player) apply(v *wbp.StagedVersion) []wbp.Effect {
	outcome := "done"
	if len(p.applies) > 0 {
		outcome, p.applies = p.applies[0], p.applies[1:]
	}
	p.machine.ApplyStarted(v)
	switch outcome {
	case "done":
		p.runs[v.Model] = v.Key.Version
		return p.machine.Applied(v, v.Digest, p.now)
	case "torn":
		p.runs[v.Model] = 0
	}
	return p.machine.Failed(v, "no", outcome != "torn", p.now)
}

package wbp

import "time"

// The worker's messages: hello, fetches, and reports, repeated with every ping. (W17)

// Identity identifies a worker, and has the features that it accepts.
type Identity struct {
	Name     string // unique among the connected workers of a publisher
	Instance string // 32 random hexadecimal digits, new at each start
	Client   string // program and version, for operators
	Host     string
	PID      int64
	Keyed    bool // the worker has a key pair, and accepts only sealed published messages
	Patches  bool // the worker accepts patches, and keeps the bytes of the running version for them
}

// hello returns a hello, without the features of W34 and W35. models has the running versions. epoch is the latest applied epoch, and
// ageMS the age of its publisher. maps is true if the worker can map shared memory.
func (id Identity) hello(models map[string]*Running, epoch, ageMS int64, maps bool) Effect {
	features := []string{Renaming, Companions} // W25, C2
	if maps {
		features = append(features, Mapping) // S11
	}
	if id.Patches {
		features = append(features, Delta) // D4
	}
	return Send{&Hello{Name: id.Name, Instance: id.Instance, Models: models, Epoch: epoch, AgeMS: ageMS,
		Features: features, Client: id.Client, Host: id.Host, PID: id.PID}}
}

// standing returns all current reports on a model, with failure, the report of the last failure.
func standing(model string, versions *versionStore, failure []Effect) []Effect {
	var effects []Effect
	begun, busy := versions.inPhase(arriving), versions.inPhase(applying)
	if begun != nil && busy == nil {
		effects = append(effects, sayProgress(model, begun))
	}
	effects = append(effects, sayStaged(model, versions.all(ready, applying, staged)...)...)
	if v := versions.inPhase(running); v != nil {
		effects = append(effects, sayApplied(model, v))
	}
	effects = append(effects, failure...)
	if busy != nil { // the apply may hang while other versions become ready
		effects = append(effects, sayProgress(model, busy))
	} else if waiting := versions.waiting(); waiting != nil && begun == nil {
		effects = append(effects, sayProgress(model, waiting))
	}
	return effects
}

// fetches returns the fetches that are due.
func fetches(t *Transfer, now time.Duration) []Effect {
	var effects []Effect
	for _, fetch := range t.wants(now) {
		effects = append(effects, Send{fetch})
	}
	return effects
}

// sayProgress returns a report of progress.
func sayProgress(model string, v *versionEntry) Effect {
	phase, chunks, patch := "staged", int64(0), (*PatchID)(nil)
	switch v.phase {
	case arriving:
		phase, chunks, patch = "receiving", v.transfer.Here, v.transfer.by()
	case applying:
		phase = "applying"
	}
	progress := Progress{Model: model, Epoch: v.Epoch, Version: v.Version, Phase: phase, Chunks: chunks, Patch: patch}
	return Send{&progress}
}

// sayStaged returns a Staged message for each version whose publisher requires one. (W14)
func sayStaged(model string, some ...*versionEntry) []Effect {
	var effects []Effect
	for _, v := range some {
		if v.staged.sayStaged {
			effects = append(effects, Send{&Staged{Model: model, Epoch: v.Epoch, Version: v.Version,
				Digest: v.staged.Digest, Patch: v.staged.Patch}})
		}
	}
	return effects
}

// sayApplied returns an Applied message for the running version, with the patch by which the
// version was received. (D11)
func sayApplied(model string, v *versionEntry) Effect {
	by := v.staged
	return Send{&Applied{Model: model, Epoch: v.Epoch, Version: v.Version, Digest: v.running.Digest,
		Patch: by.Patch, DecodeUS: by.took.Microseconds(), Note: by.Note}}
}

// sayFailed returns a Failed message for a version. intact means that the previous version still
// runs. (W24)
func sayFailed(failure *Failed, intact bool) Effect {
	message := *failure
	message.Intact = &intact
	return Send{&message}
}

// ping returns a ping. Its token is the time; the pong has the same token. (W12, W18)
func ping(now time.Duration, subscribed, shared bool) Effect {
	return Send{&Ping{Token: now.Milliseconds(), Subscribed: subscribed, Shared: shared}}
}

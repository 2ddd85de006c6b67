package wbp

import "time"

// The messages of a worker: hello, fetches, and reports, which it repeats with every ping. (W17)

// Identity identifies a worker, and says which optional features of the protocol it accepts.
type Identity struct {
	Name     string // unique among the connected workers of a publisher
	Instance string // 32 random hexadecimal digits, new at each start
	Client   string // program and version, for operators
	Host     string
	PID      int64
	Keyed    bool // the worker has a key pair, and accepts only sealed published messages
	Patches  bool // the worker accepts patches, and keeps the bytes of the running version for them
}

// hello returns a hello, which never has the features of W34 and W35. models has the running
// version of each model. epoch is the latest applied epoch, and ageMS the age of its publisher.
// mapping is true if the worker can map shared memory.
func (id Identity) hello(models map[string]*Running, epoch, ageMS int64, mapping bool) Effect {
	features := []string{Renaming, Companions} // W25, C2
	if mapping {
		features = append(features, Mapping) // S11
	}
	if id.Patches {
		features = append(features, Delta) // D4
	}
	return Send{&Hello{Name: id.Name, Instance: id.Instance, Models: models, Epoch: epoch, AgeMS: ageMS,
		Features: features, Client: id.Client, Host: id.Host, PID: id.PID}}
}

// currentReports returns all reports that currently apply to a model. failure is the report of the
// last failure.
func currentReports(model string, versions *versionStore, failure []Effect) []Effect {
	var effects []Effect
	arrivingVersion, applyingVersion := versions.inPhase(arriving), versions.inPhase(applying)
	if arrivingVersion != nil && applyingVersion == nil {
		effects = append(effects, progressReport(model, arrivingVersion))
	}
	effects = append(effects, stagedReports(model, versions.inPhases(ready, applying, staged)...)...)
	if v := versions.inPhase(running); v != nil {
		effects = append(effects, appliedReport(model, v))
	}
	effects = append(effects, failure...)
	if applyingVersion != nil { // the apply may hang while other versions become ready
		effects = append(effects, progressReport(model, applyingVersion))
	} else if waiting := versions.waiting(); waiting != nil && arrivingVersion == nil {
		effects = append(effects, progressReport(model, waiting))
	}
	return effects
}

// fetches returns the fetches of a transfer that are due.
func fetches(t *Transfer, now time.Duration) []Effect {
	var effects []Effect
	for _, fetch := range t.dueFetches(now) {
		effects = append(effects, Send{fetch})
	}
	return effects
}

// progressReport returns a report of progress.
func progressReport(model string, v *versionEntry) Effect {
	phase, chunks, patch := "staged", int64(0), (*PatchID)(nil)
	switch v.phase {
	case arriving:
		phase, chunks, patch = "receiving", v.transfer.Here, v.transfer.patchID()
	case applying:
		phase = "applying"
	}
	progress := Progress{Model: model, Epoch: v.Epoch, Version: v.Version, Phase: phase, Chunks: chunks, Patch: patch}
	return Send{&progress}
}

// stagedReports returns a Staged message for each version whose publisher requires one. (W14)
func stagedReports(model string, versions ...*versionEntry) []Effect {
	var effects []Effect
	for _, v := range versions {
		if v.staged.reportStaged {
			effects = append(effects, Send{&Staged{Model: model, Epoch: v.Epoch, Version: v.Version,
				Digest: v.staged.Digest, Patch: v.staged.Patch}})
		}
	}
	return effects
}

// appliedReport returns an Applied message for the running version. The message names the patch by
// which the version was received, if any. (D11)
func appliedReport(model string, v *versionEntry) Effect {
	by := v.staged
	return Send{&Applied{Model: model, Epoch: v.Epoch, Version: v.Version, Digest: v.running.Digest,
		Patch: by.Patch, DecodeUS: by.took.Microseconds(), Note: by.Note}}
}

// failedReport returns a Failed message for a version. intact means that the previous version still runs. (W24)
func failedReport(failure *Failed, intact bool) Effect {
	message := *failure
	message.Intact = &intact
	return Send{&message}
}

// ping returns a ping. Its token is the time; the pong has the same token. (W12, W18)
func ping(now time.Duration, subscribed, shared bool) Effect {
	return Send{&Ping{Token: now.Milliseconds(), Subscribed: subscribed, Shared: shared}}
}

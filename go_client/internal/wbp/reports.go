package wbp

import "time"

// What a worker says: who it is; of the versions of a model, at once and with every ping. (W17)

// Identity is who a worker is.
type Identity struct {
	Name     string // one living worker per name and publisher
	Instance string // 32 hexadecimal digits, drawn anew at each start
	Client   string // program and version, for operators
	Host     string
	PID      int64
	Keyed    bool // it has a key pair of its own: it takes nothing that is not sealed
	Patches  bool // it takes patches, for which it keeps the bytes of what runs
}

// hello says who it is, and what it runs of an epoch that has been running for so long.
func (id Identity) hello(models map[string]*Running, epoch, ageMS int64, maps bool) Effect {
	features := []string{"renaming"} // W25; neither W34 nor W35
	if maps {
		features = append(features, "mapping") // S11
	}
	if id.Patches {
		features = append(features, Delta) // D4
	}
	return Send{&Hello{Name: id.Name, Instance: id.Instance, Models: models, Epoch: epoch, AgeMS: ageMS,
		Features: features, Client: id.Client, Host: id.Host, PID: id.PID}}
}

// standing says how things stand, the last failure included.
func standing(model string, versions *versionStore, failure []Effect) []Effect {
	var effects []Effect
	begun, busy := versions.at(arriving), versions.at(applying)
	if begun != nil && busy == nil {
		effects = append(effects, sayProgress(model, begun))
	}
	effects = append(effects, sayStaged(model, versions.all(ready, applying, staged)...)...)
	if v := versions.at(running); v != nil {
		effects = append(effects, sayApplied(model, v))
	}
	effects = append(effects, failure...)
	if busy != nil { // it may hang in an apply, and others become ready behind it
		effects = append(effects, sayProgress(model, busy))
	} else if waiting := versions.at(ready); waiting != nil && begun == nil {
		effects = append(effects, sayProgress(model, waiting))
	}
	return effects
}

// fetches asks for what is missing and due.
func fetches(t *Transfer, now time.Duration) []Effect {
	var effects []Effect
	for _, fetch := range t.wants(now) {
		effects = append(effects, Send{fetch})
	}
	return effects
}

// sayProgress says how far a version is.
func sayProgress(model string, v *versionEntry) Effect {
	switch v.phase {
	case arriving:
		return Send{&Progress{model, v.Epoch, v.Version, v.transfer.Here, "receiving", v.transfer.by(), ""}}
	case applying:
		return Send{&Progress{model, v.Epoch, v.Version, 0, "applying", nil, ""}}
	}
	return Send{&Progress{model, v.Epoch, v.Version, 0, "staged", nil, ""}}
}

// sayStaged says which of some versions are staged, where that is due. (W14)
func sayStaged(model string, some ...*versionEntry) []Effect {
	var effects []Effect
	for _, v := range some {
		if v.staged.sayStaged {
			effects = append(effects, Send{&Staged{model, v.Epoch, v.Version, v.staged.Digest, v.staged.Patch}})
		}
	}
	return effects
}

// sayApplied says what runs, and by which patch it came. (D11)
func sayApplied(model string, v *versionEntry) Effect {
	by := v.staged
	return Send{&Applied{model, v.Epoch, v.Version, v.running.Digest, by.Patch, by.took.Microseconds(), by.Note}}
}

// sayFailed says what could not be applied; unless intact, also that no version runs. (W24)
func sayFailed(failure *Failed, intact bool) Effect {
	said := *failure
	said.Intact = intact
	return Send{&said}
}

// ping asks for a pong, which says again when that was. (W12, W18)
func ping(now time.Duration, subscribed, shared bool) Effect {
	return Send{&Ping{Token: now.Milliseconds(), Subscribed: subscribed, Shared: shared}}
}

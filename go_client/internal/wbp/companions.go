package wbp

import "sort"

// Companions are versions of several models that are published as one. The announcement of each
// names the others; a worker ignores those of models that it does not receive. A committed version
// stays staged until, for each of its companions, this companion or a newer version of the same model
// is committed. Then all of them become ready together, and the user applies them as one. (C2)
type companions struct {
	followers map[string]*follower
}

// complete makes ready every committed version that no longer waits for a companion. It returns the
// effect that hands these versions over, or nothing if there are none.
func (c companions) complete() []Effect {
	found := map[string]Key{}
	for model, s := range c.followers {
		if v := s.versions.awaitingCompanions(); v != nil {
			found[model] = v.Key
		}
	}
	for c.removeLacking(found) { // a removed version may be a companion of others
	}
	models := make([]string, 0, len(found))
	for model := range found {
		models = append(models, model)
	}
	if len(models) == 0 {
		return nil
	}
	sort.Strings(models)
	var ready []*StagedVersion
	for _, model := range models {
		versions := c.followers[model].versions
		v := versions.awaitingCompanions()
		versions.move(v, committed)
		ready = append(ready, v.staged)
	}
	return []Effect{Ready{ready[0], ready[1:]}}
}

// removeLacking removes from found the versions that lack a companion, and reports whether there were any.
func (c companions) removeLacking(found map[string]Key) bool {
	var lacking []string
	for model := range found {
		if c.lacks(c.followers[model].versions.awaitingCompanions(), found) {
			lacking = append(lacking, model)
		}
	}
	for _, model := range lacking {
		delete(found, model)
	}
	return len(lacking) > 0
}

// lacks reports whether a version lacks a companion: neither the companion nor a newer version of the
// same model is in found, ready or running.
func (c companions) lacks(v *versionEntry, found map[string]Key) bool {
	for model, number := range v.announce.Companions {
		s, companion := c.followers[model], Key{v.Epoch, number}
		if s == nil {
			continue // the worker does not receive this model
		}
		if key, ok := found[model]; (!ok || companion.Newer(key)) && !s.versions.hasReadyOrRunning(companion) {
			return true
		}
	}
	return false
}

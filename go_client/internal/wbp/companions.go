package wbp

import "sort"

// Companions are versions of several models that are published as one. Each names the others in its
// announcement. It stays staged until it is committed, and so is each of them that this worker
// wants, or a newer version of that model. Then they are ready at once, and the user applies them
// at once. (C2)
type companions struct {
	followers map[string]*follower
}

// complete makes every committed version ready whose companions are here, and returns the effect
// that hands them over, if there are any.
func (c companions) complete() []Effect {
	found := map[string]Key{}
	for model, s := range c.followers {
		if v := s.versions.held(); v != nil {
			found[model] = v.Key
		}
	}
	for c.drop(found) {
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
		v := versions.held()
		versions.move(v, committed)
		ready = append(ready, v.staged)
	}
	return []Effect{Ready{ready[0], ready[1:]}}
}

// drop drops the versions from found that lack a companion, and reports whether there were any.
func (c companions) drop(found map[string]Key) bool {
	var lacking []string
	for model := range found {
		if c.lacks(c.followers[model].versions.held(), found) {
			lacking = append(lacking, model)
		}
	}
	for _, model := range lacking {
		delete(found, model)
	}
	return len(lacking) > 0
}

// lacks reports whether a companion of a version is not here.
func (c companions) lacks(v *versionEntry, found map[string]Key) bool {
	for model, number := range v.announce.Companions {
		s, companion := c.followers[model], Key{v.Epoch, number}
		if s == nil {
			continue // the worker does not want this model
		}
		if key, ok := found[model]; (!ok || companion.Newer(key)) && !s.versions.offers(companion) {
			return true
		}
	}
	return false
}

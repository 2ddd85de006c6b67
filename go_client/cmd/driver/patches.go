package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// A run is bytes that are repeated: [hexadecimal digits, count] in JSON.
type run struct {
	bytes []byte
	times int
}

func (r *run) UnmarshalJSON(text []byte) error {
	var digits string
	if err := json.Unmarshal(text, &[]interface{}{&digits, &r.times}); err != nil {
		return err
	}
	decoded, err := hex.DecodeString(digits)
	r.bytes = decoded
	return err
}

func deltas(t table) error {
	var cases []struct {
		Name          string
		Layout, Patch source
		Base          []run
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		header, err := t.bytes(c.Layout)
		if err != nil {
			return err
		}
		layout, err := wbp.ParseLayout(header)
		if err != nil {
			return err
		}
		text, err := t.bytes(c.Patch)
		if err != nil {
			return err
		}
		var base []byte
		for _, r := range c.Base {
			base = append(base, bytes.Repeat(r.bytes, r.times)...)
		}
		t.report(c.Name, i, applyPatch(c.Name, layout, base, text))
	}
	return nil
}

func applyPatch(name string, layout *wbp.Layout, base, text []byte) object {
	data := append([]byte{}, base...)
	patch, err := wbp.ParsePatch(layout, text)
	if err == nil {
		err = patch.Apply(data, "")
	}
	switch {
	case err == nil:
		return object{"ok": object{"digest": wbp.DigestOf(layout.ID, data, 1<<12)}}
	case bytes.Equal(data, base) || name == "another target": // a wrong target is detected only after bytes have changed
		return object{"error": "patch"}
	}
	return object{"error": err.Error() + ", but bytes have changed"}
}

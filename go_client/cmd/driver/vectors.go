package main

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// vectors emits the result of every case of every table of test vectors in a folder.
func vectors(folder string, emit func(object)) error {
	all := []struct {
		file, list string
		run        func(t table) error
	}{
		{"messages.json", "cases", messages}, {"layouts.json", "cases", layouts}, {"chunks.json", "cases", chunks},
		{"checksums.json", "crc32c", crcs}, {"checksums.json", "digests", digests},
		{"versions.json", "cases", versions}, {"segments.json", "cases", segments},
		{"phases.json", "cases", phases}, {"sequences.json", "cases", sequences},
		{"mapping.json", "cases", messages},
		{"applying.json", "messages", messages}, {"applying.json", "sequences", sequences},
		{"renaming.json", "messages", messages}, {"renaming.json", "sequences", sequences},
		{"companions.json", "sequences", sequences},
		{"casts.json", "cases", casts}, {"deltas.json", "cases", deltas}, {"patching.json", "headers", messages},
		{"metadata.json", "messages", messages},
		{"sealing.json", "keys", groupKeys}, {"sealing.json", "versions", versionKeys},
		{"sealing.json", "payloads", payloads}, {"sealing.json", "messages", countedMessages},
		{"sealing.json", "headers", messages},
	}
	lists := map[string]int{}
	for _, each := range all {
		lists[each.file]++
	}
	for _, each := range all {
		if err := each.run(table{folder, each.file, each.list, lists[each.file] > 1, emit}); err != nil {
			return err
		}
	}
	return nil
}

// A table is one list of cases in a file.
type table struct {
	folder, file, list string
	several            bool // the file has several lists, so that results also name the list
	emit               func(object)
}

// read reads the cases into a slice.
func (t table) read(into interface{}) error {
	text, err := os.ReadFile(filepath.Join(t.folder, t.file))
	if err != nil {
		return err
	}
	var lists map[string]json.RawMessage
	if err := json.Unmarshal(text, &lists); err != nil {
		return err
	}
	return json.Unmarshal(lists[t.list], into)
}

// report emits the result of a case, which is named by its index if it has no name.
func (t table) report(name string, index int, result object) {
	if name == "" {
		name = strconv.Itoa(index)
	}
	if t.several {
		name = t.list + "/" + name
	}
	result["file"], result["case"] = t.file, name
	t.emit(result)
}

// A source is bytes of a case: as text, as hexadecimal digits, or in a file.
type source struct {
	Text *string
	Hex  *string
	File *string
}

func (t table) bytes(s source) ([]byte, error) {
	switch {
	case s.Text != nil:
		return []byte(*s.Text), nil
	case s.Hex != nil:
		return hex.DecodeString(*s.Hex)
	case s.File != nil:
		return os.ReadFile(filepath.Join(t.folder, *s.File))
	}
	return nil, errors.New("a source has none of text, hex and file")
}

func (t table) frames(sources []source) ([][]byte, error) {
	var frames [][]byte
	for _, source := range sources {
		bytes, err := t.bytes(source)
		if err != nil {
			return nil, err
		}
		frames = append(frames, bytes)
	}
	return frames, nil
}

func messages(t table) error {
	var cases []struct {
		Name      string
		Direction string
		Frames    []source
		Expect    struct{ OK json.RawMessage }
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		if c.Direction == "from_worker" {
			if c.Expect.OK != nil {
				t.report(c.Name, i, encode(c.Expect.OK))
			}
			continue
		}
		frames, err := t.frames(c.Frames)
		if err != nil {
			return err
		}
		t.report(c.Name, i, decode(frames))
	}
	return nil
}

func decode(frames [][]byte) object {
	if len(frames) == 0 {
		return object{"error": "malformed"}
	}
	message, err := wbp.Decode(frames[0], len(frames)-1)
	var broken *wbp.ProtocolError
	if errors.As(err, &broken) {
		return object{"error": string(broken.Code)}
	}
	return object{"ok": plain(message), "payloads": len(frames) - 1}
}

// plain returns the fields of a message, as JSON.
func plain(message wbp.Message) object {
	fields := object{}
	text, _ := json.Marshal(message)
	_ = json.Unmarshal(text, &fields)
	for name := range fields { // integers up to 2^53-1 would be printed as floats
		fields[name] = rawField(text, name)
	}
	fields["type"] = message.Kind()
	return fields
}

func rawField(text []byte, name string) json.RawMessage {
	raw := map[string]json.RawMessage{}
	_ = json.Unmarshal(text, &raw)
	return raw[name]
}

// encode returns the encoded header of a message with these fields.
func encode(ok json.RawMessage) object {
	var kind struct{ Type string }
	_ = json.Unmarshal(ok, &kind)
	message, known := fromWorker()[kind.Type]
	if !known {
		return object{"unsupported": "a worker sends no " + kind.Type}
	}
	if err := json.Unmarshal(ok, message); err != nil {
		return object{"error": err.Error()}
	}
	return object{"header": string(wbp.Encode(message))}
}

// fromWorker returns an empty message of each type that a worker sends.
func fromWorker() map[string]wbp.Message {
	return map[string]wbp.Message{
		"hello": &wbp.Hello{}, "fetch": &wbp.Fetch{}, "progress": &wbp.Progress{}, "staged": &wbp.Staged{},
		"applied": &wbp.Applied{}, "failed": &wbp.Failed{}, "bye": &wbp.Bye{}, "ping": &wbp.Ping{}, "pong": &wbp.Pong{},
	}
}

func layouts(t table) error {
	var cases []struct {
		Name   string
		Header source
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		bytes, err := t.bytes(c.Header)
		if err != nil {
			return err
		}
		layout, err := wbp.ParseLayout(bytes)
		if err != nil {
			t.report(c.Name, i, object{"error": "layout-invalid"})
			continue
		}
		tensors := []object{}
		for _, s := range layout.Tensors {
			tensors = append(tensors, object{"name": s.Name, "dtype": s.DType, "shape": s.Shape, "begin": s.Begin, "end": s.End})
		}
		order := []string{}
		for _, s := range layout.InOrder() {
			order = append(order, s.Name)
		}
		t.report(c.Name, i, object{"ok": object{"id": layout.ID, "nbytes": layout.Bytes, "tensors": tensors,
			"aliases": layout.Aliases, "metadata": layout.Metadata, "order": order}})
	}
	return nil
}

func chunks(t table) error {
	var cases []struct {
		Name       string
		Bytes      int64 `json:"nbytes"`
		ChunkBytes int64 `json:"chunk_bytes"`
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		plan, err := wbp.NewPlan(c.Bytes, c.ChunkBytes)
		if err != nil {
			t.report(c.Name, i, object{"error": "chunk-bytes"})
			continue
		}
		spans := [][2]int64{}
		for n := int64(0); n < plan.Count(); n++ {
			begin, end := plan.Span(n)
			spans = append(spans, [2]int64{begin, end})
		}
		t.report(c.Name, i, object{"ok": object{"count": plan.Count(), "spans": spans}})
	}
	return nil
}

func crcs(t table) error {
	var cases []struct{ Name, Hex string }
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		bytes, err := hex.DecodeString(c.Hex)
		if err != nil {
			return err
		}
		t.report(c.Name, i, object{"crc": wbp.CRC32C(bytes)})
	}
	return nil
}

func casts(t table) error {
	var cases []struct{ Name, From, To, In string }
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		from, err := hex.DecodeString(c.In)
		wide, _ := wbp.TensorBytes(c.From, []int64{1})
		narrow, _ := wbp.TensorBytes(c.To, []int64{1})
		if err != nil || !wbp.Castable(c.To, c.From) {
			t.report(c.Name, i, object{"error": fmt.Sprintf("from %s to %s: %v", c.From, c.To, err)})
			continue
		}
		to := make([]byte, int64(len(from))/wide*narrow)
		wbp.Cast(to, c.To, from, c.From)
		t.report(c.Name, i, object{"out": hex.EncodeToString(to)})
	}
	return nil
}

func digests(t table) error {
	var cases []struct {
		Name, Layout string
		ChunkBytes   int64 `json:"chunk_bytes"`
		CRCs         []uint32
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		t.report(c.Name, i, object{"digest": wbp.Digest(c.Layout, c.ChunkBytes, c.CRCs)})
	}
	return nil
}

func phases(t table) error {
	var cases []struct {
		Name, Of string
		State    wbp.State
		Event    wbp.Event
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		result := object{"next": nil}
		if next := wbp.Tables[c.Of][c.State][c.Event]; next != "" {
			result["next"] = next
		}
		t.report(c.Name, i, result)
	}
	return nil
}

// versions parses each file as a layout and a data section, and computes the digest of both.
func versions(t table) error {
	var cases []struct {
		Name        string
		File        string
		LayoutBytes int64 `json:"layout_bytes"`
		ChunkBytes  int64 `json:"chunk_bytes"`
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		bytes, err := os.ReadFile(filepath.Join(t.folder, c.File))
		if err != nil {
			return err
		}
		layout, err := wbp.ParseLayout(bytes[:c.LayoutBytes])
		if err != nil {
			t.report(c.Name, i, object{"error": err.Error()})
			continue
		}
		t.report(c.Name, i, object{"digest": wbp.DigestOf(layout.ID, bytes[c.LayoutBytes:], c.ChunkBytes)})
	}
	return nil
}

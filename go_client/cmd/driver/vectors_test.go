package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strings"
	"testing"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const folder = "../../../tests/vectors"

// results runs the driver on all tables, and returns its output by file and case.
func results(t *testing.T) map[string]object {
	found := map[string]object{}
	err := vectors(folder, func(line object) {
		found[fmt.Sprint(line["file"], " ", line["case"])] = normal(t, line).(map[string]interface{})
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// normal returns a value as decoded from JSON, with exact integers.
func normal(t *testing.T, value interface{}) interface{} {
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, text)
}

func parse(t *testing.T, text []byte) interface{} {
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	decoder.UseNumber()
	var value interface{}
	if err := decoder.Decode(&value); err != nil {
		t.Fatalf("%v: %.100s", err, text)
	}
	return value
}

func read(t *testing.T, file string) map[string]interface{} {
	text, err := os.ReadFile(filepath.Join(folder, file))
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, text).(map[string]interface{})
}

// cases calls check with every case of a list and the driver's result.
func cases(t *testing.T, file, list string, check func(t *testing.T, c map[string]interface{}, got object)) {
	found, prefix, lists := results(t), "", read(t, file)
	if len(lists) > 2 { // besides format
		prefix = list + "/"
	}
	all := lists[list].([]interface{})
	if len(all) == 0 {
		t.Fatal("no cases")
	}
	for i, one := range all {
		c := one.(map[string]interface{})
		name, named := c["name"].(string)
		if !named {
			name = fmt.Sprint(i)
		}
		got := found[file+" "+prefix+name]
		t.Run(name, func(t *testing.T) { check(t, c, got) })
	}
}

// expected checks the result of a case. The case expects ok, an error, or either of the two.
func expected(t *testing.T, c map[string]interface{}, got object) {
	expect := c["expect"].(map[string]interface{})
	if code, refused := got["error"]; refused {
		if want, allowed := expect["error"]; !allowed || want != code {
			t.Fatalf("refused with %v: %v", code, c)
		}
		return
	}
	ok, allowed := expect["ok"]
	if !allowed {
		t.Fatalf("got %v, expected %v", got, expect)
	}
	if !reflect.DeepEqual(got["ok"], ok) {
		t.Fatalf("got  %v\nwant %v", got["ok"], ok)
	}
	if want, ok := expect["payloads"]; ok && !reflect.DeepEqual(got["payloads"], want) {
		t.Fatalf("got %v payloads, want %v", got["payloads"], want)
	}
}

func TestMessages(t *testing.T) {
	cases(t, "messages.json", "cases", checkMessage)
	cases(t, "applying.json", "messages", checkMessage)
	cases(t, "renaming.json", "messages", checkMessage)
	cases(t, "mapping.json", "cases", checkMessage)
	cases(t, "sealing.json", "headers", checkMessage)
	cases(t, "patching.json", "headers", checkMessage)
	cases(t, "metadata.json", "messages", checkMessage)
}

// Code that does not set a new field must send the default of the field, not the zero value of Go.
func TestMessagesOmitWhatIsNotSet(t *testing.T) {
	for kind, message := range fromWorker() {
		header := parse(t, wbp.Encode(message)).(map[string]interface{})
		required := list(orEmpty(schemas[kind])["required"])
		for _, field := range required {
			delete(header, field.(string))
		}
		if len(required) < 2 || len(header) != 0 { // wbp and type at least
			t.Errorf("an empty %s has %v, which are optional", kind, header)
		}
	}
}

func checkMessage(t *testing.T, c map[string]interface{}, got object) {
	want, accepted := c["expect"].(map[string]interface{})["ok"].(map[string]interface{})
	if c["direction"] == "from_publisher" {
		for _, side := range []interface{}{c["expect"], map[string]interface{}(got)} {
			if ok, is := side.(map[string]interface{})["ok"].(map[string]interface{}); is {
				fill(ok)
			}
		}
		expected(t, c, got)
		return
	}
	if !accepted {
		if got != nil {
			t.Fatalf("there should be no line, but: %v", got)
		}
		return
	}
	want["wbp"] = json.Number("1")
	header := parse(t, []byte(got["header"].(string))).(map[string]interface{})
	fill(header)
	fill(want)
	if !reflect.DeepEqual(header, want) {
		t.Fatalf("got  %v\nwant %v", header, want)
	}
}

// schemas are those of the messages, and of the objects in them, by name.
var schemas = func() map[string]interface{} {
	text, err := os.ReadFile("../../../docs/protocol/messages.schema.json")
	if err != nil {
		panic(err)
	}
	return orEmpty(parse(nil, text).(map[string]interface{})["$defs"])
}()

// fill adds the omitted fields of a message, and of the objects in it.
func fill(message map[string]interface{}) {
	fillBy(orEmpty(schemas[fmt.Sprint(message["type"])]), message)
}

func fillBy(of map[string]interface{}, value interface{}) {
	if name, is := of["$ref"].(string); is {
		of = orEmpty(schemas[strings.TrimPrefix(name, "#/$defs/")])
	} else if either := list(of["anyOf"]); either != nil { // the other one is null
		fillBy(orEmpty(either[0]), value)
		return
	}
	fields, isObject := value.(map[string]interface{})
	for name, property := range orEmpty(of["properties"]) {
		if _, there := fields[name]; !there && isObject {
			if at, has := orEmpty(property)["default"]; has {
				fields[name] = at
			}
		}
	}
	for name, field := range fields {
		property, known := orEmpty(of["properties"])[name]
		if !known {
			property = of["additionalProperties"]
		}
		fillBy(orEmpty(property), field)
	}
	for _, item := range list(value) {
		fillBy(orEmpty(of["items"]), item)
	}
}

func TestLayouts(t *testing.T) {
	cases(t, "layouts.json", "cases", func(t *testing.T, c map[string]interface{}, got object) {
		if ok, good := got["ok"].(map[string]interface{}); good { // tensors at the same position have no order
			sortTensors(ok)
		}
		if ok, good := c["expect"].(map[string]interface{})["ok"].(map[string]interface{}); good {
			sortTensors(ok)
		}
		expected(t, c, got)
	})
}

func sortTensors(layout map[string]interface{}) {
	tensors := layout["tensors"].([]interface{})
	sort.SliceStable(tensors, func(i, j int) bool {
		a, b := tensors[i].(map[string]interface{}), tensors[j].(map[string]interface{})
		if a["begin"] == b["begin"] && a["end"] == b["end"] {
			return a["name"].(string) < b["name"].(string)
		}
		return false
	})
}

func TestChunks(t *testing.T)   { cases(t, "chunks.json", "cases", expected) }
func TestSegments(t *testing.T) { cases(t, "segments.json", "cases", expected) }
func TestDeltas(t *testing.T)   { cases(t, "deltas.json", "cases", expected) }

func TestChecksums(t *testing.T) {
	for list, field := range map[string]string{"crc32c": "crc", "digests": "digest"} {
		cases(t, "checksums.json", list, func(t *testing.T, c map[string]interface{}, got object) {
			if !reflect.DeepEqual(got[field], c[field]) {
				t.Fatalf("got %v, want %v", got[field], c[field])
			}
		})
	}
}

func TestSealing(t *testing.T) {
	for _, list := range []string{"keys", "versions", "payloads"} {
		cases(t, "sealing.json", list, expected)
	}
	cases(t, "sealing.json", "messages", func(t *testing.T, c map[string]interface{}, got object) {
		counts := got["counts"].([]interface{})
		for i, said := range list(c["messages"]) {
			want, counted := said.(map[string]interface{})["counts"].(map[string]interface{})
			inside, is := counts[i].(map[string]interface{})
			if is != counted {
				t.Fatalf("message %d: got %v, want %v", i, counts[i], want)
			}
			for field, value := range want {
				if field != "wbp" && !reflect.DeepEqual(inside[field], value) {
					t.Fatalf("message %d, %s: got %v, want %v", i, field, inside[field], value)
				}
			}
		}
	})
}

func TestPhases(t *testing.T) {
	cases(t, "phases.json", "cases", func(t *testing.T, c map[string]interface{}, got object) {
		if got["next"] != c["next"] {
			t.Fatalf("got %v, want %v", got["next"], c["next"])
		}
	})
}

func TestVersions(t *testing.T) {
	cases(t, "versions.json", "cases", func(t *testing.T, c map[string]interface{}, got object) {
		if got["digest"] != c["digest"] {
			t.Fatalf("got %v, want %v", got, c["digest"])
		}
	})
}

func TestSequences(t *testing.T) {
	cases(t, "sequences.json", "cases", checkSequence)
	cases(t, "applying.json", "sequences", checkSequence)
	cases(t, "renaming.json", "sequences", checkSequence)
	cases(t, "companions.json", "sequences", checkSequence)
}

func checkSequence(t *testing.T, c map[string]interface{}, got object) {
	asked := map[string]bool{}
	for i, step := range c["steps"].([]interface{}) {
		expect, _ := step.(map[string]interface{})["expect"].(map[string]interface{})
		result := got["steps"].([]interface{})[i].(map[string]interface{})
		sent := result["sent"].([]interface{})
		for _, message := range sent {
			fill(message.(map[string]interface{}))
		}
		for _, want := range list(expect["sends"]) {
			if !contains(sent, want.(map[string]interface{})) {
				t.Errorf("step %d: %v was not sent, but %v", i, want, sent)
			}
		}
		for _, kind := range list(expect["silent"]) {
			if contains(sent, map[string]interface{}{"type": kind}) {
				t.Errorf("step %d: %v was sent: %v", i, kind, sent)
			}
		}
		note(asked, sent)
		if asks, ok := expect["asks"]; ok {
			want := map[string]bool{}
			for _, index := range asks.([]interface{}) {
				want[fmt.Sprint(index)] = true
			}
			if !reflect.DeepEqual(asked, want) {
				t.Errorf("step %d: asked for %v, not %v", i, asked, want)
			}
			asked = map[string]bool{}
		}
		for model, version := range orEmpty(expect["runs"]) {
			runs := result["runs"].(map[string]interface{})[model]
			if runs == nil {
				runs = json.Number("0")
			}
			if runs != version {
				t.Errorf("step %d: %s runs %v, not %v", i, model, runs, version)
			}
		}
	}
}

func list(value interface{}) []interface{} { l, _ := value.([]interface{}); return l }

func orEmpty(value interface{}) map[string]interface{} {
	m, _ := value.(map[string]interface{})
	return m
}

// contains reports whether a message with all these fields was sent.
func contains(sent []interface{}, want map[string]interface{}) bool {
	for _, message := range sent {
		all := true
		for field, value := range want {
			all = all && reflect.DeepEqual(message.(map[string]interface{})[field], value)
		}
		if all {
			return true
		}
	}
	return false
}

// note adds to asked the chunks that the sent messages request.
func note(asked map[string]bool, sent []interface{}) {
	for _, message := range sent {
		fields := message.(map[string]interface{})
		if fields["type"] != "fetch" {
			continue
		}
		first, _ := fields["first"].(json.Number).Int64()
		count, _ := fields["count"].(json.Number).Int64()
		for index := first; index < first+count; index++ {
			asked[fmt.Sprint(index)] = true
		}
	}
}

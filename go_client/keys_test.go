package weightbus

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

// The examples of RFC 32 and of libzmq's key pair.
const (
	samplePublic = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
	sampleSecret = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
)

func sampleKeys() Keys {
	return Keys{Name: "gpu-*", Public: samplePublic, Secret: sampleSecret, Publisher: samplePublic}
}

// write writes a key file, and returns its path.
func write(t *testing.T, what interface{}, mode os.FileMode) string {
	text, err := json.Marshal(what)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "w.json")
	if err := os.WriteFile(path, text, mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestKeysOfAFile(t *testing.T) {
	good := sampleKeys()
	with := func(change func(k *Keys)) Keys { k := good; change(&k); return k }
	for name, c := range map[string]struct {
		what interface{}
		mode os.FileMode
		want string // part of the error; empty for none
	}{
		"good":                 {good, 0o600, ""},
		"the group may read":   {good, 0o640, ""},
		"everybody may read":   {good, 0o604, "chmod 600"},
		"fields of later":      {object{"name": "w", "public": samplePublic, "secret": sampleSecret, "publisher": samplePublic, "x": 1}, 0o600, ""},
		"another pair":         {with(func(k *Keys) { k.Secret = strings.Repeat("0", 40) }), 0o600, "do not belong together"},
		"a key too short":      {with(func(k *Keys) { k.Public = samplePublic[1:] }), 0o600, "public is not a key"},
		"a key of other signs": {with(func(k *Keys) { k.Publisher = strings.Repeat("~", 40) }), 0o600, "publisher is not a key"},
		"a key too large":      {with(func(k *Keys) { k.Publisher = strings.Repeat("#", 40) }), 0o600, "publisher is not a key"},
		"two stars":            {with(func(k *Keys) { k.Name = "a*b*" }), 0o600, "at most one *"},
		"no name":              {with(func(k *Keys) { k.Name = "" }), 0o600, "at most one *"},
		"no keys":              {object{"name": "w"}, 0o600, "public is not a key"},
		"a list":               {[]int{}, 0o600, "is not a key file"},
		"too long":             {object{"name": "w", "x": strings.Repeat("x", keysBytesMax)}, 0o600, "is not a key file"},
	} {
		path := write(t, c.what, c.mode)
		keys, err := ReadKeys(path, "")
		if c.want == "" && (err != nil || keys.Public != samplePublic) {
			t.Errorf("%s: %v", name, err)
		}
		var wrong OptionError
		if c.want != "" && (!errors.As(err, &wrong) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path)) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && strings.Contains(err.Error(), sampleSecret) {
			t.Errorf("%s: the error tells the secret", name)
		}
	}
	if _, err := ReadKeys(filepath.Join(t.TempDir(), "none.json"), ""); err == nil || !strings.Contains(err.Error(), "none.json") {
		t.Error(err)
	}
	text, _ := json.Marshal(good)
	for _, path := range []string{string(text), "\n" + string(text)} {
		if _, err := ReadKeys(path, ""); err == nil || strings.Contains(err.Error(), sampleSecret) || !strings.Contains(err.Error(), "the path of a key file") {
			t.Error("the error tells the secret, or not what is wrong")
		}
	}
	for _, shown := range []string{fmt.Sprint(good), fmt.Sprintf("%+v", &good), fmt.Sprintf("%#v", good)} {
		if strings.Contains(shown, sampleSecret) || !strings.Contains(shown, samplePublic) {
			t.Error(shown)
		}
	}
}

func TestKeysOfAFolder(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "[a-z]*") // must not be read as a pattern
	if _, err := ReadKeys(t.TempDir(), ""); err == nil || !strings.Contains(err.Error(), "cannot be read") {
		t.Error(err)
	}
	if err := os.MkdirAll(filepath.Join(folder, "workers"), 0o700); err != nil {
		t.Fatal(err)
	}
	add := func(file, name string) {
		keys := sampleKeys()
		keys.Name = name
		text, _ := json.Marshal(keys)
		if err := os.WriteFile(filepath.Join(folder, "workers", file), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	add("gpu-+.json", "gpu-*")
	add("notes", "notes")
	add(".json", "none")
	if keys, err := ReadKeys(folder, ""); err != nil || keys.Name != "gpu-*" {
		t.Fatal(err)
	}
	add("gpu-1.json", "gpu-1")
	for name, want := range map[string]string{"gpu-1": "gpu-1", "gpu-2": "gpu-*", "gpu": "", "": ""} {
		keys, err := ReadKeys(folder, name)
		if (err == nil) != (want != "") || err == nil && keys.Name != want {
			t.Errorf("%q: %v, %v", name, keys, err)
		}
	}
}

func TestKeysOfTheOptionsAndTheEnvironment(t *testing.T) {
	t.Setenv(keysVariable, write(t, sampleKeys(), 0o600))
	own := sampleKeys()
	own.Name = "own"
	for name, c := range map[string]struct {
		given *Keys
		want  string
	}{"the environment's": {nil, "gpu-*"}, "none in spite of it": {&Keys{}, ""}, "those given": {&own, "own"}} {
		o := Options{Keys: c.given}
		keys, err := o.findKeys()
		if err != nil || (keys == nil) != (c.want == "") || (o.Keys == nil) != (c.want == "") || o.Keys != nil && o.Keys.Name != c.want {
			t.Errorf("%s: %v, %v", name, o.Keys, err)
		}
	}
	if _, err := (&Options{Keys: &Keys{Name: "w"}}).findKeys(); err == nil {
		t.Error("half of the keys were taken")
	}
	t.Setenv(keysVariable, "")
	if keys, err := (&Options{}).findKeys(); keys != nil || err != nil {
		t.Error(err)
	}
	gpu := sampleKeys()
	if name := defaultName(&gpu); !strings.HasPrefix(name, "gpu-") || len(name) < 8 || defaultName(&own) != "own" {
		t.Error(name)
	}
	if _, err := New("tcp://127.0.0.1:1", Options{Models: map[string]Tensors{"m": nil}, Keys: &Keys{Name: "w"}}); err == nil {
		t.Error("a worker without the keys that it was given")
	}
}

func TestWhatADoorSays(t *testing.T) {
	hungUp := error(&zmtp.HungUpError{Err: errors.New("reset")})
	for _, c := range []struct {
		keyed bool
		errs  []error
		every time.Duration
		want  string
	}{
		{true, []error{zmtp.NotAllowed}, 0, notAllowed},
		{true, []error{zmtp.PeerWithoutKeys}, 0, publisherWithoutKeys},
		{false, []error{zmtp.PeerWithKeys}, 0, workerWithoutKeys},
		{true, []error{errors.New("refused")}, 0, ""},
		{true, []error{hungUp, hungUp, hungUp}, 5 * time.Second, anotherKey},
		{true, []error{hungUp, hungUp, hungUp}, 2 * time.Second, ""}, // the publisher may be busy
		{true, []error{hungUp, hungUp}, 20 * time.Second, ""},
		{true, []error{hungUp, nil, hungUp, hungUp}, 5 * time.Second, ""},
		{false, []error{hungUp, hungUp, hungUp}, 5 * time.Second, ""},
	} {
		d, now, why := handshakes{keyed: c.keyed, lostAfter: 5 * time.Second}, time.Duration(0), ""
		for _, err := range c.errs {
			if now += c.every; err == nil {
				d.succeeded()
			} else {
				why = d.keyFault(err, now)
			}
		}
		if why != c.want {
			t.Errorf("%v: %q", c, why)
		}
	}
}

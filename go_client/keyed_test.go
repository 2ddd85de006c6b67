package weightbus

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var quick = object{"ping": 0.2, "lost_after": 1}

// keygen creates a folder of keys.
func keygen(t *testing.T, names ...string) string {
	t.Helper()
	if _, err := os.Stat("../.venv/bin/weightbus"); err != nil {
		t.Skip("there is no ../.venv to make keys with: run `make test` in the root once")
	}
	folder := filepath.Join(t.TempDir(), "keys")
	if out, err := exec.Command("../.venv/bin/weightbus", append([]string{"keygen", folder}, names...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return folder
}

// keyedWorker returns a worker with the keys for a name, whose model m has one tensor of this size.
func keyedWorker(t *testing.T, address, folder, name string, size int) (*Worker, []float32) {
	t.Helper()
	keys, err := ReadKeys(folder, name)
	if err != nil {
		t.Fatal(err)
	}
	w := make([]float32, size)
	worker, err := New(address, Options{Name: name, NetworkOnly: true, Keys: keys, Ping: 200 * time.Millisecond,
		LostAfter: time.Second, Models: map[string]Tensors{"m": {"w": F32(w, size)}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { worker.Close() })
	return worker, w
}

// refusal waits until a worker is refused, and returns the text.
func refusal(t *testing.T, w *Worker, code Code) string {
	t.Helper()
	ctx := within(t, 30*time.Second)
	for {
		_, err := w.Receive(ctx)
		var refused *RefusedError
		if errors.As(err, &refused) && refused.Code == code {
			return refused.Text
		}
		if ctx.Err() != nil {
			t.Fatalf("%s was not refused as %s: %v", w.Name(), code, err)
		}
	}
}

// Versions are pushed and fetched while group keys rotate all the time.
func TestKeysVersionsAndRekeying(t *testing.T) {
	for _, ipc := range []bool{false, true} {
		folder := keygen(t, "w", "late-*")
		options := object{"keys": folder, "rekey": 0.1, "chunk_bytes": 4096, "shared_memory": false, "timing": quick}
		if ipc {
			options["address"] = "ipc://" + filepath.Join(t.TempDir(), "s")
		}
		p := publish(t, options)
		w, memory := keyedWorker(t, p.address, folder, "w", 20_000)
		updates := applies(t, w)
		p.do(object{"wait_for_workers": 1})
		size, last := len(memory), 0
		for begun := time.Now(); time.Since(begun) < 700*time.Millisecond; {
			last++
			p.version(last, size, object{})
			if update := next(t, updates); update.Version != int64(last) || update.Digest == "" || memory[0] != float32(last) || memory[size-1] != memory[0] {
				t.Fatalf("%+v: %v", update, memory[0])
			}
		}
		late, fetched := keyedWorker(t, p.address, folder, "late-1", 20_000)
		if update, err := late.Receive(within(t, 30*time.Second)); err != nil || update.Version != int64(last) || fetched[19_999] != float32(last) {
			t.Fatalf("%+v %v", update, err)
		}
		if stats := w.Stats(); stats.Malformed != 0 || stats.NetworkBytes != int64(last*80_000) {
			t.Fatalf("%+v", stats)
		}
		w.Close()
		late.Close()
		p.kill()
	}
}

// With shared memory only messages are sealed. A small version is part of its announcement.
func TestKeysOverSharedMemoryAndWhole(t *testing.T) {
	folder := keygen(t, "w")
	for _, shared := range []bool{true, false} {
		p := publish(t, object{"keys": folder, "shared_memory": shared})
		keys, err := ReadKeys(folder, "w")
		if err != nil {
			t.Fatal(err)
		}
		w, err := Dial(within(t, 30*time.Second), p.address, Options{Keys: keys, Models: map[string]Tensors{"m": nil}})
		if err != nil || w.Name() != "w" {
			t.Fatal(err)
		}
		updates := applies(t, w)
		for v := 1; v <= 3; v++ {
			p.version(v, 100, object{})
			if update := next(t, updates); update.Version != int64(v) || (update.Digest == "") != shared {
				t.Fatalf("%+v", update)
			}
		}
		w.Close()
		p.kill()
	}
}

func TestKeysThatAreRevokedAndAllowedAgain(t *testing.T) {
	folder := keygen(t, "w", "other")
	p := publish(t, object{"keys": folder, "shared_memory": false, "timing": quick})
	w, memory := keyedWorker(t, p.address, folder, "w", 1000)
	other, _ := keyedWorker(t, p.address, folder, "other", 1000)
	theirs := applies(t, other)
	p.do(object{"wait_for_workers": 2})
	p.version(1, 1000, object{"wait": "applied", "workers": []string{"other"}})
	next(t, theirs)
	allowed, kept := filepath.Join(folder, "allowed", "w.json"), filepath.Join(t.TempDir(), "w.json")
	if err := os.Rename(allowed, kept); err != nil {
		t.Fatal(err)
	}
	if text := refusal(t, w, CodeRevoked); text == "" {
		t.Fatal("it is not told why")
	}
	p.version(2, 1000, object{})
	if update := next(t, theirs); update.Version != 2 || memory[0] == 2 {
		t.Fatalf("%+v, %v", update, memory[0])
	}
	stranger, _ := keyedWorker(t, p.address, folder, "w", 1000) // its handshake is refused, too
	if text := refusal(t, stranger, CodeKeys); text != notAllowed {
		t.Fatal(text)
	}
	stranger.Close()
	if err := os.Rename(kept, allowed); err != nil {
		t.Fatal(err)
	}
	for ctx := within(t, 30*time.Second); ; { // earlier refusals may still be queued
		update, err := w.Receive(ctx)
		if err == nil && update.Version == 2 && memory[0] == 2 {
			return
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
}

func TestKeysThatDoNotFit(t *testing.T) {
	folder, others := keygen(t, "w", "gpu-*"), keygen(t, "w")
	p := publish(t, object{"keys": folder, "timing": quick})
	pinned, _ := keyedWorker(t, p.address, others, "w", 1) // the key of another publisher
	wrong, err := ReadKeys(folder, "gpu-1")
	if err != nil {
		t.Fatal(err)
	}
	models := map[string]Tensors{"m": nil}
	named, err := New(p.address, Options{Name: "cpu-1", Keys: wrong, Models: models})
	if err != nil {
		t.Fatal(err)
	}
	defer named.Close()
	bare, err := New(p.address, Options{Keys: &Keys{}, Models: models})
	if err != nil {
		t.Fatal(err)
	}
	defer bare.Close()
	plain := publish(t, object{"timing": quick})
	keyed, _ := keyedWorker(t, plain.address, folder, "w", 1)
	for _, c := range []struct {
		worker *Worker
		code   Code
		text   string
	}{
		{bare, CodeKeys, workerWithoutKeys}, {keyed, CodeKeys, publisherWithoutKeys}, {pinned, CodeKeys, anotherKey},
		{named, CodeWrongName, "gpu-*"},
	} {
		if text := refusal(t, c.worker, c.code); !strings.Contains(text, c.text) {
			t.Errorf("%s: %s", c.worker.Name(), text)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		if err := c.worker.Join(ctx); err == nil {
			t.Errorf("%s has joined", c.worker.Name())
		}
		cancel()
	}
}

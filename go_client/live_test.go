package weightbus

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// An object is a JSON object.
type object map[string]interface{}

// A publisher is a Python process with a weightbus.Publisher.
type publisher struct {
	t       *testing.T
	command *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	address string
}

// publish starts a publisher; options are those of weightbus.Publisher.
func publish(t *testing.T, options object) *publisher {
	t.Helper()
	text, _ := json.Marshal(options)
	return steer(t, "testdata/publisher.py", string(text))
}

// steer starts a Python program that is steered by lines of JSON.
func steer(t *testing.T, words ...string) *publisher {
	t.Helper()
	python, err := filepath.Abs("../.venv/bin/python")
	if _, missing := os.Stat(python); err != nil || missing != nil {
		t.Skip("there is no ../.venv to publish from: run `make test` in the root once")
	}
	p := &publisher{t: t, command: exec.Command(python, words...)}
	p.command.Stderr = os.Stderr
	p.in, _ = p.command.StdinPipe()
	out, _ := p.command.StdoutPipe()
	p.out = bufio.NewReader(out)
	if err := p.command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	p.address = p.answer()["address"].(string)
	return p
}

// kill ends the publisher without bye.
func (p *publisher) kill() {
	_ = p.command.Process.Kill()
	_ = p.command.Wait()
}

func (p *publisher) answer() object {
	p.t.Helper()
	line, err := p.out.ReadBytes('\n')
	answer := object{}
	if err == nil {
		err = json.Unmarshal(line, &answer)
	}
	if err != nil {
		p.t.Fatalf("the publisher has ended: %v", err)
	}
	return answer
}

func (p *publisher) do(command object) object {
	p.t.Helper()
	text, _ := json.Marshal(command)
	if _, err := p.in.Write(append(text, '\n')); err != nil {
		p.t.Fatal(err)
	}
	return p.answer()
}

// version publishes a version whose elements are all of this value.
func (p *publisher) version(value int, size int, how object) {
	p.t.Helper()
	how["timeout"] = 30
	p.do(object{"model": "m", "weights": object{"w": []interface{}{"float32", []int{size}, value}}, "how": how})
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// subscribe returns a worker whose model m has one tensor of this size.
func subscribe(t *testing.T, address, name string, size int, network bool) (*Worker, []float32) {
	t.Helper()
	w := make([]float32, size)
	worker, err := New(address, Options{Name: name, NetworkOnly: network,
		Models: map[string]Tensors{"m": {"w": F32(w, size)}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { worker.Close() })
	return worker, w
}

// applies receives in the background, and returns a channel of the updates.
func applies(t *testing.T, w *Worker) <-chan Update {
	updates := make(chan Update, 1000)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go func() {
		for {
			update, err := w.Receive(ctx)
			if err != nil && (errors.Is(err, ErrClosed) || ctx.Err() != nil) {
				return
			}
			if err == nil {
				updates <- update
			}
		}
	}()
	return updates
}

func next(t *testing.T, updates <-chan Update) Update {
	t.Helper()
	select {
	case update := <-updates:
		return update
	case <-time.After(60 * time.Second):
		t.Fatal("no version came")
		panic("")
	}
}

func TestVersionsAreApplied(t *testing.T) {
	for _, transport := range []string{"network", "shared"} {
		for _, ipc := range []bool{false, true} {
			options := object{}
			if ipc {
				options["address"] = "ipc://" + filepath.Join(t.TempDir(), "s")
			}
			p := publish(t, options)
			w, memory := subscribe(t, p.address, "w", 100_000, transport == "network")
			if err := w.Join(within(t, 30*time.Second)); err != nil {
				t.Fatal(err)
			}
			p.do(object{"wait_for_workers": 1})
			updates := applies(t, w)
			for v := 1; v <= 3; v++ {
				p.version(v, len(memory), object{})
				update := next(t, updates)
				err := w.Read(within(t, 10*time.Second), "m", func(view View) {
					tensor, ok := view.Tensor("w")
					if !ok || memory[0] != float32(v) || memory[len(memory)-1] != float32(v) || &tensor.Bytes()[0] == nil {
						t.Errorf("%s: %v after version %d", transport, memory[0], v)
					}
				})
				if err != nil || update.Version != int64(v) || (update.Digest == "") != (transport == "shared") {
					t.Fatalf("%s: %+v, %v", transport, update, err)
				}
			}
			w.Close()
			p.kill()
		}
	}
}

func TestALateWorkerAndItsRestart(t *testing.T) {
	p := publish(t, object{"shared_memory": false, "chunk_bytes": 4096})
	first, _ := subscribe(t, p.address, "first", 10_000, true)
	updates := applies(t, first)
	p.do(object{"wait_for_workers": 1})
	p.version(7, 10_000, object{})
	next(t, updates)
	for round := 0; round < 2; round++ { // the second one has the same name
		late, memory := subscribe(t, p.address, "late", 10_000, true)
		if update, err := late.Receive(within(t, 30*time.Second)); err != nil || update.Version != 1 || memory[9999] != 7 {
			t.Fatalf("%+v %v", update, err)
		}
		late.Close()
	}
}

func TestThePublisherIsRestarted(t *testing.T) {
	path := "ipc://" + filepath.Join(t.TempDir(), "s")
	p := publish(t, object{"address": path, "shared_memory": false})
	w, memory := subscribe(t, path, "w", 1000, true)
	updates := applies(t, w)
	p.do(object{"wait_for_workers": 1})
	p.version(1, 1000, object{})
	before := next(t, updates)
	p.kill()
	p = publish(t, object{"address": path, "shared_memory": false})
	p.do(object{"wait_for_workers": 1})
	p.version(2, 1000, object{})
	after := next(t, updates)
	if after.Epoch <= before.Epoch || after.Version != 1 || memory[0] != 2 {
		t.Fatalf("%+v, then %+v", before, after)
	}
}

func TestTogetherAndTargeted(t *testing.T) {
	p := publish(t, object{"shared_memory": false})
	var all []<-chan Update
	for _, name := range []string{"a", "b"} {
		w, _ := subscribe(t, p.address, name, 1000, true)
		all = append(all, applies(t, w))
	}
	p.do(object{"wait_for_workers": 2})
	p.version(1, 1000, object{"commit": "together"})
	for _, updates := range all {
		if update := next(t, updates); update.Version != 1 {
			t.Fatalf("%+v", update)
		}
	}
	p.version(2, 1000, object{"workers": []string{"b"}})
	p.version(3, 1000, object{})
	if a, b, c := next(t, all[0]), next(t, all[1]), next(t, all[1]); a.Version != 3 || b.Version != 2 || c.Version != 3 {
		t.Fatalf("%+v %+v %+v", a, b, c)
	}
}

// With shared memory, versions that must be staged are hashed, and so are those with hash set.
func TestDigestsOverSharedMemory(t *testing.T) {
	p := publish(t, object{"chunk_bytes": 1000})
	w, memory := subscribe(t, p.address, "w", 5000, false)
	updates := applies(t, w)
	p.do(object{"wait_for_workers": 1})
	for i, c := range []struct {
		how    object
		hashed bool
	}{
		{object{}, false}, {object{"verify": true}, true}, {object{"commit": "together"}, true}, {object{}, false},
		{object{"wait": "staged"}, true},
	} {
		p.version(i, 5000, c.how)
		if update := next(t, updates); (update.Digest != "") != c.hashed || memory[4999] != float32(i) {
			t.Fatalf("%v: %+v, %v", c.how, update, memory[4999])
		}
	}
	if stats := w.Stats(); stats != (Stats{Applied: 5, SharedBytes: 5 * 20_000}) {
		t.Fatalf("%+v", stats)
	}
}

func TestASlowWorkerSkipsVersionsAndEndsAtTheLast(t *testing.T) {
	p := publish(t, object{"shared_memory": false, "chunk_bytes": 1000})
	w, memory := subscribe(t, p.address, "w", 20_000, true)
	p.do(object{"wait_for_workers": 1})
	for v := 1; v <= 200; v++ {
		p.do(object{"model": "m", "wait": false, "how": object{"timeout": 60},
			"weights": object{"w": []interface{}{"float32", []int{20_000}, v}}})
	}
	var last int64
	for last < 200 {
		update, err := w.Receive(within(t, 60*time.Second))
		if err != nil || update.Version <= last || memory[0] != float32(update.Version) || memory[19_999] != memory[0] {
			t.Fatalf("%+v after %d, %v: %v", update, last, memory[0], err)
		}
		last = update.Version
	}
}

func TestAReaderNeverSeesHalfAVersion(t *testing.T) {
	for _, network := range []bool{true, false} {
		p := publish(t, object{})
		w, memory := subscribe(t, p.address, "w", 300_000, network)
		updates := applies(t, w)
		p.do(object{"wait_for_workers": 1})
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
				}
				err := w.Read(context.Background(), "m", func(View) {
					for i := range memory {
						if memory[i] != memory[0] {
							t.Errorf("%v and %v", memory[0], memory[i])
							return
						}
					}
				})
				if err != nil && !errors.Is(err, ErrNoVersion) {
					t.Error(err)
				}
			}
		}()
		for v := 1; v <= 20; v++ {
			p.version(v, len(memory), object{})
			next(t, updates)
		}
		close(stop)
		<-stopped
		w.Close()
	}
}

func TestWhatDoesNotFit(t *testing.T) {
	p := publish(t, object{})
	w, memory := subscribe(t, p.address, "w", 12, true)
	p.do(object{"wait_for_workers": 1})
	p.do(object{"model": "m", "wait": false, "how": object{"timeout": 30},
		"weights": object{"w": []interface{}{"float32", []int{4, 3}, 1}, "b": []interface{}{"int16", []int{2}, 1}}})
	_, err := w.Receive(within(t, 30*time.Second))
	want := "b: published as I16 [2], not in the target\nw: shape [4, 3] published, [12] here"
	var failed *ApplyError
	if !errors.Is(err, CodeLayoutMismatch) || !errors.As(err, &failed) || failed.Text != want {
		t.Fatal(err)
	}
	p.do(object{"model": "m", "wait": false, "how": object{"timeout": 30},
		"weights": object{"w": []interface{}{"float32", []int{12}, 5}}})
	if update, err := w.Receive(within(t, 30*time.Second)); err == nil && (update.Version != 2 || memory[0] != 5) || err != nil {
		t.Fatalf("%+v %v", update, err)
	}
}

func TestSnapshots(t *testing.T) {
	p := publish(t, object{})
	w, err := Dial(within(t, 30*time.Second), p.address, Options{Name: "w", Models: map[string]Tensors{"m": nil}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	updates := applies(t, w)
	p.version(1, 5, object{})
	next(t, updates)
	one, err := w.Snapshot(within(t, 10*time.Second), "m")
	if err != nil {
		t.Fatal(err)
	}
	p.version(2, 7, object{})
	next(t, updates)
	two, err := w.Snapshot(within(t, 10*time.Second), "m")
	if err != nil {
		t.Fatal(err)
	}
	for i, view := range []View{one, two} {
		tensor, ok := view.Tensor("w")
		values, err := tensor.Float32s()
		if !ok || err != nil || view.Version != int64(i+1) || len(values) != []int{5, 7}[i] || values[0] != float32(i+1) {
			t.Fatalf("%v %v %v", view, values, err)
		}
	}
}

func TestANameThatIsTaken(t *testing.T) {
	p := publish(t, object{})
	first, _ := subscribe(t, p.address, "w", 1, true)
	if err := first.Join(within(t, 30*time.Second)); err != nil {
		t.Fatal(err)
	}
	_, err := Dial(within(t, 30*time.Second), p.address, Options{Name: "w", Models: map[string]Tensors{"m": nil}})
	var refused *RefusedError
	if !errors.Is(err, CodeNameTaken) || !errors.As(err, &refused) || refused.Name != "w" {
		t.Fatal(err)
	}
}

// Versions are sent as patches, unless the worker has NoPatches.
func TestPatches(t *testing.T) {
	const size = 200_000
	for _, keyed := range []bool{false, true} {
		options, with := object{"shared_memory": false, "chunk_bytes": 1 << 16}, Options{NetworkOnly: true}
		if keyed {
			folder := keygen(t, "*")
			keys, err := ReadKeys(folder, "w")
			if err != nil {
				t.Fatal(err)
			}
			options["keys"], with.Keys = folder, keys
		}
		p := publish(t, options)
		workers, memory := map[string]<-chan Update{}, map[string][]float32{}
		for _, name := range []string{"patched", "whole"} {
			memory[name] = make([]float32, 7)
			with.Name, with.NoPatches = name, name == "whole"
			with.Models = map[string]Tensors{"m": {"w": F16(make([]uint16, size), size), "b": F32(memory[name], 7)}}
			w, err := New(p.address, with)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { w.Close() })
			workers[name] = applies(t, w)
		}
		p.do(object{"wait_for_workers": 2})
		for v := 1; v <= 4; v++ {
			answer := p.do(object{"model": "m", "how": object{"encoding": "delta", "timeout": 30}, "weights": object{
				"w": []interface{}{"float16", []int{size}, 1}, "b": []interface{}{"float32", []int{7}, v}}})
			for name, updates := range workers {
				want := "raw"
				if v > 1 && name == "patched" {
					want = "delta-1"
				}
				update, came := next(t, updates), answer["encodings"].(map[string]interface{})[name]
				if update.Encoding != want || came != want || memory[name][6] != float32(v) {
					t.Fatalf("%s: version %d came as %s (the publisher says %v), not %s", name, v, update.Encoding, came, want)
				}
			}
		}
		p.kill()
	}
}

// 256 MiB, over the network and over shared memory.
func TestALargeVersion(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes two gigabytes")
	}
	for _, network := range []bool{true, false} {
		p := publish(t, object{})
		w, memory := subscribe(t, p.address, "w", 1<<26, network)
		updates := applies(t, w)
		p.do(object{"wait_for_workers": 1})
		for v := 1; v <= 2; v++ {
			p.version(v, len(memory), object{})
			if update := next(t, updates); update.Bytes != 1<<28 || memory[0] != float32(v) || memory[1<<26-1] != float32(v) {
				t.Fatalf("%+v: %v", update, memory[0])
			}
		}
		w.Close()
		p.kill()
	}
}

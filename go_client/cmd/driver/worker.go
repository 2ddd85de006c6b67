package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	weightbus "github.com/weightbus/weightbus/go_client"
	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// A spec is a tensor in the file of --in-place.
type spec struct {
	DType string
	Shape []int
}

func (s spec) signature() wbp.Signature {
	shape := make([]int64, len(s.Shape))
	for i, size := range s.Shape {
		shape[i] = int64(size)
	}
	return wbp.Signature{DType: s.DType, Shape: shape}
}

const renameCheckInterval = 100 * time.Millisecond

type settings struct {
	models    []string
	inPlace   map[string]map[string]spec
	noTensors bool
	turnDown  numbers // versions that the user rejects
	breaks    numbers // versions that the user fails to apply after bytes have changed
	slow      slowness
	cast      bool
}

// A slowness is the duration of applies. The flag is S (seconds) for every version, or S:N,... for
// the versions N,...
type slowness struct {
	duration time.Duration
	versions numbers // nil: every version
}

func (s *slowness) String() string { return "" }

// Set parses the flag.
func (s *slowness) Set(text string) error {
	digits, versions, hasVersions := strings.Cut(text, ":")
	number, err := strconv.ParseFloat(digits, 64)
	if s.duration = inSeconds(number); err == nil && hasVersions {
		s.versions = numbers{}
		err = s.versions.Set(versions)
	}
	return err
}

// numbers is a set of version numbers, separated by commas in the flag.
type numbers map[int64]bool

func (n numbers) String() string { return "" }

// Set parses the flag.
func (n numbers) Set(text string) error {
	for _, digits := range strings.Split(text, ",") {
		number, err := strconv.ParseInt(digits, 10, 64)
		if err != nil {
			return err
		}
		n[number] = true
	}
	return nil
}

// worker joins and applies versions until a signal or the end of its time.
func worker(address string, arguments []string) error {
	flags := flag.NewFlagSet("driver worker ADDRESS", flag.ContinueOnError)
	name := flags.String("name", "", "the worker's name")
	models := flags.String("models", "", "the models to receive, separated by commas")
	inPlace := flags.String("in-place", "", "a file with the tensors to register")
	noTensors := flags.Bool("no-tensors", false, "do not print checksums of tensors")
	bytesMax := flags.Int64("bytes-max", 0, "the size of the largest version to accept")
	network := flags.Bool("network", false, "do not use shared memory")
	seconds := flags.Float64("seconds", 120, "how long to run")
	s := settings{turnDown: numbers{}, breaks: numbers{}}
	flags.Var(s.turnDown, "turn-down", "versions that the user rejects")
	flags.Var(s.breaks, "break", "versions that the user fails to apply after bytes have changed")
	flags.Var(&s.slow, "apply-seconds", "how many seconds the user's apply takes")
	applyTimeout := flags.Float64("apply-timeout", 0, "the limit of the user's apply in seconds; 0: the default")
	keys := flags.String("keys", "", "the worker's key file, made by weightbus keygen")
	partial := flags.Bool("partial", false, "versions may have tensors that are not registered")
	flags.BoolVar(&s.cast, "cast", false, "versions may have other dtypes than are registered")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	s.models, s.noTensors = strings.Split(*models, ","), *noTensors
	if *inPlace != "" {
		text, err := os.ReadFile(*inPlace)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &s.inPlace); err != nil {
			return err
		}
	}
	memory, err := s.memory()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), inSeconds(*seconds))
	defer cancel()
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, os.Interrupt)
	defer stop()
	options := weightbus.Options{Name: *name, Models: memory, BytesMax: *bytesMax, NetworkOnly: *network,
		Partial: *partial, Cast: s.cast, ApplyTimeout: inSeconds(*applyTimeout)}
	if *keys != "" {
		if options.Keys, err = weightbus.ReadKeys(*keys, *name); err != nil {
			return err
		}
	}
	if len(s.turnDown) > 0 {
		options.BeforeApply = s.beforeApply
	}
	if len(s.turnDown)+len(s.breaks) > 0 || s.slow.duration > 0 {
		options.Apply = s.apply
	}
	w, err := weightbus.New(address, options)
	if err != nil {
		return err
	}
	s.run(ctx, w)
	return nil
}

func inSeconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

var errTurnedDown = errors.New("told to turn down")

// beforeApply rejects the versions of --turn-down, of models with registered memory.
func (s settings) beforeApply(_ context.Context, next weightbus.Update) error {
	if s.inPlace[next.Model] != nil && s.turnDown[next.Version] {
		return errTurnedDown
	}
	return nil
}

// apply sleeps as --apply-seconds says. Then it rejects the versions of --turn-down, of models
// without registered memory, and those of --break.
func (s settings) apply(_ context.Context, v weightbus.View) error {
	if s.slow.versions == nil || s.slow.versions[v.Version] {
		time.Sleep(s.slow.duration)
	}
	switch {
	case s.inPlace[v.Model] == nil && s.turnDown[v.Version]:
		return errTurnedDown
	case s.inPlace[v.Model] != nil && s.breaks[v.Version]:
		return errors.New("told to break")
	}
	return nil
}

// memory allocates the tensors to register.
func (s settings) memory() (map[string]weightbus.Tensors, error) {
	models := map[string]weightbus.Tensors{}
	for _, model := range s.models {
		specs, registered := s.inPlace[model]
		if !registered {
			models[model] = nil
			continue
		}
		tensors := weightbus.Tensors{}
		for name, spec := range specs {
			size, ok := wbp.TensorBytes(spec.DType, spec.signature().Shape)
			if !ok {
				return nil, fmt.Errorf("%s of %s: %s %v is not a tensor", name, model, spec.DType, spec.Shape)
			}
			tensors[name] = weightbus.Bits(spec.DType, make([]byte, size), spec.Shape...)
		}
		models[model] = tensors
	}
	return models, nil
}

// run receives versions and prints events. Meanwhile it reads the registered models repeatedly, to
// find bytes of two versions at once. It does not do so with --no-tensors (for measurements) or with
// --cast.
func (s settings) run(ctx context.Context, w *weightbus.Worker) {
	var goroutines sync.WaitGroup
	goroutines.Add(1)
	go func() { defer goroutines.Done(); watch(w.Events()) }()
	for model := range s.inPlace {
		if s.noTensors || s.cast {
			break
		}
		goroutines.Add(1)
		go func(model string) { defer goroutines.Done(); lookForTears(ctx, w, model) }(model)
	}
	printed := map[string]wbp.Key{} // the last printed version, by model
	for {
		waitCtx, cancel := context.WithTimeout(ctx, renameCheckInterval)
		update, err := w.Receive(waitCtx)
		cancel()
		var failed *weightbus.ApplyError
		switch {
		case err == nil:
			printed[update.Model] = wbp.Key{Epoch: update.Epoch, Version: update.Version}
			s.applied(ctx, w, update)
		case errors.As(err, &failed):
			print(object{"event": "failed", "model": failed.Model, "epoch": failed.Epoch, "version": failed.Version,
				"code": string(failed.Code), "text": failed.Text})
		case ctx.Err() != nil || errors.Is(err, weightbus.ErrClosed):
			_ = w.Close()
			goroutines.Wait()
			return
		default:
			s.printRenamed(ctx, w, printed)
		}
	}
}

// eventOf returns an event with the fields that all events about a version have.
func eventOf(event string, of weightbus.Update) object {
	line := object{"event": event, "model": of.Model, "epoch": of.Epoch, "version": of.Version}
	if of.Metadata != nil {
		line["metadata"] = of.Metadata
	}
	return line
}

// printRenamed prints each running version whose key is not the last printed key of its model.
func (s settings) printRenamed(ctx context.Context, w *weightbus.Worker, printed map[string]wbp.Key) {
	for _, model := range s.models {
		_ = w.Read(ctx, model, func(v weightbus.View) { // an error: no version runs, or the driver stops
			if runs := (wbp.Key{Epoch: v.Epoch, Version: v.Version}); runs != printed[model] {
				printed[model] = runs
				print(eventOf("runs", v.Update))
			}
		})
	}
}

// applied prints an applied version, with the checksums of its tensors in memory.
func (s settings) applied(ctx context.Context, w *weightbus.Worker, update weightbus.Update) {
	line := eventOf("applied", update)
	line["digest"] = update.Digest
	if !s.noTensors {
		crcs := map[string]uint32{}
		err := w.Read(ctx, update.Model, func(v weightbus.View) {
			for _, name := range v.Names() {
				t, _ := v.Tensor(name)
				crcs[name] = wbp.CRC32C(t.Bytes())
			}
		})
		if err != nil {
			return // the driver stops
		}
		line["tensors"] = crcs
	}
	print(line)
}

// watch prints the start and end of sessions, and refusals, but not the same refusal twice in a row.
// It writes other events to standard error.
func watch(events <-chan weightbus.Event) {
	var last weightbus.Event
	for event := range events {
		if event == last && event.Kind == weightbus.Refused {
			continue
		}
		switch event.Kind {
		case weightbus.Joined:
			print(object{"event": "joined", "epoch": event.Epoch})
		case weightbus.Lost:
			print(object{"event": "lost"})
		case weightbus.Refused:
			print(object{"event": "refused", "code": string(event.Code), "text": event.Text})
		default:
			fmt.Fprintln(os.Stderr, event.Kind, event.Text)
			continue
		}
		last = event
	}
}

// lookForTears reads all tensors of a model repeatedly, and prints an event if they mix versions: the
// publisher gives all bytes of a version the same value.
func lookForTears(ctx context.Context, w *weightbus.Worker, model string) {
	for ctx.Err() == nil {
		err := w.Read(ctx, model, func(v weightbus.View) {
			first := -1
			for _, name := range v.Names() {
				t, _ := v.Tensor(name)
				for _, b := range t.Bytes() {
					if first < 0 {
						first = int(b)
					}
					if int(b) != first {
						print(object{"event": "torn", "model": model, "epoch": v.Epoch, "version": v.Version,
							"tensor": name, "values": []int{first, int(b)}})
						return
					}
				}
			}
		})
		if err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond): // no version yet
			}
		}
	}
}

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

const lookEvery = 100 * time.Millisecond // interval of checks for a rename

type settings struct {
	models    []string
	inPlace   map[string]map[string]spec
	noTensors bool
	turnDown  numbers
	breaks    numbers
	slow      slowness
	cast      bool
}

// A slowness is the duration of applies: S for every version, or S:N,... for some.
type slowness struct {
	seconds time.Duration
	of      numbers
}

func (s *slowness) String() string { return "" }

// Set parses the flag.
func (s *slowness) Set(text string) error {
	digits, of, some := strings.Cut(text, ":")
	number, err := strconv.ParseFloat(digits, 64)
	if s.seconds = inSeconds(number); err == nil && some {
		s.of = numbers{}
		err = s.of.Set(of)
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
	name := flags.String("name", "", "what the worker is called")
	models := flags.String("models", "", "the models it wants, separated by commas")
	inPlace := flags.String("in-place", "", "a file with the tensors to register")
	noTensors := flags.Bool("no-tensors", false, "leave out the checksums of tensors")
	bytesMax := flags.Int64("bytes-max", 0, "the largest version to accept")
	network := flags.Bool("network", false, "do not use shared memory")
	seconds := flags.Float64("seconds", 120, "when to end")
	s := settings{turnDown: numbers{}, breaks: numbers{}}
	flags.Var(s.turnDown, "turn-down", "versions that the user does not want")
	flags.Var(s.breaks, "break", "versions at which the user fails after bytes have changed")
	flags.Var(&s.slow, "apply-seconds", "what the user's apply takes")
	applyTimeout := flags.Float64("apply-timeout", 0, "and what it may take")
	keys := flags.String("keys", "", "the worker's file of weightbus keygen")
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
	if len(s.turnDown)+len(s.breaks) > 0 || s.slow.seconds > 0 {
		options.Apply = s.applies
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

// beforeApply rejects versions of registered models.
func (s settings) beforeApply(_ context.Context, next weightbus.Update) error {
	if s.inPlace[next.Model] != nil && s.turnDown[next.Version] {
		return errTurnedDown
	}
	return nil
}

// applies sleeps, and rejects snapshots or fails.
func (s settings) applies(_ context.Context, v weightbus.View) error {
	if s.slow.of == nil || s.slow.of[v.Version] {
		time.Sleep(s.slow.seconds)
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

// run receives versions and prints events. Meanwhile it reads the registered models, to find mixed
// versions. It does not read them with --no-tensors (for measurements) or with --cast.
func (s settings) run(ctx context.Context, w *weightbus.Worker) {
	var others sync.WaitGroup
	others.Add(1)
	go func() { defer others.Done(); watch(w.Events()) }()
	for model := range s.inPlace {
		if s.noTensors || s.cast {
			break
		}
		others.Add(1)
		go func(model string) { defer others.Done(); lookForTears(ctx, w, model) }(model)
	}
	printed := map[string]wbp.Key{} // the last printed version, by model
	for {
		waitCtx, cancel := context.WithTimeout(ctx, lookEvery)
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
			others.Wait()
			return
		default:
			s.look(ctx, w, printed)
		}
	}
}

// said returns the fields of a version that all events have.
func said(event string, of weightbus.Update) object {
	line := object{"event": event, "model": of.Model, "epoch": of.Epoch, "version": of.Version}
	if of.Metadata != nil {
		line["metadata"] = of.Metadata
	}
	return line
}

// look prints a running version whose key is not the last printed one.
func (s settings) look(ctx context.Context, w *weightbus.Worker, printed map[string]wbp.Key) {
	for _, model := range s.models {
		_ = w.Read(ctx, model, func(v weightbus.View) { // an error: no version runs, or the driver stops
			if runs := (wbp.Key{Epoch: v.Epoch, Version: v.Version}); runs != printed[model] {
				printed[model] = runs
				print(said("runs", v.Update))
			}
		})
	}
}

// applied prints an applied version, with the checksums of its tensors in memory.
func (s settings) applied(ctx context.Context, w *weightbus.Worker, update weightbus.Update) {
	line := said("applied", update)
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
			return // stopped while it waited
		}
		line["tensors"] = crcs
	}
	print(line)
}

// watch prints the start and end of sessions, and refusals, but no refusal twice in a row.
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

// lookForTears reads all tensors of a model repeatedly, and prints an error if they mix versions:
// all bytes of a version have the same value.
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

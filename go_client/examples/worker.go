// A worker that predicts with the newest weights, and prints each version that it has applied:
//
//	worker tcp://localhost:5555 --name w0    (or several addresses, separated by commas)
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"syscall"
	"time"

	weightbus "github.com/weightbus/weightbus/go_client"
)

func main() {
	flags := flag.NewFlagSet("worker ADDRESS", flag.ExitOnError)
	name := flags.String("name", "", "the worker's name")
	patience := flags.Float64("patience", 30, "end after this many seconds without a version")
	if len(os.Args) < 2 {
		flags.Usage()
		os.Exit(2)
	}
	_ = flags.Parse(os.Args[2:])
	if err := run(os.Args[1], *name, time.Duration(*patience*float64(time.Second))); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}

func run(address, name string, patience time.Duration) error {
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	slope, offset := make([]float32, 3), make([]float32, 1)
	worker, err := weightbus.New(address, weightbus.Options{
		Name: name,
		Models: map[string]weightbus.Tensors{
			"line": {"slope": weightbus.F32(slope, 3), "offset": weightbus.F32(offset)},
		},
	})
	if err != nil {
		return err
	}
	defer worker.Close()
	for {
		ctx, done := context.WithTimeout(stop, patience)
		update, err := worker.Receive(ctx)
		done()
		switch {
		case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
			return nil
		case err != nil:
			fmt.Fprintln(os.Stderr, "worker:", err)
			continue
		}
		y := float64(slope[0]*1 + slope[1]*2 + slope[2]*3 + offset[0])
		_ = json.NewEncoder(os.Stdout).Encode(row{worker.Name(), update.Version, math.Round(y*1e4) / 1e4, update.Digest})
	}
}

type row struct {
	Worker     string  `json:"worker"`
	Version    int64   `json:"version"`
	Prediction float64 `json:"prediction"`
	Digest     string  `json:"digest"`
}

// The conformance driver of the Go client, which the conformance tests of the repository run. The
// drivers of all clients have this interface:
//
//	driver vectors DIR                                      prints the result of each test vector
//	driver worker ADDRESS --name NAME --models m1,m2 ...    runs a worker and prints its events
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: driver vectors DIR | driver worker ADDRESS [OPTIONS]")
		os.Exit(2)
	}
	flip(strings.Fields(os.Getenv("WEIGHTBUS_FLIP")))
	var err error
	switch os.Args[1] {
	case "vectors":
		err = vectors(os.Args[2], print)
	case "worker":
		err = worker(os.Args[2], os.Args[3:])
	default:
		err = fmt.Errorf("%q is neither vectors nor worker", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "driver:", err)
		os.Exit(1)
	}
}

// flip changes a transition in the tables of phases. words are a table, a state, an event and the
// new state, for example "version arriving whole dropped"; without a new state, flip removes the
// transition. tests/protocol/flip_arrows.py checks that the conformance tests then fail.
func flip(words []string) {
	if len(words) < 3 {
		return
	}
	transitions, event := wbp.Tables[words[0]][wbp.State(words[1])], wbp.Event(words[2])
	delete(transitions, event)
	if len(words) > 3 {
		transitions[event] = wbp.State(words[3])
	}
}

type object map[string]interface{}

var (
	printing sync.Mutex
	out      = bufio.NewWriter(os.Stdout)
)

// print writes an object as one line of JSON, and flushes it.
func print(line object) {
	printing.Lock()
	defer printing.Unlock()
	text, err := json.Marshal(line)
	if err != nil {
		panic(err)
	}
	_, _ = out.Write(append(text, '\n'))
	_ = out.Flush()
}

// A sidecar: keeps the newest version of a model, and serves it as a safetensors file to processes that do
// not use weightbus. Every client that can connect gets the weights.
//
//	sidecar tcp://localhost:5555 MODEL 127.0.0.1:8000    (or unix:PATH; or several addresses, separated by commas)
//	curl --fail --remote-name http://127.0.0.1:8000/model.safetensors
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	weightbus "github.com/weightbus/weightbus/go_client"
)

// A file is one version in the safetensors format. It never changes.
type file struct {
	tag   string
	bytes []byte
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: sidecar ADDRESS MODEL HOST:PORT|unix:PATH")
	}
	var newest atomic.Pointer[file]
	worker, err := weightbus.New(os.Args[1], weightbus.Options{
		Models: map[string]weightbus.Tensors{os.Args[2]: nil}, // of any layout
		// The worker reports a version as applied only after it can be fetched from here.
		Apply: func(_ context.Context, v weightbus.View) error {
			made, err := pack(v)
			if err == nil {
				newest.Store(made)
			}
			return err
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer worker.Close()

	network, address := "tcp", os.Args[3]
	if path := strings.TrimPrefix(address, "unix:"); path != address {
		network, address = "unix", path
	}
	listener, err := net.Listen(network, address)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("listening at", listener.Addr())
	http.HandleFunc("/model.safetensors", func(w http.ResponseWriter, r *http.Request) {
		served := newest.Load()
		if served == nil {
			http.Error(w, "no version has come yet", http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("ETag", served.tag)
		// Without a date: dates have seconds, and two versions may come within a second.
		http.ServeContent(w, r, "model.safetensors", time.Time{}, bytes.NewReader(served.bytes))
	})
	go func() { log.Fatal(http.Serve(listener, nil)) }()
	for {
		update, err := worker.Receive(context.Background())
		if err != nil {
			log.Print(err) // the previous file is still served
			continue
		}
		fmt.Printf("version %d: %d bytes\n", update.Version, len(newest.Load().bytes))
	}
}

// pack returns a safetensors file of a version: the size of the header, the header, and the tensors.
func pack(v weightbus.View) (*file, error) {
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	// Some readers require the format: "pt" stands for PyTorch's names and order of dimensions.
	header, data := map[string]any{"__metadata__": map[string]string{"format": "pt"}}, []byte{}
	for _, name := range v.Names() {
		t, _ := v.Tensor(name)
		begin := int64(len(data))
		data = append(data, t.Bytes()...)
		header[name] = entry{t.DType(), t.Shape(), [2]int64{begin, int64(len(data))}}
	}
	text, err := json.Marshal(header)
	if err != nil {
		return nil, err
	}
	text = append(text, bytes.Repeat([]byte(" "), -len(text)&7)...) // tensors are aligned
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	out = append(append(out, text...), data...)
	return &file{fmt.Sprintf(`"%d-%d"`, v.Epoch, v.Version), out}, nil
}

package weightbus

import (
	"regexp"
	"strconv"
	"strings"
)

const ipcPathMax = 107 // bytes that fit an address of the kernel

var tcpEndpoint = regexp.MustCompile(`^tcp://(\[[^\]]*\]|[^:/\s]+):([0-9]{1,5})$`)

// An endpoint is what can be dialled: a network of package net, and an address there.
type endpoint struct{ network, address string }

// parseEndpoint reads tcp://HOST:PORT or ipc://PATH.
func parseEndpoint(text string) (endpoint, error) {
	if path := strings.TrimPrefix(text, "ipc://"); path != text {
		if path == "" || len(path) > ipcPathMax || strings.ContainsAny(path, " \t\r\n") {
			return endpoint{}, optionErrorf("address %q: a path has 1 to %d bytes, and no white space", text, ipcPathMax)
		}
		return endpoint{"unix", path}, nil
	}
	parts := tcpEndpoint.FindStringSubmatch(text)
	if parts == nil {
		return endpoint{}, optionErrorf("address %q: write tcp://HOST:PORT or ipc://PATH", text)
	}
	if port, _ := strconv.Atoi(parts[2]); port < 1 || port > 65535 {
		return endpoint{}, optionErrorf("address %q: a port to connect to is 1 to 65535", text)
	}
	return endpoint{"tcp", parts[1] + ":" + parts[2]}, nil
}

// dataEndpoint reads the endpoint that a publisher gives for its data. A host of * means the host
// that this worker used for the control socket.
func dataEndpoint(data, control string) (endpoint, error) {
	for _, anyHost := range []string{"tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"} {
		port := strings.TrimPrefix(data, anyHost)
		if port == data {
			continue
		}
		used := tcpEndpoint.FindStringSubmatch(control)
		if used == nil {
			return endpoint{}, optionErrorf("the publisher's data is at %q, on the host of its control address, but "+
				"%q names no host; give the publisher an address to advertise", data, control)
		}
		return parseEndpoint("tcp://" + used[1] + ":" + port)
	}
	return parseEndpoint(data)
}

package weightbus

import (
	"context"
	"net"
	"regexp"
	"strconv"
	"strings"
)

const ipcPathMax = 107 // bytes of a path in the kernel's socket address

var tcpEndpoint = regexp.MustCompile(`^tcp://(\[[^\]]*\]|[^:/\s]+):([0-9]{1,5})$`)

// An endpoint is a network and an address, as package net expects them. If within is not empty,
// within names a host, and the worker dials an address only if that host has the address, too.
type endpoint struct{ network, address, within string }

// A lookUp returns the addresses of a host.
type lookUp func(ctx context.Context, host string) ([]net.IP, error)

// parseEndpoint parses tcp://HOST:PORT or ipc://PATH.
func parseEndpoint(text string) (endpoint, error) {
	if path := strings.TrimPrefix(text, "ipc://"); path != text {
		if path == "" || len(path) > ipcPathMax || strings.ContainsAny(path, " \t\r\n") {
			return endpoint{}, optionErrorf("address %q: a path has 1 to %d bytes, and no white space", text, ipcPathMax)
		}
		return endpoint{network: "unix", address: path}, nil
	}
	parts := tcpEndpoint.FindStringSubmatch(text)
	if parts == nil {
		return endpoint{}, optionErrorf("address %q: write tcp://HOST:PORT or ipc://PATH", text)
	}
	if port, _ := strconv.Atoi(parts[2]); port < 1 || port > 65535 {
		return endpoint{}, optionErrorf("address %q: the port must be 1 to 65535", text)
	}
	return endpoint{network: "tcp", address: parts[1] + ":" + parts[2]}, nil
}

// dataEndpoint parses the data endpoint of a publisher. The hosts *, 0.0.0.0 and [::] stand for the
// host of the control address. Unless anyHost is true, the endpoint must be on that host: otherwise
// a publisher could make the worker connect to anything that the worker can reach. Only a lookup
// shows whether two names belong to one host, so the worker checks names when it dials.
func dataEndpoint(data, control string, anyHost bool) (endpoint, error) {
	end, err := parseEndpoint(data)
	isAny := false
	for _, prefix := range []string{"tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"} {
		isAny = isAny || strings.HasPrefix(data, prefix)
	}
	ofControl := tcpEndpoint.FindStringSubmatch(control)
	switch {
	case err != nil:
		return endpoint{}, err
	case isAny && ofControl == nil:
		return endpoint{}, optionErrorf("the publisher's data is at %q, on the host of its control address, but "+
			"%q names no host; give the publisher an address to advertise", data, control)
	case isAny:
		_, port, _ := net.SplitHostPort(end.address)
		return endpoint{network: "tcp", address: ofControl[1] + ":" + port}, nil
	case anyHost:
		return end, nil
	case end.network == "unix":
		if path := strings.TrimPrefix(control, "ipc://"); path != control && isBeside(end.address, path) {
			return end, nil
		}
		return endpoint{}, notOnControlHost(data, control)
	case ofControl == nil:
		return endpoint{}, notOnControlHost(data, control)
	}
	host, own := hostOf(end), strings.ToLower(strings.Trim(ofControl[1], "[]"))
	if isSameHost(host, own) {
		return end, nil
	}
	if net.ParseIP(host) != nil && net.ParseIP(own) != nil {
		return endpoint{}, notOnControlHost(data, control)
	}
	end.within = own
	return end, nil
}

// isBeside reports whether the path of a data socket is the path of the control socket and a suffix
// without a slash.
func isBeside(path, control string) bool {
	suffix := strings.TrimPrefix(path, control)
	return strings.HasPrefix(path, control) && !strings.Contains(suffix, "/")
}

// hostOf returns the host of a TCP endpoint.
func hostOf(end endpoint) string {
	host, _, _ := net.SplitHostPort(end.address)
	return strings.ToLower(host)
}

// isSameHost reports whether two hosts are equal, as text or as IP addresses, or both are loopback.
func isSameHost(one, other string) bool {
	if one == other || isLoopback(one) && isLoopback(other) {
		return true
	}
	a, b := net.ParseIP(one), net.ParseIP(other)
	return a != nil && b != nil && a.Equal(b)
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func notOnControlHost(data, control string) error {
	return optionErrorf("the publisher's data is at %q, which is not on the host of its control address %q (or, of a path, "+
		"not beside it), so everything is fetched, which is slower: if that address is right, set "+
		"Options.AnyDataHost", data, control)
}

// resolver returns a function that looks up the addresses to dial, or nil if package net may look them up.
func (e endpoint) resolver(find lookUp) func(ctx context.Context) ([]string, error) {
	if e.within == "" {
		return nil
	}
	return func(ctx context.Context) ([]string, error) {
		host, port, err := net.SplitHostPort(e.address)
		if err != nil {
			return nil, err
		}
		found, err := find(ctx, host)
		if err != nil {
			return nil, err
		}
		allowed, err := find(ctx, e.within)
		if err != nil {
			return nil, err
		}
		var both []string
		for _, ip := range found {
			for _, other := range allowed {
				if ip.Equal(other) {
					both = append(both, net.JoinHostPort(ip.String(), port))
					break
				}
			}
		}
		if len(both) == 0 {
			return nil, notOnControlHost("tcp://"+e.address, e.within)
		}
		return both, nil
	}
}

// systemLookUp uses the system's resolver; it returns an IP address unchanged.
func systemLookUp(ctx context.Context, host string) ([]net.IP, error) {
	return net.DefaultResolver.LookupIP(ctx, "ip", host)
}

package weightbus

import (
	"strings"

	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

// A site is one of the worker's control addresses, with the keys for the publisher there.
type site struct {
	address string
	control endpoint
	keys    *zmtp.Keys // nil without keys
}

// splitAddresses splits text at each comma before a tcp:// or ipc://, since a path may contain commas, too.
func splitAddresses(text string) []string {
	var addresses []string
	for _, part := range strings.Split(text, ",") {
		trimmed := strings.TrimSpace(part)
		hasScheme := strings.HasPrefix(trimmed, "tcp://") || strings.HasPrefix(trimmed, "ipc://")
		if last := len(addresses) - 1; last >= 0 && !hasScheme {
			addresses[last] += "," + part
		} else {
			addresses = append(addresses, trimmed)
		}
	}
	return addresses
}

// sites parses an address, or several addresses that are separated by commas, and finds their keys.
// It stores the first site's keys in the options.
func (o *Options) sites(text string) ([]site, error) {
	var sites []site
	for _, address := range splitAddresses(text) {
		control, err := parseEndpoint(address)
		if err != nil {
			return nil, err
		}
		sites = append(sites, site{address: address, control: control})
	}
	if o.KeysOfEach == nil {
		keys, err := o.findKeys()
		for i := range sites {
			sites[i].keys = keys
		}
		return sites, err
	}
	if len(o.KeysOfEach) != len(sites) || o.Keys != nil {
		return nil, optionErrorf("KeysOfEach has %d keys for %d addresses (%s), and Keys is nil: %v; set KeysOfEach to one "+
			"for each address, in their order, or set only Keys", len(o.KeysOfEach), len(sites), text, o.Keys == nil)
	}
	for i, keys := range o.KeysOfEach {
		if keys == nil {
			return nil, optionErrorf("KeysOfEach has no keys for %s: a worker with keys never connects to a publisher without keys", sites[i].address)
		}
		pair, err := keys.pair()
		if err != nil {
			return nil, optionErrorf("KeysOfEach, for %s: %v; see weightbus keygen --help", sites[i].address, err)
		}
		sites[i].keys = pair
	}
	o.Keys = o.KeysOfEach[0]
	return sites, nil
}

func addressesOf(sites []site) []string {
	addresses := make([]string, len(sites))
	for i, s := range sites {
		addresses[i] = s.address
	}
	return addresses
}

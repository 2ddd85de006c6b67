package weightbus

import (
	"strings"

	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

// A site is a control address, and the keys for the publisher there; nil without keys.
type site struct {
	address string
	control endpoint
	keys    *zmtp.Keys
}

// splitAddresses splits text at each comma that a scheme follows: a path may contain commas, too.
func splitAddresses(text string) []string {
	var addresses []string
	for _, part := range strings.Split(text, ",") {
		trimmed := strings.TrimSpace(part)
		begins := strings.HasPrefix(trimmed, "tcp://") || strings.HasPrefix(trimmed, "ipc://")
		if last := len(addresses) - 1; last >= 0 && !begins {
			addresses[last] += "," + part
		} else {
			addresses = append(addresses, trimmed)
		}
	}
	return addresses
}

// sites returns the sites of an address, or of several that are separated by commas.
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
		return nil, optionErrorf("KeysOfEach has %d keys for %d addresses (%s), and Keys is nil: %v; give one for each "+
			"address, in their order, or Keys for all", len(o.KeysOfEach), len(sites), text, o.Keys == nil)
	}
	for i, keys := range o.KeysOfEach {
		if keys == nil {
			return nil, optionErrorf("KeysOfEach has none for %s: a worker with keys connects to no publisher without", sites[i].address)
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

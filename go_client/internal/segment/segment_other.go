//go:build !linux || portable

// Package segment reads the publisher's memory on the same host. There is no such thing here.
package segment

import "github.com/weightbus/weightbus/go_client/internal/wbp"

// A Cache keeps no segments on this system.
type Cache struct{}

// NewCache returns one that opens nothing.
func NewCache() *Cache { return &Cache{} }

// Open finds nothing: versions come over the network.
func (*Cache) Open(*wbp.Shared, int64) wbp.Segment { return nil }

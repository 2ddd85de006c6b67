//go:build !linux || portable

// Package segment opens no segments here, since this system does not support the shared-memory transport.
package segment

import "github.com/weightbus/weightbus/go_client/internal/wbp"

// A Cache is empty on this system.
type Cache struct{}

// NewCache returns a Cache that opens nothing.
func NewCache() *Cache { return &Cache{} }

// Open returns nil: versions are received over the network.
func (*Cache) Open(*wbp.Shared, int64) wbp.Segment { return nil }

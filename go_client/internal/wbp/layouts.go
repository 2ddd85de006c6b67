package wbp

import (
	"errors"
	"fmt"
)

const (
	layoutsKept      = 4       // number of cached layouts of a model, for publishers that alternate between layouts
	layoutsBytesKept = 1 << 22 // bytes of several cached layouts; parsed, they need some ten times as much memory
	raiseHint        = "raise its BytesMax if that is meant"
)

// An acceptance checks whether a worker can accept an announced version, and caches the latest
// layouts of one model.
type acceptance struct {
	mismatch func(layout *Layout) string // returns why a layout cannot be applied; "" if it can
	bytesMax int64                       // size of the largest version to accept
	longest  int64                       // size of the largest layout of the registered tensors; 0 if unknown
	sealed   bool                        // versions must be sealed; otherwise they must be in the clear
	layouts  []*Layout
	accepted map[string]bool // ids of known layouts that can be applied
}

// layout returns the layout of an announced version; nil if the layout is unknown.
func (c *acceptance) layout(a *Announce) *Layout {
	for _, layout := range c.layouts {
		if layout.ID == a.Layout {
			return layout
		}
	}
	return nil
}

// learn parses and stores the layout of an announcement. If the layout is invalid, it returns a code
// and the reason; otherwise both are empty.
func (c *acceptance) learn(a *Announce, bytes []byte) (code Code, text string) {
	if int64(len(bytes)) != a.LayoutBytes {
		return CodeLayoutInvalid, fmt.Sprintf("the layout has %d bytes, but %d were announced", len(bytes), a.LayoutBytes)
	}
	layout, err := parseLayout(bytes, c.namesMax())
	switch {
	case errors.Is(err, errTooManyNames):
		return CodeTooLarge, fmt.Sprintf("a layout of %v; the limit is %d: %s", err, c.namesMax(), raiseHint)
	case err != nil:
		return CodeLayoutInvalid, err.Error()
	case layout.ID != a.Layout:
		return CodeLayoutInvalid, fmt.Sprintf("the layout hashes to %s, but %s was announced", layout.ID, a.Layout)
	case c.layout(a) == nil:
		c.keep(layout)
	}
	return "", ""
}

// namesMax returns the number of names that a layout may have. The limit is proportional to
// bytesMax, since names need memory.
func (c *acceptance) namesMax() int64 {
	if names := c.bytesMax / NameCost; names > NamesGuaranteed {
		return names
	}
	return NamesGuaranteed
}

// keep stores a layout, and drops the oldest layouts beyond the limits.
func (c *acceptance) keep(layout *Layout) {
	c.layouts = append(c.layouts, layout)
	size := 0
	for _, known := range c.layouts {
		size += known.size
	}
	for len(c.layouts) > layoutsKept || len(c.layouts) > 1 && size > layoutsBytesKept {
		size -= c.layouts[0].size
		delete(c.accepted, c.layouts[0].ID)
		c.layouts = append([]*Layout{}, c.layouts[1:]...) // a new array, so that the oldest one is freed
	}
}

// sizeFault returns the reason why a version or its layout is too large; "" if both sizes are allowed.
func (c *acceptance) sizeFault(a *Announce) string {
	layoutMax := c.bytesMax
	if layoutMax < LayoutBytesGuaranteed {
		layoutMax = LayoutBytesGuaranteed
	}
	switch {
	case a.Bytes > c.bytesMax:
		return fmt.Sprintf("%d bytes; this worker accepts at most %d: %s", a.Bytes, c.bytesMax, raiseHint)
	case a.LayoutBytes > prefixBytes+layoutMax:
		return fmt.Sprintf("a layout of %d bytes; this worker accepts at most %d: %s", a.LayoutBytes, layoutMax, raiseHint)
	case c.longest > 0 && a.LayoutBytes > prefixBytes+c.longest:
		return fmt.Sprintf("a layout of %d bytes; layouts of this worker's model have at most %d: do the names of its tensors differ?",
			a.LayoutBytes, c.longest)
	}
	return ""
}

// allowsPayload reports whether an announcement's payload, which is the layout or the whole version,
// may have size bytes.
func (c *acceptance) allowsPayload(a *Announce, size int) bool {
	expected := a.LayoutBytes
	if a.Whole != nil {
		expected = a.Bytes
	}
	return int64(size) == expected && c.sizeFault(a) == ""
}

// fault returns a code and the reason why a version cannot be accepted. Both are empty if the version
// can be accepted, or if its layout is not known yet and nothing else is wrong.
func (c *acceptance) fault(a *Announce) (code Code, text string) {
	layout, tooLarge := c.layout(a), c.sizeFault(a)
	switch { // W6
	case a.Encoding != "raw":
		return CodeUnsupported, fmt.Sprintf("encoding %q; this worker accepts \"raw\"", a.Encoding)
	case c.sealed && (a.Encryption == nil || *a.Encryption != AES256GCM): // E1
		return CodeUnsupported, fmt.Sprintf("encryption %s; this worker has keys, and accepts only %q", orNull(a.Encryption), AES256GCM)
	case !c.sealed && a.Encryption != nil:
		return CodeUnsupported, fmt.Sprintf("encryption %q; this worker has no keys, and accepts only versions in the clear", *a.Encryption)
	case tooLarge != "":
		return CodeTooLarge, tooLarge
	case a.Bytes > ChunksMax*a.ChunkBytes:
		return CodeTooManyChunks, fmt.Sprintf("%d bytes in chunks of %d are more than %d chunks", a.Bytes,
			a.ChunkBytes, ChunksMax)
	case layout == nil:
		return "", ""
	case layout.Bytes != a.Bytes:
		return CodeLayoutInvalid, fmt.Sprintf("%d bytes were announced, but the layout holds %d", a.Bytes, layout.Bytes)
	case c.accepted[layout.ID]:
		return "", ""
	}
	if text := c.mismatch(layout); text != "" {
		return CodeLayoutMismatch, text
	}
	c.accepted[layout.ID] = true
	return "", ""
}

func orNull(text *string) string {
	if text == nil {
		return "null"
	}
	return fmt.Sprintf("%q", *text)
}

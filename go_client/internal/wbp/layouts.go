package wbp

import "fmt"

const layoutsKept = 4 // layouts remembered, so that a model that alternates sends none again

// acceptance is what a worker makes sure of before it takes a version: that it can be read, and that
// it fits. It knows the latest layouts of one model.
type acceptance struct {
	accepts  func(layout *Layout) string // says why a layout cannot be applied here; "" if it can
	bytesMax int64                       // the largest version to take
	sealed   bool                        // it must be sealed, or must not be
	layouts  []*Layout
	accepted map[string]bool // ids of layouts among them that can be applied here
}

// layout returns that of an announced version; nil if it is not known.
func (c *acceptance) layout(a *Announce) *Layout {
	for _, layout := range c.layouts {
		if layout.ID == a.Layout {
			return layout
		}
	}
	return nil
}

// learn remembers a layout that came with an announcement; it returns what is wrong with it, if anything.
func (c *acceptance) learn(a *Announce, bytes []byte) string {
	if int64(len(bytes)) != a.LayoutBytes {
		return fmt.Sprintf("the layout has %d bytes, announced were %d", len(bytes), a.LayoutBytes)
	}
	layout, err := ParseLayout(bytes)
	if err != nil {
		return err.Error()
	}
	if layout.ID != a.Layout {
		return fmt.Sprintf("the layout hashes to %s, announced was %s", layout.ID, a.Layout)
	}
	if c.layout(a) != nil {
		return ""
	}
	if c.layouts = append(c.layouts, layout); len(c.layouts) > layoutsKept {
		delete(c.accepted, c.layouts[0].ID)
		c.layouts = c.layouts[1:]
	}
	return ""
}

// fault says why a version cannot be taken, as far as that is known yet; an empty code if it can.
func (c *acceptance) fault(a *Announce) (code Code, text string) {
	layout := c.layout(a)
	switch { // W6
	case a.Encoding != "raw":
		return CodeUnsupported, fmt.Sprintf("encoding %q; this worker takes \"raw\"", a.Encoding)
	case c.sealed && (a.Encryption == nil || *a.Encryption != AES256GCM): // E1
		return CodeUnsupported, fmt.Sprintf("encryption %s; this worker has keys, and takes %q alone", orNull(a.Encryption), AES256GCM)
	case !c.sealed && a.Encryption != nil:
		return CodeUnsupported, fmt.Sprintf("encryption %q; this worker has no keys, and takes none", *a.Encryption)
	case a.Bytes > c.bytesMax:
		return CodeTooLarge, fmt.Sprintf("%d bytes; this worker takes at most %d: raise its BytesMax if that is "+
			"meant", a.Bytes, c.bytesMax)
	case a.Bytes > ChunksMax*a.ChunkBytes:
		return CodeTooManyChunks, fmt.Sprintf("%d bytes in chunks of %d are more than %d chunks", a.Bytes,
			a.ChunkBytes, ChunksMax)
	case layout == nil:
		return "", ""
	case layout.Bytes != a.Bytes:
		return CodeLayoutInvalid, fmt.Sprintf("announced are %d bytes, the layout holds %d", a.Bytes, layout.Bytes)
	case c.accepted[layout.ID]:
		return "", ""
	}
	if text := c.accepts(layout); text != "" {
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

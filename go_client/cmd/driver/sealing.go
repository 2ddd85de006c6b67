package main

import (
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// A subject is a version as sealing.json has it.
type subject struct {
	Model, Encoding string
	Epoch, Version  int64
	Base            [2]int64
	Bytes           int64 `json:"nbytes"`
	ChunkBytes      int64 `json:"chunk_bytes"`
}

func (s subject) of() wbp.Subject {
	return wbp.Subject{Model: s.Model, Encoding: s.Encoding, Key: wbp.Key{Epoch: s.Epoch, Version: s.Version},
		Base: wbp.Key{Epoch: s.Base[0], Version: s.Base[1]}, Bytes: s.Bytes, ChunkBytes: s.ChunkBytes}
}

func groupKeys(t table) error {
	var cases []struct{ Name, Group string }
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		key := wbp.NewGroupKey(unhex(c.Group))
		t.report(c.Name, i, object{"ok": object{"id": key.ID, "messages": hex.EncodeToString(key.MessageKey())}})
	}
	return nil
}

func versionKeys(t table) error {
	var cases []struct {
		Name, Group string
		Version     subject
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		of := c.Version.of()
		t.report(c.Name, i, object{"ok": object{"names": hex.EncodeToString(of.Names()),
			"key": hex.EncodeToString(wbp.NewGroupKey(unhex(c.Group)).VersionKey(of))}})
	}
	return nil
}

func payloads(t table) error {
	var cases []struct {
		Name, Group, Sealed, Tag string
		Version                  subject
		Purpose                  wbp.Purpose
		Index                    int64
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		of, sealed := c.Version.of(), unhex(c.Sealed)
		size := int64(len(sealed))
		opening := wbp.NewOpening(wbp.NewGroupKey(unhex(c.Group)).VersionKey(of), of, c.Purpose, c.Index, size, unhex(c.Tag))
		crc, ok := opening.Decrypt(sealed, sealed)
		if !ok {
			t.report(c.Name, i, object{"error": "sealed"})
			continue
		}
		t.report(c.Name, i, object{"ok": object{"plain": hex.EncodeToString(sealed), "crc": crc,
			"nonce":      hex.EncodeToString(wbp.Nonce(c.Purpose, c.Index)),
			"associated": hex.EncodeToString(of.Associated(c.Purpose, c.Index, size))}})
	}
	return nil
}

// countedMessages reports which of a sequence of published messages are accepted, with their contents.
func countedMessages(t table) error {
	var cases []struct {
		Name     string
		Keys     []string
		Messages []struct{ Header string }
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		ring := wbp.NewKeyring()
		ring.Begin(c.Keys, time.Hour)
		counts := []interface{}{}
		for _, sealed := range c.Messages {
			message, err := wbp.Decode([]byte(sealed.Header), strings.Count(sealed.Header, `"announce"`))
			if err != nil {
				return fmt.Errorf("%s: %w", c.Name, err)
			}
			if inside := ring.Published(message, 0, true); inside != nil {
				counts = append(counts, plain(inside))
			} else {
				counts = append(counts, nil)
			}
		}
		t.report(c.Name, i, object{"counts": counts})
	}
	return nil
}

func unhex(digits string) []byte {
	bytes, err := hex.DecodeString(digits)
	if err != nil {
		panic(err) // the vectors are valid
	}
	return bytes
}

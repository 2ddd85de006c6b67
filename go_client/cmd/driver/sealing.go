package main

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// A subject is a version as sealing.json names it.
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
		t.tell(c.Name, i, object{"ok": object{"id": key.ID, "messages": hex.EncodeToString(key.OfMessages())}})
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
		t.tell(c.Name, i, object{"ok": object{"names": hex.EncodeToString(of.Names()),
			"key": hex.EncodeToString(wbp.NewGroupKey(unhex(c.Group)).OfVersion(of))}})
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
		opening := wbp.NewOpening(wbp.NewGroupKey(unhex(c.Group)).OfVersion(of), of, c.Purpose, c.Index, size, unhex(c.Tag))
		crc, ok := opening.Open(sealed, sealed)
		if !ok {
			t.tell(c.Name, i, object{"error": "sealed"})
			continue
		}
		t.tell(c.Name, i, object{"ok": object{"plain": hex.EncodeToString(sealed), "crc": crc,
			"nonce":      hex.EncodeToString(wbp.Nonce(c.Purpose, c.Index)),
			"associated": hex.EncodeToString(of.Associated(c.Purpose, c.Index, size))}})
	}
	return nil
}

// counted says which of the messages that are published one after another count, and what is in them.
func counted(t table) error {
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
		for _, said := range c.Messages {
			message, err := wbp.Decode([]byte(said.Header), strings.Count(said.Header, `"announce"`))
			if err != nil {
				return fmt.Errorf("%s: %w", c.Name, err)
			}
			if inside := ring.Published(message, 0, true); inside != nil {
				counts = append(counts, plain(inside))
			} else {
				counts = append(counts, nil)
			}
		}
		t.tell(c.Name, i, object{"counts": counts})
	}
	return nil
}

func unhex(digits string) []byte {
	bytes, err := hex.DecodeString(digits)
	if err != nil {
		panic(err) // the vectors are ours
	}
	return bytes
}

const (
	chunkBytes = 1 << 20
	speedTurns = 5
)

// opening says how long it takes to open so many bytes, sealed in chunks as a publisher does: by what a
// worker does with them, AES and CRC in place, and by the cipher alone. The best of a few turns counts.
func opening(digits string) error {
	size, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || size < 1 {
		return fmt.Errorf("%q is no number of bytes", digits)
	}
	memory := make([]byte, size+wbp.TagBytes)
	of := wbp.Subject{Model: "m", Encoding: "raw", Key: wbp.Key{Epoch: 1, Version: 1}, Bytes: size, ChunkBytes: chunkBytes}
	key := make([]byte, 32)
	block, _ := aes.NewCipher(key)
	bare, _ := cipher.NewGCM(block)
	plan := wbp.Plan{Bytes: size, ChunkBytes: chunkBytes}
	line := object{"bytes": size}
	for name, open := range map[string]func(index int64, chunk, tag []byte) bool{
		"open_s": func(index int64, chunk, tag []byte) bool {
			_, ok := wbp.NewOpening(key, of, wbp.PurposeChunk, index, int64(len(chunk)), tag).Open(chunk, chunk)
			return ok
		},
		"aes_s": func(index int64, chunk, tag []byte) bool {
			data := of.Associated(wbp.PurposeChunk, index, int64(len(chunk)))
			opened := chunk[:len(chunk)+wbp.TagBytes]
			copy(opened[len(chunk):], tag)
			_, err := bare.Open(chunk[:0], wbp.Nonce(wbp.PurposeChunk, index), opened, data)
			return err == nil
		},
	} {
		best := time.Hour
		for turn := 0; turn < speedTurns; turn++ {
			tags := sealAll(bare, of, plan, memory)
			begun := time.Now()
			for i := range tags { // backwards: a tag is written behind its chunk, over what was opened
				index := int64(len(tags) - 1 - i)
				begin, end := plan.Span(index)
				if !open(index, memory[begin:end], tags[index]) {
					return fmt.Errorf("%s: chunk %d does not open", name, index)
				}
			}
			if took := time.Since(begun); took < best {
				best = took
			}
		}
		line[name] = best.Seconds()
	}
	print(line)
	return nil
}

// sealAll seals every chunk in its place, and returns the tags.
func sealAll(by cipher.AEAD, of wbp.Subject, plan wbp.Plan, memory []byte) (tags [][]byte) {
	out := make([]byte, 0, plan.ChunkBytes+wbp.TagBytes)
	for index := int64(0); index < plan.Count(); index++ {
		begin, end := plan.Span(index)
		data := of.Associated(wbp.PurposeChunk, index, end-begin)
		sealed := by.Seal(out, wbp.Nonce(wbp.PurposeChunk, index), memory[begin:end], data)
		copy(memory[begin:end], sealed)
		tags = append(tags, append([]byte{}, sealed[end-begin:]...))
	}
	return tags
}

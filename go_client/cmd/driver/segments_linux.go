//go:build !portable

package main

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"github.com/weightbus/weightbus/go_client/internal/segment"
	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

func segments(t table) error {
	var cases []struct {
		Name    string
		File    string
		Token   string
		Bytes   int64 `json:"nbytes"`
		Version *struct {
			Model   string
			Epoch   int64
			Version int64
		}
	}
	if err := t.read(&cases); err != nil {
		return err
	}
	for i, c := range cases {
		content, err := os.ReadFile(filepath.Join(t.folder, c.File))
		if err != nil {
			return err
		}
		memory, err := segment.Make(content)
		if err != nil {
			return err
		}
		path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), memory.Fd())
		found := segment.NewCache().Open(&wbp.Shared{Path: path, Token: c.Token}, c.Bytes)
		result := object{"error": "segment"}
		if found != nil && c.Version == nil {
			result = object{"ok": object{"data": ""}}
		} else if found != nil {
			var copied []byte
			err := found.Copy(c.Version.Model, wbp.Key{Epoch: c.Version.Epoch, Version: c.Version.Version},
				func(data []byte) { copied = append([]byte{}, data...) })
			result = object{"ok": object{"data": hex.EncodeToString(copied)}}
			if err != nil {
				result = object{"error": "stale"}
			}
		}
		t.report(c.Name, i, result)
		_ = memory.Close()
	}
	return nil
}

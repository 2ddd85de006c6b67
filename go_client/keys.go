package weightbus

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"golang.org/x/crypto/curve25519"

	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

const (
	keysVariable = "WEIGHTBUS_KEYS" // environment variable: the path of a key file or of a folder of keys; empty: no keys
	keysBytesMax = 4096             // size of a key file
	keysMax      = 10_000           // key files in a folder
)

var keyName = regexp.MustCompile(`^[A-Za-z0-9._-]*\*?[A-Za-z0-9._-]*$`)

// Keys are the keys that `weightbus keygen` makes for a worker, each as 40 characters of Z85.
type Keys struct {
	Name      string `json:"name"`   // the worker names that the key allows; a * stands for any characters
	Public    string `json:"public"` // the worker's key pair
	Secret    string `json:"secret"`
	Publisher string `json:"publisher"` // the public key of the only publisher that the worker connects to
}

// String returns a description without the secret key.
func (k Keys) String() string {
	return fmt.Sprintf("keys of %q, public %s, of the publisher %s", k.Name, k.Public, k.Publisher)
}

// GoString returns the same text as String, so that %#v does not print the secret key.
func (k Keys) GoString() string { return k.String() }

// ReadKeys reads a worker's key file. If path is a folder that `weightbus keygen` made, ReadKeys
// reads the file in it whose keys allow the worker name; name may be "" if there is only one file. It
// returns an error for a file that users other than its owner and its group may access.
func ReadKeys(path, name string) (*Keys, error) {
	if strings.HasPrefix(strings.TrimSpace(path), "{") { // the error does not quote path, which may hold a secret
		return nil, optionErrorf("keys: give the path of a key file, not its content (Options.Keys takes the content)")
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		if path, err = keyFileFor(filepath.Join(path, "workers"), name); err != nil {
			return nil, err
		}
	}
	text, err := readSecret(path)
	if err != nil {
		return nil, err
	}
	keys := &Keys{}
	if err := json.Unmarshal(text, keys); err != nil {
		return nil, optionErrorf("%s is not a key file: %v; see weightbus keygen --help", path, err)
	}
	if _, err := keys.pair(); err != nil {
		return nil, optionErrorf("%s is not a key file: %v; see weightbus keygen --help", path, err)
	}
	return keys, nil
}

func readSecret(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, optionErrorf("keys cannot be read: %v", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err == nil && runtime.GOOS != "windows" && info.Mode().Perm()&0o007 != 0 {
		return nil, optionErrorf("%s is open to every user of this host: chmod 600 %s", path, path)
	}
	var text []byte
	if err == nil {
		text, err = io.ReadAll(io.LimitReader(file, keysBytesMax))
	}
	if err != nil {
		return nil, optionErrorf("keys cannot be read: %v", err)
	}
	return text, nil
}

// keyFileFor returns the path of the key file in folder that allows a worker name, or of the only
// file if name is "".
func keyFileFor(folder, name string) (string, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return "", optionErrorf("keys cannot be read: %v", err)
	}
	var files []string
	for _, entry := range entries {
		if file := entry.Name(); strings.HasSuffix(file, ".json") && file != ".json" {
			files = append(files, filepath.Join(folder, file))
		}
	}
	if len(files) > keysMax {
		return "", optionErrorf("%s has %d keys; at most %d are allowed", folder, len(files), keysMax)
	}
	var matching []string
	for _, file := range files {
		pattern := strings.ReplaceAll(strings.TrimSuffix(filepath.Base(file), ".json"), "+", "*")
		if pattern == name {
			return file, nil
		}
		if name == "" || matches(name, pattern) {
			matching = append(matching, file)
		}
	}
	if len(matching) != 1 {
		who := name
		if who == "" {
			who = "a worker without a name"
		}
		return "", optionErrorf("%s has %d key files, and %d of them are for %s; there must be one: give the path of a "+
			"file, or Options.Name; weightbus keygen makes more", folder, len(files), len(matching), who)
	}
	return matching[0], nil
}

// matches reports whether a worker name matches pattern, in which a * stands for any characters.
func matches(name, pattern string) bool {
	begin, end, hasStar := strings.Cut(pattern, "*")
	if !hasStar {
		return name == pattern
	}
	return len(name) >= len(begin)+len(end) && strings.HasPrefix(name, begin) && strings.HasSuffix(name, end)
}

// findKeys returns the keys of the options or, if the options have none, the keys that the
// environment variable names; nil if there are no keys. It stores the keys in the options.
func (o *Options) findKeys() (*zmtp.Keys, error) {
	if path := os.Getenv(keysVariable); o.Keys == nil && path != "" {
		found, err := ReadKeys(path, o.Name)
		if err != nil {
			return nil, err
		}
		o.Keys = found
	}
	if o.Keys == nil || *o.Keys == (Keys{}) {
		o.Keys = nil
		return nil, nil
	}
	keys, err := o.Keys.pair()
	if err != nil {
		return nil, optionErrorf("Keys: %v; see weightbus keygen --help", err)
	}
	return keys, nil
}

// pair decodes and checks the keys for CURVE.
func (k *Keys) pair() (*zmtp.Keys, error) {
	if !keyName.MatchString(k.Name) || len(k.Name) < 1 || len(k.Name) > 128 {
		return nil, fmt.Errorf("%q: a name is 1 to 128 of A-Z a-z 0-9 . _ - and at most one *", k.Name)
	}
	keys := &zmtp.Keys{}
	for _, key := range []struct {
		name, text string
		to         *[32]byte
	}{{"public", k.Public, &keys.Public}, {"secret", k.Secret, &keys.Secret}, {"publisher", k.Publisher, &keys.Server}} {
		if !fromZ85(key.to, key.text) {
			return nil, fmt.Errorf("%s is not a key of 40 characters of Z85", key.name)
		}
	}
	var public [32]byte
	if curve25519.ScalarBaseMult(&public, &keys.Secret); public != keys.Public {
		return nil, fmt.Errorf("public and secret key do not belong together: make a new pair")
	}
	return keys, nil
}

const z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

// fromZ85 decodes text into key (ZeroMQ RFC 32: five characters stand for four bytes). It returns
// false if text is not a key.
func fromZ85(key *[32]byte, text string) bool {
	if len(text) != 40 {
		return false
	}
	for i := 0; i < 8; i++ {
		word := uint64(0)
		for _, c := range []byte(text[5*i : 5*i+5]) {
			digit := strings.IndexByte(z85, c)
			if digit < 0 {
				return false
			}
			word = word*85 + uint64(digit)
		}
		if word > 1<<32-1 {
			return false
		}
		binary.BigEndian.PutUint32(key[4*i:], uint32(word))
	}
	return true
}

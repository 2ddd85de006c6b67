package wbp

import (
	"fmt"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// A scanner is a strict one-pass parser of JSON (RFC 8259). Package encoding/json is too lenient: it
// ignores the case of field names, keeps the last of two equal keys, and replaces invalid UTF-8 and
// lone surrogates. So two readers of the same bytes could disagree.
//
// The text must be valid UTF-8. The caller checks the whole text once.
type scanner struct {
	text []byte
	at   int
}

func (s *scanner) fail(what string) error {
	return fmt.Errorf("invalid JSON at byte %d: %s", s.at, what)
}

// next skips white space and returns the next byte without consuming it; 0 at the end.
func (s *scanner) next() byte {
	for ; s.at < len(s.text); s.at++ {
		switch c := s.text[s.at]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

func (s *scanner) expect(c byte) error {
	if s.next() != c {
		return s.fail(fmt.Sprintf("%q is missing", c))
	}
	s.at++
	return nil
}

// end returns an error unless only white space is left.
func (s *scanner) end() error {
	if s.next() != 0 || s.at < len(s.text) {
		return s.fail("text after the end")
	}
	return nil
}

// object reads an object and calls entry with each key; entry must read the value.
func (s *scanner) object(entry func(key string) error) error {
	if err := s.expect('{'); err != nil {
		return err
	}
	return s.list('}', func() error {
		key, err := s.string()
		if err != nil {
			return err
		}
		if err := s.expect(':'); err != nil {
			return err
		}
		return entry(key)
	})
}

// array reads an array and calls item for each value; item must read the value.
func (s *scanner) array(item func() error) error {
	if err := s.expect('['); err != nil {
		return err
	}
	return s.list(']', item)
}

// list calls item for each value between commas, up to the closing bracket.
func (s *scanner) list(closing byte, item func() error) error {
	if s.next() == closing {
		s.at++
		return nil
	}
	for {
		if err := item(); err != nil {
			return err
		}
		switch s.next() {
		case ',':
			s.at++
		case closing:
			s.at++
			return nil
		default:
			return s.fail(fmt.Sprintf("',' or %q is missing", closing))
		}
	}
}

// string reads a string and resolves its escapes.
func (s *scanner) string() (string, error) {
	if err := s.expect('"'); err != nil {
		return "", err
	}
	begin := s.at
	for ; s.at < len(s.text); s.at++ {
		switch c := s.text[s.at]; {
		case c == '"':
			s.at++
			return string(s.text[begin : s.at-1]), nil
		case c == '\\':
			return s.escaped(append([]byte(nil), s.text[begin:s.at]...))
		case c < ' ':
			return "", s.fail("a control character in a string")
		}
	}
	return "", s.fail("a string without end")
}

// escaped reads the rest of a string, from its first escape on. out has the text before the escape.
func (s *scanner) escaped(out []byte) (string, error) {
	for s.at < len(s.text) {
		c := s.text[s.at]
		s.at++
		switch {
		case c == '"':
			return string(out), nil
		case c < ' ':
			return "", s.fail("a control character in a string")
		case c != '\\':
			out = append(out, c)
		default:
			r, err := s.escape()
			if err != nil {
				return "", err
			}
			out = utf8.AppendRune(out, r)
		}
	}
	return "", s.fail("a string without end")
}

var escapes = map[byte]rune{
	'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t',
}

// escape reads the part of an escape after the backslash.
func (s *scanner) escape() (rune, error) {
	if s.at >= len(s.text) {
		return 0, s.fail("a string without end")
	}
	c := s.text[s.at]
	s.at++
	if r, ok := escapes[c]; ok {
		return r, nil
	}
	if c != 'u' {
		return 0, s.fail("an unknown escape")
	}
	r, err := s.hex4()
	if err != nil || !utf16.IsSurrogate(r) {
		return r, err
	}
	if s.at+2 > len(s.text) || s.text[s.at] != '\\' || s.text[s.at+1] != 'u' {
		return 0, s.fail("half a surrogate pair")
	}
	s.at += 2
	low, err := s.hex4()
	if err != nil {
		return 0, err
	}
	if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
		return 0, s.fail("half a surrogate pair")
	}
	return r, nil
}

func (s *scanner) hex4() (rune, error) {
	if s.at+4 > len(s.text) {
		return 0, s.fail("a short escape")
	}
	var r rune
	for _, c := range s.text[s.at : s.at+4] {
		digit, ok := hexDigit(c)
		if !ok {
			return 0, s.fail("an escape without four digits")
		}
		r = r<<4 | rune(digit)
	}
	s.at += 4
	return r, nil
}

func hexDigit(c byte) (byte, bool) {
	switch {
	case '0' <= c && c <= '9':
		return c - '0', true
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10, true
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}

// value skips one value of any type, and returns its text. depth is the number of brackets around it.
func (s *scanner) value(depth int) ([]byte, error) {
	first := s.next()
	begin := s.at
	var err error
	switch {
	case first == '"':
		_, err = s.string()
	case first == '{' && depth < DepthMax:
		err = s.object(func(string) error { _, err := s.value(depth + 1); return err })
	case first == '[' && depth < DepthMax:
		err = s.array(func() error { _, err := s.value(depth + 1); return err })
	case first == '{' || first == '[':
		err = s.fail("nested too deep")
	default:
		err = s.word()
	}
	return s.text[begin:s.at], err
}

// word skips a number, true, false or null.
func (s *scanner) word() error {
	begin := s.at
	for s.at < len(s.text) && isWord(s.text[s.at]) {
		s.at++
	}
	switch word := s.text[begin:s.at]; {
	case string(word) == "true", string(word) == "false", string(word) == "null", isNumber(word):
		return nil
	}
	s.at = begin
	return s.fail("not a JSON value")
}

func isWord(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '+' || c == '.' || c == 'E'
}

// isNumber reports whether a word is a JSON number.
func isNumber(word []byte) bool {
	digits := func() bool {
		n := 0
		for n < len(word) && '0' <= word[n] && word[n] <= '9' {
			n++
		}
		word = word[n:]
		return n > 0
	}
	skip := func(set string) bool { // skips one character of the set
		for i := 0; i < len(set); i++ {
			if len(word) > 0 && word[0] == set[i] {
				word = word[1:]
				return true
			}
		}
		return false
	}
	skip("-")
	if !skip("0") && !digits() {
		return false
	}
	if skip(".") && !digits() {
		return false
	}
	if skip("eE") {
		skip("+-")
		if !digits() {
			return false
		}
	}
	return len(word) == 0
}

// integer reads an integer from 0 to IntegerMax without sign, fraction or exponent.
func (s *scanner) integer() (int64, error) {
	s.next()
	begin := s.at
	if err := s.word(); err != nil {
		return 0, err
	}
	n, ok := integerOf(s.text[begin:s.at])
	if !ok {
		s.at = begin
		return 0, s.fail("not an integer from 0 to 2^53-1")
	}
	return n, nil
}

// integerOf returns the value of a word, and whether it is an integer from 0 to IntegerMax.
func integerOf(word []byte) (int64, bool) {
	for _, c := range word {
		if c < '0' || c > '9' {
			return 0, false
		}
	}
	n, err := strconv.ParseInt(string(word), 10, 64)
	return n, err == nil && n <= IntegerMax && isNumber(word)
}

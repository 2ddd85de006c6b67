package wbp

import (
	"regexp"
	"strings"
	"testing"
	"testing/quick"
	"unicode/utf8"
)

func TestPrintable(t *testing.T) {
	for text, shown := range map[string]string{
		"as it is: äöü 中文 🙂 \\ \"'": "as it is: äöü 中文 🙂 \\ \"'",
		"\x1b[2J\x07\x7f\u009b":     `\x1b[2J\a\x7f\u009b`,
		"a\r\nb\tc":                 `a\r\nb\tc`,
		"\u202e\u200b\u2028\ufeff":  `\u202e\u200b\u2028\ufeff`,
	} {
		if got := Printable(text, 0); got != shown {
			t.Errorf("%q: %q", text, got)
		}
	}
	for most, shown := range map[int]string{10: "aaaaaaaaaa", 9: "aaaaaaaa…", 1: "…"} {
		if got := Printable(strings.Repeat("a", 10), most); got != shown {
			t.Errorf("%d: %q", most, got)
		}
	}
	raw := regexp.MustCompile(`[\p{C}\p{Zl}\p{Zp}]`)
	check := func(text string, most uint8) bool {
		shown := Printable(text, int(most))
		fits := most == 0 || utf8.RuneCountInString(shown) <= int(most)
		return fits && utf8.ValidString(shown) && !raw.MatchString(shown)
	}
	if err := quick.Check(check, nil); err != nil {
		t.Error(err)
	}
}

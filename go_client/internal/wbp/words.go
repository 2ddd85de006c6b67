package wbp

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

const ellipsis = "…"

// Printable returns a peer's text as one line that is safe to print: control, formatting and other
// invisible characters are escaped. A newline becomes \n, an escape \x1b, a right-to-left override
// \u202e. Printable text is not changed. The result is truncated to `most` characters; 0 means no limit.
func Printable(text string, most int) string {
	var shown strings.Builder
	for _, r := range text {
		if strconv.IsPrint(r) && r != utf8.RuneError {
			shown.WriteRune(r)
			continue
		}
		quoted := strconv.QuoteRune(r)
		shown.WriteString(quoted[1 : len(quoted)-1])
	}
	if most == 0 || utf8.RuneCountInString(shown.String()) <= most {
		return shown.String()
	}
	return truncate(shown.String(), most-1) + ellipsis
}

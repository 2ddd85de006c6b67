package wbp

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

const cut = "…"

// Printable returns words of others on one line, as a person, a terminal or a log may be shown them: what
// moves a cursor, hides letters or turns them is escaped. A new line is shown as \n, an escape as \x1b, a
// right-to-left mark as \u202e. What can be seen stays as it is, so that a text that is printable is not
// changed. Beyond so many characters it is cut off; 0: nowhere.
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
	return atMost(shown.String(), most-1) + cut
}

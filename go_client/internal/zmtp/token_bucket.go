package zmtp

import "time"

// Rate limit of a peer's ZMTP commands, since each answer takes time. A publisher sends a PING
// every few seconds.
const (
	commandsBurst     = 64
	commandsPerSecond = 16
)

// A tokenBucket is the token bucket of a peer's commands.
type tokenBucket struct {
	left float64
	at   time.Time
}

func newTokenBucket(now time.Time) tokenBucket { return tokenBucket{commandsBurst, now} }

// take takes count tokens, and returns false if the bucket had fewer.
func (a *tokenBucket) take(count int, now time.Time) bool {
	a.left += now.Sub(a.at).Seconds() * commandsPerSecond
	if a.left > commandsBurst {
		a.left = commandsBurst
	}
	a.left, a.at = a.left-float64(count), now
	return a.left >= 0
}

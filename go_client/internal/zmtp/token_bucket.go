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
	tokens float64
	at     time.Time // when tokens was computed
}

func newTokenBucket(now time.Time) tokenBucket { return tokenBucket{commandsBurst, now} }

// take takes count tokens, and returns false if the bucket had fewer.
func (b *tokenBucket) take(count int, now time.Time) bool {
	b.tokens += now.Sub(b.at).Seconds() * commandsPerSecond
	if b.tokens > commandsBurst {
		b.tokens = commandsBurst
	}
	b.tokens, b.at = b.tokens-float64(count), now
	return b.tokens >= 0
}

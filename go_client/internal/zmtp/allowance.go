package zmtp

import "time"

// Commands of ZMTP that the other side may have at once, and a second: a publisher pings every few seconds.
// Each PING is answered, which takes time.
const (
	commandsBurst     = 64
	commandsPerSecond = 16
)

// An allowance is how many commands are left.
type allowance struct {
	left float64
	at   time.Time
}

func newAllowance(now time.Time) allowance { return allowance{commandsBurst, now} }

// take tells whether so many are allowed.
func (a *allowance) take(count int, now time.Time) bool {
	a.left += now.Sub(a.at).Seconds() * commandsPerSecond
	if a.left > commandsBurst {
		a.left = commandsBurst
	}
	a.left, a.at = a.left-float64(count), now
	return a.left >= 0
}

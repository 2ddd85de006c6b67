package weightbus

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Tests with a hostile publisher on plain sockets, without keys. The worker's memory is measured in
// a separate process: this program again, as TestVictim.

const (
	patience  = 60 * time.Second
	megabyte  = 1_000_000
	roomMost  = 24 * megabyte // twice BytesMax, an always accepted layout and its names, and variation of the heap
	victimOf  = "WEIGHTBUS_TEST_VICTIM_OF"
	victimHas = "WEIGHTBUS_TEST_VICTIM_HAS"
	raw       = "\x1b[2J\r\nFAKE\u202e\u200b\x07\u009b\u2028\x7f"
)

// A port is a listening socket. It sends to the latest connection.
type port struct {
	t        *testing.T
	listener net.Listener
	mu       sync.Mutex
	peer     net.Conn
	peers    int
	heard    bytes.Buffer
	news     chan struct{}
}

func openPort(t *testing.T, network, address string, greets []byte) *port {
	t.Helper()
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	p := &port{t: t, listener: listener, news: make(chan struct{}, 1)}
	t.Cleanup(p.close)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write(greets)
			p.mu.Lock()
			p.peer = conn
			p.peers++
			p.mu.Unlock()
			go p.listen(conn)
		}
	}()
	return p
}

func (p *port) listen(conn net.Conn) {
	room := make([]byte, 1<<16)
	for {
		n, err := conn.Read(room)
		if err != nil {
			return
		}
		p.mu.Lock()
		p.heard.Write(room[:n])
		p.mu.Unlock()
		select {
		case p.news <- struct{}{}:
		default:
		}
	}
}

func (p *port) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peer != nil {
		_ = p.peer.Close()
	}
}

func (p *port) address() string {
	if p.listener.Addr().Network() == "unix" {
		return "ipc://" + p.listener.Addr().String()
	}
	return "tcp://" + p.listener.Addr().String()
}

// hears waits until the peer has sent these words.
func (p *port) hears(words string) {
	p.t.Helper()
	deadline := time.After(patience)
	for {
		p.mu.Lock()
		found := bytes.Contains(p.heard.Bytes(), []byte(words))
		if found {
			p.heard.Reset()
		}
		p.mu.Unlock()
		if found {
			return
		}
		select {
		case <-p.news:
		case <-deadline:
			p.t.Fatalf("nobody has said %q", words)
		}
	}
}

func (p *port) current() (net.Conn, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.peer, p.peers
}

// flood sends the same bytes repeatedly, until `most` bytes were sent or the peer closes the
// connection. It returns the number of sent bytes.
func (p *port) flood(in []byte, most int) (said int) {
	conn, _ := p.current()
	for said < most {
		_ = conn.SetWriteDeadline(time.Now().Add(patience))
		n, err := conn.Write(in)
		if said += n; err != nil {
			break
		}
	}
	return said
}

func (p *port) say(in []byte) {
	conn, _ := p.current()
	_, _ = conn.Write(in) // the peer may close the connection
}

func frameOf(body []byte, flags byte) []byte {
	if len(body) < 256 {
		return append([]byte{flags, byte(len(body))}, body...)
	}
	head := make([]byte, 9)
	head[0] = flags | 2
	binary.BigEndian.PutUint64(head[1:], uint64(len(body)))
	return append(head, body...)
}

func messageOf(parts ...[]byte) (out []byte) {
	for i, part := range parts {
		flags := byte(1)
		if i == len(parts)-1 {
			flags = 0
		}
		out = append(out, frameOf(part, flags)...)
	}
	return out
}

func greetingOf(mechanism, kind string) []byte {
	greeting := make([]byte, 64)
	copy(greeting, "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01")
	copy(greeting[12:32], mechanism)
	ready := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00"), byte(len(kind)))
	return append(greeting, frameOf(append(ready, kind...), 4)...)
}

// A hostile is a publisher with the ports of its control and data channels.
type hostile struct{ control, data *port }

func newHostile(t *testing.T, path string) *hostile {
	network, control, data := "tcp", "127.0.0.1:0", "127.0.0.1:0"
	if path != "" {
		network, control, data = "unix", path, path+".data"
	}
	return &hostile{openPort(t, network, control, greetingOf("NULL", "ROUTER")),
		openPort(t, network, data, greetingOf("NULL", "XPUB"))}
}

func headerOf(fields object) []byte {
	fields["wbp"] = 1
	text, _ := json.Marshal(fields)
	return text
}

// welcome waits for a hello and answers it.
func (h *hostile) welcome(data string) {
	h.control.t.Helper()
	h.control.hears(`"type":"hello"`)
	if data == "" {
		data = h.data.address()
	}
	h.say(object{"type": "welcome", "epoch": 7, "data": data, "ping_ms": 1000, "lost_ms": 5000, "models": object{}})
}

func (h *hostile) say(fields object, payloads ...[]byte) {
	h.control.say(messageOf(append([][]byte{headerOf(fields)}, payloads...)...))
}

// asks sends a ping and waits for its pong, so that earlier messages were processed.
func (h *hostile) asks(token int) {
	h.control.t.Helper()
	h.say(object{"type": "ping", "token": token})
	h.control.hears(fmt.Sprintf(`"token":%d`, token))
}

// A victim is a worker in a separate process.
type victim struct {
	t       *testing.T
	command *exec.Cmd
	events  chan string
	calm    int
}

// TestVictim is not a test, but the main function of a victim.
func TestVictim(t *testing.T) {
	address := os.Getenv(victimOf)
	if address == "" {
		t.Skip("this is the worker of the tests below")
	}
	options := Options{Models: map[string]Tensors{"m": nil}, BytesMax: megabyte}
	if os.Getenv(victimHas) != "" {
		options = Options{Models: map[string]Tensors{"m": {"w": F32(make([]float32, 4), 4)}}}
	}
	options.Ping, options.LostAfter = time.Second, patience // its pings are not answered, and machines may be busy
	worker, err := New(address, options)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for event := range worker.Events() {
			fmt.Printf("EVENT %s %s\n", event.Kind, event.Text)
		}
	}()
	for {
		update, err := worker.Receive(context.Background())
		if err != nil {
			fmt.Printf("EVENT failed %v\n", err)
		} else {
			fmt.Printf("EVENT applied %d\n", update.Version)
		}
	}
}

func newVictim(t *testing.T, h *hostile, has string) *victim {
	t.Helper()
	v := &victim{t: t, command: exec.Command(os.Args[0], "-test.run=^TestVictim$"), events: make(chan string, 999)}
	v.command.Env = append(os.Environ(), victimOf+"="+h.control.address(), victimHas+"="+has)
	v.command.Stderr = os.Stderr
	out, _ := v.command.StdoutPipe()
	if err := v.command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = v.command.Process.Kill(); _ = v.command.Wait() })
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if event := strings.TrimPrefix(lines.Text(), "EVENT "); event != lines.Text() {
				v.events <- event
			}
		}
		close(v.events)
	}()
	h.welcome("")
	v.tells("joined")
	v.calm = v.memory()
	return v
}

// tells waits for an event of the victim, and returns its text.
func (v *victim) tells(kind string) string {
	v.t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case event, open := <-v.events:
			if !open {
				v.t.Fatalf("the worker has ended before it tells %s", kind)
			}
			if text := strings.TrimPrefix(event, kind+" "); text != event {
				return text
			}
		case <-deadline:
			v.t.Fatalf("it does not tell %s", kind)
		}
	}
}

var peak = regexp.MustCompile(`VmHWM:\s+(\d+) kB`)

// memory returns the victim's peak memory in bytes.
func (v *victim) memory() int {
	v.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", v.command.Process.Pid))
	if err != nil {
		v.t.Skip("memory is measured on Linux alone")
	}
	size, _ := strconv.Atoi(string(peak.FindSubmatch(status)[1]))
	return size * 1024
}

func (v *victim) checkMemory() {
	v.t.Helper()
	if took := v.memory() - v.calm; took > roomMost {
		v.t.Errorf("it took %d bytes", took)
	}
}

func TestAMessageWithoutAnEnd(t *testing.T) {
	for _, path := range []string{"", filepath.Join(t.TempDir(), "s")} {
		h := newHostile(t, path)
		v := newVictim(t, h, "")
		endless := bytes.Repeat(frameOf(make([]byte, 60_000), 1), 16)
		if said := h.control.flood(endless, 300*megabyte); said > 100*megabyte {
			t.Errorf("%d bytes were taken", said)
		}
		v.checkMemory()
		h.welcome("") // the worker reconnects
		v.tells("joined")
	}
}

func announcement(layout []byte, size int) object {
	id := sha256.Sum256(layout)
	return object{"type": "announce", "model": "m", "epoch": 7, "version": 1, "layout": hex.EncodeToString(id[:]),
		"layout_bytes": len(layout), "nbytes": size, "chunk_bytes": 1024, "commit": "auto", "acknowledge": "applied",
		"encoding": "raw"}
}

func bytesOfLayout(text string) []byte {
	prefix := make([]byte, 8)
	binary.LittleEndian.PutUint64(prefix, uint64(len(text)))
	return append(prefix, text...)
}

func tensorText(name string) string {
	return `"` + name + `":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}`
}

func manyTensors(count int) []byte {
	entries := make([]string, count)
	for i := range entries {
		entries[i] = tensorText(fmt.Sprint("t", i))
	}
	return bytesOfLayout("{" + strings.Join(entries, ",") + "}")
}

func manyTexts(count int) []byte {
	entries := make([]string, count)
	for i := range entries {
		entries[i] = fmt.Sprintf(`"%d":""`, i)
	}
	return bytesOfLayout(`{"__metadata__":{` + strings.Join(entries, ",") + "}}")
}

func TestWhatNobodyAskedForIsNotKept(t *testing.T) {
	h := newHostile(t, "")
	v := newVictim(t, h, "")
	chunk := object{"type": "chunk", "model": "m", "epoch": 7, "version": 9, "index": 0, "crc": 0}
	payload := make([]byte, 64*megabyte)
	h.say(chunk, payload)
	whole := announcement(payload, len(payload))
	whole["whole"] = object{"crc": 0, "digest": strings.Repeat("0", 64)}
	h.say(whole, payload)
	h.data.hears("m/ctl")
	h.data.say(messageOf([]byte("m/dat"), headerOf(chunk), payload))
	h.data.say(messageOf([]byte("m/ctl"), headerOf(announcement(payload, 0)), payload))
	h.asks(987654327)
	v.tells("failed")
	v.checkMemory()
}

func TestLayoutsThatAreTooLarge(t *testing.T) {
	for _, c := range []struct {
		what   string
		layout []byte
		has    string
		says   string
	}{
		{"of 50 MB", manyTensors(840_000), "", `too-large\): a layout of \d+ bytes; this worker accepts at most 1048576: raise its BytesMax`},
		{"of many names", manyTexts(90_000), "", `too-large\): a layout of more names .* 16384: raise its BytesMax`},
		{"of 50 MB, for memory of 16 bytes", manyTensors(840_000), "w",
			`too-large\): a layout of \d+ bytes; layouts of this worker's model have at most \d+: do the names of its tensors differ`},
	} {
		t.Run(c.what, func(t *testing.T) {
			h := newHostile(t, "")
			v := newVictim(t, h, c.has)
			h.say(announcement(c.layout, 0), c.layout)
			if text := v.tells("failed"); !regexp.MustCompile(c.says).MatchString(text) {
				t.Error(text)
			}
			v.checkMemory()
			h.say(announcement(c.layout, 0), c.layout) // a declined version is not processed again
			h.asks(987654323)
			v.checkMemory()
		})
	}
}

func TestPongsThatNobodyReads(t *testing.T) {
	h := newHostile(t, "")
	v := newVictim(t, h, "")
	h.data.hears("m/ctl")
	ping := frameOf([]byte("\x04PING\x00\x10cccccccccccccccc"), 4)
	if said := h.data.flood(bytes.Repeat(ping, 2000), 100*megabyte); said > 20*megabyte {
		t.Errorf("%d bytes were taken", said)
	}
	v.checkMemory()
}

func TestDataElsewhereIsNotConnectedTo(t *testing.T) {
	h := newHostile(t, "")
	secret := openPort(t, "unix", filepath.Join(t.TempDir(), "s"), greetingOf("NULL", "XPUB"))
	worker, err := New(h.control.address(), Options{Models: map[string]Tensors{"m": nil}})
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Close()
	h.welcome(secret.address())
	for text, deadline := "", time.After(patience); !strings.Contains(text, "Options.AnyDataHost"); {
		select {
		case event := <-worker.Events():
			text = event.Text
		case <-deadline:
			t.Fatal("it does not tell that the data is elsewhere")
		}
	}
	h.asks(987654324)
	if _, peers := secret.current(); peers > 0 {
		t.Error("it connects there")
	}
	trusting, err := New(h.control.address(), Options{Models: map[string]Tensors{"m": nil}, AnyDataHost: true})
	if err != nil {
		t.Fatal(err)
	}
	defer trusting.Close()
	h.welcome(secret.address())
	secret.hears("m/ctl")
}

var printableLines = regexp.MustCompile(`^[\p{L}\p{M}\p{N}\p{P}\p{S} \n]*$`)

func TestWordsOfThePublisherArePrintable(t *testing.T) {
	bad, _ := json.Marshal(raw)
	name := strings.Trim(string(bad), `"`)
	refuse := func(code string) func(*hostile) {
		return func(h *hostile) { h.say(object{"type": "refuse", "code": code, "text": raw}) }
	}
	layout := func(text string) func(*hostile) {
		return func(h *hostile) { h.say(announcement(bytesOfLayout(text), 0), bytesOfLayout(text)) }
	}
	field := strings.Replace(tensorText("t"), "dtype", name, 1)
	for what, c := range map[string]struct {
		talk func(*hostile)
		data string
	}{
		"a refusal":                {refuse("limit"), ""},
		"a refusal of one message": {refuse("x"), ""},
		"a tensor's name":          {layout("{" + tensorText(name) + "}"), ""},
		"a name that occurs twice": {layout("{" + tensorText(name) + "," + tensorText(name) + "}"), ""},
		"a field":                  {layout("{" + field + "}"), ""},
		"a dtype":                  {layout("{" + strings.Replace(tensorText("t"), "F32", name, 1) + "}"), ""},
		"a name in a wrong place":  {layout("{" + strings.Replace(tensorText(name), "0,0]", "1,1]", 1) + "}"), ""},
		"the address of the data":  {func(*hostile) {}, "ipc://" + strings.NewReplacer("\r", "", "\n", "").Replace(raw)},
		"no address of the data":   {func(*hostile) {}, raw},
		"an ERROR":                 {func(*hostile) {}, "error"},
		"another security":         {func(*hostile) {}, "security"},
		"another kind of socket":   {func(*hostile) {}, "kind"},
	} {
		t.Run(what, func(t *testing.T) {
			h := newHostile(t, "")
			greetings := map[string][]byte{
				"error":    append(greetingOf("NULL", "XPUB"), frameOf([]byte("\x05ERROR\x08"+raw[:8]), 4)...),
				"security": greetingOf(raw[:8], "XPUB"), "kind": greetingOf("NULL", raw[:8]),
			}
			data := c.data
			if greets, ok := greetings[c.data]; ok {
				data = openPort(t, "tcp", "127.0.0.1:0", greets).address()
			}
			worker, err := New(h.control.address(), Options{Models: map[string]Tensors{"m": {"w": F32(make([]float32, 1), 1)}}})
			if err != nil {
				t.Fatal(err)
			}
			defer worker.Close()
			told := make(chan string, 99)
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			go func() {
				_, err := worker.Receive(ctx)
				told <- fmt.Sprint(err)
			}()
			go func() {
				for event := range worker.Events() {
					if event.Kind != Joined {
						told <- event.Text
					}
				}
			}()
			h.welcome(data)
			c.talk(h)
			text := <-told
			if !printableLines.MatchString(text) || strings.Contains(text, "\nFAKE") || !strings.Contains(text, "1b[2J") {
				t.Errorf("%q", text)
			}
		})
	}
}

// A message on which the machine panics ends neither the process nor the worker, and is reported at
// a limited rate.
func TestADefectEndsNothing(t *testing.T) {
	s := perform(t, map[string]Tensors{"m": nil})
	l := s.worker.loop
	l.Lock()
	defer l.Unlock()
	for range [100]struct{}{} {
		l.recovering(func() { panic("a defect\x1b") })
	}
	if lease := l.leaseFor([]byte("no header"), -1); lease != nil {
		t.Error("there is a place")
	}
	defects := 0
	for len(l.events) > 0 {
		if event := <-l.events; event.Kind == Defect {
			defects++
			if !strings.Contains(event.Text, `a defect\x1b`) || !printableLines.MatchString(event.Text) {
				t.Error(event.Text)
			}
		}
	}
	if defects != 1 {
		t.Errorf("%d were told", defects)
	}
	if fault := l.withoutLock(func() string { return l.runDecoding(nil) }); !strings.Contains(fault, "nil pointer") {
		t.Error(fault)
	}
	machine := l.machine
	defer func() { l.machine = machine }()
	l.machine = nil
	l.received(nil, nil)
	l.published([][]byte{nil}, nil)
	l.leaseFor(nil, 1)
}

// withoutLock calls work without the lock.
func (l *loop) withoutLock(work func() string) string {
	l.Unlock()
	defer l.Lock()
	return work()
}

package weightbus

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The example of the README builds in its own module, and works as described.
func TestTheReadme(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	code := regexp.MustCompile("(?s)```go\n(.*?)```").FindSubmatch(readme)
	install := regexp.MustCompile(`go mod [^#\n]*`).FindAllString(string(readme), -1)
	if code == nil || len(install) == 0 {
		t.Fatal("the README has no example, or does not say how to install")
	}
	p := publish(t, object{})
	folder := t.TempDir()
	source := strings.Replace(string(code[1]), "tcp://localhost:5555", p.address, 1)
	if err := os.WriteFile(filepath.Join(folder, "main.go"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	here, _ := filepath.Abs(".")
	for _, line := range install {
		if words := strings.Fields(strings.Replace(line, "./weightbus/go_client", here, 1)); words[2] != "tidy" {
			run(t, folder, words...)
		}
	}
	replaceModules(t, folder)
	run(t, folder, "go", "build", "-o", "example", ".")
	example := exec.Command(filepath.Join(folder, "example"))
	example.Stderr = os.Stderr
	out, _ := example.StdoutPipe()
	if err := example.Start(); err != nil {
		t.Fatal(err)
	}
	end := time.AfterFunc(60*time.Second, func() { _ = example.Process.Kill() })
	defer end.Stop()
	p.do(object{"wait_for_workers": 1})
	p.do(object{"model": "line", "how": object{"timeout": 30}, "weights": object{
		"slope": []interface{}{"float32", []int{3}, 2.5}, "offset": []interface{}{"float32", []int{}, 1.5}}})
	line, err := bufio.NewReader(out).ReadString('\n')
	_ = example.Process.Kill()
	_ = example.Wait()
	if line != "1 2.5\n" {
		t.Fatalf("it wrote %q, %v", line, err)
	}
}

// replaceModules makes a test's module use Debian's packages instead of downloads; without such
// packages it runs `go mod tidy`.
func replaceModules(t *testing.T, folder string) {
	const debian = "/usr/share/gocode/src"
	for module, version := range map[string]string{"golang.org/x/crypto": "v0.4.0", "golang.org/x/sys": "v0.3.0"} {
		from := filepath.Join(debian, module)
		if _, err := os.Stat(from); err != nil {
			run(t, folder, "go", "mod", "tidy")
			return
		}
		run(t, folder, "go", "mod", "edit", "-require="+module+"@"+version, "-replace="+module+"="+from)
	}
}

// The example worker predicts, and sends bye when it is stopped.
func TestTheExampleWorker(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "worker")
	run(t, ".", "go", "build", "-o", binary, "./examples")
	p := publish(t, object{"shared_memory": false})
	worker := exec.Command(binary, p.address, "--name", "w0", "--patience", "60")
	var out bytes.Buffer
	worker.Stdout, worker.Stderr = &out, os.Stderr
	if err := worker.Start(); err != nil {
		t.Fatal(err)
	}
	p.do(object{"wait_for_workers": 1})
	p.do(object{"model": "line", "how": object{"timeout": 30}, "weights": object{
		"slope": []interface{}{"float32", []int{3}, 0.5}, "offset": []interface{}{"float32", []int{}, 1.5}}})
	end := time.AfterFunc(60*time.Second, func() { _ = worker.Process.Kill() })
	defer end.Stop()
	if err := worker.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := worker.Wait(); err != nil {
		t.Fatal(err)
	}
	if line := out.String(); !strings.HasPrefix(line, `{"worker":"w0","version":1,"prediction":4.5,"digest":"`) {
		t.Fatalf("%q", line)
	}
	for deadline := time.Now().Add(30 * time.Second); ; { // a lost worker stays in the list; one that sent bye does not
		answer := p.do(object{"wait_for_workers": 0})
		if len(answer["workers"].([]interface{})) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it did not say goodbye: %v", answer)
		}
	}
}

func run(t *testing.T, folder string, words ...string) {
	t.Helper()
	command := exec.Command(words[0], words[1:]...)
	command.Dir = folder
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", words, err, out)
	}
}

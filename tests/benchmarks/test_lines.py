"""The count of lines: which part each file belongs to, wherever a commit has it; and its bounds."""

import json
from collections import Counter
from pathlib import Path

import pytest

from weightbus.benchmarks import lines
from weightbus.benchmarks.lines import KEPT, by_subject, counted, part_of, tracked
from weightbus.tests.cli.starting import python


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("bus/publisher/machine.py", "Python"),
        ("__main__.py", "Python"),
        ("weightbus/__init__.py", "Python"),  # or wherever else the package may be
        ("codecs/_native.pyi", None),
        ("codecs/_native.c", "Python's helper in C"),
        ("codecs/_crc32c.h", "Python's helper in C"),
        ("python_client/observing/page.js", "Python's page"),
        (".ci/release.py", None),
        (".links/weightbus/__init__.py", None),
        ("benchmarks/lines.py", None),
        ("docs/conf.py", None),
        ("examples/trainer.py", None),
        ("setup.py", None),
        ("pyproject.toml", None),
        ("tests/benchmarks/test_lines.py", "tests in Python"),
        ("tests/net/chaos/test_proxy.py", "tests in Python"),
        ("tests/native/crc32c_checks.c", None),
        ("c_client/src/lib.rs", "C"),
        ("go_client/internal/wbp/slot.go", "Go"),
        ("rust_client/src/raw/crc.rs", "Rust"),
        ("cpp_client/include/weightbus/weightbus.hpp", "C++"),
        ("java_client/src/io/github/weightbus/Worker.java", "Java"),
        ("java_client/conformance/Driver.java", None),
        ("go_client/internal/wbp/machine_test.go", None),
        ("go_client/cmd/driver/main.go", None),
        ("go_client/vendor/golang.org/x/crypto/nacl/secretbox/secretbox.go", "vendored"),
        ("go_client/vendor/golang.org/x/sys/cpu/cpu_x86.s", "vendored"),
        ("go_client/vendor/golang.org/x/sys/LICENSE", None),
        ("node_client/src/loop.ts", "TypeScript"),
        ("node_client/tests/live.test.ts", None),
        ("node_client/tests/publisher.py", None),
        ("node_client/package.json", None),
        ("c_client/include/weightbus.h", None),
        ("protocol/messages.toml", "the protocol's description"),
        ("protocol/python.py", "the protocol's description"),
        ("protocol/README.md", None),
        ("c_client/build.rs", None),
    ],
)
def test_a_file_belongs_to_one_part_or_to_none(name: str, part: str | None) -> None:
    assert part_of(name) == part


def test_a_unit_test_at_the_end_of_a_file_in_rust_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = b"fn f() {}\n\n#[cfg(test)]\nmod tests {\n}\n"
    monkeypatch.setattr(lines, "tracked", lambda _: iter([("rust_client/src/f.rs", text)]))
    assert counted(lines.HERE) == {"Rust": 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bus/a.py", b'"""A. Made by `make protocol`; do not edit."""\n\na = 1\n'),
        ("go_client/a.go", b"// Made by `make protocol`; do not edit.\n\npackage wbp\n"),
    ],
)
def test_what_is_made_from_the_description_does_not_count(
    name: str, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(name, text), ("protocol/a.py", text), ("bus/b.py", b"1\n" * 5 + text)]
    monkeypatch.setattr(lines, "tracked", lambda _: iter(found))
    assert counted(lines.HERE) == {lines.DESCRIPTION: 3, "Python": 8}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two commits, between which the package moves; and a file that is new."""
    monkeypatch.setattr(lines, "ROOT", tmp_path)
    (tmp_path / "bus").mkdir()
    (tmp_path / "bus" / "a.py").write_text("1\n2\n")
    (tmp_path / "a.py").symlink_to("bus/a.py")
    run("init", "--quiet")
    commit("first")
    (tmp_path / "weightbus").mkdir()
    (tmp_path / "bus").rename(tmp_path / "weightbus" / "bus")
    (tmp_path / "a.py").unlink()
    commit("second")
    (tmp_path / "weightbus" / "b.py").write_text("3\n")
    return tmp_path


def run(*words: str) -> str:
    return lines.git("-c", "user.name=w", "-c", "user.email=w@example.org", *words).decode()


def commit(name: str) -> None:
    run("add", "--all")
    run("commit", "--quiet", "--message", name)


def test_commits_are_counted_as_they_were_and_the_checkout_as_it_is(repository: Path) -> None:
    assert repository == lines.ROOT
    assert dict(tracked("HEAD~1")) == {"bus/a.py": b"1\n2\n"}  # and no link beside it
    assert counted("HEAD~1") == counted("HEAD") == Counter(Python=2)
    assert counted(lines.HERE) == Counter(Python=3)


def test_it_runs_as_a_program() -> None:
    said = python(lines.__file__).stdout
    assert all(title in said for title in lines.ROWS)


def test_a_subject_is_a_folder_and_a_client_is_one_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["bus/limits.py", "bus/worker/machine.py", "bus/worker/deep/a.py", "bus/page.md"]
    files += ["go_client/internal/wbp/machine.go", "tests/net/test_zmtp.py", "tests/conftest.py"]
    monkeypatch.setattr(lines, "tracked", lambda _: ((name, b"1\n") for name in files))
    expected = {"bus": 1, "bus/worker": 2, "go_client": 1, "tests/net": 1, "tests": 1}
    assert by_subject() == expected


def test_no_subject_has_more_lines_than_the_file_says() -> None:
    kept: dict[str, int] = json.loads(KEPT.read_text())
    risen = {
        subject: (kept.get(subject, 0), found)
        for subject, found in by_subject().items()
        if found > kept.get(subject, 0)
    }
    assert not risen, "if they must: .venv/bin/python benchmarks/lines.py --write"

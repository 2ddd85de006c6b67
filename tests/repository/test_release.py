"""A release goes ahead only of what is committed, tagged and in the changelog."""

from pathlib import Path
from typing import Any

import pytest

from weightbus.tests.repository.scripts import ROOT, loaded

TAGGED, CLEAN = {"tag": "v1.2.3\n"}, {"status": ""}


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    module = loaded(".ci/release.py")
    (tmp_path / "CHANGELOG.md").write_text("## [1.2.3] - today\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "DIST", tmp_path / "dist")
    monkeypatch.setattr(module.versions, "version", lambda: "1.2.3")
    monkeypatch.setattr(module.versions, "stale", dict)
    monkeypatch.delenv("GITHUB_REF_TYPE", raising=False)
    for name in ("python", "node", "rust", "native", "go", "java"):
        monkeypatch.setattr(module, name, lambda *_: None)
    answer(module, monkeypatch, TAGGED | CLEAN)
    return module


def answer(release: Any, monkeypatch: pytest.MonkeyPatch, told: dict[str, str]) -> None:
    monkeypatch.setattr(release, "run", lambda _git, what, *_: told[what])


@pytest.mark.parametrize(
    ("told", "wanted", "said"),
    [
        (TAGGED | CLEAN, "1.2.3", []),
        (TAGGED | CLEAN, "1.2.4", ["no section", "no tag v1.2.4"]),
        (TAGGED | {"status": " M README.md\n"}, "1.2.3", ["not committed"]),
        ({"tag": "v1.2.30\n"} | CLEAN, "1.2.3", ["no tag v1.2.3"]),
    ],
)
def test_what_speaks_against_a_release_is_said(
    release: Any,
    monkeypatch: pytest.MonkeyPatch,
    told: dict[str, str],
    wanted: str,
    said: list[str],
) -> None:
    answer(release, monkeypatch, told)
    doubts = [*release.doubts(wanted)]
    assert len(doubts) == len(said)
    assert all(words in doubt for words, doubt in zip(said, doubts, strict=True))


@pytest.mark.parametrize("words", [[], ["--strict"]])
@pytest.mark.parametrize("ref", ["branch", "tag"])
@pytest.mark.parametrize("changes", ["", " M README.md\n"])
def test_of_a_tag_a_doubt_is_an_error(
    release: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], ref: str, changes: str
) -> None:
    monkeypatch.setenv("GITHUB_REF_TYPE", ref)
    answer(release, monkeypatch, TAGGED | {"status": changes})
    if changes and (words or ref == "tag"):
        with pytest.raises(SystemExit, match="not committed"):
            release.main(words)
        assert not release.DIST.exists(), "nothing is built"
    else:
        release.main(words)


def test_packages_of_another_version_are_no_release(
    release: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release.versions, "stale", lambda: {"go_client/worker.go": "of 1.2.3"})
    with pytest.raises(SystemExit, match=r"go_client/worker\.go"):
        release.main([])
    assert not release.DIST.exists(), "nothing is built"

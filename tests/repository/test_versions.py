"""All packages have one version, which pyproject.toml says, and a license; their tables agree."""

import re

import pytest

from weightbus.tests.repository.scripts import ROOT, loaded

CLIENTS = sorted(path.name for path in ROOT.glob("*_client") if path.name != "python_client")
VERSIONS = loaded(".ci/versions.py")


def test_nothing_is_left_to_write() -> None:
    assert sorted(VERSIONS.stale()) == [], "make version"


def test_another_version_is_written_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    number = VERSIONS.version()
    monkeypatch.setattr(VERSIONS, "version", lambda: "7.8.9")
    stale = VERSIONS.stale()
    assert set(VERSIONS.PLACES) | {VERSIONS.GUIDE} <= set(stale)
    assert [name for name, text in stale.items() if "7.8.9" not in text] == []
    tables = [name for name in stale if name.endswith(".md")]
    assert [name for name in tables if f" {number} |" in stale[name]] == []


def test_a_place_that_tells_no_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERSIONS.PLACES, "LICENSE", r"weightbus ([0-9.]+)")
    with pytest.raises(ValueError, match="nothing there tells a version"):
        VERSIONS.stale()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_has_what_a_package_needs(client: str) -> None:
    assert (ROOT / client / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert any(place.startswith(f"{client}/") for place in VERSIONS.PLACES), "a version"
    readme = (ROOT / client / "README.md").read_text()
    row = VERSIONS.rows(VERSIONS.version()).get(client)
    assert row is not None, "a row of what works with what"
    assert row in readme
    trying = "pip install ./weightbus ", "python weightbus/examples/numpy_trainer.py tcp://"
    assert all(line in readme for line in trying), "how to start a publisher"


@pytest.mark.parametrize("client", ["", *CLIENTS])
def test_images_are_built_on_full_versions(client: str) -> None:
    file = ROOT / client / "Dockerfile"
    bases = re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE) if file.exists() else []
    full = re.compile(r"debian:\d+\.\d+-slim|(python|node):\d+\.\d+\.\d+-\S+")
    assert [base for base in bases if not full.fullmatch(base)] == []

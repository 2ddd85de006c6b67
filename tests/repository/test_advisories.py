"""No dependency is admitted of which an advisory is known here.

`pip-audit` asks a service that CI cannot reach, so this list is kept by hand: a row for each
dependency that had an advisory, with the first release without any. It finds a floor that was
lowered, and a pinned or installed version below; it does not find an advisory that is not listed.
"""

import re
import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from weightbus.tests.repository.scripts import ROOT

SAFE = {
    "aiohttp": "3.14.4",  # CVE-2026-111064, CVE-2026-111066; requests by their first line
    "cryptography": "50.0.0",  # CVE-2026-69247
    "pynacl": "1.6.2",  # CVE-2025-69277, of its libsodium
    "ray": "2.56.0",  # CVE-2026-57516; CVE-2026-41486 and CVE-2026-27482 before
    "requests": "2.33.0",  # CVE-2026-25645
}


def asked_for() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(row) for rows in (project["dependencies"], *extras) for row in rows]


@pytest.mark.parametrize("name", SAFE)
def test_no_release_with_a_known_advisory_is_admitted(name: str) -> None:
    found = [each for each in asked_for() if each.name == name]
    assert found, "remove its row"
    for each in found:
        floors = [Version(s.version) for s in each.specifier if s.operator in (">=", "==", "~=")]
        assert floors, "it has no floor"
        assert max(floors) >= Version(SAFE[name]), f"{each} admits releases with advisories"


@pytest.mark.parametrize("name", SAFE)
def test_what_the_tests_run_with_has_no_known_advisory(name: str) -> None:
    assert Version(version(name)) >= Version(SAFE[name])
    pinned = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert name == "requests" or pinned, "pin it"
    if pinned:
        assert Version(pinned[1]) >= Version(SAFE[name])


def test_what_is_pinned_is_what_may_be_installed() -> None:
    """A floor above a pin could not be installed with it."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for each in asked_for():
        pin = pins.get(each.name, pins.get(each.name.replace("-", "_")))
        assert pin is None or each.specifier.contains(pin, prereleases=True), f"{each}, {pin}"

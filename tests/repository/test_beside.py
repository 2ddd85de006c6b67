"""What is installed is what runs, also where a clone called `weightbus` lies beside the script.

README has it so: `pip install ./weightbus`, then `python mine.py` in the same folder, which Python
looks into first.
"""

import json
import os
from pathlib import Path

import pytest

import weightbus
from weightbus.codecs import native
from weightbus.tests.cli.starting import python
from weightbus.tests.repository.cloning import ROOT, clone

WHERE = """
import json
from weightbus.codecs import native
from weightbus.python_client import subscriber
files = [weightbus.__file__, native.__file__, subscriber.__file__]
print(json.dumps({"files": files, "native": native.description()}))
"""


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a clone, and where scripts lie beside it."""
    folder = tmp_path_factory.mktemp("beside")
    clone(folder)
    return folder


def printed(*words: str, cwd: Path) -> str:
    """Return what Python prints, started in a folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return python("-W", "ignore", *words, cwd=cwd, env=kept, timeout=100).stdout


def test_the_readmes_script_beside_a_clone_runs_what_is_installed(beside: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    block = readme.partition("```python\n")[2].partition("```")[0]
    (beside / "mine.py").write_text(block + WHERE)
    *said, last = printed("mine.py", cwd=beside).splitlines()
    found = json.loads(last)
    assert [line for line in said if "policy" in line], "no receipt"
    assert found["files"][0] == weightbus.__file__
    assert not [file for file in found["files"] if Path(file).is_relative_to(beside)]
    assert found["native"] == native.description(), "a clone has none"


def test_doctor_beside_a_clone_speaks_of_what_is_installed(beside: Path) -> None:
    found = json.loads(printed("-m", "weightbus", "doctor", "--json", cwd=beside))["findings"]
    assert native.description() in [each["text"] for each in found]


@pytest.mark.parametrize("within", ["", "weightbus"], ids=["beside", "root"])
def test_a_clone_alone_is_no_package(beside: Path, within: str) -> None:
    """Neither from its own root nor from the folder that holds it is anything of it imported."""
    code = (
        "import importlib.util, json; spec = importlib.util.find_spec('weightbus'); "
        "print(json.dumps(None if spec is None else spec.origin))"
    )
    bare = ("-S", "-c", code)  # without what is installed
    assert json.loads(printed(*bare, cwd=beside / within)) is None

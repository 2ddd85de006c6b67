"""A worker that has numpy alone works, and nobody imports torch on its behalf."""

from weightbus.tests.cli.starting import python

PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tensordict"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocker())

import numpy as np
from weightbus.codecs.apply import as_arrays, check, copy_into
from weightbus.codecs.checksum import digest
from weightbus.codecs.native import crc32c
from weightbus.bus.chunks import ChunkPlan
from weightbus.codecs.dtypes import DTYPES, numpy_dtype
from weightbus.codecs.layout import Layout
from weightbus.codecs.state import state_of, write_into

source = {
    name: np.arange(6).reshape(2, 3).astype(numpy_dtype(name))
    for name, row in DTYPES.items() if row.numpy
}
source["nested"] = {"x": source["F32"]}
imported = set(sys.modules)
state = state_of(source)
layout = Layout.parse(state.layout().header)
data = np.zeros(layout.nbytes, np.uint8)
write_into(state, layout, data)
assert set(sys.modules) == imported  # nor when it publishes first, perhaps without descriptors
target = {k: np.zeros_like(v) for k, v in source.items() if k != "nested"}
target["nested"] = {"x": np.zeros((2, 3), np.float32)}
assert check(layout, target) == []
copy_into(layout, data, target)
for name, array in as_arrays(layout, bytes(data)).items():
    into = target["nested"]["x"] if name == "nested.x" else target[name]
    assert array.tobytes() == into.tobytes(), name
try:
    state_of({"x": object()})
except ValueError as error:
    assert "a object cannot travel" in str(error)
assert "torch" not in sys.modules
print("done", layout.aliases["nested.x"])
"""


def test_numpy_alone_is_enough() -> None:
    assert python("-c", PROGRAM).stdout.strip() == "done F32"

"""What mlx reads of the files that workers write: each dtype that it knows, ties, metadata."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import FileTarget, Publisher, Subscriber
from weightbus.bus.staged import StagedVersion
from weightbus.codecs.dtypes import DTYPES
from weightbus.codecs.layout import Layout

mx: Any = pytest.importorskip("mlx.core")

SECONDS = 60.0
UNKNOWN = {"F64", "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlx_reads_the_dtypes_that_it_knows(tmp_path: Path, dtype: str) -> None:
    layout = Layout.plan([("w", dtype, (2, 4))])
    data = np.arange(layout.nbytes, dtype=np.uint8) % 2
    target = FileTarget(tmp_path / "m.safetensors")
    target.apply(StagedVersion("m", (1, 1), layout, data, ""))
    target.settle()
    if dtype in UNKNOWN:
        with pytest.raises(RuntimeError, match=f"unsupported dtype {dtype}"):
            mx.load(str(tmp_path / "m.safetensors"))
        return
    read = mx.load(str(tmp_path / "m.safetensors"))["w"]
    assert bytes(memoryview(mx.view(read, mx.uint8))) == data.tobytes()


@pytest.mark.parametrize("untied", [False, True])
def test_mlx_reads_what_a_worker_wrote(tmp_path: Path, *, untied: bool) -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    weights = {"embed": w, "head": w, "odd": np.ones(3, np.uint8), "last": np.ones((), np.float16)}
    target = FileTarget(tmp_path / "m.safetensors", untied=untied)
    with Publisher() as publisher, Subscriber(publisher.address, {"m": target}) as worker:
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", weights, timeout=SECONDS)
    read, metadata = mx.load(str(tmp_path / "m.safetensors"), return_metadata=True)
    assert metadata == {"format": "pt"} | ({} if untied else {"head": "embed"})
    assert read.keys() == weights.keys() - (set() if untied else {"head"})
    for name, array in read.items():
        np.testing.assert_array_equal(np.array(array), weights[name])

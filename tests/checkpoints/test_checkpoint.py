"""Checkpoints: files become the very tensors they hold, or an error that says what is wrong."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from weightbus.codecs.layout import Layout
from weightbus.codecs.numpy_tensors import Array
from weightbus.codecs.state import state_of
from weightbus.python_client.checkpoints.checkpoint import open_checkpoint
from weightbus.python_client.checkpoints.shards import CheckpointError

FIRST: dict[str, Array] = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.bias": np.ones(3, np.int64),
}
SECOND: dict[str, Array] = {
    "b.weight": np.full((2, 2), 7, ml_dtypes.bfloat16),
    "b.mask": np.array([True, False, True]),
    "b.none": np.zeros((0, 4), np.float16),
    "b.scalar": np.array(2.5),
}
BOTH: dict[str, Array] = {**FIRST, **SECOND}


def write_header(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def write_shards(folder: Path, weight_map: Mapping[str, str] | None = None) -> Path:
    save_file(FIRST, folder / "model-1.safetensors")
    save_file(SECOND, folder / "model-2.safetensors")
    if weight_map is None:
        weight_map = {
            **dict.fromkeys(FIRST, "model-1.safetensors"),
            **dict.fromkeys(SECOND, "model-2.safetensors"),
        }
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_same(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("load", [False, True], ids=["mapped", "loaded"])
def test_a_file_is_its_tensors(tmp_path: Path, load: bool) -> None:
    save_file(BOTH, tmp_path / "x.safetensors", {"format": "np"})
    checkpoint = open_checkpoint(tmp_path / "x.safetensors", load=load)
    assert_same(checkpoint.arrays(), BOTH)
    assert checkpoint.nbytes == sum(array.nbytes for array in BOTH.values())
    assert checkpoint.metadata == {"format": "np"}


def test_arrays_are_views_of_the_file_and_read_only(tmp_path: Path) -> None:
    save_file(BOTH, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    for array in checkpoint.arrays().values():
        assert not array.flags.writeable
        if array.size:
            assert np.shares_memory(array, checkpoint.parts[0].data)


@pytest.mark.parametrize("load", [False, True], ids=["mapped", "loaded"])
def test_shards_are_one_model(tmp_path: Path, load: bool) -> None:
    folder = write_shards(tmp_path)
    for path in (folder, folder / "model.safetensors.index.json"):
        checkpoint = open_checkpoint(path, load=load)
        assert len(checkpoint.parts) == 2
        assert_same(checkpoint.arrays(), BOTH)


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion.safetensors"])
def test_a_folder_with_one_file_is_that_file(tmp_path: Path, name: str) -> None:
    save_file(FIRST, tmp_path / name)
    assert_same(open_checkpoint(tmp_path).arrays(), FIRST)


def test_layout_and_digest_do_not_depend_on_the_files(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    save_file(BOTH, one / "model.safetensors", {"format": "pt"})
    a, b = open_checkpoint(one), open_checkpoint(write_shards(many))
    assert a.layout == b.layout == state_of(a.arrays()).layout() == state_of(b.arrays()).layout()
    assert a.digest() == b.digest()
    changed = {**BOTH, "a.bias": np.zeros(3, np.int64)}
    save_file(changed, one / "model.safetensors")
    assert open_checkpoint(one).digest() != b.digest()


@pytest.mark.parametrize(
    ("kept", "aliases"), [("a", ["b", "c"]), ("c", ["a", "b"]), ("b", ["a"])], ids=str
)
@pytest.mark.parametrize("size", [4, 0])
def test_tied_tensors_stay_tied(tmp_path: Path, kept: str, aliases: list[str], size: int) -> None:
    values = np.arange(size, dtype=np.float32)
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({kept: values, "z": values}, dict.fromkeys(aliases, kept)))
    checkpoint = open_checkpoint(path)
    arrays = checkpoint.arrays()
    assert arrays.keys() == {kept, "z", *aliases}
    assert all(arrays[alias] is arrays[kept] for alias in aliases)
    assert checkpoint.layout == state_of(arrays).layout()
    assert checkpoint.metadata == {}


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    many = {f"t{i}": np.ones(300_001, np.float32) for i in range(3)}
    save_file(many, tmp_path / "x.safetensors")
    read: list[int] = []
    hashed: list[int] = []
    checkpoint = open_checkpoint(tmp_path / "x.safetensors", load=True, progress=read.append)
    checkpoint.digest(hashed.append)
    assert sum(read) == sum(hashed) == checkpoint.nbytes


def test_a_file_whose_tensors_are_not_aligned(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}  '
    assert len(header) % 8
    values = np.array([1.5, -2.5])
    path = write_header(tmp_path / "x.safetensors", header, values.tobytes())
    assert_same(open_checkpoint(path).arrays(), {"x": values})


def test_what_numpy_cannot_hold_is_inspected_but_not_published(tmp_path: Path) -> None:
    header = b'{"half":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    checkpoint = open_checkpoint(write_header(tmp_path / "x.safetensors", header, b"\1\2"))
    assert checkpoint.layout.by_name("half").dtype == "F4"
    assert len(checkpoint.digest()) == 64
    with pytest.raises(CheckpointError, match=r"x\.safetensors: 'half' is F4"):
        checkpoint.arrays()


def test_a_checkpoint_knows_that_its_file_changed(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.changed()
    save_file({**SECOND, "b.scalar": np.ones(9)}, folder / "model-2.safetensors")
    assert checkpoint.changed()


def test_a_file_that_is_written_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(FIRST, path)

    def meddle(_nbytes: int) -> None:
        save_file({**FIRST, "more": np.ones(5)}, path)

    with pytest.raises(CheckpointError, match="written while it was read"):
        open_checkpoint(path, load=True, progress=meddle)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def behead(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    path.write_bytes(b"PK\3\4\0\0\x08\x08" + bytes(100))


def garble(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"I64"', b'"I46"'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "is cut short, or still being written: its header describes 72 bytes .* has 71"),
        (lengthen, "is damaged: its header describes 72 bytes .* the file has 73"),
        (behead, "is cut short, or still being written: it has 20 bytes"),
        (empty, "is cut short, or still being written: it has 0 bytes"),
        (pickled, "is a zip archive, as torch.save and Lightning .* pickled"),
        (garble, "is damaged: tensor 'a.bias' has dtype 'I46'"),
    ],
)
def test_a_damaged_file(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    folder = write_shards(tmp_path)
    damage(folder / "model-1.safetensors")
    for path in (folder, folder / "model-1.safetensors"):
        with pytest.raises(CheckpointError, match=rf"model-1\.safetensors {words}"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"c": "model-1.safetensors"}, r"model-1\.safetensors does not hold 'c'"),
        ({"a.bias": "model-2.safetensors"}, r"model-2\.safetensors does not hold 'a\.bias'"),
        ({"a.bias": None}, r"model-1\.safetensors holds 'a\.bias', which .*index\.json does not"),
        ({"c": "model-3.safetensors"}, r"model-3\.safetensors .*missing, with c"),
        ({"c": "../x.safetensors"}, r"'c' is listed in '\.\./x\.safetensors'"),
        ({"c": "x.bin"}, r"'c' is listed in 'x\.bin'"),
        ({"c": 3}, r"index\.json is not an index of shards"),
    ],
)
def test_an_index_that_contradicts_its_shards(
    tmp_path: Path, changes: Mapping[str, object], words: str
) -> None:
    folder = write_shards(tmp_path)
    index = folder / "model.safetensors.index.json"
    weight_map = {**json.loads(index.read_text())["weight_map"], **changes}
    kept = {name: file for name, file in weight_map.items() if file is not None}
    index.write_text(json.dumps({"weight_map": kept}))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    save_file({**SECOND, "a.bias": np.ones(3, np.int64)}, folder / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors holds 'a\.bias'.*model-1"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map":{"a":"x","a":"y"}}', "[" * 9999])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    folder = write_shards(tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of shards"):
        open_checkpoint(folder)


def test_folders_that_do_not_say_which_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        open_checkpoint(tmp_path)
    save_file(FIRST, tmp_path / "x.safetensors")
    save_file(FIRST, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"more than one model.*x\.safetensors, y\.safet"):
        open_checkpoint(tmp_path)
    write_shards(tmp_path)
    save_file(FIRST, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="more than one model"):
        open_checkpoint(tmp_path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "x.safetensors")


WHOLE = save(BOTH, {"format": "pt"})


@given(st.binary(max_size=64), st.integers(0, len(WHOLE)), st.integers(0, 64))
def test_any_bytes_are_a_checkpoint_or_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, inserted: bytes, at: int, dropped: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(WHOLE[:at] + inserted + WHOLE[at + dropped :])
    with contextlib.suppress(CheckpointError):
        checkpoint = open_checkpoint(path)
        assert checkpoint.layout.nbytes == checkpoint.nbytes
        assert isinstance(checkpoint.layout, Layout)


@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_a_length_that_is_cut_short_is_not_believed(tmp_path: Path, nbytes: int) -> None:
    """Once, so many bytes were asked for as those that there are would make."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * nbytes)
    with pytest.raises(CheckpointError, match="cut short"):
        open_checkpoint(path)


def of_an_index(folder: Path, count: int, kind: str) -> float:
    """Return the processor time until an index of so many names is refused."""
    files = [f"{n if kind == 'missing' else 0}.safetensors" for n in range(count)]
    rows = [f'"layer.{n}.weight": "{file}"' for n, file in enumerate(files)]
    rows += rows[-1:] if kind == "twice" else []
    index = folder / f"{count}.safetensors.index.json"
    index.write_text('{"weight_map": {' + ", ".join(rows) + "}}")
    began = time.process_time()
    with pytest.raises(CheckpointError, match=kind):
        open_checkpoint(index)
    return time.process_time() - began


@pytest.mark.parametrize("kind", ["twice", "missing"])
def test_an_index_that_is_refused_takes_time_by_its_length(tmp_path: Path, kind: str) -> None:
    one = min(of_an_index(tmp_path, 4_000, kind) for _ in range(3))
    eight = min(of_an_index(tmp_path, 32_000, kind) for _ in range(3))
    assert eight < 24 * one, "8 times as long; with the square of it, 64 times"

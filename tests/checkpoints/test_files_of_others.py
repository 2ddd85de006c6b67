"""Files that others wrote: what safetensors' own library opens is opened, or named as over a limit.

    FILES=1000 pytest tests/checkpoints/test_files_of_others.py --hypothesis-show-statistics

tries more, and says of how many the library and we think what.
"""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from weightbus.codecs.dtypes import DTYPES
from weightbus.codecs.errors import LimitError
from weightbus.codecs.protocol_limits import NAME_BYTES_MAX, RANK_MAX
from weightbus.python_client.checkpoints.checkpoint import open_checkpoint
from weightbus.python_client.checkpoints.shards import CheckpointError

FILES = int(os.environ.get("FILES", "100"))


class Twice(list[tuple[str, Any]]):
    """An object of JSON, a key of which may stand twice."""


def spelled(value: Any, wide: str = "") -> str:
    """Return a value as JSON, as given: keys may stand twice, and `Raw` is put in as it is."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, Twice):
        inner = (f"{json.dumps(k)}{wide}:{wide}{spelled(v, wide)}" for k, v in value)
        return "{" + wide + f"{wide},".join(inner) + wide + "}"
    if isinstance(value, list):
        return "[" + ",".join(spelled(each, wide) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)


class Raw(str):
    """Something that stands in a header as it is."""

    __slots__ = ()


def values(*spellings: str) -> st.SearchStrategy[Any]:
    """Return values of JSON, some of them spelled so."""
    plain = st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9)
    return st.recursive(
        plain | st.text(max_size=3) | st.sampled_from(spellings).map(Raw),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(st.tuples(st.text(max_size=2), inner), max_size=3).map(Twice)
        ),
        max_leaves=8,
    )


RIGHT = values("-0", "1E5", "0.10", "1e-999")
WRONG = values("1e999", "NaN", "01", '"\\ud800"', "1.")
ODD_NUMBERS = [*map(Raw, ("1.0", "-0", "1e0", "9" * 5000)), True, None, -1, 2**53, 2**64, "1"]
ODD_NAMES = ["a", "b", "w.weight", "", "naïve", "x" * (NAME_BYTES_MAX + 1), "\x1b"]
NAMES = st.sampled_from(ODD_NAMES) | st.text(max_size=4)
OURS = list(DTYPES)
LARGE = [[1] * (RANK_MAX + 1), [0, 2**53], [0, 2**40, 2**40], [2**63, 2], [0, 2**51, 2]]


@st.composite
def sizes(draw: st.DrawFn, right: list[int]) -> list[Any]:
    """Return sizes, one or more of them as no library takes it, or not every one."""
    return [draw(st.sampled_from([each, *ODD_NUMBERS])) for each in right] or [Raw("0.0")]


@st.composite
def entries(draw: st.DrawFn, begin: int, *, odd: bool) -> tuple[Any, int]:
    """Return what a header says of a tensor, in one of many spellings, and where it ends."""
    dtype, shape = draw(st.sampled_from(OURS)), draw(st.lists(st.integers(0, 4), max_size=3))
    if (math.prod(shape) * DTYPES[dtype].bits) % 8 and not odd:
        shape = [8, *shape]
    if draw(st.integers(0, 19)) == 19:
        dtype, shape = "U8", draw(st.sampled_from(LARGE))
    bits = math.prod(shape) * DTYPES[dtype].bits
    end = begin + bits // 8 if bits < 2**16 else begin
    spelling: Any = draw(st.sampled_from([dtype, dtype, dtype, Twice([(dtype, None)])]))
    extent: list[Any] = shape
    offsets: list[Any] = [begin, end]
    if odd:
        spelling = draw(st.sampled_from([dtype, "f32", None, Twice([(dtype, 1)])]))
        extent = draw(st.just(shape) | sizes(shape))
        offsets = draw(st.just(offsets) | sizes(offsets))
    row: list[tuple[str, Any]] = [("dtype", spelling), ("shape", extent), ("data_offsets", offsets)]
    kind, more = draw(st.integers(0, 5)), WRONG if odd else RIGHT
    if kind == 5:
        cells: list[Any] = [value for _, value in row]
        if odd:
            cells = cells[: draw(st.integers(2, 3))] + draw(st.lists(more, max_size=1))
        return cells, end
    if kind >= 3:
        keys = ["x", "y", "shape", ""] if odd else ["x", "y", ""]
        row += draw(st.lists(st.tuples(st.sampled_from(keys), more), max_size=2))
    row = list(draw(st.permutations(row)))
    return Twice(row[: len(row) - (odd and kind == 0)]), end


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Return a file as somebody may have written it; most have nothing that the library refuses."""
    rows: list[tuple[str, Any]] = []
    odd, at = draw(st.sampled_from([False, False, True])), 0
    for _ in range(draw(st.integers(0, 3))):
        row, at = draw(entries(at, odd=odd))
        rows.append((draw(NAMES), row))
    texts = st.lists(st.tuples(st.text(max_size=2), st.text(max_size=2)), max_size=3).map(Twice)
    kinds = texts | st.none() | st.just(Twice([("format", "pt")]))
    for _ in range(draw(st.integers(0, 1 + odd))):
        metadata = draw(kinds | st.sampled_from([[], "x", Twice([("a", None)])]) if odd else kinds)
        rows.insert(draw(st.integers(0, len(rows))), ("__metadata__", metadata))
    text = spelled(Twice(rows), draw(st.sampled_from(["", " ", "\n\t"]))).encode()
    text = draw(st.sampled_from([b"", b" ", b"\n"])) + text
    text += draw(st.sampled_from([b"", b" ", b"\r\n\t", *([b"\0", b"x"] * odd)]))
    size = at
    if odd and draw(st.booleans()):  # damaged, somewhere
        where = draw(st.integers(0, len(text)))
        text = text[:where] + draw(st.binary(max_size=2)) + text[where + draw(st.integers(0, 2)) :]
        size = max(0, at + draw(st.integers(-1, 1)))
    data = bytes(range(256)) * (size // 256 + 1)
    return len(text).to_bytes(8, "little") + text + data[:size]


def file_of(text: str, data: bytes = b"\0\0\x80\x3f") -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode() + data


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@settings(max_examples=FILES, deadline=None)
@given(files())
@example(file_of(f'{{"__metadata__":null,"a":{ENTRY}}}'))
@example(file_of(f'{{"a":{ENTRY[:-1]},"x":{"[" * 125}{"]" * 125}}}}}'))
@example(file_of(f'{{"a":{ENTRY[:-1]},"x":{"[" * 126}{"]" * 126}}}}}'))
@example(file_of(f'{{"a":{ENTRY[:-1]},"x":{"[" * 5000}{"]" * 5000}}}}}'))
@example(file_of(f'{{"a":{ENTRY},"a":{ENTRY}}}'))
@example(file_of(f'{{"":{ENTRY}}}'))
@example(file_of('{"a":["F32",[1],[0,4]]}'))
@example(file_of('{"a":[{"F32":null},[1],[0,4]]}'))
@example(file_of("{}", b""))
def test_what_the_library_opens_is_opened_or_over_a_limit(
    tmp_path_factory: pytest.TempPathFactory, written: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "others.safetensors"
    path.write_bytes(written)
    try:
        theirs = dict(safetensors.deserialize(written))
    except safetensors.SafetensorError:
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
        event("both refuse")
        return
    limit: BaseException | None = None
    try:
        ours = open_checkpoint(path)
    except CheckpointError as error:
        limit = error.__cause__ or error
    else:
        layout = ours.parts[0].layout
        assert {spec.name for spec in layout.tensors} == theirs.keys()
        for spec in layout.tensors:
            tensor = theirs[spec.name]
            assert (spec.dtype, list(spec.shape)) == (tensor["dtype"], tensor["shape"])
            assert ours.raw(spec.name).tobytes() == bytes(tensor["data"])
        event("both open")
    if limit is not None:
        assert isinstance(limit, LimitError), f"the library opens it: {limit}"
        event(f"over a limit: {limit_of(str(limit))}")


def limit_of(text: str) -> str:
    """Return which limit a text names."""
    limits = ("occurs twice", "has 1 to 4096", "dimensions up to", "beyond 2**53 bits")
    return next(words for words in limits if words in text)


def test_a_spelling_that_is_not_the_wires_is_published_in_the_wires(tmp_path: Path) -> None:
    plain, odd = tmp_path / "plain.safetensors", tmp_path / "odd.safetensors"
    plain.write_bytes(file_of(f'{{"a":{ENTRY}}}'))
    odd.write_bytes(file_of(f' {{"__metadata__":null,"a":{ENTRY[:-1]},"by":[1]}}}}\n'))
    assert open_checkpoint(odd).digest() == open_checkpoint(plain).digest()
    assert open_checkpoint(odd, load=True).arrays()["a"] == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a":{ENTRY},"a":{ENTRY}}}',
        f'{{"a":{ENTRY[:-1]},"x":1}},"a":{ENTRY}}}',
        f'{{"__metadata__":{{"b":"1","b":"2"}},"a":{ENTRY}}}',
    ],
)
def test_of_two_entries_of_one_name_none_is_chosen(tmp_path: Path, text: str) -> None:
    """The library takes the last, without a word."""
    written = file_of(text)
    safetensors.deserialize(written)
    (path := tmp_path / "a.safetensors").write_bytes(written)
    with pytest.raises(CheckpointError, match="occurs twice") as raised:
        open_checkpoint(path)
    assert isinstance(raised.value.__cause__, LimitError)


# What is not a safetensors file at all.

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.mark.parametrize(
    ("beginning", "words"),
    [
        (POINTER, "is a Git LFS pointer, not the file itself: get the file with `git lfs pull`"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00", "is a zip archive, as torch.save and Lightning"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "is a pickle, as older versions of"),
        (b"GGUF\x03\x00\x00\x00\x01\x00\x00\x00", "is a GGUF file"),
        (b"<!doctype html>\n<html>", "is a web page: download the file itself"),
        (b"\x93NUMPY\x01\x00v\x00", "is a numpy array"),
        (b"/annex/objects/SHA256E-s1--0", "is a git-annex pointer"),
        (b"\xff" * 100, "is not a safetensors file: its first 8 bytes would announce a header of"),
    ],
)
def test_a_file_that_is_something_else_is_named(
    tmp_path: Path, beginning: bytes, words: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(beginning)
    with pytest.raises(CheckpointError, match=re.escape(f"{path} {words}")):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0x0280, 0x0480, 0x8B1F])
def test_a_length_that_looks_like_a_beginning_is_a_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    text = f'{{"a":{ENTRY}}}'.ljust(length)
    path.write_bytes(file_of(text))
    assert open_checkpoint(path).arrays()["a"] == [1.0]


def test_an_index_that_git_lfs_keeps_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"index\.json is a Git LFS pointer"):
        open_checkpoint(tmp_path)


def distributed(folder: Path, **options: Any) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    torch = pytest.importorskip("torch")
    model = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
    writer = dcp.HuggingFaceStorageWriter(path=folder, **options) if options else None
    dcp.save(model, storage_writer=writer, checkpoint_id=None if options else folder)


def lightning(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"state_dict": {"w": torch.ones(3)}}, folder / "epoch=0-step=10.ckpt")


def fully_sharded(folder: Path) -> None:
    (folder / "pytorch_model_fsdp_0").mkdir()
    distributed(folder / "pytorch_model_fsdp_0")


def binary(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (distributed, "a checkpoint of torch.distributed.checkpoint: load it into your model"),
        (lambda at: distributed(at, save_distributed=True), "one process's part of the tensors"),
        (fully_sharded, "accelerate's sharded state .FSDP.: run `accelerate merge-weights`"),
        (lightning, "a checkpoint of Lightning, which is pickled: load it where you trust it"),
        (binary, "pickled weights: save them with safe_serialization=True"),
        (lambda _: None, "give another folder, or a file"),
    ],
)
def test_a_folder_of_something_else_is_named(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("consolidated", [False, True])
def test_what_torch_saves_as_safetensors_is_read(tmp_path: Path, consolidated: bool) -> None:
    pytest.importorskip("torch")
    sharded = {"save_distributed": True, "enable_consolidation": True} if consolidated else {}
    distributed(tmp_path, fqn_to_index_mapping={"w": 1, "b": 2}, **sharded)
    arrays = open_checkpoint(tmp_path).arrays()
    assert arrays["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["b"].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore")
def test_what_accelerate_saves_is_read(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size="0.1KB")
    arrays = open_checkpoint(tmp_path).arrays()
    for name, value in model.state_dict().items():
        assert arrays[name].tobytes() == value.numpy().tobytes()

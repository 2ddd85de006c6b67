"""Identifies files and folders in formats other than safetensors, and gives advice.

Only names and first bytes are examined. Nothing is ever unpickled.
"""

import re
from pathlib import Path

LFS = b"version https://git-lfs.github.com/spec/"
TORCH = (
    "it is pickled, and reading a pickle runs code: load it where you trust it, and write its "
    "weights with safetensors.torch.save_file"
)

# For each format: the first bytes of its files, its description, and advice.
BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (LFS, "a Git LFS pointer, not the file itself", "get the file with `git lfs pull`"),
    (b"/annex/objects/", "a git-annex pointer", "get the file with `git annex get`"),
    (b"PK\x03\x04", "a zip archive, as torch.save and Lightning (.ckpt) write", TORCH),
    (b"\x80\x02", "a pickle, as older versions of torch.save wrote", TORCH),
    (b"\x80\x03", "a pickle", TORCH),
    (b"\x80\x04", "a pickle", TORCH),
    (b"\x80\x05", "a pickle", TORCH),
    (b"GGUF", "a GGUF file, as llama.cpp reads", "publish the safetensors that it was made of"),
    (b"\x89HDF\r\n", "an HDF5 file", "write its weights as safetensors"),
    (b"\x93NUMPY", "a numpy array", "write its weights with safetensors.numpy.save_file"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it"),
    (b"(\xb5/\xfd", "compressed with Zstandard", "unpack it"),
    (b"<!DOCTYPE", "a web page", "download the file itself; this may need a login"),
    (b"<html", "a web page", "download the file itself; this may need a login"),
)
BEGINNING_BYTES = max(len(beginning) for beginning, _, _ in BEGINNINGS)

# For each format: a pattern of file names in a folder, its description, and advice.
FOLDERS: tuple[tuple[str, str, str], ...] = (
    (
        "*.distcp",
        "a checkpoint of torch.distributed.checkpoint",
        "load it into your model with torch.distributed.checkpoint.load, and write the model with "
        "safetensors.torch.save_file; or save it with "
        "torch.distributed.checkpoint.HuggingFaceStorageWriter",
    ),
    (
        "pytorch_model_fsdp_*",
        "accelerate's sharded state (FSDP)",
        "run `accelerate merge-weights`, which writes safetensors",
    ),
    (
        "mp_rank_*_model_states.pt",
        "a checkpoint of DeepSpeed, which is pickled",
        "run its zero_to_fp32.py with --safe_serialization",
    ),
    (
        "*.ckpt",
        "a checkpoint of Lightning, which is pickled",
        "load it where you trust it, and write its state_dict with safetensors.torch.save_file; or "
        "publish while it trains, with weightbus' callback for Lightning",
    ),
    ("adapter_model.bin", "an adapter that is pickled", "save it with safe_serialization=True"),
    ("*.bin", "pickled weights", "save them with safe_serialization=True"),
    ("*.pt", "pickled weights", "write them with safetensors.torch.save_file"),
    ("*.pth", "pickled weights", "write them with safetensors.torch.save_file"),
    ("*.gguf", "GGUF files", "publish the safetensors that they were made of"),
)

PART = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors\Z")


def part_of(path: Path) -> str:
    """Return a description and advice for a file that has only one process's tensors; else ""."""
    if not PART.match(path.name):
        return ""
    return (
        "one process's part of the tensors, as torch.distributed.checkpoint writes with "
        "save_distributed=True: save with enable_consolidation=True as well, and give the "
        "consolidated folder"
    )


def file_of(beginning: bytes) -> str:
    """Return the format of a file with these first bytes, and advice; "" if unknown."""
    lowered = beginning.lstrip().lower()
    for known, what, advice in BEGINNINGS:
        if beginning.startswith(known) or (known[:1] == b"<" and lowered.startswith(known.lower())):
            return f"{what}: {advice}"
    return ""


def folder_of(path: Path) -> str:
    """Return the format of a folder without safetensors files, and advice; "" if unknown."""
    for pattern, what, advice in FOLDERS:
        if next(path.glob(pattern), None) is not None:
            return f"{what}: {advice}"
    return ""

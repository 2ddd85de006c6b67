"""Mend the links in src/weightbus if a zip was unpacked without; pyproject.toml says all else."""

from pathlib import Path

from setuptools import setup

# pip unpacks zips, as forges offer them, itself: of a link it makes a file, in which the target is.
for path in Path("src/weightbus").iterdir():
    if path.is_file() and not path.suffix:
        target = path.read_text()
        path.unlink()
        path.symlink_to(target)

setup()

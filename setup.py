"""Restore the symbolic links in src/weightbus; pyproject.toml has all other build settings."""

from pathlib import Path

from setuptools import setup

# When pip unpacks a zip, such as one from GitHub, a link becomes a file with the target's path.
for path in Path("src/weightbus").iterdir():
    if path.is_file() and not path.suffix:
        target = path.read_text()
        path.unlink()
        path.symlink_to(target)

setup()

"""Files that are known to be on the disk, and to be what was written."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch

File = tuple[str, int, int, int]  # path, size, mtime_ns, inode: names a content without reading it


def write_bytes(path: Path, value: Any) -> None:
    """Write bytes, or the pickle of another value, and wait until the disk has them."""
    if not isinstance(value, bytes):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        value = buffer.getvalue()
    with open(path, "wb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Wait until the folder's entries (new names, renames) are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The file's SHA-256 in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(path: Path) -> tuple[str, int, str]:
    """(name, size in bytes, SHA-256)."""
    return path.name, path.stat().st_size, sha256(path)


def verify(path: Path, size: int, digest: str, checked: dict[File, str]) -> str | None:
    """What is wrong with the file, naming it, or None; `checked` remembers the hashes of unchanged files."""
    try:
        stat = path.stat()
        if stat.st_size != size:
            return f"{path}: {stat.st_size} bytes, expected {size}"
        key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if key not in checked:
            checked[key] = sha256(path)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None if checked[key] == digest else f"{path}: its SHA-256 is not the one in the manifest"

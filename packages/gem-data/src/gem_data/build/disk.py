"""Files that are written through a map: their room is claimed first, since a full disk would end the process later."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_FULL = ("No space left", "max_temp_directory_size", "requested and")  # of DuckDB and of numpy, which lose the errno


def _claim(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def new_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """A writable map of a new .npy file. Raises OSError (ENOSPC) where the disk has no room for it."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
    _claim(path)
    return array


def scratch_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """A writable map of a new raw file, zeros. Raises OSError (ENOSPC) where the disk has no room for it."""
    array = np.memmap(path, dtype, "w+", shape=shape)
    _claim(path)
    return array


def is_full(error: BaseException) -> bool:
    """Whether an error comes of a full disk."""
    return getattr(error, "errno", None) == errno.ENOSPC or any(word in str(error) for word in _FULL)

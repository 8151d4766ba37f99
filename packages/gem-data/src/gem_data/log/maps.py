"""Files mapped into memory: noticing that one was changed, and telling the system how they will be read.

Left alone, the system reads far ahead of every page that is missing. In a shuffled order that is the whole log for the
first batch, and for a log larger than the memory so many times too much for every batch.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20  # bytes read at a time where a file is read ahead


class Watched:
    """A mapped file that is kept open, to notice when somebody writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("rb")
        self._state = self._look()

    def _look(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns

    @property
    def bytes(self) -> int:
        """The size when it was opened."""
        return self._state[0]

    def require_unchanged(self) -> None:
        """Raise ValueError if the file was written to; reading on could crash the process."""
        now = self._look()
        if now != self._state:
            raise ValueError(
                f"{self.path} was changed under the memory map ({self._state[0]} bytes before, {now[0]} now): "
                "logs are never written in place; build it again and open it anew"
            )

    def __del__(self) -> None:
        if "_file" in vars(self):  # not where opening it failed
            self._file.close()


class Maps:
    """Read-only maps, all with the same advice about how they are read."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._scattered = False

    def file(self, path: Path) -> mmap.mmap:
        """A file. Raises OSError, and ValueError for an empty one."""
        with path.open("rb") as file:
            return self._kept(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def array(self, path: Path) -> NDArray[Any]:
        """A .npy file. Raises OSError, EOFError and ValueError."""
        array = np.load(path, mmap_mode="r")
        if isinstance(array.base, mmap.mmap):
            self._kept(array.base)
        return array.view(np.ndarray)

    def advise(self, *, scattered: bool) -> None:
        """Whether reads are scattered, so that nothing around them is worth reading; else they come in order."""
        if scattered != self._scattered:
            self._scattered = scattered
            for mapped in self._maps:
                self._advise(mapped)

    def _kept(self, mapped: mmap.mmap) -> mmap.mmap:
        self._maps.append(mapped)
        if self._scattered:
            self._advise(mapped)
        return mapped

    def _advise(self, mapped: mmap.mmap) -> None:
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM if self._scattered else mmap.MADV_NORMAL)


def read_ahead(files: Sequence[Watched]) -> threading.Thread | None:
    """Read files in the background, so that the system has them by the time they are wanted; the thread that does it.

    None, and nothing is read, where they would take more than half of the memory that there is for them.
    """
    if sum(f.bytes for f in files) > available_memory() // 2:
        return None
    paths = [f.path for f in files]
    thread = threading.Thread(target=_read, args=(paths,), name="gem-data-read-ahead", daemon=True)
    thread.start()
    return thread


def _read(paths: Sequence[Path]) -> None:
    block = bytearray(BLOCK)
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        except OSError:  # gone in the meantime, say; whoever wants it will hear of it
            continue


def available_memory() -> int:
    """Bytes that could be had without swapping, the system's cache of files among them."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

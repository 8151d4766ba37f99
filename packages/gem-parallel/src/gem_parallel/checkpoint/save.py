"""Checkpoints that are either whole or absent: written aside, checked, then renamed into place.

    folder/
      step-0000000100/
        manifest.json                   every other file's size and SHA-256; written last
        .metadata, __0_0.distcp, ...    tensors, by torch.distributed.checkpoint
        plain.pt                        Python values of rank 0
        rank-00000.pt, ...              values wrapped in PerRank
      .saving-0000000200/               a save in progress, or what a killed one left

The folder must be shared by all ranks. Files are pickles in part: load only checkpoints that you trust.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gem_parallel.checkpoint.background import Background, second_control
from gem_parallel.checkpoint.blocks import (
    Block,
    BlockReader,
    Blocks,
    BlockWriter,
    ChangedMoments,
    compare,
    is_distributed,
    take,
)
from gem_parallel.checkpoint.errors import CheckpointError, quiet, reason
from gem_parallel.checkpoint.files import File, describe, flush_folder, verify, write_bytes
from gem_parallel.checkpoint.tree import PerRank, join, merge, split
from gem_parallel.runtime import Runtime, attach
from gem_parallel.shards import local_shards

__all__ = ["CheckpointError", "Checkpointer", "PerRank"]

_FORMAT = 1
_NAME = re.compile(r"step-(\d{10})")


class Checkpointer:
    """Saves and loads a nested dict of tensors and Python values.

    Every method but `steps` must be called by all ranks together. A leaf of the dict is

    - a tensor (plain, DTensor or ShardedTensor): restored bitwise and in place, resharded when the layout or the world
      differs. A plain tensor is taken to be the same on every rank (rank 0's is kept);
    - any other value that pickles (numbers, lists, also of tensors of any size, ...): rank 0's is kept, and a sub-dict
      that holds no tensor is replaced as a whole;
    - `PerRank(value)`: every rank's own value. Loading into a larger world leaves the new ranks' values as they are.

    Args:
        folder: on a file system that all ranks see; made when absent.
        keep: how many checkpoints remain; older ones are removed after a save has succeeded.
        runtime: from `start`; by default the process group that exists, or a world of one.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, *, runtime: Runtime | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self._runtime = runtime
        self._thread: Background | None = None
        self._writer: Checkpointer | None = None  # a twin whose collectives are the thread's
        self._checked: dict[File, str] = {}  # content hashes by path, size and times: a file is read once

    @property
    def runtime(self) -> Runtime:
        """The ranks that save and load together."""
        if self._runtime is None:
            self._runtime = attach()
        return self._runtime

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are complete by their manifests, in the order of writing (contents unread)."""
        return [step for _, step in sorted(self._written())]

    def latest(self) -> int | None:
        """The step of the newest checkpoint whose files are all intact, or None.

        A damaged one is passed over with a warning that names the file and what is wrong with it.
        """
        self.wait()
        for step in self._newest_first():
            problem = self._problem(step)
            if problem is None:
                return step
            self._warn(f"checkpoint of step {step} is damaged and passed over: {problem}")
        return None

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write `state` as the checkpoint of `step`, then drop checkpoints beyond `keep`.

        Raises:
            CheckpointError: on all ranks when one of them fails (a full disk, ...). The partial checkpoint is removed
                and the earlier ones are as they were.
            TypeError: a list or tuple in `state` that holds a DTensor or ShardedTensor.
        """
        self.wait()
        tensors, plain, own = split(_checked_step(step, state))
        return self._write(step, take(tensors, self._mine(tensors), copy=False), plain, own)

    def save_async(self, step: int, state: dict[str, Any]) -> None:
        """Like `save`, but only a copy in host memory is made now; a thread writes it while training goes on.

        At most one save is under way: this one waits for the last one first. The thread talks through a process group
        of its own. Call `wait` before the process groups are closed.

        Raises:
            CheckpointError: the *last* save failed; this one has not begun.
        """
        self.wait()
        tensors, plain, own = split(_checked_step(step, state))
        taken = take(tensors, self._mine(tensors), copy=True)
        plain, own = copy.deepcopy(plain), copy.deepcopy(own)
        if self._writer is None:
            self._writer = Checkpointer(self.folder, self.keep, runtime=second_control(self.runtime))
            self._writer._checked = self._checked
        self._thread = Background(lambda: self._writer._write(step, taken, plain, own))  # type: ignore[union-attr]

    def wait(self) -> None:
        """Wait for the save that is under way, if any.

        Raises:
            CheckpointError: it failed (on all ranks); earlier checkpoints are as they were.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.result()

    def _mine(self, tensors: dict[str, Any]) -> set[str]:
        """Names of the plain tensors that this rank writes: it is the first to have them, most often rank 0."""
        plain = [name for name, tensor in tensors.items() if not is_distributed(tensor)]
        before = self.runtime.gather(plain, "the names of the tensors to save")[: self.runtime.rank]
        return set(plain) - {name for names in before for name in names}

    def _write(self, step: int, tensors: dict[str, Blocks], plain: Any, own: Any) -> Path:
        runtime, final = self.runtime, self._path(step)
        partial = self.folder / f".saving-{step:010d}"

        def prepare() -> None:
            if runtime.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in self.folder.glob(".saving-*"):  # by a save that was killed
                    shutil.rmtree(left, ignore_errors=True)
                partial.mkdir()

        def write_tensors() -> None:
            writer = dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True, overwrite=True)
            with quiet():
                dcp.save(
                    tensors,
                    storage_writer=writer,
                    planner=BlockWriter(),
                    process_group=runtime.control,
                    no_dist=runtime.world == 1,
                )

        def write_values() -> list[tuple[str, int, str]]:
            if runtime.is_main:
                write_bytes(partial / "plain.pt", plain)
            if own:
                write_bytes(partial / f"rank-{runtime.rank:05d}.pt", own)
            patterns = [f"__{runtime.rank}_*", f"rank-{runtime.rank:05d}.pt"]
            if runtime.is_main:
                patterns += [".metadata", "plain.pt"]
            return [describe(path) for pattern in patterns for path in sorted(partial.glob(pattern))]

        def publish(files: list[tuple[str, int, str]]) -> None:
            if not runtime.is_main:
                return
            absent = [name for name, _, _ in files if not (partial / name).exists()]
            if absent:
                raise CheckpointError(f"{self.folder} is not shared by all ranks: rank 0 does not see {absent[0]}")
            order = max((order for order, _ in self._written()), default=0) + 1
            manifest = {
                "format": _FORMAT,
                "step": step,
                "order": order,
                "world": runtime.world,
                "files": {name: {"size": size, "sha256": digest} for name, size, digest in files},
            }
            write_bytes(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
            flush_folder(partial)
            _publish(partial, final)
            flush_folder(self.folder)

        self._together(f"make room for step {step}", partial, prepare)
        self._together(f"write the tensors of step {step}", partial, write_tensors)
        parts = self._together(f"write the values of step {step}", partial, write_values)
        self._together(f"publish step {step}", partial, lambda: publish([file for part in parts for file in part]))
        self._together("remove old checkpoints", None, self._prune)
        return final

    def load(self, state: dict[str, Any], step: int | None = None, *, resize_tables: bool = False) -> int:
        """Fill `state` in place from the checkpoint of `step`, by default the newest intact one.

        Only the top-level entries that `state` has are loaded. With `resize_tables`, a table (and its moments) may have
        another number of rows than the saved one: the rows that both have are loaded, new rows stay as they are (their
        initial values), and a warning names the table.

        Returns:
            the step that was loaded.

        Raises:
            CheckpointError: no (intact) checkpoint, a tensor that the checkpoint lacks, or another shape; nothing has
                been changed then.

        Moments of a table whose columns are cut otherwise than when they were saved ("column_wise") are converted: to
        fewer blocks exactly, to more blocks from their row's mean.
        """
        self.wait()
        if step is None:
            step = self.latest()
            if step is None:
                raise CheckpointError(f"no intact checkpoint in {self.folder}")
        else:
            problem = self._problem(step)
            if problem is not None:
                raise CheckpointError(f"checkpoint of step {step} cannot be loaded: {problem}")
        path, runtime = self._path(step), self.runtime
        tensors, plain, own = split(state)
        reader = dcp.FileSystemReader(path)
        everyone = runtime.gather(sorted(tensors), "the names of what is asked for")  # experts differ between ranks
        wanted = {name for names in everyone for name in names}
        resized, changed = self._together(
            f"compare step {step} with what is asked for",
            None,
            lambda: compare(reader, tensors, wanted, state, resize=resize_tables, warn=self._warn),
        )[runtime.rank]

        def read() -> None:
            where: dict[str, Any] = {"process_group": runtime.control, "no_dist": runtime.world == 1}

            def read_blocks(wanted: dict[str, list[Block]]) -> None:
                dcp.load({}, storage_reader=dcp.FileSystemReader(path), planner=BlockReader(wanted), **where)

            odd = {*resized, *changed}
            same = {name: tensor for name, tensor in tensors.items() if name not in odd}
            moments = ChangedMoments({name: (tensors[name], change) for name, change in changed.items()})
            with quiet():
                dcp.load(same, storage_reader=reader, **where)
                if resized:
                    read_blocks({name: list(local_shards(tensors[name])) for name in resized})
                if changed:
                    read_blocks(moments.wanted)
            moments.finish()

        self._together(f"read the tensors of step {step}", None, read)

        def fill() -> None:
            missing = merge(state, torch.load(path / "plain.pt", weights_only=False), plain)
            mine = path / f"rank-{runtime.rank:05d}.pt"
            if mine.exists():
                missing += merge(state, torch.load(mine, weights_only=False), own)
            else:
                missing += [join(key) for key in own]
            if missing:
                self._warn(
                    f"step {step} has no value for {', '.join(sorted(missing))}; left as it was", every_rank=True
                )

        self._together(f"read the values of step {step}", None, fill)
        return step

    # --- the folder

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def _newest_first(self) -> list[int]:
        """Candidates on rank 0's view of the folder, damaged manifests first so that they are reported."""
        mine = None
        if self.runtime.is_main:
            written = sorted(self._written(), reverse=True)
            known = {step for _, step in written}
            torn = sorted((s for s in self._folders() if s not in known and s > max(known, default=-1)), reverse=True)
            mine = torn + [step for _, step in written]
        return self.runtime.gather(mine, "the list of checkpoints")[0]

    def _folders(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [int(m[1]) for path in self.folder.iterdir() if (m := _NAME.fullmatch(path.name))]

    def _written(self) -> list[tuple[int, int]]:
        """(order of writing, step) of every folder with a readable manifest."""
        written = []
        for step in self._folders():
            try:
                written.append((int(self._manifest(step)["order"]), step))
            except CheckpointError:
                continue
        return written

    def _manifest(self, step: int) -> dict[str, Any]:
        path = self._path(step) / "manifest.json"
        try:
            manifest = json.loads(path.read_bytes())
            if manifest["format"] != _FORMAT:
                raise CheckpointError(f"{path}: format {manifest['format']}, this version reads {_FORMAT}")
            if manifest["step"] != step or not isinstance(manifest["files"], dict) or "order" not in manifest:
                raise CheckpointError(f"{path}: not the manifest of step {step}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
        return manifest

    def _problem(self, step: int) -> str | None:
        """What is wrong with the checkpoint of `step`; the ranks share the reading of its files."""
        runtime = self.runtime
        problem = None
        try:
            files = sorted(self._manifest(step)["files"].items())
            for name, expected in files[runtime.rank :: runtime.world]:
                problem = verify(self._path(step) / name, expected["size"], expected["sha256"], self._checked)
                if problem:
                    break
        except CheckpointError as error:
            problem = str(error)
        problems = runtime.gather(problem, f"the check of step {step}")
        return next((p for p in problems if p), None)

    def _prune(self) -> None:
        if not self.runtime.is_main:
            return
        written = sorted(self._written())
        kept = {step for _, step in written[-self.keep :]}
        for step in self._folders():
            if step not in kept and (step in {s for _, s in written} or step < min(kept)):
                shutil.rmtree(self._path(step), ignore_errors=True)

    # --- the ranks

    def _together(self, what: str, partial: Path | None, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank, give back all results; if it fails on one, remove `partial` and raise on all."""
        result, failure, cause = None, None, None
        try:
            with self.runtime.waiting(what):
                result = work()
        except (Exception, CheckpointException) as error:  # a CheckpointException is a BaseException
            failure, cause = reason(error), error
        outcomes = self.runtime.gather((failure, result), what)
        failures = [f"rank {rank}: {outcome[0]}" for rank, outcome in enumerate(outcomes) if outcome[0]]
        if failures:
            if partial is not None and self.runtime.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"could not {what} in {self.folder}: {'; '.join(failures)}") from cause
        return [outcome[1] for outcome in outcomes]

    def _warn(self, message: str, every_rank: bool = False) -> None:
        if every_rank or self.runtime.is_main:
            warnings.warn(message, stacklevel=3)


def _checked_step(step: int, state: dict[str, Any]) -> dict[str, Any]:
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    return state


def _publish(partial: Path, final: Path) -> None:
    """The moment in which the checkpoint begins to exist."""
    if final.exists():  # the same step again, for example after its damaged copy was passed over
        aside = final.with_name(f".saving-old-{final.name}")
        os.rename(final, aside)
        os.rename(partial, final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(partial, final)

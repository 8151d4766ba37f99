"""From the `data` section of a configuration to an opened event log and its split, built once and kept in a cache."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gem_data.build.in_memory
import gem_data.features.counters
import gem_data.features.neighbours
import numpy as np
import pyarrow as pa
import torch
from gem_data import (
    Collator,
    EventLog,
    JaggedBatch,
    Loader,
    LoaderConfig,
    Schema,
    SourceUnavailable,
    Split,
    build_log,
    time_split,
)
from gem_data.sources import movielens, synthetic
from gem_parallel import Runtime
from numpy.typing import NDArray

from gem_train.config import DataConfig
from gem_train.config.named import function
from gem_train.config.places import cache_folder
from gem_train.config.tree import suggest
from gem_train.errors import UserError

CHUNK = 8192  # rows read at a time where the whole training split is passed over


@dataclass(frozen=True, kw_only=True)
class Data:
    """An opened log with its split. `source` is what was used, `notes` what the reader of the results must know."""

    log: EventLog
    split: Split
    source: str
    notes: tuple[str, ...]

    @property
    def schema(self) -> Schema:
        """The log's schema."""
        return self.log.schema

    def manifest(self) -> dict[str, Any]:
        """Which data this is, for data.json: equal manifests mean equal samples in an equal split."""
        return {
            "source": self.source,
            "notes": list(self.notes),
            "rows": len(self.log),
            "digest": self.log.digest,
            "fingerprint": self.schema.fingerprint(),
            "split": {name: len(getattr(self.split, name)) for name in ("train", "validation", "test")},
            "schema": self.schema.to_dict(),
        }

    def optimal_ne(self, rows: NDArray[np.int64]) -> dict[str, float] | None:
        """The NE of the true probabilities by task, where the log holds them: simulated ones do."""
        hidden = {c.name for c in self.schema.columns if c.role == "hidden"}
        known = self.schema.name == "synthetic" and {f"p_{t}" for t in self.schema.task_names} <= hidden
        return synthetic.optimal_ne(self.log, rows) if known else None


def open_data(config: DataConfig, runtime: Runtime) -> Data:
    """The configured source as a log; every rank ends with the same one.

    Where MovieLens can't be had and `config.fallback` is set, the synthetic source takes its place: with a warning, and
    a note that goes into the run folder and the report.

    Raises ValueError, OSError or SourceUnavailable, the same on every rank.
    """
    if config.source == "log":
        assert config.path is not None
        return _opened(Path(config.path), config, "log", ())
    notes: tuple[str, ...] = ()
    source: str = config.source
    if source == "own" and config.load is not None:
        function(config.load)  # on every rank, so that a name that is wrong is wrong everywhere
    folder, missing = _together(runtime, source, lambda: build(config, source))
    if folder is None and config.fallback:
        notes = (f"SYNTHETIC DATA instead of {source}, which could not be had: {missing}",)
        if runtime.is_main:
            warnings.warn(notes[0], stacklevel=2)
        source = "synthetic"
        folder, missing = _together(runtime, source, lambda: build(config, source))
    if folder is None:
        raise SourceUnavailable(missing)
    return _opened(folder, config, source, notes)


def build(config: DataConfig, source: str) -> Path:
    """The folder of the source's log in the cache; built if it is not there yet.

    The folder's name depends on the source's configuration and on the code that makes and builds the events, so that
    a log which other code would build otherwise is never mistaken for this one. Of several processes that want the same
    log at once one builds it, and the others wait for it.
    """
    module: ModuleType
    options: dict[str, Any] = {}
    if source == "own":
        assert config.load is not None
        module, options = sys.modules[function(config.load).__module__], {"load": config.load}
    elif source == "movielens":
        module = movielens
    else:
        module, options = synthetic, dataclasses.asdict(config.synthetic)
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for code in (module, gem_data.build.in_memory, gem_data.features.counters, gem_data.features.neighbours):
        key.update(Path(str(code.__file__)).read_bytes())
    folder = cache_folder(config.cache) / f"{source}-{key.hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or the process dies
            if not folder.exists():
                build_log(*_load(config, source), folder)
    return folder


def loader(
    data: Data, part: str, config: DataConfig, runtime: Runtime, *, seed: int = 0, parts: int = 1
) -> Loader:  # fmt: skip
    """Batches of a part of the split ("train", "validation", "test"): in the order asked for, padded for evaluation.

    Those of training can be cut into `parts` of about as many events.
    """
    training = part == "train"
    options = LoaderConfig(
        batch_size=config.batch_size if training else config.eval_batch_size,
        max_history=config.max_history,
        seed=seed,
        shuffle=training and config.order == "shuffled",
        drop_last=training,
        share_requests=training and config.share_requests,
        balance=config.balance if training else "none",
        parts=parts if training else 1,
        prefetch=config.prefetch,
        workers=config.workers if training else 0,
        pin_memory=runtime.device.type == "cuda",
    )
    return Loader(data.log, getattr(data.split, part), options, rank=runtime.rank, world=runtime.world)


def without_history(data: Data, rows: NDArray[np.int64]) -> Iterator[JaggedBatch]:
    """Batches of `rows` in order, with empty histories: enough for statistics and for the baselines."""
    collate = Collator(data.log, max_history=0)
    for start in range(0, len(rows), CHUNK):
        yield collate(rows[start : start + CHUNK])


def dense_statistics(data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation [F] float32 of the dense features over the training split, accumulated in float64."""
    count, total, squares = 0, 0.0, 0.0
    pivot: NDArray[np.float64] | None = None  # near the mean, so that the squares do not cancel
    for batch in without_history(data, data.split.train):
        x = batch.dense.numpy().astype(np.float64)
        pivot = x.mean(axis=0) if pivot is None else pivot
        count += len(x)
        total = total + (x - pivot).sum(axis=0)
        squares = squares + ((x - pivot) ** 2).sum(axis=0)
    shift = np.asarray(total) / count
    variance = np.maximum(np.asarray(squares) / count - shift**2, 0.0)
    assert pivot is not None
    return torch.from_numpy(pivot + shift).float(), torch.from_numpy(np.sqrt(variance)).float()


def base_rates(data: Data) -> list[float]:
    """The mean label of each task over the training split.

    Raises ValueError for a task whose training labels are not of both classes, or that has no label in another part:
    found out here, not after the first epoch.
    """
    labels, mask = data.log.labels(data.split.train)
    seen, positive = mask.sum(axis=0), (labels * mask).sum(axis=0, dtype=np.float64)
    for name, n, p in zip(data.schema.task_names, seen, positive, strict=True):
        if not 0 < p < n:
            raise ValueError(f"task {name!r} has {int(p)} positives among {int(n)} training labels; both are needed")
    for part in ("validation", "test"):
        known = data.log.labels(getattr(data.split, part))[1].sum(axis=0)
        absent = [n for n, count in zip(data.schema.task_names, known, strict=True) if count == 0]
        if absent:
            raise ValueError(f"task {absent[0]!r} has no label in the {part} split: nothing to evaluate")
    return [float(r) for r in positive / seen]


def divided(batch: JaggedBatch, count: int) -> list[JaggedBatch]:
    """The batch in `count` runs of (nearly) equal size. Raises UserError where there are fewer samples than that."""
    if count == 1:
        return [batch]
    if getattr(batch, "requests", None) is not None:
        raise UserError(f"optim.accumulate is {count}, but samples of different parts share histories (share_requests)")
    if batch.batch_size < count:
        raise UserError(f"optim.accumulate is {count}, but a rank has only {batch.batch_size} samples of a batch")
    edges = [batch.batch_size * i // count for i in range(count + 1)]
    return [batch.slice(a, b) for a, b in itertools.pairwise(edges)]


def _load(config: DataConfig, source: str) -> tuple[pa.Table, Schema]:
    if source == "own":
        assert config.load is not None
        table, schema = function(config.load)()
        if not (isinstance(table, pa.Table) and isinstance(schema, Schema)):
            kinds = f"{type(table).__name__} and {type(schema).__name__}"
            raise TypeError(f"load: {config.load} returned {kinds}; expected an Arrow table and a gem_data.Schema")
        return table, schema
    if source == "movielens":
        return movielens.load(movielens.fetch(config.cache))
    return synthetic.load(config.synthetic)


def _opened(folder: Path, config: DataConfig, source: str, notes: tuple[str, ...]) -> Data:
    log = EventLog.open(folder)
    split = time_split(log, config.fractions)
    samples = config.samples
    if samples is None and log.schema.name == "synthetic" and "impressions" in log.schema.source_names:
        samples = "impressions"  # gem_data's simulated searches have labels, but were not shown to be clicked
    if samples is not None:
        split = _only(split, log, samples)
    return Data(log=log, split=split, source=source, notes=notes)


def _only(split: Split, log: EventLog, source: str) -> Split:
    """The part of the split whose rows are events of a source. Raises ValueError for an unknown or absent one."""
    if source not in log.schema.source_names:
        known = log.schema.source_names
        raise ValueError(f"samples is {source!r}, no source of the log{suggest(source, known)}; it has {known}")
    if not log.schema.sources:  # the one history holds every event
        return split
    chosen = np.zeros(len(log), bool)
    chosen[log.source_rows(source)] = True
    parts = {f.name: getattr(split, f.name) for f in dataclasses.fields(split)}
    kept = {name: rows[chosen[rows]] for name, rows in parts.items()}
    for name, rows in kept.items():
        if not len(rows):
            raise ValueError(f"the {name} part has no event of the source {source!r}: nothing to sample")
    return Split(**kept)


def _together(runtime: Runtime, source: str, work: Callable[[], Path]) -> tuple[Path | None, str]:
    """Let one rank of each host do the work; (folder, "") or (None, why the source is not available) on every rank."""
    result: tuple[Path | None, str] = (None, "")
    error: Exception | None = None
    if runtime.local_rank == 0:
        try:
            result = (work(), "")
        except SourceUnavailable as reason:
            result = (None, str(reason))
        except (ValueError, TypeError, OSError) as reason:
            error = reason
    outcomes = runtime.gather((result, error), f"the {source} log")
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    done = [r for r, _ in outcomes if r != (None, "")]
    return next((r for r in done if r[0] is None), done[0])

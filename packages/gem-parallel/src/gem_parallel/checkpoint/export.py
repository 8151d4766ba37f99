"""Tables out of a distributed run as Parquet: a folder per table, a file per block, readable by anything.

folder/
  bags.embedding_bags.user/
    rows-000000000000-000000000512.parquet    row: int64, embedding: fixed-size list of float32
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gem_parallel.shards import global_shape, local_shards

if TYPE_CHECKING:
    from gem_parallel.parallel import ParallelModel

_CHUNK = 1 << 24  # elements of a row group: 64 MiB


class ExportError(RuntimeError):
    """Tables could not be written; nothing is left in their place."""


def export_tables(
    model: ParallelModel,
    folder: str | os.PathLike[str],
    tables: Sequence[str] | None = None,
    *,
    compression: str = "zstd",
) -> dict[str, int]:
    """Write embedding tables as Parquet, every rank its own rows. Called by all ranks together.

    A table is written beside its place and renamed into it when all ranks are done; an older export is replaced. Tables
    that are cut by columns are put together row by row on the ranks that hold their first columns.

    Args:
        model: from `parallelize`.
        folder: on a file system that all ranks see.
        tables: names without ".weight" ("bags.embedding_bags.user"), by default all.
        compression: as pyarrow knows it.

    Returns:
        rows by table.

    Raises:
        ImportError: pyarrow is missing (`pip install gem-parallel[parquet]`).
        ValueError: a table that does not exist.
        ExportError: on all ranks, when one of them cannot write.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError("export_tables needs pyarrow: pip install gem-parallel[parquet]") from error
    runtime, root = model.runtime, Path(folder)
    state = model.state_dict()["model"]
    names = sorted(name.removesuffix(".weight") for name in state if model.is_table(name))
    unknown = sorted(set(tables or ()) - set(names))
    if unknown:
        raise ValueError(f"there are no tables {unknown}; there are {names}")
    written = {}
    for name in tables if tables is not None else names:
        tensor = state[f"{name}.weight"]
        partial = root / f".writing-{name}"
        if runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        runtime.barrier(f"the folder of table {name}")
        failure = None
        try:
            for row, values in _whole_rows(model, name, tensor):
                _write(partial, row, values, compression)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = runtime.gather(failure, f"the export of table {name}")
        if runtime.is_main and not any(failures):
            shutil.rmtree(root / name, ignore_errors=True)
            os.rename(partial, root / name)
        elif runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        if any(failures):
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
            raise ExportError(f"could not export table {name} to {root}: {reasons}")
        written[name] = global_shape(tensor)[0]
    runtime.barrier("the end of the export")
    return written


def _write(folder: Path, row: int, values: np.ndarray, compression: str) -> None:
    """One file of whole rows [n, dim], the first of which is `row`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    height, dim = values.shape
    schema = pa.schema([("row", pa.int64()), ("embedding", pa.list_(pa.float32(), dim))])
    step = max(1, _CHUNK // dim)
    with pq.ParquetWriter(
        folder / f"rows-{row:012d}-{row + height:012d}.parquet", schema, compression=compression
    ) as f:
        for begin in range(0, height, step):
            part = values[begin : begin + step]
            column = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), dim)
            rows = pa.array(np.arange(row + begin, row + begin + len(part)))
            f.write_table(pa.table([rows, column], schema=schema))


def _whole_rows(model: ParallelModel, name: str, tensor: Any) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, values [n, dim]) of what this rank writes."""
    runtime, (_, dim) = model.runtime, global_shape(tensor)
    mine = [(block.detach(), offset) for block, offset in local_shards(tensor) if block.numel()]
    corners = [(tuple(offset), tuple(block.shape)) for block, offset in mine]
    everyone = runtime.gather(corners, f"the blocks of table {name}")
    seen: set[tuple[Any, ...]] = set()
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # rows -> (col, rank, index)
    for rank, blocks in enumerate(everyone):
        for index, ((row, col), (height, _)) in enumerate(blocks):
            if (row, col) not in seen:  # copies of "v2" hold the same
                seen.add((row, col))
                parts.setdefault((row, row + height), []).append((col, rank, index))
    for (begin, _end), columns in sorted(parts.items()):
        columns.sort()
        owner = columns[0][1]
        if len(columns) == 1:
            if owner == runtime.rank:
                block = mine[columns[0][2]][0]
                assert block.shape[1] == dim
                yield begin, _numpy(block)
            continue
        here = [(col, _numpy(mine[index][0])) for col, rank, index in columns if rank == runtime.rank]
        gathered = runtime.gather(here, f"the columns of table {name}")
        if owner == runtime.rank:
            pieces = sorted((piece for rank in gathered for piece in rank), key=lambda piece: piece[0])
            yield begin, np.concatenate([values for _, values in pieces], axis=1)


def _numpy(block: torch.Tensor) -> np.ndarray:
    return block.to("cpu", torch.float32).contiguous().numpy()

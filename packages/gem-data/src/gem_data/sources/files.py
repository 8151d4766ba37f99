"""Events from Parquet, Arrow, CSV and JSON-lines files with a declared schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.ipc as ipc
import pyarrow.json as json_lines
import pyarrow.parquet as pq

from gem_data.schema import Schema, unknown
from gem_data.sources.events import Events

Format = Literal["parquet", "arrow", "csv", "tsv", "jsonl"]
Transform = Callable[[pa.Table], pa.Table]

_SUFFIXES: Mapping[str, Format] = {
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".csv": "csv", ".tsv": "tsv",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
}  # fmt: skip
BLOCK = 16 << 20  # bytes of text read at a time
BATCH = 1 << 18  # rows of Parquet read at a time
NULLS = ["", "null", "NULL", "None", "\\N"]  # not "nan", which is a value that is rejected as such
RAW = "_text"  # a line that could not be split into columns, kept for the rejects


def files(
    paths: str | Path | Iterable[str | Path],
    schema: Schema,
    *,
    format: Format | None = None,
    rename: Mapping[str, str] | None = None,
    names: Iterable[str] | None = None,
    transform: Transform | None = None,
    name: str | None = None,
    licence: str | None = None,
) -> Events:
    """The rows of `paths` (a file, a folder, a pattern such as "logs/*.parquet", or several), sorted by name.

    format     of all files, or by their suffixes (also .csv.gz and the like).
    rename     file's column -> schema's column.
    names      column names of text files that have no header.
    transform  from a table of the file (after `rename`) to one with the schema's columns.

    CSV types are inferred; where a later value does not fit, the rest of that file is read as text, which the build
    parses row by row. Lines with a wrong number of cells are rejected as missing, with their text.

    Raises FileNotFoundError for no file, ValueError for an unknown format; a damaged file raises ValueError when it is
    read, with its name.
    """
    found = _expand(paths)
    columns = None if names is None else list(names)
    if format is not None and format not in get_args(Format):
        raise ValueError(unknown("format", format, get_args(Format)))
    kinds = [format or _format(path) for path in found]

    def tables() -> Iterator[pa.Table]:
        for path, kind in zip(found, kinds, strict=True):
            for table in read(path, kind, columns):
                if rename:
                    table = table.rename_columns([rename.get(n, n) for n in table.column_names])
                yield transform(table) if transform else table

    states = [(p, p.stat()) for p in found]
    identity = {"files": [[str(p.resolve()), s.st_size, s.st_mtime_ns] for p, s in states]}
    return Events(name=name or schema.name, schema=schema, tables=tables, identity=identity, licence=licence)


def _expand(paths: Any) -> list[Path]:
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found: list[Path] = []
    for item in map(Path, given):
        if item.is_dir():
            found += sorted(p for p in item.rglob("*") if p.is_file() and p.name[0] not in "._")
        elif item.is_file():
            found.append(item)
        else:
            found += sorted(p for p in Path(item.anchor or ".").glob(str(item.relative_to(item.anchor))) if p.is_file())
    if not found:
        raise FileNotFoundError(f"no file at {', '.join(map(str, given))}")
    return found


def _format(path: Path) -> Format:
    suffixes = [s for s in path.suffixes if s not in (".gz", ".bz2", ".zst", ".lz4")]
    if not suffixes or suffixes[-1].lower() not in _SUFFIXES:
        raise ValueError(f"{path}: the format is not known by its suffix; give one of {', '.join(get_args(Format))}")
    return _SUFFIXES[suffixes[-1].lower()]


def read(path: Path, kind: Format, names: list[str] | None = None) -> Iterator[pa.Table]:
    """The tables of one file. Raises ValueError with its name where it is damaged or truncated."""
    try:
        if kind == "parquet":
            for batch in pq.ParquetFile(path).iter_batches(BATCH):
                yield pa.Table.from_batches([batch])
        elif kind == "arrow":
            yield from _arrow(path)
        elif kind == "jsonl":
            yield from _json(path)
        else:
            yield from _csv(path, "\t" if kind == "tsv" else ",", names)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowKeyError, EOFError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is damaged or no {kind} file: {error}") from error


def _arrow(path: Path) -> Iterator[pa.Table]:
    source = pa.memory_map(str(path), "r")
    reader: Any
    try:
        reader = ipc.open_file(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        batches = iter(ipc.open_stream(source))
    for batch in batches:
        yield pa.Table.from_batches([batch])


def _json(path: Path) -> Iterator[pa.Table]:
    options = json_lines.ReadOptions(block_size=BLOCK)
    if hasattr(json_lines, "open_json"):
        for batch in json_lines.open_json(path, read_options=options):
            yield pa.Table.from_batches([batch])
    else:
        yield json_lines.read_json(path, read_options=options)


def _csv(path: Path, delimiter: str, names: list[str] | None) -> Iterator[pa.Table]:
    given = 0
    try:
        for table in _csv_tables(path, delimiter, names, None):
            given += table.num_rows
            yield table
        return
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise
    skip = given
    header = names or _header(path, delimiter)
    for table in _csv_tables(path, delimiter, names, dict.fromkeys(header, pa.string())):
        if skip < table.num_rows:
            yield table.slice(skip)
        skip = max(0, skip - table.num_rows)


def _csv_tables(
    path: Path, delimiter: str, names: list[str] | None, types: dict[str, pa.DataType] | None
) -> Iterator[pa.Table]:
    malformed: list[str] = []

    def skip(row: csv.InvalidRow) -> str:
        malformed.append(row.text)
        return "skip"

    reader = csv.open_csv(
        path,
        read_options=csv.ReadOptions(block_size=BLOCK, column_names=names),
        parse_options=csv.ParseOptions(delimiter=delimiter, invalid_row_handler=skip),
        convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=NULLS),
    )
    for batch in reader:
        yield pa.Table.from_batches([batch])
    if malformed:
        empty = {f.name: pa.nulls(len(malformed), f.type) for f in reader.schema}
        yield pa.table({**empty, RAW: pa.array(malformed, pa.string())})


def _header(path: Path, delimiter: str) -> list[str]:
    options = csv.ReadOptions(block_size=BLOCK)
    with csv.open_csv(path, read_options=options, parse_options=csv.ParseOptions(delimiter=delimiter)) as reader:
        return list(reader.schema.names)

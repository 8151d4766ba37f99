"""Events from Parquet, Arrow, CSV and JSON-lines files with a declared schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
BLOCK = 4 << 20  # bytes of text read at a time: what the caches hold is parsed fastest
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
    columns: Iterable[str] | None = None,
    transform: Transform | None = None,
    name: str | None = None,
    licence: str | None = None,
) -> Events:
    """The rows of `paths` (a file, a folder, a pattern such as "logs/*.parquet", or several), sorted by name.

    format     of all files, or by their suffixes (also .csv.gz and the like).
    rename     file's column -> schema's column.
    names      column names of text files that have no header.
    columns    the file's columns to read, by its own names (None: all of them). What is not read is not in the rejects.
    transform  from a table of the file (after `rename`) to one with the schema's columns.

    CSV types are inferred; where a later value does not fit, the rest of that file is read as text, which the build
    parses row by row. Lines with a wrong number of cells are rejected as missing, with their text.

    Raises FileNotFoundError for no file, ValueError for an unknown format; a damaged file raises ValueError when it is
    read, with its name.
    """
    found = _expand(paths)
    given = None if names is None else list(names)
    wanted = None if columns is None else list(columns)
    if format is not None and format not in get_args(Format):
        raise ValueError(unknown("format", format, get_args(Format)))
    kinds = [format or _format(path) for path in found]

    def tables() -> Iterator[pa.Table]:
        for path, kind in zip(found, kinds, strict=True):
            for table in read(path, kind, given, wanted):
                if rename:
                    table = table.rename_columns([rename.get(n, n) for n in table.column_names])
                yield transform(table) if transform else table

    states = [(p, p.stat()) for p in found]
    identity = {
        "files": [[str(p.resolve()), s.st_size, s.st_mtime_ns] for p, s in states],
        "read as": [kinds, given, wanted, sorted((rename or {}).items())],
    }
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


def read(
    path: Path, kind: Format, names: list[str] | None = None, columns: list[str] | None = None
) -> Iterator[pa.Table]:
    """The tables of one file. Raises ValueError with its name where it is damaged or truncated or lacks a column."""
    try:
        if kind == "parquet":
            file = pq.ParquetFile(path)
            for name in columns or ():
                if name not in file.schema_arrow.names:
                    raise KeyError(unknown("column", name, file.schema_arrow.names))
            for batch in file.iter_batches(BATCH, columns=columns):
                yield pa.Table.from_batches([batch])
        elif kind == "arrow":
            yield from (t.select(columns) if columns else t for t in _arrow(path))
        elif kind == "jsonl":
            yield from (t.select(columns) if columns else t for t in _json(path))
        else:
            delimiter = "\t" if kind == "tsv" else ","
            yield from _cells(_Text(path=path, delimiter=delimiter, names=names, columns=columns))
    except (pa.ArrowInvalid, pa.ArrowTypeError, KeyError, EOFError, OSError) as error:
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


@dataclass(frozen=True, kw_only=True)
class _Text:
    """A text file of cells: how to open it."""

    path: Path
    delimiter: str
    names: list[str] | None
    columns: list[str] | None

    def open(self, types: Mapping[str, pa.DataType] | None, skipped: list[str]) -> csv.CSVStreamingReader:
        """A reader; `types` of columns that are known, the others are guessed from the first block.

        A line with a wrong number of cells goes to `skipped`.
        """

        def skip(row: csv.InvalidRow) -> str:
            skipped.append(row.text)
            return "skip"

        return csv.open_csv(
            self.path,
            read_options=csv.ReadOptions(block_size=BLOCK, column_names=self.names),
            parse_options=csv.ParseOptions(delimiter=self.delimiter, invalid_row_handler=skip),
            convert_options=csv.ConvertOptions(
                column_types=types, include_columns=self.columns, strings_can_be_null=True, null_values=NULLS
            ),
        )

    def guessed(self) -> dict[str, pa.DataType]:
        """Types by the first block. Arrow reads columns of a declared type twice as fast as those it has guessed."""
        with self.open(None, []) as reader:
            return {f.name: f.type for f in reader.schema if not pa.types.is_null(f.type)}

    def tables(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.Table]:
        """All of the file, and at last the lines that have a wrong number of cells."""
        malformed: list[str] = []
        with self.open(types, malformed) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])
            if malformed:
                empty = {f.name: pa.nulls(len(malformed), f.type) for f in reader.schema}
                yield pa.table({**empty, RAW: pa.array(malformed, pa.string())})

    def header(self) -> list[str]:
        """The names of the columns."""
        options = csv.ReadOptions(block_size=BLOCK)
        parse = csv.ParseOptions(delimiter=self.delimiter)
        with csv.open_csv(self.path, read_options=options, parse_options=parse) as reader:
            return list(reader.schema.names)


def _cells(text: _Text) -> Iterator[pa.Table]:
    given = 0
    try:
        for table in text.tables(text.guessed()):
            given += table.num_rows
            yield table
        return
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise
    skip = given
    for table in text.tables(dict.fromkeys(text.names or text.header(), pa.string())):
        if skip < table.num_rows:
            yield table.slice(skip)
        skip = max(0, skip - table.num_rows)

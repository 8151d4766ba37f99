"""What a log's folder holds: `manifest.json` and the files that it names.

`build_log` writes format 1, one file `events.arrow`; `prepare` and `append` write format 2, generations of parts, with
index arrays beside them (see `gem_data.log.parts`). Both are read here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gem_data.log.maps import Maps
from gem_data.log.parts import Generation, Part, map_columns
from gem_data.schema import TIME, Schema

FORMAT, FORMAT_PARTS = 1, 2
EVENTS, MANIFEST, REJECTS = "events.arrow", "manifest.json", "rejects.jsonl"
HISTORY_END, COUNTERS = "_history_end", "_counters"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a log. Raises FileNotFoundError for none, ValueError for one that is not whole or not known."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"no event log in {folder}: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the manifest of an event log: {error!r}") from None
    if version not in (FORMAT, FORMAT_PARTS):
        raise ValueError(
            f"{path} has format {version!r}; this version of gem-data reads formats {FORMAT} and {FORMAT_PARTS}: "
            "build the log again"
        )
    needed = {"schema", "fingerprint", "rows", "files", *(["generations", "digest"] if version == FORMAT_PARTS else [])}
    missing = needed - manifest.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it is not a whole manifest")
    return dict(manifest)


def generations_of(folder: Path, manifest: dict[str, Any], schema: Schema) -> list[Generation]:
    """The parts and indices that a manifest names, mapped. Raises ValueError for files that do not fit it."""
    names = [TIME, *(c.name for c in schema.columns), HISTORY_END]
    if manifest["format"] == FORMAT:
        if schema.counters:
            names.append(COUNTERS)
        rows = int(manifest["rows"])
        maps = Maps()
        part = Part(first=0, rows=rows, columns=map_columns(folder / EVENTS, names, rows, maps))
        return [Generation(first=0, rows=rows, parts=[part], user=schema.user, stored=lambda _: None, maps=maps)]
    found, first = [], 0
    for record in manifest["generations"]:
        parts, at, maps = [], first, Maps()
        for part_record in record["parts"]:
            rows = int(part_record["rows"])
            columns = map_columns(folder / part_record["file"], names, rows, maps)
            parts.append(Part(first=at, rows=rows, columns=columns))
            at += rows
        arrays = dict(record["arrays"])

        def stored(name: str, arrays: dict[str, str] = arrays, maps: Maps = maps) -> NDArray[Any] | None:
            if name not in arrays:
                return None
            try:
                return maps.array(folder / arrays[name])
            except (ValueError, OSError, EOFError) as error:
                raise ValueError(f"{folder / arrays[name]} is not a readable array of a log: {error}") from None

        found.append(Generation(first=first, rows=at - first, parts=parts, user=schema.user, stored=stored, maps=maps))
        first = at
    if first != manifest["rows"]:
        raise ValueError(f"{folder / MANIFEST} says {manifest['rows']} rows, but its parts have {first}")
    return found

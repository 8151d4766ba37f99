"""Vocabularies: from the keys of a source (text, or any int64) to the ids of a table, saved with the log.

    0          missing (a value that is null where the column has a default)
    frequency  2, 3, ...: the most frequent keys, as many as the table has room for, ties by key; rarer than `min_count`
               and never seen, at evaluation say: 1
    hash       1 + SplitMix64(key) mod (cardinality - 1): nothing to keep, every key has an id, and some share one

What was counted and what it covers, and the collisions of a hash, are in `report`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.hashing import mix64
from gem_data.ragged import Ragged
from gem_data.schema import Column, Encoding
from gem_data.schema.values import NO_KEY, keys_of

Keys = NDArray[np.int64]

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The map of one column. `keys` ascending with their `ids` and `counts`, and `texts` of those that are text."""

    column: str
    encoding: Encoding
    cardinality: int
    keys: Keys
    ids: Keys
    counts: Keys
    texts: Mapping[int, str]
    report: dict[str, Any]

    @classmethod
    def fit(cls, column: Column, keys: Keys, counts: Keys, texts: Mapping[int, str] | None = None) -> Vocabulary:
        """The vocabulary of a column from its distinct keys [n] and how often each was seen [n].

        report: `distinct` keys and `events`; frequency: `kept` keys and the share of events `covered` by them; hash:
        keys that share an id with another, `collisions`, and the `ids` that are used.
        """
        assert column.vocabulary is not None
        assert column.cardinality is not None
        real = keys != NO_KEY
        keys, counts = keys[real], counts[real]
        report: dict[str, Any] = {"distinct": len(keys), "events": int(counts.sum())}
        if column.vocabulary == "hash":
            bucket = np.bincount(_bucket(keys, column.cardinality), minlength=column.cardinality)
            report |= {"collisions": int(bucket[bucket > 1].sum()), "ids": int((bucket > 0).sum())}
            keep = np.empty(0, np.int64)
            ids = keep
        else:
            frequent = np.flatnonzero(counts >= (column.min_count or 1))
            order = np.lexsort((keys[frequent], -counts[frequent]))[: column.cardinality - FIRST_ID]
            keep = frequent[order]
            ids = np.arange(FIRST_ID, FIRST_ID + len(keep), dtype=np.int64)
            by_key = np.argsort(keys[keep])
            keep, ids = keep[by_key], ids[by_key]
            covered = counts[keep].sum() / max(1, counts.sum())
            report |= {"kept": len(keep), "covered": float(covered)}
        return cls(
            column=column.name,
            encoding=column.vocabulary,
            cardinality=column.cardinality,
            keys=keys[keep],
            ids=ids,
            counts=counts[keep],
            texts={k: texts[k] for k in keys[keep].tolist() if k in texts} if texts else {},
            report=report,
        )

    def encode(self, keys: Any) -> Any:
        """Ids of int64 keys [n], or of Ragged keys: each in [0, cardinality)."""
        if isinstance(keys, Ragged):
            return Ragged(self.encode(keys.values), keys.offsets)
        keys = np.asarray(keys, np.int64)
        if self.encoding == "hash":
            return np.where(keys == NO_KEY, MISSING_ID, _bucket(keys, self.cardinality))
        out = np.full(len(keys), UNKNOWN_ID, np.int64)
        if len(self.keys):
            at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            out = np.where(self.keys[at] == keys, self.ids[at], UNKNOWN_ID)
        return np.where(keys == NO_KEY, MISSING_ID, out)

    def encode_values(self, values: Any) -> NDArray[np.int64]:
        """Ids of a source's values, as the build would map them: text or integers; None and empty text are missing."""
        return self.encode(keys_of(values if isinstance(values, pa.Array) else pa.array(values)))

    def decode(self, ids: Any) -> list[str | int | None]:
        """The key that each id stands for; None for missing, unknown and hashed ones."""
        key_of = dict(zip(self.ids.tolist(), self.keys.tolist(), strict=True))
        keys = [key_of.get(int(i)) for i in ids]
        return [None if k is None else self.texts.get(k, k) for k in keys]

    def require_all(self) -> None:
        """Raise ValueError unless every key has an id of its own: histories of several users would become one."""
        distinct = self.report["distinct"]
        if self.encoding != "frequency" or self.report["kept"] < distinct:
            raise ValueError(
                f"the vocabulary of the user column {self.column!r} must keep all {distinct} users apart: "
                f"'frequency' with cardinality {distinct + FIRST_ID} or more and no min_count"
            )

    def with_texts(self, texts: Mapping[int, str]) -> Vocabulary:
        """The same, knowing what its keys stand for."""
        return replace(self, texts=texts)

    def write(self, path: Path) -> None:
        """One Arrow file: key, id, count, text; the report among its metadata."""
        about = {k: getattr(self, k) for k in ("column", "encoding", "cardinality", "report")}
        table = pa.table(
            {
                "key": self.keys,
                "id": self.ids,
                "count": self.counts,
                "text": pa.array([self.texts.get(k) for k in self.keys.tolist()], pa.string()),
            }
        ).replace_schema_metadata({"gem_data": json.dumps(about)})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    @classmethod
    def read(cls, path: Path, column: Column) -> Vocabulary:
        """The inverse of `write`. Raises ValueError for a file that is none, or of another column or table size."""
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path), "r")).read_all()
            about = json.loads((table.schema.metadata or {})[b"gem_data"])
            keys, ids, counts = (table[n].to_numpy().astype(np.int64) for n in ("key", "id", "count"))
            texts = {k: t for k, t in zip(keys.tolist(), table["text"].to_pylist(), strict=True) if t is not None}
        except (pa.ArrowInvalid, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is not a readable vocabulary: {error!r}") from None
        here = (column.name, column.vocabulary, column.cardinality)
        if (about["column"], about["encoding"], about["cardinality"]) != here:
            raise ValueError(f"{path} is a vocabulary of {about}, but the schema has {here}")
        if len(ids) and not (UNKNOWN_ID < ids.min() <= ids.max() < column.cardinality and (keys[1:] > keys[:-1]).all()):
            raise ValueError(f"{path} has ids outside the table or keys out of order")
        return cls(keys=keys, ids=ids, counts=counts, texts=texts, **about)


def vocabulary_file(column: str) -> str:
    """The name of a column's vocabulary in a log's folder."""
    return f"vocabulary.{column}.arrow"


def _bucket(keys: Keys, cardinality: int) -> Keys:
    return 1 + (mix64(keys.astype(np.uint64)) % np.uint64(cardinality - 1)).astype(np.int64)

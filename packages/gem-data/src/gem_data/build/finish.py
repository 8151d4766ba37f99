"""The last stage of an out-of-core build: indices over all parts, counters, the manifest, and into place."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.build.disk import new_array
from gem_data.build.output import BuildSummary, in_place
from gem_data.features.statistics import Moments
from gem_data.features.streamed import CHUNK, stream_counters
from gem_data.features.vocabulary import Vocabulary, vocabulary_file
from gem_data.log.event_log import EventLog
from gem_data.log.manifest import FORMAT_PARTS, HISTORY_END, MANIFEST, REJECTS, file_digest
from gem_data.log.maps import Maps
from gem_data.log.parts import Generation, Part, map_columns
from gem_data.schema import TIME, Schema

Records = list[dict[str, Any]]
Report = Callable[[str, float], None]


class Finisher:
    """Makes a log of finished parts: `parts` is what `finish_part` said of them, `work` holds their indices."""

    def __init__(
        self,
        schema: Schema,
        work: Path,
        parts: Records,
        vocabularies: Mapping[str, Vocabulary],
        *,
        memory: int,
        report: Report,
    ) -> None:
        self.schema, self.work, self.parts, self.vocabularies = schema, work, parts, vocabularies
        self.memory, self.report, self.log = memory, report, work / "log"

    def finish(self, folder: Path, chunks: Records, *, overwrite: bool) -> BuildSummary:
        """Write what is missing and move the log to `folder`."""
        rejected = _added([*(c["rejected"] for c in chunks), {"duplicate": sum(p["duplicates"] for p in self.parts)}])
        samples = [s for r in (*chunks, *self.parts) for s in r["samples"]][:5]
        self._rejects(len(chunks))
        arrays = merge_indices(self.schema, self.parts, self.work, self.log, "g0000", self.report)
        counters = self._counters(arrays)
        for name, vocabulary in self.vocabularies.items():
            vocabulary.write(self.log / vocabulary_file(name))
        statistics = merged_statistics(self.parts)
        for i, counter in enumerate(self.schema.counters):
            assert counters is not None
            statistics[counter.name] = _moments_of(counters, i)
        manifest = {
            "format": FORMAT_PARTS,
            "schema": self.schema.to_dict(),
            "fingerprint": self.schema.fingerprint(),
            "rejected": rejected,
            "out_of_order": sum(p["out_of_order"] for p in self.parts),
            "vocabularies": {n: v.report for n, v in self.vocabularies.items()},
            "statistics": {n: m.to_dict() for n, m in statistics.items()},
            "generations": [{"parts": self.parts, "arrays": arrays}],
        }
        complete(manifest, self.log)
        with in_place(folder, overwrite) as temporary:
            for path in self.log.iterdir():
                path.rename(temporary / path.name)
        ignored = dict.fromkeys(n for c in chunks for n in c["ignored"])
        return BuildSummary(
            folder=folder,
            rows=manifest["rows"],
            users=manifest["users"],
            rejected=rejected,
            samples=tuple(samples),
            out_of_order=manifest["out_of_order"],
            ignored_columns=tuple(ignored),
            label_rates=manifest["label_rates"],
        )

    def _rejects(self, chunks: int) -> None:
        with (self.log / REJECTS).open("wb") as out:
            for number in range(chunks):
                with (self.work / "chunks" / f"{number:06}.rejects").open("rb") as file:
                    shutil.copyfileobj(file, out)
            for p in range(len(self.parts)):
                with (self.work / f"part-{p:05}.rejects").open("rb") as file:
                    shutil.copyfileobj(file, out)

    def _counters(self, arrays: dict[str, str]) -> NDArray[np.float32] | None:
        if not self.schema.counters:
            return None
        scratch = self.work / "scratch"
        scratch.mkdir(exist_ok=True)
        name = "g0000.counters.npy"
        bare = replace(self.schema, counters=())
        log = opened(bare, self.parts, self.log, arrays)
        found = stream_counters(
            log,
            self.schema,
            self.log / name,
            scratch,
            memory=self.memory // 2,
            report=lambda share: self.report("counters", share),
        )
        shutil.rmtree(scratch)
        arrays["counters"] = name
        return found


def opened(schema: Schema, parts: Records, folder: Path, arrays: Mapping[str, str]) -> EventLog:
    """The parts of an unfinished log, to read from; `schema` without counters."""
    names = [TIME, *(c.name for c in schema.columns), HISTORY_END]
    mapped, first, maps = [], 0, Maps()
    for record in parts:
        columns = map_columns(folder / record["file"], names, record["rows"], maps)
        mapped.append(Part(first=first, rows=record["rows"], columns=columns))
        first += record["rows"]

    def stored(name: str) -> Any:
        return maps.array(folder / arrays[name]) if name in arrays else None

    generation = Generation(first=0, rows=first, parts=mapped, user=schema.user, stored=stored, maps=maps)
    return EventLog(folder, {"rows": first, "digest": ""}, schema, [generation], [])


def merge_indices(
    schema: Schema, parts: Records, work: Path, folder: Path, prefix: str, report: Report
) -> dict[str, str]:
    """The parts' indices as one of each, numbered over all parts: name -> file in `folder`."""
    rows = [p["rows"] for p in parts]
    firsts = np.cumsum([0, *rows])
    out = {}

    def load(p: int, key: str) -> NDArray[np.int64]:
        return np.load(work / f"{parts[p]['index']}.{key}.npy", mmap_mode="r")

    def save(key: str, values: NDArray[np.int64]) -> None:
        out[key] = f"{prefix}.{key}.npy"
        np.save(folder / out[key], values)

    save("users", np.concatenate([load(p, "users") for p in range(len(parts))]))
    starts = [load(p, "starts") + firsts[p] for p in range(len(parts))]
    save("starts", np.concatenate([*starts, firsts[-1:]]))
    for source in schema.sources:
        key = f"source.{source.name}"
        save(key, np.concatenate([load(p, key) + firsts[p] for p in range(len(parts))]))
    out["by_time"] = f"{prefix}.by_time.npy"
    path = folder / out["by_time"]
    merged = new_array(path, np.int64, (int(firsts[-1]),))
    times = [load(p, "times") for p in range(len(parts))]
    orders = [load(p, "by_time") for p in range(len(parts))]
    at = 0
    for pieces in _time_slices(times):
        found = np.concatenate([orders[p][a:b] + firsts[p] for p, (a, b) in enumerate(pieces)])
        when = np.concatenate([times[p][a:b] for p, (a, b) in enumerate(pieces)])
        merged[at : at + len(found)] = found[np.argsort(when, kind="stable")]  # sorted runs, which it merges
        at += len(found)
        report("ordered", at / len(merged))
    assert at == len(merged)
    return out


def _time_slices(times: list[NDArray[np.int64]], most: int = 4 * CHUNK) -> list[list[tuple[int, int]]]:
    """Cut sorted arrays at common times, so that the pieces together hold about `most` values each."""
    total = sum(map(len, times))
    samples = np.sort(np.concatenate([t[:: max(1, len(t) // 256)] for t in times]))
    count = max(1, -(-total // most))
    bounds = np.unique(samples[(np.arange(1, count) * len(samples)) // count])
    cuts = [[0, *np.searchsorted(t, bounds, side="left").tolist(), len(t)] for t in times]
    return [[(c[i], c[i + 1]) for c in cuts] for i in range(len(bounds) + 1)]


def complete(manifest: dict[str, Any], folder: Path) -> None:
    """Add to a manifest what follows from its generations and files, and write it."""
    records = [p for g in manifest["generations"] for p in g["parts"]]
    names = [p["file"] for p in records] + [f for g in manifest["generations"] for f in g["arrays"].values()]
    known = {**manifest.get("files", {}), **{p["file"]: {k: p[k] for k in ("bytes", "sha256")} for p in records}}
    for name in (*names, REJECTS, *map(vocabulary_file, manifest["vocabularies"])):
        if name not in known or name == REJECTS:
            path = folder / name
            known[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
    users = [np.load(folder / g["arrays"]["users"], mmap_mode="r") for g in manifest["generations"]]
    seen = np.sum([p["seen"] for p in records], axis=0)
    rates = np.sum([p["positives"] for p in records], axis=0) / np.maximum(seen, 1)
    tasks = [t["name"] for t in manifest["schema"]["tasks"]]
    spans = [p["time"] for p in records]
    counters = [known[g["arrays"]["counters"]]["sha256"] for g in manifest["generations"] if "counters" in g["arrays"]]
    manifest |= {
        "files": known,
        "rows": sum(p["rows"] for p in records),
        "users": len(users[0]) if len(users) == 1 else int(np.unique(np.concatenate(users)).size),
        "time": [min(a for a, _ in spans), max(b for _, b in spans)],
        "label_rates": dict(zip(tasks, rates.tolist(), strict=True)),
        "digest": hashlib.sha256("".join([*(p["sha256"] for p in records), *counters]).encode()).hexdigest(),
    }
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    temporary.rename(folder / MANIFEST)


def merged_statistics(records: Records) -> dict[str, Moments]:
    """The statistics of all parts together."""
    found: dict[str, Moments] = {}
    for record in records:
        for name, data in record["statistics"].items():
            part = Moments.from_dict(data)
            found[name] = found[name].merged(part) if name in found else part
    return found


def _moments_of(counters: NDArray[np.float32], column: int) -> Moments:
    found = Moments()
    for start in range(0, len(counters), CHUNK):
        found.add(counters[start : start + CHUNK, column])
    return found


def _added(counts: list[dict[str, int]]) -> dict[str, int]:
    total = {k: sum(c.get(k, 0) for c in counts) for k in sorted({k for c in counts for k in c})}
    return {k: n for k, n in total.items() if n}

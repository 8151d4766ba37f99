"""What a log holds, for a person: schema, counts, time, label rates, lengths with a histogram, rejects."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.log.event_log import EventLog
from gem_data.schema import Schema

PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 99.9)
BAR = 40  # characters of the longest bar


def summary(log: EventLog | str | Path) -> dict[str, Any]:
    """The same as plain values: `inspect` as data. Lengths are events per user, over all generations."""
    log = log if isinstance(log, EventLog) else EventLog.open(log)
    lengths = user_lengths(log)
    files = log.manifest["files"].values()
    return {
        "folder": str(log.folder),
        "schema": log.schema.to_dict(),
        "fingerprint": log.schema.fingerprint(),
        "rows": len(log),
        "users": len(lengths),
        "parts": sum(len(g.parts) for g in log.generations),
        "generations": len(log.generations),
        "bytes": sum(f["bytes"] for f in files),
        "time": list(log.manifest["time"]),
        "label_rates": log.manifest["label_rates"],
        "sharing": sharing(log),
        "lengths": {"mean": float(lengths.mean()), "max": int(lengths.max()), **_percentiles(lengths)},
        "histogram": histogram(lengths),
        "vocabularies": log.manifest.get("vocabularies", {}),
        "statistics": log.statistics,
        "rejected": log.manifest["rejected"],
        "out_of_order": log.manifest["out_of_order"],
    }


def user_lengths(log: EventLog) -> NDArray[np.int64]:
    """Events of each user, in the order of the users."""
    if len(log.generations) == 1:
        return np.diff(log.generations[0].starts)
    users = np.concatenate([g.users for g in log.generations])
    counts = np.concatenate([np.diff(g.starts) for g in log.generations])
    _, of = np.unique(users, return_inverse=True)
    return np.bincount(of, weights=counts).astype(np.int64)


def sharing(log: EventLog, *, most: int = 5_000_000) -> float:
    """Impressions per request (events of one user and second): what sharing a history saves. From the first `most`."""
    n = min(len(log), most)
    user, time = np.asarray(log.user[:n]), np.asarray(log.time[:n])
    return n / (1 + int(((user[1:] != user[:-1]) | (time[1:] != time[:-1])).sum()))


def histogram(lengths: NDArray[np.int64]) -> list[dict[str, int]]:
    """Users by length, in bins that double: from, to (inclusive), users, events."""
    out, low = [], 1
    while low <= int(lengths.max(initial=0)):
        inside = (lengths >= low) & (lengths < 2 * low)
        out.append({"from": low, "to": 2 * low - 1, "users": int(inside.sum()), "events": int(lengths[inside].sum())})
        low *= 2
    return out


def inspect(log: EventLog | str | Path) -> str:
    """A page of text about a log. Raises as `EventLog.open` does."""
    log = log if isinstance(log, EventLog) else EventLog.open(log)
    s = summary(log)
    first, last = (datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S") for t in s["time"])
    lines = [
        f"{s['folder']}: schema {log.schema.name!r}, fingerprint {s['fingerprint']}",
        f"{_counted(s['rows'], 'event')} of {_counted(s['users'], 'user')} in {_counted(s['parts'], 'part')} and "
        f"{_counted(s['generations'], 'generation')}, {s['bytes'] / 2**20:,.1f} MiB",
        f"from {first} to {last} UTC",
        f"{s['sharing']:.2f} impressions a request",
        "",
        *_schema_lines(log.schema),
        "",
        "label rates",
        *(f"  {name:<20}{rate:.5f}" for name, rate in s["label_rates"].items()),
        "",
        "events per user",
        "  " + "  ".join(f"{k} {v:,.0f}" for k, v in s["lengths"].items()),
        *_histogram_lines(s["histogram"]),
    ]
    for name, report in s["vocabularies"].items():
        lines.append(f"vocabulary of {name}: " + ", ".join(f"{k} {_short(v)}" for k, v in report.items()))
    rejected = ", ".join(f"{n:,} {reason}" for reason, n in s["rejected"].items()) or "none"
    lines += ["", f"rejected: {rejected}; out of order: {s['out_of_order']:,}"]
    return "\n".join(lines)


def _percentiles(lengths: NDArray[np.int64]) -> dict[str, float]:
    values = np.percentile(lengths, PERCENTILES)
    return {f"p{p:g}": float(v) for p, v in zip(PERCENTILES, values, strict=True)}


def _schema_lines(schema: Schema) -> list[str]:
    lines = [f"{'column':<20}{'kind':<8}{'role':<9}{'size':>12}  vocabulary"]
    for c in schema.columns:
        size = c.cardinality or c.size or 1
        lines.append(f"{c.name:<20}{c.kind:<8}{c.role:<9}{size:>12,}  {c.vocabulary or ''}".rstrip())
    for source in schema.sources:
        lines.append(f"history {source.name!r}: {source.column} in {source.values}")
    return lines


def _histogram_lines(bins: list[dict[str, int]]) -> list[str]:
    most = max((b["users"] for b in bins), default=1) or 1
    return [
        f"{b['from']:>9,} to {b['to']:<9,}{'#' * -(-b['users'] * BAR // most):<{BAR}} {_counted(b['users'], 'user')}"
        for b in bins
    ]


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("s" if count != 1 else "")


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"

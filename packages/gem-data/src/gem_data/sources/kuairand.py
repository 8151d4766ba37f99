"""KuaiRand: impressions of videos at Kuaishou with twelve signals each, a part of them shown at random.

Gao et al., "KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly Exposed Videos", CIKM 2022. The files
`log_*.csv` of a variant ("pure", "1k" or "27k") are read from a folder; get them at https://kuairand.com.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_data.schema import Column, Counter, Schema, Task, unknown
from gem_data.sources import SourceUnavailable
from gem_data.sources.events import Events
from gem_data.sources.files import RAW, files

Variant = Literal["pure", "1k", "27k"]

LICENCE = (
    "KuaiRand, by Kuaishou Technology and the University of Science and Technology of China, is licensed CC BY-SA 4.0 "
    "(https://kuairand.com); cite Gao et al., CIKM 2022."
)
PAGE = "https://kuairand.com"
SIGNALS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter")
TABS = 16
NEEDED = ("user_id", "video_id", "time_ms", *SIGNALS, "play_time_ms", "duration_ms", "is_rand", "tab")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many users and videos a variant's ids run over."""

    users: int
    videos: int


SIZES: dict[str, Size] = {
    "pure": Size(users=27_285, videos=7_583),
    "1k": Size(users=1_000, videos=4_371_900),
    "27k": Size(users=27_285, videos=32_038_725),
}


def schema(variant: Variant = "1k") -> Schema:
    """One bit mask of eight signals; click, like, follow and long view are tasks; counters of users and videos."""
    if variant not in SIZES:
        raise ValueError(unknown("variant of KuaiRand", variant, SIZES))
    size = SIZES[variant]
    return Schema(
        name=f"kuairand-{variant}",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=size.users),
            Column(name="video", kind="id", role="context", cardinality=size.videos),
            Column(name="tab", kind="id", role="context", cardinality=TABS),
            Column(name="random", kind="id", role="context", cardinality=2),
            Column(name="duration", kind="float", role="context"),
            Column(name="signals", kind="bits", role="outcome", size=len(SIGNALS)),
            Column(name="watched", kind="float", role="outcome"),
        ),
        tasks=(
            Task(name="click", column="signals", bit=SIGNALS.index("is_click")),
            Task(name="like", column="signals", bit=SIGNALS.index("is_like")),
            Task(name="follow", column="signals", bit=SIGNALS.index("is_follow")),
            Task(name="long_view", column="signals", bit=SIGNALS.index("long_view"), given="click"),
        ),
        counters=(
            Counter(name="user_click_rate", kind="rate", key=("user",), task="click"),
            Counter(name="video_count", kind="count", key=("video",)),
            Counter(name="video_click_rate", kind="rate", key=("video",), task="click"),
            Counter(name="user_since", kind="since", key=("user",)),
        ),
    )


def events(folder: str | Path, variant: Variant = "1k") -> Events:
    """The impressions in `folder` (or a folder in it); durations and watched time become log(1 + seconds).

    Raises SourceUnavailable where there is no log file, with where to get it.
    """
    found = sorted(Path(folder).rglob("log_*.csv"))
    if not found:
        raise SourceUnavailable(f"no log_*.csv of KuaiRand in {folder}; get it from {PAGE}. {LICENCE}")
    return files(found, schema(variant), columns=NEEDED, transform=_transform, licence=LICENCE)


def _transform(table: pa.Table) -> pa.Table:
    signals = np.zeros(table.num_rows, np.int64)
    wrong = np.zeros(table.num_rows, bool)
    for bit, name in enumerate(SIGNALS):
        column = table.column(name)
        if pa.types.is_string(column.type):
            column = pc.if_else(pc.match_substring_regex(column, "^[01]$"), column, None).cast(pa.int64())
        flags = column.fill_null(2).to_numpy()
        wrong |= (flags != 0) & (flags != 1)
        signals |= (flags == 1).astype(np.int64) << bit
    out = {
        "user": table.column("user_id"),
        "time": _scaled(table.column("time_ms"), lambda ms: np.floor(ms / 1000)),
        "video": table.column("video_id"),
        "tab": table.column("tab"),
        "random": table.column("is_rand"),
        "duration": _scaled(table.column("duration_ms"), lambda ms: np.log1p(np.maximum(ms, 0) / 1000)),
        "signals": pa.array(signals, mask=wrong),  # missing where a flag is neither 0 nor 1
        "watched": _scaled(table.column("play_time_ms"), lambda ms: np.log1p(np.maximum(ms, 0) / 1000)),
    }
    if RAW in table.column_names:
        out[RAW] = table.column(RAW)
    return pa.table(out)


def _scaled(column: pa.ChunkedArray, f: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> pa.ChunkedArray:
    """f of a column of numbers; nulls stay, and text that is no number becomes null."""
    if pa.types.is_string(column.type):
        good = pc.match_substring_regex(column, r"^[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?$")
        column = pc.if_else(good, column, None)
    values = column.cast(pa.float64(), safe=False)
    null = values.is_null().to_numpy()
    array = values.fill_null(0.0).to_numpy()
    with np.errstate(invalid="ignore"):
        return pa.chunked_array([pa.array(f(array), mask=null)])

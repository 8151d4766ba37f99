"""MovieLens-100K as a ranking log: 100,000 ratings of 1,682 films by 943 people, 1997-1998.

F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5 (4), 2015. Its terms allow
non-commercial research and forbid redistribution, so it is fetched, never shipped: the wheel of recbole on the package
index carries it in the "atomic file" format, tab-separated with a header of name:type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from gem_data.log.manifest import file_digest
from gem_data.schema import Column, Counter, Schema, Task, unknown
from gem_data.sources.wheel import Wheel, default_cache

LICENCE = (
    "MovieLens-100K, by GroupLens Research (University of Minnesota), is for non-commercial research use; it may not "
    "be redistributed without permission (https://grouplens.org/datasets/movielens/100k/)."
)
REQUIREMENT = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
FILES = {  # file in the wheel's folder -> SHA-256
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}
_IN_WHEEL = "recbole/dataset_example/ml-100k"

USERS, ITEMS = 943 + 1, 1682 + 1  # ids begin at 1; 0 is left for padding
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
OCCUPATIONS = (
    "administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive", "healthcare",
    "homemaker", "lawyer", "librarian", "marketing", "none", "other", "programmer", "retired", "salesman", "scientist",
    "student", "technician", "writer",
)  # fmt: skip
GENDERS = ("F", "M")
# Lower edges of the buckets 2, 3, ...; bucket 1 is below the first, 0 is unknown.
AGES = (18, 25, 35, 45, 50, 56)
YEARS = (1940, 1950, 1960, 1970, 1980, 1985, 1990, 1992, 1993, 1994, 1995, 1996, 1997, 1998)


def schema() -> Schema:
    """Columns, the tasks likes (rating >= 4) and loves (rating = 5), and the streamed counters."""

    def rate(name: str, key: str, task: str, *, in_history: bool | None = None) -> Counter:
        return Counter(name=name, kind="rate", key=(key,), task=task, in_history=in_history)

    return Schema(
        name="movielens-100k",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=USERS),
            Column(name="age", kind="id", role="user", cardinality=len(AGES) + 2),
            Column(name="gender", kind="id", role="user", cardinality=len(GENDERS) + 1),
            Column(name="occupation", kind="id", role="user", cardinality=len(OCCUPATIONS) + 1),
            Column(name="item", kind="id", role="context", cardinality=ITEMS),
            Column(name="year", kind="id", role="context", cardinality=len(YEARS) + 2),
            Column(name="genres", kind="vector", role="context", size=len(GENRES)),
            Column(name="rating", kind="id", role="outcome", cardinality=6),
        ),
        tasks=(Task(name="likes", column="rating", minimum=4), Task(name="loves", column="rating", equals=5)),
        counters=(
            Counter(name="item_count", kind="count", key=("item",)),
            rate("item_like_rate", "item", "likes", in_history=True),
            rate("item_love_rate", "item", "loves", in_history=True),
            Counter(name="user_count", kind="count", key=("user",)),
            rate("user_like_rate", "user", "likes"),
            rate("user_love_rate", "user", "loves"),
            Counter(name="user_since", kind="since", key=("user",)),
            Counter(name="user_residual", kind="residual", key=("user",), task="likes", against="item_like_rate"),
            Counter(name="genre_like_rate", kind="affinity", key=("user",), task="likes", over="genres"),
            Counter(name="genre_love_rate", kind="affinity", key=("user",), task="loves", over="genres"),
            Counter(name="year_like_rate", kind="rate", key=("user", "year"), task="likes"),
            Counter(name="neighbours", kind="neighbour", key=("user",), over="item", value="rating", prior=20.0),
        ),
    )


def load(folder: str | Path | None = None, *, notice: Callable[[str], None] | None = None) -> tuple[pa.Table, Schema]:
    """The ratings in `folder` (None: what `fetch` gives) joined with users and films, and their schema.

    Nothing is checked here beyond the files' headers: values stay text, and what a row lacks is null, for `build_log`
    to reject with the reason. Raises SourceUnavailable, or ValueError for a file that lacks a column.
    """
    folder = fetch(notice=notice) if folder is None else Path(folder)
    events = _read(folder / "ml-100k.inter", ("user_id", "item_id", "rating", "timestamp"))
    users = _read(folder / "ml-100k.user", ("user_id", "age", "gender", "occupation"))
    items = _read(folder / "ml-100k.item", ("item_id", "release_year", "class"))
    of_user, of_item = (_row_of(c) for c in (users["user_id"], items["item_id"]))
    user_row = pa.array([of_user.get(u) for u in events["user_id"]], pa.int64())
    item_row = pa.array([of_item.get(i) for i in events["item_id"]], pa.int64())
    table = pa.table(
        {
            "user": pa.array(events["user_id"], pa.string()),
            "time": pa.array(events["timestamp"], pa.string()),
            "age": _buckets(users["age"], AGES).take(user_row),
            "gender": _codes(users["gender"], GENDERS).take(user_row),
            "occupation": _codes(users["occupation"], OCCUPATIONS).take(user_row),
            "item": pa.array(events["item_id"], pa.string()),
            "year": _buckets(items["release_year"], YEARS).take(item_row),
            "genres": _multi_hot(items["class"], GENRES).take(item_row),
            "rating": pa.array(events["rating"], pa.string()),
        }
    )
    return table, schema()


Cells = list[str | None]


def _read(path: Path, needed: Iterable[str]) -> dict[str, Cells]:
    """The needed columns of an atomic file as text; a cell that is empty or not there is None."""
    header, *lines = path.read_text(encoding="utf-8").split("\n")
    names = [cell.partition(":")[0] for cell in header.split("\t")]
    for name in needed:
        if name not in names:
            raise ValueError(f"{path}: " + unknown("column", name, names))
    rows = [line.split("\t") for line in lines if line.strip()]
    return {
        name: [(r[i].strip() or None) if i < len(r) else None for r in rows]
        for name in needed
        for i in [names.index(name)]
    }


def _row_of(keys: Cells) -> dict[str | None, int]:
    first: dict[str | None, int] = {}
    for row, key in enumerate(keys):
        if key is not None:
            first.setdefault(key, row)
    return first


def _codes(cells: Cells, names: tuple[str, ...]) -> pa.Array:
    code = {name: i + 1 for i, name in enumerate(names)}
    return pa.array([code.get(c or "", 0) for c in cells], pa.int64())


def _buckets(cells: Cells, edges: tuple[int, ...]) -> pa.Array:
    numbers = np.array([int(c) if c is not None and c.isdecimal() else -1 for c in cells], np.int64)
    return pa.array(np.where(numbers < 0, 0, 1 + np.searchsorted(edges, numbers, side="right")), pa.int64())


def _multi_hot(cells: Cells, names: tuple[str, ...]) -> pa.Array:
    hot = np.zeros((len(cells), len(names)), np.float32)
    for row, cell in enumerate(cells):
        for name in (cell or "").split():
            hot[row, names.index(name) if name in names else 0] = 1
    return pa.FixedSizeListArray.from_arrays(pa.array(hot.reshape(-1)), len(names))


# Fetching.


def fetch(
    cache_dir: str | Path | None = None, *, notice: Callable[[str], None] | None = None, timeout_s: float = 120
) -> Path:
    """The folder with the three files, from the cache or else from the package index through pip; checksums compared.

    `notice` receives the licence note; without it, the note goes to standard error when the data is downloaded. Raises
    SourceUnavailable with the reason: no network, no pip, a timeout, files other than the pinned ones, an unwritable
    cache.
    """
    wheel = Wheel(
        name="ml-100k", requirement=REQUIREMENT, sha256=WHEEL_SHA256, root=_IN_WHEEL, files=FILES, licence=LICENCE
    )
    return wheel.fetch(cache_dir, notice=notice, timeout_s=timeout_s)


__all__ = ["LICENCE", "default_cache", "fetch", "file_digest", "load", "schema"]

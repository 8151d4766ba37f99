"""Public data sets that are read from a folder where somebody has put them: MovieLens 1M and 20M, Taobao, Criteo.

Their terms do not let them travel with a package, so they are not fetched: each function says where to get the data,
and under which terms, if it is not in the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_data.schema import Column, Counter, Schema, Source, Task
from gem_data.sources import SourceUnavailable
from gem_data.sources.events import Events
from gem_data.sources.files import files, read

MOVIELENS_LICENCE = (
    "MovieLens, by GroupLens Research (University of Minnesota), is for non-commercial research use; it may not be "
    "redistributed without permission (https://grouplens.org/datasets/movielens/)."
)
TAOBAO_LICENCE = (
    "UserBehavior, by Alibaba, is for non-commercial research use, under the terms at "
    "https://tianchi.aliyun.com/dataset/649."
)
CRITEO_LICENCE = (
    "The Criteo display advertising data is for non-commercial research use, under Criteo's terms at "
    "https://ailab.criteo.com/ressources/."
)
GENRES = (
    "Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy", "Film-Noir",
    "Horror", "IMAX", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
BEHAVIOURS = ("pv", "cart", "fav", "buy")
CRITEO_DENSE, CRITEO_SPARSE = 13, 26


def _require(folder: str | Path, name: str, what: str, licence: str) -> Path:
    path = Path(folder) / name
    if not path.is_file():
        raise SourceUnavailable(f"{what} is not in {folder}: there is no {name}. {licence}")
    return path


# MovieLens 1M and 20M.


def movielens_schema(name: str, users: int, items: int, *, demographics: bool) -> Schema:
    """Ratings of films with their genres (any number) and, in 1M, who the user is; likes and loves are tasks."""
    about = (
        Column(name="gender", kind="id", role="user", cardinality=3),
        Column(name="age", kind="id", role="user", cardinality=57),
        Column(name="occupation", kind="id", role="user", cardinality=22),
    )
    return Schema(
        name=name,
        columns=(
            Column(name="user", kind="id", role="user", cardinality=users),
            *(about if demographics else ()),
            Column(name="item", kind="id", role="context", cardinality=items),
            Column(name="genres", kind="ids", role="context", cardinality=len(GENRES) + 1, default=0),
            Column(name="rating", kind="float", role="outcome"),
        ),
        tasks=(
            Task(name="likes", column="rating", minimum=4),
            Task(name="loves", column="rating", minimum=5),
        ),
        counters=(
            Counter(name="item_count", kind="count", key=("item",)),
            Counter(name="item_like_rate", kind="rate", key=("item",), task="likes"),
            Counter(name="user_count", kind="count", key=("user",)),
            Counter(name="user_like_rate", kind="rate", key=("user",), task="likes"),
            Counter(name="user_since", kind="since", key=("user",)),
        ),
    )


def movielens_1m(folder: str | Path) -> Events:
    """1,000,209 ratings: ratings.dat, users.dat and movies.dat, cells separated by "::".

    Raises SourceUnavailable where a file is missing.
    """
    paths = {n: _require(folder, f"{n}.dat", "MovieLens-1M", MOVIELENS_LICENCE) for n in ("ratings", "users", "movies")}
    schema = movielens_schema("movielens-1m", 6_041, 3_953, demographics=True)

    def tables() -> Iterator[pa.Table]:
        films = _cells(paths["movies"], 3)
        users = _cells(paths["users"], 5)
        genres = _genres([(row[0], row[2]) for row in films])
        about = {row[0]: (("F", "M").index(row[1]) + 1 if row[1] in ("F", "M") else 0, row[2], row[3]) for row in users}
        ratings = _cells(paths["ratings"], 4)
        of = [about.get(row[0], (None, None, None)) for row in ratings]
        yield pa.table(
            {
                "user": pa.array([r[0] for r in ratings], pa.string()),
                "gender": pa.array([o[0] for o in of], pa.int64()),
                "age": pa.array([o[1] for o in of], pa.string()),
                "occupation": pa.array([o[2] for o in of], pa.string()),
                "item": pa.array([r[1] for r in ratings], pa.string()),
                "genres": pa.array([genres.get(r[1]) for r in ratings], pa.list_(pa.int64())),
                "rating": pa.array([r[2] for r in ratings], pa.string()),
                "time": pa.array([r[3] for r in ratings], pa.string()),
            }
        )

    identity = {str(p): p.stat().st_size for p in paths.values()}
    return Events(name=schema.name, schema=schema, tables=tables, identity=identity, licence=MOVIELENS_LICENCE)


def movielens_20m(folder: str | Path) -> Events:
    """20,000,263 ratings: ratings.csv and movies.csv with headers. Raises SourceUnavailable where one is missing."""
    ratings = _require(folder, "ratings.csv", "MovieLens-20M", MOVIELENS_LICENCE)
    movies = _require(folder, "movies.csv", "MovieLens-20M", MOVIELENS_LICENCE)
    table = pa.concat_tables(read(movies, "csv"))
    genres = _genres(list(zip(table["movieId"].to_pylist(), table["genres"].to_pylist(), strict=True)))
    top = max((i for i in genres if isinstance(i, int)), default=0)
    by_id = pa.array([genres.get(i) for i in range(top + 1)], pa.list_(pa.int64()))

    def with_genres(rows: pa.Table) -> pa.Table:
        item = rows["item"]
        if pa.types.is_string(item.type):  # something in the file is no number; the build says what
            return rows.append_column("genres", pa.nulls(len(rows), by_id.type))
        known = pc.if_else(pc.and_(pc.greater_equal(item, 0), pc.less_equal(item, top)), item, None)
        return rows.append_column("genres", by_id.take(known))

    names = {"userId": "user", "movieId": "item", "timestamp": "time"}
    schema = movielens_schema("movielens-20m", 138_494, 131_263, demographics=False)
    return files(ratings, schema, rename=names, transform=with_genres, licence=MOVIELENS_LICENCE)


def _cells(path: Path, width: int) -> list[list[str | None]]:
    """Lines of "::"-separated cells, cut or filled with None to `width`; an empty cell is None."""
    lines = path.read_text(encoding="latin-1").splitlines()
    rows = [[cell.strip() or None for cell in line.split("::")[:width]] for line in lines if line.strip()]
    return [row + [None] * (width - len(row)) for row in rows]


def _genres(films: list[tuple[object, object]]) -> dict[object, list[int]]:
    number = {g: i + 1 for i, g in enumerate(GENRES)} | {"Children's": GENRES.index("Children") + 1}
    return {film: [number[g] for g in str(text or "").split("|") if g in number] for film, text in films}


# Taobao.


def taobao_schema() -> Schema:
    """What people did with items; engaging at all and buying are tasks, views and deeds two histories."""
    return Schema(
        name="taobao",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=1_018_012),
            Column(name="item", kind="id", role="context", cardinality=5_163_071),
            Column(name="category", kind="id", role="context", cardinality=5_162_430),
            Column(name="behaviour", kind="id", role="outcome", cardinality=len(BEHAVIOURS) + 1),
        ),
        tasks=(
            Task(name="engage", column="behaviour", minimum=2),
            Task(name="buy", column="behaviour", equals=BEHAVIOURS.index("buy") + 1),
        ),
        counters=(
            Counter(name="item_count", kind="count", key=("item",)),
            Counter(name="item_buy_rate", kind="rate", key=("item",), task="buy"),
            Counter(name="user_count", kind="count", key=("user",)),
            Counter(name="user_item_count", kind="count", key=("user", "item")),
            Counter(name="user_since", kind="since", key=("user",)),
        ),
        sources=(
            Source(name="views", column="behaviour", values=(1,)),
            Source(name="deeds", column="behaviour", values=(2, 3, 4)),
        ),
    )


def taobao(folder: str | Path) -> Events:
    """100,150,807 events: UserBehavior.csv, without a header. Raises SourceUnavailable where it is missing."""
    path = _require(folder, "UserBehavior.csv", "Taobao UserBehavior", TAOBAO_LICENCE)
    names = ["user", "item", "category", "behaviour", "time"]
    codes = pa.array(BEHAVIOURS)

    def coded(rows: pa.Table) -> pa.Table:
        behaviour = pc.add(pc.index_in(rows["behaviour"], codes).cast(pa.int64()), 1)
        return rows.set_column(names.index("behaviour"), "behaviour", behaviour)

    return files(path, taobao_schema(), format="csv", names=names, transform=coded, licence=TAOBAO_LICENCE)


# Criteo.


def criteo_schema(*, rows: int = 45_840_617, buckets: int = 1 << 17) -> Schema:
    """13 numbers and 26 hashed categories of an advertisement; nobody is known, so every row is a user of its own."""
    return Schema(
        name="criteo",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=rows),
            *(Column(name=f"I{i}", kind="float", role="context", default=-1) for i in range(1, CRITEO_DENSE + 1)),
            *(
                Column(name=f"C{i}", kind="id", role="context", cardinality=buckets, vocabulary="hash", default=0)
                for i in range(1, CRITEO_SPARSE + 1)
            ),
            Column(name="click", kind="id", role="outcome", cardinality=2),
        ),
        tasks=(Task(name="click", column="click", equals=1),),
    )


def criteo(folder: str | Path, *, rows: int = 45_840_617) -> Events:
    """The display advertising challenge: train.txt, tab-separated without a header, a week in order of time.

    The file has no times: a row's number stands for its time. Numbers become log(1 + x), as is usual, -1 where they
    are missing. Raises SourceUnavailable where the file is missing.
    """
    path = _require(folder, "train.txt", "Criteo display advertising", CRITEO_LICENCE)
    dense = [f"I{i}" for i in range(1, CRITEO_DENSE + 1)]
    names = ["click", *dense, *(f"C{i}" for i in range(1, CRITEO_SPARSE + 1))]
    schema = criteo_schema(rows=rows)

    def tables() -> Iterator[pa.Table]:
        base = 0
        for table in read(path, "tsv", names):
            at = np.arange(base, base + len(table))
            base += len(table)
            for i, name in enumerate(dense, start=1):
                column = table[name]
                if not pa.types.is_string(column.type):  # text is for the build to parse or reject
                    table = table.set_column(
                        i, name, pc.log1p(pc.max_element_wise(column.cast(pa.float64()), 0.0, skip_nulls=False))
                    )
            yield table.append_column("user", pa.array(at)).append_column("time", pa.array(at))

    state = path.stat()
    identity = {"path": str(path.resolve()), "size": state.st_size, "time": state.st_mtime_ns}
    return Events(name="criteo", schema=schema, tables=tables, identity=identity, licence=CRITEO_LICENCE)

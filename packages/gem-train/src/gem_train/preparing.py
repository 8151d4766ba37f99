"""Event logs out of files: what `gem-train data prepare` and `data make` build. Imports nothing heavy."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem_train.errors import UserError

if TYPE_CHECKING:
    from gem_data import Events, Progress, Schema

STAGES = {
    "checked": "checking the rows",
    "dealt": "dealing them out by user",
    "sorted": "sorting by user and time",
    "counters": "counters over the events before each",
    "ordered": "the order of time",
}
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A source that can be named on the command line.

    Args:
        about: a line for the help.
        folder: whether a path is "needed", "optional" (without one the data is fetched) or one of "several".
        options: the options of the command that it takes beside those of every source.
        load: its events, from the paths and the options.
    """

    about: str
    folder: str
    options: tuple[str, ...] = ()
    load: Callable[[Sequence[Path], Mapping[str, Any]], Events]


def events(source: str, paths: Sequence[Path], options: Mapping[str, Any]) -> Events:
    """The events of `source` in `paths`; `options` are those that were given (None: not given).

    Raises UserError for an unknown source, a wrong number of paths or an option that the source does not take, and
    whatever the source raises.
    """
    if source not in SOURCES:
        from gem_train.config.tree import suggest

        raise UserError(f"unknown source {source!r}{suggest(source, SOURCES)} (there are: {', '.join(SOURCES)})")
    kind = SOURCES[source]
    most = {"needed": 1, "optional": 1}.get(kind.folder, len(paths))
    if not paths and kind.folder != "optional":
        raise UserError(f"the source {source!r} needs the path of its files: gem-train data prepare {source} PATH ...")
    if len(paths) > most:
        raise UserError(f"the source {source!r} takes one folder, got {len(paths)}: {', '.join(map(str, paths))}")
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in kind.options:
            takes = ", ".join(f"--{o}" for o in kind.options) or "no options of its own"
            raise UserError(f"the source {source!r} has no use for --{name}; it takes {takes}")
    return kind.load(paths, given)


def read_schema(path: Path) -> Schema:
    """A schema from TOML or JSON: the keys of `gem_data.Schema`, [[columns]], [[tasks]], [[counters]], [[sources]].

    Raises UserError naming the file and what is wrong in it.
    """
    from gem_data import Schema

    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(tree, dict):
            raise ValueError(f"expected a table of settings, found a {type(tree).__name__}")
        return Schema.from_dict(tree)
    except OSError as error:
        raise UserError(f"cannot read the schema {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:  # AttributeError: a number where a table belongs
        raise UserError(f"{path} is not a schema: {error}") from error


def size(text: str) -> int:
    """Bytes from "2GiB", "500M", "1e9" or a number; K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    try:
        value = int(float(found[1]) * UNITS[found[2]]) if found else 0
    except ValueError:
        value = 0
    if value < 1:
        raise UserError(f"got {text!r} as a size; expected something like 500MB or 2GiB")
    return value


class Reporter:
    """Tells of a build's stages on standard error: a line that is rewritten on a terminal, one a stage elsewhere."""

    def __init__(self) -> None:
        self.stage = ""

    def __call__(self, progress: Progress) -> None:
        """As `gem_data.prepare` calls it."""
        if sys.stderr.isatty():
            from gem_data.build.out_of_core import print_progress

            print_progress(progress)
        elif progress.stage != self.stage:
            self.stage = progress.stage
            print(f"preparing: {STAGES.get(progress.stage, progress.stage)}", file=sys.stderr, flush=True)


def pairs(assignments: Sequence[str]) -> dict[str, str]:
    """{"a": "b"} from ["a=b"]. Raises UserError for what is not of that form."""
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name and equals and value):
            raise UserError(f"cannot read {assignment!r}; expected NAME_IN_FILE=NAME_IN_SCHEMA")
        found[name] = value
    return found


def _files(paths: Sequence[Path], options: Mapping[str, Any]) -> Events:
    from gem_data.sources.files import files

    if "schema" not in options:
        raise UserError("the source 'files' needs the schema of its events: --schema FILE.toml")
    names = options["names"].split(",") if "names" in options else None
    return files(
        paths,
        read_schema(options["schema"]),
        format=options.get("format"),
        rename=pairs(options["rename"]) if "rename" in options else None,
        names=names,
    )


def _kuairand(paths: Sequence[Path], options: Mapping[str, Any]) -> Events:
    from gem_data.sources import kuairand

    return kuairand.events(paths[0], options.get("variant", "1k"))


def _layout(name: str) -> Callable[[Sequence[Path], Mapping[str, Any]], Events]:
    def load(paths: Sequence[Path], _: Mapping[str, Any]) -> Events:
        from gem_data.sources import layouts

        found: Events = getattr(layouts, name)(paths[0])
        return found

    return load


def _open_bandit(paths: Sequence[Path], _: Mapping[str, Any]) -> Events:
    from gem_data.sources import open_bandit

    return open_bandit.events(paths[0] if paths else None)


def _movielens_100k(paths: Sequence[Path], _: Mapping[str, Any]) -> Events:
    from gem_data import from_table
    from gem_data.sources import movielens

    return from_table(*movielens.load(paths[0] if paths else None))


SOURCES: dict[str, Kind] = {
    "files": Kind(
        about="Parquet, Arrow, CSV or JSON lines of your own, with --schema",
        folder="several",
        options=("schema", "format", "rename", "names"),
        load=_files,
    ),
    "movielens-100k": Kind(about="ratings; fetched if no folder is given", folder="optional", load=_movielens_100k),
    "movielens-1m": Kind(about="ratings.dat, users.dat, movies.dat", folder="needed", load=_layout("movielens_1m")),
    "movielens-20m": Kind(about="ratings.csv, movies.csv", folder="needed", load=_layout("movielens_20m")),
    "kuairand": Kind(about="short videos", folder="needed", options=("variant",), load=_kuairand),
    "taobao": Kind(about="UserBehavior.csv", folder="needed", load=_layout("taobao")),
    "criteo": Kind(about="train.txt of the display advertising challenge", folder="needed", load=_layout("criteo")),
    "open-bandit": Kind(about="a sample; fetched if no folder is given", folder="optional", load=_open_bandit),
}

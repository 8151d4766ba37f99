"""`gem-train data prepare`, `data make` and `data inspect`: logs without training. Needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gem_train import preparing
from gem_train.config.tree import override
from gem_train.errors import UserError, user_errors

if TYPE_CHECKING:
    from gem_data import Events


def prepare(arguments: argparse.Namespace) -> int:
    """Build a log of a source, in bounded memory."""
    names = ("schema", "format", "rename", "names", "variant")
    options = {name: getattr(arguments, name) or None for name in names}
    with _data_errors():
        events = preparing.events(arguments.source, [Path(p) for p in arguments.paths], options)
        return _build(events, arguments)


def make(arguments: argparse.Namespace) -> int:
    """Build a log of simulated events."""
    from gem_data import from_table
    from gem_data.sources import synthetic

    config = override(synthetic.SyntheticConfig(), arguments.set)
    with _data_errors():
        return _build(from_table(*synthetic.load(config)), arguments)


def inspect(arguments: argparse.Namespace) -> int:
    """Say what a log holds."""
    import gem_data
    from gem_data.log.inspection import summary

    from gem_train.events import finite

    with _data_errors():
        log = gem_data.EventLog.open(arguments.log, verify=arguments.verify)
        print(json.dumps(finite(summary(log)), indent=2) if arguments.json else gem_data.inspect(log))
    return 0


def _build(events: Events, arguments: argparse.Namespace) -> int:
    import gem_data

    out = Path(arguments.out)
    if out.exists() and not arguments.overwrite:  # gem_data would say so, too, but in the words of its API
        raise UserError(f"{out} exists already; name another folder, or replace the log in it by --overwrite")
    try:
        built = gem_data.prepare(
            events,
            out,
            memory=preparing.size(arguments.memory),
            threads=arguments.threads,
            vocabulary_until=arguments.vocabulary_until,
            overwrite=arguments.overwrite,
            restart=arguments.restart,
            progress=preparing.Reporter(),
        )
    except KeyboardInterrupt:
        print(f"what is done of {out} is kept; the same command goes on with it", file=sys.stderr)
        raise
    print(built)
    print(f"train on it: gem-train run log --set data.path={out}")
    return 0


@contextlib.contextmanager
def _data_errors() -> Iterator[None]:
    """What a source or a build refuses is the user's to mend; so is a source that can't be had."""
    from gem_data import SourceUnavailable

    try:
        with user_errors("data"):
            yield
    except SourceUnavailable as error:
        raise UserError(f"data: {error}") from error

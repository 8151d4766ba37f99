"""Event logs to jagged batches: memory-mapped histories, strict time, exact resume."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gem_data.__about__ import __version__

if TYPE_CHECKING:
    from gem_data.balance import assign
    from gem_data.batch import JaggedBatch, JaggedIds, JaggedSequence
    from gem_data.build import BuildSummary, build_log
    from gem_data.collate import Collator
    from gem_data.events import Events, from_table
    from gem_data.growth import append
    from gem_data.inspection import inspect
    from gem_data.loader import Loader, LoaderConfig
    from gem_data.log import EventLog, History
    from gem_data.outofcore import Progress, prepare
    from gem_data.schema import Column, Counter, Schema, Source, Task
    from gem_data.sources import SourceUnavailable
    from gem_data.split import Split, time_split
    from gem_data.tail import TailLoader
    from gem_data.transfer import to_device
    from gem_data.vocabulary import Vocabulary

# Imported when first used: a schema or a log needs no torch.
_HOME = {
    "BuildSummary": "build",
    "Collator": "collate",
    "Column": "schema",
    "Counter": "schema",
    "EventLog": "log",
    "History": "log",
    "JaggedBatch": "batch",
    "JaggedIds": "batch",
    "JaggedSequence": "batch",
    "Loader": "loader",
    "LoaderConfig": "loader",
    "Schema": "schema",
    "Source": "schema",
    "SourceUnavailable": "sources",
    "Split": "split",
    "Task": "schema",
    "Vocabulary": "vocabulary",
    "Events": "events",
    "Progress": "outofcore",
    "TailLoader": "tail",
    "append": "growth",
    "assign": "balance",
    "build_log": "build",
    "from_table": "events",
    "inspect": "inspection",
    "prepare": "outofcore",
    "to_device": "transfer",
    "time_split": "split",
}

__all__ = [
    "BuildSummary",
    "Collator",
    "Column",
    "Counter",
    "EventLog",
    "Events",
    "History",
    "JaggedBatch",
    "JaggedIds",
    "JaggedSequence",
    "Loader",
    "LoaderConfig",
    "Progress",
    "Schema",
    "Source",
    "SourceUnavailable",
    "Split",
    "TailLoader",
    "Task",
    "Vocabulary",
    "__version__",
    "append",
    "assign",
    "build_log",
    "from_table",
    "inspect",
    "prepare",
    "time_split",
    "to_device",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gem_data' has no attribute {name!r}")
    return getattr(import_module(f"gem_data.{_HOME[name]}"), name)

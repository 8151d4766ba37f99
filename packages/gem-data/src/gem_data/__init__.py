"""Event logs to jagged batches: memory-mapped histories, strict time, exact resume."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gem_data.__about__ import __version__

if TYPE_CHECKING:
    from gem_data.balance import assign
    from gem_data.batches.batch import JaggedBatch, JaggedIds, JaggedSequence
    from gem_data.batches.collate import Collator
    from gem_data.batches.loader import Loader, LoaderConfig
    from gem_data.batches.tail import TailLoader
    from gem_data.batches.transfer import to_device
    from gem_data.build.growth import append
    from gem_data.build.in_memory import build_log
    from gem_data.build.out_of_core import Progress, prepare
    from gem_data.build.output import BuildSummary
    from gem_data.features.vocabulary import Vocabulary
    from gem_data.log.event_log import EventLog, History
    from gem_data.log.inspection import inspect
    from gem_data.log.split import Split, time_split
    from gem_data.schema import Column, Counter, Schema, Source, Task
    from gem_data.sources import SourceUnavailable
    from gem_data.sources.events import Events, from_table

# Imported when first used: a schema or a log needs no torch.
_HOME = {
    "BuildSummary": "build.in_memory",
    "Collator": "batches.collate",
    "Column": "schema",
    "Counter": "schema",
    "EventLog": "log.event_log",
    "History": "log.event_log",
    "JaggedBatch": "batches.batch",
    "JaggedIds": "batches.batch",
    "JaggedSequence": "batches.batch",
    "Loader": "batches.loader",
    "LoaderConfig": "batches.loader",
    "Schema": "schema",
    "Source": "schema",
    "SourceUnavailable": "sources",
    "Split": "log.split",
    "Task": "schema",
    "Vocabulary": "features.vocabulary",
    "Events": "sources.events",
    "Progress": "build.out_of_core",
    "TailLoader": "batches.tail",
    "append": "build.growth",
    "assign": "balance",
    "build_log": "build.in_memory",
    "from_table": "sources.events",
    "inspect": "log.inspection",
    "prepare": "build.out_of_core",
    "to_device": "batches.transfer",
    "time_split": "log.split",
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

"""From the schema of the data to what the model is told of it."""

from __future__ import annotations

from gem_data import Schema
from gem_model.config import ModelInputs, Source, Table
from torch import nn

from gem_train.config import InputsConfig
from gem_train.config.tree import suggest


def model_inputs(schema: Schema, config: InputsConfig, *, max_history: int) -> ModelInputs:
    """What a batch of `schema` offers the model: one table per id column, shared by the histories and the candidate.

    A schema with several sources gives a history for each. Columns of kind "ids" (any number of ids) are features of
    the candidate alone: the model reads one id an event and column.

    Raises ValueError for an excluded name that is no column, or one that cannot be left out; and for a source whose
    name a torch module has taken for itself.
    """
    known = [c.name for c in schema.columns]
    for name in config.exclude:
        if name not in known:
            raise ValueError(
                f"exclude names {name!r}, which is no column{suggest(name, known)}; there are {', '.join(known)}"
            )
        if name in schema.dense_columns:
            raise ValueError(f"exclude names {name!r}, a dense feature of the candidate: those come as one block")
    sources = []
    for source in schema.source_names if max_history else ():
        if _taken(source):
            raise ValueError(f"a history can't be called {source!r}, torch needs that name; call the source otherwise")
        shown = [name for name in schema.source_columns(source) if name not in config.exclude]
        ids = tuple((name, table_name(name)) for name in shown if name in schema.sequence_ids)
        floats = tuple((name, size) for name, size in schema.sequence_floats.items() if name in shown)
        sources.append(Source(name=source, ids=ids, floats=floats, max_len=max_history))
    sparse = tuple(name for name in schema.sparse if name not in config.exclude)
    used = {*map(table_name, sparse), *(table for source in sources for _, table in source.ids)}
    tables = {table_name(name): rows for name, rows in schema.tables.items()}
    return ModelInputs(
        tables=tuple(Table(name=n, rows=rows, dim=config.table_dim) for n, rows in tables.items() if n in used),
        sources=tuple(sources),
        sparse=tuple((n, table_name(n)) for n in sparse),
        dense=schema.dense_width,
        tasks=schema.task_names,
    )


def table_name(column: str) -> str:
    """The table of an id column: the column's name, unless a torch module has an attribute called so ("type")."""
    return f"{column}_table" if _taken(column) else column


def _taken(name: str) -> bool:
    return hasattr(nn.ModuleDict, name)

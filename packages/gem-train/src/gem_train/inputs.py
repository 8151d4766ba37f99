"""From the schema of the data to what the model is told of it."""

from __future__ import annotations

from gem_data import Schema
from gem_model.config import ModelInputs, Source, Table

from gem_train.config import InputsConfig
from gem_train.config.tree import suggest


def model_inputs(schema: Schema, config: InputsConfig, *, max_history: int) -> ModelInputs:
    """What a batch of `schema` offers the model: one table per id column, shared by the histories and the candidate.

    A schema with several sources gives a history for each. Columns of kind "ids" (any number of ids) are features of
    the candidate alone: the model reads one id an event and column.

    Raises ValueError for an excluded name that is no column, or one that cannot be left out.
    """
    known = [c.name for c in schema.columns]
    for name in config.exclude:
        if name not in known:
            raise ValueError(
                f"exclude names {name!r}, which is no column{suggest(name, known)}; there are {', '.join(known)}"
            )
        if name in schema.dense_columns:
            raise ValueError(f"exclude names {name!r}, a dense feature of the candidate: those come as one block")
    for name in config.managed:
        if name not in schema.tables:
            raise ValueError(f"managed names {name!r}, which has no table{suggest(name, schema.tables)}")
    sources = []
    for source in schema.source_names if max_history else ():
        shown = [name for name in schema.source_columns(source) if name not in config.exclude]
        ids = tuple((name, name) for name in shown if name in schema.sequence_ids)
        floats = [(name, size) for name, size in schema.sequence_floats.items() if name in shown]
        floats += [(name, 1) for name in schema.history_counters if name not in config.exclude]
        sources.append(Source(name=source, ids=ids, floats=tuple(floats), max_len=max_history))
    sparse = tuple(name for name in schema.sparse if name not in config.exclude)
    used = {*sparse, *(table for source in sources for _, table in source.ids)}
    return ModelInputs(
        tables=tuple(
            Table(
                name=n,
                rows=config.managed_rows if n in config.managed else rows,
                dim=config.table_dim,
                managed=n in config.managed,
            )
            for n, rows in schema.tables.items()
            if n in used
        ),
        sources=tuple(sources),
        sparse=tuple((n, n) for n in sparse),
        dense=schema.dense_width,
        dense_columns=tuple(schema.dense_columns.items()),
        tasks=schema.task_names,
    )

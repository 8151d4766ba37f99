"""`gem-train ls`, `show RUN` and `validate`: looking at runs and configurations without running anything."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from gem_train import runs
from gem_train.config import RunConfig, from_toml
from gem_train.config.named import function
from gem_train.errors import UserError, user_errors
from gem_train.events import finite
from gem_train.run_dir import RunDir, read_json
from gem_train.table import cell, console, results_table


def ls(arguments: argparse.Namespace) -> int:
    """List the runs of a folder, oldest first."""
    found = []
    for run in runs.find(Path(arguments.root)):
        try:
            found.append(runs.summarize(run))
        except UserError as error:  # one strange folder does not hide the others
            print(f"gem-train: {error}", file=sys.stderr)
    if arguments.json:
        plain = [dataclasses.asdict(s) | {"path": str(s.path)} for s in found]
        print(json.dumps(finite(plain), indent=2))
        return 0
    rows = [("run", "recipe", "source", "state", "step", "started (UTC)", "val NE", "test NE")]
    for s in found:
        ne = "  ".join(f"{task} {cell(value)}" for task, value in s.ne.items())
        started = (s.started or "").replace("T", " ")[:16]
        rows.append(
            (str(s.path), s.recipe, s.source or "", s.state, s.progress, started, cell(s.validation_ne), ne or "–")
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def show(folder: str) -> int:
    """What one run is, how far it came and what it found."""
    run = RunDir.open(folder)
    s = runs.summarize(run)
    changed = runs.changed_settings(run)
    lines = [f"{run.path}: recipe {s.recipe}, {s.state}" + (f" at step {s.progress}" if s.progress else "")]
    if run.env_file.exists():
        env = read_json(run.env_file)
        lines.append(f"started    {env['started']} on {env['device']}, commit {env['commit'] or 'unknown'}")
        lines.append(f"command    {env['command']}")
    if changed is None:
        lines.append(f"settings   in config.toml; there is no recipe {s.recipe!r} here to compare them with")
    else:
        lines.append("settings   " + ("as in the recipe" if not changed else "that differ from the recipe's:"))
        lines += [f"  {line}" for line in changed]
    if run.data_file.exists():
        data = read_json(run.data_file)
        split = ", ".join(f"{n:,} {part}" for part, n in data["split"].items())
        lines += [f"data       {data['source']}: {split} samples, fingerprint {data['fingerprint']}"]
        lines += [f"note: {note}" for note in data["notes"]]
    if run.model_file.exists():
        model = read_json(run.model_file)
        counted = model["parameters"]
        lines.append(
            f"model      {counted['dense']:,} dense and {counted['tables']:,} table parameters, {model['precision']}"
        )
    there = sorted(p.name + ("/" if p.is_dir() else "") for p in run.path.iterdir())
    lines.append(f"files      {', '.join(there)}")
    print("\n".join(lines))
    if run.eval_file.exists():
        console().print(results_table(read_json(run.eval_file)))
    return 0


def validate(arguments: argparse.Namespace) -> int:
    """Check configuration files as far as that goes without data that must be fetched or made; 2 if one is bad."""
    good = True
    for file in arguments.files:
        try:
            print(f"{file}: {check(from_toml(RunConfig, Path(file)))}")
        except UserError as error:
            good = False
            named = "" if file in str(error) else f"{file}: "
            print(f"gem-train: error: {named}{error}", file=sys.stderr)
    return 0 if good else 2


def check(config: RunConfig) -> str:
    """Put the configured model together without memory for its weights; says what it is.

    The source's schema is known without its data, but for a log, which is opened, and a source of your own
    (`data.load`), whose model is left out, as one of your own (`build`) is: their functions are looked up.

    Raises UserError for what would stop a run before its first step.
    """
    from gem_data import EventLog
    from gem_data.sources import movielens, synthetic
    from gem_model import GEM
    from gem_model.roles import roles

    from gem_train.assemble import lowprec_recipe
    from gem_train.inputs import model_inputs

    with user_errors("config"):
        own = [function(name).__qualname__ for name in (config.data.load, config.build) if name is not None]
    with user_errors("lowprec"):
        lowprec_recipe(config)
    if own:
        return f"valid as far as can be seen; recipe {config.recipe}, with {' and '.join(own)} of your own"
    with user_errors("data"):
        if config.data.source == "log":
            assert config.data.path is not None
            schema = EventLog.open(config.data.path).schema
        elif config.data.source == "movielens":
            schema = movielens.schema()
        else:
            schema = synthetic.schema(1, searches=config.data.synthetic.searches > 0)
        inputs = model_inputs(schema, config.inputs, max_history=config.data.max_history)
    with user_errors("model"):
        model = GEM(config.model, inputs, device="meta")
    role = roles(model)
    dense = sum(p.numel() for name, p in model.named_parameters() if role[name] == "dense")
    return f"valid; recipe {config.recipe}, {config.data.source} data, {dense:,} dense parameters"

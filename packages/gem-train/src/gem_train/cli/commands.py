"""What each command does. Heavy imports happen inside: `show` and `recipes` need no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gem_train import recipes as registry
from gem_train.config import RunConfig, from_toml, override, to_toml
from gem_train.config.tree import suggest
from gem_train.errors import UserError

if TYPE_CHECKING:
    from gem_train.run import Outcome


def run(arguments: argparse.Namespace) -> int:
    """Train, test and report."""
    if arguments.resume and not arguments.out:
        raise UserError("--resume needs the run folder to go on with: --out DIR")
    from gem_train.run_dir import RunDir

    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted and not arguments.out:
        raise UserError("torchrun has restarted this run, which can go on only in a folder with a name: --out DIR")
    # After a restart by torchrun the same command goes on with what it began.
    arguments.resume = arguments.resume or (restarted and RunDir(arguments.out).config_file.exists())
    if arguments.resume and not (arguments.recipe or arguments.config):
        config = override(RunDir.open(arguments.out).read_config(), arguments.set)
        log_exists(config)
    else:
        config = config_of(arguments)
    if arguments.out and os.environ.get("RANK", "0") == "0":  # before torch takes its seconds to load
        RunDir(arguments.out).check(config, resume=arguments.resume)
    from gem_train.run import execute

    outcome = execute(config, arguments.out, resume=arguments.resume)
    _finish(outcome)
    if outcome.unsaved:
        raise UserError(outcome.unsaved)
    return 0


def eval(arguments: argparse.Namespace) -> int:
    """Test a run again."""
    from gem_train.run_dir import RunDir

    folder = RunDir.open(arguments.run)
    log_exists(folder.read_config())
    from gem_train.run import reevaluate

    _finish(reevaluate(folder, by=arguments.by), by=arguments.by)
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Make report.html again, or a page about several runs."""
    from gem_train.report import write_comparison, write_report
    from gem_train.run_dir import RunDir

    runs = [RunDir.open(run) for run in arguments.runs]
    if len(runs) == 1:
        if arguments.out:
            raise UserError("--out is for the page about several runs; a run's report lies in its folder")
        page = write_report(runs[0], png=arguments.png)
        figures = runs[0].path / "figures"
    else:
        page = write_comparison(runs, Path(arguments.out or "comparison.html"), png=arguments.png)
        figures = page.with_suffix("")
    print(f"{page}, {figures}{os.sep}" if arguments.png else page)
    return 0


def recipes(arguments: argparse.Namespace) -> int:
    """List the recipes."""
    names = registry.names()
    width = max((len(name) for name in names), default=0)
    for name in names:
        print(f"{name:<{width}}  {registry.summary(name)}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the resolved configuration, or what a run found."""
    named = arguments.recipe
    if named and named not in registry.names() and Path(named).is_dir():
        from gem_train.cli import runs

        if arguments.set or arguments.config:
            raise UserError(f"{named} is a run folder, which --set and --config do not change")
        return runs.show(named)
    print(to_toml(config_of(arguments, data=False, or_run=True)), end="")
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Compare two runs."""
    from gem_train.cli.diff import diff

    return diff(arguments)


def export(arguments: argparse.Namespace) -> int:
    """Write a run's model for serving."""
    from gem_train.run_dir import RunDir

    folder, out = RunDir.open(arguments.run), Path(arguments.out)
    if out.exists():  # before torch takes its seconds to load
        raise UserError(f"{out} exists already; name another folder for the export")
    log_exists(folder.read_config())
    from gem_train.run import export

    manifest = export(folder, out, rows_as=arguments.rows)
    checked, dense = manifest["checked"], manifest["dense"]["file"]
    tables = sum(t["rows"] * t["dim"] for t in manifest["tables"].values())
    print(
        f"{out}: {dense}, {len(manifest['tables'])} tables of {tables:,} {manifest['rows_as']} "
        f"numbers, {manifest['program']['file']}, scorer.py; {manifest['weights']}"
    )
    worst = f"{checked['largest_logit_difference']:.2g}"
    print(
        f"on {checked['samples']:,} test samples the scorer's logits lie within {worst} of the trainer's "
        f"({checked['precision']})"
    )
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Train GEM and the baselines."""
    config = config_of(arguments)
    from gem_train.cli.compare import compare

    return compare(config, arguments)


def ls(arguments: argparse.Namespace) -> int:
    """List runs."""
    from gem_train.cli import runs

    return runs.ls(arguments)


def validate(arguments: argparse.Namespace) -> int:
    """Check configuration files."""
    from gem_train.cli import runs

    return runs.validate(arguments)


def plan(arguments: argparse.Namespace) -> int:
    """Choose a layout; 1 if none fits."""
    config = config_of(arguments)
    from gem_train.cli.plan import plan

    return plan(config, arguments)


def bench(arguments: argparse.Namespace) -> int:
    """Measure efficiency."""
    folder = Path(arguments.recipe) if arguments.recipe and (Path(arguments.recipe) / "config.toml").exists() else None
    if folder is None:
        config = config_of(arguments, or_run=True)
    else:
        from gem_train.run_dir import RunDir

        config = override(RunDir.open(folder).read_config(), arguments.set)
        log_exists(config)
    from gem_train.cli.measure import bench

    return bench(config, folder, arguments)


def ladder(arguments: argparse.Namespace) -> int:
    """Measure the techniques one by one."""
    config = config_of(arguments)
    from gem_train.cli.measure import ladder

    return ladder(config, arguments)


def data(arguments: argparse.Namespace) -> int:
    """Build a log or look at one."""
    from gem_train.cli import data as actions

    code: int = getattr(actions, arguments.action)(arguments)
    return code


def doctor(arguments: argparse.Namespace) -> int:
    """Examine the installation; 1 if something does not fit."""
    from gem_train.doctor import examine, render

    findings = examine()
    print(render(findings, as_json=arguments.json))
    return 0 if findings["healthy"] else 1


def log_exists(config: RunConfig) -> None:
    """Refuse a log that is not there, before torch takes its seconds to load."""
    path = config.data.path
    if config.data.source == "log" and not (Path(str(path)) / "manifest.json").is_file():
        raise UserError(
            f"data.path: no event log in {path}: it has no manifest.json; build one by `gem-train data prepare` and "
            f"name it by --set data.path=FOLDER"
        )


def config_of(arguments: argparse.Namespace, *, data: bool = True, or_run: bool = False) -> RunConfig:
    """The recipe or file that was named, with the overrides applied.

    With `data`, its log has to be there; with `or_run`, a run folder could have been named as well.

    Raises UserError for what is not there, or can't be understood.
    """
    if bool(arguments.recipe) == bool(arguments.config):
        raise UserError("name either a RECIPE (see `gem-train recipes`) or a --config FILE")
    named, known = arguments.recipe, registry.names()
    if named and named not in known:
        if Path(named).is_file():
            raise UserError(f"{named!r} is a file, no recipe; name it by --config")
        if or_run:
            meant = suggest(named, known)
            raise UserError(f"{named!r} is no run folder, and no recipe{meant} (there are: {', '.join(known)})")
    base = from_toml(RunConfig, Path(arguments.config)) if arguments.config else registry.load(arguments.recipe)
    config = override(base, arguments.set)
    if data:
        log_exists(config)
    return config


def _finish(outcome: Outcome, *, by: Sequence[str] = ()) -> None:
    """Print the table and write the report, on the rank that has the results."""
    if outcome.results is None:
        return
    from gem_train.report import write_report
    from gem_train.table import console, results_table, slice_table

    out = console()
    out.print(results_table(outcome.results))
    for name in by:
        out.print(slice_table(name, outcome.results["slices"][name]))
    for note in outcome.results["notes"]:
        out.print(f"note: {note}", style="bold yellow", markup=False, soft_wrap=True)
    out.print(f"report: {write_report(outcome.run)}", markup=False, highlight=False, soft_wrap=True)

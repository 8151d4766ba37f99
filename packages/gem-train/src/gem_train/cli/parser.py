"""The commands and their options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gem_train.__about__ import __version__

FEWEST_DRAWS = 100  # as gem_train.metrics.bootstrap has it, which would load numpy to tell


class _Parser(argparse.ArgumentParser):
    """Says what may have been meant by a word that is no choice, as later Pythons do."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        from gem_train.config.tree import suggest  # not for whoever makes no mistake

        found = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        if found is not None:
            message = message.replace(" (choose", suggest(found[1], re.findall(r"[\w-]+", found[2])) + " (choose", 1)
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """The parser of `gem-train`; the chosen command is in `verb`."""
    top = _Parser(
        prog="gem-train",
        description="Train, evaluate and report recommendation models of the GEM kind.",
        epilog="Exit codes: 0 done, or stopped as asked with a checkpoint; 1 what was looked at is not well, such as a "
        "plan that fits nowhere; 2 a mistake in the command, a file or a setting; 3 a loss that is not finite; "
        "4 another rank is gone; 130 interrupted.",
    )
    top.add_argument("--version", action="version", version=f"gem-train {__version__}")
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = top.add_subparsers(dest="verb", metavar="COMMAND")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=_sentence(text), parents=[common])

    run = verb("run", "train a recipe, test it and write a report")
    _recipe(run)
    run.add_argument("--out", metavar="DIR", help="the run folder (default: runs/<recipe>-<timestamp>)")
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in DIR from its latest checkpoint; RECIPE may be left out",
    )

    show = verb("show", "print a recipe's configuration as TOML, or what a run is and found")
    _recipe(show, "RECIPE|RUN", "a recipe, or a run folder")

    ls = verb("ls", "list the runs of a folder")
    ls.add_argument("root", metavar="DIR", nargs="?", default="runs", help="default: runs")
    ls.add_argument("--json", action="store_true", help="the same as JSON")

    validate = verb("validate", "check configuration files without running them")
    validate.add_argument("files", metavar="FILE", nargs="+", help="TOML, such as a run's config.toml")

    verb("recipes", "list the recipes")

    evaluate = verb("eval", "test a run again from its checkpoint")
    evaluate.add_argument("run", metavar="RUN", help="a run folder")
    evaluate.add_argument(
        "--by",
        metavar="COLUMN",
        action="append",
        default=[],
        help="figures by a column's values; new:COLUMN: for ids that training has seen or not; repeatable",
    )

    report = verb("report", "make a run's report.html again, or one page that compares several runs")
    report.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    report.add_argument("--out", metavar="FILE", help="the page that compares several (default: comparison.html)")
    report.add_argument("--png", action="store_true", help="also write every figure as PNG")

    compare = verb("compare", "train GEM and every baseline on the same batches; print who is better, and how surely")
    _recipe(compare)
    compare.add_argument(
        "--out",
        metavar="DIR",
        help="the folder of all runs; what is finished there is kept (default: runs/compare-...)",
    )
    compare.add_argument("--models", metavar="A,B,...", help="these alone (default: gem and all baselines)")
    compare.add_argument(
        "--seeds", metavar="N", type=_whole(1), default=3, help="runs of each trained model (default: 3)"
    )
    compare.add_argument("--jobs", metavar="N", type=_whole(1), default=1, help="processes side by side (default: 1)")
    compare.add_argument(
        "--draws", metavar="N", type=_whole(FEWEST_DRAWS), default=1000, help="bootstrap draws of users (default: 1000)"
    )
    compare.add_argument("--json", action="store_true", help="the same as JSON")

    diff = verb("diff", "compare two runs on the same test samples: is the difference real?")
    diff.add_argument("run_a", metavar="RUN_A", help="a tested run's folder")
    diff.add_argument("run_b", metavar="RUN_B", help="another; differences are B - A")
    diff.add_argument(
        "--draws", metavar="N", type=_whole(FEWEST_DRAWS), default=1000, help="bootstrap draws of users (default: 1000)"
    )
    diff.add_argument("--level", metavar="SHARE", type=_share, default=0.95, help="of the intervals (default: 0.95)")
    diff.add_argument("--seed", metavar="N", type=_whole(0), default=0, help="of the draws (default: 0)")
    diff.add_argument("--json", action="store_true", help="the same as JSON")

    plan = verb("plan", "choose a layout for a recipe on a machine, before there is one; 1 if nothing fits")
    _recipe(plan)
    plan.add_argument(
        "--topology",
        metavar="FILE",
        help="TOML of the machine, or the name of an example such as h200-host (default: this machine)",
    )
    plan.add_argument("--gpus", metavar="N", type=_whole(1), help="devices to use (default: all of the machine)")
    plan.add_argument(
        "--batch", metavar="N", type=_whole(1), help="samples per device and step (default: data.batch_size / devices)"
    )
    plan.add_argument(
        "--parts",
        metavar="N",
        type=_whole(1),
        help="parts that a device makes of them (default: optim.accumulate if more than 1, else as few as leave room)",
    )
    plan.add_argument("--profile", metavar="FILE", help="TOML of measured rates, instead of assumed ones")
    plan.add_argument("--spec", metavar="FILE", help="also write what the planner was told of the model, as TOML")
    plan.add_argument(
        "--inexact", action="store_true", help="also consider copies of tables that are averaged now and then (v2)"
    )
    plan.add_argument("--json", action="store_true", help="the plan as JSON")

    bench = verb("bench", "measure how well a recipe uses this machine: MFU, layers alone, where a step's time goes")
    _recipe(bench, "RECIPE|RUN", "a recipe, or a run folder, whose report then shows the figures")
    _measure(bench)
    bench.add_argument("--json", action="store_true", help="the same as JSON")
    bench.add_argument("--compile", action="store_true", help="put what works on events through torch.compile")
    bench.add_argument(
        "--by", metavar="WHAT", choices=("layer", "kernel"), default="layer", help="layer (default), or kernel as well"
    )

    ladder = verb("ladder", "switch the techniques on one at a time and measure each, on this machine and data")
    _recipe(ladder)
    _measure(ladder)
    ladder.add_argument(
        "--train-steps", metavar="N", type=_whole(0), default=50, help="training before the NE of a rung; 0: no NE (50)"
    )
    ladder.add_argument("--recompute", action="store_true", help="keep only the layers' inputs, on every rung")
    ladder.add_argument("--rung", metavar="NAME", action="append", default=[], help="measure only this; repeatable")
    ladder.add_argument(
        "--bench",
        metavar="NAME",
        default="",
        help="of this rung write efficiency.json, too, as `bench` does",
    )
    ladder.add_argument(
        "--limit",
        metavar="SECONDS",
        type=_seconds,
        default=0.0,
        help="most that measuring a rung may take (default: no limit)",
    )
    ladder.add_argument(
        "--ready-limit",
        metavar="SECONDS",
        type=_seconds,
        help="most that torch.compile and warm-up may take before that (default: 300 with --limit, else no limit)",
    )

    _data(verb("data", "build and look at event logs"), common)

    export = verb("export", "write a run's model as safetensors and Parquet, with a scorer that needs no gem-train")
    export.add_argument("run", metavar="RUN", help="a run folder")
    export.add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    export.add_argument(
        "--rows",
        metavar="KIND",
        choices=("float32", "int8", "fp8"),
        default="float32",
        help="numbers of the tables' rows: float32 (default), int8 or fp8",
    )

    doctor = verb("doctor", "say what is installed, whether it fits together, and what would run where")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    return top


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.lstrip("+-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number, {least} or more")
        return int(text)

    return read


def _share(text: str) -> float:
    value = _seconds(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a share between 0 and 1, such as 0.95")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number, 0 or more")
    return value


def _recipe(command: argparse.ArgumentParser, name: str = "RECIPE", text: str = "see `gem-train recipes`") -> None:
    command.add_argument("recipe", metavar=name, nargs="?", help=text)
    command.add_argument(
        "--config", metavar="FILE", help="a TOML file instead of a recipe, such as a run's config.toml"
    )
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change a setting, e.g. optim.lr=1e-3; repeatable",
    )


def _measure(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", metavar="DIR", help="where to write the results (default: runs/<command>-<time>)")
    command.add_argument(
        "--fill",
        metavar="SOURCE=LENGTH",
        action="append",
        default=[],
        help="random batches instead of the data's: histories of this source uniform in 1..LENGTH; repeatable",
    )
    command.add_argument("--steps", metavar="N", type=_whole(1), default=5, help="timed steps (5)")
    command.add_argument("--warm-up", metavar="N", type=_whole(0), default=2, help="steps before them (2)")
    command.add_argument("--repeats", metavar="N", type=_whole(0), default=3, help="of each layer alone (3)")


def _data(command: argparse.ArgumentParser, common: _Parser) -> None:
    from gem_train.preparing import SOURCES

    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
        return actions.add_parser(
            name,
            help=text,
            description=_sentence(text),
            epilog=epilog,
            parents=[common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    listed = "\n".join(f"  {name:<16}{kind.about}" for name, kind in SOURCES.items())
    prepare = action("prepare", "build a log of a source, in bounded memory", f"sources:\n{listed}")
    prepare.add_argument("source", metavar="SOURCE", help="see below")
    prepare.add_argument(
        "paths", metavar="PATH", nargs="*", default=[], help="the source's folder; files, folders or patterns"
    )
    prepare.add_argument("--schema", metavar="FILE", type=Path, help="files: what the columns mean, TOML or JSON")
    prepare.add_argument(
        "--format", metavar="NAME", help="files: parquet, arrow, csv, tsv or jsonl (default: by suffix)"
    )
    prepare.add_argument("--rename", metavar="FROM=TO", action="append", help="files: a column's name; repeatable")
    prepare.add_argument("--names", metavar="A,B,...", help="files: column names of text files without a header")
    prepare.add_argument("--variant", metavar="NAME", help="kuairand: pure, 1k (default) or 27k")
    _build(prepare)

    make = action("make", "build a log of simulated impressions with a known best possible NE")
    make.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="events=1000000, seed=1, drift=0.5, ..."
    )
    _build(make)

    inspect = action("inspect", "say what a log holds: schema, counts, label rates, lengths, rejects")
    inspect.add_argument("log", metavar="LOG", help="the folder of a log")
    inspect.add_argument("--json", action="store_true", help="the same as JSON")
    inspect.add_argument("--verify", action="store_true", help="read every file whole and compare its SHA-256")


def _build(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", metavar="LOG", required=True, help="the folder of the log")
    command.add_argument("--memory", metavar="SIZE", default="2GiB", help="stay within it, about (default: 2GiB)")
    command.add_argument("--threads", metavar="N", type=_whole(1), default=2, help="default: 2")
    command.add_argument(
        "--vocabulary-until",
        metavar="SECONDS",
        type=int,
        help="learn vocabularies from events up to this time alone, so that later keys are unseen as in production",
    )
    command.add_argument("--overwrite", action="store_true", help="replace a log that is there")
    command.add_argument("--restart", action="store_true", help="throw away what another, interrupted build left")

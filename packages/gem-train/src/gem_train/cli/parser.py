"""The commands and their options."""

from __future__ import annotations

import argparse

from gem_train.__about__ import __version__


def parser() -> argparse.ArgumentParser:
    """The parser of `gem-train`; the chosen command is in `verb`."""
    top = argparse.ArgumentParser(
        prog="gem-train", description="Train, evaluate and report recommendation models of the GEM kind."
    )
    top.add_argument("--version", action="version", version=f"gem-train {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = top.add_subparsers(dest="verb", metavar="COMMAND")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[common])

    run = verb("run", "train a recipe, test it and write a report")
    _recipe(run)
    run.add_argument("--out", metavar="DIR", help="the run folder (default: runs/<recipe>-<timestamp>)")
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in DIR from its latest checkpoint; RECIPE may be left out",
    )

    show = verb("show", "print a recipe's configuration as TOML")
    _recipe(show)

    verb("recipes", "list the recipes")

    evaluate = verb("eval", "test a run again from its checkpoint")
    evaluate.add_argument("run", metavar="RUN", help="a run folder")

    report = verb("report", "make a run's report.html again")
    report.add_argument("run", metavar="RUN", help="a run folder")

    doctor = verb("doctor", "say what is installed, whether it fits together, and what would run where")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    return top


def _recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", nargs="?", help="see `gem-train recipes`")
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

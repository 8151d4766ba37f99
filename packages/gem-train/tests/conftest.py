from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the synthetic log is built once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def run_cli(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """run_cli(out, *assignments, resume=False) -> exit code of `gem-train run` on the tiny configuration.

    The report, whose plots take longer than the training, is left out but for `report=True`.
    """
    from gem_train import report as reports
    from gem_train.cli import main
    from gem_train.config import to_toml
    from gem_train.testing import tiny_config

    def run(out: Path, *assignments: str, resume: bool = False, report: bool = False) -> int:
        file = tmp_path_factory.mktemp("config") / "tiny.toml"
        file.write_text(to_toml(tiny_config(cache, *assignments)))
        with pytest.MonkeyPatch.context() as patch:
            if not report:
                patch.setattr(reports, "write_report", lambda run, **_: run.report_file)
            return main(["run", "--config", str(file), "--out", str(out), *(["--resume"] if resume else [])])

    return run


@pytest.fixture(scope="session")
def finished_run(run_cli: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted tiny run; do not write into it."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert run_cli(out, report=True) == 0
    return out

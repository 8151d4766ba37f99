"""The folder of one run: everything needed to understand it, repeat it or go on with it.

config.toml        the resolved configuration; `gem-train run --config` takes it unchanged
env.json           versions, commit, device, command line
data.json          which data: source, fingerprint, split sizes, schema
model.json         the model as assembled: inputs, parameters, precisions, sharding, gathers
activations.json   what each region keeps for its backward pass, where parallel.memory plans that
metrics.jsonl      the training curve            events.jsonl   spans and messages
numerics.jsonl     how well low precision represents the layers' operands, if lowprec.numerics_every asks for it
checkpoints/       the latest states             best/          the weights with the best validation NE
eval.json          the figures                   predictions.parquet   the test predictions
report.html        all of it on one page
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from gem_train.config import RunConfig, differences, from_toml, to_toml
from gem_train.errors import UserError
from gem_train.events import finite

PACKAGES = ("gem-train", "gem-model", "gem-data", "gem-parallel", "gem-lowprec", "gem-kernels")
LIBRARIES = ("torch", "triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow")

# Settings of the data section that change no training sample: a resumed run may have others.
FREE = ("data.cache", "data.eval_batch_size", "data.fallback", "data.prefetch", "data.workers", "data.balance")


class RunDir:
    """Names the files of a run folder and reads and writes the small ones. Creates nothing by itself."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.env_file = self.path / "env.json"
        self.data_file = self.path / "data.json"
        self.model_file = self.path / "model.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.events_file = self.path / "events.jsonl"
        self.numerics_file = self.path / "numerics.jsonl"
        self.eval_file = self.path / "eval.json"
        self.plan_file = self.path / "activations.json"
        self.predictions_file = self.path / "predictions.parquet"
        self.report_file = self.path / "report.html"
        self.bad_batch_file = self.path / "nonfinite.json"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run, or a UserError that says what was looked for."""
        run = cls(path)
        if not run.path.is_dir():
            raise UserError(f"there is no run folder {run.path}")
        if not run.config_file.exists():
            raise UserError(f"{run.path} is not a run folder: it has no config.toml")
        return run

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Refuse a folder that is taken, or one that cannot be resumed with `config`."""
        if self.path.exists() and any(self.path.iterdir()):
            if not resume:
                raise UserError(
                    f"the run folder {self.path} exists already; go on with it by --resume, "
                    "or name another with --out DIR"
                )
            self._check_same_task(config)
        elif resume:
            raise UserError(f"nothing to resume: there is no run folder {self.path}; start it without --resume")

    def start(self, config: RunConfig, *, resume: bool) -> None:
        """Check the folder, make it if need be, and write config.toml and env.json."""
        self.check(config, resume=resume)
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.config_file, to_toml(config))
        write_json(self.env_file, environment())

    def forget(self) -> None:
        """Undo `start` for a run that came to no step; what others have put into the folder stays."""
        for file in (
            self.config_file,
            self.env_file,
            self.data_file,
            self.model_file,
            self.plan_file,
            self.events_file,
        ):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            self.path.rmdir()

    def read_config(self) -> RunConfig:
        """The resolved configuration of the run."""
        return from_toml(RunConfig, self.config_file)

    def _check_same_task(self, config: RunConfig) -> None:
        """Data and model make the weights what they are: a resumed run may not change them."""
        if not self.config_file.exists():
            raise UserError(f"cannot resume {self.path}: it has no config.toml, so it is not a run folder")
        before = self.read_config()
        changed = [f"build: {before.build} -> {config.build}"] if before.build != config.build else []
        changed += [
            line
            for section in ("data", "inputs", "model")
            for line in differences(getattr(before, section), getattr(config, section), section)
            if line.partition(":")[0] not in FREE
        ]
        if changed:
            raise UserError(
                f"cannot resume {self.path} with another schema or model; these settings differ from its config.toml: "
                + "; ".join(changed)
            )


def new_path(recipe: str, root: str | Path = "runs") -> Path:
    """runs/<recipe>-<timestamp>, with a counter where two runs start within one second."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path, count = Path(root) / f"{recipe}-{stamp}", 1
    while path.exists():
        count += 1
        path = Path(root) / f"{recipe}-{stamp}-{count}"
    return path


def environment() -> dict[str, Any]:
    """What ran where: versions of the packages and libraries, commit, Python, machine, device, command line."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "versions": {name: version(name) for name in (*PACKAGES, *LIBRARIES)} | {"python": platform.python_version()},
        "commit": commit(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "devices": torch.cuda.device_count() if cuda else 0,
    }


def version(package: str) -> str | None:
    """The version of an installed distribution, or else of a module imported from a path; None without either."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = getattr(sys.modules.get(package.replace("-", "_")), "__version__", None)
        return None if found is None else str(found)


def commit() -> str | None:
    """The commit that this code was run from ("-dirty" appended with local changes).

    Outside a checkout it is what GEM_COMMIT says, for a source tree that was unpacked, or None.
    """
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here)]
        done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        if done.returncode != 0:
            return os.environ.get("GEM_COMMIT")
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, timeout=5
        )
        return done.stdout.strip() + ("-dirty" if status.stdout.strip() else "")
    except (OSError, subprocess.TimeoutExpired):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON, replacing the file in one atomic move."""
    _replace(path, json.dumps(finite(value), indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file of the run, or say which one is missing or damaged."""
    if not path.exists():
        raise UserError(f"{path} is missing: the run has not got that far")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged, it is no JSON: {error}") from error

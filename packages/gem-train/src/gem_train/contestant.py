"""One contender of a comparison, in a process of its own: `python -m gem_train.contestant FOLDER`.

FOLDER/contender.json says who it is and FOLDER/config.toml how it runs; `gem_train.compare` writes both. A trained
contender goes through the same `execute` as `gem-train run`: same batches, same optimisers, same figures. A fitted one
(the base rate, the logistic regression) reads the training split once. What it leaves is what every run leaves,
`eval.json` and `predictions.parquet`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from gem_model import GEM, ModelInputs, baselines
from gem_model.ranker import Ranker

from gem_train.config import RunConfig
from gem_train.errors import Interrupted, NonFiniteError, UserError, user_errors
from gem_train.run_dir import RunDir, read_json, write_json

CONTENDER = "contender.json"


def main(folder: Path) -> None:
    """Train or fit the contender of `folder`; goes on where an earlier attempt was stopped."""
    who = read_json(folder / CONTENDER)
    run = RunDir(folder)
    config = run.read_config()
    if who["name"] in baselines.FITTED:
        fit(who["name"], config, run)
        return
    from gem_train.run import execute

    def build(config: RunConfig, inputs: ModelInputs) -> Ranker:
        if who["name"] == "gem":
            return GEM(config.model, inputs)
        made = baselines.build(who["name"], who["model"], inputs)
        assert isinstance(made, Ranker)
        return made

    execute(config, folder, resume=True, build=build)


def fit(name: str, config: RunConfig, run: RunDir) -> None:
    """A baseline without steps: fitted on the training split, asked about the test split."""
    import numpy as np
    from gem_parallel import start

    from gem_train import data as data_source
    from gem_train.evaluation import Predictions, figures
    from gem_train.events import Events

    with user_errors("start"):
        runtime = start("cpu", config.train.timeout_s)
    with runtime, user_errors("data"):
        data = data_source.open_data(config.data, runtime)
        write_json(run.data_file, data.manifest())
        predictor = baselines.build(name)
        assert not isinstance(predictor, Ranker)
        predictor.fit(data_source.without_history(data, data.split.train))
        rows = np.sort(data.split.test)
        batches = list(data_source.without_history(data, rows))
        columns = {"labels": "labels", "mask": "label_mask", "groups": "groups", "time": "time"}
        predictions = Predictions(
            sample_ids=rows,
            history=np.zeros(len(rows), np.int64),
            logits=np.concatenate([predictor(b).double().numpy() for b in batches]),
            **{ours: np.concatenate([getattr(b, theirs).numpy() for b in batches]) for ours, theirs in columns.items()},
        )
        tasks = data.schema.task_names
        predictions.write(run.predictions_file, tasks)
        write_json(run.eval_file, {"split": "test", "samples": len(rows), "model": figures(predictions, tasks)})
    with contextlib.closing(Events(run.path)) as events:  # as `gem-train ls` knows a finished run
        events.message("finished")


def told(argv: Sequence[str]) -> int:
    """Run, and say what went wrong in one line on standard error; the exit code is that of `gem-train run`."""
    try:
        main(Path(argv[0]))
        return 0
    except (UserError, NonFiniteError, Interrupted) as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return error.exit_code if not isinstance(error, Interrupted) else 130


if __name__ == "__main__":
    sys.exit(told(sys.argv[1:]))

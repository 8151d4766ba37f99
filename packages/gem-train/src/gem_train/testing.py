"""A run small enough for tests, and what their processes need to import: pytest's own modules can't be."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem_data.sources.synthetic import SyntheticConfig
from gem_model.config import GemConfig

from gem_train.config import DataConfig, InputsConfig, OptimConfig, RunConfig, TrainConfig, override

if TYPE_CHECKING:
    from gem_data import JaggedBatch
    from torch import Tensor


def tiny_config(cache: Path, *assignments: str) -> RunConfig:
    """24 steps in a second or two; every rate of logging, validating and saving falls due more than once."""
    config = RunConfig(
        recipe="tiny",
        data=DataConfig(
            source="synthetic",
            cache=str(cache),
            batch_size=32,
            eval_batch_size=128,
            max_history=12,
            synthetic=SyntheticConfig(events=2500, max_length=40),
        ),
        inputs=InputsConfig(table_dim=8, exclude=("user",)),
        model=GemConfig(
            width=16,
            heads=2,
            layers=1,
            n_tokens=6,
            n_dense=2,
            n_sum=2,
            pma_queries=1,
            recent=1,
            pffn_tokens=2,
            interaction_rank=4,
            interaction_fm=3,
            head_hidden=8,
            dropout=0.1,
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=4),
        train=TrainConfig(epochs=3, max_steps=24, eval_every=8, checkpoint_every=5, device="cpu"),
    )
    return override(config, assignments)


@contextlib.contextmanager
def assembled(config: RunConfig, folder: Path, *, resume: bool = False) -> Iterator[tuple[Any, Any]]:
    """(Data, Trainer) of a run in `folder`, in a world of one."""
    from gem_parallel import start

    from gem_train.assemble import assemble
    from gem_train.events import Events
    from gem_train.progress import Progress
    from gem_train.run_dir import RunDir

    run = RunDir(folder)
    run.start(config, resume=resume)
    events = Events(run.path)
    with start(config.train.device, 30) as runtime, contextlib.closing(events):
        yield assemble(config, runtime, run, events=events, progress=Progress(enabled=False))


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    """The same run, of another length."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=steps))


def uneven_batch(cache: Path) -> JaggedBatch:
    """12 samples with uneven weights, masked labels that are NaN, and padding in the second half alone."""
    import numpy as np
    import torch
    from gem_data import Collator, EventLog

    from gem_train.data import build

    log = EventLog.open(build(tiny_config(cache).data, "synthetic"))
    batch = Collator(log, max_history=4)(np.arange(100, 112), padding=np.arange(12) >= 10)
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(12, 2, generator=generator) < 0.6
    weights = batch.weights * torch.rand(12, generator=generator)
    return dataclasses.replace(
        batch, labels=torch.where(mask, batch.labels, torch.nan), label_mask=mask, weights=weights
    )


def uneven_logits() -> Tensor:
    """[12, 2] float32."""
    import torch

    return torch.randn(12, 2, generator=torch.Generator().manual_seed(6))


def rank_loss(rank: int, world: int, cache: Path, folder: Path) -> None:
    """What a rank of `world` gets of the loss of `uneven_batch`: value, stop, flops and its gradient, to rank.pt."""
    import torch
    from gem_parallel import start

    from gem_train.losses import global_loss

    mine = slice(12 // world * rank, 12 // world * (rank + 1))
    with start("cpu", 30, rank=rank, world=world, init_method=f"file://{folder}/store") as runtime:
        logits = uneven_logits()[mine].requires_grad_()
        batch = uneven_batch(cache).slice(mine.start, mine.stop)
        found = global_loss(logits, batch, runtime, stop=rank == 1, flops=1.0 + rank)
        (gradient,) = torch.autograd.grad(found.backward, logits)
        torch.save((found.value, found.stop, found.flops, gradient / world), folder / f"{rank}.pt")


def command(
    arguments: Sequence[str], output: Path, environment: Mapping[str, str] | None = None, *, hold: int | None = None
) -> BaseProcess:
    """`gem-train ARGUMENTS` as a process of its own, started; what it prints goes to the file `output`.

    After step `hold` it waits until it is asked to stop, or killed: no test needs to be quicker than a step. The
    processes are forked from a server that has imported everything once, so that one starts in no time. The
    report, whose plots take longer than a tiny run, is left out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gem_train.run"])
    process = context.Process(target=_command, args=(list(arguments), str(output), dict(environment or {}), hold))
    process.start()
    return process


def ranks(
    world: int, arguments: Sequence[str], folder: Path, port: int, *, restarts: int = 0, hold: int | None = None
) -> list[BaseProcess]:
    """`command` on each of `world` ranks, as torchrun would start them, after so many restarts; the outputs are
    folder/rank-R.txt. The last rank waits after step `hold`.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    shared |= {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
    shared |= {"LOCAL_WORLD_SIZE": str(world)}
    return [
        command(
            arguments,
            folder / f"rank-{r}.txt",
            {**shared, "RANK": str(r), "LOCAL_RANK": str(r)},
            hold=hold if r == world - 1 else None,
        )
        for r in range(world)
    ]


def _command(arguments: list[str], output: str, environment: dict[str, str], hold: int | None) -> None:
    import torch

    from gem_train import report
    from gem_train.cli import main
    from gem_train.trainer import Trainer

    real = Trainer.step

    def step(trainer: Trainer, *args: Any) -> Any:
        while trainer.position.step == hold and not trainer.stop.requested:
            time.sleep(0.01)
        return real(trainer, *args)

    Trainer.step = step  # type: ignore[assignment, method-assign]

    report.write_report = lambda run, **_: run.report_file  # type: ignore[assignment, misc]
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(output, "a", buffering=1) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)

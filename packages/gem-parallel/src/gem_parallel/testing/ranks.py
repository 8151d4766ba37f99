"""A function of a test file on a few processes."""

from __future__ import annotations

import importlib.util
import os
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from gem_parallel.runtime import start


def run_ranks(
    world: int, file: str, function: str, folder: Path, *args: Any, device: str = "cpu", timeout_s: float = 60
) -> list[Any]:
    """Run `function(runtime, *args)` of the test file `file` on `world` processes; everyone's result by rank. They wait
    `timeout_s` for one another: long on a busy machine, but for tests of what happens then.

    A rank that ends by itself (`os._exit(0)`) has the result None. On the CPU, the processes are forked from a clean
    server which has imported TorchRec once.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = len(list(folder.glob("job-*")))
    here = folder / f"job-{job}"
    here.mkdir()
    method = "spawn"  # on CUDA: importing fbgemm asks the driver for its devices, which no fork survives
    if device == "cpu":
        method = "forkserver"
        torch.multiprocessing.get_context(method).set_forkserver_preload(["gem_parallel.testing"])
    start_processes(
        _rank, (world, str(here), file, function, args, device, timeout_s), nprocs=world, start_method=method, join=True
    )
    results = []
    for rank in range(world):
        path = here / f"result-{rank}.pt"
        outcome = torch.load(path, weights_only=False) if path.exists() else (None, None)
        if outcome[1]:
            raise RuntimeError(f"rank {rank} of {world} failed:\n{outcome[1]}")
        results.append(outcome[0])
    return results


def _rank(
    rank: int,
    world: int,
    folder: str,
    file: str,
    function: str,
    args: tuple[Any, ...],
    device: str,
    timeout_s: float,
) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    outcome: tuple[Any, str | None]
    try:
        init = f"file://{folder}/store"
        with start(device, timeout_s=timeout_s, rank=rank, world=world, init_method=init) as runtime:
            outcome = (getattr(module, function)(runtime, *args), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    temporary = f"{folder}/.result-{rank}.pt"
    torch.save(outcome, temporary)
    os.replace(temporary, f"{folder}/result-{rank}.pt")

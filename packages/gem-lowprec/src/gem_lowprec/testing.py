"""For tests: run a function of a test file on a few ranks of one machine; what all-gathers send; which kernels a call
launches.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode


def run_ranks(file: str, function: str, folder: Path, ranks: int = 2) -> None:
    """Call `function(folder)` of the Python file `file` in `ranks` processes joined by gloo; raises what it raises.

    A test file is no importable module, so the processes load it by path. They are forked from a clean server that
    has imported FSDP2 once.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["gem_lowprec.fsdp"])
    start_processes(_rank, (file, function, folder, ranks), nprocs=ranks, join=True, start_method="forkserver")


def _rank(rank: int, file: str, function: str, folder: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        getattr(module, function)(folder)
    finally:
        dist.destroy_process_group()


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends in all-gathers of parameters while the mode is on, by the collective itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            self.sent += args[1].nbytes
        return func(*args, **(kwargs or {}))


def kernels_of(run: Callable[[], object]) -> list[str]:
    """The names of the kernels that a call launches on the GPU, in their order, as the profiler sees them; the call is
    made once before, so that nothing is built in it.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == DeviceType.CUDA]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]

"""Compile what a suite of attention will run, by forked processes side by side, before this process touches the GPU."""

from __future__ import annotations

import concurrent.futures.process
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable

import torch

from gem_kernels.bench import cases, suite

Task = tuple[str, str | None, str]  # case, activation, variant


def tasks(names: Iterable[str], acts: Iterable[str | None], wanted: Callable[[str], bool]) -> list[Task]:
    """One task for every kernel: cases that differ in lengths alone share theirs."""
    found: dict[tuple[object, ...], Task] = {}
    for name, act in itertools.product(names, acts):
        case = cases.case(name)
        if not suite.measures(case, act):
            continue
        for variant in suite.names(case, act):
            masks = tuple(side >= 0 for side in case.window)
            kernel = (act, variant, case.dim, masks, case.bias)
            if wanted(variant):
                found.setdefault(kernel, (name, act, variant))
    return list(found.values())


def build(todo: list[Task], workers: int) -> None:
    """Run every task once. One that fails is heard of when it is measured."""
    begun = time.monotonic()
    context = multiprocessing.get_context("fork")  # the imports are done once; CUDA is not to be in use yet
    done: list[bool] = []
    try:
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            if not pool.submit(torch.cuda.is_available).result():
                return
            done.extend(pool.map(_run, todo))
    except concurrent.futures.process.BrokenProcessPool as error:
        print(f"building: {error}", flush=True)
    print(f"built {sum(done)} of {len(todo)} in {time.monotonic() - begun:.1f} s", flush=True)


def _run(task: Task) -> bool:
    name, act, variant = task
    try:
        run = suite.ours(suite.Problem.make(cases.case(name), act, torch.device("cuda")))[variant]
        for what in (run.forward, run.backward):
            if what is not None:
                what()
        torch.cuda.synchronize()
    except Exception:  # said when it is measured
        return False
    return True

"""Compile what a suite of attention will run, by forked processes side by side, before this process touches the GPU."""

from __future__ import annotations

import concurrent.futures.process
import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable

import torch

from gem_kernels.bench import cases, peers, suite

Task = tuple[str, str | None, str]  # case, activation, variant or "peer <name>"


def tasks(
    names: Iterable[str], acts: Iterable[str | None], wanted: Callable[[str], bool], chosen: Iterable[str] = ()
) -> list[Task]:  # fmt: skip
    """One task for every kernel: cases that differ in lengths alone share theirs. First those of peers, which take
    longest: those named, or all.
    """
    found: dict[tuple[object, ...], Task] = {}
    for name, act in itertools.product(names, acts):
        case = cases.case(name)
        if not suite.measures(case, act):
            continue
        masks = tuple(side >= 0 for side in case.window)
        for variant in suite.names(case, act):
            if wanted(variant):
                found.setdefault((act, variant, case.dim, masks, case.bias), (name, act, variant))
        for peer in peers.COMPILED:
            if (not chosen or peer in chosen) and not case.bias and act not in suite.POLYNOMIAL:
                found.setdefault((peer, case.dim, masks), (name, act, f"peer {peer}"))
    return sorted(found.values(), key=lambda task: not task[2].startswith("peer "))


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
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            torch.cuda.empty_cache()  # of the task before
            p = suite.Problem.make(cases.case(name), act, torch.device("cuda"))
            peer = variant.removeprefix("peer ")
            run = suite.ours(p)[variant] if peer == variant else suite.theirs(p, (peer,))[peer]
            for what in (run.forward, run.backward):
                if what is not None:
                    what()
            torch.cuda.synchronize()
        except Exception:  # said when it is measured
            return False
    return True

"""What a first call waits for: `python -m gem_kernels.bench.first_call`, on a GPU, in a process and a cache of its own.

For each problem it prints the seconds of its first forward and backward pass, and of the same with other lengths, which
should compile nothing. Below them stand the kernels that were compiled, with the seconds of each stage; they overlap,
since the kernels of a call are built in threads (`gem_kernels.hopper.first_call`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

LENGTHS = ((300, 500, 64, 1000), (301, 17, 999, 128))
PROBLEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("jagged_attention", {}),
    "softmax, causal": ("jagged_attention", {"causal": True}),
    "silu": ("gdpa", {}),
}


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return time.perf_counter() - begun, result


def measure(name: str, operator: Callable[..., Tensor], options: dict[str, Any], compiled: list[str]) -> None:
    """Print a problem's first calls, and the same with other lengths."""
    for lengths in LENGTHS:
        offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        shape = (sum(lengths), 4, 128)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        most = max(lengths)
        seconds, out = _seconds(partial(operator, q, k, v, offsets, offsets, most, most, **options))
        found = {"forward": (seconds, compiled[:])}
        compiled.clear()
        seconds, _ = _seconds(partial(torch.autograd.grad, out, (q, k, v), dout))
        found["backward"] = (seconds, compiled[:])
        compiled.clear()
        for what, (seconds, kernels) in found.items():
            print(f"{name:16s} {what:9s}{seconds:6.2f} s, {len(kernels)} kernels compiled", *kernels, sep="\n    ")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m gem_kernels.bench.first_call", description=__doc__.split("\n")[0])
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("first calls are measured on a GPU, and torch sees none here")
    from triton import knobs

    compiled: list[str] = []

    def listen(*, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        stages = [("trace", times.ir_initialization), *times.lowering_stages]
        said = " ".join(f"{stage} {us / 1e6:.2f}" for stage, us in stages)
        compiled.append(f"{metadata.get('name')}: {'found in the cache' if cache_hit else said}")

    with tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir, knobs.compilation.listener = cache, listen
        seconds, _ = _seconds(lambda: torch.randn(8, device="cuda"))
        print(f"context {seconds:.2f} s", flush=True)
        import gem_kernels

        for name, (operator, options) in PROBLEMS.items():
            measure(name, getattr(gem_kernels, operator), options, compiled)


if __name__ == "__main__":
    main()

"""Kernels build for Hopper without a GPU; layers go through torch.compile whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from gem_lowprec import LowPrecisionLinear, Products, convert
from gem_lowprec.block_gemm import CONFIGS, choose
from gem_lowprec.linear import Clock
from torch import nn

BUILD = r"""
from gem_kernels.compile_check import build
from gem_lowprec import block_gemm, norms, orientations
from gem_lowprec.attention import launch, projection

wanted = ("fp8 block gemm 3x64x128 into bf16", "both orientations: gradient by hand", "norm to fp8 layer 512",
          "norm to fp8 layer 1024 2 rows ahead",
          "fp8 attention forward d128", "fp8 attention forward and rows d128", "fp8 attention operands d128",
          "fp8 projection of attention", "fp8 projection of attention, normed and turned")
kernels = block_gemm.compile_cases() + orientations.compile_cases() + norms.compile_cases()
kernels += launch.compile_cases() + projection.compile_cases()
for case in kernels:
    if case.name in wanted:
        print(case.name, build(case, 90), sep=" | ")
"""


def test_kernels_build_for_hopper() -> None:
    """(Almost) without spills; the product is made of E4M3 warpgroup instructions."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 9, lines
    spilled = {line.split(" | ")[0]: int(re.search(r"spilled +(\d+) B", line)[1]) for line in lines}
    # Of 64 tokens' cosines, while 128 tokens' sums are in registers; for each of two consumers.
    assert spilled.pop("fp8 projection of attention, normed and turned") <= 1600, lines
    for name in ("fp8 attention forward d128", "fp8 attention forward and rows d128", "fp8 projection of attention"):
        assert spilled.pop(name) <= 600, lines  # between tiles, none in the loops over keys or K
    assert max(spilled.values()) <= 64, lines  # of a quantiser that three programs of an SM are worth more to
    assert spilled["fp8 block gemm 3x64x128 into bf16"] == 0
    for line in lines:
        assert ("wgmma.mma_async.e4m3" in line) == any(w in line for w in ("gemm", "forward", "projection"))


NATIVE = r"""
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gem_kernels.compile_check import build
from gem_lowprec.mx_gemm import compile_cases

(case,) = compile_cases()
print(build(case, 100))
source = ASTSource(fn=case.kernel, signature=dict(case.signature), constexprs=dict(case.constants))
ptx = triton.compile(source, target=GPUTarget("cuda", 100, 32)).asm["ptx"]
print(*sorted(set(re.findall(r"tcgen05\.mma\S*|mma\.sync\S*", ptx))))
"""


def test_mxfp8_products_are_block_scaled_instructions_on_blackwell() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", NATIVE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    resources, instructions = done.stdout.splitlines()
    assert re.search(r"spilled +0 B", resources), resources
    assert instructions.split() == ["tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X"]


def test_the_configuration_follows_the_shape() -> None:
    """Few tiles leave programs idle: then K is cut, or the tile changes."""
    assert choose(65536, 2048, 16, 132) == (CONFIGS["3x64x128"], 1)
    config, splits = choose(1024, 1024, 512, 132)
    height, width = config.tile
    assert 100 < -(-1024 // height) * -(-1024 // width) * splits <= 264
    assert choose(128, 128, 8, 132)[1] == 1
    assert choose(1024, 1024, 512, 132, by_rows=True) == (CONFIGS["2x64x128"], 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_row", "mxfp8"])
def test_a_converted_model_compiles_without_a_graph_break(recipe) -> None:
    torch.manual_seed(0)
    model = Model()
    conversion = convert(model, recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for step, tokens in enumerate((33, 70, 129)):
        conversion.set_step(step, step)
        x = torch.randn(tokens, 128)
        found = []
        for run in (model, compiled):
            leaf = x.clone().requires_grad_()
            run(leaf).square().sum().backward()
            found.append([leaf.grad, *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
        for eager, traced in zip(*found, strict=True):
            torch.testing.assert_close(traced, eager)


def test_a_new_step_is_read_and_not_compiled_anew() -> None:
    layer = LowPrecisionLinear(64, 64, products=Products(dgrad="mxfp8", wgrad="mxfp8", stochastic=True))
    builds = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        builds.append(graph)
        return graph

    compiled = torch.compile(layer, backend=count, fullgraph=True)
    gradients = []
    for step in (0, 1, 2, 1):
        layer.clock.step = step
        x = torch.ones(8, 64, requires_grad=True)
        compiled(x).square().sum().backward()
        gradients.append(x.grad)
    assert len(builds) == 1
    assert torch.equal(gradients[1], gradients[3])
    assert not torch.equal(gradients[0], gradients[1])


def test_the_operators_keep_their_promises() -> None:
    x = torch.randn(20, 64, requires_grad=True)
    w = torch.randn(48, 64, requires_grad=True)
    for bias in (torch.randn(48, requires_grad=True), None):
        for settings in ("fp8_block|fp8_block|fp8_block|1|0||False", "mxfp8|bf16|skip|1|0||False"):
            inputs = (x, w, bias, Clock(step=3).state, 7, 1, settings, True)
            names = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
            torch.library.opcheck(torch.ops.gem_lowprec.linear.default, inputs, test_utils=names)


def test_a_watched_or_intermittent_layer_breaks_the_graph_and_still_runs() -> None:
    layer = LowPrecisionLinear(64, 64, products=Products(forward="mxfp8", wgrad_every=2))
    compiled = torch.compile(layer, backend="aot_eager")
    for step in (0, 1):
        layer.clock.step, layer.weight.grad = step, None
        compiled(torch.randn(8, 64)).sum().backward()
        assert (layer.weight.grad is None) == (step == 1)

"""What the Hopper backend says without a GPU: which problems it takes, what it would compile, and that the
benchmark's gate closes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from gem_kernels import flops
from gem_kernels.bench import __main__ as bench
from gem_kernels.bench import cases, gate, suite
from gem_kernels.dispatch import Problem
from gem_kernels.hopper import launch, launch_backward, support
from gem_kernels.jagged_attention import jagged_attention


def problem(*features: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> Problem:
    return Problem(
        op="jagged_attention", device=torch.device("cuda"), dtype=dtype, head_dim=head_dim, features=frozenset(features)
    )


def test_what_it_takes() -> None:
    assert support.applies(problem())[0]
    assert support.applies(problem("shared_q", "return_lse", dtype=torch.float16, head_dim=64))[0]
    assert support.applies(problem("causal", "window", "grouped", "bias", head_dim=96))[0]


@pytest.mark.parametrize(
    ("refused", "because"),
    [
        (problem(dtype=torch.float32), "float32"),
        (problem(head_dim=100), "100"),
        (problem(head_dim=256), "256"),
    ],
)
def test_what_it_refuses_and_why(refused: Problem, because: str) -> None:
    able, reason = support.applies(refused)
    assert not able
    assert because in reason


@pytest.mark.slow
def test_kernels_build_for_hopper_without_a_gpu() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    for match in ("gdpa silu hopper forward d64 3x128-lean causal", "jfa hopper backward d64 stream causal"):
        command = [sys.executable, "-m", "gem_kernels.compile_check", "--arch", "90", "--match", match]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "wgmma.mma_async.bf16" in done.stdout
        assert "one by one" not in done.stdout


CARRIED = r"""
import re, sys
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from gem_kernels.hopper import support

class Seen(Exception):
    pass

def stop_after_ttgir(*given):
    if not given:
        return "ttgir", "ttgir"  # of the cache's key
    def stop(module, metadata):
        raise Seen(str(module))
    given[1]["llir"] = stop

knobs.runtime.add_stages_inspection_hook = stop_after_ttgir

for case in support.compile_cases("softmax"):
    if "d64" not in case.name or not re.search("3x|backward|dq", case.name):
        continue
    names = case.kernel.arg_names
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in case.divisible}
    source = GluonASTSource(case.kernel, dict(case.signature), dict(case.constants), attributes)
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    except Seen as seen:
        text = str(seen)
    parts = re.split(r"\n    (?:default \{|partition\d+\()", text)[1:]
    loops = [re.search(r"scf\.(?:for [^\n]*?iter_args|while )\(([^)]*)\)", part) for part in parts]
    print(" ".join(case.name.split()[2:]), [loop.group(1).count("=") for loop in loops])
"""


@pytest.mark.slow
def test_loops_over_tiles_carry_the_whole_record() -> None:
    """Triton 3.6 once dropped fields of the tile record from a loader's loop, which then waited for ever."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", CARRIED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        # consumers: step, tile, rows, the buffer before, in turns the block; loaders: place in the list, tile, in turns
        # whose; and then step, tile, rows
        "forward d64 3x128 [4, 4, 4, 2, 3]",
        "forward d64 3x128-lean [4, 4, 4, 2, 3]",
        "forward d64 3x128-lean causal [4, 4, 4, 2, 3]",
        "forward d64 3x128-lean window [4, 4, 4, 2, 3]",
        "forward d64 3x128-halves [4, 4, 4, 2, 3]",
        "forward d64 3x64 [5, 5, 5, 3, 3]",
        "forward d64 3x64 bias [5, 5, 5, 3, 3]",
        "forward d64 3x64 causal bias [5, 5, 5, 3, 3]",
        "forward d64 3x64-halves [5, 5, 5, 3, 3]",
        "forward d64 3x64-once [5, 5, 5, 3, 3]",
        # consumers: step, visit and the tile's rows; the loader: tile, step, visit and records; then dQ from dS
        *(
            f"{kernel}{mask}{bias} {carried}"
            for mask in ("", " causal", " window")
            for kernel, bias, carried in (
                ("backward d64 stream", "", [3, 3, 3, 4]),
                ("backward d64 short-keys", "", [1, 1]),
                ("backward d64 short-queries", "", [1, 1]),
                ("backward d64 stream", " bias", [3, 3, 4]),  # two consumers
                ("d64", "", [3, 3, 3, 3, 3]),
            )
            if not (bias and mask == " window")
        ),
    ]


def test_case_names_are_checked() -> None:
    assert cases.case("self-half-512").q.max() <= 512
    with pytest.raises(ValueError, match="unknown case 'nope'"):
        cases.case("nope")


def test_the_recorded_command_leaves_out_where_the_file_went() -> None:
    words = ["gdpa", "--out", "x.json", "--case", "pma", "--commit=abc", "--rep", "9"]
    assert bench._without(words, "--out", "--commit") == ["gdpa", "--case", "pma", "--rep", "9"]


def test_every_choice_is_a_configuration_that_is_tested() -> None:
    for sizes, steps in (  # means and maxima of queries and keys; steps with softmax and with an activation
        ((64, 500, 64, 1024), (64, 64)),
        ((1024, 32, 1024, 32), (64, 64)),
        ((256, 256, 512, 512), (64, 64)),
        ((512, 256, 1024, 256), (64, 128)),
        ((1024, 256, 1024, 256), (128, 128)),
        ((512, 512, 1024, 1024), (128, 128)),
        ((2048, 2048, 4096, 4096), (128, 128)),
    ):
        for softmax, step in zip((True, False), steps, strict=True):
            for dim, whole in ((32, True), (64, True), (96, False), (128, True)):
                chosen = launch.choose_forward(*sizes, dim=dim, softmax=softmax, masked=False)
                assert chosen in launch.FORWARD.values()
                assert chosen.step == step
                assert chosen.halves == (softmax and whole and not chosen.once)
                assert launch.choose_forward(*sizes, dim=dim, softmax=softmax, masked=True) in launch.FORWARD.values()
    assert launch.choose_forward(512, 512, 1024, 1024, dim=128, softmax=True, masked=True, bias=True).step == 64
    for max_k, masked, once in ((64, False, True), (65, False, False), (64, True, False)):
        chosen = launch.choose_forward(500, 30, 1024, max_k, dim=64, softmax=True, masked=masked)
        assert (chosen is launch.FORWARD["3x64-once"]) == once


@pytest.mark.parametrize("limit", [1, 1 << 20, 1 << 40])
def test_windows_of_the_workspace_hold_every_sequence_once(limit: int) -> None:
    lengths = np.array([0, 1, 64, 65, 1000, 0, 0, 300, 127, 64])
    offsets = np.concatenate([[0], lengths.cumsum()])
    plan = launch_backward.Workspace.plan(int(offsets[-1]), len(lengths), 4, 1000, 500, limit)
    first = offsets[:-1] // 64 + np.arange(len(lengths))
    last = first + -(-lengths // 64)
    assert (last[:-1] <= first[1:]).all()  # no two sequences share a query block
    assert last.max() <= plan.query_blocks
    inside = np.array([[a <= f < b for f in first] for a, b in plan.windows])
    assert (inside.sum(0) == 1).all()
    for (a, _), row in zip(plan.windows, inside, strict=True):
        assert (last[row] - a <= plan.window_blocks).all()
    assert (len(plan.windows) == 1) == (limit == 1 << 40)


def test_choice_of_the_backward() -> None:
    launch_backward._announce_long_sequences.cache_clear()
    choose = launch_backward.choose_backward
    assert choose(1000, 64) is launch_backward.BACKWARD["short-keys"]
    assert choose(64, 1000) is launch_backward.BACKWARD["short-queries"]
    assert choose(65, 65) is choose(16384, 16384) is launch_backward.BACKWARD["stream"]
    with pytest.warns(UserWarning, match="sequences this long"):
        assert choose(1 << 16, 1 << 16) is None


def test_choice_of_the_backward_with_masks_and_groups() -> None:
    choose = launch_backward.choose_backward
    assert choose(64, 1000, group=2) is launch_backward.BACKWARD["stream"]  # its dK and dV would be sums over heads
    assert choose(1000, 64, group=4, right=0) is launch_backward.BACKWARD["short-keys"]
    assert choose(1 << 16, 1 << 16, left=256, right=0) is launch_backward.BACKWARD["stream"]


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (5, -1), (0, 0), (64, 0), (63, 1), (100, 70)])
def test_the_workspace_holds_every_key_block_that_a_query_block_sees(left: int, right: int) -> None:
    from gem_kernels.testing import seen

    for len_q, len_k in ((200, 200), (130, 300), (300, 129), (1, 190)):
        mask = seen(len_q, len_k, False, (left, right)).numpy()
        blocks = [
            [bool(mask[i : i + 64, j : j + 64].any()) for j in range(0, len_k, 64)] for i in range(0, len_q, 64)
        ]  # fmt: skip
        most = launch_backward.keys_in_sight(len_k, left, right)
        places = [[j % most for j, inside in enumerate(row) if inside] for row in blocks]
        assert all(len(set(row)) == len(row) for row in places)
        assert most <= -(-len_k // 64)


def test_short_kernels_take_short_sequences_only() -> None:
    keys, queries = (launch_backward.BACKWARD[name] for name in ("short-keys", "short-queries"))
    assert keys.fits(1000, 64)
    assert not keys.fits(64, 65)
    assert queries.fits(64, 1000)
    assert not queries.fits(65, 64)
    assert not queries.fits(64, 64, group=2)


def small() -> suite.Problem:
    torch.manual_seed(0)
    return suite.Problem.make(
        cases.Case("small", np.array([5, 0, 40]), np.array([7, 3, 40])), None, torch.device("cpu")
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: suite.Problem) -> torch.Tensor:
    return jagged_attention(q, k, v, *p.where, bias=p.bias, window=p.case.window, backend="reference")


@pytest.mark.parametrize("options", [{"window": (-1, 0)}, {"window": (3, 1)}, {"bias": True}, {"dim": 24}])
def test_the_gate_knows_masks_bias_and_head_dimensions(options) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    case = cases.Case("small", np.array([5, 0, 40, 9]), np.array([7, 3, 40, 2]), **options)
    p = suite.Problem.make(case, None, torch.device("cpu"))
    assert p.q.shape[2] == options.get("dim", cases.DIM)
    variant = suite._by_autograd(lambda *x: attend(*x, p), (p.q, p.k, p.v), p.dout)
    assert max(suite.gate(p, {"right": variant}, ("forward", "backward")).values()) < gate.TOLERANCE
    if max(case.window) >= 0:
        wrong = suite._by_autograd(
            lambda *x: jagged_attention(*x, *p.where, backend="reference"), (p.q, p.k, p.v), p.dout
        )
        assert suite.gate(p, {"wrong": wrong}, ("forward",)) == {}
        seen = sum(
            int((~gate.hidden(torch.zeros(1, q, k), case.window)).sum()) for q, k in zip(case.q, case.k, strict=True)
        )
        assert seen == flops.pairs(case.q, case.k, window=case.window).sum()


def test_the_baseline_is_gdpa() -> None:
    script = BASELINE
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


BASELINE = """
import torch
from gem_kernels import gdpa, interpreter
from gem_kernels.bench import baseline
from gem_kernels.testing import offsets_of, relative_error
interpreter.install()
torch.manual_seed(0)
lq, lk = [70, 0, 5], [33, 4, 0]
q, k, v, dout = (torch.randn(sum(n), 2, 16) for n in (lq, lk, lk, lq))
where = offsets_of(lq), offsets_of(lk), 70, 33
wide = [x.double().requires_grad_() for x in (q, k, v)]
expected = gdpa(*wide, *where, activation="silu", scale=0.3, backend="reference")
assert relative_error(baseline.forward(q, k, v, *where, "silu", 0.3), expected) < 1e-5
grads = torch.autograd.grad(expected, wide, dout.double())
for got, wanted in zip(baseline.backward(dout, q, k, v, *where, "silu", 0.3), grads):
    assert relative_error(got, wanted) < 1e-5
"""


def test_the_gate_lets_a_right_kernel_through() -> None:
    p = small()
    variant = suite._by_autograd(lambda *x: attend(*x, p), (p.q, p.k, p.v), p.dout)
    errors = suite.gate(p, {"right": variant}, ("forward", "backward"))
    assert set(errors) == {("right", "forward"), ("right", "backward")}
    assert max(errors.values()) < gate.TOLERANCE


@pytest.mark.parametrize("spoil", [lambda x: x * 1.02, lambda x: x.index_fill(0, torch.tensor([6]), float("nan"))])
def test_the_gate_stops_a_wrong_kernel(spoil, capsys) -> None:  # type: ignore[no-untyped-def]
    p = small()
    variant = suite._by_autograd(lambda *x: spoil(attend(*x, p)), (p.q, p.k, p.v), p.dout)
    right = suite._by_autograd(lambda *x: attend(*x, p), (p.q, p.k, p.v), p.dout)
    assert set(suite.gate(p, {"wrong": variant, "right": right}, ("forward",))) == {("right", "forward")}
    assert "wrong forward: NOT TIMED: RuntimeError: wrong: relative error" in capsys.readouterr().out

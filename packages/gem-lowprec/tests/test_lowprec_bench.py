"""What the benchmark checks before it times, on small sizes; times themselves are no test."""

from __future__ import annotations

import pytest
import torch
from gem_lowprec.bench import __main__ as bench
from gem_lowprec.bench import problems, timing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "problem",
    [
        lambda: problems.quantiser("q", DEVICE, 140, 260),
        lambda: problems.norm("n", DEVICE, 40, 300, layer=True),
        lambda: problems.norm("n", DEVICE, 40, 300, layer=False),
        lambda: problems.layer("l", DEVICE, 300, 256, 384),
    ],
    ids=["quantiser", "layer-norm", "rms-norm", "layer"],
)
def test_every_variant_passes_its_own_check(problem):
    torch.manual_seed(0)
    p = problem()
    assert p.runs
    for variant in p.runs:
        assert p.check(variant) <= p.limit, variant
        assert problems.bytes_of(p, variant) > 0


def test_a_wrong_variant_is_refused():
    p = problems.quantiser("q", DEVICE, 128, 128)
    right = p.runs["1x128"]
    p.runs["1x128"] = lambda: type(right())(row=problems._row(torch.ones(128, 128, device=DEVICE)), col=None, sums=None)
    with pytest.raises(RuntimeError, match="1x128 is wrong"):
        bench._gate(p)


def test_cases_are_listed_and_unknown_ones_refused(capsys):
    assert bench.main(["--list", "linear", "--skip", "linear-65536-5"]) == 0
    listed = capsys.readouterr().out.split()
    assert listed[0] == "linear-65536-2048-2048"
    assert not any(name.startswith("linear-65536-5") for name in listed)
    with pytest.raises(SystemExit):
        bench.main(["nothing"])
    if DEVICE.type == "cpu":
        assert bench.main(["gemm", "--jobs", "1"]) == 2


def test_the_table_has_a_line_for_every_variant():
    row = {
        "case": "linear-1", "variant": "fp8_block", "ms": 1.5, "tflops": 900.0, "of_gemm": 1.2, "of_copy": 0.3,
        "unit": "tflops", "peers": {"bf16": 600.0},
    }  # fmt: skip
    other = {**row, "case": "norm", "unit": "gbps", "gbps": 3000.0, "of_gemm": None, "peers": {}}
    lines = bench._table([row, {**row, "variant": "fp8_row"}, other]).splitlines()
    assert len(lines) == 4
    assert "1.50  bf16 600" in lines[1]
    assert "bf16" not in lines[2]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_kernels_of_a_call():
    x = torch.ones(2**24, device=DEVICE)
    (name, launches, microseconds), *others = timing.kernels(lambda: x.mul_(0.5).mul_(2.0))
    assert not others, others
    assert "elementwise" in name
    assert launches == 2
    assert 4 < microseconds < 1000  # 128 MB, twice

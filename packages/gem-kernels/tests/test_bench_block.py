"""The block suite, but for the clock: what they compare is what they say, and the gate closes."""

import pytest
import torch
from gem_kernels import flops
from gem_kernels.bench import __main__ as bench
from gem_kernels.bench import block
from gem_kernels.testing import relative_error

LENGTHS = [70, 1, 130, 40]


@pytest.fixture(autouse=True)
def one_head(monkeypatch, device):
    """The interpreter takes its time."""
    if device.type == "cpu":
        monkeypatch.setattr(block, "HEADS", 1)


def variants(p, names=("triton", "our window 64", "our full attention")):
    runs = {name: (run, inputs) for name, (run, inputs) in block.ours(p).items() if name in names}
    return {**runs, **{name: (run, p.inputs) for name, run in block.others(p, names).items()}}


@pytest.mark.parametrize("name", ["block-d64-rope", "block-d128-silu-rope", "window-64-4096"])
def test_the_gate(device, name, capsys):
    p = block.problem(name, device, LENGTHS)
    dout = torch.randn_like(p.inputs[0])
    (run, inputs) = variants(p)["triton"]
    errors = block.gate(p, "triton", block._Given(run, inputs, dout), dout, ("forward", "backward"))
    assert set(errors) == {"forward", "backward"}
    wrong = block._Given(lambda *x: run(*x) * 1.02, inputs, dout)
    for what in ("forward", "backward"):
        with pytest.raises(RuntimeError, match=f"{name}: bent {what} is wrong"):
            block.gate(p, "bent", wrong, dout, (what,))
    nan = block._Given(lambda *x: run(*x) + torch.full((), float("nan"), device=device), inputs, dout)
    with pytest.raises(RuntimeError, match="nan"):
        block.gate(p, "poison", nan, dout, ("forward",))


def test_blocks_as_sequences_are_blocks(device):
    """The peers get the blocks as sequences; the reference of the packed form is that of the plain one."""
    p = block.problem("block-d64-rope", device, [70, 0, 64, 3])
    cut = block.jagged.block_offsets(p.offsets, 137, 64)
    count = int((cut < cut[-1]).sum())
    assert cut[: count + 1].tolist() == [0, 64, 70, 134, 137]
    got = block.jagged_attention(*p.inputs, cut[: count + 1], cut[: count + 1], 64, 64, backend="reference")
    expected = block.block_attention(*p.inputs, p.offsets, backend="reference")
    assert relative_error(got, expected) < 1e-5


def test_rows_of_a_case(monkeypatch, device):
    make = block.problem
    monkeypatch.setattr(block, "problem", lambda name, where: make(name, where, LENGTHS))
    monkeypatch.setattr(block.timing, "captured", lambda run: run)
    monkeypatch.setattr(block.timing, "interleaved", lambda runs, rounds, rep: dict.fromkeys(runs, 0.5))
    ceilings = {"copy_tbps": 1e-3, "gemm_bf16_tflops": 1e-3}
    shared = {
        "passes": ("forward", "backward"),
        "rounds": 1,
        "rep": 1,
        "ceilings": ceilings,
        "skip": ("hopper",),
    }
    rows = block.measure("window-64-4096", device, only="", peer_names=("none",), gate_only=False, **shared)
    assert [(row["variant"], row["pass"]) for row in rows] == [("triton", "forward"), ("triton", "backward")]
    cost = flops.attention(LENGTHS, heads=block.HEADS, head_dim=128, window=(64, 0))
    assert rows[0]["tflops"] == round(cost.forward_flops / 0.5 / 1e9, 1)
    assert rows[1]["gbps"] == round(cost.backward_bytes / 0.5 / 1e6, 1)
    assert block.measure("block-d64-rope", device, only="", peer_names=(), gate_only=True, **shared) == []


def test_what_is_wrong_or_raises_is_stepped_over(monkeypatch, device, capsys):
    make = block.problem
    monkeypatch.setattr(block, "problem", lambda name, where: make(name, where, LENGTHS))
    monkeypatch.setattr(block.timing, "captured", lambda run: run() and run)
    monkeypatch.setattr(block.timing, "interleaved", lambda runs, rounds, rep: dict.fromkeys(runs, 0.5))
    run, _ = block.ours(make("window-64-4096", device, LENGTHS))["triton"]
    found = {"triton": run, "bent": lambda q, k, v: run(q, k, v) * 1.02}
    monkeypatch.setattr(block, "ours", lambda p, only, skip: {name: (r, p.inputs) for name, r in found.items()})

    def broken(*_x):
        raise NotImplementedError("no windows here")

    monkeypatch.setattr(block, "others", lambda p, names: {"torch": broken})
    ceilings = {"copy_tbps": 1.0, "gemm_bf16_tflops": 1.0}
    rows = block.measure(
        "window-64-4096", device, passes=("forward",), only="", skip=(), peer_names=(), rounds=1, rep=1,
        ceilings=ceilings, gate_only=False,
    )  # fmt: skip
    assert [(row["variant"], row["peers"]) for row in rows] == [("triton", {"copy": rows[0]["gbps"]})]
    said = capsys.readouterr().out
    assert "bent forward is wrong" in said
    assert "peer torch forward: NotImplementedError: no windows here" in said


def test_a_case_of_another_suite_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["block", "--case", "rms-256"])
    assert "block has no case rms-256" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown case 'pma'"):
        block.problem("pma", torch.device("cpu"))

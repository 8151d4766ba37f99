"""The norms suite without a GPU: its gate closes on wrong results, and every case passes it in the interpreter."""

import functools

import pytest
import torch
from gem_kernels.bench import __main__ as bench
from gem_kernels.bench import norms, timing
from gem_kernels.testing import relative_error


@pytest.mark.parametrize("name", norms.NAMES)
def test_every_case_is_right(name, device):
    torch.manual_seed(0)
    p = norms.problem(name, device, shrink=2**13)
    triton, reference = (functools.partial(p.ours, backend=backend) for backend in ("triton", "reference"))
    assert set(norms.gate(p, triton, ("forward", "backward"))) == {"forward", "backward"}
    peer, ours = norms.Variant(p.eager, p.inputs), norms.Variant(reference, p.inputs)
    for what in ("forward", "backward"):  # torch as a peer computes the same
        for a, b in zip(peer.do(what), ours.do(what), strict=True):
            assert relative_error(a, b) < norms.TOLERANCE


def test_variants_run_where_they_are_asked_for(device):
    p = norms.problem("layer-512", device, shrink=2**13)
    assert list(norms.ours(p)) == ["triton"]
    found = norms.ours(p, "triton", ("4-stages",))
    assert list(found) == ["triton", "triton 1-warp"]
    p = norms.problem("layer-residual-384", device, shrink=2**13)
    found = norms.ours(p, "triton")
    assert list(found) == ["triton", "triton 1-warp", "triton 1-warp-4-stages"]
    norms.gate(p, found["triton 1-warp"], ("backward",))
    linear = norms.problem("norm-linear-256-256", device, shrink=2**13)
    assert list(linear.variants) == ["resident", "streamed"]


def test_the_gate_closes():
    p = norms.problem("rms-256", torch.device("cpu"), shrink=2**13)
    with pytest.raises(RuntimeError, match="rms-256: rms_norm forward is wrong"):
        norms.gate(p, lambda x, w: p.eager(x, w) * 1.02, ("forward",))
    with pytest.raises(RuntimeError, match="backward is wrong"):
        norms.gate(p, lambda x, w: p.eager(x, w.detach()) + 0.0 * w.sum(), ("forward", "backward"))
    with pytest.raises(RuntimeError, match=r"relative errors \[nan\]"):
        norms.gate(p, lambda x, w: torch.empty_like(x), ("forward",))
    with pytest.raises(ValueError, match="unknown case 'rms'"):
        norms.problem("rms", torch.device("cpu"))


def test_the_table_is_in_gigabytes_per_second():
    row = {
        "case": "rms-256", "pass": "forward", "op": "rms_norm", "variant": "triton", "ms": 0.07, "tflops": None,
        "gbps": 3800.0, "of_gemm": None, "of_copy": 0.9, "peers": {"torch": 3100.0}, "unit": "gbps",
    }  # fmt: skip
    head, line = bench._table([row]).splitlines()
    assert "peers (GB/s)" in head
    assert line.split() == ["rms-256", "forward", "rms_norm", "triton", "0.070", "3800.0", "0.900", "torch", "3100"]


def test_a_case_of_another_suite_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["norms", "--case", "pma"])
    assert "norms has no case pma" in capsys.readouterr().err


def test_rows_of_a_case(monkeypatch, device):
    """All but the clock and the graph capture."""
    small = functools.partial(norms.problem, shrink=2**13)
    monkeypatch.setattr(norms, "problem", small)
    monkeypatch.setattr(norms.timing, "captured", lambda run: run)
    times = {"triton": 0.5, "peer torch": 2.0, "peer copy": 0.4}
    monkeypatch.setattr(norms.timing, "interleaved", lambda runs, rounds, rep: {name: times[name] for name in runs})
    options = {"peer_names": ("torch", "copy"), "rounds": 1, "rep": 1, "ceilings": {"copy_tbps": 1e-3}}
    passes = ("forward", "backward")
    rows = norms.measure("rms-residual-512", device, passes=passes, gate_only=False, **options)
    cost = small("rms-residual-512", device).cost
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    for row, moved in zip(rows, (cost.forward_bytes, cost.backward_bytes), strict=True):
        assert row["gbps"] == round(moved / 0.5 / 1e6, 1)
        assert row["of_copy"] == round(row["gbps"] / 1e3 / 1e-3, 3)
        assert row["peers"] == {"torch": round(moved / 2.0 / 1e6, 1), "copy": round(moved / 0.4 / 1e6, 1)}
    assert norms.measure("rms-residual-512", device, passes=passes, gate_only=True, **options) == []


def test_what_is_wrong_is_stepped_over(monkeypatch, device, capsys):
    p = norms.problem("rms-256", device, shrink=2**13)
    monkeypatch.setattr(norms, "problem", lambda name, where: p)
    monkeypatch.setattr(norms, "ours", lambda p, only, skip: {"triton": lambda x, w: p.eager(x, w) * 1.02})
    monkeypatch.setattr(norms.timing, "captured", lambda run: run)
    monkeypatch.setattr(norms.timing, "interleaved", lambda runs, rounds, rep: dict.fromkeys(runs, 0.5))
    options = {"peer_names": ("torch",), "rounds": 1, "rep": 1, "ceilings": {}, "gate_only": False}
    assert norms.measure("rms-256", device, passes=("forward",), **options) == []
    assert "triton: rms-256: rms_norm forward is wrong" in capsys.readouterr().out


def test_a_copy_of_as_many_bytes(device):
    (copied,) = timing.copy_of(1000, device)()
    assert copied.nbytes == 500
    assert (copied == -1).all()

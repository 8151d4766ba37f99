"""The ladder: that its operators compute one function, that rungs say what they can't, and that a climb is complete."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import time
from types import SimpleNamespace

import pytest
import torch
from gem_kernels import gdpa, jagged_attention
from gem_kernels.nn import PMA
from gem_lowprec.attention import _say
from gem_model import GEM, GemConfig
from gem_model.sequence import uniform_offsets
from gem_model.testing import example_inputs, random_batch
from gem_parallel import start
from gem_train.cli import main
from gem_train.config import to_toml
from gem_train.instruments import forward_flops
from gem_train.ladder import climb as climbing
from gem_train.ladder import results
from gem_train.ladder.climb import Options, climb
from gem_train.ladder.hstu import HstuLayer, layer_flops, time_hstu
from gem_train.ladder.peers import Operators, fp8_attention, install, padded_gdpa, padded_sdpa
from gem_train.ladder.rungs import RUNGS, Rung, Stand, never
from gem_train.measuring.batches import half_filled
from gem_train.measuring.bench import StepTimes, compile_layers
from gem_train.measuring.recompute import recompute
from gem_train.testing import assembled, tiny_config
from torch.utils.flop_counter import FlopCounterMode

PEERS = Operators(
    attention="padded", ffn="padded", rope="torch", norm="torch", stream="autocast", parts="torch", queries="apart"
)


def jagged_case(dtype=torch.float64):
    lengths_q, lengths_k = torch.tensor([3, 0, 5, 1]), torch.tensor([4, 2, 0, 7])
    offsets = [torch.cat((torch.zeros(1, dtype=torch.int64), n.cumsum(0))) for n in (lengths_q, lengths_k)]
    g = torch.Generator().manual_seed(random.getrandbits(32))
    q, k, v = (torch.randn(int(o[-1]), 2, 8, generator=g, dtype=dtype) for o in (offsets[0], offsets[1], offsets[1]))
    return [t.requires_grad_() for t in (q, k, v)], offsets


def softmax_by_hand(q, k, v, q_offsets, k_offsets):
    """Sample by sample, head by head, in float64."""
    rows = []
    for b in range(len(q_offsets) - 1):
        for i in range(int(q_offsets[b]), int(q_offsets[b + 1])):
            keys = slice(int(k_offsets[b]), int(k_offsets[b + 1]))
            if keys.start == keys.stop:
                rows.append(torch.zeros_like(q[i]) + 0 * q[i])
                continue
            p = torch.softmax(torch.einsum("hd,khd->hk", q[i], k[keys]) / q.shape[-1] ** 0.5, dim=1)
            rows.append(torch.einsum("hk,khd->hd", p, v[keys]))
    return torch.stack(rows)


def test_padded_attention_and_its_gradient_are_the_formula():
    (q, k, v), (oq, ok) = jagged_case()
    out = padded_sdpa(q, k, v, oq, ok, 5, 7)
    expected = softmax_by_hand(q, k, v, oq, ok)
    weight = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad((out * weight).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, (1, 1)), (True, (2, 0))])
def test_padded_attention_sees_what_ours_sees(causal, window):
    (_, k, v), (_, ok) = jagged_case()
    q = torch.randn_like(k)
    found = padded_sdpa(q, k, v, ok, ok, 7, 7, causal=causal, window=window)
    torch.testing.assert_close(found, jagged_attention(q, k, v, ok, ok, 7, 7, causal=causal, window=window))


def test_learned_queries_are_shared_by_all_samples():
    (_, k, v), (_, ok) = jagged_case()
    q = torch.randn(3, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(padded_sdpa(q, k, v, None, ok, 3, 7), jagged_attention(q, k, v, None, ok, 3, 7))


@pytest.mark.parametrize("activation", ["silu", "gelu_poly"])
def test_the_padded_ffn_is_gdpa(activation):
    (q, _, _), (oq, _) = jagged_case()
    k, v = (torch.randn(4 * 6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = padded_gdpa(q, k, v, oq, 5, 6, activation)
    expected = gdpa(q, k, v, oq, uniform_offsets(4, 6, q.device), 5, 6, activation=activation)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
    )


def model(**changes):
    torch.manual_seed(3)
    shape = {"width": 16, "heads": 2, "layers": 2, "n_tokens": 6, "n_dense": 2, "n_sum": 2, "interaction_fm": 3}
    return GEM(GemConfig(**{**shape, **changes}), example_inputs())


@pytest.mark.parametrize("rotary", ["time", "position", "both", "none"])
def test_the_whole_model_computes_the_same_on_other_operators(rotary):
    gem = model(rotary=rotary)
    batch = random_batch(example_inputs(), 9, seed=4)

    def passes():
        gem.zero_grad()
        logits = gem(batch)
        gem.loss(logits, batch).backward()
        return logits.detach(), {n: p.grad.clone() for n, p in gem.named_parameters() if p.grad is not None}

    before = passes()
    found = install(gem, PEERS)
    assert len(found["attention"]) == len(found["ffn"]) == len(found["pooling"]) == 4  # two layers, two sources
    assert len(found["norm"]) > 4
    torch.testing.assert_close(passes(), before, rtol=2e-4, atol=1e-6)
    install(gem, Operators())
    torch.testing.assert_close(passes(), before, rtol=0, atol=0)


def test_blocks_are_another_function():
    gem, batch = model(), random_batch(example_inputs(), 6, seed=5, lengths=None)
    install(gem, Operators(queries="apart"))
    before = gem(batch)
    install(gem, Operators(block=16))
    assert torch.equal(gem(batch), before), "histories of 12 lie inside one block of 16"
    longer = random_batch(example_inputs(), 6, seed=5, lengths={"ratings": [40] * 6, "views": [30] * 6})
    ours = model()
    assert not torch.allclose(gem(longer), ours(longer))


def test_the_hstu_peer_has_the_flops_of_the_model(cache, tmp_path, monkeypatch):
    def varlen(q, k, v, q_offsets, k_offsets, max_q, max_k):
        return jagged_attention(q, k, v, q_offsets, k_offsets, max_q, max_k)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    layer = HstuLayer(16, 2)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(10, 16), torch.tensor([0, 5, 10], dtype=torch.int32), 5)
    assert counter.get_total_flops() == layer_flops(16, [5, 5])
    with assembled(tiny_config(cache), tmp_path / "run") as (_, trainer):
        row = time_hstu(trainer, {"events": 30}, steps=1, warm_up=0, compiled=False)
        batch = half_filled(trainer.parts.inputs, 32, {"events": 30})
        flops = 3 * forward_flops(trainer.parts, batch)
    assert row["tflops"] == pytest.approx(flops / row["step_ms"] * 1e3 / 1e12)
    assert row["operators"]["hstu_layers"] >= 1


def test_nothing_to_replace_is_an_error():
    with pytest.raises(ValueError, match="has no attention"):
        install(torch.nn.Linear(2, 2), PEERS)
    with pytest.raises(ValueError, match="attention is 'flash'"):
        Operators(attention="flash")
    assert install(PMA(8, 2, 2), PEERS)["pooling"] == [""]


def test_recomputed_layers_give_the_same_gradients():
    batch = random_batch(example_inputs(), 7, seed=6)
    found = []
    for again in (False, True):
        gem = model()
        if again:
            recompute(gem, [n for n in gem.units() if n.startswith("layers.")])
        gem.loss(gem(batch), batch).backward()
        found.append([p.grad for p in gem.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], found[1])


# The climb.


def test_each_rung_stands_on_the_last_that_is_not_aside(cache):
    config = tiny_config(cache, "optim.accumulate=4")
    a = Rung(name="a", what="", operators={"attention": "padded"})
    b = Rung(name="b", what="", settings=("model.window=3",), aside=True)
    c = Rung(name="c", what="", operators={"norm": "torch"}, settings=("optim.lr=1",))
    base = Stand().up(a, config)
    assert base.up(b, config).settings == ("model.window=3",)
    assert base.up(c, config) == Stand(operators=Operators(attention="padded", norm="torch"), settings=("optim.lr=1",))
    larger = next(rung for rung in RUNGS if rung.name == "larger parts")
    assert base.up(larger, config).settings == ("optim.accumulate=2",)


@pytest.mark.parametrize("pooling", [{"pma_queries": 2}, {"pma_seeds": 5, "pma_queries": 2}])
def test_every_rungs_operators_run_under_autocast(pooling):
    """Those that a CPU has. (A card's autocast leaves other dtypes in the stream: test_pooling.py.)"""
    inputs = example_inputs()
    model = GEM(
        GemConfig(width=16, heads=2, layers=2, n_tokens=6, interaction_fm=3, pffn_tokens=2, recent=1, **pooling), inputs
    )
    batch = random_batch(inputs, 6, seed=1)
    with torch.no_grad():
        want = model(batch)
    stand, seen = Stand(), set()
    for rung in RUNGS:
        stand = stand if rung.aside else dataclasses.replace(
            stand, operators=dataclasses.replace(stand.operators, **rung.operators)
        )  # fmt: skip
        operators = stand.operators
        if operators.norm == "kernel":  # Triton's, which no CPU has
            operators = dataclasses.replace(operators, norm="dispatch")
        if operators.attention in ("varlen", "fp8") or operators in seen:
            continue
        seen.add(operators)
        install(model, operators)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch)
        model.loss(logits.float(), batch).backward()
        assert (logits - want).norm() / want.norm() < 0.05, rung.name
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.layers.parameters()), rung.name
    assert len(seen) >= 5


def test_fp8_attention_is_for_events_and_near_attention():
    tensors, offsets = jagged_case(torch.float32)
    few = fp8_attention(*tensors, *offsets, 5, 7, causal=True)
    assert torch.equal(few, jagged_attention(*tensors, *offsets, 5, 7, causal=True))
    lengths = torch.tensor([0, 200, 330])
    many = [torch.randn(330, 2, 16) for _ in range(3)]
    _say.cache_clear()
    with pytest.warns(UserWarning, match="emulated"):
        got = fp8_attention(*many, lengths, lengths, 200, 200)
    exact = jagged_attention(*many, lengths, lengths, 200, 200)
    assert 0 < (got - exact).norm() / exact.norm() < 0.1


def test_what_is_stepped_over_leaves_the_next_rung_on_its_own_ground(cache):
    rungs = (
        Rung(name="ground", what="", operators={"attention": "padded"}),
        Rung(name="other", what="", operators={"norm": "torch"}),
        Rung(name="missing", what="", operators={"rope": "torch"}, on="ground", missing=never("not written")),
        Rung(name="last", what="", operators={"ffn": "padded"}),
    )
    options = Options(fill={}, steps=1, warm_up=0, repeats=0, train_steps=0, names=("last",))
    with start("cpu", 30) as runtime:
        (row,) = climb(tiny_config(cache), runtime, options, report=lambda row: None, rungs=rungs)
    assert row["operators"] == dataclasses.asdict(Operators(attention="padded", ffn="padded"))


def test_a_rung_that_fails_or_is_missing_is_stepped_over_with_its_reason(cache, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    rungs = (
        Rung(name="first", what="", operators={"attention": "padded"}),
        Rung(name="none", what="", operators={"rope": "torch"}, missing=never("not written")),
        Rung(name="fails", what="", operators={"norm": "kernel"}),  # its Triton kernels can't run on a CPU
        Rung(name="last", what="", operators={"ffn": "padded"}),
    )
    seen = []
    options = Options(fill={}, steps=1, warm_up=0, repeats=0, train_steps=0)
    with start("cpu", 30) as runtime:
        rows = climb(tiny_config(cache), runtime, options, report=seen.append, rungs=rungs)
    assert rows == seen
    assert [bool(r["reason"]) for r in rows] == [False, True, True, False]
    assert rows[1]["reason"] == "not written"
    assert "cannot run norms" in rows[2]["reason"]
    assert rows[3]["operators"] == dataclasses.asdict(Operators(attention="padded", ffn="padded"))
    assert rows[0]["samples_per_s"] > 0
    assert rows[0]["ne"] is None


def forever(*_args, **_options):
    while True:
        time.sleep(0.01)


def test_a_rung_that_is_measured_for_too_long_is_left_and_the_next_goes_on(cache, monkeypatch):
    def time_steps(*args, ready, **_options):
        ready()
        calls.append(args)
        return forever() if len(calls) == 1 else StepTimes(
            step_s=0.5, data_wait_s=0.0, samples_per_s=64.0, flops=1.0, memory_bytes=0
        )  # fmt: skip

    calls = []
    monkeypatch.setattr(climbing, "time_steps", time_steps)
    options = Options(fill={}, repeats=0, train_steps=0, names=("JFA", "GDPA"), ready_limit=600.0, limit=1.0)
    with start("cpu", 30) as runtime:
        first, second = climb(tiny_config(cache), runtime, options, report=lambda row: None)
    assert "measuring took longer than the 1 s that --limit gives a rung" in first["reason"]
    assert first["ready_s"] < first["took_s"]
    assert (second["reason"], second["step_ms"]) == ("", 500.0)


def test_a_rung_that_never_gets_ready_says_so(cache, monkeypatch):
    monkeypatch.setattr(climbing, "time_steps", forever)  # compiles for ever
    options = Options(fill={}, repeats=0, train_steps=0, names=("JFA",), ready_limit=0.3, limit=600.0)
    with start("cpu", 30) as runtime:
        (row,) = climb(tiny_config(cache), runtime, options, report=lambda row: None)
    assert "getting ready (torch.compile, warm-up) took longer than the 0.3 s that --ready-limit" in row["reason"]
    assert row["ready_s"] is None


def test_a_limit_outlives_what_swallows_it():
    limits, swallowed = climbing.Limits(0.0, 2.0), []

    def deaf():
        while not swallowed:
            try:
                time.sleep(60)
            except OSError as error:  # as TimeoutError is
                swallowed.append(error)
        time.sleep(60)

    def measuring():
        with limits:
            limits.ready()
            deaf()

    with pytest.raises(TimeoutError, match="--limit"):
        measuring()
    assert len(swallowed) == 1


def test_what_has_been_measured_is_not_measured_again(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gem_train.run_dir.commit", lambda: "abc")
    monkeypatch.setattr("gem_train.cli.measure.climb", functools.partial(climb, rungs=RUNGS[3:5]))  # GDPA, fused rope
    file, out = tmp_path / "tiny.toml", tmp_path / "ladder"
    file.write_text(to_toml(tiny_config(cache)))
    call = ["ladder", "--config", str(file), "--out", str(out), "--steps", "1", "--warm-up", "0", "--repeats", "0",
            "--train-steps", "0"]  # fmt: skip
    assert main(call) == 0
    before = json.loads((out / "ladder.json").read_text())["rows"]
    assert [row["rung"] for row in before] == ["GDPA", "fused rope"]
    capsys.readouterr()
    assert main(call) == 0
    assert "GDPA" in capsys.readouterr().out
    after = json.loads((out / "ladder.json").read_text())["rows"]
    assert after[0] == before[0]
    assert after[1]["reason"] == before[1]["reason"] != ""
    assert main([*call, "--rung", "GDPA", "--bench", "GDPA"]) == 0
    efficiency = json.loads((out / "efficiency.json").read_text())
    assert efficiency["suite"] == "efficiency"
    assert {"layers.0", "heads"} <= {unit["name"] for unit in efficiency["units"]}
    assert json.loads((out / "ladder.json").read_text())["rows"][0]["took_s"] != before[0]["took_s"]


def test_ladder_from_the_command_line(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gem_train.run_dir.commit", lambda: "abc")  # a checkout may change between two calls
    file, out = tmp_path / "tiny.toml", tmp_path / "ladder"
    file.write_text(to_toml(tiny_config(cache, "model.dropout=0")))
    options = ["--steps", "1", "--warm-up", "1", "--repeats", "1", "--train-steps", "3", "--fill", "events=9"]
    assert main(["ladder", "--config", str(file), "--out", str(out), *options]) == 0
    said = capsys.readouterr().out
    found = json.loads((out / "ladder.json").read_text())
    rows = {r["variant"]: r for r in found["rows"]}
    assert list(rows) == [rung.name for rung in RUNGS]
    assert all(name in said for name in rows)
    assert found["suite"] == "ladder"
    assert found["command"].startswith("gem-train ")
    assert found["lengths"] == {"events": "uniform in 1..9"}
    assert "CPU" in found["peak"]
    measured = [r for r in found["rows"] if not r["reason"]]
    assert {"padded SDPA", "JFA", "GDPA", "block attention"} <= {r["variant"] for r in measured}
    for row in measured:
        assert row["samples_per_s"] == pytest.approx(32 / (row["step_ms"] + row["data_wait_ms"]) * 1e3)
        assert row["mfu"] is row["local_mfu"] is None
        assert row["local_tflops"] > 0
        assert row["memory_gib"] > 0.05
    same = [r["ne"] for r in measured if r["same_function"]]
    assert same == pytest.approx([same[0]] * len(same), rel=1e-5), "the same function trains to the same NE"
    assert "varlen_attn has no CPU" in rows["torch varlen"]["reason"]
    again = ["--rung", "GDPA", *options[:6], "--train-steps", "0", *options[8:]]
    assert main(["ladder", "--config", str(file), "--out", str(out), *again]) == 0
    added = json.loads((out / "ladder.json").read_text())["rows"]
    assert {r["rung"] for r in added} == set(rows)
    assert next(r for r in added if r["rung"] == "GDPA")["ne"] is None
    assert next(r for r in added if r["rung"] == "JFA")["ne"] == rows["JFA"]["ne"]
    assert main(["ladder", "--config", str(file), "--out", str(out), *again, "--set", "data.batch_size=16"]) == 2
    assert "was measured with another batch_size" in capsys.readouterr().err
    assert (out / "ladder.svg").exists()
    assert (out / "ladder.png").read_bytes()[:4] == b"\x89PNG"


def test_mistakes_of_the_ladder_are_named(cache, tmp_path, capsys):
    file = tmp_path / "tiny.toml"
    file.write_text(to_toml(tiny_config(cache)))
    command = ["ladder", "--config", str(file), "--out", str(tmp_path / "x")]
    for more, says in (
        (["--rung", "JFB"], "'JFB' is no rung; did you mean 'JFA'? (there are: 'padded SDPA'"),
        (["--fill", "events"], "--fill events: expected SOURCE=LENGTH"),
    ):
        assert main([*command, *more]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_source_that_is_not_there_is_a_reason(cache):
    options = Options(fill={"clicks": 9}, steps=1, train_steps=0, names=("JFA",))
    with start("cpu", 30) as runtime:
        (row,) = climb(tiny_config(cache), runtime, options, report=lambda row: None)
    assert "'clicks' is no source of the data; there are events" in row["reason"]
    assert "not measured" in results.line(row)


def test_a_batch_of_random_lengths_is_not_said_to_be_balanced(cache):
    rungs = (Rung(name="dealt", what="", settings=("data.balance=bbs",)),)
    options = Options(fill={"events": 9}, steps=1, train_steps=0)
    with start("cpu", 30) as runtime:
        (row,) = climb(tiny_config(cache), runtime, options, report=lambda row: None, rungs=rungs)
    assert row["reason"] == "--fill makes one batch for each rank, which nobody deals"


@pytest.mark.parametrize("operators", [Operators(), PEERS], ids=["ours", "plain"])
def test_what_works_on_events_compiles_into_two_graphs(operators):
    """One of the sequence layers and one of the poolings, for all layers, sources and lengths, without a break."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    gem = model(layers=3, qk_norm=True, pma_seeds=4)
    install(gem, operators)
    batches = [random_batch(example_inputs(), 9, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        expected = [gem(batch) for batch in batches]
    trainer = SimpleNamespace(model=SimpleNamespace(module=gem))
    compile_layers(trainer, backend=backend, dynamic=True, fullgraph=True)
    for batch, wanted in zip(batches, expected, strict=True):
        logits = gem(batch)
        torch.testing.assert_close(logits, wanted)
        gem.loss(logits, batch).backward()
    assert len(graphs) == 2
    torch._dynamo.reset()

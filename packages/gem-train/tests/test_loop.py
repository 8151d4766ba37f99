"""What the loop does beside plain steps: accumulation, averaging, early stops, streams, spikes, phases."""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gem_parallel import start
from gem_train.averaging import Average
from gem_train.data import build, divided
from gem_train.errors import NonFiniteError, UserError
from gem_train.events import Events, read
from gem_train.instruments import Instruments
from gem_train.losses import global_loss, total_weights
from gem_train.phases import StepClock, Stragglers
from gem_train.progressive import Window
from gem_train.run_dir import RunDir
from gem_train.spikes import SETTLING, LossHistory, worst_samples
from gem_train.testing import assembled, tiny_config, uneven_batch, uneven_logits


def records(folder, kind):
    return [r for r in read(RunDir(folder).metrics_file) if r["kind"] == kind]


def messages(folder, name):
    return [r for r in read(RunDir(folder).events_file) if r.get("event") == name]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.dense_parameters()])


# Accumulation.


def test_parts_of_a_batch_add_up_to_its_loss_and_gradient(cache):
    batch, logits = uneven_batch(cache), uneven_logits()
    with start("cpu", 30) as runtime:
        whole = logits.clone().requires_grad_()
        one = global_loss(whole, batch, runtime)
        one.backward.backward()
        parted = logits.clone().requires_grad_()
        weights = total_weights(batch, runtime)
        values, at = [], 0
        for part in divided(batch, 5):
            found = global_loss(parted[at : at + part.batch_size], part, runtime, whole=weights)
            found.backward.backward()
            values.append(found.value)
            at += part.batch_size
    assert at == 12
    assert sum(values) == pytest.approx(one.value, rel=1e-6)
    torch.testing.assert_close(parted.grad, whole.grad, rtol=1e-6, atol=1e-9)


def test_an_accumulated_step_is_that_of_the_whole_batch(cache, tmp_path):
    """Without learning in the tables, which are updated part by part."""
    settings = ("model.dropout=0", "optim.sparse_lr=0", "train.max_steps=3", "train.eval_every=0")
    found = []
    for parts in (1, 3):
        with assembled(tiny_config(cache, *settings, f"optim.accumulate={parts}"), tmp_path / str(parts)) as (
            _,
            trainer,
        ):
            trainer.fit()
            found.append(weights(trainer))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    losses = [[r["loss"] for r in records(tmp_path / n, "step")] for n in ("1", "3")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    norms = [[r["grad_norm"] for r in records(tmp_path / n, "step")] for n in ("1", "3")]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)


def test_more_parts_than_samples_are_refused(cache):
    with pytest.raises(UserError, match=r"optim\.accumulate is 13, but a rank has only 12 samples"):
        divided(uneven_batch(cache), 13)


# Averages.


def test_the_average_is_the_recurrence_and_swaps_both_ways(cache, tmp_path):
    settings = ("optim.ema_decay=0.6", "train.max_steps=6", "train.eval_every=0")
    with assembled(tiny_config(cache, *settings), tmp_path / "run") as (_, trainer):
        expected = weights(trainer).double()
        batches = iter(trainer.parts.train)
        for t in range(1, 7):
            trainer.step(next(batches))
            decay = min(0.6, t / (t + 9))
            expected = decay * expected + (1 - decay) * weights(trainer).double()
        live = weights(trainer)
        with trainer.average.in_place():
            torch.testing.assert_close(weights(trainer).double(), expected, rtol=1e-5, atol=1e-7)
            assert not torch.equal(weights(trainer), live)
        assert torch.equal(weights(trainer), live)


def test_averaged_weights_are_validated_kept_and_resumed(cache, tmp_path):
    settings = ("optim.ema_decay=0.9", "train.max_steps=10", "train.eval_every=5", "train.checkpoint_every=5")
    folder = tmp_path / "run"
    with assembled(tiny_config(cache, *settings), folder) as (_, trainer):
        trainer.fit()
        average = {n: t.clone() for n, t in trainer.average.tensors.items()}
        updates = trainer.average.updates
        with trainer.average.in_place():
            from gem_train.evaluation import figures, mean_ne

            again = mean_ne(figures(trainer.predict(trainer.parts.validation), trainer.parts.inputs.tasks))
        assert records(folder, "eval")[-1]["ne"] == again
        fresh = Average(trainer.model, 0.9)
        trainer.average = fresh
        trainer.load(10)
        assert fresh.updates == updates == 10
        assert all(torch.equal(fresh.tensors[n], average[n]) for n in average)
        if trainer.position.best_step == 10:
            assert trainer.load_best() == "the averaged ones of step 10"
            assert torch.equal(weights(trainer), torch.cat([t.flatten() for t in average.values()]))


# Early stop.


def test_a_run_without_gains_stops_early_and_stays_stopped(cache, tmp_path):
    settings = ("train.eval_every=2", "train.patience=2", "train.min_delta=10", "train.max_steps=20")
    folder = tmp_path / "run"
    with assembled(tiny_config(cache, *settings), folder) as (_, trainer):
        trainer.fit()
        # The first validation beats infinity, even by ten; the next two do not.
        assert trainer.position.step == 6
        assert trainer.checkpoints.latest() == 6
        trainer.load(6)
        trainer.fit()
        assert trainer.position.step == 6
    assert messages(folder, "stopped early")[0]["step"] == 6


# Streams.


def test_a_stream_is_read_in_order_of_time_and_validated_before_it_is_trained_on(cache, tmp_path):
    settings = ("data.order=time", "model.dropout=0", "train.epochs=1", "train.max_steps=9", "train.eval_every=4")
    folder = tmp_path / "run"
    with assembled(tiny_config(cache, *settings), folder) as (data, trainer):
        seen, logits = [], []
        forward = trainer.forward

        def watched(batch):
            out = forward(batch)
            if trainer.model.module.training:
                seen.append(batch)
                logits.append(out.detach().double())
            return out

        trainer.forward = watched
        trainer.fit()
        times = np.concatenate([b.time.numpy() for b in seen])
        assert (np.diff(times) >= 0).all()
        assert np.concatenate([b.sample_ids.numpy() for b in seen]).tolist() == data.split.train[: 9 * 32].tolist()
    found = records(folder, "progressive")
    assert [r["step"] for r in found] == [4, 8, 9]
    for record, (a, b) in zip(found, [(0, 4), (4, 8), (8, 9)], strict=True):
        for k, task in enumerate(("click", "convert")):
            y = torch.cat([x.labels[:, k] for x in seen[a:b]]).double()
            mask = torch.cat([x.label_mask[:, k] for x in seen[a:b]])
            z = torch.cat([x[:, k] for x in logits[a:b]])
            p = torch.sigmoid(z[mask])
            y = y[mask]
            rate = y.mean().item()
            loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean().item()
            figures = record["tasks"][task]
            assert figures["samples"] == len(y)
            assert figures["base_rate"] == pytest.approx(rate)
            assert figures["log_loss"] == pytest.approx(loss, rel=1e-5)
            if 0 < rate < 1:
                entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
                assert figures["ne"] == pytest.approx(loss / entropy, rel=1e-5)


def test_shuffled_runs_have_no_progressive_figures(finished_run):
    assert not records(finished_run, "progressive")


def test_an_empty_or_one_sided_window_has_no_ne():
    window = Window()
    assert window.close(("a",)) == {}
    window.add([(0.5, 0.0, 0.0), (2.0, 4.0, 4.0)])
    found = window.close(("a", "b"))
    assert math.isnan(found["a"]["ne"])
    assert math.isnan(found["b"]["ne"])
    assert found["b"]["log_loss"] == 0.5
    assert window.sums == []


# Spikes and skipped batches.


def test_the_history_of_losses_is_the_weighted_mean_and_variance():
    rng = np.random.default_rng(random.getrandbits(32))
    history, losses = LossHistory(), rng.normal(1.0, 0.1, 400)
    for loss in losses:
        history.add(float(loss))
    mean, variance = losses[0], 0.0
    for n, loss in enumerate(losses[1:], 2):
        share = max(0.02, 1 / n)
        mean, variance = (1 - share) * mean + share * loss, (1 - share) * (variance + share * (loss - mean) ** 2)
    assert history.mean == pytest.approx(mean)
    assert history.variance == pytest.approx(variance)
    assert history.is_spike(mean + 9 * math.sqrt(variance), 8.0)
    assert not history.is_spike(mean + 7 * math.sqrt(variance), 8.0)
    assert not history.is_spike(1e9, 0.0)


def test_no_spikes_while_the_loss_settles():
    history = LossHistory()
    for _ in range(SETTLING - 1):
        history.add(1.0)
    assert not history.is_spike(100.0, 3.0)
    history.add(1.0)
    assert history.is_spike(100.0, 3.0)


def test_the_worst_samples_are_those_with_the_largest_losses(cache):
    batch, logits = uneven_batch(cache), uneven_logits()
    by_hand = {}
    for b in range(12):
        loss = 0.0
        for k in range(2):
            if batch.label_mask[b, k]:
                p = torch.sigmoid(logits[b, k].double())
                loss -= float(batch.weights[b] * torch.log(p if batch.labels[b, k] == 1 else 1 - p))
        if batch.sample_ids[b] >= 0:
            by_hand[int(batch.sample_ids[b])] = loss
    expected = sorted(by_hand, key=by_hand.get, reverse=True)
    found = worst_samples(logits, batch)
    assert [f["sample"] for f in found][:5] == expected[:5]
    assert [f["loss"] for f in found][:5] == pytest.approx([by_hand[i] for i in expected[:5]], rel=1e-5)


def spiked(trainer, at, factor=40.0):
    """Logits far too confident at the steps `at`, as a corrupt batch would make them."""
    forward = trainer.forward

    def spoilt(batch):
        out = forward(batch)
        wrong = trainer.model.module.training and trainer.position.step + 1 in at
        return out * 0 + (0.5 - batch.labels.nan_to_num()) * factor if wrong else out

    trainer.forward = spoilt


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_loss_spike_is_recorded_with_its_samples_and_skipped_only_on_request(mode, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("gem_train.spikes.SETTLING", 4)
    folder = tmp_path / mode
    settings = (f"train.bad_batches={mode}", "train.max_steps=9", "train.eval_every=0", "train.checkpoint_every=9")
    with assembled(tiny_config(cache, *settings), folder) as (_, trainer):
        spiked(trainer, {7})
        before = []
        step = trainer.step

        def watched(batch, flops=0.0):
            before.append(weights(trainer))
            return step(batch, flops)

        trainer.step = watched
        trainer.fit()
        rows = trainer.parts.train.global_rows(0, 6).tolist()
        changed = not torch.equal(before[6], before[7])  # before step 7, before step 8
        assert changed == (mode == "stop")
        assert trainer.position.skipped == (mode == "skip")
        saved = copy.deepcopy(trainer.position)
        trainer.load(9)
        assert trainer.position == saved
    (spike,) = messages(folder, "loss spike")
    assert spike["step"] == 7
    assert spike["loss"] > 10 > spike["mean"]
    assert spike["ranks"][0]["samples"] == rows
    assert {w["sample"] for w in spike["ranks"][0]["worst"]} <= set(rows)
    assert [r["step"] for r in records(folder, "step") if r.get("skipped")] == ([7] if mode == "skip" else [])


def test_a_loss_that_is_not_finite_is_skipped_on_request_but_not_for_ever(cache, tmp_path):
    folder = tmp_path / "run"
    settings = ("train.bad_batches=skip", "train.max_skipped=2", "train.eval_every=0", "train.max_steps=12")
    with assembled(tiny_config(cache, *settings), folder) as (_, trainer):
        spiked(trainer, {3, 5, 8}, factor=math.nan)
        with pytest.raises(NonFiniteError, match="step 8: the loss is nan"):
            trainer.fit()
        assert all(p.isfinite().all() for p in trainer.model.dense_parameters())
        assert trainer.position.step == 7
    assert [r["step"] for r in records(folder, "step") if r["loss"] is None] == [3, 5]
    assert [m["step"] for m in messages(folder, "loss not finite")] == [3, 5]


# Phases and stragglers.


def test_the_phases_of_a_step_are_logged(finished_run):
    found = messages(finished_run, "phases")
    assert [m["step"] for m in found] == [1, 20]
    for message in found:
        (rank,) = message["ranks"]
        names = [name for name, _ in rank["phases"]]
        assert names == ["data", "forward", "loss", "backward", "optimizer"]
        assert all(seconds >= 0 for _, seconds in rank["phases"])
        assert rank["flops"] > 0


def test_the_phases_of_a_step_are_what_lies_between_its_marks(monkeypatch):
    monkeypatch.setattr("gem_train.phases.time", SimpleNamespace(perf_counter=iter([10.0, 10.5, 12.0, 12.25]).__next__))
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    for phase in ("forward", "loss", "backward"):
        clock.mark(phase)
    assert clock.read() == [("forward", 0.5), ("loss", 1.5), ("backward", 0.25)]


def test_a_resting_clock_marks_nothing():
    clock = StepClock(torch.device("cpu"))
    clock.begin(False)
    clock.mark("forward")
    assert clock.read() == []
    clock.begin()
    clock.mark("a")
    clock.mark("b")
    assert [name for name, _ in clock.read()] == ["a", "b"]


@pytest.mark.parametrize("where", ["data", "forward"])
def test_a_rank_that_the_others_wait_for_is_named_once(where):
    def rank(late):
        data, forward = (1.0 + late, 2.0) if where == "data" else (1.0, 2.0 + late)
        # Who is late for data is waited for inside the forward pass, who computes for long, in the loss.
        return lambda worst: [
            ("data", data),
            ("forward", forward + (worst - late if where == "data" else 0.0)),
            ("loss", worst - late if where == "forward" else 0.0),
            ("backward", 4.0),
        ]

    watch, found = Stragglers(), []
    for looks, lates in enumerate([(0, 0, 3), (0, 0, 3), (0, 0.1, 3), (0, 0, 3), (0, 0, 0), (3, 0, 0)]):
        found += [(looks, f["rank"]) for f in watch.look([rank(late)(max(lates)) for late in lates])]
    assert found == [(2, 2)]


def test_a_run_names_a_straggler_with_its_host(tmp_path):
    """Three looks of rank 0 in a row at a rank that waits for its data."""
    others = [("data", 3.0), ("forward", 1.0), ("loss", 0.0), ("backward", 2.0)]
    mine = [("forward", 4.0), ("loss", 0.0), ("backward", 2.0)]
    said = []
    parts = SimpleNamespace(
        config=SimpleNamespace(data=SimpleNamespace(batch_size=8)),
        train=SimpleNamespace(steps_per_epoch=100),
        peak=SimpleNamespace(peak=None),
        runtime=SimpleNamespace(
            device=torch.device("cpu"),
            world=2,
            peers=(("here", 1), ("there", 2)),
            gather=lambda value, what: [value, {**value, "phases": others}],
        ),
        events=Events(tmp_path),
        progress=SimpleNamespace(note=lambda text, style: said.append(text)),
    )
    instruments = Instruments(parts)
    instruments.clock.read = lambda: mine
    for step in (1, 20, 40, 60):
        instruments.end(step, waited=0.0, seconds=6.0, flops=2.0, mine=1.0)
    parts.events.close()
    (event,) = messages(tmp_path, "straggler")
    assert (event["step"], event["rank"], event["host"]) == (40, 1, "there")
    assert event["late_s"] == pytest.approx(3.0)
    assert said == ["straggler: rank 1 on there keeps the others waiting, 3000 ms of a step of 6000 ms (step 40)"]


def test_settings_of_the_loop_are_checked():
    from gem_train.config import OptimConfig, TrainConfig

    for make, says in (
        (lambda: OptimConfig(ema_decay=1.0), "ema_decay is 1.0"),
        (lambda: OptimConfig(accumulate=0), "accumulate is 0"),
        (lambda: TrainConfig(patience=0), "patience is 0"),
        (lambda: TrainConfig(spike_sigmas=-1.0), "spike_sigmas is -1.0"),
    ):
        with pytest.raises(ValueError, match=says):
            make()


def test_workers_and_a_balanced_order_change_no_sample_of_a_global_batch(cache):
    from gem_data import EventLog, time_split
    from gem_train import data as source

    config = tiny_config(cache).data
    log = EventLog.open(build(config, "synthetic"))
    data = source.Data(log=log, split=time_split(log), source="synthetic", notes=())
    with start("cpu", 30) as runtime:
        usual = source.loader(data, "train", config, runtime)
        wanted = [b.sample_ids.tolist() for b in itertools.islice(usual, 3)]
        others = replace(config, workers=1, balance="bbs")
        found = source.loader(data, "train", others, runtime)
        assert [b.sample_ids.tolist() for b in itertools.islice(found, 3)] == wanted


def test_a_log_that_several_want_at_once_is_built_once(tmp_path, monkeypatch):
    from gem_train import data as source

    built, real = [], source.build_log

    def slow(table, schema, folder):
        built.append(folder)
        time.sleep(0.3)
        return real(table, schema, folder)

    monkeypatch.setattr(source, "build_log", slow)
    config = tiny_config(tmp_path).data
    with ThreadPoolExecutor(3) as pool:
        folders = [pool.submit(source.build, config, "synthetic") for _ in range(3)]
    assert len({f.result() for f in folders}) == 1
    assert len(built) == 1

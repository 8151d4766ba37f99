"""The walls of the design: each side is swapped for a fake that shares no code with the real one, and the others work.

data -> model      a batch source that knows nothing of gem_data's logs
model -> train     a model of five lines, with no histories
parallel -> train  a layer that spreads nothing
lowprec -> train   a conversion that converts nothing, and is told of every part of a step
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gem_model import GEM, GemConfig
from gem_model.testing import example_inputs, random_batch
from gem_parallel import start
from gem_train.assemble import assemble
from gem_train.config import TrainConfig
from gem_train.errors import Interrupted
from gem_train.events import Events, read
from gem_train.metrics import Mfu
from gem_train.progress import Progress
from gem_train.run_dir import RunDir
from gem_train.testing import tiny_config
from gem_train.trainer import Parts, Trainer
from torch import nn


@dataclasses.dataclass(frozen=True)
class FakeBatch:
    """The attributes that gem_model.batch and the trainer ask for, around a random batch of gem_model's own."""

    inner: object
    sample_ids: torch.Tensor
    groups: torch.Tensor

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def batch_size(self):
        return len(self.sample_ids)

    def to(self, device, *, non_blocking=False):
        return dataclasses.replace(self, inner=self.inner.to(device), sample_ids=self.sample_ids.to(device))


class FakeLoader:
    """Batches out of nowhere: 16 samples each, the same for every position, resumable by a number."""

    def __init__(self, inputs, steps, first=0):
        self.inputs, self.steps, self.first = inputs, steps, first
        self.at = 0

    steps_per_epoch = property(lambda self: self.steps)
    rows = property(lambda self: np.arange(self.first, self.first + 16 * self.steps))

    def batch(self, step):
        ids = torch.arange(self.first + 16 * step, self.first + 16 * step + 16)
        return FakeBatch(random_batch(self.inputs, 16, seed=self.first + step), ids, ids % 5)

    def __iter__(self):
        for step in range(self.at, self.steps):
            self.at = (step + 1) % self.steps
            yield self.batch(step)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class FakeParallel:
    """The surface of gem_parallel.ParallelModel that the trainer uses, over a plain module and plain SGD for tables."""

    def __init__(self, module, tables):
        self.module, self._tables = module, tables
        self.lr = 0.0

    def __call__(self, batch):
        return self.module(batch)

    def named_dense_parameters(self):
        return [(n, p) for n, p in self.module.named_parameters() if n not in self._tables]

    def dense_parameters(self):
        return [p for _, p in self.named_dense_parameters()]

    def is_table(self, name):
        return name in self._tables

    def is_expert(self, name):
        return False

    def set_sparse_lr(self, lr):
        self.lr = lr

    def reduce_gradients(self, on):
        self.reduces = on

    def forget_gradients(self):
        assert self.reduces  # the last part's
        self.module.zero_grad(set_to_none=True)

    def clip_grad_norm_(self, limit):
        with torch.no_grad():  # the fused update of the tables, a little late
            for name, p in self.module.named_parameters():
                if name in self._tables and p.grad is not None:
                    p.sub_(self.lr * p.grad)
                    p.grad = None
        return torch.nn.utils.clip_grad_norm_(self.dense_parameters(), limit)

    def state_dict(self):
        return {"model": dict(self.module.state_dict()), "sparse_optimizer": {}}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["model"])

    def train(self, mode=True):
        self.module.train(mode)
        return self

    def eval(self):
        return self.train(False)

    def describe(self):
        return []


class FakeConversion:
    """What the trainer asks of gem_lowprec once the model is converted: to be told where training is."""

    def __init__(self):
        self.told = []

    def set_step(self, step, part=0):
        self.told.append((step, part))


def trainer_on_fakes(folder, runtime, *, steps=6, **train):
    inputs = example_inputs()
    torch.manual_seed(1)
    config = GemConfig(width=16, heads=2, layers=1, n_tokens=6, n_dense=2, n_sum=2, interaction_fm=3)
    gem = GEM(config, inputs)
    tables = {n for n, _ in gem.named_parameters() if n.startswith("tables.")}
    model = FakeParallel(gem, tables)
    whole = dataclasses.replace(
        tiny_config(folder), model=config, train=TrainConfig(epochs=2, eval_every=6, checkpoint_every=10, **train)
    )
    run = RunDir(folder / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    return Trainer(
        Parts(
            config=whole,
            runtime=runtime,
            run=run,
            inputs=inputs,
            model=model,
            model_config=config,
            units=(),
            conversion=FakeConversion(),
            optimizer=torch.optim.AdamW(model.dense_parameters()),
            train=FakeLoader(inputs, steps),
            validation=FakeLoader(inputs, 2, first=1000),
            test=FakeLoader(inputs, 2, first=2000),
            precision="fp32",
            peak=Mfu(peak=None, note="none"),
            events=Events(run.path),
            progress=Progress(enabled=False),
        )
    )


def test_fake_data_and_a_fake_parallel_layer_train_validate_save_and_resume(tmp_path):
    with start("cpu", 30) as runtime:
        whole = trainer_on_fakes(tmp_path / "a", runtime)
        whole.fit()
        assert whole.position.step == whole.total == 12
        assert whole.parts.conversion.told == [(step, 0) for step in range(1, 13)]
        part = trainer_on_fakes(tmp_path / "b", runtime)
        step = part.step

        def asked_to_stop(batch, flops=0.0):
            part.stop.requested = part.position.step == 6
            return step(batch, flops)

        part.step = asked_to_stop
        with pytest.raises(Interrupted, match="stopped at step 7 of 12"):
            part.fit()
        again = trainer_on_fakes(tmp_path / "b", runtime)
        assert again.resume() == 7
        assert again.parts.train.at == 7 % 6
        again.fit()
        for a, b in zip(whole.model.dense_parameters(), again.model.dense_parameters(), strict=True):
            assert torch.equal(a, b)
        for trainer in (whole, part, again):
            trainer.parts.events.close()
    kinds = {(r["kind"], r["step"]) for r in read(tmp_path / "a" / "run" / "metrics.jsonl")}
    assert {("step", 12), ("eval", 6), ("eval", 12)} <= kinds


def test_evaluation_of_fake_data_misses_nothing(tmp_path):
    with start("cpu", 30) as runtime:
        trainer = trainer_on_fakes(tmp_path, runtime)
        found = trainer.predict(trainer.parts.test)
        assert found.sample_ids.tolist() == list(range(2000, 2032))
        trainer.parts.test.steps = 3  # it now promises rows that its batches had before
        trainer.parts.test.at = 1
        with pytest.raises(RuntimeError, match="16 never came"):
            trainer.predict(trainer.parts.test)


class FakeModel(nn.Module):
    """One table and one matrix: what the trainer asks of a model is forward, units, init_bias, init_dense and roles."""

    def __init__(self, inputs):
        super().__init__()
        from gem_model.embed import Tables

        self.tables = Tables(inputs)
        self.out = nn.Linear(inputs.dense + sum(inputs.table_dim for _ in inputs.sparse), len(inputs.tasks))

    def forward(self, batch):
        rows = self.tables(batch)
        return self.out(torch.cat([batch.dense, *rows.pooled.values()], dim=1))

    def units(self):
        return ["out"]

    def init_bias(self, rates):
        with torch.no_grad():
            self.out.bias.copy_(torch.tensor([math.log(r / (1 - r)) for r in rates]))

    def init_dense(self, mean, std):
        self.statistics = SimpleNamespace(mean=mean, std=std)


def test_a_fake_model_trains_on_the_real_data_and_the_real_parallel_layer(cache, tmp_path):
    config = tiny_config(cache, "train.max_steps=8")
    run = RunDir(tmp_path / "run")
    run.start(config, resume=False)
    with start("cpu", 30) as runtime:
        data, trainer = assemble(
            config,
            runtime,
            run,
            events=Events(run.path),
            progress=Progress(enabled=False),
            build=lambda config, inputs: FakeModel(inputs),
        )
        trainer.fit()
        assert trainer.position.step == 8
        assert trainer.load_best()
        found = trainer.predict(trainer.parts.test)
        assert len(found) == len(data.split.test)
        trainer.parts.events.close()
    steps = [r for r in read(run.metrics_file) if r["kind"] == "step"]
    assert all(math.isfinite(s["loss"]) for s in steps)
    assert "tflops" not in steps[0], "the FLOPs of an unknown model are not made up"

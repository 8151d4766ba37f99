"""Knowledge transfer from a teacher's logged predictions: a head learns from them, an adapter mends them first.

A large model's predictions, logged with each request, say more than a click or its absence. But they are of another
time and task, and biased as that model is. So they do not reach the task's own head: a head beside it learns them, and
what it learns is passed on by the trunk that both share. An adapter, itself trained on the labels, first turns the
teacher's number into the best prediction that can be made of it (external teacher, auxiliary head and student adapter:
Liang et al. 2025, "External Large Foundation Model").

`B` samples, `N` tokens, `d` width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model.batch import BatchLike
from gem_model.config import GemConfig, ModelInputs, Teacher
from gem_model.heads import float32, log_loss
from gem_model.names import ByName

ADAPTER_HIDDEN = 16
LIMIT = 1e-6  # a teacher's probability is kept this far from 0 and 1


class Adapter(nn.Module):
    """logit' = logit + W_2 SiLU(W_1 logit + b_1), of one number; at first W_2 = 0, the teacher as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, ADAPTER_HIDDEN)
        self.down = nn.Linear(ADAPTER_HIDDEN, 1)

    def forward(self, logit: Tensor) -> Tensor:
        """[B, 1] -> [B, 1]."""
        return logit + self.down(F.silu(self.up(logit)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The identity."""
        self.down.weight.zero_()
        self.down.bias.zero_()


class Distillation(nn.Module):
    """What the teachers' predictions add to the loss of a batch.

    With t the teacher's probability for a task of label y, s = W MLP(LN(flatten X)) the student's second logit, a =
    sigmoid(Adapter(logit t)), w the teacher's weight and H the mean log loss over the samples::

        L = sum over teachers of  w H(sigmoid s; a)  +  H(a; y)

    a is a constant in the first term: the student follows the adapter, not the other way round. The first term is over
    all samples, the second over those whose label is known. Where t is no probability (NaN or a
    default such as -1: nothing was logged) a sample counts in neither.
    """

    def __init__(self, config: GemConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.teachers, self.tasks = config.teachers, inputs.tasks
        self.places = teacher_places(config, inputs)
        size = config.n_tokens * config.width
        self.norm = nn.LayerNorm(size)
        names = [f"{t.task} {t.column}" for t in self.teachers]
        self.hidden = ByName({name: nn.Linear(size, config.head_hidden) for name in names})
        self.out = ByName({name: nn.Linear(config.head_hidden, 1) for name in names})
        self.adapters = ByName({name: Adapter() for name in names})

    def forward(self, x: Tensor, batch: BatchLike) -> Tensor:
        """The last layer's X [B, N, d] and the batch -> a scalar in nats, float32."""
        x = self.norm(x.flatten(1))
        total = x.new_zeros((), dtype=torch.float32)
        for teacher, place in zip(self.teachers, self.places, strict=True):
            name = f"{teacher.task} {teacher.column}"
            k = self.tasks.index(teacher.task)
            said = batch.dense[:, place, None].float()
            known = (said >= 0.0) & (said <= 1.0)
            hidden = F.gelu(self.hidden[name](x))
            with float32(x.device.type):
                logit = torch.logit(torch.where(known, said, 0.5).clamp(LIMIT, 1.0 - LIMIT))
                mended = self.adapters[name](logit)
                student = self.out[name](hidden.float())
                target = torch.sigmoid(mended).detach()
                labels, mask = batch.labels[:, k, None], batch.label_mask[:, k, None] & known
                total = total + teacher.weight * log_loss(student, target, known, batch.weights)
                total = total + log_loss(mended, labels, mask, batch.weights)
        return total


def teacher_places(config: GemConfig, inputs: ModelInputs) -> list[int]:
    """Where each teacher's predictions stand in a dense row.

    Raises:
        ValueError: for a teacher of an unknown task, or whose column is no dense column of one number.
    """
    starts: dict[str, int] = {}
    at = 0
    for column, size in inputs.dense_columns:
        if size == 1:
            starts[column] = at
        at += size
    for teacher in config.teachers:
        if teacher.task not in inputs.tasks:
            raise ValueError(f"a teacher is of task {teacher.task!r}, which is none of {list(inputs.tasks)}")
        if teacher.column not in starts:
            raise ValueError(
                f"a teacher's predictions are in column {teacher.column!r}, which is no dense column of one number; "
                f"those are {sorted(starts)}"
            )
    return [starts[t.column] for t in config.teachers]


def untaught(config: GemConfig, inputs: ModelInputs) -> ModelInputs:
    """The inputs without the teachers' columns in the histories: their predictions are targets, never features."""
    columns = {t.column for t in config.teachers}
    sources = tuple(
        replace(s, floats=tuple((c, size) for c, size in s.floats if c not in columns)) for s in inputs.sources
    )
    return replace(inputs, sources=sources)


__all__ = ["Distillation", "Teacher", "teacher_places", "untaught"]

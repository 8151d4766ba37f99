"""What a model must beat on the same split: the base rate, a logistic regression, a small DIN.

The fitted ones take batches, ``fit(batches)``, and answer like a model: ``baseline(batch) -> logits [B, K]``.
"""

from gem_model.baselines.constant import ConstantRate
from gem_model.baselines.din import DIN, DinConfig
from gem_model.baselines.logistic import LogisticRegression

__all__ = ["DIN", "ConstantRate", "DinConfig", "LogisticRegression"]

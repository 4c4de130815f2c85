"""Numbers that rows of metrics.csv are made of."""

import torch


def mean(x) -> float | None:
    """None, an empty cell, where there is nothing to average."""
    return x.mean().item() if len(x) else None


def auc(high, low) -> float:
    """P(a value of `high` is above one of `low`), ties half."""
    low = low.sort().values
    sides = [torch.searchsorted(low, high, right=right).double() for right in (False, True)]
    return (sum(sides).mean() / 2 / len(low)).item()

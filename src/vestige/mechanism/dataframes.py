"""How is a DataFrame read? Its columns of numbers become one matrix, and its target columns what the loss is given."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vestige.mechanism.loading import TARGETS, Target


def is_frame(data: object) -> TypeGuard[object]:
    """Whether data are a DataFrame, of pandas or of polars."""
    return type(data).__name__ == "DataFrame" and hasattr(data, "columns") and hasattr(data, "to_numpy")


def columns_of(frame: Any, target: Target, users: object) -> tuple[tuple[Tensor, ...], int, object]:
    """Inputs and targets as tensors, how many of them are targets, and the users' ids.

    The model is given all other columns as the columns of one float matrix, in the frame's order.
    """
    names = list(frame.columns)
    if len(set(names)) != len(names):
        raise ValueError("data is a DataFrame with two columns of one name: rename one of them")
    if isinstance(users, str):
        if users not in names:
            raise ValueError(f"users={users!r} is no column of the DataFrame")
        names, users = [name for name in names if name != users], frame[users].to_numpy()
    wanted = [target] if isinstance(target, str) else target
    if wanted is None:
        wanted = [name for name in TARGETS if name in names][:1]
    if isinstance(wanted, int) or not wanted or not set(wanted) <= set(names):
        raise ValueError(f"target={target!r}: say which column of the DataFrame the loss is given, target='label', say")
    inputs = [name for name in names if name not in wanted]
    if not inputs:
        raise ValueError("data is a DataFrame of targets alone: the model is given nothing")
    matrix = np.stack([_numbers(frame, name).astype(np.float32) for name in inputs], axis=1)
    targets = [torch.as_tensor(_numbers(frame, name).copy()) for name in wanted]
    return (torch.as_tensor(matrix), *map(_usual, targets)), len(targets), users


def _numbers(frame: Any, name: object) -> NDArray[np.generic]:
    values: NDArray[np.generic] = frame[name].to_numpy()
    if values.dtype.kind not in "biuf":
        raise ValueError(
            f"data: column {name!r} of the DataFrame holds no numbers ({values.dtype}): leave it out, or make numbers "
            "of it by categories that are public, not read off the rows"
        )
    return values


def _usual(targets: Tensor) -> Tensor:
    """Classes as int64, other numbers in torch's default precision, as losses take them."""
    return targets.to(torch.get_default_dtype()) if targets.is_floating_point() else targets.long()

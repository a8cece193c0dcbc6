"""NOT PRIVATE: what did every step clip, add and release? For tests against the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vestige.files import write_atomically
from vestige.training.loop import Record, TrainingState


class Transcript:
    """NOT PRIVATE: every clipped sum, noise vector and release, in the scale of the method's paper."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._rows: dict[str, list[np.ndarray[Any, Any]]] = {
            "clipped_sum": [],
            "noise": [],
            "release": [],
            "direction": [],
            "exponent": [],
        }
        self._group: np.ndarray[Any, Any] | None = None

    def __call__(self, clipped_sum: Tensor, noise: Tensor) -> None:
        self._seen.append((clipped_sum, noise.clone()))

    def settle(self, fresh_share: float, state: TrainingState, expected_batch: float, record: Record) -> None:
        """Store the clipped sum and noise that the witness saw in this step with the release and the direction."""
        if self._group is None:
            self._group = state.layout.expand(torch.arange(state.layout.groups)).numpy()
        clipped_sum, noise = self._seen[-1]  # of several answers in a step, the one used for the update
        self._seen.clear()
        direction = state.gradient * expected_batch
        row = {
            "clipped_sum": clipped_sum,
            "noise": noise * fresh_share,
            "release": direction if fresh_share < 1 else clipped_sum + noise,
            "direction": direction,
        }
        if "exponent" in record.diagnostics:
            row["exponent"] = record.diagnostics["exponent"]
        for key, value in row.items():
            self._rows[key].append(value.cpu().numpy())

    def save(self) -> None:
        arrays = {key: np.stack(rows) for key, rows in self._rows.items() if rows}
        if self._group is not None:
            arrays["group"] = self._group

        def write(beside: Path) -> None:
            with open(beside, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]

        write_atomically(self.path, write)

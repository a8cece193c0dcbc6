"""NOT PRIVATE: what did every step clip, add and release, and what part of a release is what? Against the papers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vestige.files import write_atomically
from vestige.optim.memory import Blend, Memory
from vestige.training.loop import Record, TrainingState

Array = NDArray[np.floating]

PARTS = ("signal", "inherited_signal", "inherited_noise", "fresh_noise")
"""What a release is the sum of, in the order of `nonprivate_split`."""


class Transcript:
    """NOT PRIVATE: every clipped sum, noise vector and release, in the scale of the method's paper; where releases hold
    a memory, also its weights over the lags, and the norms of a release's parts (`nonprivate_split`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._rows: dict[str, list[Array]] = {
            "clipped_sum": [],
            "noise": [],
            "release": [],
            "direction": [],
            "exponent": [],
            "weights": [],
        }
        self._shares: list[float] = []
        self.split: Array | None = None
        """NOT PRIVATE: see `nonprivate_split`; once it is saved, and where releases hold a memory."""
        self._group: Array | None = None

    def __call__(self, clipped_sum: Tensor, noise: Tensor) -> None:
        self._seen.append((clipped_sum, noise.clone()))

    def settle(
        self, memory: Memory, sample_rate: float, state: TrainingState, expected_batch: float, record: Record
    ) -> None:
        """Store the clipped sum and noise that the witness saw in this step with the release and the direction."""
        if self._group is None:
            self._group = state.layout.expand(torch.arange(state.layout.groups)).numpy()
        clipped_sum, noise = self._seen[-1]  # of several answers in a step, the one used for the update
        self._seen.clear()
        direction, recursive = state.gradient * expected_batch, memory.fresh_share < 1
        fresh_share = memory.share_at(record.step, sample_rate) if isinstance(memory, Blend) else memory.fresh_share
        row = {
            "clipped_sum": clipped_sum,
            "noise": noise * fresh_share,
            "release": direction if recursive else clipped_sum + noise,
            "direction": direction,
        }
        if "exponent" in record.diagnostics:
            row["exponent"] = record.diagnostics["exponent"]
        weights = record.diagnostics.get("weights", state.learner.memory.get("weights"))
        if recursive and "past" in state.learner.memory:
            depth = state.learner.memory["past"].shape[-2]
            self._shares.append(fresh_share)
            row["weights"] = _by_group(weights, state.layout.groups, depth)
        for key, value in row.items():
            self._rows[key].append(value.cpu().numpy())

    def mean_split(self) -> dict[str, float]:
        """NOT PRIVATE: the norm of each part over all groups, mean over steps; empty without a memory."""
        if self.split is None:
            return {}
        return dict(zip(PARTS, map(float, np.sqrt((self.split**2).sum(1)).mean(0)), strict=True))

    def save(self) -> None:
        arrays = {key: np.stack(rows) for key, rows in self._rows.items() if rows}
        if self._group is not None:
            arrays["group"] = self._group
        if "weights" in arrays:
            self.split = nonprivate_split(**_numbers(arrays), fresh_share=np.array(self._shares))
            arrays["nonprivate_split"] = self.split

        def write(beside: Path) -> None:
            with open(beside, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]

        write_atomically(self.path, write)


def _by_group(weights: Tensor | None, groups: int, depth: int) -> Tensor:
    """Weights over lags 1, 2, ..., of every group, zero where there is no release yet: [groups, depth]."""
    padded = torch.zeros(groups, depth, dtype=torch.float64)
    if weights is not None:
        padded[..., : weights.shape[-1]] = weights.cpu()
    return padded


def _numbers(arrays: dict[str, Array]) -> dict[str, Array]:
    return {key: arrays[key] for key in ("clipped_sum", "noise", "release", "weights", "group")}


def nonprivate_split(
    clipped_sum: Array,
    noise: Array,
    release: Array,
    weights: Array,
    group: Array,
    fresh_share: float | Array,
) -> Array:
    """NOT PRIVATE: the norms of the four parts of each release, [steps, groups, 4] in the order of PARTS.

    A release is fresh_share * clipped sum + memory + fresh noise, and the memory a factor times the weighted mean of
    past releases, each of which was a query and its own noise: so the memory is inherited signal (past queries) plus
    inherited noise (FO-DP-SGD's Lemma B.2, SMA-DP-SGD's Lemma 3). The factor is found from the release itself.

    Formal guarantees: none. It needs sums without noise; and the parts are not independent, since the weights follow
    from the same noise.
    """
    found = np.zeros((len(release), weights.shape[1], len(PARTS)))
    shares = np.broadcast_to(fresh_share, len(release))
    for member in range(weights.shape[1]):
        mine = group == member
        sums, fresh, out = (part[:, mine].astype(np.float64) for part in (clipped_sum, noise, release))
        for step in range(len(out)):
            lags = min(step, weights.shape[2])
            by_lag = weights[step, member, :lags]
            memory = out[step] - shares[step] * sums[step] - fresh[step]
            recalled, carried = (by_lag @ past[step - lags : step][::-1] for past in (out, fresh))
            factor = memory @ recalled / max(recalled @ recalled, 1e-300) if lags else 0.0
            parts = shares[step] * sums[step], memory - factor * carried, factor * carried, fresh[step]
            found[step, member] = [np.linalg.norm(part) for part in parts]
    return found

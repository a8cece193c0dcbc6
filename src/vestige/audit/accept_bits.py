"""Are rejected candidates free? An attack on the accept bits of selective methods, against the papers' claim and ours.

The data are made up so that no gradient says anything: every candidate is pure noise. The loss rises with the one
weight for all examples but the canary, whose loss falls a thousand times faster, so that its presence turns the test
around: which candidates are kept depends on its presence, even before any gradient does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vestige import accounting
from vestige.accounting.ledger import Ledger
from vestige.accounting.lower_bounds.bounds_from_scores import epsilon_lower_bound
from vestige.accounting.lower_bounds.roc_and_confidence_intervals import Interval, area_under_curve
from vestige.assumptions import PRICE_ALONE
from vestige.audit.canaries import Canary
from vestige.audit.result import ENOUGH
from vestige.audit.unstacked_runs import LoneRuns
from vestige.layout import Layout
from vestige.methods.registry import make_method
from vestige.priced_questions import SampledGaussian
from vestige.training.loop import TrainingState, run
from vestige.training.planning import Request, plan

OTHERS = 10
SILENT = 1000.0
"""The gradient's noise multiplier: it says nothing, and is charged next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the first accepted candidate gives away."""

    method: str
    runs: int
    trials: int
    threshold: float
    sigma_v: float
    delta: float
    confidence: float
    area: Interval
    """Under the ROC of guessing by the first accepted candidate's direction."""
    claimed_epsilon: float
    """What the papers claim for one accepted update: not a guarantee."""
    claimed_area: float
    epsilon: float
    """Ours, for all trials of a run."""
    allowed_area: float
    claim_broken: bool
    contradicts: bool

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "assumptions": list(PRICE_ALONE)}


class Slope(nn.Module):
    """One weight, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs), 1)


def staircase(outputs: Tensor, targets: Tensor) -> Tensor:
    """Rises with the weight where the target is positive, falls where negative, and has no gradient anywhere."""
    return (targets * torch.floor(outputs[:, 0] * 1e6)).mean()


class SelectiveRuns(LoneRuns):
    """Runs that end with their first accepted candidate."""

    def first_accepted(self, present: bool) -> float:
        """The direction of the first accepted candidate; 0 if there is none among the trials."""
        self._model.load_state_dict(self._start)
        self._planted.present = present
        curator = self._curator(Ledger(None), lambda: present)
        state = TrainingState(self._model, self.method, self._layout, self._plan.lr)
        for record in run(state, self.method, curator, self._plan.noise_multiplier, self._plan.steps):
            if record.accepted:
                return float(np.sign(next(self._model.parameters()).item()))
        return 0.0


def attack_selection(
    method: str = "dpsur",
    *,
    threshold: float = -3.0,
    sigma_v: float = 1.37,
    trials: int = 30,
    runs: int = 400,
    delta: float = 1e-5,
    confidence: float = 0.95,
) -> Selection:
    """Guess the canary's presence by the direction of the first accepted candidate.

    Formal guarantees: `claim_broken` of a true claim, and `contradicts` of a true price of ours, are True with
    probability at most 2 (1 - `confidence`), whatever the scores' distributions (an area's interval is approximate).
    """
    if method not in ("dpsur", "dpsgd-br"):
        raise ValueError(f"method={method!r} selects nothing: the accept bits of dpsur and dpsgd-br are attacked")
    if runs < 8:
        raise ValueError(f"runs={runs} must be 8 at least, half of them with the canary; hundreds show something")
    own: dict[str, Any] = {"progress": "none", "buffer": 1} if method == "dpsgd-br" else {}
    asked = make_method(method, momentum=0.0, sigma_v=sigma_v, threshold=threshold, validation_batch=OTHERS + 1, **own)
    data = (torch.zeros(OTHERS, 1), torch.ones(OTHERS))
    canary = Canary("selection", torch.ones(1, 1), torch.full((1,), -1000.0))
    chosen = replace(asked, gate=asked.gate.at(OTHERS + 1))
    model = Slope()
    request = Request(sample_rate=1.0, steps=trials, delta=delta, noise_multiplier=SILENT, lr=1.0)
    lone = SelectiveRuns(
        model, staircase, data, canary, chosen, plan(model, Layout.of(model), chosen, OTHERS + 1, request)
    )
    scores = np.array([lone.first_accepted(i % 2 == 0) for i in range(runs)])
    inside, outside = scores[::2], scores[1::2]
    claim: accounting.History = {SampledGaussian(1.0, SILENT): 1, SampledGaussian(1.0, sigma_v): 1}
    ours: accounting.History = {question: trials for question in chosen.gate.questions(chosen.questions(1.0, SILENT))}
    area = area_under_curve(inside, outside, confidence)
    curves = [accounting.tradeoff(history, delta) for history in (claim, ours)]
    broken = [
        (area.low > curve.area() and runs >= ENOUGH)
        or epsilon_lower_bound(inside, outside, delta, confidence, curve.promise).breaks_promise
        for curve in curves
    ]
    return Selection(
        method=method,
        runs=runs,
        trials=trials,
        threshold=threshold,
        sigma_v=sigma_v,
        delta=delta,
        confidence=confidence,
        area=area,
        claimed_epsilon=accounting.epsilon(claim, delta, "rdp"),
        claimed_area=curves[0].area(),
        epsilon=accounting.epsilon(ours, delta),
        allowed_area=curves[1].area(),
        claim_broken=broken[0],
        contradicts=broken[1],
    )

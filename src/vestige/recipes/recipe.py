"""What is a recipe? All settings of a private run but its budget, with the source they come from, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any, Literal

from vestige.mechanism.feature_moments import PrivateMoments

KINDS = ("images", "features", "text", "tabular")
Curve = tuple[tuple[float, float], ...]
"""A setting by epsilon: (epsilon, value), epsilons rising; between two of them it follows a power law."""


def at(curve: Curve, epsilon: float) -> float:
    """The value of a setting at this epsilon; beyond the ends, that of the nearest end.

    >>> at(((1, 100), (4, 400)), 2)
    200.0
    """
    below = [point for point in curve if point[0] <= epsilon]
    above = [point for point in curve if point[0] >= epsilon]
    if not below or not above:
        return float((below[-1] if below else above[0])[1])
    (e0, v0), (e1, v1) = below[-1], above[0]
    share = 0.0 if e0 == e1 else log(epsilon / e0) / log(e1 / e0)
    return float(v0 * (v1 / v0) ** share)


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was published for a recipe: (epsilon, test accuracy in percent), and whether that epsilon holds."""

    accuracy: tuple[tuple[float, float], ...]
    source: str
    valid: str
    """Whether the sampling that was run is the one that was priced: yes, no, or what is known."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of one private run. The noise follows from epsilon, the sampling rate and the steps.

    `sample_rate` and `steps` stay as they are for data of another size, and with them the noise multiplier: only the
    noise in a mean gradient falls, in proportion to the number of examples.
    """

    name: str
    kind: str
    summary: str
    source: str
    task: str | None = None
    """The task of `vestige tasks`; None: it is given, or the data are the user's own."""
    network: str | None = None
    """The model for a user's data (`tasks.models.NETWORKS`), unless one is given."""
    method: str = "dp-sgd"
    clip: float = 1.0
    momentum: float = 0.0
    sample_rate: float
    steps: Curve
    lr: Curve | Literal["auto"] = "auto"
    average: str | None = None
    augment: int | None = None
    balance: str | None = None
    standardise: bool = False
    moments_noise: Curve | None = None
    """The noise multiplier of the moments of scattering features that are asked for before the first step; None: each
    example is normalised by itself, which asks nothing."""
    sampling: str = "poisson"
    needs: str | None = None
    """What must be named besides data: "prior", "features" (a checkpoint) or "columns"."""
    head_steps: int = 0
    head_lr: float | None = None
    rows_at_once: int | None = None
    """How many views or rows are computed at once; None: a whole sample."""
    published: Published | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    @property
    def solves(self) -> bool:
        """Whether it asks once about every example, and has no batch and no steps to choose."""
        return self.sample_rate == 1 and self.steps == ((1, 1),)

    def moments(self, epsilon: float) -> PrivateMoments | None:
        """What is asked, and charged, before the first step."""
        return None if self.moments_noise is None else PrivateMoments(at(self.moments_noise, epsilon))

    def settings(self, epsilon: float) -> dict[str, Any]:
        """The fields of a `Job` at this epsilon."""
        momentum = {"momentum": self.momentum} if self.momentum else {}
        moments = self.moments(epsilon)
        return {
            "recipe": self.name,
            "method": self.method,
            "options": {"max_grad_norm": self.clip, **momentum},
            "epsilon": epsilon,
            "sample_rate": self.sample_rate,
            "steps": round(at(self.steps, epsilon)),
            "lr": self.lr if isinstance(self.lr, str) else at(self.lr, epsilon),
            "average": self.average,
            "augment": self.augment,
            "balance": self.balance,
            "standardise": self.standardise,
            **({} if moments is None else {"normalise": "private", "moments_noise": moments.multiplier}),
            "sampling": self.sampling,
            "head_steps": self.head_steps,
            "head_lr": self.head_lr,
            "physical_batch": None if self.rows_at_once is None else max(1, self.rows_at_once // (self.augment or 1)),
            **({} if self.task is None else {"task": self.task}),
        }

    def row(self) -> dict[str, Any]:
        """What `vestige recipes` lists."""
        published = self.published
        return {
            "name": self.name,
            "kind": self.kind,
            "task": self.task,
            "summary": self.summary,
            "source": self.source,
            "needs": self.needs,
            "published": None if published is None else [list(pair) for pair in published.accuracy],
            "published_by": None if published is None else published.source,
            "published_valid": None if published is None else published.valid,
        }

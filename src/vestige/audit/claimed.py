"""Do the epsilons of the papers on selective updates hold? Lower bounds at each paper's own settings, by dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vestige.accounting.lower_bounds.rejected import Claimed, certify
from vestige.accounting.selective import published_claim_epsilon

DELTA, EPSILON = 1e-5, 1.0
VALIDATION = 256
"""The batch of DPSGD-BR's loss test, which its paper does not give: DPSUR's."""


@dataclass(frozen=True)
class Study:
    """The settings that a paper prints, and what had to be assumed."""

    name: str
    paper: str
    what: str
    notes: tuple[str, ...]
    buffer: int

    def settings(self, published: Mapping[str, Any]) -> Iterator[tuple[str, Claimed]]:
        sizes = published["dpsgd_br"]["examples"]
        own = self.buffer == 2
        printed = published["dpsgd_br" if own else "dpsur"]
        for dataset, row in printed["table4_initial_parameters_epsilon_1" if own else "parameters_epsilon_1"].items():
            size = sizes[dataset]
            yield (
                dataset,
                Claimed(
                    rate=row["batch"] / size,
                    sigma_t=row["sigma_t"],
                    validation_rate=row.get("validation_batch", VALIDATION) / size,
                    sigma_v=row["sigma_v"],
                    threshold=row["beta"],
                    buffer=self.buffer,
                ),
            )

    def rows(self, published: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """For each dataset: the updates that the paper's accounting allows at epsilon 1, its claim, and what an
        adversary proves about them."""
        for dataset, settings in self.settings(published):
            updates = updates_for(settings)
            found, claimed = certify(settings, updates, DELTA), claim(settings, updates)
            facts = {"claimed": claimed, "refuted": found.epsilon > claimed}
            yield {"dataset": dataset, **asdict(found), **facts, **asdict(settings)}


def claim(settings: Claimed, updates: int) -> float:
    """What the paper claims for so many updates: no guarantee."""
    facts = (settings.rate, settings.sigma_t, settings.validation_rate, settings.sigma_v)
    return published_claim_epsilon(updates, *facts, DELTA)


def updates_for(settings: Claimed, epsilon: float = EPSILON) -> int:
    """As many updates as the paper's own accounting allows."""
    low, high = 0, 1
    while claim(settings, high) <= epsilon:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if claim(settings, middle) <= epsilon else (low, middle)
    return low


COMMON = (
    "loss noise is 2 C_v sigma_v, as in DPSUR's code; gradients are clipped one by one; batches are Poisson",
    "the bound is computed, not sampled: it holds with certainty, up to rounding that is accounted for",
)
STUDIES = {
    study.name: study
    for study in (
        Study(
            "br-lower-bound",
            "DPSGD-BR (Sci Rep 2026)",
            "an adversary's epsilon at its Table 4, where 1 is claimed",
            (
                "Algorithm 1 as printed, where two candidates are always collected (n = 1 is never reached), with the"
                " preference of equation 16 as the text has it; no decay, which would only reduce noise",
                "the batch of the loss test is not in the paper: 256; theta is C_v",
                *COMMON,
            ),
            2,
        ),
        Study(
            "dpsur-lower-bound",
            "DPSUR (PVLDB 17(6), 2024)",
            "an adversary's epsilon at its settings for epsilon 1",
            COMMON,
            1,
        ),
    )
}

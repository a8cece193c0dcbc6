"""What would a run of a selective method cost? Priced from its public facts, without training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isnan

from vestige.accounting.composition import epsilon
from vestige.accounting.meaning.meaning import meaning
from vestige.assumptions import ADJACENCY, PRICE_ALONE
from vestige.checks import check_delta, check_multiplier, check_rate, check_steps
from vestige.priced_questions import Question, SampledGaussian, Trial

RELEASES = {"dpsur": "y", "dpsgd-br": "yz", "dpsgd-br-stepped": "yz"}
"""What an accepted trial of a method shows: its candidate, or its noisy loss too, since a buffer compares those."""

ACCOUNTANTS = ("trial-level", "every-trial", "published")


def check_selective(method: str) -> None:
    if method not in RELEASES:
        raise ValueError(
            f"method={method!r} makes no trials; those that do: {', '.join(RELEASES)}. Others are priced without a name"
        )


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The public facts of a selective run."""

    method: str
    trials: int
    sample_rate: float
    sigma_t: float
    validation_rate: float
    sigma_v: float
    threshold: float
    delta: float = 1e-5
    accepted: int | None = None

    def __post_init__(self) -> None:
        check_selective(self.method)
        check_steps(self.trials, "trials")
        check_rate(self.sample_rate)
        check_multiplier(self.sigma_t, "sigma_t")
        check_delta(self.delta)
        if not 0 < self.validation_rate <= 1:
            raise ValueError(f"validation_rate={self.validation_rate} must lie in (0, 1]")
        check_multiplier(self.sigma_v, "sigma_v")
        if isnan(self.threshold):
            raise ValueError(f"threshold={self.threshold} must be a number: trials below so many clip bounds are kept")
        if self.accepted is not None and not 0 <= self.accepted <= self.trials:
            raise ValueError(f"accepted={self.accepted} must lie between 0 and the number of trials, {self.trials}")

    def questions(self, accounting_by: str) -> dict[Question, int]:
        gradient = SampledGaussian(self.sample_rate, self.sigma_t)
        test = SampledGaussian(self.validation_rate, self.sigma_v)
        if accounting_by == "every-trial":
            return {gradient: 2 * self.trials} if gradient == test else {gradient: self.trials, test: self.trials}
        tested = (self.validation_rate, self.sigma_v, self.threshold, RELEASES[self.method])
        return {Trial(self.sample_rate, self.sigma_t, *tested): self.trials}


def price(run: Trials, accounting_by: str) -> dict[str, object]:
    """An epsilon that holds ("trial-level", "every-trial"), or what the papers claim ("published"), never both as one.

    Formal guarantees: `epsilon` bounds a run of so many trials, accepted or not, with parameters fixed in advance.
    `published_claim_epsilon` bounds nothing.
    """
    if accounting_by not in ACCOUNTANTS:
        raise ValueError(f"accounting={accounting_by!r} must be one of {', '.join(ACCOUNTANTS)}")
    facts = {key: value for key, value in asdict(run).items() if value is not None}
    result: dict[str, object] = {"accounting": accounting_by, **facts, "adjacency": ADJACENCY}
    if run.accepted is not None:
        parts = (run.sample_rate, run.sigma_t, run.validation_rate, run.sigma_v)
        result["published_claim_epsilon"] = published_claim_epsilon(run.accepted, *parts, run.delta)
    elif accounting_by == "published":
        raise ValueError("accepted=None: the published claim charges accepted updates only; give their number")
    if accounting_by != "published":
        asked = run.questions(accounting_by)
        result["epsilon"] = epsilon(asked, run.delta)
        result["epsilon_rdp"] = epsilon(asked, run.delta, "rdp")
        result["accountant"] = "pld"
        result |= {**asdict(meaning(asked, run.delta)), "assumptions": list(PRICE_ALONE)}
    return result


def published_claim_epsilon(
    accepted: int, rate: float, multiplier: float, validation_rate: float, validation_multiplier: float, delta: float
) -> float:
    """What the papers on selective updates claim: the Renyi total of the accepted trials alone.

    Formal guarantees: none. Rejected trials are not free (docs/theorems.md 3): this is for comparison with
    published tables, and never an epsilon of ours. Price trials as `Trial` questions.
    """
    return epsilon(
        {
            SampledGaussian(rate, multiplier): accepted,
            SampledGaussian(validation_rate, validation_multiplier): accepted,
        },
        delta,
        "rdp",
    )

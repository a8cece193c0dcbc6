"""What do the canaries of one run show? At least so much epsilon with a confidence, beside the accountant's at most."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vestige.records import Audited, RunResult
from vestige.training.run_folder import RunFolder


@dataclass(frozen=True)
class OneRun:
    """The audit of a finished run, and its guarantee."""

    run: str
    method: str
    audited: Audited
    epsilon: float | None
    """The accountant's; None where no epsilon holds."""
    delta: float

    @property
    def contradicts(self) -> bool:
        return self.epsilon is not None and self.audited.epsilon_lower_bound > self.epsilon

    def to_json(self) -> dict[str, Any]:
        facts = {"run": self.run, "method": self.method, "epsilon": self.epsilon, "delta": self.delta}
        return {**facts, **asdict(self.audited), "contradicts": self.contradicts}

    def lines(self) -> list[str]:
        found = self.audited
        most = "no epsilon holds for it" if self.epsilon is None else f"at most {self.epsilon:.4g} (accountant)"
        lines = [
            f"{self.run}: {self.method}, {found.canaries} canaries, each there by a coin; {found.right} of "
            f"{found.guesses} guesses were right",
            f"epsilon is at least {found.epsilon_lower_bound:.3g} ({found.confidence:.0%} confidence) and {most} at "
            f"delta {self.delta:g}",
        ]
        if self.contradicts:
            chance = f"or this is one of the {1 - found.confidence:.2g} of runs in which the bound fails"
            lines.append(f"CONTRADICTION: the accountant's epsilon is wrong for this run, {chance}")
        return lines


def read(path: str | Path) -> OneRun:
    """The audit that a run's folder holds."""
    folder = RunFolder(path)
    content = folder.result()
    if content is None:
        raise ValueError(f"run={str(path)!r} holds no finished run: there is no result.json in it")
    result = RunResult.from_json(content)
    if result.audit is None:
        raise ValueError(
            f"run={str(path)!r} kept no canaries: plant some with vestige train --audit 1000, or attack its method by "
            f"vestige audit --method {result.method}"
        )
    return OneRun(str(path), result.method, result.audit, result.statement.epsilon, result.statement.delta)

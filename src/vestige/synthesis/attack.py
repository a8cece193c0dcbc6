"""Does a made-up set give away who was in the private one? A membership attack that sees the made-up set alone.

Members are rows that the generator was made from, others are rows of the same kind that it was not. An attacker scores
each by how much likelier the made-up set makes it than a set of reference rows does; the area under the ROC says how
well that tells them apart. Figures compare private rows without noise: they are for the owner of these rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vestige import tasks
from vestige.accounting import Guarantee
from vestige.accounting.meaning.tradeoff import of_one_pair
from vestige.audit.membership import Success, success
from vestige.files import read_json
from vestige.synthesis.curator import embedded
from vestige.synthesis.schema import Codes, Column, read_table
from vestige.synthesis.texts_with_label_prompts import read_texts
from vestige.training.run_folder import RunFolder
from vestige.training.verify import verify

MOST = 20_000
"""Rows of each kind that are looked at."""
ATTACKS = {
    "nearest": "how much nearer the made-up rows are than the reference rows",
    "copies": "whether a made-up row is in the same cells",
    "words": "how much likelier its pairs of words are in the made-up texts than in the reference texts",
    "phrases": "the share of its phrases of four words that the made-up texts have, and the reference texts have not",
}


@dataclass(frozen=True)
class SyntheticMembership:
    """How well an attack that sees only the synthetic set separates members from non-members."""

    run: str
    kind: str
    members: int
    others: int
    reference: int
    epsilon: float | None
    delta: float
    area_allowed: float | None
    """The largest area that the run's guarantee allows."""
    attacks: dict[str, Success]

    @property
    def contradicts(self) -> bool:
        """Whether an attack did better than the guarantee allows, beyond the error of its interval."""
        return self.area_allowed is not None and any(
            found.area.low > self.area_allowed for found in self.attacks.values()
        )

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "contradicts": self.contradicts, "nonprivate": True}

    def lines(self) -> list[str]:
        allowed = "" if self.area_allowed is None else f"; at most {self.area_allowed:.3f} by the guarantee"
        price = "no epsilon" if self.epsilon is None else f"epsilon {self.epsilon:.4g} at delta {self.delta:g}"
        found = [
            f"{self.run}: {self.members} members and {self.others} others, by the made-up {self.kind} alone ({price}, "
            f"{self.reference} reference {self.kind})",
        ]
        for name, each in self.attacks.items():
            area, caught = each.area, each.detected_at_1_percent
            found.append(
                f"{name} ({ATTACKS[name]}): ROC area {area.estimate:.3f} ({area.low:.3f} to {area.high:.3f}{allowed}), "
                f"detected at 1% false alarms {caught.estimate:.1%} ({caught.low:.1%} to {caught.high:.1%})"
            )
        verdict = "no contradiction; an area of 0.5 is guessing, and a weak attack proves nothing"
        if self.contradicts:
            verdict = "CONTRADICTION: an attack did better than the guarantee allows"
        return [*found, verdict]


def attack(run: str | Path, members: str | Path, others: str | Path, confidence: float = 0.95) -> SyntheticMembership:
    """Attack the made-up set of a folder with files of members and of others. Half of the others are the attacker's
    reference, and the other half is told apart from the members."""
    if tasks.same_rows(members, others):
        raise ValueError(f"others={str(others)!r} are the members: give rows that the generator was not made from")
    folder = RunFolder(run)
    job = folder.request().get("synthesize")
    if job is None or not (folder.path / "synthesis.json").exists():
        raise ValueError(f"run={str(run)!r} is no finished synthesis: there is no synthesis.json in it")
    file = folder.path / read_json(folder.path / "synthesis.json")["file"]
    if "model" in job:
        sets = [_texts(each, job) for each in (file, members, others)]
        made, inside, outside = ([text for text in each if text.strip()][:MOST] for each in sets)
        reference, held = outside[::2], outside[1::2]
        _require(reference, held, inside)
        scores = of_texts(made, reference, [*inside, *held])
    else:
        columns = tuple(Column(**{**column, "values": tuple(column["values"])}) for column in job["columns"])
        tables = [read_table(str(each), columns)[:MOST] for each in (file, members, others)]
        made_rows, inside_rows, outside_rows = tables
        _require(outside_rows[::2], outside_rows[1::2], inside_rows)
        scores = of_rows(made_rows, outside_rows[::2], np.concatenate([inside_rows, outside_rows[1::2]]), columns)
        reference, held, inside = outside_rows[::2], outside_rows[1::2], inside_rows  # type: ignore[assignment]
    there = np.arange(len(inside) + len(held)) < len(inside)
    promise = verify(run).guarantee
    return SyntheticMembership(
        run=str(run),
        kind="texts" if "model" in job else "rows",
        members=len(inside),
        others=len(held),
        reference=len(reference),
        epsilon=promise.epsilon,
        delta=promise.delta,
        area_allowed=_allowed(promise),
        attacks={name: success([values], [there], confidence) for name, values in scores.items()},
    )


def _require(reference: Any, held: object, inside: object) -> None:
    if min(map(len, (reference, held, inside))) < 2:
        raise ValueError("others: give some rows of the same kind that were not trained on, two hundred, say")


def _allowed(promise: Guarantee) -> float | None:
    """A member and another are told apart where one takes the other's place: epsilon for replacing a row counts."""
    known = promise.meaning
    if known is None or known.epsilon_replacing is None:
        return None
    return float(of_one_pair(known.epsilon_replacing, promise.delta).area())


def of_rows(made: Codes, reference: Codes, asked: Codes, columns: Sequence[Column]) -> dict[str, object]:
    """Scores of rows: larger where a row is likelier a member."""
    vectors = [torch.from_numpy(column.vectors()) for column in columns]
    points = [embedded(torch.from_numpy(np.ascontiguousarray(each)), vectors) for each in (made, reference, asked)]
    near, far = (_distance(points[2], each) for each in points[:2])
    known = {row.tobytes() for row in made}
    return {"nearest": far - near, "copies": np.array([float(row.tobytes() in known) for row in asked])}


def _distance(asked: torch.Tensor, points: torch.Tensor) -> Any:
    """The distance of each row to the nearest point."""
    parts = [torch.cdist(part, points, p=1).amin(dim=1) for part in asked.split(256)]
    return torch.cat(parts).double().numpy()


def of_texts(made: Sequence[str], reference: Sequence[str], asked: Sequence[str]) -> dict[str, Any]:
    """Scores of texts: larger where a text is likelier a member."""
    likely = [_likelihoods(each, asked) for each in (made, reference)]
    phrases = [{phrase for text in each for phrase in _runs(text, 4)} for each in (made, reference)]
    rare = phrases[0] - phrases[1]
    shared = [sum(phrase in rare for phrase in own) / max(1, len(own)) for own in (list(_runs(t, 4)) for t in asked)]
    return {"words": likely[0] - likely[1], "phrases": np.array(shared)}


def _likelihoods(texts: Sequence[str], asked: Sequence[str]) -> Any:
    """The mean log-likelihood of each text's words under pairs of words of other texts, smoothed by single words."""
    singles: Counter[object] = Counter(word for text in texts for word in text.split())
    pairs: Counter[object] = Counter(pair for text in texts for pair in _runs(text, 2))
    total, kinds = sum(singles.values()), len(singles) + 1

    def likelihood(text: str) -> float:
        words = text.split()
        logs = [math.log((singles[word] + 1) / (total + kinds)) for word in words[:1]]
        for first, second in pairwise(words):
            alone = (singles[second] + 1) / (total + kinds)
            logs.append(math.log((pairs[first, second] + 5 * alone) / (singles[first] + 5)))
        return sum(logs) / max(1, len(logs))

    return np.array([likelihood(text) for text in asked])


def _runs(text: str, length: int) -> Iterable[tuple[str, ...]]:
    words = text.split()
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def _texts(file: str | Path, job: dict[str, Any]) -> list[str]:
    found: list[str] = read_texts(str(file), job["text_column"], None, ())[0]
    return found


__all__ = ["ATTACKS", "SyntheticMembership", "attack"]

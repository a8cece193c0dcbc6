"""What can the curator be asked? Each kind of question is a value; its price is in `accounting`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class Question:
    """The public facts of one question that decide its price. Subclasses register under `kind`."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Question]]] = {}

    def __init_subclass__(cls) -> None:
        Question.kinds[cls.kind] = cls

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Question:
        cls = Question.kinds.get(row.get("kind", ""))
        if cls is None:
            raise ValueError(f"unknown kind of question {row.get('kind')!r}; known: {', '.join(Question.kinds)}")
        return cls(**{f.name: row[f.name] for f in fields(cls)})


@dataclass(frozen=True)
class SampledGaussian(Question):
    """A sum over a Poisson sample, noised: `multiplier` is noise over sensitivity, `rate` the inclusion probability."""

    kind: ClassVar[str] = "sampled-gaussian"
    rate: float
    multiplier: float

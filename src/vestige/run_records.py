"""What is written about a run? Its result, and its record in a comparison: frozen dataclasses with one schema each.

`from_json` reads what `to_json` wrote, and refuses a field that is unknown, missing or of another type. The files are
flat: the fields of a record's groups (statement, terms and selection) are keys at the top level. Every other key is a
diagnostic of the method's last step, and must be a number or a list of numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import Any, Literal

from vestige.assumptions import check as check_assumption
from vestige.files import read_value
from vestige.priced_questions import Question
from vestige.renaming import earlier_attribute

FORMAT_VERSION = 2
"""The format of a comparison folder; a record or specification of another version is refused."""
TARGETS = {"epsilon": "epsilon", "paper_sigma": "the paper's sigma", "noise_multiplier": "noise multiplier"}


@dataclass(frozen=True)
class PrivacyTarget:
    """What a run may spend (`epsilon`), or the noise it gets (`noise_multiplier`, or a paper's own sigma)."""

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind not in TARGETS:
            raise ValueError(f"budget={self.kind!r} is unknown; choose from {', '.join(TARGETS)}")
        if not 0 < self.value < inf:
            raise ValueError(f"{self.kind}={self.value} must be positive and finite")

    def amount(self, kind: str) -> float | None:
        """The value if the target is of this kind, else None."""
        return self.value if self.kind == kind else None

    def __str__(self) -> str:
        return f"{TARGETS[self.kind]} {self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a comparison. Its id does not depend on the device or on where the data are stored."""

    task: str
    label: str
    method: str
    options: Mapping[str, object]
    budget: PrivacyTarget
    sample_rate: float
    steps: int
    delta: float
    stage: Literal["tuning", "tuned", "auto", "given"]
    lr: float | None
    """The learning rate; None: `factor` times the automatic one."""
    factor: float
    seed: int
    holdout: float
    """Share of the training data on which the run is evaluated instead of the test set; 0 for final runs."""
    evaluations: int
    reproducible: bool
    physical_batch: int | None
    sampling: str = "poisson"
    subset: tuple[int, int] | None = None
    """How many training and test examples were cut from the dataset, the first of each class; None: it is whole."""

    @cached_property
    def id(self) -> str:
        content = json.dumps({"version": FORMAT_VERSION, **self.to_json()}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:20]

    @property
    def without_curve(self) -> Run:
        """The same run, evaluated at its end only: a record with a curve serves for it too."""
        return replace(self, evaluations=0)

    @property
    def kind(self) -> str:
        """The id shared by runs that differ only in their seed and in how often they were evaluated."""
        return replace(self.without_curve, seed=0).id

    @property
    def cell(self) -> tuple[str, str, str]:
        """Its task, budget and contender, which decide its row in every table."""
        return self.task, str(self.budget), self.label

    def __str__(self) -> str:
        return f"{self.label} on {self.task}, {self.budget}, {self.stage}, {self.steps} steps, seed {self.seed}"

    def to_json(self) -> dict[str, object]:
        facts = asdict(self)
        if self.sampling == "poisson":
            del facts["sampling"]  # as until 0.2, when there was no choice
        if self.subset is None:
            del facts["subset"]  # as until 0.3
        return facts

    @classmethod
    def from_json(cls, content: object) -> Run:
        """The run that a record describes; ValueError names the field that is wrong."""
        return read_value(cls, content, "its run")


# --- groups of fields ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The guarantee of one run, released alone, and the public facts that it rests on."""

    epsilon: float | None
    """None where no theorem gives one: `reasons` says why."""
    delta: float
    accountant: str
    epsilon_rdp: float | None
    budget: float | None
    """The epsilon that the run was allowed; None where only its noise was given."""
    noise_multiplier: float
    sample_rate: float
    expected_batch: float
    groups: int | None = None
    """How many groups of parameters were clipped apart; the first versions did not write it for stacked runs."""
    lr: float | None
    lr_reason: str
    asked: int
    """How many questions were charged."""
    adjacency: str
    reasons: tuple[str, ...] = ()
    epsilon_if_noise_were_secret: float | None = None
    attacker_accuracy: float | None = None
    """What the epsilon means (`accounting.Meaning`): upper bounds, which versions before 0.3 did not write."""
    detection_at_1_percent: float | None = None
    gaussian_mu: float | None = None
    epsilon_replacing: float | None = None
    replacing_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What decides, besides the charged questions, which guarantee holds."""

    sampling: str
    noise: str
    arithmetic: str | None = None
    """In which numbers noise was added; None before 0.2, when they were float32."""
    coordinates: int | None = None
    nonprivate_outputs: bool = False
    schedule: str = "fixed"
    filter_epsilon: float | None = None
    filter_expects: tuple[Mapping[str, object], ...] | None = None
    """The questions that a Renyi filter expects: they fix its orders and weights before the first answer."""

    @classmethod
    def from_json(cls, content: object) -> Terms:
        return read_value(cls, content, "the terms")

    def to_json(self) -> dict[str, object]:
        return _flat(self)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a selective method did with its trials, and what its paper would claim for that."""

    trials: int
    accepted: int
    rejected: int
    updates: int
    degraded: int
    accounting: str
    published_claim_epsilon: float | None
    """Not a guarantee: the papers charge applied updates only, and that is refuted (docs/selective.md)."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What the canaries of a run show: epsilon is at least so much, with a confidence."""

    canaries: int
    guesses: int
    right: int
    epsilon_lower_bound: float
    confidence: float


@dataclass(frozen=True)
class LedgerEnd:
    """How long a ledger's hash chain was when a result was written, and its last hash."""

    rows: int
    head: str


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How one run of `vestige train` ended: result.json of its folder."""

    task: str | None = None
    """None where the run was started from Python, with data of the user's own."""
    method: str
    accuracy: float | None = None
    """On the public test set."""
    perplexity: float | None = None
    """On public texts, of a language model."""
    private_accuracy: float | None = None
    """A noised answer about private examples, which was charged."""
    private_accuracy_error: float | None = None
    """The standard deviation of its noise."""
    statement: Statement
    selection: Selection | None = None
    audit: Audited | None = None
    """What its canaries show, if any were planted."""
    steps: int
    seed: int | None = None
    nonprivate_seconds: float | None = None
    """How long training took: computed from the data without noise, and therefore in no file."""
    stopped: str
    run: str | None
    """The run's folder."""
    diagnostics: Mapping[str, object]
    assumptions: tuple[Mapping[str, object], ...] = ()
    """What the guarantee rests on (`vestige.assumptions`); versions before 0.3 did not write it."""
    ledger: LedgerEnd | None = None

    def __post_init__(self) -> None:
        _check_diagnostics("the result", self.diagnostics)
        _check_assumptions(self.assumptions)

    @classmethod
    def from_json(cls, content: object) -> RunResult:
        if isinstance(content, dict) and "seconds" in content:  # until 0.3 it was written
            content = dict(content)
            content["nonprivate_seconds"] = content.pop("seconds")
        return read_value(cls, _grouped(cls, content), "the result")

    @property
    def seconds(self) -> float | None:
        """The earlier name of `nonprivate_seconds`."""
        earlier_attribute("seconds", "nonprivate_seconds")
        return self.nonprivate_seconds

    def to_json(self) -> dict[str, object]:
        content = _flat(replace(self, nonprivate_seconds=None))
        if self.statement.epsilon is not None:
            del content["reasons"]
        if not self.assumptions:
            del content["assumptions"]  # as versions before 0.3 wrote it
        return content


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """A completed run of a comparison, as stored in runs/ID.json.

    A tuning run is evaluated on held-out private examples without noise, so its score is never called accuracy.
    """

    run: Run
    accuracy: float | None = None
    statement: Statement
    selection: Selection | None = None
    steps: int
    seconds: float | None
    stopped: str
    diagnostics: Mapping[str, object]
    assumptions: tuple[Any, ...] = ()
    """As in a result; versions before 0.3 wrote sentences."""
    charged: tuple[Mapping[str, Any], ...]
    """Every question that was asked, with its `count`."""
    terms: Terms
    curve: tuple[tuple[float | None, ...], ...] | None = None
    """Step, accuracy, epsilon so far and test loss, at each evaluation during the run; older records lack the loss."""
    nonprivate_validation_accuracy: float | None = None
    nonprivate_validation_curve: tuple[tuple[float | None, ...], ...] | None = None
    pictures: Mapping[str, Any]
    """Each diagnostic as a series of (step, value); `pictures` is the file format's name."""
    stacked: int
    """How many runs were trained together."""
    memory_mb: float | None

    def __post_init__(self) -> None:
        finals, tuning = ("accuracy", "curve"), ("nonprivate_validation_accuracy", "nonprivate_validation_curve")
        needed, foreign = (tuning, finals) if self.run.stage == "tuning" else (finals, tuning)
        for key in needed:
            if getattr(self, key) is None:
                raise ValueError(f"its record lacks the field {key!r}")
        for key in foreign:
            if getattr(self, key) is not None:
                raise ValueError(f"its record has a field {key!r}, which no run of stage {self.run.stage} has")
        _check_diagnostics("its record", self.diagnostics)
        _check_assumptions([each for each in self.assumptions if not isinstance(each, str)])
        for row in self.charged:
            _check_charge(row)

    @property
    def id(self) -> str:
        return self.run.id

    @property
    def score(self) -> float:
        """The accuracy that ranks the run: on the test set, or on held-out private examples while tuning."""
        score = self.nonprivate_validation_accuracy if self.run.stage == "tuning" else self.accuracy
        assert score is not None
        return score

    @property
    def best(self) -> float | None:
        """The best accuracy at any evaluation of a final run, which some papers print beside the final one; None where
        it was not watched. It is chosen by the test set: no estimate of what a model will do."""
        seen = [point[1] for point in self.curve or () if point[1] is not None]
        return max(self.score, *seen) if seen else None

    @cached_property
    def history(self) -> dict[Question, int]:
        """Its charges as a history, which accounting prices."""
        return {Question.from_json(dict(row)): row["count"] for row in self.charged}

    def to_json(self) -> dict[str, Any]:
        secret = {"epsilon_if_noise_were_secret": self.statement.epsilon_if_noise_were_secret}
        content = {**_heading(self.run, "done"), **_flat(self), **secret}
        # JSON has no infinity and no NaN: both become null.
        return {key: None if isinstance(part, float) and not isfinite(part) else part for key, part in content.items()}


@dataclass(frozen=True)
class FailedRun:
    """A run of a comparison that ended in an error; no model of it was kept."""

    run: Run
    error: str

    @property
    def id(self) -> str:
        return self.run.id

    def to_json(self) -> dict[str, Any]:
        return {**_heading(self.run, "failed"), "error": self.error}


RunRecord = CompletedRun | FailedRun


def read_record(content: object) -> RunRecord:
    """The record of a comparison's run; ValueError names the field that is wrong."""
    if not isinstance(content, dict):
        raise ValueError("not a record")
    if content.get("version") != FORMAT_VERSION:
        raise ValueError(f"format {content.get('version')}, this version reads {FORMAT_VERSION}")
    run, status = Run.from_json(content.get("run")), content.get("status")
    if content.get("id") != run.id:
        raise ValueError("its name is not the hash of the run that it describes")
    if status not in ("done", "failed"):
        raise ValueError(f"status is {status!r}, neither done nor failed")
    own = {key: part for key, part in content.items() if key not in ("version", "id", "status")}
    if status == "failed":
        return read_value(FailedRun, own, "its record")
    return read_value(CompletedRun, _grouped(CompletedRun, own), "its record")


def completed(records: Iterable[RunRecord]) -> list[CompletedRun]:
    return [record for record in records if isinstance(record, CompletedRun)]


def failed(records: Iterable[RunRecord]) -> list[FailedRun]:
    return [record for record in records if isinstance(record, FailedRun)]


# --- flat files ------------------------------------------------------------------------------------------------------

GROUPS: dict[str, Any] = {"statement": Statement, "terms": Terms, "selection": Selection}
"""Groups whose fields are stored among the record's own."""


def _heading(run: Run, status: str) -> dict[str, object]:
    return {"version": FORMAT_VERSION, "id": run.id, "run": run.to_json(), "status": status}


def _grouped(kind: Any, content: object) -> object:
    """The keys of a flat file as a record's fields and groups; the keys left over are its diagnostics."""
    if not isinstance(content, dict):
        return content
    rest, made = dict(content), {}
    for name in (each.name for each in fields(kind)):
        if name in GROUPS:
            found = {each.name: rest.pop(each.name) for each in fields(GROUPS[name]) if each.name in rest}
            if found or name != "selection":
                made[name] = found
        elif name in rest and name != "diagnostics":
            made[name] = rest.pop(name)
    return {**made, "diagnostics": rest}


def _flat(record: Any) -> dict[str, object]:
    """A record or group as the keys of a flat file; an optional field that is None is left out."""
    content: dict[str, object] = {}
    for each in fields(record):
        part = getattr(record, each.name)
        if part is None and each.default is None:
            continue
        if each.name in GROUPS:
            content |= _flat(part)
        elif each.name == "diagnostics":
            content |= part
        else:
            content[each.name] = _plain(part)
    return content


def _plain(part: object) -> object:
    if isinstance(part, Run):
        return part.to_json()
    if is_dataclass(part) and not isinstance(part, type):
        return asdict(part)
    if isinstance(part, tuple | list):
        return [_plain(each) for each in part]
    return {key: _plain(each) for key, each in part.items()} if isinstance(part, Mapping) else part


def _check_diagnostics(name: str, diagnostics: Mapping[str, object]) -> None:
    for key, value in diagnostics.items():
        if not _numeric(value):
            raise ValueError(f"{name} has an unknown field {key!r}: another version wrote it")


def _check_assumptions(assumptions: Iterable[Mapping[str, object]]) -> None:
    """Refuse what is not of the closed list."""
    for each in assumptions:
        check_assumption(each.get("name"), each.get("status"), each.get("detail"))


def _numeric(value: object) -> bool:
    return all(map(_numeric, value)) if isinstance(value, list) else isinstance(value, int | float | None)


def _check_charge(row: Any) -> None:
    try:
        Question.from_json(row)
        right = isinstance(row["count"], int) and row["count"] > 0
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"charged: {row!r} is no question with its count ({type(error).__name__}: {error})") from error
    if not right:
        raise ValueError(f"charged: count={row['count']} must be a whole number from 1 up")

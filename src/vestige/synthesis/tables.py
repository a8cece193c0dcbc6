"""How does a private table become a made-up one? A job is a value: it is planned, asked, sampled, judged and sealed."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from vestige import accounting, tasks
from vestige.accounting.ledger import Ledger, LedgerHistory
from vestige.assumptions import ADJACENCY, Status, record
from vestige.budget.spending import Provenance, account_of, attach, continued, of_users
from vestige.checks import check_delta, check_epsilon, check_number, check_steps, renamed
from vestige.files import write_json
from vestige.mechanism.users.ownership import facts_of_users, ownership
from vestige.priced_questions import Gaussian, Question
from vestige.randomness.keys import Randomness
from vestige.synthesis import quality
from vestige.synthesis.curator import InFile, InMemory, Interrupted, TableCurator
from vestige.synthesis.evolution import ITERATIONS, EvolutionPlan, Evolved, evolved
from vestige.synthesis.marginals import Fitted, MarginalsPlan, fitted
from vestige.synthesis.output import CARD, RECORD, Synthesis, card_of, check_writable, page_of, write_rows
from vestige.synthesis.schema import BINS, Codes, Column, column_in_memory, columns_of, described, read_table
from vestige.tf32 import check_device
from vestige.training.persistence import begun
from vestige.training.run_folder import RunFolder
from vestige.units import Users

METHODS = ("marginals", "evolution")
KNOWN: dict[str, tuple[Status, str]] = {
    "unit": ("assumed", "a row is a unit of its own"),
    "adjacency": ("checked", "a blank row adds to no count; the number of rows is public"),
    "one_example_per_row": ("assumed", "a row of the table is one example"),
    "fixed_steps": ("checked", "the questions and their noise are planned before the first of them"),
    "sampling": ("checked", "every row is asked about in every question"),
    "rows_apart": ("not needed", "no model computes rows: each is counted by itself"),
    "loss_per_example": ("not needed", "there is no loss"),
    "padding": ("not needed", "rows are not padded"),
    "divisor": ("checked", "shares are of the public number of rows"),
    "bad_rows": ("assumed", "a value outside the declared categories ends the command before anything is asked"),
    "processes": ("not needed", "one process"),
    "key": ("checked", "drawn from the operating system for this run, and never written"),
}
"""What a synthesis of rows knows of the assumptions of every guarantee."""
EVALUATION_SHARE = 0.05
"""Of the budget, in squares of mu, for a private evaluation."""


@dataclass(frozen=True, kw_only=True)
class TableSynthesis:
    """A synthesis of rows, as requested. All of it but the data is public."""

    data: object
    columns: Any
    epsilon: float
    delta: float = 1e-5
    samples: int | None = None
    """None: as many as there are rows."""
    method: str = "marginals"
    bins: int = BINS
    iterations: int | None = None
    label_column: str | None = None
    """The column that a classifier, trained on the made-up rows, is judged by."""
    user_column: str | None = None
    """The column that names whose each row is: all rows of one user are hidden, of which at most `rows_per_user` are
    used."""
    rows_per_user: int | None = None
    test: object = None
    """Rows with the same columns that need no protection: quality is measured on them, without noise."""
    evaluate: str | None = None
    seed: int | None = None
    """Of public chance, such as which rows are sampled, never of noise; None: another one each time."""
    reproducible: bool = False
    device: str = "cpu"
    budget: Any = None
    """The book that pays; None: that of VESTIGE_BUDGET, if it is set."""
    derived_from: str | None = None
    """The file that the rows were made of, for the book to know them."""
    slot: str | None = None


@dataclass(frozen=True)
class TablePlan:
    """What will be asked. `multiplier` is that of the synthesis; an evaluation has its own."""

    method: MarginalsPlan | EvolutionPlan
    evaluation: float | None

    def runs(self) -> list[tuple[Question, int]]:
        last: list[tuple[Question, int]] = [] if self.evaluation is None else [(Gaussian(self.evaluation), 1)]
        return [*self.method.questions(), *last]


def plan_of(job: TableSynthesis, columns: Sequence[Column], multiplier: float) -> TablePlan:
    made: MarginalsPlan | EvolutionPlan = MarginalsPlan(len(columns), multiplier)
    if job.method == "evolution":
        made = EvolutionPlan(multiplier, job.iterations or ITERATIONS)
    share = EVALUATION_SHARE / (1 - EVALUATION_SHARE)
    return TablePlan(made, None if job.evaluate is None else multiplier / sqrt(share))


class TableRun:
    """A prepared synthesis: the table is read, the noise is calibrated, and nothing was asked yet."""

    def __init__(self, job: TableSynthesis, out: Path | None, *, resume: bool = False) -> None:
        self.columns = _checked(job)
        self.folder = None if out is None else RunFolder(out)
        began = self.folder.request()["synthesize"].get("seed") if resume and self.folder is not None else None
        if job.seed is None:  # public chance is written down: a run that is resumed varies its candidates as before
            job = replace(job, seed=secrets.randbits(32) if began is None else began)
        elif began not in (None, job.seed):
            raise ValueError(f"resume: seed is not what it was when the run began, {began}; give that, or none")
        self.job = job
        check_writable(_suffix(job.data))
        rows = read_table(job.data, self.columns)
        with renamed({"data": "test"}):
            self._test = None if job.test is None else read_table(job.test, self.columns, "the public rows")
        if self._test is not None and _same_rows(self._test, rows):
            raise ValueError("test: these rows are the data: a figure on them is no release; give public rows")
        key = Randomness.reproducible(job.seed or 0) if job.reproducible else Randomness.secret()
        rows, users = self._of_users(rows, key)
        check_delta(job.delta, len(rows))
        self.samples = job.samples or len(rows)
        self.plan = plan_of(job, self.columns, self._calibrated())
        seeded = job.reproducible
        self.ledger = Ledger(None if self.folder is None else self.folder.ledger, replays_are_free=seeded)
        self.ledger.budget = accounting.Budget(job.epsilon, job.delta, self.plan.runs())
        self._facts = accounting.Facts(
            sampling="every-example",
            noise="seeded" if seeded else "secret",
            coordinates=_coordinates(self.columns),
            users=users,
        )
        self._open(len(rows), resume)
        for name, (status, detail) in KNOWN.items():
            if name != "key" or not seeded:
                record(self.ledger, name, status, detail)
        answers = InMemory() if self.folder is None else InFile(self.folder.path / "answers.pt")
        sizes = [column.cells for column in self.columns]
        most = 1 if users is None or users.rows_per_user is None else users.rows_per_user
        self.curator = TableCurator(rows, sizes, self.ledger.ask, key, answers, job.device, most)

    def _of_users(self, rows: Codes, key: Randomness) -> tuple[Codes, Users | None]:
        """The rows that are used, at most so many of each user, and what is public of the users."""
        job = self.job
        if job.user_column is None:
            return rows, None
        if isinstance(job.data, str | Path):
            ids = tasks.read_columns(Path(job.data), {"user_column": job.user_column})["user_column"]
        else:
            ids = column_in_memory(job.data, job.user_column, "user_column")
        owned = ownership(ids, len(rows))
        users = facts_of_users(owned, "rows", job.rows_per_user, None, job.delta)
        assert users.rows_per_user is not None
        return rows[owned.bounded(users.rows_per_user, key)], users

    def _calibrated(self) -> float:
        job = self.job
        return accounting.calibrate(
            lambda multiplier: accounting.history_of_runs(plan_of(job, self.columns, multiplier).runs()),
            job.epsilon,
            job.delta,
        )

    def _open(self, population: int, resume: bool) -> None:
        """Open the folder and the ledger, new or where an interrupted run left them."""
        facts = self._public(population)
        if not resume or self.folder is None:
            entry = self._reserve(None)
            facts |= {} if entry is None else {"budget": entry}
            try:
                if self.folder is not None:
                    self.folder.create({"synthesize": _request(self.job), "public": facts})
                self.ledger.open(facts)
            except BaseException:
                if self.ledger.spending is not None:
                    self.ledger.spending.finish()
                raise
        else:
            was = begun(self.folder)
            for key, value in sorted(
                facts.items(), key=lambda fact: fact[0] not in ("columns", "population", "method")
            ):
                if was.get(key) != value:
                    raise ValueError(
                        f"resume: {key} is not what it was when the run began; give the same data and settings"
                    )
            run = continued(was, self.job.budget)
            if self.folder.ledger.exists():
                kept = len(InFile(self.folder.path / "answers.pt"))
                history = self.ledger.claim()
                self.ledger.close()
                self._check_resumable(self.folder, history, kept)
                self.ledger.resume(kept)
            else:
                self.ledger.open({**facts, **({"budget": was["budget"]} if "budget" in was else {})})
            if run is not None:
                self._reserve(run)

    def _check_resumable(self, folder: RunFolder, history: LedgerHistory, kept: int) -> None:
        """Refuse a finished run, and one that was killed between a charge and its answer, if the budget does not hold
        that question again."""
        if history.files is not None:
            raise ValueError(f"resume={str(folder.path)!r} is already finished; vestige verify checks it")
        job, spent = self.job, history.spent(self.ledger.replays_are_free)
        asked, total = sum(spent.values()), sum(count for _, count in self.plan.runs())
        if asked <= kept or self.ledger.replays_are_free:
            return
        answered = Counter(history.paid[step, 0] for step in range(kept) if (step, 0) in history.paid)
        missing = Counter(accounting.history_of_runs(self.plan.runs())) - answered
        whole = accounting.epsilon(spent + missing, job.delta)
        if whole > job.epsilon:
            so_far = accounting.epsilon(spent, job.delta)
            raise ValueError(
                f"resume={str(folder.path)!r}: question {kept + 1} of {total} was charged, and its answer is lost: the "
                f"process was killed before it was kept. Asked again, the whole would cost epsilon {whole:.4g}, more "
                f"than epsilon={job.epsilon:g}. Begin another synthesis, in a new folder; this one has cost epsilon "
                f"{so_far:.4g} at delta {job.delta:g}, which adds to the other's"
            )

    def _reserve(self, run: str | None) -> dict[str, object] | None:
        """In the book of the dataset, if there is one."""
        job, account = self.job, account_of(self.job.budget)
        for name in ("derived_from", "slot"):
            if account is None and getattr(job, name) is not None:
                raise ValueError(f"{name}={getattr(job, name)!r} is about a book: give budget=BOOK, too")
        if account is not None:
            made_of = job.derived_from or account.derived_from
            account = replace(account, slot=job.slot or account.slot, derived_from=made_of)
        in_file = isinstance(job.data, str | Path)
        source = tasks.source_of(None, str(job.data)) if in_file else Provenance(data=job.data)
        return attach(
            self.ledger,
            of_users(False if account is None else account, job.user_column),
            accounting.history_of_runs(self.plan.runs()),
            purpose=f"synthesize by {job.method}",
            source=source or Provenance(),
            facts=self._facts,
            run=run,
            spent=self.ledger.spent,
        )

    def _public(self, population: int) -> dict[str, object]:
        job, facts = self.job, self._facts
        kept = ("sampling", "noise", "arithmetic", "coordinates", "nonprivate_outputs", "schedule")
        options = (
            {"bins": job.bins}
            if job.method == "marginals"
            else {"bins": job.bins, "iterations": job.iterations or ITERATIONS}
        )
        return {
            "synthesis": "rows",
            "population": population,
            "epsilon": job.epsilon,
            "delta": job.delta,
            "noise_multiplier": self.plan.method.multiplier,
            "sample_rate": 1.0,
            "steps": sum(count for _, count in self.plan.runs()),
            "method": {"name": job.method, "options": options},
            **{key: getattr(facts, key) for key in kept},
            "adjacency": ADJACENCY if facts.users is None else facts.users.adjacency,
            **({} if facts.users is None else {"users": facts.users.to_json()}),
            "columns": described(self.columns),
            "samples": self.samples,
        }

    def guarantee(self) -> accounting.Guarantee:
        return accounting.guarantee(self.ledger.spent, self.job.delta, self._facts, self.ledger.assumptions)

    def complete(self, on_step: Callable[[int, int], bool] = lambda done, of: True) -> Synthesis | None:
        """Ask, sample, judge and seal; None where `on_step` said False: what was answered is kept, to be resumed."""
        begin, job = time.perf_counter(), self.job
        seed = np.random.SeedSequence(job.seed)
        random = [np.random.default_rng(child) for child in seed.spawn(3)]
        total = sum(count for _, count in self.plan.runs())
        self.curator.on_answer = lambda done: on_step(done, total)
        try:
            found = self._asked(random[0])
            cells = found.sample(self.samples, random[1])
            judged = quality.of_table(cells, self.columns, job.label_column, self._test)
            if job.evaluate is not None:
                judged |= self._evaluated(cells)
        except Interrupted:
            self.ledger.close()
            return None
        values = {column.name: column.decode(cells[:, place], random[2]) for place, column in enumerate(self.columns)}
        made = Synthesis(
            kind="rows",
            method=job.method,
            rows=values,
            count=self.samples,
            guarantee=self.guarantee(),
            quality=judged,
            nonprivate_seconds=round(time.perf_counter() - begin, 3),
            asked=sum(self.ledger.spent.values()),
            out=None if self.folder is None else self.folder.path,
        )
        self._seal(made, cells, found)
        return made

    def _asked(self, random: np.random.Generator) -> Fitted | Evolved:
        if isinstance(self.plan.method, MarginalsPlan):
            return fitted(self.curator, self.plan.method)
        return evolved(self.curator, self.plan.method, self.columns, random)

    def _evaluated(self, cells: Codes) -> dict[str, float]:
        """One noised count: of how many private rows a classifier of the made-up ones says the label."""
        assert self.plan.evaluation is not None
        label = [column.name for column in self.columns].index(str(self.job.label_column))
        predict = quality.classifier(cells, self.columns, label)
        share = self.curator.right_answers(predict, label, self.plan.evaluation)
        return {
            "private_accuracy": share,
            "private_accuracy_error": self.curator.rows_per_unit * self.plan.evaluation / self.curator.population,
        }

    def _seal(self, made: Synthesis, cells: Codes, found: Fitted | Evolved) -> None:
        if self.folder is None:
            self.ledger.close()
            return
        path = self.folder.path
        file = write_rows(path, made.rows, self.columns, _suffix(self.job.data))
        shares = {column.name: each for column, each in zip(self.columns, _released(found), strict=True)}
        (path / "report.html").write_text(page_of(made, self.columns, cells, shares, self._test), encoding="utf-8")
        write_json(path / RECORD, {**made.to_json(), "file": file.name})
        self.ledger.finish(self.folder.hashes())
        self.ledger.close()
        (path / CARD).write_text(card_of(path), encoding="utf-8")


def _released(found: Fitted | Evolved) -> list[Any]:
    return found.columns if isinstance(found, Fitted) else found.shares


def _checked(job: TableSynthesis) -> tuple[Column, ...]:
    check_number("epsilon", job.epsilon)
    check_epsilon(job.epsilon)
    check_delta(job.delta)
    check_device(job.device)
    if job.method not in METHODS:
        raise ValueError(f"method={job.method!r} is unknown; choose from {', '.join(METHODS)}")
    for name in ("samples", "iterations"):
        if getattr(job, name) is not None:
            check_steps(getattr(job, name), name)
    if job.rows_per_user is not None:
        check_steps(job.rows_per_user, "rows_per_user")
    if (job.user_column is None) != (job.rows_per_user is None):
        missing = "user_column" if job.user_column is None else "rows_per_user"
        raise ValueError(f"{missing}=None: user_column and rows_per_user go together")
    if job.user_column is not None and job.user_column in [column.name for column in columns_of(job.columns)]:
        raise ValueError(f"user_column={job.user_column!r} is among the columns: who owns which row is not made up")
    if job.iterations is not None and job.method != "evolution":
        raise ValueError(f"iterations={job.iterations} goes with method='evolution'")
    if job.evaluate not in (None, "private"):
        raise ValueError(f"evaluate={job.evaluate!r} must be 'private'")
    columns = columns_of(job.columns, job.bins)
    names = {column.name: column for column in columns}
    if job.evaluate is not None and job.label_column is None:
        raise ValueError("label_column=None: evaluate='private' judges a classifier; say which column it is to tell")
    if job.label_column is not None and (job.label_column not in names or names[job.label_column].is_number):
        raise ValueError(f"label_column={job.label_column!r} is no column of categories among those declared")
    if isinstance(job.test, str | Path) and isinstance(job.data, str | Path):
        tasks.require_public(job.test, job.data)
    return columns


def _coordinates(columns: Sequence[Column]) -> int:
    """How many numbers an answer has, at most."""
    most = sorted((column.cells for column in columns), reverse=True)
    return max(sum(most), len(most) * most[0] * (most[1] if len(most) > 1 else 1))


def _same_rows(first: Codes, second: Codes) -> bool:
    """Whether two tables have the same rows, in any order."""
    if first.shape != second.shape:
        return False
    return np.array_equal(first[np.lexsort(first.T)], second[np.lexsort(second.T)])


def _suffix(data: object) -> str:
    return Path(data).suffix if isinstance(data, str | Path) else ".csv"


def _request(job: TableSynthesis) -> dict[str, object]:
    """What is written down of a job; rows that were given in memory are not."""
    in_files = {name: str(value) if isinstance(value, str | Path) else None for name, value in _files(job).items()}
    columns = described(columns_of(job.columns, job.bins))
    paid = None if job.budget in (None, False) else str(getattr(job.budget, "book", job.budget))
    return {**asdict(replace(job, data=None, test=None, columns=None, budget=paid)), **in_files, "columns": columns}


def _files(job: TableSynthesis) -> dict[str, object]:
    return {"data": job.data, "test": job.test}


def load(folder: RunFolder) -> TableSynthesis:
    """The job that a folder was started with."""
    job = folder.request().get("synthesize")
    if job is None or "columns" not in job:
        raise ValueError(f"resume={str(folder.path)!r} is no synthesis of rows: continue it as it was started")
    columns = tuple(Column(**{**column, "values": tuple(column["values"])}) for column in job["columns"])
    return TableSynthesis(**{**job, "columns": columns})

"""What does one call do? `train`: plan, ask, remember, move, and keep the books."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from vestige import accounting
from vestige.accounting.ledger import Ledger, LedgerError, read
from vestige.engines.independence import require_independent
from vestige.engines.registry import engine_by_name
from vestige.layout import Layout
from vestige.mechanism.clipping import Engine, Loss
from vestige.mechanism.curator import Curator, Data
from vestige.mechanism.loss_difference import example_losses, right_answers
from vestige.mechanism.moments import PrivateMoments, fill
from vestige.mechanism.noise import Randomness
from vestige.mechanism.sampling import SAMPLINGS
from vestige.methods.base import Method
from vestige.methods.registry import build
from vestige.questions import BudgetSpent, Question
from vestige.training.loop import Public, Record, State, accuracy, run
from vestige.training.physical_batch import PhysicalBatch, check_physical_batch, part_of_a_run
from vestige.training.planning import DEFAULT_STEPS, Filter, Plan, plan, questions
from vestige.training.run_folder import RunFolder, paced
from vestige.training.transcript import Transcript


def train(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    method: Method | str = "fo-dp-sgd",
    sample_rate: float,
    steps: int | None = None,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    lr: float | Literal["auto"] = "auto",
    sampling: str = "poisson",
    physical_batch: PhysicalBatch = None,
    engine: str = "bookkeeping",
    reproducible: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    request: dict[str, Any] | None = None,
    public: tuple[Tensor, Tensor] | None = None,
    normalise: PrivateMoments | None = None,
    nonprivate_transcript: str | Path | None = None,
    nonprivate_logs: bool = False,
) -> Training:
    """Train `model` in place with differential privacy; iterate over the result to make the steps happen.

    `loss(outputs, targets)` is any loss of a batch, such as `nn.functional.cross_entropy`; it is applied to one example
    at a time. `data` is a tuple of tensors (inputs..., targets) or a map-style dataset of such tuples. Give `epsilon`
    (the noise follows), or `noise_multiplier` (epsilon follows), or both (training stops before epsilon is exceeded;
    without `steps`, as many are planned as it affords). A step of a selective method is a trial, kept or not. `public`
    are validation examples that nobody needs to protect, for schedules that look at them. `normalise` asks, before the
    first step, for the moments that the model's first module standardises its inputs with (`with_moments`).
    `physical_batch` splits each sample into parts of that size, which changes memory and nothing else; "auto" finds the
    largest that fits, on made-up examples (`fitting`). `reproducible=seed` makes noise and sampling predictable, for
    tests: such a run protects nobody and has no epsilon.
    With `out`, a folder receives the ledger, checkpoints and records, and `resume=True` continues an interrupted run.

    Formal guarantees: (epsilon, delta)-differential privacy of everything the iteration yields and of the final model,
    for adding or removing one example, under the assumptions listed in `training.guarantee().assumptions`.
    """
    chosen = build(method) if isinstance(method, str) else method
    require_independent(model)
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling={sampling!r} is unknown; choose from {', '.join(SAMPLINGS)}")
    check_physical_batch(physical_batch)
    return Training(
        model,
        data,
        chosen,
        loss,
        engine=engine_by_name(engine),
        limits={
            "sample_rate": sample_rate,
            "steps": steps,
            "delta": delta,
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            "lr": lr,
        },
        sampling=sampling,
        physical_batch=physical_batch,
        seed=reproducible,
        folder=RunFolder(out) if out is not None else None,
        resume=resume,
        request=request,
        public=public,
        normalise=normalise,
        transcript=nonprivate_transcript,
        nonprivate_logs=nonprivate_logs,
    )


class Training:
    """A private run: iterate over it for its records; ask it what may be said about it at any time."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        method: Method,
        loss: Loss,
        *,
        engine: Callable[[nn.Module, Loss, Layout], Engine],
        limits: dict[str, Any],
        sampling: str,
        physical_batch: PhysicalBatch,
        seed: int | None,
        folder: RunFolder | None,
        resume: bool,
        request: dict[str, Any] | None,
        public: tuple[Tensor, Tensor] | None,
        normalise: PrivateMoments | None,
        transcript: str | Path | None,
        nonprivate_logs: bool = False,
    ) -> None:
        self.layout = layout = Layout.of(model, method.grouping)
        device = next(model.parameters()).device
        self.model, self.method, self.folder = model, method, folder
        self.transcript = Transcript(Path(transcript)) if transcript is not None else None
        self.ledger = Ledger(folder.ledger if folder else None, replays_are_free=seed is not None)
        rate = limits["sample_rate"]
        drawn = method.noise.sampling(rate) if sampling == "poisson" else SAMPLINGS[sampling](rate)
        self._curator = Curator(
            data,
            engine(model, loss, layout),
            layout,
            drawn,
            Randomness.secret() if seed is None else Randomness.reproducible(seed),
            self.ledger.ask,
            device=device,
            physical_batch=None if physical_batch == "auto" else physical_batch,
            losses=example_losses(model, loss),
            right=right_answers(model),
            nonprivate_witness=self.transcript,
            noise=method.noise.start(limits["sample_rate"], limits["steps"] or DEFAULT_STEPS),
        )
        self.method = method = replace(method, gate=method.gate.at(self._curator.population))
        self._normalise, self._normalised = normalise, normalise is None
        self._first = () if normalise is None else normalise.questions
        self.plan: Plan = plan(model, layout, method, self._curator.population, **limits, first=self._first)
        self.state = State(model, method, layout, self.plan.lr)
        if physical_batch == "auto":
            self._curator.physical_batch = part_of_a_run(
                model, engine, loss, layout, method, self._curator.blank(),
                self._curator.population, self.plan.sample_rate, self.plan.steps,
            )  # fmt: skip
        self.facts = accounting.Facts(
            sampling=drawn.kind,
            noise="secret" if seed is None else "seeded",
            nonprivate_outputs=transcript is not None or nonprivate_logs,
            schedule="filtered" if method.gate.adaptive else "fixed",
            filter_epsilon=self.plan.epsilon if method.gate.adaptive else None,
        )
        self._public = Public(self._charged, partial(accuracy, model, public) if public is not None else None)
        self.log: dict[str, Any] = {}
        """Released quantities put here while a record is being consumed are written beside it."""
        self._odometer = accounting.Odometer()
        self._counted: Counter[Question] = Counter()
        self._open(resume, request or {})
        if self.plan.epsilon is not None:
            limit = Filter if method.gate.adaptive else accounting.Budget
            self.ledger.budget = limit(self.plan.epsilon, self.plan.delta, self._planned)

    @property
    def _planned(self) -> dict[Question, int]:
        plan = self.plan
        return questions(self.method, plan.sample_rate, plan.noise_multiplier, plan.steps, self._first)

    @property
    def physical_batch(self) -> int | None:
        """How many examples are taken at once; None: a whole sample."""
        return self._curator.physical_batch

    @property
    def expected_batch(self) -> float:
        return self._curator.expected_batch

    @property
    def nonprivate_broken_examples(self) -> int:
        """How many sampled examples had a non-finite gradient. Computed without noise: keep it to yourself."""
        return int(self._curator.nonprivate_broken_examples)

    def __iter__(self) -> Iterator[Record]:
        records = self._records()
        if self.folder is None:
            return records
        return self.folder.log(paced(records, self._save), self.state.step, self.log)

    def guarantee(self) -> accounting.Guarantee:
        """What may be said about everything released so far."""
        return accounting.guarantee(self.ledger.spent, self.plan.delta, self.facts)

    @property
    def terms(self) -> dict[str, Any]:
        """What decides, beside the charges, which guarantee holds: all that `verification.reprice` needs."""
        keys = ("sampling", "noise", "nonprivate_outputs", "schedule")
        terms = {key: getattr(self.facts, key) for key in keys}
        if self.facts.schedule == "filtered":
            # A filter's orders and weights must be fixed before the first answer, and anyone must be able to redo it.
            terms["filter_epsilon"] = self.facts.filter_epsilon
            terms["filter_expects"] = [question.to_json() for question in self._planned]
        return terms

    def spent(self) -> float | None:
        """An upper bound on epsilon so far, read in microseconds; None where no epsilon holds.

        Where questions follow from earlier answers it is the filter's from the first step on: nothing less is proved.
        """
        if replace(self.facts, schedule="fixed", filter_epsilon=None) != accounting.Facts():
            return None
        if self.facts.schedule == "filtered":
            return self.facts.filter_epsilon
        by_renyi = self._charged()
        # The loss distribution of the whole plan bounds every part of it, and is tighter than Renyi at the end.
        if self.plan.epsilon is not None:
            return min(by_renyi, self.plan.epsilon)
        return by_renyi

    def _charged(self) -> float:
        """Epsilon of all that was charged, by Renyi, whether or not it is a guarantee."""
        self._odometer.add_many(self.ledger.spent - self._counted)
        self._counted = Counter(self.ledger.spent)
        return self._odometer.epsilon(self.plan.delta)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model holds the average that the method keeps for evaluation; without one, nothing changes."""
        return self.state.averaged()

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result and the final weights beside the ledger."""
        if self.transcript is not None:
            self.transcript.save()
        if self.folder is not None:
            sealed = {**result, "ledger": {"rows": self.ledger.rows, "head": self.ledger.head}}
            with self.averaged():
                self.folder.finish(sealed, self.model.state_dict())
        self.ledger.close()

    def _records(self) -> Generator[Record, None, None]:
        plan = self.plan
        with contextlib.suppress(BudgetSpent):
            self._ask_moments()
        if not self._normalised:
            return
        for record in run(self.state, self.method, self._curator, plan.noise_multiplier, plan.steps, self._public):
            if self.transcript is not None:
                self.transcript.settle(self.method.memory.fresh_share, self.state, self.expected_batch, record)
            yield replace(record, epsilon=self.spent())

    def _ask_moments(self) -> None:
        """What the model's inputs are standardised with, asked once, before the first step."""
        if self._normalised:
            return
        assert self._normalise is not None
        moments = self._normalise
        totals = self._curator.sums(moments.of, moments.bounds, moments.multiplier, step=-1)
        fill(self.model, totals, self._curator.population)
        self._normalised = True

    def _open(self, resume: bool, request: dict[str, Any]) -> None:
        public = {
            **self.plan.to_json(),
            "method": repr(self.method),
            **self.terms,
            "population": self._curator.population,
            "groups": list(self.layout.group_names),
            "adjacency": "add/remove one example",
            "normalise": repr(self._normalise),
        }
        if self.folder is None:
            self.ledger.open(public)
            return
        if not resume:
            self.folder.create({**request, "public": public})
        else:
            self._check_same(self.folder.request()["public"], public)
        if resume and self.folder.checkpoint.exists():
            self._restore()
            return
        if self.folder.ledger.exists():
            # The first checkpoint is written before the first question, so a run killed before it has asked nothing.
            if b'"row": "ask"' in self.folder.ledger.read_bytes():
                raise LedgerError(f"{self.folder.ledger} exists but there is no checkpoint beside it to resume from")
            self.folder.ledger.unlink()
        self.ledger.open(public)
        self._save()

    def _check_same(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for key, value in now.items():
            if before.get(key) != value:
                raise ValueError(
                    f"resume: {key} is {value!r} now but was {before.get(key)!r}; resume with the same settings"
                )

    def _save(self) -> None:
        assert self.folder is not None
        self.folder.save_checkpoint(
            {
                "state": self.state.state_dict(),
                "asked": self._curator.asked,
                "compared": self._curator.compared,
                "normalised": self._normalised,
                "ledger_rows": self.ledger.rows,
                "ledger_head": self.ledger.head,
            }
        )

    def _restore(self) -> None:
        assert self.folder is not None
        saved = self.folder.load_checkpoint()
        history = read(self.folder.ledger, repair=True)
        if history.heads[saved["ledger_rows"] - 1 : saved["ledger_rows"]] != [saved["ledger_head"]]:
            raise LedgerError(
                f"{self.folder.ledger} does not contain what the checkpoint was trained on: it was cut or replaced"
            )
        self.state.load_state_dict(saved["state"])
        self._normalised = saved["normalised"]
        # A secret run draws from a new key; a reproducible one must meet the same streams again.
        self._curator.asked, self._curator.compared = saved["asked"], saved["compared"]
        self._curator.replay_noise()
        self.ledger.resume(self.state.step)

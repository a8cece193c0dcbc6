"""What does one call of `train` do? It plans a run, trains step by step, and keeps the ledger."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from math import nan
from pathlib import Path
from typing import Any, Literal, cast
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vestige import accounting, assumptions
from vestige.accounting.ledger import Budget as Limit
from vestige.accounting.ledger import LedgerError
from vestige.accounting.odometers_and_filters import FilteredBudget, Reserving
from vestige.budget.spending import Budget, Provenance, attach, continued, of_users
from vestige.checks import NOT_CALLED, RowsNotApart, check_number, check_steps, renamed, require
from vestige.engines.audit_canaries import Canaries, PlantedEngine, PlantedExamples
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.cuda_graphs import Captured, sizes_of
from vestige.engines.independence import require_finite, require_independent
from vestige.engines.least_squares_moments import SecondMoments, check_labels, layout_of
from vestige.engines.module_snapshot import left_as_found
from vestige.engines.reference import FollowedScores, Reference
from vestige.engines.registry import InBfloat16, engine_by_name
from vestige.engines.sharded import Sharded
from vestige.layerwise_scaling import Constants
from vestige.layout import Layout
from vestige.mechanism.bad_rows import Admissible, ignores_padding, made_up_pass
from vestige.mechanism.charges import Charges
from vestige.mechanism.clipping import LARGEST_SUM, Flat, GradientEngine, Loss, Parameters
from vestige.mechanism.comparisons import Comparisons
from vestige.mechanism.curator import Curator
from vestige.mechanism.dataframes import columns_of, is_frame
from vestige.mechanism.examples import Data, Examples, Source
from vestige.mechanism.feature_moments import FirstSums
from vestige.mechanism.loading import Loading, Target, check_loader, rate_of
from vestige.mechanism.losses.criteria import check_shifted, check_targets
from vestige.mechanism.losses.loss_difference import losses_of, right_answers
from vestige.mechanism.private_evaluation import Evaluator, PrivateEvaluation
from vestige.mechanism.text_padding import TextPadding, ignored_for_certain
from vestige.mechanism.users.ownership import ChosenBound, Most, facts_of_users, ownership, with_users
from vestige.mechanism.users.views import KeptExamples, UserEngine, UserExamples
from vestige.methods.base import Method, require_shardable
from vestige.methods.registry import make_method
from vestige.optim.rules import Scheduling, grouped
from vestige.priced_questions import BudgetSpent, Question
from vestige.processes.distributed_setup import (
    follow_first,
    loss_of,
    processes,
    require_same_group,
    require_same_model,
    require_same_rows,
    sharded,
    unwrapped,
)
from vestige.processes.group import ALONE, Processes, digest
from vestige.processes.ledger import ledger_of
from vestige.processes.parameter_shards import Shards, require_summable
from vestige.processes.sums import ShardedSums, Sums
from vestige.randomness.correlated import NoiseSequence
from vestige.randomness.keys import HoldsKey, Randomness
from vestige.randomness.lattice import prepare
from vestige.renaming import GRAPHS, NOISE, PARTS, VALIDATION, renamed_arguments
from vestige.run_records import LedgerEnd, RunResult, Selection
from vestige.tasks import of_file
from vestige.tf32 import check_device
from vestige.training import loggers, persistence
from vestige.training.assumption_doubts import doubts, refuse_training_data, tell
from vestige.training.loop import Public, Record, TrainingState, accuracy, run
from vestige.training.nonprivate_transcript import Transcript
from vestige.training.physical_batch import PhysicalBatch, check_physical_batch, made_up, part_of_a_run, transform_of
from vestige.training.planning import Plan, Request, plan, questions, sampling_of, settled
from vestige.training.private_statistics import PrivateStatistics
from vestige.training.results import audited, known_of_a_run, last_diagnostics, selection, statement
from vestige.training.run_folder import RunFolder, paced
from vestige.units import Users

CHECKED_EVERY = 256
"""Steps between two comparisons of the replicas of a model; the first steps are compared more often."""
PRICED = ("poisson", "allocation", "truncated")
"""Samplings whose cost is shown at every step."""


@renamed_arguments(PARTS, NOISE, GRAPHS, VALIDATION)
def train(
    model: nn.Module,
    loss: Loss | type[nn.Module],
    data: Data,
    *,
    method: Method | str = "dp-sgd",
    batch_size: int | None = None,
    sample_rate: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float | None = None,
    lr: float | Literal["auto"] = "auto",
    lr_scheduler: Scheduling | None = None,
    param_groups: Sequence[Mapping[str, object]] | None = None,
    sampling: str = "poisson",
    max_batch: int | None = None,
    users: object = None,
    sample: Literal["rows", "users"] = "rows",
    rows_per_user: int | Literal["median"] | ChosenBound | None = None,
    cap: int | ChosenBound | None = None,
    secure_mode: bool = True,
    max_physical_batch_size: PhysicalBatch = None,
    cuda_graphs: bool = True,
    engine: str = "bookkeeping",
    bfloat16: bool = False,
    device: str | torch.device | None = None,
    target: Target = None,
    collate_fn: Callable[[list[Any]], object] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    reproducible: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    request: dict[str, object] | None = None,
    log_to: str | Sequence[str] = (),
    validation_data: tuple[Tensor, Tensor] | None = None,
    normalise: FirstSums | None = None,
    statistics: PrivateStatistics | None = None,
    evaluate: PrivateEvaluation | Literal["private"] | None = None,
    audit: int | None = None,
    budget: Budget = None,
    nonprivate_transcript: str | Path | None = None,
    nonprivate_logs: bool = False,
) -> Training:
    """Train `model` in place with differential privacy; `.run()`, or iterate over the result, to perform the steps.

    Give `epsilon` (the noise follows), or `noise_multiplier` (epsilon follows), or both: then training stops before
    epsilon is exceeded, and without `steps` as many are planned as it affords.

    - `loss(outputs, targets)` is any loss of a batch, such as `nn.functional.cross_entropy`, or a class of them, such
      as `nn.CrossEntropyLoss`; it is applied to one example at a time.
    - `data` is a tuple of tensors or arrays (inputs..., targets), or anything with rows that are such tuples, or
      dictionaries: a list, a map-style dataset, one of Hugging Face, a DataLoader (whose batches are replaced by
      Poisson samples). The model is given the columns of a dictionary by name, but for `target` ("labels", unless
      said), which the loss is given. Of a pandas DataFrame it is given all other columns as one matrix of floats.
    - `target` may be several columns, or a number: of tuples, how many of the last fields. The loss is then given all
      of them, `loss(outputs, label, weight)`: per-row weights, say.
    - `method` is the name of one (`vestige methods`) or a value: `vestige.fo_dp_sgd(beta=0.8)`. A step of a selective
      method is a trial, kept or not.
    - `batch_size` is the expected size of a sample; or give `sample_rate`, the probability that an example joins a
      step. `epochs` is so many times 1 / sample_rate steps; or give `steps`. `delta` lies below 1 / examples.
    - `max_grad_norm` bounds each example's gradient; None leaves the method's own bound, which is 1 for most.
    - `lr` is a number, or "auto", which sees public numbers only. `lr_scheduler` makes a torch scheduler of the
      optimizer, and `param_groups` are those of torch.optim: options by group, `lr` where a group gives none.
    - `sampling="allocation"` uses every example once an epoch, in one of its 1 / sample_rate steps, drawn uniformly: an
      epoch is one question, charged when it begins, and the budget stops between epochs. `sampling="truncated"` keeps
      at most `max_batch` examples of a Poisson sample. `sampling="shuffled"` trains too, without an epsilon.
    - `users` hides all rows of one user instead of one row ([users](users.md)): an id for each row, a list of owners
      for each row, or the name of a column, which the model is not given. `sample="rows"`: rows join by themselves, and
      a user has at most `rows_per_user` of them (a number; "median" of the counts; None: the largest count), of which a
      step keeps at most `cap`. `sample="users"`: each user joins with probability `sample_rate`, and the mean of the
      user's rows (at most `cap`, drawn for each step) is clipped once; `sampling` then draws users. `delta` lies below
      1 / users.
    - `secure_mode=False` adds noise in floating point, not in integers, which is faster on a CPU and rests on one more
      assumption.
    - `max_physical_batch_size` splits each sample into parts of that size, which changes memory and nothing else;
      "auto" finds the largest that fits, on made-up examples. `cuda_graphs=False` runs the steps on a GPU launch by
      launch. `engine` is "bookkeeping" or "reference", which is slow. `bfloat16` runs the model under torch's autocast;
      norms, sums and noise stay what they are. `device` is where the model is moved to first.
    - `collate_fn`, `num_workers` and `pin_memory` are those of a DataLoader: workers read the next samples while one is
      computed, and every example is collated, and padded, by itself.
    - `reproducible=seed` makes noise and sampling predictable, for tests: such a run is not private and has no
      epsilon.
    - With `out`, a folder receives the ledger, checkpoints and records, and `resume=True` continues an interrupted run.
      `request` is written there beside them. `log_to` also logs what is released to "tensorboard:FOLDER",
      "mlflow:URI" or "wandb:PROJECT", or to several of them.
    - `validation_data` are examples that need no protection, for schedules that look at them. `normalise` asks,
      before the first step, for the moments that the model's first module standardises its inputs with
      (`with_moments`).
    - `statistics` is what `vestige.private_statistics` returned about the same rows: its questions are planned and
      priced with the steps.
    - `evaluate="private"` asks, after the last step, how many training examples the model gets right: one more
      question, planned and priced with the others; `PrivateEvaluation` chooses its error, or other private examples.
      `training.result()` has the answer.
    - `audit=1000` plants so many made-up canaries among the examples, each there or not by a coin, and the result says
      how large epsilon is at least: `training.result().audit`. No person's row is copied or left out; the sums hold
      about half as many made-up rows more, and are divided by so many more.
    - `budget` is the book of the dataset (`vestige budget open`), or a `vestige.budget.Account`: the plan is reserved
      there before the first step, every question is charged before it is asked, and what was not asked comes back.
      Without it VESTIGE_BUDGET names the book, if it is set; `False` says that something else pays.
    - `nonprivate_transcript` (a file for raw sums) and `nonprivate_logs` void the guarantee.

    >>> import torch, vestige
    >>> model, data = torch.nn.Linear(4, 2), (torch.randn(200, 4), torch.randint(2, (200,)))
    >>> training = vestige.train(model, torch.nn.CrossEntropyLoss, data, epsilon=3, delta=1e-5, batch_size=50, epochs=1)
    >>> [record.step for record in training]
    [0, 1, 2, 3]
    >>> training.guarantee().epsilon <= 3
    True

    Formal guarantees: (epsilon, delta)-differential privacy of everything the iteration yields and of the final model,
    for one row or a blank in its place (the number of rows is public), under the assumptions listed in
    `training.guarantee().assumptions`.
    """
    if device is not None:
        check_device(str(device))
        model.to(device)
    if isinstance(loss, type):
        loss = loss()
    budget = of_users(budget, users if isinstance(users, str) else None)
    if is_frame(data):
        data, target, users = columns_of(data, target, users)
    sinks = [log_to] if isinstance(log_to, str) else list(log_to)
    loggers.check(sinks)
    model = unwrapped(model)
    group = processes(next(model.parameters()).device)
    group.agree({"resume": resume, "out": out is not None, "audit": audit, "sharded": sharded(model)})
    shards = None
    if sharded(model):
        shards = group.together(lambda: shards_of(model, group))
        shards.fill()
    else:
        follow_first(model, group)
    folder = RunFolder(out, group) if out is not None else None
    begun = group.first(lambda: persistence.begun(folder)) if resume and folder is not None else None
    shared = Shared(group, Randomness.shared(group.secret()), group.secret() % 2**62, shards)

    def prepared() -> Training:
        require_independent(model)
        refuse_training_data(validation_data, data, "validation_data")
        if begun is None:
            require_finite(model)
        if shards is not None:
            _check_shardable(engine, audit, param_groups, bfloat16)
        check_physical_batch(max_physical_batch_size)
        if reproducible is not None:
            whole = isinstance(reproducible, int) and reproducible >= 0
            require("reproducible", reproducible, whole, "be a whole number, zero or more")
        chosen = _chosen(method, max_grad_norm)
        rows, owned = _owned(data, users, sample, rows_per_user, cap)
        loading, rate = Loading(collate_fn=collate_fn, num_workers=num_workers, pin_memory=pin_memory), sample_rate
        rate = 1.0 if rate is None and chosen.probe.solves else rate
        if isinstance(data, DataLoader):
            loading, rate = _of_loader(data, loading, rate, sampling)
        if batch_size is None and rate is None:
            raise ValueError("batch_size=None: give the expected size of a sample, such as 256, or sample_rate")
        if batch_size is not None and sample_rate is not None:
            raise ValueError(f"batch_size={batch_size} and sample_rate={sample_rate}: give one of them")
        if epochs is not None and steps is not None:
            raise ValueError(f"epochs={epochs} and steps={steps}: give one of them")
        as_in_0_1 = begun is not None and "arithmetic" not in begun
        settings = Settings(
            noise="lattice" if secure_mode and not as_in_0_1 else "float32",
            physical_batch=max_physical_batch_size,
            engine=engine if cuda_graphs or engine != "bookkeeping" else "unrecorded",
            bfloat16=bfloat16,
            loading=loading,
            target=target,
            scheduling=lr_scheduler,
            groups=None if param_groups is None else grouped(param_groups, Layout.of(model).parameters(model)),
            seed=reproducible,
            public=validation_data,
            normalise=normalise,
            statistics=_statistics(statistics, normalise),
            evaluate=_evaluation(evaluate),
            audit=audit,
            users=owned,
            budget=budget,
            source=Provenance(data=data, of_file=of_file),
            transcript=_transcript(nonprivate_transcript),
            nonprivate_logs=nonprivate_logs,
            log_to=tuple(sinks),
        )
        wanted = Request(
            sample_rate=nan if rate is None else rate,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            delta=delta,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            lr=lr,
            sampling=sampling,
            max_batch=max_batch,
        )
        constants: Constants | None = None
        if begun is not None:
            wanted, constants = persistence.continued(wanted, begun), begun.get("balance")
        return Training(model, cast(Loss, loss), rows, chosen, wanted, settings, folder, constants, shared)

    training = group.together(prepared)
    training.shield()
    if shards is not None:
        shards.empty()
    group.agree(training.agreed())
    require_same_rows(group, training.nonprivate_hash)
    seen = doubts(data)
    tell(seen)
    training.open(resume, request or {})
    for name, what in seen:
        assumptions.record(training.ledger, name, "assumed", what)
    if statistics is not None:
        asked = f"{len(statistics.questions)} questions of private_statistics are charged here"
        assumptions.record(training.ledger, "nothing_fitted", "assumed", asked)
    finalize(training, _warn_if_unused, training.begun)
    return training


def _chosen(method: Method | str, max_grad_norm: float | None) -> Method:
    """The method, with another bound if one is given."""
    bound: dict[str, Any] = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
    if isinstance(method, str):
        return make_method(method, **bound)
    if not isinstance(method, Method):
        raise ValueError(f"method={method!r} must be a method, or the name of one: see `vestige methods`")
    if max_grad_norm is None:
        return method
    check_number("max_grad_norm", max_grad_norm)
    with renamed({"bound": "max_grad_norm"}):
        return replace(method, clip=method.clip.with_bound(max_grad_norm))


def _warn_if_unused(begun: list[bool]) -> None:
    """When a Training goes: one that was never iterated has trained nothing."""
    if not begun:
        warnings.warn(
            "vestige.train returned a Training that was never iterated, so the model is untrained: call .run(), or "
            "iterate over it",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Shared:
    """What the processes of a run have in common; one process alone has it for itself."""

    group: Processes
    key: Randomness
    canaries: int
    """Where made-up rows are drawn from."""
    shards: Shards | None = None
    """How the model is divided among them; None where each has all of it."""


def _check_shardable(engine: str, audit: int | None, param_groups: object, bfloat16: bool) -> None:
    """Refuse what is not there for sharded models."""
    for name, value, usual in (
        ("engine", engine, "bookkeeping"),
        ("audit", audit, None),
        ("param_groups", param_groups, None),
        ("bfloat16", bfloat16, False),
    ):
        if value != usual:
            raise ValueError(
                f"{name}: not for a sharded model, of which each process has some rows; leave it out, or train "
                "replicas (without fully_shard)"
            )


def _check_solvable(method: Method, settings: Settings, group: Processes) -> None:
    """Refuse what is not there for a method that solves by one answer."""
    usual = Settings()
    names = {"groups": "param_groups", "scheduling": "lr_scheduler", "transcript": "nonprivate_transcript"}
    for field_of in ("engine", "bfloat16", "audit", "groups", "scheduling", "normalise", "transcript"):
        if getattr(settings, field_of) != getattr(usual, field_of):
            name = names.get(field_of, field_of)
            raise ValueError(f"{name}: not for {method.name}, which asks for no gradient; leave it out")
    if settings.physical_batch == "auto":
        raise ValueError(
            f"max_physical_batch_size='auto': not for {method.name}; give a number of rows, or leave it out"
        )
    if group.several:
        raise ValueError(f"method={method.name!r}: for one process; start it without torchrun")


def _as_it_is(point: Parameters) -> Parameters:
    return point


def _filled_whole(shards: Shards, point: Parameters) -> Parameters:
    """Together: a point put together, in a skeleton whose frozen parameters are there too."""
    shards.fill()
    return {name: value.clone() for name, value in shards.whole(point).items()}


def shards_of(model: nn.Module, group: Processes) -> Shards:
    if not group.several:
        raise ValueError("model: its parameters are sharded, but there is no process group: start it by torchrun")
    return Shards(model, group)


def _transcript(path: object) -> Path | None:
    if path is not None and not isinstance(path, str | Path):
        raise ValueError(f"nonprivate_transcript={path!r} must be the path of a file to write")
    return None if path is None else Path(path)


def _statistics(asked: object, normalise: object) -> PrivateStatistics | None:
    if asked is None:
        return None
    if not isinstance(asked, PrivateStatistics):
        raise ValueError(f"statistics={type(asked).__name__} must be what vestige.private_statistics returned")
    if normalise is not None:
        raise ValueError("statistics and normalise are both asked before the first step: give one of them")
    if asked.noise != "secret":
        raise ValueError("statistics: their noise was predictable (reproducible=), so no epsilon would cover them")
    if asked.selection_delta:
        raise ValueError(
            "statistics: a vocabulary by a threshold has a delta of its own, which a run's epsilon cannot count; give "
            "Vocabulary(candidates=...), or add its guarantee to the run's by hand"
        )
    return asked


def _evaluation(asked: Any) -> PrivateEvaluation | None:
    if asked is not None and asked != "private" and not isinstance(asked, PrivateEvaluation):
        raise ValueError(f"evaluate={asked!r} must be 'private', or a PrivateEvaluation")
    return PrivateEvaluation() if asked == "private" else asked


def _canaries(settings: Settings, method: Method, layout: Layout, device: Any, key: int, rows: int) -> Canaries | None:
    count = settings.audit
    if count is None:
        return None
    check_steps(count, "audit")
    if settings.normalise is not None:
        raise ValueError(f"audit={count}: canaries have no inputs whose moments normalise='private' could ask for")
    if method.gate.tests:
        raise ValueError(
            f"audit={count}: {method.name} publishes what its test accepts, and canaries are scored by all releases; "
            "leave audit out, or attack the method by `vestige audit`"
        )
    return Canaries(count, layout, device, key, rows)


def _of_loader(loader: DataLoader[object], asked: Loading, rate: float | None, sampling: str) -> tuple[Loading, float]:
    """How a user's loader reads, and its rate unless another is given; its own way of drawing is replaced, and that is
    said."""
    check_loader(loader, "data")
    if asked != Loading():
        raise ValueError(
            "data is a DataLoader, with a collate_fn, num_workers and pin_memory of its own: set them there"
        )
    rate = rate_of(loader) if rate is None else rate
    drawn = {"poisson": "Poisson samples", "truncated": "truncated Poisson samples"}
    how = "in which every example joins by a toss of its own"
    if sampling == "allocation":
        drawn, how = {"allocation": "a random allocation"}, "in which every example's step is drawn by itself"
    if sampling in drawn:
        warnings.warn(
            f"data is a DataLoader: its batches are replaced by {drawn[sampling]} at sample_rate={rate:.4g}, {how}",
            stacklevel=3,
        )
    return Loading.of(loader), rate


@dataclass(frozen=True)
class AskedUsers:
    """What was asked for about users, before the data are there."""

    ids: object
    sample: str
    rows_per_user: Most
    cap: int | ChosenBound | None


def _owned(
    data: Data, users: object, sample: str, rows_per_user: Most, cap: int | ChosenBound | None
) -> tuple[Data, AskedUsers | None]:
    """The data without a column that names users, and what was asked for about them."""
    if users is None:
        asked = (("sample", sample, "rows"), ("rows_per_user", rows_per_user, None), ("cap", cap, None))
        for name, value, usual in asked:
            if value != usual:
                raise ValueError(f"{name}={value!r} is about users: give users=, an id for each row")
        return data, None
    if isinstance(users, str) and isinstance(data, DataLoader):
        raise ValueError(f"users={users!r} names a column, but data is a DataLoader: give the ids, one for each row")
    rows, ids = with_users(data, users)
    return rows, AskedUsers(ids, sample, rows_per_user, cap)


def _check_users(settings: Settings, shards: Shards | None) -> None:
    """Refuse what is not priced, or not there, for users."""
    if settings.statistics is not None:
        raise ValueError("statistics: asked about rows, and not priced for users with several; leave them out")
    if settings.normalise is not None or settings.evaluate is not None:
        name = "normalise" if settings.normalise is not None else "evaluate"
        raise ValueError(f"{name}: asked about rows, and not priced for users with several; leave it out")
    if shards is not None:
        raise ValueError("users: not for a sharded model; train replicas (without fully_shard)")


def _made_up(examples: Examples, size: int) -> list[Tensor]:
    """Made-up rows; what is named a mask leaves nothing out, as a row without a place has no gradient."""
    rows = made_up(examples.blank(), size, examples.device)
    for place, name in enumerate(examples.form.names or ()):
        if name.endswith("mask") and place < len(rows):
            rows[place] = torch.ones_like(rows[place])
    return rows


LEAST_NORM, MOVE = 1e-6, 0.1
NO_GRADIENT = (
    "a made-up row has no gradient of its own, at two points. Each example's loss is taken by itself: of a loss that "
    "compares the examples of a batch with each other (contrastive learning), nothing is left: the model would move "
    "by noise alone. Give every example what it is compared with, such as two views of it and public rows"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is made, apart from its budget."""

    noise: str = "lattice"
    physical_batch: PhysicalBatch = None
    engine: str = "bookkeeping"
    bfloat16: bool = False
    loading: Loading = field(default_factory=Loading)
    target: Target = None
    scheduling: Scheduling | None = None
    groups: list[dict[str, Any]] | None = None
    seed: int | None = None
    public: tuple[Tensor, Tensor] | None = None
    normalise: FirstSums | None = None
    statistics: PrivateStatistics | None = None
    evaluate: PrivateEvaluation | None = None
    audit: int | None = None
    users: AskedUsers | None = None
    budget: Budget = False
    source: Provenance = field(default_factory=Provenance)
    """For a book to recognise the rows."""
    transcript: Path | None = None
    nonprivate_logs: bool = False
    log_to: tuple[str, ...] = ()


class Training(HoldsKey):
    """A private run: `.run()` it, or iterate over it for its records; guarantee and result are there at any time."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Data,
        method: Method,
        request: Request,
        settings: Settings,
        folder: RunFolder | None,
        constants: Constants | None = None,
        shared: Shared | None = None,
    ) -> None:
        """`constants` are those that balance the steps of a run that is resumed: they are of its own beginning."""
        shared = shared or Shared(ALONE, Randomness.secret(), ALONE.secret() % 2**62)
        self.group, self._shared = shared.group, shared
        if self.group.several and settings.transcript is not None:
            raise ValueError("nonprivate_transcript writes the raw sums of one process: train without torchrun for it")
        self.shards = shards = shared.shards
        if shards is not None:
            require_shardable(method)
            sharded_model, model = model, shards.skeleton
        else:
            sharded_model = model
        self.model, self.folder, self.settings, self._identity = sharded_model, folder, settings, method.identity
        self.layout = method.layout(model, constants)
        examples = Examples(data, next(model.parameters()).device, settings.loading, settings.target)
        self._examples, self._loss = examples, loss
        self._closing: list[Examples | Captured] = [examples]
        """What holds workers or memory of a GPU, until the last step."""
        _pad_texts(model, loss, examples)
        key = shared.key if settings.seed is None else Randomness.reproducible(settings.seed)
        self.users, self._asked_examples, request = self._of_users(examples, request, key)
        request = request.paced(self._asked_examples.population)
        check_targets(loss, 1 + len(examples.form.further))
        if examples.form.names is not None:
            check_shifted(model, loss)
        self._asked = self.layout
        """Of what is released: the parameters', or that of second moments."""
        if method.probe.solves:
            _check_solvable(method, settings, self.group)
            check_labels(examples.blank())
            self._asked = layout_of(model)
        rows = 1 if self.users is None else self.users.rows_per_user or 1
        self.canaries = _canaries(settings, method, self.layout, examples.device, shared.canaries, rows)
        """Made-up rows, for an audit of this run."""
        self._population = self._asked_examples.population + (settings.audit or 0) * rows
        self.method = settled(replace(method, gate=method.gate.at(examples.population)), request)
        self.normalised = settings.normalise is None
        self._first: tuple[Question, ...] = () if settings.normalise is None else settings.normalise.questions
        if settings.statistics is not None:
            self._first = settings.statistics.questions
        self._judged_examples = judged = self._judged(examples)
        self._last_question = None if judged is None else settings.evaluate.question(judged.population)  # type: ignore[union-attr]
        self.plan: Plan = plan(model, self.layout, self.method, self._population, request, self._besides)
        self._sampling = sampling_of(self.method, request, self._population)
        examples.expect(self._sampling.rate * self._population)
        self.transcript = Transcript(settings.transcript) if settings.transcript is not None else None
        replays_are_free = settings.seed is not None
        self.ledger = ledger_of(self.group, folder.ledger if folder else None, replays_are_free=replays_are_free)
        own = self.layout if shards is None else shards.lay_out(self.layout)
        self._reads: set[str] = set()
        """Where a model that is evaluated looks at values of examples."""
        self.curator, self._evaluator = self._curator_of(examples, loss, judged)
        if shards is not None:
            rounded = self.curator.physical_batch if self.curator.arithmetic == "lattice" else None
            require_summable(self.plan.sample_rate * self._population, rounded, self.group)
        for name, parameter in self.layout.parameters(model).items():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                warnings.warn(NOT_CALLED.format(name), stacklevel=3)
        self._admissible = self._admissible_labels(examples, loss)
        self._shielded = False
        self._read = 0
        """How many places were written down where values of examples are looked at."""
        self.private_accuracy: float | None = None
        """The noised share of right answers, once it was asked."""
        groups, scheduling = settings.groups, settings.scheduling
        if groups is not None and method.rule.hears_noise:
            raise ValueError(
                f"param_groups: {method.rule.name} takes the noise of all parameters in their order; leave them out"
            )
        self.state = TrainingState(
            model, self.method, own, self.plan.lr, groups=groups, scheduling=scheduling, shards=shards
        )
        adaptive = self.method.gate.adaptive
        self.facts = accounting.Facts(
            sampling=self._sampling.kind,
            noise="secret" if settings.seed is None else "seeded",
            arithmetic=self.curator.arithmetic,
            coordinates=self._asked.size,
            nonprivate_outputs=settings.transcript is not None or settings.nonprivate_logs,
            schedule="filtered" if adaptive else "fixed",
            filter_epsilon=self.plan.epsilon if adaptive else None,
            users=self.users,
        )
        seen = partial(accuracy, sharded_model, settings.public) if settings.public is not None else None
        self._public = Public(self._charged, seen)
        self.log: dict[str, Any] = {}
        """Released quantities to write into the current record."""
        self._odometer = accounting.Odometer()
        self._counted: Counter[Question] = Counter()
        self._last: Record | None = None
        self._finished = False
        self.begun: list[bool] = []
        """Holds something once the first record was asked for."""
        self._first_step = 0
        self._ended = False
        """Whether the iteration came to its end, and was not left."""
        self._book_entry: dict[str, object] | None = None
        """What the ledger says about the book of the dataset."""

    def _of_users(self, examples: Examples, request: Request, key: Randomness) -> tuple[Users | None, Source, Request]:
        """Whose presence is hidden, what samples are drawn from, and the request with both."""
        self._owned_hash, asked = 0, self.settings.users
        if asked is None:
            return None, examples, request
        _check_users(self.settings, self.shards)
        owned = ownership(asked.ids, examples.population)
        self._owned_hash = owned.fingerprint
        users = facts_of_users(owned, asked.sample, asked.rows_per_user, asked.cap, request.delta)
        if users.sample == "users":
            return users, UserExamples(examples, owned, users.cap, key), replace(request, users=users)
        assert users.rows_per_user is not None
        kept = owned.bounded(users.rows_per_user, key)
        if len(kept) == 0:
            raise ValueError(f"rows_per_user={users.rows_per_user} leaves no row; allow more rows for each user")
        owners = None if owned.several else owned.owners[kept]
        if owners is not None and self.settings.audit:
            planted = np.arange(self.settings.audit).repeat(users.rows_per_user)
            owners = np.concatenate([owners, owned.users + planted])
        rows = examples if len(kept) == examples.population else KeptExamples(examples, kept)
        return users, rows, replace(request, users=users, owners=owners)

    def _admissible_labels(self, examples: Examples, loss: Loss) -> Admissible | None:
        """What a made-up row has shown of the labels that the loss takes; None if it did not go through, or if rows are
        computed in ways that cannot leave one out. Where a model is sharded, processes compute their rows together: for
        what one of them left out the others would wait."""
        sharded = self.shards is not None
        if sharded or isinstance(self._asked_examples, UserExamples) or self.method.probe.solves:
            return None
        row = _made_up(examples, 1)
        admissible = made_up_pass(self.model, loss, examples.form, row)
        return admissible if admissible is not None and self._goes_through(examples, loss) else None

    def _goes_through(self, examples: Examples, loss: Loss) -> bool:
        """Whether two made-up rows go through the engine, forward and back. A fault of the program shows here, before a
        row is read: it is refused (`RowsNotApart`), or its rows are not shielded."""
        engine: GradientEngine = InBfloat16(self._engine) if self.settings.bfloat16 else self._engine
        point = {name: p.detach() for name, p in self.layout.parameters(self.model).items()}
        into = torch.zeros(self.layout.size, device=examples.device)
        try:
            with left_as_found(self.model, parameters=False):
                transform = transform_of(
                    self.model, self.layout, self.method, examples.population, self.plan.sample_rate
                )
                rows = _made_up(examples, 2)
                for _ in range(2):  # a second batch meets what the model keeps of the first
                    norms = engine(rows, point, Flat(1.0), into, transform)
                if not norms.max() > LEAST_NORM:
                    drawn = torch.Generator().manual_seed(0)
                    moved = {
                        name: value + MOVE * torch.randn(value.shape, generator=drawn).to(value)
                        for name, value in point.items()
                    }
                    norms = engine(rows, moved, Flat(1.0), into, transform)
        except RowsNotApart:
            raise
        except Exception:  # whatever a user's model raises on made-up rows
            return False
        if not norms.max() > LEAST_NORM:
            warnings.warn(NO_GRADIENT, stacklevel=2)
        return True

    def shield(self) -> None:
        """Together: leave out rows that cannot be read or computed, if a made-up row went through in all processes:
        then an error later on is a row's, and not the program's."""
        if self.group.any(self._admissible is None) or self._admissible is None:
            return
        for each in (self._examples, self._judged_examples):
            if each is not None:
                each.shield(self._admissible)
        self._shielded = self.curator.shielded = True
        self.curator.tried_out = partial(left_as_found, self.model, parameters=False)
        self._engine.settle()

    def _judged(self, examples: Examples) -> Examples | None:
        """The examples of a private evaluation."""
        wanted = self.settings.evaluate
        if wanted is None:
            return None
        if wanted.on is None:
            return examples
        held_out = Examples(wanted.on, examples.device, self.settings.loading, self.settings.target)
        if held_out.form != examples.form:
            raise ValueError("evaluate: the examples that were held out have other columns than those trained on")
        return held_out

    @property
    def _besides(self) -> tuple[Question, ...]:
        """What is asked besides the steps' questions."""
        return self._first if self._last_question is None else (*self._first, self._last_question)

    def _curator_of(self, examples: Examples, loss: Loss, judged: Examples | None) -> tuple[Curator, Evaluator | None]:
        settings, rate, shards = self.settings, self.plan.sample_rate, self.shards
        model = self.model if shards is None else shards.skeleton
        form, part = examples.form, settings.physical_batch
        make = partial(engine_by_name("unrecorded" if shards is not None else settings.engine), form=form)
        if part == "auto":
            blank, population = examples.blank(), examples.population
            part = part_of_a_run(model, make, loss, self.layout, self.method, blank, population, rate, self.plan.steps)
        key = self._shared.key if settings.seed is None else Randomness.reproducible(settings.seed)
        charges, reads = Charges(self.ledger.ask), self._reads
        engine: Any = SecondMoments(model) if self.method.probe.solves else make(model, loss, self.layout)
        self._engine: BookKeeping | Reference = engine.engine if isinstance(engine, Captured) else engine
        labels = None if self.method.probe.solves else self._engine.labels
        right = FollowedScores(model, right_answers(model, form), reads, labels)
        losses = FollowedScores(model, losses_of(model, loss, form), reads, labels)
        prepare(next(model.parameters()).device)
        unequal = False
        if isinstance(engine, Captured):
            self._closing.append(engine)
            most = getattr(self._sampling, "most", LARGEST_SUM)
            limit, asked = min(part or LARGEST_SUM, most, LARGEST_SUM), self._asked_examples
            if isinstance(asked, UserExamples):
                rows = min(part or LARGEST_SUM, LARGEST_SUM)
                unequal = engine.expect_users(asked.numbers, self.group.size, rate, rows, examples.pads)
            else:
                each = max(1, examples.population // self.group.size)
                engine.expect(sizes_of(each, rate, limit), examples.pads)
        asked = self._asked_examples
        answering: Any = InBfloat16(engine) if settings.bfloat16 else engine
        if isinstance(asked, UserExamples):
            answering = UserEngine(answering, unequal)
        sums, whole = Sums(self.group), _as_it_is
        if shards is not None:
            answering = Sharded(engine, shards)
            sums, whole = ShardedSums(self.group, shards), partial(_filled_whole, shards)
        if self.canaries is not None:
            asked = PlantedExamples(asked, self.canaries)
            answering = PlantedEngine(answering, self.canaries)
        curator = Curator(
            asked,
            answering,
            self._asked,
            self._sampling,
            key,
            charges,
            physical_batch=part,
            nonprivate_witness=self.transcript,
            noise=self.method.noise.start(rate, self.plan.steps, settings.noise),
            comparisons=Comparisons(examples, key, charges, losses, right, part, self.group, whole),
            sums=sums,
        )
        if self.canaries is not None:
            observe = self.canaries.observe
            curator.observer = lambda answer: observe(answer.release.total, answer.release.noise_std)
        return curator, None if judged is None else Evaluator(judged, key, charges, right, self.group)

    def agreed(self) -> dict[str, object]:
        """What must be the same in every process of a run, before any of them asks."""
        if not self.group.several:
            return {}
        return {
            "the number of examples": self.curator.population,
            **self._facts_of_the_run(),
            "engine": self.settings.engine,
            "reproducible": self.settings.seed,
            "the budget": [self.plan.epsilon, self.plan.delta, self.plan.lr],
            "bfloat16": self.settings.bfloat16,
            "out": self.folder and str(self.folder.path),
            "the loss": loss_of(self._loss),
            "users": self._owned_hash,
        }

    def nonprivate_hash(self, key: bytes) -> int:
        """Of all that is asked about, for processes to compare."""
        judged = self._judged_examples
        return digest(self._examples.nonprivate_hash(key), None if judged is None else judged.nonprivate_hash(key))

    def _check_together(self, step: int) -> None:
        """Collective, at intervals: check that the replicas' parameters are equal."""
        last = step == self.plan.steps - 1
        if self.shards is None and (last or step & (step + 1) == 0 or step % CHECKED_EVERY == 0):
            require_same_model(self.group, self.state.parameters.values(), step)

    def noise_from_here(self) -> NoiseSequence:
        """The noise of the steps that are left, begun anew."""
        left = max(1, self.plan.steps - self.state.step)
        return self.method.noise.start(self.plan.sample_rate, left, self.settings.noise)

    def open(self, resume: bool, request: dict[str, object]) -> None:
        """Open the run's folder and ledger, new or where an interrupted run left them, and set its budget. What a book
        or the budget does not hold is refused before anything is written."""
        budget = self._budget()
        self._check_statistics_fit(budget)
        if resume and self.folder is not None:
            begun = self.group.first(lambda: persistence.begun(self.folder))  # type: ignore[arg-type]
            run = self.group.first(lambda: continued(begun, self.settings.budget))  # process 0 has the book
            self._book_entry = begun.get("budget")
            persistence.resume(self, self.folder, self._facts_of_the_run())
            if self.method.probe.solves and not self.state.step and persistence.asked(self.folder):
                raise ValueError(
                    f"resume={str(self.folder.path)!r}: the one answer of {self.method.name} was charged, and lost "
                    "with the process: the model is untrained. Begin another run, with a budget of its own"
                )
            if run is not None:
                self._reserve(run)
        else:
            self._book_entry = self._reserve(None)
            try:
                persistence.start(self, self.folder, self._facts_of_the_run(), request)
            except BaseException:
                if self.ledger.spending is not None:
                    self.ledger.spending.finish()
                raise
        self._first_step = self.state.step
        if self._shielded:
            assumptions.record(
                self.ledger, "bad_rows", "checked", "such rows contribute nothing; timings aside, nobody is told"
            )
        examples = self._examples
        for each in known_of_a_run(self.facts, self.group.size, examples.read_one_by_one, examples.collates):
            assumptions.record(self.ledger, each.name, each.status, each.detail)
        self._record_reads()
        self._charge_statistics()
        self.ledger.budget = budget

    def _budget(self) -> Limit | None:
        """What the ledger may be charged; None where only the noise is given."""
        if self.plan.epsilon is None:
            return None
        limit = FilteredBudget if self.method.gate.adaptive else accounting.Budget
        budget = limit(self.plan.epsilon - self._chosen, self.plan.delta, self.planned)
        return budget if self._last_question is None else Reserving(budget, self._last_question)

    def _check_statistics_fit(self, budget: Limit | None) -> None:
        """Refuse a budget that does not hold what was asked before the run: it is spent, whether or not a step is
        taken."""
        statistics = self.settings.statistics
        if statistics is None or budget is None:
            return
        spent: Counter[Question] = Counter()
        for question in statistics.questions:
            if not budget.allows(spent, question):
                alone = accounting.epsilon(Counter(statistics.questions), self.plan.delta)
                raise ValueError(
                    f"statistics: they have cost epsilon {alone:.4g} at delta {self.plan.delta:g} already, and "
                    f"epsilon={self.plan.epsilon} does not hold them; give a larger epsilon"
                )
            spent[question] += 1

    def _record_reads(self) -> None:
        """Write down where values of examples that run one at a time are looked at."""
        reads = self._reads | getattr(self._engine, "reads", set())
        if reads and self._read != len(reads):
            self._read = len(reads)
            kept = f"what is read of an example ({', '.join(sorted(reads))}) is kept for no other one"
            for name in ("rows_apart", "loss_per_example"):
                assumptions.record(self.ledger, name, "assumed", kept)

    def _reserve(self, run: str | None) -> dict[str, object] | None:
        """In the book of the dataset, if there is one: process 0 does. A plan that follows from answers is charged
        question by question."""
        settings = self.settings
        held_out = None if settings.evaluate is None else settings.evaluate.on
        return self.group.first(
            lambda: attach(
                self.ledger,
                settings.budget,
                Counter(self._first) if self.method.gate.adaptive else self.planned,
                purpose=f"train {self.method.name}",
                source=settings.source,
                beside=() if held_out is None else (Provenance(data=held_out, of_file=of_file),),
                facts=self.facts,
                run=run,
                spent=self.ledger.spent,
                paid=None if settings.statistics is None else settings.statistics.paid,
            )
        )

    def _facts_of_the_run(self) -> dict[str, object]:
        return {
            "population": self.curator.population,  # first: much else follows from it
            **self.plan.to_json(),
            "method": self._identity,
            **self.terms,
            "groups": list(self.layout.group_names),
            "adjacency": assumptions.ADJACENCY if self.users is None else self.users.adjacency,
            "max_batch": getattr(self._sampling, "most", None),
            "normalise": repr(self.settings.normalise),
            "evaluate": self.settings.evaluate and self.settings.evaluate.identity,
            **({} if self.users is None else {"owners": self._owned_hash}),
            **({} if self.method.balance is None else {"balance": self.layout.constants_of_all}),
            **({} if self.settings.statistics is None else {"statistics": self.settings.statistics.identity}),
            **({} if self.settings.audit is None else {"canaries": self.settings.audit}),
            **({"bfloat16": True} if self.settings.bfloat16 else {}),
            **({} if self._book_entry is None else {"budget": self._book_entry}),
            **self._rates(),
        }

    def _rates(self) -> dict[str, object]:
        """What is public of the learning rates besides the first: the scheduler's name, and the options by group."""
        names = {id(p): name for name, p in self.state.parameters.items()}
        groups = self.settings.groups and [
            {key: [names[id(p)] for p in value] if key == "params" else repr(value) for key, value in group.items()}
            for group in self.settings.groups
        ]
        scheduler = self.state.scheduler
        return {"lr_scheduler": None if scheduler is None else type(scheduler).__name__, "param_groups": groups}

    @property
    def planned(self) -> dict[Question, int]:
        """All that the run will ask, unless its questions follow from answers."""
        plan = self.plan
        rate, multiplier = plan.sample_rate, plan.noise_multiplier
        return questions(self.method, rate, multiplier, plan.steps, self._besides, self._sampling)

    @property
    def physical_batch(self) -> int | None:
        """How many examples are processed at once; None: a whole sample."""
        return self.curator.physical_batch

    @property
    def expected_batch(self) -> float:
        """The public number that sums are divided by: the rate times the size of the dataset."""
        return self.curator.expected_batch

    @property
    def nonprivate_broken_examples(self) -> int:
        """How many sampled examples had a non-finite gradient. Computed without noise: keep it to yourself."""
        return int(self.curator.nonprivate_broken_examples)

    def __iter__(self) -> Iterator[Record]:
        """Every step's record; after the last one the run is finished, and its folder is complete."""
        name = self.method.name if self.folder is None else self.folder.path.name
        sinks = self.settings.log_to if self.group.rank == 0 else ()
        with contextlib.closing(self.steps()) as records, loggers.opened(sinks, name) as logs:
            for record in records:
                for log in logs:
                    extra = loggers.nonprivate(self) if self.settings.nonprivate_logs else {}
                    log.log(record.step, {**loggers.released(record.to_json()), **extra})
                yield record
        self.finish()

    def __len__(self) -> int:
        """How many records the iteration has, unless the budget ends it before: the steps that were left at first."""
        return max(0, self.plan.steps - self._first_step)

    def __bool__(self) -> bool:
        return True

    def run(self) -> RunResult:
        """Take all steps that are left; returns the result."""
        for _ in self:
            pass
        return self.result()

    def __repr__(self) -> str:
        plan, spent = self.plan, self.spent()
        cost = "no epsilon holds at each step" if spent is None else f"epsilon {spent:.4g}"
        of = "" if plan.epsilon is None or spent is None else f" of {plan.epsilon:g}"
        return (
            f"<Training by {self.method.name}: step {self.state.step} of {plan.steps}, {cost}{of} at delta "
            f"{plan.delta:g}, {self.curator.population} rows, about {self.expected_batch:.0f} a step, noise multiplier "
            f"{plan.noise_multiplier:.4g}, lr {plan.lr:.3g}>"
        )

    def _repr_html_(self) -> str:
        """As notebooks show it: the plan, and the guarantee so far."""
        return f"<p><code>{escape(repr(self))}</code></p>{self.guarantee()._repr_html_()}"

    def steps(self) -> Generator[Record, None, None]:
        """The records, without finishing the run, for a caller that adds to the result."""
        records = self._records()
        if self.folder is None:
            return records
        save, decided = persistence.saver(self, self.folder), self._first_decides if self.shards is not None else bool
        return self.folder.log(paced(records, save, decided), self.state.step, self.log)

    def _first_decides(self, holds: bool) -> bool:
        return bool(self.group.told(int(holds))[0][0])

    def guarantee(self) -> accounting.Guarantee:
        """The guarantee of everything released so far."""
        return accounting.guarantee(self.ledger.spent, self.plan.delta, self.facts, self.ledger.assumptions)

    @property
    def terms(self) -> dict[str, object]:
        """What decides, besides the charges, which guarantee holds: all that `verify.reprice` needs."""
        keys = ("sampling", "noise", "arithmetic", "coordinates", "nonprivate_outputs", "schedule")
        terms = {key: getattr(self.facts, key) for key in keys}
        if self.facts.schedule == "filtered":
            # A filter's orders and weights must be fixed before the first answer, and be known to `vestige verify`.
            terms["filter_epsilon"] = self.facts.filter_epsilon
            terms["filter_expects"] = [question.to_json() for question in self.planned]
        if self.users is not None:
            terms["users"] = self.users.to_json()
        return terms

    def spent(self) -> float | None:
        """An upper bound on epsilon so far, computed in microseconds; None where no epsilon holds.

        Where questions follow from earlier answers it is the filter's from the first step on: nothing less is proved.
        """
        if not self._priced:
            return None
        if self.facts.schedule == "filtered":
            return self.facts.filter_epsilon
        by_renyi = self._charged() + self._chosen
        # The loss distribution of the whole plan bounds every part of it, and is tighter than Renyi at the end.
        if self.plan.epsilon is not None:
            return min(by_renyi, self.plan.epsilon)
        return by_renyi

    @property
    def _chosen(self) -> float:
        """What the choice of a bound on users' rows has cost before."""
        return 0.0 if self.users is None else self.users.choice_epsilon

    @cached_property
    def _priced(self) -> bool:
        """Whether an epsilon holds at every step."""
        neutral = replace(self.facts, schedule="fixed", filter_epsilon=None, arithmetic="lattice", coordinates=0)
        neutral = replace(neutral, users=None)
        return replace(neutral, sampling="poisson") == accounting.Facts() and neutral.sampling in PRICED

    def _charged(self) -> float:
        """Epsilon of all that was charged, by Renyi, whether or not it is a guarantee."""
        for question, count in self.ledger.spent.items():
            if count > (before := self._counted[question]):
                self._odometer.add(question, count - before)
                self._counted[question] = count
        return self._odometer.epsilon(self.plan.delta)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model holds the average that the method keeps for evaluation; without one, nothing changes."""
        return self.state.averaged()

    def result(self, **more: Any) -> RunResult:
        """The result so far, with further facts in `more`: its `task`, its `accuracy` on public data."""
        promise = self.guarantee()
        facts: dict[str, object] = {
            "method": self.method.name,
            "assumptions": promise.listed,
            "statement": statement(
                promise,
                self.plan,
                expected_batch=self.expected_batch,
                groups=self.layout.groups,
                asked=sum(self.ledger.spent.values()),
            ),
            "private_accuracy": self.private_accuracy,
            "private_accuracy_error": None if self.private_accuracy is None else self.settings.evaluate.error,  # type: ignore[union-attr]
            "selection": self.selection(),
            "audit": None if self.canaries is None else audited(self.canaries, self.plan.delta),
            "steps": self.state.step,
            "stopped": "finished" if self.state.step >= self.plan.steps else "budget" if self._ended else "interrupted",
            "run": str(self.folder.path) if self.folder else None,
            "diagnostics": {} if self._last is None else last_diagnostics(self._last),
        }
        return RunResult(**{**facts, **more})

    def selection(self) -> Selection | None:
        """What a selective method did with its trials; None for the others."""
        return selection(self.method, self.state.gate, self.plan)

    def finish(self, result: RunResult | None = None) -> None:
        """Write the result and the final weights, and seal every file of the folder in the ledger. Nothing is asked
        afterwards."""
        if self._finished:
            return
        self._finished = True
        if self.transcript is not None:
            self.transcript.save()
        if self.folder is not None:
            if self.shards is None:
                require_same_model(self.group, self.state.parameters.values(), self.state.step - 1)
            with self.averaged():
                weights = self.model.state_dict() if self.shards is None else self.shards.weights()
                self.group.first(lambda: self._finish_folder(result, weights))
        self.ledger.close()

    def _finish_folder(self, result: RunResult | None, weights: dict[str, Any]) -> None:
        assert self.folder is not None
        end = LedgerEnd(self.ledger.rows, self.ledger.head)
        self.folder.finish(replace(result or self.result(), ledger=end).to_json(), weights)
        self.ledger.finish(self.folder.hashes())

    def _records(self) -> Generator[Record, None, None]:
        plan = self.plan
        self.begun.append(True)
        with contextlib.suppress(BudgetSpent):
            self._ask_moments()
        if not self.normalised:
            self._ended = True
            return
        with contextlib.ExitStack() as stack:
            for each in self._closing:
                stack.callback(each.close)
            for record in run(self.state, self.method, self.curator, plan.noise_multiplier, plan.steps, self._public):
                self._last = record
                self._record_reads()
                require_same_group(self.group)
                self._check_together(record.step)
                if self.transcript is not None:
                    self.transcript.settle(
                        self.method.memory, self.curator.rate, self.state, self.expected_batch, record
                    )
                yield Record(record.step, record.diagnostics, self.spent(), record.accepted)
        with contextlib.suppress(BudgetSpent):
            self._evaluate()
        self._ended = True
        ended = "all planned steps were taken" if self.state.step >= plan.steps else "the planned budget ended it"
        assumptions.record(self.ledger, "fixed_steps", "checked", ended)
        self.ledger.settle()

    def _evaluate(self) -> None:
        """Ask, once and after the last step, how many examples the model gets right."""
        if self._evaluator is None or self._last_question is None or self.private_accuracy is not None:
            return
        with self.averaged():
            point = {name: p.detach() for name, p in self.state.parameters.items()}
            if self.shards is not None:
                point = _filled_whole(self.shards, point)
            rows = self.curator.physical_batch or LARGEST_SUM
            self.private_accuracy = self._evaluator.accuracy(
                point, self._last_question, step=self.state.step, rows=rows
            )
        self._record_reads()

    def _charge_statistics(self) -> None:
        """Write what private statistics have cost into this run's ledger too, once and before all else, whatever the
        budget: they were answered."""
        stats = self.settings.statistics
        if stats is None or not Counter(stats.questions) - self.ledger.spent:
            return
        if self.state.step:
            raise LedgerError("statistics: steps were taken without charging them; begin another run, in a new folder")
        for part, question in enumerate(stats.questions):
            self.ledger.ask(question, step=-1, part=part, sensitivity=1.0)

    def _ask_moments(self) -> None:
        """Ask, once and before the first step, for sums over all examples, such as the moments that standardise the
        model's inputs."""
        moments = self.settings.normalise
        if self.normalised or moments is None:
            return
        totals = self.curator.sums(moments.of, moments.bounds, moments.multiplier, step=-1)
        moments.receive(self.model, totals, self.curator.population)
        self.normalised = True


def _pad_texts(model: nn.Module, loss: Loss, examples: Examples) -> None:
    """Pad texts to a few lengths if padding a made-up text does not change its loss."""
    if examples.read_one_by_one and examples.form.names is not None and ignored_for_certain(model):
        padding, row = TextPadding.of(model), made_up(examples.blank(), 1, examples.device)
        if ignores_padding(model, loss, examples.form, row, padding):
            examples.pad_texts(padding)

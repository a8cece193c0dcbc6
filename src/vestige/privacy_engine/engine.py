"""How does a user's own training loop become private? `PrivacyEngine`, with the names that Opacus users know."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset, default_collate

from vestige import accounting, assumptions
from vestige.accounting.ledger import Ledger, LedgerError, LedgerHistory, read
from vestige.budget.spending import Budget, Provenance, attach, continued
from vestige.checks import (
    check_delta,
    check_epsilon,
    check_multiplier,
    check_number,
    check_steps,
    python_number,
    python_numbers,
    renamed,
)
from vestige.engines.audit_canaries import Canaries, check_count
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.cuda_graphs import sizes_of
from vestige.engines.example_axis.labels import Read
from vestige.engines.independence import require_finite, require_independent
from vestige.engines.per_example.gradient_forms import differentiable
from vestige.engines.per_example.sums_of_users import RowCounts
from vestige.files import read_tensors, write_tensors
from vestige.layout import Layout
from vestige.mechanism.loading import check_loader, rate_of, reads_lists, reads_together
from vestige.mechanism.losses.criteria import batch_mean
from vestige.mechanism.users.loaders_of_users import LoaderOfUsers, of_users
from vestige.mechanism.users.ownership import ChosenBound, Ownership
from vestige.methods.base import Method, require_shardable
from vestige.methods.registry import METHODS, make_method
from vestige.optim.rules import OPTIMIZERS, Rule
from vestige.priced_questions import BudgetSpent, Question, SampledGaussian, answers_first, require_same_answers
from vestige.privacy_engine.loaders import draws_per_epoch, private_loader
from vestige.privacy_engine.microbatch_queue import (
    MicrobatchQueue,
    UserBatches,
    require_known_processes,
    require_no_accumulation,
    require_own_reading,
)
from vestige.privacy_engine.optimizer_parameter_checks import require_covered, require_inner_hooks
from vestige.privacy_engine.optimizer_step import PrivateSteps, inner, require_ordinary
from vestige.privacy_engine.passes import Passes
from vestige.processes import checkpoints
from vestige.processes.data_fingerprints import nonprivate_hash_of_dataset
from vestige.processes.distributed_setup import follow_first, processes, require_same_rows, sharded, unwrapped
from vestige.processes.group import ALONE, Processes
from vestige.processes.ledger import SharedLedger
from vestige.processes.loops_of_sharded_models import ShardedLoop
from vestige.processes.parameter_shards import Shards, require_summable
from vestige.processes.sums import ShardedSums, Sums
from vestige.randomness.keys import HoldsKey, Randomness
from vestige.randomness.lattice import prepare
from vestige.randomness.sampling import Sampling, Shuffled, sampling_by_name
from vestige.renaming import Now, renamed_arguments
from vestige.tasks import of_file
from vestige.training.assumption_doubts import Doubt, doubts, tell
from vestige.training.physical_batch import PhysicalBatch, check_physical_batch, part_of_a_run
from vestige.training.planning import choose_rate
from vestige.training.results import Joined, OneRun, audited, known_of_a_run

M = TypeVar("M", bound=nn.Module)
"""The model stays what it was."""
ACCOUNTANTS = {"pld": "pld", "prv": "pld", "rdp": "rdp"}
ELSEWHERE = {
    "grad_sample_mode": "there is one engine here, which materialises no example's gradient: leave it out",
    "clipping": "by layers: method=vestige.make_method('dp-sgd', groups='layers'); adaptively: by vestige.train",
    "batch_first": "examples are on the first axis of the model's inputs: leave it out",
    "noise_generator": "noise comes from the operating system, or PrivacyEngine(reproducible=seed): leave it out",
    "wrap_model": "the model is never wrapped: leave it out",
    "rand_on_empty": "an empty draw is a step of noise, and charged: leave it out",
    "criterion": "wrap the loss by itself: criterion = privacy_engine.criterion(loss)",
    "engine": "vestige.train takes an engine; a loop has one",
    "total_steps": "steps are counted as they are taken: leave it out",
    "alphas": "orders of Renyi divergences are chosen by the accountant: leave it out",
}
"""Arguments of Opacus, and what takes their place here."""
BY_ROWS = (
    "state_dict: of a sharded module each process has its rows of the memory, which another number of processes could "
    "not use: save and load by privacy_engine.save_checkpoint and load_checkpoint, in every process"
)
ROWS = "-rows-"
"""In the names of folders in which processes keep their rows of a checkpoint."""


PADS = "may pad rows to each other, and makes of a row's length what is that row's own"


class PrivacyEngine(HoldsKey):
    """Makes a model, an optimizer and a loader private, in place: `loss.backward(); optimizer.step()` stay as they are.

    The model keeps its class, its state_dict and its methods; the optimizer stays the same object; the loader draws
    Poisson samples. `loss.backward()` leaves each example's gradient in factored form and `p.grad` empty; the step
    clips, sums and adds noise. What cannot be made private is refused (docs/loop.md). Every step charges a ledger (in
    the file `ledger`, if given; `resume=True` continues it) before its release exists.

    Formal guarantees: after any number of steps, everything the optimizer did is (get_epsilon(delta), delta)-private
    for one row or a blank in its place (the number of rows is public), under the assumptions of `guarantee(delta)`.
    """

    @renamed_arguments({"record": Now("cuda_graphs")})
    def __init__(
        self,
        *,
        ledger: str | Path | None = None,
        resume: bool = False,
        reproducible: int | None = None,
        accountant: str = "pld",
        secure_mode: bool = True,
        cuda_graphs: bool = True,
        nonprivate_outputs: bool = False,
        audit: int | None = None,
    ) -> None:
        """One engine for one model.

        - `ledger` is a file for every question, durable before its answer exists; `resume=True` continues it.
        - `reproducible=seed` makes noise and samples predictable, for tests: such a run has no epsilon.
        - `accountant` is "pld" ("prv" is read as that) or "rdp", which is faster and never below it.
        - `secure_mode=False` adds noise in float32 instead of integers, which rests on one more assumption.
        - `cuda_graphs=False` runs the model's passes on a GPU launch by launch.
        - `nonprivate_outputs=True` says that the loop writes out values without noise (losses): no epsilon is stated.
        - `audit=1000` plants so many made-up canaries, each there or not by a coin. They join samples as rows do, and
          go through your passes in copies of rows, whose gradients they replace before the clip. `audit()` then says
          how large epsilon is at least. People's guarantee is the same; sums are divided by so many rows more, and
          passes are not captured as CUDA graphs.
        """
        if accountant not in ACCOUNTANTS:
            raise ValueError(f"accountant={accountant!r} is not offered; choose from {', '.join(ACCOUNTANTS)}")
        if resume and ledger is None:
            raise ValueError("resume=True continues a ledger: give its file, PrivacyEngine(ledger=FILE, resume=True)")
        self._accountant, self._resume = ACCOUNTANTS[accountant], resume
        self._reproducible = reproducible
        self._randomness = Randomness.secret() if reproducible is None else Randomness.reproducible(reproducible)
        self._group: Processes = ALONE
        self._canary_key: int | None = None
        self._ledger = Ledger(Path(ledger) if ledger is not None else None)
        self._facts = accounting.Facts(
            noise="secret" if reproducible is None else "seeded",
            arithmetic="lattice" if secure_mode else "float32",
            nonprivate_outputs=nonprivate_outputs,
        )
        self._steps: PrivateSteps | None = None
        self._loop: ShardedLoop | None = None
        """How a module that is sharded among processes is trained."""
        self._cuda_graphs = cuda_graphs
        self._shown: tuple[object, ...] | None = None
        """What the passes had shown of the assumptions when that was last written down."""
        self._reads_before_step = 0
        """How many reads of the examples were noted before the last step."""
        self._finished = False
        """Whether the ledger is closed to what is seen later."""
        self._collates = ""
        """What makes batches of examples, where that is not torch's collation."""
        self._population = 0
        """All rows that samples are drawn from: the examples, and canaries if there are any."""
        if audit is not None:
            check_count(audit)
        self._audit = audit
        self._delta: float | None = None
        self._plan: dict[Question, int] = {}
        """What a loop with a target epsilon will ask."""
        self._run = secrets.token_hex(8)

    def make_private(
        self,
        *,
        module: M,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        method: str | Method = "dp-sgd",
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        sampling: str = "poisson",
        max_batch: int | None = None,
        users: Any = None,
        sample: str = "rows",
        rows_per_user: int | Literal["median"] | ChosenBound | None = None,
        cap: int | ChosenBound | None = None,
        max_physical_batch_size: PhysicalBatch = None,
        steps_per_batch: int = 1,
        tokens_per_example: int | None = None,
        target_delta: float | None = None,
        budget: Budget = None,
        **others: Any,
    ) -> tuple[M, Optimizer, DataLoader[Any]]:
        """Private training with a given noise multiplier; the memory of any method, the moves of your own optimizer.

        What comes back is the same module, the same optimizer, and a loader of Poisson samples at the rate
        batch_size / examples.

        - `noise_multiplier` is noise over `max_grad_norm`, the bound on one example's gradient.
        - `method` is a name or a value. One that asks somewhere else than at the parameters takes a closure:
          `optimizer.step(closure)`. One with a schedule, an adaptive clip or a gate is for `vestige.train`. One that
          moves otherwise than plain SGD, such as "dp-adamw", takes the optimizer that it means; the others take any.
        - `loss_reduction` is "mean" or "sum", as your loss is over the batch.
        - `sampling="allocation"` makes every pass over the loader an epoch: each example is in one of its
          examples / batch_size batches, drawn uniformly, and the whole epoch is charged at its first step, however
          many follow. `sampling="truncated"` keeps at most `max_batch` examples of a Poisson sample.
        - `users` hides all rows of one user: an id for each row of the dataset, or a list of owners for each. A user
          has at most `rows_per_user` rows (None: the largest count), and a step keeps at most `cap` of them. With
          `sample="users"` each user joins with probability batch_size / rows, and the mean of the gradients of the
          user's rows (at most `cap`, drawn for each step) is bounded once; passes are not captured as CUDA graphs.
        - `poisson_sampling=False` keeps your loader, and has no epsilon.
        - `max_physical_batch_size` splits each sampled batch: keep calling `optimizer.step()` after every part, and
          only the last one moves; "auto" finds the largest that fits, for batches (inputs..., targets).
        - A batch is for one step; with `steps_per_batch=k` it is for k, priced as k answers on one sample.
        - A loss that the model computes itself, `model(**batch).loss`, is the mean of its examples' losses. Of tokens,
          an example's loss is the mean over its own, or, with `tokens_per_example`, their sum over that public number.
        - `target_delta` is written into the ledger, so that `vestige verify` states an epsilon at it.
        - `budget` is the book of the dataset (`vestige budget open`), or a `vestige.budget.Account`: every step is
          charged there before it is taken, and raises `BudgetSpent` where the book does not hold it. Without it
          VESTIGE_BUDGET names the book, if it is set. When the program ends, what was charged ahead comes back; with
          `ledger=`, when `finish` is called, or another run needs it.

        Of several processes (docs/distributed.md) each calls it alike, with a plain module, one in DDP, or one that
        `fully_shard` has divided; the optimizer is then made after that, of its parameters.

        Arguments of Opacus that have another place here are refused with that place.
        """
        refuse_others(others)
        if self._steps is not None:
            raise ValueError("make_private was called before: use a new PrivacyEngine for each model")
        noise_multiplier, max_grad_norm = python_number(noise_multiplier), python_number(max_grad_norm)
        target_delta, max_batch = python_number(target_delta), python_number(max_batch)
        steps_per_batch, tokens_per_example = python_number(steps_per_batch), python_number(tokens_per_example)
        rows_per_user, cap = python_number(rows_per_user), python_number(cap)
        wrapper, user_module = module, unwrapped(module)
        group, loop = self._join(user_module)
        # What is looked at, and what passes run in, are whole.
        whole = user_module if loop is None else loop.skeleton

        owned = group.together(lambda: of_users(data_loader, users, sample, rows_per_user, cap, target_delta))
        seen, data_loader = doubts(data_loader), owned.loader

        def checked() -> tuple[Method, Optimizer, int | None, Sampling, Callable[..., MicrobatchQueue]]:
            check_number("noise_multiplier", noise_multiplier, finite=False)
            check_number("max_grad_norm", max_grad_norm)
            check_multiplier(noise_multiplier)
            check_steps(steps_per_batch, "steps_per_batch")
            if tokens_per_example is not None:
                check_steps(tokens_per_example, "tokens_per_example")
            if loss_reduction not in ("mean", "sum"):
                raise ValueError(f"loss_reduction={loss_reduction!r} must be 'mean' or 'sum'")
            require_no_accumulation()
            require_known_processes()
            require_ordinary(user_module, optimizer)
            require_inner_hooks(user_module)
            require_independent(whole)
            require_finite(whole)
            require_covered(user_module, optimizer)
            moves = inner(optimizer)
            check_loader(data_loader)
            if group.several:
                require_own_reading(data_loader)
            check_physical_batch(max_physical_batch_size, "max_physical_batch_size")
            if steps_per_batch > 1 and max_physical_batch_size is not None:
                raise ValueError(
                    "steps_per_batch and max_physical_batch_size: take several steps on whole batches only"
                )
            chosen = _fit_for_a_loop(make_method(method) if isinstance(method, str) else method)
            _require_rule(chosen, moves)
            size = max_physical_batch_size
            if size == "auto":
                size = _largest_part(whole, data_loader, chosen)
            with renamed({"bound": "max_grad_norm"}):
                chosen = replace(chosen, clip=chosen.clip.with_bound(max_grad_norm), rule=Rule(type(moves)))
            if loop is not None:
                self._check_shardable(chosen)
            if loop is not None and owned.samples_users:
                raise ValueError("sample='users': not for a sharded module; train replicas (without fully_shard)")
            drawn = self._sampling(owned, sampling, max_batch)
            queue: Callable[..., MicrobatchQueue] = partial(MicrobatchQueue, steps=steps_per_batch)
            if owned.users is not None and (self._audit is not None or not poisson_sampling):
                raise ValueError(
                    "users: canaries (audit=) and batches of your own (poisson_sampling=False) have no users here; "
                    "leave them out, or use vestige.train(users=..., audit=...)"
                )
            if not poisson_sampling:
                if self._audit is not None:
                    raise ValueError(
                        f"audit={self._audit} with poisson_sampling=False: canaries join samples that we draw, and "
                        "your own batches have no epsilon to hold against; leave one of them out"
                    )
                if group.several:
                    raise ValueError(
                        "poisson_sampling=False keeps your own batches, and the processes would each have others: "
                        "leave it out, or train in one process"
                    )
                drawn, queue = _kept(data_loader, sampling, max_batch), UserBatches
            if target_delta is not None:
                check_delta(target_delta, self._rows(owned))
            return chosen, moves, size, drawn, queue

        chosen, moves, physical_batch, drawn, queue = group.together(checked)
        require_same_rows(group, partial(nonprivate_hash_of_dataset, data_loader.dataset))
        self._population = self._rows(owned)
        people = owned.population
        rate = drawn.rate
        together = reads_together(data_loader.dataset) and not reads_lists(data_loader.dataset)
        own = data_loader.collate_fn not in (None, default_collate)
        self._collates = "a collate_fn of your own" if own else "the dataset's __getitems__" if together else ""
        size, expected = Layout.of(whole).size, max(1, round(rate * people))
        read_one_by_one = group.size > 1 and not isinstance(data_loader.dataset, TensorDataset)
        self._facts = replace(self._facts, sampling=drawn.kind, coordinates=size, users=owned.users)
        self._delta = target_delta
        source = Provenance(data=data_loader.dataset, of_file=of_file)
        layout, begun = self._open(
            chosen, whole, rate, noise_multiplier, target_delta, max_batch, moves, (budget, source), owned.owned
        )
        largest = min(filter(None, (physical_batch, max_batch)), default=None)
        if loop is not None:
            rounded = physical_batch if self._facts.arithmetic == "lattice" else None
            group.together(partial(require_summable, rate * people, rounded, group))
            loop.shards.lay_out(layout)
            loop.forget()
        each = max(1, people // group.size)
        sizes = sizes_of(each, rate, largest) if poisson_sampling else [expected]
        whose, plain = owned.rows_of_each(self._randomness), self._audit is None
        counts = None if whose is None or whose.mean == 1 else RowCounts(whose.numbers)
        if counts is not None:
            most = min(filter(None, (physical_batch, max_batch and max_batch * counts.most)), default=None)
            sizes = [counts.whole(size) for size in sizes_of(each, rate, most, counts.mean, counts.mean_square)]
            plain = counts.even(sizes[0])
        recorded = sizes if self._cuda_graphs and loop is None and plain else ()
        planted = None
        if self._audit is not None:
            planted = Canaries(self._audit, layout, next(whole.parameters()).device, self._canary_key)
        passes = Passes(
            whole, layout, chosen.clip, loss_reduction, queue, recorded, tokens_per_example, planted, loop, counts
        )
        # What workers run, or the dataset, is not followed.
        passes.tracking.unproved = together or (own and data_loader.num_workers > 0)
        planned = SampledGaussian(rate, noise_multiplier)
        prepare(passes.device)
        self._steps = PrivateSteps(
            passes,
            moves,
            chosen,
            planned,
            drawn,
            rate * self._population,
            steps_per_batch,
            self._ledger,
            self._randomness,
            self._facts.arithmetic,
            Sums(group) if loop is None else ShardedSums(group, loop.shards),
        )
        self._steps.draws = begun
        self._steps.before_asking = self._record_passes
        self._record_assumptions(read_one_by_one, seen)
        if wrapper is not user_module:
            wrapper.zero_grad = user_module.zero_grad  # type: ignore[method-assign]
        if poisson_sampling:
            data_loader = private_loader(
                data_loader,
                drawn,
                self._randomness,
                physical_batch,
                passes.parts,
                planted,
                group,
                owned,
            )
        return wrapper, optimizer, data_loader

    def _join(self, module: nn.Module) -> tuple[Processes, ShardedLoop | None]:
        """Together: the processes that train this module, with one key, one ledger, and the weights of process 0; of a
        sharded module each keeps its rows, and for now all have a whole one besides."""
        group = self._group = processes(next(module.parameters()).device)
        group.together(partial(_require_values, module))
        if not group.several:
            return group, None
        group.agree(
            {
                "resume": self._resume,
                "reproducible": repr(self._reproducible),
                "audit": self._audit,
                "ledger": self._ledger.path and str(self._ledger.path),
                "sharded": sharded(module),
            }
        )
        loop = None
        if sharded(module):
            loop = self._loop = group.together(lambda: ShardedLoop(Shards(module, group)))
            loop.shards.fill()
        follow_first(module, group)
        if self._reproducible is None:
            self._randomness = Randomness.shared(group.secret())
        self._run, self._canary_key = f"{group.secret():x}"[:16], group.secret() % 2**62
        budget = self._ledger.budget
        self._ledger = SharedLedger(group, self._ledger.path, budget)
        return group, loop

    def _check_shardable(self, method: Method) -> None:
        """Refuse what is not there for sharded modules."""
        if self._audit is not None:
            raise ValueError(
                f"audit={self._audit}: not for a sharded module, of which each process has some rows; leave it out, or "
                "train replicas (without fully_shard)"
            )
        require_shardable(method)
        if method.rule.hears_noise:
            raise ValueError(
                f"optimizer: {method.rule.name} takes the noise of all coordinates in their order, and of a sharded "
                "module it has some rows here; vestige.train(method='dp-adambc') takes sharded models"
            )
        if not method.probe.at_parameters:
            raise ValueError(
                f"method={method.name!r} asks elsewhere than at the parameters: in a loop of your own a sharded module "
                "is asked about where it is; vestige.train takes sharded models with this method"
            )

    def make_private_with_epsilon(
        self,
        *,
        module: M,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        max_grad_norm: float,
        epochs: int | None = None,
        draws: int | None = None,
        method: str | Method = "dp-sgd",
        steps_per_batch: int = 1,
        sampling: str = "poisson",
        max_batch: int | None = None,
        users: Any = None,
        sample: str = "rows",
        rows_per_user: int | Literal["median"] | ChosenBound | None = None,
        cap: int | ChosenBound | None = None,
        **options: Any,
    ) -> tuple[M, Optimizer, DataLoader[Any]]:
        """As `make_private`, with the noise that spends `target_epsilon` in `epochs` passes over the loader, or in as
        many `draws` of it.

        A step that would exceed the target raises `BudgetSpent` and does not happen; with `sampling="allocation"` that
        is the first of an epoch. `options` are those of `make_private`.
        """
        if (epochs is None) == (draws is None):
            raise ValueError("give epochs, or draws: over how many batches the budget is spent")
        target_epsilon, target_delta = python_number(target_epsilon), python_number(target_delta)
        epochs, draws = python_number(epochs), python_number(draws)
        check_epsilon(target_epsilon)
        check_loader(data_loader)
        owned = of_users(data_loader, users, sample, rows_per_user, cap, target_delta)
        check_delta(target_delta, self._rows(owned))
        drawn = self._sampling(owned, sampling, max_batch)
        if draws is None:
            assert epochs is not None
            check_steps(epochs, "epochs")
            draws = epochs * draws_per_epoch(drawn.rate)
        check_steps(draws, "draws")
        chosen = _fit_for_a_loop(make_method(method) if isinstance(method, str) else method)

        def asked(multiplier: float) -> dict[Question, int]:
            each = SampledGaussian(drawn.rate, multiplier / sqrt(steps_per_batch))
            return {drawn.question(each): -(-draws // drawn.period)}  # type: ignore[operator]

        left = owned.left(target_epsilon)
        noise_multiplier = accounting.calibrate(asked, left, target_delta, self._accountant)
        self._plan = asked(noise_multiplier)
        self._ledger.budget = accounting.Budget(left, target_delta, self._plan)
        return self.make_private(
            module=module, optimizer=optimizer, data_loader=data_loader, noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm, method=chosen, steps_per_batch=steps_per_batch, target_delta=target_delta,
            sampling=sampling, max_batch=max_batch, users=users, sample=sample, rows_per_user=rows_per_user, cap=cap,
            **options,
        )  # fmt: skip

    def criterion(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same loss, taken of each example by itself and averaged over the rows of the batch.

        Class weights and ignored targets then decide about their own example only; the divisor is public. Give it the
        model's outputs as they are. Of a function of your own it stays an assumption that it depends on nothing else.
        """
        return batch_mean(loss)

    @python_numbers
    def guarantee(self, delta: float) -> accounting.Guarantee:
        """The guarantee of everything the optimizer did so far: an epsilon with its assumptions, or why none holds."""
        check_delta(delta, self._population or None)
        self._record_writes()
        return accounting.guarantee(self._ledger.spent, delta, self._facts, self._ledger.assumptions)

    def _record_assumptions(self, read_one_by_one: bool, seen: list[Doubt]) -> None:
        """Write down what is known of a loop before its first step, and what of its data is `seen` to be in doubt."""
        tell(seen)
        for name, what in seen:
            assumptions.record(self._ledger, name, "assumed", what)
        for each in known_of_a_run(self._facts, self._group.size, read_one_by_one):
            if each.name not in ("loss_per_example", "padding", "divisor"):
                assumptions.record(self._ledger, each.name, each.status, each.detail)
        if self._collates:
            assumptions.record(self._ledger, "padding", "assumed", f"{self._collates} {PADS}")
        else:
            assumptions.record(
                self._ledger, "padding", "not needed", "torch's collation: rows of a batch have one shape"
            )

    def _record_passes(self, ended: bool = False) -> None:
        """Write down what the passes of a step have shown, before it is charged. What is read after the last step, as
        where training has `ended`, decides nothing of its loss."""
        passes, ledger = self._private_steps().passes, self._ledger
        reads = passes.tracking.reads
        if not ended:
            self._reads_before_step = len(reads)
        counts = len(reads), self._reads_before_step
        shown = passes.assumed, passes.tracking.unproved, passes.lengths.vary, passes.written, counts
        if shown == self._shown:
            return
        seen = f"every operator from the loader to the backward pass was followed{assumptions.IN_ONE_THREAD}"
        unseen = "batches came by no private loader: what was made of targets before the model was not followed"
        status, detail = ("assumed", unseen) if passes.assumed else ("checked", seen)
        assumptions.record(ledger, "loss_per_example", status, detail)  # type: ignore[arg-type]
        assumptions.record(ledger, "divisor", status, detail)  # type: ignore[arg-type]
        if self._collates and passes.tracking.unproved:
            made = f"{self._collates} makes each row of its own example alone"
            if self._facts.users is not None and self._facts.users.sample == "users":
                made += ", and keeps the order of rows: those of a user are side by side"
            for name in ("one_example_per_row", "loss_per_example", "divisor"):
                assumptions.record(ledger, name, "assumed", made)
        if passes.written:
            wrote = "what the loop writes to weights and buffers beside its steps follows from nothing of the examples"
            assumptions.record(ledger, "nothing_else", "assumed", wrote)
        if passes.lengths.vary:
            assumptions.record(ledger, "padding", "assumed", "batches had several lengths")
        if reads:
            detail = f"the loop reads values of its examples ({_places(reads)}): do not act on them or publish them"
            assumptions.record(ledger, "nothing_else", "assumed", detail)
        if reads[: self._reads_before_step]:
            where = _places(reads[: self._reads_before_step])
            decides = f"what the loop reads of its examples ({where}) decides nothing of a loss, a weight or a length"
            for name in ("loss_per_example", "divisor", "padding"):
                assumptions.record(ledger, name, "assumed", decides)
        self._shown = shown

    def _record_writes(self) -> None:
        """Before a guarantee is stated: record whether the model was written to since its last step; refuse, where that
        depends on the examples."""
        if self._steps is not None and self._ledger.spent:
            self._steps.require_public()
            self._steps.passes.note_writes()
            if not self._finished:
                self._record_passes(ended=True)

    @python_numbers
    def get_epsilon(self, delta: float) -> float:
        """What has been spent so far; an error, with the reason, where no epsilon holds."""
        promise = self.guarantee(delta)
        if promise.epsilon is None:
            raise ValueError(f"no epsilon holds for this run: {'; '.join(promise.reasons)}")
        if self._accountant == "rdp":
            assert promise.epsilon_rdp is not None
            return promise.epsilon_rdp
        return promise.epsilon

    def audit(self, delta: float | None = None) -> OneRun:
        """What the canaries of `PrivacyEngine(audit=1000)` show of all steps so far: epsilon is at least so much with
        95% confidence, beside the accountant's at most; at `delta`, or the `target_delta` of `make_private`.

        Formal guarantees: with probability 0.95 over coins, samples and noise, the lower bound is at most the epsilon
        of the loop at `delta` (Steinke, Nasr & Jagielski 2023), at a step that was not chosen by looking at it. It is
        computed from releases and made-up rows alone. So is how often canaries were drawn, beside the priced rate.
        """
        steps = self._private_steps()
        if steps.canaries is None:
            raise ValueError("audit: no canaries were planted; plant some with PrivacyEngine(audit=1000)")
        delta = self._delta if delta is None else delta
        if delta is None:
            raise ValueError("audit: give the delta that epsilon is stated at, audit(delta=1e-5)")
        promise, path = self.guarantee(delta), self._ledger.path
        found, where = audited(steps.canaries, delta), "this loop" if path is None else str(path)
        drawn = Joined(steps.canaries.joined, steps.canaries.chances, steps.planned.rate)
        return OneRun(where, steps.method.name, found, promise.epsilon, delta, promise.listed, drawn)

    @property
    def spent(self) -> dict[Question, int]:
        """The questions that were charged so far, and how often each."""
        return dict(self._ledger.spent)

    def close(self) -> None:
        """Close the ledger's file: another process may then continue it. Operators are no longer followed, if
        the loop ended in an error."""
        self._ledger.close()
        if self._steps is not None:
            self._steps.passes.tracking.stop()

    @property
    def asked(self) -> int:
        """How many questions were charged so far."""
        return sum(self._ledger.spent.values())

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, number of steps), as Opacus's accountants keep it: of Poisson samples."""
        found = []
        for question, count in self._ledger.spent.items():
            if not isinstance(question, SampledGaussian):
                raise ValueError(
                    f"history: accountants of Poisson samples cannot price {type(question).__name__}; take guarantee()"
                )
            found.append((question.multiplier, question.rate, count))
        return found

    @property
    def may_step(self) -> bool:
        """Whether the budget, if there is one, pays for another step."""
        steps, budget = self._private_steps(), self._ledger.budget
        return budget is None or steps.paid_ahead or budget.allows(self._ledger.spent, steps.question)

    def automatic_rate(self, steps: int) -> tuple[float, str]:
        """The learning rate that `lr="auto"` is for the optimizer and so many steps, and how it was found: from public
        numbers alone."""
        held = self._private_steps()
        layout, planned, module = held.passes.layout, held.planned, held.passes.module
        with nullcontext() if self._loop is None else self._loop.whole():
            return choose_rate(
                module, layout, held.method, self._population, planned.rate, planned.multiplier, steps, "auto"
            )

    def finish(self, files: Mapping[str, str]) -> None:
        """Close the books of a run that left these files: the hash of each, by its name beside the ledger."""
        self._private_steps()
        self._record_writes()
        self._ledger.finish(files)
        self._finished = True

    def state_dict(self) -> dict[str, Any]:
        """The memory, the place in the ledger, and which canaries are planted, if any; no other random state, nor the
        module's and the optimizer's."""
        self._private_steps()
        if self._loop is not None:
            raise ValueError(BY_ROWS)
        return self._state()

    def _state(self) -> dict[str, Any]:
        place = {"run": self._run, "ledger_rows": self._ledger.rows, "ledger_head": self._ledger.head}
        return {**place, **self._private_steps().state_dict()}

    def save_checkpoint(self, *, path: str | Path, module: nn.Module, optimizer: Optimizer) -> None:
        """Weights, optimizer, memory and the place in the ledger, all at once; no random state. Of several processes
        the first one writes. Of a sharded module all call it, and each writes its rows into a folder beside the
        file."""
        if self._loop is not None:
            self._save_rows(Path(path), module, optimizer, self._loop)
        elif self._group.rank == 0:
            write_tensors(
                Path(path), {"module": module.state_dict(), "optimizer": optimizer.state_dict(), **self.state_dict()}
            )

    def _save_rows(self, path: Path, module: nn.Module, optimizer: Optimizer, loop: ShardedLoop) -> None:
        """Together. The rows have a new folder: the file that names it is replaced when all have written theirs."""
        content = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), **self._state()}
        name = f"{path.name}{ROWS}{self._group.secret():x}"[: len(path.name) + len(ROWS) + 12]
        left = checkpoints.save(path.parent / name, content, loop.shards)

        def write() -> None:
            write_tensors(path, {**left, "rows": name})
            for other in path.parent.iterdir():
                if other.name.startswith(path.name + ROWS) and other.name != name:
                    shutil.rmtree(other, ignore_errors=True)

        self._group.first(write)

    def load_checkpoint(self, *, path: str | Path, module: nn.Module, optimizer: Optimizer) -> None:
        """Go back to a checkpoint, after `make_private` with the same arguments. All that was asked stays charged. Of
        several processes all load, and the first one reads; of a sharded module each its rows, on any number of
        processes. With `reproducible=` the next pass over the loader begins with the draw that came next."""
        self._private_steps()
        saved = self._group.first(lambda: read_tensors(Path(path)))
        if ("rows" in saved) != (self._loop is not None):
            how = "sharded by fully_shard" if "rows" in saved else "whole in every process"
            raise ValueError(f"load_checkpoint: the module was {how} when {path} was saved; load it into such a one")
        self._group.first(partial(self._check_place, saved))
        if self._loop is not None:
            saved = checkpoints.load(Path(path).parent / saved["rows"], saved, self._loop.shards)
            saved["module"] = saved["model"]
            self._loop.forget()
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        self._load(saved)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go back to where `state_dict` was taken; the module and the optimizer are the caller's to restore."""
        self._private_steps()
        if self._loop is not None:
            raise ValueError(BY_ROWS)
        self._group.first(partial(self._check_place, saved))
        self._load(saved)

    def _load(self, saved: Mapping[str, Any]) -> None:
        steps = self._private_steps()
        asked = steps.asked
        steps.load_state_dict(saved)
        if not self._randomness.predictable:
            steps.asked = max(asked, steps.asked)  # no stream of noise is drawn from twice
        self._ledger.rewind(steps.draws)

    def _check_place(self, saved: Mapping[str, Any]) -> None:
        """What was asked after a checkpoint was saved is known to the ledger alone."""
        if self._ledger.path is None:
            if saved.get("run") != self._run:
                raise ValueError(
                    "load_checkpoint: what was asked after this checkpoint was saved is known to its ledger alone. "
                    "Train with PrivacyEngine(ledger=FILE), and load with PrivacyEngine(ledger=FILE, resume=True)"
                )
            return
        heads = read(self._ledger.path).heads
        rows = saved.get("ledger_rows", 0)
        if heads[rows - 1 : rows] != [saved.get("ledger_head")]:
            raise LedgerError(f"{self._ledger.path} does not contain what the checkpoint was trained on")

    def _sampling(self, owned: LoaderOfUsers, name: str, max_batch: int | None) -> Sampling:
        """How a loader's samples are drawn."""
        loader = owned.loader
        if name == "shuffled":
            raise ValueError("sampling='shuffled': poisson_sampling=False keeps your own batches, without an epsilon")
        return owned.sampling(sampling_by_name(name, rate_of(loader), self._rows(owned), max_batch), name)

    def _rows(self, owned: LoaderOfUsers) -> int:
        """How many rows samples are drawn from: the loader's, and the canaries; or users."""
        return owned.population + (self._audit or 0)

    def _open(
        self,
        method: Method,
        module: nn.Module,
        rate: float,
        multiplier: float,
        delta: float | None,
        max_batch: int | None,
        moves: Optimizer,
        paid_by: tuple[Budget, Provenance],
        owned: Ownership | None,
    ) -> tuple[Layout, int]:
        """Open the ledger, and lay out the releases: where steps are balanced, by the constants of its beginning. Also
        how many draws it has seen."""
        history = self._ledger.claim() if self._resume else None
        layout = method.layout(module, None if history is None else history.facts.get("balance"))
        entry = self._reserve(paid_by, history)
        facts = {
            "noise": self._facts.noise,
            "arithmetic": self._facts.arithmetic,
            "coordinates": self._facts.coordinates,
            "sampling": self._facts.sampling,
            "schedule": "fixed",
            "nonprivate_outputs": self._facts.nonprivate_outputs,
            "method": method.identity,
            "sample_rate": rate,
            "noise_multiplier": multiplier,
            **({} if self._audit is None else {"canaries": self._audit}),
            "population": self._population,
            **({} if delta is None else {"delta": delta}),
            **({} if method.balance is None else {"balance": layout.constants_of_all}),
            **({} if max_batch is None else {"max_batch": max_batch}),
            **({} if self._facts.users is None else {"users": self._facts.users.to_json()}),
            **({} if owned is None else {"owners": owned.fingerprint}),
            **({} if entry is None else {"budget": entry}),
        }
        settings = [{k: v for k, v in group.items() if k != "params"} for group in moves.param_groups]
        self._group.agree({"the optimizer": [type(moves).__name__, settings], **facts})
        if history is None:
            self._ledger.open(facts)
            return layout, 0
        absent = dict.fromkeys(("users", "owners", "canaries", "max_batch"))
        for key, value in answers_first({**absent, **facts}):
            if key in ("delta", "owners") and key not in history.facts:
                continue  # until 0.2 loops did not write these down
            was = require_same_answers(key, history.facts.get(key), value)
            if was != value:
                raise ValueError(f"resume: {key} is {value!r} now but was {was!r}; use the same settings")
        self._ledger.resume(history.last_step + 1)
        return layout, history.last_step + 1

    def _reserve(self, paid_by: tuple[Budget, Provenance], history: LedgerHistory | None) -> dict[str, Any] | None:
        """In the book of the dataset, if there is one: the plan where it is known, otherwise step by step."""
        budget, source = paid_by

        def reserved() -> dict[str, Any] | None:
            run = None if history is None else continued(history.facts, budget)
            if history is not None and run is None:
                return None
            return attach(
                self._ledger,
                budget,
                self._plan,
                purpose="a training loop",
                source=source,
                facts=self._facts,
                run=run,
                spent=None if history is None else history.spent(replays_are_free=False),
            )

        return self._group.first(reserved)

    def _private_steps(self) -> PrivateSteps:
        if self._steps is None:
            raise ValueError("call make_private first")
        return self._steps


def _places(reads: Sequence[Read]) -> str:
    """Where values of the examples were read."""
    return ", ".join(sorted({f"{read.operator} at {read.where}" for read in reads}))


def refuse_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in ELSEWHERE:
            raise ValueError(f"{name}={value!r} is not an argument here: {ELSEWHERE[name]}")
        raise TypeError(f"make_private() got an unexpected keyword argument {name!r}")


def _kept(loader: DataLoader[Any], sampling: str, max_batch: int | None) -> Sampling:
    """The user's own batches, for which no epsilon holds."""
    if sampling != "poisson" or max_batch is not None:
        raise ValueError(
            f"poisson_sampling=False keeps your own batches: leave sampling={sampling!r} and max_batch out"
        )
    return Shuffled(rate_of(loader))


def _fit_for_a_loop(method: Method) -> Method:
    """Refuse what a user's own loop cannot answer as priced: it has one batch per step, and asks about it once."""
    plain = Method(name=method.name)
    neutral = ("schedule", "noise", "average", "augment", "gate")
    wrong = [part for part in neutral if getattr(method, part) != getattr(plain, part)]
    if method.clip.adaptive:
        wrong.append("clip")
    if not method.probe.one_question:
        wrong.append("probe")  # a second answer about the same batch would be priced as one about a fresh batch
    if wrong:
        raise ValueError(
            f"method={method.name!r} has a {wrong[0]} that a training loop of your own cannot answer as it is priced: "
            "use vestige.train"
        )
    return method


def _require_values(module: nn.Module) -> None:
    """Refuse a module that is still on the meta device."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"module: {name!r} is on the meta device and has no values yet: call module.to_empty(device=...), load "
                "or initialise its weights, then make the optimizer and call make_private"
            )


def _require_rule(method: Method, optimizer: Optimizer) -> None:
    """Refuse a method that moves by something else than the user's optimizer: in a loop the optimizer moves, and what
    the method says of that would be dropped without a word. Plain SGD leaves the choice to the user."""
    rule, name = method.rule, method.name
    usual = make_method(name).rule if name in METHODS else Rule()
    options = usual.options if usual.optimizer is rule.optimizer else {}
    said = {key: value for key, value in rule.options.items() if value and value != options.get(key)}
    if rule.optimizer is torch.optim.SGD and not said:
        return
    moves, wanted = _known(type(optimizer)), _named(rule.optimizer)
    way_out = "train by vestige.train, or choose a method that leaves the moves to your optimizer, such as 'dp-sgd'"
    if moves is not rule.optimizer:
        raise ValueError(
            f"method={name!r} moves by {rule.name}, and optimizer is {type(optimizer).__name__}, which would move in "
            f"its place: give {wanted}, {way_out}"
        )
    for key, value in said.items():
        found = [group.get(key) for group in optimizer.param_groups]
        if value not in found:
            raise ValueError(
                f"method={name!r} has {key}={value}, and optimizer has {found[0]}, which would be used in its place: "
                f"give {wanted} with {key}={value}, {way_out}"
            )


def _known(kind: type[Optimizer]) -> Any:
    """The optimizer of torch's, or of ours, that one is or is made from."""
    return next((each for each in kind.__mro__ if each in OPTIMIZERS.values()), kind)


def _named(kind: type[Optimizer]) -> str:
    """Where an optimizer is found."""
    own = getattr(torch.optim, kind.__name__, None) is kind
    return f"torch.optim.{kind.__name__}" if own else f"{kind.__module__}.{kind.__name__}"


def _largest_part(module: nn.Module, loader: DataLoader[Any], method: Method) -> int:
    blank = (loader.collate_fn or default_collate)([loader.dataset[0]])
    if not (isinstance(blank, list | tuple) and len(blank) > 1 and all(isinstance(part, Tensor) for part in blank)):
        raise ValueError("max_physical_batch_size='auto' tries out batches (inputs..., targets): give a number")
    population = len(loader.dataset)  # type: ignore[arg-type]
    layout = method.layout(module)
    empty = [part[:0] for part in blank]
    return part_of_a_run(module, BookKeeping, _stand_in, layout, method, empty, population, rate_of(loader), steps=1)


def _stand_in(outputs: Any, targets: Tensor) -> Tensor:
    """A loss that takes about as much memory as the user's, which is not known yet: as much as a cross-entropy."""
    leaves = [each.abs() if each.is_complex() else each for each in filter(differentiable, tree_flatten(outputs)[0])]
    return torch.stack([each.flatten(1).log_softmax(dim=1).square().sum() for each in leaves]).sum()


__all__ = ["BudgetSpent", "PrivacyEngine"]

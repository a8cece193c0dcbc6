"""How does a Hugging Face Trainer train privately? Its batches, clipping, accumulation and logs are replaced.

One item of the private loader is a whole Poisson sample, and one step of the Trainer is one private step: schedules,
checkpoints and `max_steps` count those. A sample that is too large for the device comes in parts, each bounded and
added by itself. What the Trainer would write out of training data without noise, it does not get to see.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from math import ceil, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from vestige.budget.spending import Budget, account_of, of_users
from vestige.files import read_tensors, write_json, write_tensors
from vestige.integrations.model_card import keep_base_config, model_card, state_in
from vestige.integrations.privacy_arguments import PrivacyArguments
from vestige.integrations.trainer_checks import (
    refuse_flattened,
    refuse_own_sampling,
    refuse_settings,
)
from vestige.mechanism.loading import rate_of
from vestige.mechanism.users.ownership import with_users
from vestige.privacy_engine.engine import PrivacyEngine
from vestige.privacy_engine.loaders import draws_per_epoch
from vestige.training.assumption_doubts import refuse_training_data
from vestige.training.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers.trainer_utils import PredictionOutput

    from vestige.accounting import Guarantee

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import TrainOutput
except ImportError as error:
    raise ImportError("vestige.integrations.huggingface needs packages: pip install 'vestige[huggingface]'") from error

STATE, RECORD = "vestige.pt", "privacy.json"
PUBLIC = ("learning_rate", "epoch", "step", "epsilon")
"""What is logged while training; the rest is computed from data without noise."""
RAW_LOSSES = ("loss", "train_loss")
KEPT_BACK = (
    *RAW_LOSSES, "grad_norm", "total_flos", "num_tokens", "num_input_tokens_seen", "entropy", "mean_token_accuracy",
)  # fmt: skip
"""What trainers log of training data; timings, which also depend on them, begin with train_."""

Base: Any = object


class Draw:
    """A sample, whose parts are read when they are trained on. To the Trainer it is a batch without columns."""

    def __init__(self, batches: Iterator[object]) -> None:
        self.batches = batches

    def __contains__(self, column: object) -> bool:
        return False


class Draws:
    """The private loader, one item for each sample of an epoch."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Draw]:
        batches = iter(self.loader)
        return (Draw(batches) for _ in range(len(self)))


class PrivateTrainerMixin(Base):
    """Makes any Trainer private: `class Mine(PrivateTrainerMixin, SFTTrainer)`.

    `per_device_train_batch_size` times `gradient_accumulation_steps`, times the number of processes, is the expected
    size of a sample; a sample comes in parts of the former where the second is more than one. The ledger is in the
    output folder, where `vestige verify` finds it. Of several processes the first one writes.

    Formal guarantees: what `train` leaves in the output folder and hands to callbacks is (epsilon, delta)-private with
    the epsilon of `guarantee()`, under its assumptions, provided that `eval_dataset` is public.
    """

    args: Any

    def __init__(self, *args: object, privacy_args: PrivacyArguments, **kwargs: object) -> None:
        refuse_training_data(kwargs.get("eval_dataset"), kwargs.get("train_dataset"), "eval_dataset")
        super().__init__(*args, **kwargs)
        self.privacy_args = privacy_args
        self.privacy_engine: PrivacyEngine | None = None
        refuse_own_sampling(self._classes_between())
        self._loss_is_the_models = self._whose_loss()
        refuse_settings(self)
        refuse_training_data(self.eval_dataset, self.train_dataset, "eval_dataset")
        self._replace_settings()
        self.callback_handler.on_log = partial(self._log_what_is_public, self.callback_handler.on_log)
        self.add_callback(StopWhenSpent(self))
        self._draws: Draws | None = None
        self._resuming = self._sealed = False
        self._evaluating: str | None = None
        """What metrics of the evaluation under way begin with."""
        self._told: set[str] = set()
        self._priced: tuple[int, float | None] | None = None

    def _classes_between(self) -> list[type]:
        """Of the classes that this one is made of, those below the mixin and above the Trainer."""
        order = type(self).__mro__
        return list(order[order.index(PrivateTrainerMixin) + 1 : order.index(Trainer)])

    def _whose_loss(self) -> bool:
        """Whether the loss is the one that the model computes, and not a trainer's own."""
        owner = next((each for each in self._classes_between() if "compute_loss" in vars(each)), Trainer)
        if owner.__module__.startswith("trl.") and owner.__name__ != "SFTTrainer":
            raise ValueError(
                f"{owner.__name__} makes several rows of one example and compares them in a loss of its own, so "
                "clipping a row would not bound an example. Of TRL's trainers SFTTrainer can be made private; a loss "
                "of pairs, such as DPO's, is exact in vestige.train, with a pair as one row: docs/how-do-i.md"
            )
        return owner is Trainer or owner.__module__.startswith("trl.")

    def _replace_settings(self) -> None:
        """In a copy of the arguments: one item of the loader is one step, and nothing is clipped but by us."""
        args = self.args = copy.copy(self.args)
        self._bound = self.privacy_args.max_grad_norm or args.max_grad_norm  # type: ignore[attr-defined]
        if not self._bound:
            raise ValueError(f"max_grad_norm={args.max_grad_norm} must be positive: it bounds each example's gradient")
        self._part = args.per_device_train_batch_size if args.gradient_accumulation_steps > 1 else None
        args.per_device_train_batch_size *= args.gradient_accumulation_steps
        self._train_batch_size = args.per_device_train_batch_size
        args.gradient_accumulation_steps, args.max_grad_norm = 1, 0.0
        args.ignore_data_skip = True  # a resumed run draws fresh samples: there is no order to go back to
        if args.gradient_checkpointing:
            args.gradient_checkpointing_kwargs = {**(args.gradient_checkpointing_kwargs or {}), "use_reentrant": False}

    # --- training -----------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: object = None, trial: object = None, *args: object, **kwargs: object
    ) -> TrainOutput:
        if trial is not None:
            self.hyperparameter_search()
        self._resuming = bool(resume_from_checkpoint)
        if self._sealed and self.privacy_engine is not None:
            self.privacy_engine.load_state_dict(self.privacy_engine.state_dict())  # the ledger continues from here
            self._sealed = False
        output = super().train(resume_from_checkpoint, trial, *args, **kwargs)
        self._seal()
        self._say_guarantee()
        loss = output.training_loss if self.privacy_args.log_nonprivate_loss else nan
        return TrainOutput(output.global_step, loss, self._public(output.metrics))

    def hyperparameter_search(self, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            "hyperparameter_search chooses by looking at many runs, which has a price of its own: `vestige compare` "
            "states it"
        )

    def get_train_dataloader(self) -> Draws:
        """The private samples. With the first call the model and the optimizer become private too."""
        if self._draws is None:
            self._draws, self._private_model = self._make_private(), self.model
        elif self._private_model is not self.model:
            raise ValueError("the model was made anew since it became private: use a new trainer for each model")
        return self._draws

    def _make_private(self) -> Draws:
        asked, args = self.privacy_args, self.args
        loader = self._plain_loader()
        self.create_optimizer()
        self._optimizer = self.optimizer
        rate = rate_of(loader)
        steps = args.max_steps if args.max_steps > 0 else ceil(args.num_train_epochs * draws_per_epoch(rate))
        engine = PrivacyEngine(
            ledger=Path(args.output_dir) / "ledger.jsonl",
            resume=self._resuming,
            secure_mode=asked.secure_mode,
            cuda_graphs=asked.cuda_graphs,
            nonprivate_outputs=asked.log_nonprivate_loss,
        )
        make: Callable[..., Any] = engine.make_private
        noise: dict[str, object] = {"noise_multiplier": asked.noise_multiplier}
        if asked.target_epsilon is not None:
            make = engine.make_private_with_epsilon
            noise = {"target_epsilon": asked.target_epsilon, "draws": steps}
        *_, private = make(
            module=self.model, optimizer=self._optimizer, data_loader=loader, target_delta=asked.target_delta,
            max_grad_norm=self._bound, method=asked.method, max_physical_batch_size=self._part,
            tokens_per_example=asked.tokens_per_example, budget=self._account(), users=self._users(),
            sample=asked.sample, rows_per_user=asked.rows_per_user, cap=asked.cap, **noise,
        )  # fmt: skip
        self.privacy_engine = engine
        if asked.lr == "auto":
            lr, _ = engine.automatic_rate(steps)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
        if asked.log_nonprivate_loss and self.is_world_process_zero():
            warnings.warn("log_nonprivate_loss=True: raw losses are logged, so no epsilon is stated", stacklevel=2)
        return Draws(private)

    def _account(self) -> Budget:
        """Which book pays."""
        found = account_of(self.privacy_args.budget)
        found = found and replace(found, derived_from=self.privacy_args.derived_from)
        return of_users(found, self.privacy_args.user_column)

    def _users(self) -> object:
        """Whose each row is, by the column that was named."""
        name = self.privacy_args.user_column
        return None if name is None else with_users(self.train_dataset, name)[1]

    def _plain_loader(self) -> DataLoader[object]:
        """As the Trainer makes it, but for the sampler and for Accelerate's wrapper."""
        args, dataset, collate = self.args, self.train_dataset, self.data_collator
        if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError("train_dataset must have rows with indices: a Poisson sample picks some of a known number")
        if self.privacy_args.user_column is not None:
            dataset = with_users(dataset, self.privacy_args.user_column)[0]
        if type(dataset).__module__.startswith("datasets."):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        return DataLoader(
            dataset,
            batch_size=args.per_device_train_batch_size * args.world_size,
            shuffle=True,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Draw], num_batches: int, *_: object
    ) -> tuple[list[Draw], None]:
        """Without a count of everyone's tokens."""
        return list(islice(epoch_iterator, num_batches)), None

    def training_step(self, model: object, inputs: Draw, num_items_in_batch: object = None) -> torch.Tensor:
        """Every part of a sample forth and back; all but the last are closed here, which only bounds and adds. The
        Trainer's own `optimizer.step()` closes the last, and moves."""
        assert self._draws is not None
        parts = self._draws.loader.batch_sampler.parts  # type: ignore[union-attr]
        total, rows = torch.zeros((), device=self.args.device), 0
        for batch in inputs.batches:
            refuse_flattened(batch, next((part.rows for part in parts.waiting()), 0))
            loss = super().training_step(model, batch)
            part = parts.current
            if part is not None and self.privacy_args.log_nonprivate_loss:
                total, rows = total + loss * part.rows, rows + part.rows
            if part is None or part.last:
                break
            self._optimizer.step()
        return total / max(1, rows)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: object = None,
        **kwargs: object,
    ) -> Any:
        """While training, the loss that the model computes itself, of each example; or a trainer's own, with the
        assumption that each row has a say in its own loss only. No loss is divided by everyone's tokens."""
        if not (self.model.training and torch.is_grad_enabled()):
            more = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            return super().compute_loss(model, inputs, **more, **kwargs)
        if self._loss_is_the_models:
            return Trainer.compute_loss(self, model, inputs, return_outputs=return_outputs)  # type: ignore[arg-type]
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    def floating_point_ops(self, inputs: object) -> int:
        """They depend on how many tokens a sample had, and would be in trainer_state.json."""
        return 0

    # --- what is written out ------------------------------------------------------------------------------------------

    def guarantee(self) -> Guarantee:
        """The guarantee of the training so far: an epsilon with its assumptions, or why there is none."""
        if self.privacy_engine is None:
            raise ValueError("nothing was trained yet: call train() first")
        return self.privacy_engine.guarantee(self.privacy_args.target_delta)  # type: ignore[arg-type]

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: object = None, metric_key_prefix: str = "eval", **kwargs: object
    ) -> dict[str, float]:
        refuse_training_data(eval_dataset, self.train_dataset, "eval_dataset")
        before, self._evaluating = self._evaluating, metric_key_prefix
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
        finally:
            self._evaluating = before

    def predict(self, test_dataset: object, *args: object, **kwargs: object) -> PredictionOutput:
        refuse_training_data(test_dataset, self.train_dataset, "test_dataset")
        return super().predict(test_dataset, *args, **kwargs)

    def _public(self, logs: dict[str, object]) -> dict[str, Any]:
        """Of what is logged, what is public or released: metrics of an evaluation; else epsilon and a few more."""
        if self._evaluating is not None:
            own = f"{self._evaluating}_"
            kept = {key: value for key, value in logs.items() if key.startswith(own) or key in PUBLIC}
        else:
            allowed = (*PUBLIC, *RAW_LOSSES) if self.privacy_args.log_nonprivate_loss else PUBLIC
            epsilon = self._epsilon()
            kept = {key: value for key, value in logs.items() if key in allowed}
            kept |= {} if epsilon is None else {"epsilon": epsilon}
        self._tell(logs.keys() - kept.keys())
        return kept

    def _tell(self, gone: set[str]) -> None:
        """Warns once of values that are kept back and are not the Trainer's own."""
        fresh = {key for key in gone if key not in KEPT_BACK and not key.startswith("train_")} - self._told
        if fresh and self.is_world_process_zero():
            self._told |= fresh
            warnings.warn(
                f"kept back from the logs: {', '.join(sorted(fresh))}. What is computed from training data without "
                "noise is not logged; metrics of an eval_dataset are",
                stacklevel=2,
            )

    def _epsilon(self) -> float | None:
        """What is spent, computed once for each number of steps."""
        if self.privacy_engine is None:
            return None
        asked = self.privacy_engine.asked
        if self._priced is None or self._priced[0] != asked:
            self._priced = asked, self.guarantee().epsilon
        return self._priced[1]

    def _log_what_is_public(
        self, original: Callable[..., object], args: object, state: Any, control: object, logs: Any
    ) -> object:
        """The last thing before history and callbacks: whatever any trainer's `log` has added is held back here."""
        kept = self._public(logs)
        logs.clear()
        logs.update(kept)
        state.log_history[-1] = {**kept, "step": state.global_step}
        return original(args, state, control, logs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.privacy_engine is not None and self.args.should_save:
            write_tensors(Path(output_dir) / STATE, self.privacy_engine.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.privacy_engine is None:
            return
        path = Path(checkpoint) / STATE
        if not path.exists():
            raise ValueError(f"{checkpoint!r} has no {STATE}: save_only_model left out what a private run resumes from")
        self.privacy_engine.load_state_dict(read_tensors(path))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.is_world_process_zero():
            keep_base_config(self.accelerator.unwrap_model(self.model), Path(output_dir or self.args.output_dir))
        if self._sealed and Path(output_dir or self.args.output_dir) == Path(self.args.output_dir):
            self._seal()

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """As the Trainer makes it, with the privacy statement."""
        super().create_model_card(*args, **kwargs)
        if self._sealed and self.is_world_process_zero():
            self._describe()

    def _describe(self) -> None:
        """Write the privacy statement into the card of the model."""
        state_in(Path(self.args.output_dir) / "README.md", model_card(self.args.output_dir))

    def _say_guarantee(self) -> None:
        """The last entry of the logs: epsilon, and the assumptions that it rests on."""
        found = self.guarantee()
        listed = list(found.listed)
        self.state.log_history.append({"epsilon": found.epsilon, "assumptions": listed, "step": self.state.global_step})
        if self.is_world_process_zero() and not self.args.disable_tqdm:
            print(found)

    def _seal(self) -> None:
        """Write the guarantee down, and the hashes of it and of the weights into the ledger's last row."""
        if self.privacy_engine is None:
            return
        self._sealed = True
        if not self.is_world_process_zero():
            return
        folder = RunFolder(self.args.output_dir)
        asked = {**asdict(self.privacy_args), "max_grad_norm": self._bound}
        found = self.guarantee()
        promise = {**asdict(found), "assumptions": found.listed}
        del promise["asked"]  # the ledger has it, row by row
        write_json(folder.path / RECORD, {"asked": asked, "guarantee": promise})
        left = folder.hashes()
        self.privacy_engine.finish({n: h for n, h in left.items() if n == RECORD or n.endswith(".safetensors")})
        self._describe()


class StopWhenSpent(TrainerCallback):  # type: ignore[misc]
    """Ends the training where the budget does, as when steps were charged that a crash has lost."""

    def __init__(self, trainer: PrivateTrainerMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: object, state: Any, control: Any, **kwargs: object) -> None:
        engine = self._trainer.privacy_engine
        if engine is not None and state.global_step < state.max_steps and not engine.may_step:
            if state.is_world_process_zero:
                warnings.warn(f"the budget is spent after step {state.global_step}: training stops here", stacklevel=2)
            control.should_training_stop = True


class PrivateTrainer(PrivateTrainerMixin, Trainer):  # type: ignore[misc]
    """A Hugging Face Trainer that trains privately: `PrivateTrainer(..., privacy_args=PrivacyArguments(...))`."""


__all__ = ["PrivacyArguments", "PrivateTrainer", "PrivateTrainerMixin"]

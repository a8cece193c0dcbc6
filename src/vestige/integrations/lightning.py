"""How does a LightningModule train privately? With `Private(...)` among the trainer's callbacks; it stays as it is."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from vestige.checks import check_number
from vestige.mechanism.loading import rate_of
from vestige.privacy_engine.engine import PrivacyEngine
from vestige.privacy_engine.loaders import draws_per_epoch
from vestige.processes.distributed_setup import unwrapped
from vestige.renaming import Now, renamed_arguments
from vestige.training.assumption_doubts import refuse_training_data

if TYPE_CHECKING:
    from vestige.accounting import Guarantee

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its older name
    from pytorch_lightning import Callback  # type: ignore[assignment]


LOGGER = logging.getLogger("lightning.pytorch.vestige")
"""A child of Lightning's logger, so that it is shown with its settings."""


class Private(Callback):
    """Makes the model, its optimizer and its training loader private when `trainer.fit` begins.

    The noise is that which spends `target_epsilon` in the trainer's epochs, or is given as `noise_multiplier`. `ledger`
    is a file, without which a run cannot be resumed (`ckpt_path`); `secure_mode` and `cuda_graphs` are those of
    `PrivacyEngine`. `options` are those of `PrivacyEngine.make_private`,
    such as `max_physical_batch_size`. What is logged in training is computed from examples without noise, and is kept
    from loggers, progress bar and other callbacks; `epsilon` is logged instead. `log_nonprivate=True` logs it, and
    then there is no epsilon. Validation is the user's, on examples that are public.

    Formal guarantees: those of `PrivacyEngine`; `guarantee()` has them.
    """

    @renamed_arguments({"delta": Now("target_delta")})
    def __init__(
        self,
        *,
        target_delta: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float = 1.0,
        ledger: str | Path | None = None,
        secure_mode: bool = True,
        cuda_graphs: bool = True,
        log_nonprivate: bool = False,
        reproducible: int | None = None,
        **options: object,
    ) -> None:
        check_number("target_delta", target_delta)
        if (target_epsilon is None) == (noise_multiplier is None):
            raise ValueError("Private takes one of target_epsilon=3, say, and noise_multiplier=1")
        self.target_delta, self.target_epsilon, self.noise_multiplier = target_delta, target_epsilon, noise_multiplier
        self.secure_mode, self.cuda_graphs = secure_mode, cuda_graphs
        self.max_grad_norm, self.ledger, self.log_nonprivate = max_grad_norm, ledger, log_nonprivate
        self.reproducible, self.options = reproducible, options
        self.engine: PrivacyEngine | None = None
        self._saved: dict[str, object] = {}
        self._trained_on: DataLoader[object] | None = None

    def guarantee(self) -> Guarantee:
        """The guarantee of the model as it is now: an epsilon with its assumptions, or why there is none."""
        if self.engine is None:
            raise ValueError("nothing was trained yet: call trainer.fit first")
        return self.engine.guarantee(self.target_delta)

    # --- the trainer's hooks ------------------------------------------------------------------------------------------

    def setup(self, trainer: object, pl_module: object, stage: str) -> None:
        if stage == "fit":
            _require_one_mechanism(trainer, pl_module)
            _require_whole_draws(trainer, self.options)

    def on_fit_start(self, trainer: Any, pl_module: object) -> None:
        if self.engine is not None:
            raise ValueError(
                "this Private callback has trained a model already: make a new model, trainer and callback, and "
                "continue with trainer.fit(model, ckpt_path=...)"
            )
        if trainer.world_size > 1:
            unwrapped(trainer.strategy.model)  # the trainer would call training_step through it, and add gradients up
            trainer.strategy.model = pl_module
        if self._saved and self.ledger is None:
            raise ValueError(
                "ckpt_path: what was asked after the checkpoint was saved is known to its ledger alone. Train with "
                "Private(ledger=FILE), and continue with the same file"
            )
        engine = PrivacyEngine(
            ledger=self.ledger,
            resume=bool(self._saved),
            reproducible=self.reproducible,
            secure_mode=self.secure_mode,
            cuda_graphs=self.cuda_graphs,
            nonprivate_outputs=self.log_nonprivate,
        )
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        if not isinstance(loader, DataLoader):
            raise ValueError(f"the training data are a {type(loader).__name__}: give one DataLoader")
        self._trained_on = loader
        source.instance = self._made_private(engine, trainer, pl_module, loader)
        trainer.fit_loop._combined_loader = None  # configure_optimizers may have asked for its length
        if self._saved:
            engine.load_state_dict(self._saved)
        if not self.log_nonprivate:
            results = trainer.fit_loop.epoch_loop._results
            results.log = NotReturned(trainer, results.log)
        self.engine = engine

    def on_validation_start(self, trainer: Any, pl_module: object) -> None:
        self._require_public(trainer.val_dataloaders, "val_dataloaders")

    def on_test_start(self, trainer: Any, pl_module: object) -> None:
        self._require_public(trainer.test_dataloaders, "test_dataloaders")

    def _require_public(self, loaders: object, name: str) -> None:
        if self.log_nonprivate:
            return
        for each in loaders if isinstance(loaders, list | tuple) else [loaders]:
            refuse_training_data(each, self._trained_on, name)

    def on_train_batch_start(self, trainer: Any, pl_module: object, batch: object, batch_idx: int) -> None:
        if trainer.accumulate_grad_batches != 1:  # a callback may change it
            raise ValueError(_accumulated(trainer))

    def on_train_batch_end(
        self, trainer: Any, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        assert self.engine is not None
        if not self.engine.may_step:  # a run that was resumed repeats steps, and may not reach its end
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        found = self.guarantee().epsilon
        if found is not None:
            pl_module.log("epsilon", found, prog_bar=True, rank_zero_only=trainer.world_size > 1)

    def on_train_end(self, trainer: Any, pl_module: object) -> None:
        if trainer.is_global_zero:
            LOGGER.info("%s", self.guarantee())

    def teardown(self, trainer: Any, pl_module: object, stage: str) -> None:
        vars(trainer.fit_loop.epoch_loop._results).pop("log", None)

    def state_dict(self) -> dict[str, object]:
        return {} if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self._saved = state_dict

    # --- what becomes private -----------------------------------------------------------------------------------------

    def _made_private(self, engine: PrivacyEngine, trainer: Any, pl_module: Any, loader: DataLoader[object]) -> object:
        parts: dict[str, Any] = {
            "module": _called(trainer, pl_module, loader),
            "optimizer": trainer.optimizers[0],
            "data_loader": loader,
            "max_grad_norm": self.max_grad_norm,
            **self.options,
        }
        if self.noise_multiplier is not None:
            private = engine.make_private(**parts, noise_multiplier=self.noise_multiplier)[2]
        else:
            assert self.target_epsilon is not None
            private = engine.make_private_with_epsilon(
                **parts,
                target_epsilon=self.target_epsilon,
                target_delta=self.target_delta,
                draws=_planned_draws(trainer, draws_per_epoch(rate_of(loader))),
            )[2]
        if self.options.get("max_physical_batch_size") is not None:
            return Unsized(private)
        return private if trainer.world_size == 1 else Whole(private)


def _planned_draws(trainer: Any, each_epoch: int) -> int:
    """How many steps are planned at most."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    limits = [] if epochs is None or epochs < 0 else [epochs * each_epoch]
    limits += [] if steps is None or steps < 0 else [steps]
    if not limits:
        raise ValueError("max_epochs=-1: a budget is planned for a number of epochs, or of steps (max_steps)")
    return int(min(limits))


class Unsized:
    """The parts of draws, whose number is not known in advance; a DataLoader's length is that of its draws."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[object]:
        return iter(self._loader)


class Whole(Unsized):
    """A process's own examples of every draw. To the trainer it is no DataLoader, in which it would put a
    DistributedSampler."""

    def __len__(self) -> int:
        return len(self._loader)


class _Called(Exception):
    """Ends a training step at the first call of the model."""


def _called(trainer: Any, pl_module: nn.Module, loader: DataLoader[object]) -> nn.Module:
    """Which module a training step calls: the LightningModule, or one in it that holds all its parameters.

    It is tried out on a made-up example, up to that call. Where that cannot be found out it is the LightningModule, and
    gradients that come from elsewhere are refused at the step.
    """
    everything = {id(parameter) for parameter in pl_module.parameters()}
    found: list[nn.Module] = []

    def stop(module: nn.Module, args: object) -> None:
        found.append(module)
        raise _Called

    holders = [module for module in pl_module.modules() if {id(p) for p in module.parameters()} == everything]
    handles = [module.register_forward_pre_hook(stop) for module in holders]
    vars(pl_module)["log"] = lambda *args, **kwargs: None
    try:
        with torch.random.fork_rng(), torch.no_grad():
            row = next(iter(DataLoader(loader.dataset, batch_sampler=[[0, 0]], collate_fn=loader.collate_fn)))
            row = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(row), dataloader_idx=0)
            wanted = len(inspect.signature(pl_module.training_step).parameters)  # type: ignore[arg-type, operator]
            pl_module.training_step(*(row, 0)[:wanted])  # type: ignore[operator]
    except Exception:  # it may need what a fit sets up
        pass
    finally:
        del vars(pl_module)["log"]
        for handle in handles:
            handle.remove()
    return found[0] if found else pl_module


# --- what is refused --------------------------------------------------------------------------------------------------


def _require_one_mechanism(trainer: Any, pl_module: Any) -> None:
    """Refuse, before anything is trained, what would change a private step or take another in its place."""
    kind = type(trainer.strategy).__name__
    if kind != ("SingleDeviceStrategy" if trainer.world_size == 1 else "DDPStrategy"):
        raise ValueError(
            f"strategy: private training runs on one device, or by strategy='ddp' in several processes, not by {kind}"
        )
    if trainer.world_size > 1 and getattr(trainer.strategy, "_start_method", "popen") != "popen":
        raise ValueError(
            "strategy: processes that are forked or spawned take the ledger and the guarantee along when they end: use "
            "strategy='ddp', or torchrun"
        )
    if not pl_module.automatic_optimization:
        raise ValueError("automatic_optimization=False: Private steps where the trainer does; for steps of your own, "
                         "use vestige.PrivacyEngine in a loop")  # fmt: skip
    if str(trainer.precision) in ("16", "16-mixed", "16-true"):
        raise ValueError(
            f"precision={trainer.precision!r} loses the small gradients of single examples: use precision='bf16-mixed'"
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val}: each example's gradient is bounded before they are added "
            "up, by Private(max_grad_norm=...); leave it out"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(_accumulated(trainer))
    if trainer.overfit_batches:
        raise ValueError(f"overfit_batches={trainer.overfit_batches}: private batches are Poisson samples of all data")
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise ValueError("training_step takes a dataloader_iter: let it take a batch, which is one draw")


def _require_whole_draws(trainer: Any, options: dict[str, object]) -> None:
    """Parts of a draw are batches of the trainer, which must be as many in every process."""
    size = options.get("max_physical_batch_size")
    if trainer.world_size > 1 and size is not None:
        raise ValueError(
            f"max_physical_batch_size={size}: in several processes the trainer counts batches, and of a draw one "
            "process may have more parts than another. Leave it out: more processes have fewer examples each"
        )


def _accumulated(trainer: Any) -> str:
    return (
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}: each batch of the private loader is priced as one "
        "step. Give the loader the whole batch_size, and Private(max_physical_batch_size=...) to split it"
    )


class NotReturned:
    """Takes what is logged in training, which no noise covers, and keeps it; of our own numbers epsilon is passed
    on."""

    def __init__(self, trainer: object, log: Any) -> None:
        self._trainer, self._log = trainer, log
        self._said: set[str] = set()

    def __call__(self, fx: str, name: str, value: object, *args: object, **kwargs: object) -> None:
        if name == "epsilon":
            self._log(fx, name, value, *args, **kwargs)
            return
        for chooser, monitor in _choosers(self._trainer):
            if monitor in (name, f"{name}_step", f"{name}_epoch"):
                raise ValueError(
                    f"{chooser}(monitor={monitor!r}) would choose by training examples without noise: monitor what "
                    "is logged in validation"
                )
        if name not in self._said:
            self._said.add(name)
            warnings.warn(
                f"{name!r}, logged in {fx}, is computed from training examples without noise and is kept back; "
                "Private(log_nonprivate=True) logs it, and gives the guarantee up",
                stacklevel=2,
            )


def _choosers(trainer: Any) -> Iterator[tuple[str, str | None]]:
    """What follows a number that is logged."""
    for callback in trainer.callbacks:
        yield type(callback).__name__, getattr(callback, "monitor", None)
    for config in trainer.lr_scheduler_configs:
        yield type(config.scheduler).__name__, config.monitor if config.reduce_on_plateau else None

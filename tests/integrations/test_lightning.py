"""Does a LightningModule, as it is, train privately under the callback, and is nothing shown that was not paid for?"""

import copy
import logging
import os
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_toy
from loops import BATCH, BOUND, LOSS, LR, flat, moved, oracle
from vestige import PrivacyEngine
from vestige.accounting.ledger import read

pl = pytest.importorskip("lightning.pytorch")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")

from vestige.integrations.lightning import Private  # noqa: E402

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    "accelerator": "cpu", "num_sanity_val_steps": 0,
}  # fmt: skip


class Toy(pl.LightningModule):
    """An ordinary LightningModule that knows nothing of privacy."""

    def __init__(self, calls="self", logs=()):
        super().__init__()
        self.net, self.criterion = make_toy()[0], nn.CrossEntropyLoss()
        self.calls, self.logs = calls, logs
        self.steps = []

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        self.steps.clear()  # one was tried out

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.steps.append((copy.deepcopy(self.net.state_dict()), x, y))
        loss = self.criterion(self(x) if self.calls == "self" else self.net(x), y)
        for name in self.logs:
            self.log(name, loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.criterion(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


def loader(**options):
    return DataLoader(TensorDataset(*make_toy()[1]), batch_size=BATCH, **options)


def fitted(model, callback, *, ckpt_path=None, data=None, **options):
    trainer = pl.Trainer(
        **{**QUIET, "max_epochs": 2, **options, "callbacks": [callback, *options.get("callbacks", [])]}
    )
    trainer.fit(model, data or loader(), loader(), ckpt_path=ckpt_path)
    return trainer


def noiseless(**options):
    return Private(target_delta=1e-3, noise_multiplier=1e-9, max_grad_norm=BOUND, reproducible=3, **options)


@pytest.mark.parametrize("calls", ["self", "net"])
def test_each_step_is_the_clipped_sum_of_its_examples(calls):
    model, callback = Toy(calls), noiseless()
    before = flat(model)
    fitted(model, callback)
    states = [state for state, _, _ in model.steps] + [model.net.state_dict()]
    assert torch.equal(before, torch.cat([p.ravel() for p in states[0].values()]))
    net = make_toy()[0]
    for (_, x, y), now, then in zip(model.steps, states[:-1], states[1:], strict=True):
        net.load_state_dict(now)
        expected = oracle(net, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
        made = moved(*(torch.cat([p.ravel() for p in each.values()]) for each in (now, then)))
        np.testing.assert_allclose(made, expected, rtol=1e-3, atol=3e-5)
    assert len(model.steps) == 2 * 5
    assert callback.engine.asked == len(model.steps)


class Leaking(Toy):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.leak == "inputs":
            return self.criterion(self((x - x.mean(0)) / x.std(0)), y)
        counts = torch.nn.functional.one_hot(y, 3).float().sum(0) + 1
        return torch.nn.functional.cross_entropy(self(x), y, weight=1 / counts)


@pytest.mark.parametrize(("leak", "operator"), [("inputs", "mean"), ("class weights", "sum")])
def test_a_training_step_that_mixes_examples_is_refused_at_its_line(leak, operator):
    model = Leaking(leak)
    before = flat(model)
    with pytest.raises(ValueError, match=rf"{operator} at \S*test_lightning.py:\d+ is a reduction"):
        fitted(model, noiseless())
    assert torch.equal(flat(model), before)


def test_the_same_epsilon_and_assumptions_as_a_plain_loop():
    callback = Private(target_delta=1e-3, target_epsilon=3.0, max_grad_norm=BOUND)
    trainer = fitted(Toy(), callback)
    model, plain = make_toy()[0], PrivacyEngine()
    model, optimizer, data = plain.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), data_loader=loader(), target_epsilon=3.0,
        target_delta=1e-3, epochs=2, max_grad_norm=BOUND,
    )  # fmt: skip
    for _ in range(2):
        for x, y in data:
            LOSS(model(x), y).backward()
            optimizer.step()
    assert callback.guarantee() == plain.guarantee(1e-3)
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(plain.get_epsilon(1e-3))


def test_parts_of_a_draw():
    model, callback = Toy(), noiseless(max_physical_batch_size=4)
    fitted(model, callback)
    whole = Toy()
    fitted(whole, noiseless())
    assert max(len(x) for _, x, _ in model.steps) == 4
    assert callback.engine.asked == 10
    torch.testing.assert_close(flat(model), flat(whole), rtol=1e-4, atol=1e-6)


def test_max_steps_and_a_module_with_its_own_data():
    class Own(Toy):
        def train_dataloader(self):
            return loader(shuffle=True)

        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 7  # asks for the loader before it is private
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    callback = Private(target_delta=1e-3, target_epsilon=3.0)
    trainer = pl.Trainer(**QUIET, max_steps=7, callbacks=[callback])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*optimizer.step\(\).*")
        trainer.fit(Own())
    assert callback.engine.asked == 7
    assert callback.guarantee().epsilon < 3.0


# --- what is shown ----------------------------------------------------------------------------------------------------


class Kept(pl.loggers.logger.Logger):
    """A logger that keeps what it is given."""

    name, version = "kept", "0"

    def __init__(self):
        super().__init__()
        self.seen = {}

    def log_metrics(self, metrics, step=None):
        self.seen |= metrics

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_what_is_logged_in_training_is_kept_back():
    class Spy(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.log("from_a_callback", outputs["loss"])

    logger = Kept()
    with pytest.warns(UserWarning, match="'train_loss', logged in training_step"):
        trainer = fitted(
            Toy(logs=["train_loss"]), Private(target_delta=1e-3, noise_multiplier=2.0),
            logger=logger, log_every_n_steps=1, callbacks=[Spy()],
        )  # fmt: skip
    assert {"epsilon", "val_loss"} <= logger.seen.keys()
    for shown in (logger.seen, trainer.callback_metrics, trainer.progress_bar_metrics, trainer.logged_metrics):
        assert not {"train_loss", "from_a_callback"} & shown.keys()


def test_logging_it_all_the_same_costs_the_guarantee():
    callback = Private(target_delta=1e-3, noise_multiplier=2.0, log_nonprivate=True)
    trainer = fitted(Toy(logs=["train_loss"]), callback)
    assert "train_loss" in trainer.callback_metrics
    assert "epsilon" not in trainer.callback_metrics
    assert callback.guarantee().epsilon is None
    assert "without noise" in callback.guarantee().reasons[0]


@pytest.mark.parametrize("monitor", ["train_loss", "train_loss_epoch"])
def test_no_checkpoint_is_chosen_by_training_examples(monitor, tmp_path):
    chooser = pl.callbacks.ModelCheckpoint(tmp_path, monitor=monitor)
    with pytest.raises(ValueError, match=r"ModelCheckpoint\(monitor='train_loss"):
        fitted(
            Toy(logs=["train_loss"]),
            Private(target_delta=1e-3, noise_multiplier=2.0),
            callbacks=[chooser],
            enable_checkpointing=True,
        )


def test_a_checkpoint_chosen_by_validation(tmp_path):
    chooser = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss")
    fitted(Toy(), Private(target_delta=1e-3, noise_multiplier=2.0), callbacks=[chooser], enable_checkpointing=True)
    assert chooser.best_model_path
    again = Toy.load_from_checkpoint(chooser.best_model_path)  # an ordinary model
    again.train()(torch.zeros(3, 5)).sum().backward()


@pytest.mark.parametrize("several", [False, True])
def test_training_data_are_not_validated_on(several):
    private = loader()
    part = DataLoader(torch.utils.data.Subset(private.dataset, [3, 5]), batch_size=2)
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [Private(target_delta=1e-3, noise_multiplier=2.0)]})
    with pytest.raises(ValueError, match="val_dataloaders is the training data, or holds rows of them"):
        trainer.fit(Toy(), private, [loader(), part] if several else part)


def test_they_are_where_no_epsilon_is_asked_for():
    private = loader()
    callback = Private(target_delta=1e-3, noise_multiplier=2.0, log_nonprivate=True)
    pl.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [callback]}).fit(Toy(), private, private)
    assert callback.guarantee().epsilon is None


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_run_that_is_continued_stays_charged(tmp_path):
    ledger, kept = tmp_path / "ledger.jsonl", tmp_path / "first.ckpt"
    options = {"delta": 1e-3, "target_epsilon": 3.0, "method": "fo-dp-sgd", "ledger": ledger}

    class Fails(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(kept)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, 2):
                raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fitted(Toy(), Private(**options), callbacks=[Fails()], max_epochs=3)
    assert sum(read(ledger).asks.values()) == 5 + 3
    callback, model = Private(**options), Toy()
    trainer = fitted(model, callback, ckpt_path=kept, max_epochs=3)
    assert callback.engine._steps.step_number == 15 - 3  # three were done twice, and are paid for twice
    assert sum(read(ledger).asks.values()) == callback.engine.asked == 15
    assert callback.guarantee().epsilon <= 3.0
    assert trainer.should_stop


def test_continuing_without_a_ledger_is_refused(tmp_path):
    trainer = fitted(Toy(), Private(target_delta=1e-3, noise_multiplier=2.0))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"Private\(ledger=FILE\)"):
        fitted(Toy(), Private(target_delta=1e-3, noise_multiplier=2.0), ckpt_path=tmp_path / "a.ckpt", max_epochs=3)


def test_a_spent_budget_is_not_exceeded(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    options = {"delta": 1e-3, "target_epsilon": 3.0, "ledger": ledger}
    trainer = fitted(Toy(), Private(**options))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = pl.Trainer(**QUIET, max_epochs=2, max_steps=50, callbacks=[Private(**options)])
    again.fit(Toy(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert sum(read(ledger).asks.values()) == 10


# --- what is refused --------------------------------------------------------------------------------------------------


class Manual(Toy):
    automatic_optimization = False


class Iterates(Toy):
    def training_step(self, dataloader_iter):
        return None


class Normed(Toy):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


class Pieces(Toy):
    def training_step(self, batch, batch_idx):
        return LOSS(self.net[2](self.net[1](self.net[0](batch[0]))), batch[1])


REFUSED = {
    "gradient_clip_val": (Toy, {"gradient_clip_val": 1.0}, r"gradient_clip_val=1.0.*max_grad_norm"),
    "accumulation": (Toy, {"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2.*max_physical_batch_size"),
    "accumulation later": (
        Toy,
        {"callbacks": lambda: [pl.callbacks.GradientAccumulationScheduler({1: 2})]},  # kept, it would keep its trainer
        "accumulate_grad_batches=2",
    ),
    "float16": (Toy, {"precision": "16-true"}, "bf16-mixed"),
    "overfitting": (Toy, {"overfit_batches": 2}, "overfit_batches"),
    "manual": (Manual, {}, "automatic_optimization=False"),
    "an iterator": (Iterates, {}, "dataloader_iter"),
    "mixes examples": (Normed, {}, "BatchNorm"),
    "called in pieces": (Pieces, {}, "did not come through a call of the private model"),
    "strategy": (Toy, {"strategy": "ddp", "devices": 1}, "not by DDPStrategy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # strategies leave their marks there
    made, options, words = REFUSED[name]
    options = {key: value() if callable(value) else value for key, value in options.items()}
    try:
        with pytest.raises(ValueError, match=words) as caught:
            fitted(made(), noiseless(), **options)
        assert "\n" not in str(caught.value)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_refused_without_a_trainer():
    with pytest.raises(ValueError, match="one of target_epsilon=3"):
        Private(target_delta=1e-3)
    with pytest.raises(ValueError, match=r"trainer\.fit"):
        Private(target_delta=1e-3, target_epsilon=3.0).guarantee()
    with pytest.raises(ValueError, match="max_epochs=-1"):
        fitted(Toy(), Private(target_delta=1e-3, target_epsilon=3.0), max_epochs=-1)


def test_the_callback_is_for_one_fit():
    model, callback = Toy(), Private(target_delta=1e-3, target_epsilon=3.0)
    trainer = fitted(model, callback)
    with pytest.raises(ValueError, match="has trained a model already"):
        trainer.fit(model, loader())


def test_bfloat16():
    model, callback = Toy(), noiseless()
    fitted(model, callback, precision="bf16-mixed", max_epochs=1)
    exact = Toy()
    fitted(exact, noiseless(), max_epochs=1)
    difference = (flat(model) - flat(exact)).abs().max()
    assert 1e-6 < difference < 0.02


def test_the_older_name():
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.LightningModule):
        forward, training_step, configure_optimizers = Toy.forward, Toy.training_step, Toy.configure_optimizers

        def __init__(self):
            older.LightningModule.__init__(self)
            self.net, self.criterion, self.steps = make_toy()[0], nn.CrossEntropyLoss(), []
            self.calls, self.logs = "self", ["loss"]

    callback = noiseless()
    trainer = older.Trainer(**QUIET, max_epochs=2, callbacks=[callback])
    trainer.fit(Older(), loader())
    assert callback.engine.asked == 10
    assert "loss" not in trainer.callback_metrics


def test_blanking_a_user_moves_a_step_by_the_bound():
    """A user's rows are one clipped vector of the callback's step."""
    inputs, targets = make_toy()[1]
    owners, states = np.repeat(np.arange(20), 3), []
    for user in (None, 4):
        large = 30 * inputs  # every gradient is clipped
        large[torch.from_numpy(owners == user)] = torch.nan  # these have none
        model, data = Toy(), DataLoader(TensorDataset(large, targets), batch_size=50)
        fitted(model, noiseless(users=owners, sample="users"), data=data, max_steps=1)
        states.append(flat(model).double())
    assert int(model.steps[0][1].isnan().any(dim=1).sum()) == 3, "the user was drawn"
    assert float((states[0] - states[1]).norm()) / LR * (50 / 60 * 20) == pytest.approx(BOUND, rel=1e-3)

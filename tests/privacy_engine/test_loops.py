"""Does a user's own loop get the same private step, and survive what loops really do?"""

import copy
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vestige
from conftest import make_toy
from loops import LOSS, flat, moved, oracle, private, same_step
from vestige import BudgetSpent, PrivacyEngine, accounting
from vestige.accounting.ledger import LedgerError
from vestige.files import sha256
from vestige.optim.optimizers.micro_adam import MicroAdam
from vestige.optim.optimizers.muon import HybridMuon
from vestige.optim.rules import AdamBC
from vestige.priced_questions import SampledGaussian
from vestige.processes.sums import Sums
from vestige.training.doctor import examine
from vestige.training.verify import verify


def engine_of(
    model=None, data=None, *, batch_size=12, reproducible=None, optimizer=torch.optim.SGD, lr=0.1, workers=0, ledger=None,
    resume=False, nonprivate_outputs=False, **options,
):  # fmt: skip
    toy, toy_data = make_toy()
    model, data = model or toy, data or toy_data
    books = {"ledger": ledger, "resume": resume, "nonprivate_outputs": nonprivate_outputs}
    engine = PrivacyEngine(reproducible=reproducible, **books)
    loader = DataLoader(TensorDataset(*data), batch_size=batch_size, shuffle=True, num_workers=workers)
    common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    return engine, *engine.make_private(
        module=model, optimizer=optimizer(model.parameters(), lr=lr), data_loader=loader, **common
    )


def epoch(model, optimizer, loader, loss=LOSS):
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "method", ["dp-sgd", "fo-dp-sgd", "post-fm", "uniform-memory", "exponential-memory", "sma-dp-sgd"]
)
@pytest.mark.everyday("-dp-sgd")
def test_the_loop_equals_vestige_train(method):
    alone, data = make_toy()
    options = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 10, "lr": 0.1, "reproducible": 5}
    list(vestige.train(alone, LOSS, data, method=method, **options))
    _, model, optimizer, loader = engine_of(reproducible=5, method=method)
    for _ in range(2):
        epoch(model, optimizer, loader)
    torch.testing.assert_close(flat(model), flat(alone), rtol=1e-4, atol=1e-5)


MEANT = {
    "dp-adam": torch.optim.Adam,
    "dp-adamw": torch.optim.AdamW,
    "dp-adambc": AdamBC,
    "dp-micro-adam": MicroAdam,
    "dp-muon": HybridMuon,
}


@pytest.mark.parametrize("method", MEANT)
@pytest.mark.everyday("-dp-adam", "-dp-adambc")
def test_a_method_with_a_rule_of_its_own_takes_the_optimizer_that_it_means(method):
    """Its moves are then those of vestige.train; any other optimizer would take its place without a word."""
    others = {torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam} - {MEANT[method]}
    for other in others:
        with pytest.raises(ValueError, match=f"method='{method}' moves by .*{other.__name__}, which would.*'dp-sgd'"):
            engine_of(method=method, optimizer=other)
    own = type("Own", (MEANT[method],), {})
    alone, data = make_toy()
    options = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 5, "lr": 0.1, "reproducible": 5}
    list(vestige.train(alone, LOSS, data, method=vestige.make_method(method), **options))
    decay = (
        {"weight_decay": vestige.make_method(method).rule.options.get("weight_decay", 0)}
        if method == "dp-adamw"
        else {}
    )
    for kind in (MEANT[method], own):
        _, model, optimizer, loader = engine_of(reproducible=5, method=method, optimizer=partial(kind, **decay))
        epoch(model, optimizer, loader)
        torch.testing.assert_close(flat(model), flat(alone), rtol=1e-4, atol=1e-5)


def test_options_of_a_method_are_not_dropped():
    with pytest.raises(ValueError, match="method='fo-dp-sgd' has momentum=0.9, and optimizer has 0"):
        engine_of(method=vestige.make_method("fo-dp-sgd", momentum=0.9))
    with pytest.raises(ValueError, match="method='dp-sgd' moves by SGD, and optimizer is Adam"):
        engine_of(method=vestige.make_method("dp-sgd", momentum=0.9), optimizer=torch.optim.Adam)
    engine_of(method=vestige.make_method("fo-dp-sgd", momentum=0.9), optimizer=partial(torch.optim.SGD, momentum=0.9))
    engine_of(method="fo-dp-sgd", optimizer=partial(torch.optim.SGD, momentum=0.9))
    engine_of(method="fo-dp-sgd", optimizer=torch.optim.RMSprop)
    engine_of(method="dp-adamw", optimizer=partial(torch.optim.AdamW, betas=(0.8, 0.9)))
    with pytest.raises(ValueError, match="has weight_decay=0.3, and optimizer has 0.01"):
        engine_of(method=vestige.make_method("dp-adamw", weight_decay=0.3), optimizer=torch.optim.AdamW)


@pytest.mark.parametrize("physical", [1, 2, 5])
@pytest.mark.parametrize("taken", ["one by one", "all at once"])
@pytest.mark.everyday("-one by one-1", "-one by one-5")
def test_physical_parts_change_nothing(physical, taken):
    _, whole, *rest = engine_of(reproducible=3)
    epoch(whole, *rest)
    engine, split, optimizer, loader = engine_of(reproducible=3, max_physical_batch_size=physical)
    epoch(split, optimizer, loader if taken == "one by one" else list(loader))
    torch.testing.assert_close(flat(split), flat(whole), rtol=1e-4, atol=1e-6)
    assert sum(n for _, _, n in engine.history) == 5


@pytest.mark.parametrize("method", ["dp-sgd", "dp-sat"])
def test_closures_run_for_every_part(method):
    ends = []
    for physical in (None, 3):
        engine, model, optimizer, loader = engine_of(reproducible=3, method=method, max_physical_batch_size=physical)
        values = []
        for x, y in loader:

            def closure(model=model, x=x, y=y):
                loss = LOSS(model(x), y)
                loss.backward()
                return loss

            values.append(optimizer.step(closure))
        assert all(value is not None for value in values)
        assert sum(n for _, _, n in engine.history) == 5
        ends.append(flat(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-6)


def test_sum_reduction_is_the_same_loss():
    _, mean, *rest = engine_of(reproducible=3)
    epoch(mean, *rest)
    _, total, *rest = engine_of(reproducible=3, loss_reduction="sum")
    epoch(total, *rest, loss=nn.CrossEntropyLoss(reduction="sum"))
    torch.testing.assert_close(flat(total), flat(mean), rtol=1e-4, atol=1e-6)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)

    def forward(self, x, *, scale=1.0):
        return self.body(x) * scale

    def greet(self):
        return "hello"


def test_the_model_keeps_its_class_keys_and_methods():
    model = Named()
    keys, cls = list(model.state_dict()), type(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(*make_toy()[1]), batch_size=6)
    same, same_optimizer, private_loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    assert (same, same_optimizer) == (model, optimizer)
    assert type(same) is cls
    assert list(same.state_dict()) == keys
    assert same.greet() == "hello"
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (1.0, 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, len(private_loader), gamma=0.5)
    for x, y in private_loader:
        LOSS(model(x, scale=2.0), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert model.eval()(torch.zeros(1, 5)).shape == (1, 3)
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_a_private_model_is_saved_whole_copied_and_loaded(tmp_path):
    _, model, optimizer, loader = engine_of(Named())
    epoch(model, optimizer, loader)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x, y = make_toy()[1]
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    loaded.train().zero_grad()
    LOSS(loaded(x), y).backward()  # an ordinary model, with ordinary gradients
    assert loaded.body.weight.grad is not None
    assert pickle.loads(pickle.dumps(model.state_dict()))
    twin = copy.deepcopy(model)
    twin.zero_grad()
    assert torch.equal(twin.eval()(x), model.eval()(x))
    with pytest.raises(ValueError, match="copy of a private model"):
        twin.train()(x)


def test_the_rate_is_exact_and_the_price_is_that_of_the_steps():
    engine, model, optimizer, loader = engine_of(batch_size=7)
    epoch(model, optimizer, loader)
    assert len(loader) == 9
    assert engine.history == [(1.0, 7 / 60, 9)]
    assert engine.get_epsilon(1e-5) == accounting.epsilon({SampledGaussian(7 / 60, 1.0): 9}, 1e-5)


def test_a_target_epsilon_is_met_and_the_step_beyond_it_refused_in_words():
    model, data = make_toy()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(TensorDataset(*data), batch_size=12),
        target_epsilon=3.0, target_delta=1e-5, epochs=2, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(2):
        epoch(model, optimizer, loader)
    assert 2.99 < engine.get_epsilon(1e-5) <= 3.0
    after = flat(model)
    with pytest.raises(BudgetSpent, match="the budget is spent: 10 questions were asked.*stop training"):
        epoch(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) <= 3.0
    assert torch.equal(flat(model), after)


def test_a_step_is_written_to_the_ledger_before_its_noise_is_drawn(tmp_path, monkeypatch):
    path, drawn, honest = tmp_path / "ledger.jsonl", [], Sums.noised

    def noised(*args, **options):
        drawn.append(path.read_bytes().count(b'"row": "ask"'))
        return honest(*args, **options)

    monkeypatch.setattr(Sums, "noised", noised)
    _, model, optimizer, loader = engine_of(ledger=path)
    epoch(model, optimizer, loader)
    assert drawn == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.everyday("-0")
def test_leaving_the_loop_between_parts_forgets_the_unfinished_draw(workers):
    engine, model, optimizer, loader = engine_of(max_physical_batch_size=2, workers=workers)
    passes = engine._steps.passes
    for x, y in loader:
        LOSS(model(x), y).backward()
        optimizer.step()
        if passes.total is not None:
            break
    assert passes.total is not None
    charged, left = sum(n for _, _, n in engine.history), passes._closed
    seen = []
    honest = passes.taken
    passes.taken = lambda: seen.append(passes._closed) or honest()
    epoch(model, optimizer, loader)
    assert sum(n for _, _, n in engine.history) == charged + 5
    assert left not in seen
    assert len(set(seen)) == 5


class Attending(nn.Module):
    """Cannot be called with no rows at all."""

    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(5, 1, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        x = x[:, None].reshape(len(x), -1, 5)
        return self.head(self.attend(x, x, x, need_weights=False)[0].mean(1).view(len(x), -1))


def test_an_empty_draw_moves_by_noise_and_is_charged():
    data = (torch.randn(40, 5), torch.randint(3, (40,)))
    engine, model, optimizer, loader = engine_of(Attending(), data, batch_size=1)
    empty = 0
    for x, y in loader:
        part = engine._steps.passes.parts.waiting()[0]
        before = flat(model)
        assert len(x) == part.rows
        LOSS(model(x), y).backward()
        optimizer.step()
        assert not torch.equal(flat(model), before)
        assert flat(model).isfinite().all()
        empty += part.size == 0
    assert empty > 3
    assert sum(n for _, _, n in engine.history) == 40


class FetchedTogether(Dataset):
    """Rows that come as one batch already; of none of them, tensors of no rows."""

    def __init__(self, kind: type) -> None:
        self.x, self.y, self.kind = torch.randn(40, 5), torch.randint(3, (40,)), kind

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int):
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]):
        found = self.x[rows], self.y[rows]
        return found if self.kind is tuple else dict(zip("xy", found, strict=True))


@pytest.mark.parametrize("kind", [tuple, dict])
def test_an_empty_draw_of_rows_that_are_fetched_together(kind):
    data = FetchedTogether(kind)
    model = make_toy()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=1, collate_fn=lambda rows: rows)
    private_engine = PrivacyEngine()
    _, _, loader = private_engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    empty = 0
    for batch in loader:
        part = private_engine._steps.passes.parts.waiting()[0]
        x, y = batch if kind is tuple else batch.values()
        assert len(x) == part.rows
        empty += part.size == 0
        LOSS(model(x), y).backward()
        optimizer.step()
    assert empty > 3


def test_an_empty_draw_adds_nothing_to_the_sum():
    data = (torch.randn(40, 5), torch.randint(3, (40,)))
    steps, model, optimizer, loader = private(make_toy()[0], data, batch=1)
    for x, y in loader:
        before, part = flat(model), steps.passes.parts.waiting()[0]
        LOSS(model(x), y).backward()
        optimizer.step()
        assert (float((flat(model) - before).norm()) < 1e-6) == (part.size == 0)


def test_two_losses_of_one_batch_add_up_before_they_are_clipped():
    """Each example once: the price is that of one loss."""
    for backwards in ("together", "apart", "two passes"):
        steps, model, optimizer, loader = private(make_toy()[0])
        x, y = next(iter(loader))
        both = lambda m, x, y: LOSS(m(x), y) + m(x).square().sum(1).mean()
        before, expected = flat(model), oracle(model, both, list(zip(x, y, strict=True)))
        outputs = model(x)
        if backwards == "together":
            (LOSS(outputs, y) + outputs.square().sum(1).mean()).backward()
        elif backwards == "apart":
            LOSS(outputs, y).backward(retain_graph=True)
            outputs.square().sum(1).mean().backward()
        else:
            LOSS(outputs, y).backward()
            model(x).square().sum(1).mean().backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
        assert steps.ledger.spent == {steps.planned: 1}


def test_several_steps_on_a_batch_are_priced_as_answers_on_one_sample():
    engine, model, optimizer, loader = engine_of(steps_per_batch=4)
    for x, y in loader:
        for _ in range(4):
            LOSS(model(x), y).backward()
            optimizer.step()
        with pytest.raises(ValueError, match="no batch of the private loader|handed out"):
            LOSS(model(x), y).backward()
    assert engine.history == [(0.5, 0.2, 5)]
    want = accounting.epsilon({SampledGaussian(0.2, 0.5): 5}, 1e-5)
    assert engine.get_epsilon(1e-5) == pytest.approx(want, rel=1e-9)


def test_zero_grad_between_backward_and_step_discards():
    for zero in ("optimizer", "model"):
        _, model, optimizer, loader = private(make_toy()[0])
        for x, y in loader:
            (2 * LOSS(model(x), y)).backward()
            (optimizer if zero == "optimizer" else model).zero_grad()
            same_step(model, optimizer, x, y)


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_zero_grad_clears_what_did_not_come_through_the_model(zero):
    _, model, optimizer, loader = private(make_toy()[0])
    x, y = next(iter(loader))
    next(model.parameters()).square().sum().backward()
    assert next(model.parameters()).grad is not None
    (optimizer if zero == "optimizer" else model).zero_grad()
    assert all(p.grad is None for p in model.parameters())
    same_step(model, optimizer, x, y)


def test_an_optimizers_own_zero_grad_is_called():
    class Counting(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none=True):
            self.cleared += 1
            super().zero_grad(set_to_none)

    model, data = make_toy()
    optimizer = Counting(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data), batch_size=12)
    PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    optimizer.zero_grad()
    assert optimizer.cleared == 1


def test_a_frozen_norm_that_is_trained_again_later_is_refused():
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[1].eval().requires_grad_(False)
    _, model, _, loader = engine_of(model)
    x, _ = next(iter(loader))
    model(x)
    model[1].train()
    with pytest.raises(ValueError, match="mixes the examples"):
        model(x)


def test_zero_grad_keeps_the_parts_that_a_step_has_closed():
    _, whole, *rest = engine_of(reproducible=3)
    epoch(whole, *rest)
    _, split, optimizer, loader = engine_of(reproducible=3, max_physical_batch_size=3)
    epoch(split, optimizer, loader)  # which calls zero_grad before every part
    torch.testing.assert_close(flat(split), flat(whole), rtol=1e-4, atol=1e-6)


def test_a_batch_must_not_be_left_out():
    """Whether it is could depend on what is in it: nothing is charged for it, and the number of steps would tell."""
    _, model, optimizer, loader = engine_of()
    skipped = 0
    with pytest.raises(ValueError, match="in order and leaving none out"):
        for x, y in loader:
            if skipped != len(x) and not skipped:
                skipped = len(x)
                continue
            LOSS(model(x), y).backward()
            optimizer.step()
    assert skipped


def test_batches_may_be_looked_at():
    engine, model, optimizer, loader = engine_of()
    for x, y in loader:
        model(x)
        with torch.no_grad():
            model(3 * x)
        model.eval()
        model(torch.randn(4, 5))
        model.train()
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    assert sum(n for _, _, n in engine.history) == 5


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y, c: c((o := m(x)) / o.detach().abs().max(), y),
        lambda m, x, y, c: c((o := m(x)) - o.mean(0), y),
        lambda m, x, y, c: LOSS((o := m(x)) - o.mean(0), y),
        lambda m, x, y, c: LOSS(m(x), y, reduction="none").topk(2)[0].mean(),
    ],
)
def test_a_loss_that_mixes_rows_is_refused(loss):
    engine, model, _, loader = engine_of()
    criterion = engine.criterion(nn.CrossEntropyLoss())
    for x, y in loader:
        with pytest.raises(ValueError, match=r"at .*test_loops.py:\d+ (mixes examples|is a reduction)"):
            loss(model, x, y, criterion).backward()
        break
    assert not engine.history


@pytest.mark.parametrize("own", [False, True])
def test_of_a_loss_of_each_row_nothing_is_assumed(own):
    engine, model, optimizer, loader = engine_of()
    criterion = engine.criterion(nn.CrossEntropyLoss()) if own else LOSS
    epoch(model, optimizer, loader, criterion)
    assert engine.guarantee(1e-5).assumption("loss_per_example").status == "checked"


def test_a_criterion_that_looks_at_the_batch_is_refused():
    engine, model, _, loader = engine_of()
    batch = {}
    criterion = engine.criterion(lambda out, y: LOSS(out * batch["x"].abs().max(), y))
    for x, y in loader:
        batch["x"] = x
        with pytest.raises(ValueError, match=r"max at .*test_loops.py:\d+"):
            criterion(model(x), y).backward()
        break


def test_without_poisson_sampling_there_is_no_epsilon():
    engine, model, optimizer, loader = engine_of(poisson_sampling=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(model, optimizer, loader)
    with pytest.raises(ValueError, match="no epsilon holds"):
        engine.get_epsilon(1e-5)
    assumed = {each.name for each in engine.guarantee(1e-5).assumptions if each.status == "assumed"}
    assert {"loss_per_example", "divisor"} <= assumed  # targets that are reordered before the model are not seen


def test_predictable_noise_has_no_epsilon():
    engine, model, optimizer, loader = engine_of(reproducible=1)
    epoch(model, optimizer, loader)
    with pytest.raises(ValueError, match="no epsilon holds"):
        engine.get_epsilon(1e-5)


def test_the_doctor_is_content_with_the_private_loader():
    _, model, _, loader = engine_of()
    assert not [f for f in examine(model, LOSS, loader) if f.where == "loader"]


def test_going_back_to_a_checkpoint_forgets_no_question(tmp_path):
    engine, model, optimizer, loader = engine_of(method="fo-dp-sgd", ledger=tmp_path / "l.jsonl")
    epoch(model, optimizer, loader)
    saved = flat(model)
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    epoch(model, optimizer, loader)
    spent = engine.get_epsilon(1e-5)
    engine.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    assert torch.equal(flat(model), saved)
    assert engine.get_epsilon(1e-5) == spent
    epoch(model, optimizer, loader)
    assert sum(n for _, _, n in engine.history) == 15
    engine.close()
    again, other, other_optimizer, other_loader = engine_of(
        method="fo-dp-sgd", ledger=tmp_path / "l.jsonl", resume=True
    )
    assert again.history == engine.history
    again.load_checkpoint(path=tmp_path / "c.pt", module=other, optimizer=other_optimizer)
    assert torch.equal(flat(other), saved)
    epoch(other, other_optimizer, other_loader)
    assert sum(n for _, _, n in again.history) == 20


def test_a_reproducible_loop_goes_on_as_if_it_had_not_stopped(tmp_path):
    """In a new process, and in the same one; some draws of the loader were never used. A secret loop goes on with
    samples of its own."""
    books = {"reproducible": 3, "method": "fo-dp-sgd"}
    sizes, ends = [], []

    def steps(model, optimizer, loader, count):
        for _, (x, y) in zip(range(count), loader, strict=False):
            sizes[-1].append(float(x.sum()))
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()
        ends.append(flat(model))

    engine, *straight = engine_of(**books, ledger=tmp_path / "a")
    for count in (3, 2, 4):
        sizes.append([])
        next(iter(straight[2]))  # a draw that no step is about
        steps(*straight, count)
        if count == 2:
            engine.save_checkpoint(path=tmp_path / "c", module=straight[0], optimizer=straight[1])
    sizes.append([])
    engine.load_checkpoint(path=tmp_path / "c", module=straight[0], optimizer=straight[1])
    next(iter(straight[2]))
    steps(*straight, 4)
    assert engine.asked == 13
    sizes.append([])
    for _ in range(2):  # the same draw again is one more question
        engine.load_checkpoint(path=tmp_path / "c", module=straight[0], optimizer=straight[1])
        steps(*straight, 1)
    assert sizes[-1][0] == sizes[-1][1]
    assert engine.asked == 15
    engine.close()
    sizes.append([])
    engine, *again = engine_of(**books, ledger=tmp_path / "a", resume=True)
    engine.load_checkpoint(path=tmp_path / "c", module=again[0], optimizer=again[1])
    next(iter(again[2]))
    steps(*again, 4)
    assert engine.asked == 19
    assert sizes[2] == sizes[3] == sizes[5]
    assert torch.equal(ends[3], ends[2])
    assert torch.equal(ends[-1], ends[2])
    engine, *secret = engine_of(method="dp-sgd")
    for count in (3, 3):
        sizes.append([])
        steps(*secret, count)
        engine.load_state_dict({**engine.state_dict(), "next": 0})
    assert set(sizes[-1]).isdisjoint(sizes[-2])


def test_a_module_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Linear(5, 3)
    with pytest.raises(ValueError, match="'weight' is on the meta device.*to_empty"):
        engine_of(model)


def test_a_checkpoint_of_another_process_needs_its_ledger(tmp_path):
    engine, model, optimizer, loader = engine_of()
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    other, model, optimizer, loader = engine_of()
    with pytest.raises(ValueError, match="known to its ledger alone"):
        other.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="resume: sample_rate"):
        first, *_ = engine_of(ledger=tmp_path / "l.jsonl")
        first.close()
        engine_of(ledger=tmp_path / "l.jsonl", resume=True, batch_size=6)


def test_a_checkpoint_of_another_ledger_is_refused(tmp_path):
    """What was asked after it was saved is in the ledger that it was trained on alone."""
    for ledger in ("one", "other"):
        engine, model, optimizer, loader = engine_of(ledger=tmp_path / f"{ledger}.jsonl")
        x, y = next(iter(loader))
        LOSS(model(x), y).backward()
        optimizer.step()
        if ledger == "one":
            engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
            engine.close()
    with pytest.raises(LedgerError, match=r"other.jsonl does not contain what the checkpoint was trained on"):
        engine.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)


def test_an_engine_is_for_one_model():
    """Steps of both would be charged as those of one."""
    engine, model, optimizer, loader = engine_of()
    other = make_toy()[0]
    with pytest.raises(ValueError, match="make_private was called before: use a new PrivacyEngine"):
        engine.make_private(
            module=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*make_toy()[1]), batch_size=12), noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip


def test_dictionaries_and_keyword_arguments_reach_the_model():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(5, 3)

        def forward(self, features, mask=None):
            return {"logits": self.map(features["x"]) * mask}

    _, model, optimizer, loader = private(Both())
    for x, y in loader:
        same_step(model, optimizer, x, y, lambda m, x, y: LOSS(m({"x": x}, mask=torch.ones(3).to(x))["logits"], y))


def test_a_mask_as_long_as_the_batch_is_no_example():
    """Square, with as many rows as there are examples: what has examples is tried out, not read off lengths."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.head = nn.Linear(1, 4), nn.Linear(4, 3)

        def forward(self, x, mask):
            h = self.map(x[..., None])
            scores = h @ h.transpose(1, 2) + mask
            return self.head((scores.softmax(-1) @ h).mean(1))

    torch.manual_seed(0)
    data = (torch.randn(40, 12), torch.randint(3, (40,)))
    _, model, optimizer, loader = private(Masked(), data)
    mask = torch.full((12, 12), -1e4).triu(1)
    sizes = []
    for x, y in (pair for _ in range(4) for pair in loader):
        same_step(model, optimizer, x, y, lambda m, x, y: LOSS(m(x, mask.to(x)), y))
        sizes.append(len(x))
    assert 12 in sizes


@pytest.mark.parametrize("together", [True, False])
def test_two_draws_of_one_size_are_two_draws(together):
    """However many rows they have: accumulating over them would be charged as one."""
    for seed in range(12):
        engine = PrivacyEngine(reproducible=seed)
        model, data = make_toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = DataLoader(TensorDataset(data[0][:16], data[1][:16]), batch_size=8)  # sizes meet often
        _, _, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
        (x, y), (u, v) = list(loader)
        with pytest.raises(ValueError, match="draws of the private loader|in order and leaving none out"):
            if together:
                (LOSS(model(x), y) + LOSS(model(u), v)).backward()
            else:
                LOSS(model(x), y).backward()
                LOSS(model(u), v).backward()
            optimizer.step()
        assert not engine.spent


def test_a_ledger_that_names_its_delta_is_verified_and_finished_as_often_as_it_is_saved(tmp_path):
    engine, *loop = engine_of(ledger=tmp_path / "ledger.jsonl", target_delta=1e-5)
    epoch(*loop)
    assert verify(tmp_path, unfinished=True).guarantee.epsilon == engine.get_epsilon(1e-5)
    for text in ("one", "another"):
        (tmp_path / "model.pt").write_text(text)
        engine.finish({"model.pt": sha256(tmp_path / "model.pt")})
        assert verify(tmp_path).asked == 5
    engine.load_state_dict(engine.state_dict())
    epoch(*loop)
    with pytest.raises(LedgerError, match="not finished"):
        verify(tmp_path)
    (tmp_path / "other").mkdir()
    engine_of(ledger=tmp_path / "other" / "ledger.jsonl")
    with pytest.raises(ValueError, match="names no delta"):
        verify(tmp_path / "other")


def test_a_budget_of_draws():
    engine, model = PrivacyEngine(), make_toy()[0]
    given = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "max_grad_norm": 1.0}
    given |= {"data_loader": DataLoader(TensorDataset(*make_toy()[1]), batch_size=12), "target_epsilon": 2.0}
    for wrong in ({}, {"epochs": 1, "draws": 5}):
        with pytest.raises(ValueError, match="give epochs, or draws"):
            engine.make_private_with_epsilon(**given, **wrong, target_delta=1e-3)
    model, optimizer, loader = engine.make_private_with_epsilon(**given, draws=3, target_delta=1e-3)
    for place, (x, y) in enumerate(loader):
        assert engine.may_step == (place < 3)
        if place == 3:
            break
        LOSS(model(x), y).backward()
        optimizer.step()
    assert 1.99 < engine.get_epsilon(1e-3) <= 2


def test_a_loop_that_prints_losses_says_so():
    engine, *loop = engine_of(nonprivate_outputs=True)
    epoch(*loop)
    assert engine.guarantee(1e-5).epsilon is None


def test_a_loss_divided_by_a_number_is_its_own():
    for divisor in (1, 2):
        engine, *loop = engine_of()
        epoch(*loop, loss=lambda outputs, targets, divisor=divisor: LOSS(outputs, targets) / divisor)
        assert engine.guarantee(1e-5).assumption("loss_per_example").status == "checked"


def test_batches_of_ones_own_may_have_one_row():
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.ones(3, 4), torch.tensor([0, 1, 0])), batch_size=1),
        poisson_sampling=False,
    )  # fmt: skip
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not torch.equal(model.weight, before)

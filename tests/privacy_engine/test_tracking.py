"""Is every gradient of a loop public, released, or that row's own? Loops that leak, and loops that do not."""

from __future__ import annotations

import copy
import gc
import linecache
import re
import threading
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_toy
from loops import LOSS, flat, moved, oracle, private, same_step_of
from vestige import PrivacyEngine


class Scaled(nn.Module):
    """A model with a second argument: a number, one number for all, or one for each row."""

    def __init__(self):
        super().__init__()
        self.map, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x, scale):
        return self.head(torch.tanh(self.map(x)) * scale)


def batch_norm():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))


# --- loops that leak: the line that is marked is the one that is named -------------------------------------------------


def class_weights(model, x, y):
    seen = F.one_hot(y, 3).float().sum(0)  # mixes
    F.cross_entropy(model(x), y, weight=len(y) / seen.clamp(min=1)).backward()


def class_weights_counted(model, x, y):
    seen = torch.bincount(y, minlength=3)  # mixes
    nn.CrossEntropyLoss(weight=len(y) / seen.clamp(min=1))(model(x), y).backward()


def balanced_bce(model, x, y):
    positive = (y == 0).float()
    share = positive.mean()  # mixes
    weight = torch.where(positive > 0, 1 / share, 1 / (1 - share))
    F.binary_cross_entropy_with_logits(model(x)[:, 0], positive, weight=weight).backward()


def standardised_targets(model, x, y):
    wanted = y.float() - y.float().mean()  # mixes
    F.mse_loss(model(x)[:, 0], wanted / y.float().std()).backward()


def targets_over_their_maximum(model, x, y):
    F.mse_loss(model(x)[:, 0], y / y.max()).backward()  # mixes


def centred_targets(model, x, y):
    with torch.no_grad():
        wanted = model(x)
        wanted = wanted - wanted.mean(0)  # mixes
    LOSS(model(x), wanted.softmax(-1)).backward()


def sinkhorn_targets(model, x, y):
    with torch.no_grad():
        assigned = model(x).exp()
        for _ in range(2):
            assigned = assigned / assigned.sum(0)  # mixes
            assigned = assigned / assigned.sum(1, keepdim=True)
    LOSS(model(x), assigned).backward()


def above_the_median(model, x, y):
    wanted = (x[:, 0] > x[:, 0].median()).float()  # mixes
    F.binary_cross_entropy_with_logits(model(x)[:, 0], wanted).backward()


def training_backbone(model, x, y):
    with torch.no_grad():
        features = batch_norm()(x)  # mixes
    LOSS(model(features), y).backward()


def training_teacher(model, x, y):
    with torch.no_grad():
        wanted = batch_norm()(x)[:, :3].softmax(-1)  # mixes
    F.kl_div(model(x).log_softmax(-1), wanted, reduction="batchmean").backward()


def standardised_inputs(model, x, y):
    LOSS(model((x - x.mean(0)) / x.std(0)), y).backward()  # mixes


def statistic_as_a_tensor(model, x, y):
    LOSS(model(x, x.abs().mean()), y).backward()  # mixes


def statistic_as_a_number(model, x, y):
    LOSS(model(x, 2 * x.abs().mean().item()), y).backward()  # mixes


def number_in_the_loss(model, x, y):
    loss = LOSS(model(x), y)
    (loss / loss.item()).backward()  # mixes


def divided_by_a_count(model, x, y):
    losses = LOSS(model(x), y, reduction="none")
    counted = y != 1
    ((losses * counted).sum() / max(1, round(1 + counted.sum().item()))).backward()  # mixes


def divided_by_the_loss(model, x, y):
    loss = LOSS(model(x), y)  # mixes
    loss.backward(1 / loss.detach())


def weighted_by_a_statistic(model, x, y):
    losses = LOSS(model(x), y, reduction="none")
    losses.backward(losses.detach() / losses.detach().sum())  # mixes


def normalising_hook(model, x, y):
    outputs = model(x)
    outputs.register_hook(lambda g: g / g.norm())  # mixes
    LOSS(outputs, y).backward()


def mixup(model, x, y):
    others = torch.randperm(len(x))
    soft = F.one_hot(y, 3).float()
    LOSS(model(0.7 * x + 0.3 * x[others]), 0.7 * soft + 0.3 * soft[others]).backward()  # mixes


def mixup_of_targets(model, x, y):
    soft = F.one_hot(y, 3).float()
    wanted = 0.7 * soft + 0.3 * soft.flip(0)  # mixes
    LOSS(model(x), wanted).backward()


def normalised_advantages(model, x, y):
    reward = x[:, 0]
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)  # mixes
    taken = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
    (-taken * advantage).mean().backward()


def contrastive(model, x, y):
    z = F.normalize(model(x), dim=-1)
    LOSS(z @ z.t() / 0.1, torch.arange(len(x))).backward()  # mixes


def supervised_contrastive(model, x, y):
    z = F.normalize(model(x), dim=-1)
    scores = (z @ z.t()).log_softmax(-1)  # mixes
    same = (y[:, None] == y[None, :]).float()  # mixes
    (-(same * scores).sum(1) / same.sum(1)).mean().backward()


def pairwise_ranking(model, x, y):
    score = model(x)[:, 0]
    F.softplus(score[:, None] - score[None, :]).mean().backward()  # mixes


def pearson(model, x, y):
    score = model(x)[:, 0]
    score = score - score.mean()  # mixes
    (-(score * x[:, 0]).sum() / (score.norm() * x[:, 0].norm())).backward()


def smallest_labels(model, x, y):
    order = y.sort()[1]  # mixes
    LOSS(model(x), y, reduction="none")[order[:2]].mean().backward()


def first_of_the_sorted(model, x, y):
    losses = LOSS(model(x), y, reduction="none")[y.sort()[1]]  # mixes
    losses[:2].mean().backward()


def weighted_by_rank(model, x, y):
    losses = LOSS(model(x), y, reduction="none")[y.sort()[1]]  # mixes
    (losses * torch.linspace(0, 1, len(y))).sum().backward()


LEAKS = {
    "smallest labels": (smallest_labels, "sort"),
    "first of the sorted": (first_of_the_sorted, "sort"),
    "weighted by rank": (weighted_by_rank, "sort"),
    "one_hot": (class_weights, "sum"),
    "bincount": (class_weights_counted, "bincount"),
    "balanced": (balanced_bce, "mean"),
    "standardised targets": (standardised_targets, "mean"),
    "maximum": (targets_over_their_maximum, "max"),
    "centred": (centred_targets, "mean"),
    "sinkhorn": (sinkhorn_targets, "sum"),
    "median": (above_the_median, "median"),
    "backbone": (training_backbone, "batch_norm"),
    "teacher": (training_teacher, "batch_norm"),
    "standardised inputs": (standardised_inputs, "mean"),
    "tensor": (statistic_as_a_tensor, "mean"),
    "number": (statistic_as_a_number, "read"),
    "number in the loss": (number_in_the_loss, "read"),
    "count in the loss": (divided_by_a_count, "read"),
    "1 / loss": (divided_by_the_loss, "mean"),
    "weights": (weighted_by_a_statistic, "sum"),
    "hook": (normalising_hook, "norm"),
    "mixup": (mixup, "index"),
    "mixup of targets": (mixup_of_targets, "flip"),
    "advantages": (normalised_advantages, "mean"),
    "contrastive": (contrastive, "mm"),
    "supervised contrastive": (supervised_contrastive, "mm|eq"),
    "ranking": (pairwise_ranking, "sub"),
    "pearson": (pearson, "mean"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_refused_at_its_line(name):
    leak, operator = LEAKS[name]
    steps, model, optimizer, loader = private(Scaled() if leak.__name__.startswith("statistic") else make_toy()[0])
    before = flat(model)
    for x, y in loader:
        with pytest.raises(ValueError, match=operator) as problem:
            leak(model, x, y)
        break
    named = re.search(r"privacy_engine.test_tracking\.py:(\d+)", str(problem.value))
    assert named is not None, problem.value
    assert "# mixes" in linecache.getline(__file__, int(named[1])), problem.value
    with pytest.raises(ValueError, match="without a backward pass"):
        optimizer.step()
    assert torch.equal(flat(model), before)
    assert not steps.ledger.spent


def test_a_call_is_about_rows_of_one_batch():
    _, model, optimizer, loader = private(Scaled())
    kept = None
    for x, y in loader:
        if kept is not None:
            with pytest.raises(ValueError, match="arguments of the private model are rows of different batches"):
                model(x, kept)
            break
        LOSS(model(x, x[:, :4]), y).backward()
        optimizer.step()
        kept = x[:, :4]
    assert kept is not None


def test_a_loss_of_what_a_model_leaves_beside_its_outputs_is_refused():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            self.inside = self.map(x)
            return self.head(self.inside)

    _, model, _, loader = private(Leaves())
    x, _ = next(iter(loader))
    model(x)
    with pytest.raises(ValueError, match="the gradient of 'map.bias' is not one example's: sum at .* is a reduction"):
        model.inside.square().sum().backward()


def test_rows_of_an_earlier_batch_come_back_to_nobody():
    _, model, optimizer, loader = private(make_toy()[0], batch=8, poisson_sampling=False)
    kept = []
    for x, y in loader:
        outputs = model(x)
        loss = LOSS(outputs, y)
        if kept:
            outputs.register_hook(lambda gradient: kept[0])
            with pytest.raises(ValueError, match="comes back to the model's outputs belongs to other rows"):
                loss.backward()
            break
        kept.append(outputs.detach().clone())
        loss.backward()
        optimizer.step()
    assert kept


def test_hooks_on_parameters_are_said_to_see_nothing():
    _, model, optimizer, loader = private(make_toy()[0])
    next(model.parameters()).register_hook(lambda gradient: gradient * 0)
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    with pytest.warns(UserWarning, match=r"hooks on parameters .'0.weight' has one. are not called"):
        optimizer.step()


def test_a_learning_rate_that_was_read_off_the_loss_is_refused():
    steps, model, optimizer, loader = private(make_toy()[0])
    for x, y in loader:
        loss = LOSS(model(x), y)
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 * loss.item()
        with pytest.raises(ValueError, match=r"optimizer's lr follows from .* read at \S*test_tracking.py:\d+"):
            optimizer.step()
        break
    assert not steps.ledger.spent


@pytest.mark.parametrize("how", ["list", "next", "closure"])
def test_batches_that_were_fetched_ahead_are_followed(how):
    """Also before the model is called, after a step, and in a closure."""
    _, model, optimizer, loader = private(make_toy()[0])
    batches = [next(iter(loader))] if how == "next" else list(loader)

    def leaking():
        standardised_targets(model, *batches[-1])

    for x, y in batches[:-1]:
        LOSS(model(x), y).backward()
        optimizer.step()
    with pytest.raises(ValueError, match="mean at .*test_tracking"):
        optimizer.step(leaking) if how == "closure" else leaking()


@pytest.mark.parametrize("how", ["state", "bank"])
def test_rows_of_another_batch_are_not_this_rows_own(how):
    _, model, optimizer, loader = private(make_toy()[0])
    held = None
    for x, y in loader:
        if held is not None:
            with pytest.raises(ValueError, match=r"(different batches|mm at .*test_tracking.py:\d+)"):
                if how == "state":
                    few = min(len(x), len(held))
                    LOSS(model(x[:few] + held[:few]), y[:few]).backward()
                else:
                    LOSS(model(x) @ model(held).detach().t(), torch.zeros_like(y)).backward()
            return
        held = x
        LOSS(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("how", ["instead", "beside"])
def test_rows_of_an_earlier_draw_are_refused_where_they_are_as_many(how):
    """Each row counts in the draws that it joins alone, also where all parts have one size."""
    steps, model, optimizer, loader = private(make_toy()[0], max_physical_batch_size=4)
    held, stepped = None, 0
    with pytest.raises(ValueError, match="not those of the batch that the private loader handed out for this step"):
        for x, y in loader:
            again = held is not None and len(held[0]) == len(x)
            if not again or how == "beside":
                LOSS(model(x), y).backward()
            if again:
                LOSS(model(held[0]), held[1]).backward()
            optimizer.step()
            held, stepped = (x, y), stepped + 1
    assert stepped
    assert not steps.passes.assumed


def of_the_last_batch(x):
    return x.mean(0)


def by_a_function_of_the_users_own(x):
    return x.new_zeros(5).copy_(sum(x[i] for i in range(len(x))))


@pytest.mark.parametrize("made", [of_the_last_batch, by_a_function_of_the_users_own], ids=lambda each: each.__name__)
def test_what_is_kept_is_followed_after_an_epoch(made):
    """Between the last step and the next batch nothing is to be followed but what was kept."""
    _, model, optimizer, loader = private(make_toy()[0])
    for x, y in loader:
        LOSS(model(x), y).backward()
        optimizer.step()
    assert not followed()
    centre = made(x)
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match=r"is not a row's own: (mean|add) at .*test_tracking.py:\d+"):
        model(x - centre)


class Kept(torch.utils.data.Dataset):
    """Rows that a dataset changes by what a loop has left with it."""

    def __init__(self):
        self.tensors, self.centre = make_toy()[1], torch.zeros(5)

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, row):
        return self.tensors[0][row] - self.centre, self.tensors[1][row]


@pytest.mark.parametrize("how", ["torch's collation", "another"])
def test_what_a_loop_leaves_with_its_dataset_is_no_rows_own(how):
    data, model = Kept(), make_toy()[0]
    collate = None if how == "torch's collation" else example_by_example
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=12, collate_fn=collate),
    )  # fmt: skip
    with pytest.raises(ValueError, match="is not a row's own: (mean at|dataset at .* gives what was kept)"):
        for x, y in loader:
            LOSS(model(x), y).backward()
            optimizer.step()
            data.centre = x.mean(0)


def test_a_collate_fn_that_hands_out_an_earlier_batch_is_refused():
    held = []

    def late(rows):
        held.append((torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])))
        return held[max(0, len(held) - 2)]

    with pytest.raises(ValueError, match="the private loader at .* gives what was kept of an earlier batch"):
        stated(TensorDataset(*make_toy()[1]), late)


# --- sound loops ------------------------------------------------------------------------------------------------------

WEIGHT = torch.tensor([0.5, 1.0, 3.0])


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.left(hidden), self.right(hidden)[:, 0]


class Tagger(nn.Module):
    """A class for each of four positions: [rows, classes, positions]."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(5, 12)

    def forward(self, x):
        return self.map(x).reshape(len(x), 3, 4)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def tags(x, y):
    """Targets of which each row counts a number of its own."""
    wanted = (y[:, None] + torch.arange(4)) % 3
    return torch.where(torch.arange(4) > y[:, None], -100, wanted)


def two_heads(m, x, y):
    left, right = m(x)
    return LOSS(left, y) + 0.5 * F.mse_loss(right, x[:, 0])


def teacher(m, x, y):
    frozen = batch_norm().eval().to(x.dtype)
    with torch.no_grad():
        wanted = frozen(x)[:, :3].softmax(-1)
    return F.kl_div(m(x).log_softmax(-1), wanted, reduction="none").sum(1).mean()


def of_each_row(m, x, y):
    taken = m(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
    return -(taken * (x[:, 0] - 0.5).detach()).mean()


def rows_of(outputs):
    return [(outputs[place], place) for place in range(len(outputs))]


SOUND = {
    "targets by public bounds": (None, lambda m, x, y: F.mse_loss(m(x)[:, 0], (y - 1) / 2.0)),
    "teacher": (None, teacher),
    "frozen backbone": (None, lambda m, x, y: LOSS(m(batch_norm().eval().to(x.dtype)(x).detach()), y)),
    "mixup of views": (None, lambda m, x, y: LOSS(m(0.6 * x + 0.4 * x.flip(1)), y)),
    "two heads": (TwoHeads, two_heads),
    "two losses": (None, lambda m, x, y: LOSS(m(x), y) + m(x).square().sum(1).mean()),
    "ignored targets": (Tagger, lambda m, x, y: LOSS(m(x), tags(x, y))),
    "ignored plus mse": (Tagger, lambda m, x, y: LOSS(m(x), tags(x, y)) + F.mse_loss(m(x)[:, :, 0], x[:, :3])),
    "row by row": (None, lambda m, x, y: torch.stack([LOSS(z, y[i]) for z, i in rows_of(m(x))]).mean()),
    "slice by slice": (None, lambda m, x, y: sum(LOSS(z[None], y[i : i + 1]) for z, i in rows_of(m(x))) / len(x)),
    "smoothing": (None, lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1)),
    "mse plus l1": (None, lambda m, x, y: F.mse_loss(m(x), x[:, :3]) + 0.1 * F.l1_loss(m(x), x[:, :3])),
    "checkpointed": (Checkpointed, lambda m, x, y: LOSS(m(x), y)),
    "advantages": (None, of_each_row),
    "normalised rows": (None, lambda m, x, y: LOSS(m((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)), y)),
    "hook of each row": (None, lambda m, x, y: LOSS(m(x / x.norm(dim=1, keepdim=True)), y)),
    "scaled": (Scaled, lambda m, x, y: LOSS(m(x, 0.7), y)),
    "a number for each row": (Scaled, lambda m, x, y: LOSS(m(x, x[:, :1].abs()), y)),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_loop_steps_as_one_example_at_a_time(name):
    made, loss = SOUND[name]
    torch.manual_seed(2)
    compare(made() if made else make_toy()[0], loss, loss)


def test_constant_class_weights():
    """Divided by the weights' own mean, not by that of the batch."""

    def alone(m, x, y):
        weight = WEIGHT.to(x.dtype)
        return F.cross_entropy(m(x), y, weight=weight, reduction="none").mean() / weight.mean()

    compare(make_toy()[0], lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHT), alone)


def test_a_sum_of_losses():
    def summed(m, x, y):
        return LOSS(m(x), y, reduction="sum")

    compare(make_toy()[0], summed, summed, loss_reduction="sum")


def compare(model, loss, alone, **options):
    """Two steps of a loop against one example at a time in float64; nothing is assumed of the loss."""
    steps, model, optimizer, loader = private(model, **options)
    for _, (x, y) in zip(range(2), loader, strict=False):
        before, expected = flat(model), oracle(model, alone, list(zip(x, y, strict=True)))
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
    assert not steps.passes.assumed


def slices(x):
    return [x[start : start + 4] for start in range(0, len(x), 4)]


SLICED = {
    "slices": slices,
    "split": lambda x: x.split(4),
    "chunks": lambda x: x.chunk(3),
    "every other": lambda x: [x[::2], x[1::2]],
    "by indices": lambda x: [x[few] for few in torch.arange(len(x)).split(4)],
    "rows": lambda x: [row[None] for row in x],
}


@pytest.mark.parametrize("name", SLICED)
def test_a_batch_that_a_loop_slices_is_refused_with_the_way_out(name):
    _, model, optimizer, loader = private(make_toy()[0])
    x, y = next(iter(loader))
    before = flat(model)
    with pytest.raises(
        ValueError, match="give make_private max_physical_batch_size, and step after every p"
    ) as problem:
        for few, wanted in zip(SLICED[name](x), SLICED[name](y), strict=True):
            (LOSS(model(few), wanted, reduction="sum") / len(x)).backward()
    assert "\n" not in str(problem.value)
    assert torch.equal(flat(model), before)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 4), nn.Linear(4, 5)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


UNLABELLED = {
    "reconstruction": lambda m, x: F.mse_loss(m(x), x),
    "denoising": lambda m, x: F.smooth_l1_loss(m(0.5 * x), x),
    "two views": lambda m, x: -F.cosine_similarity(m(x), m(x.flip(1)).detach(), dim=-1).mean(),
    "masked": lambda m, x: ((m(torch.where(x > 0, x, 0)) - x).square() * (x <= 0)).sum(1).mean(),
}


@pytest.mark.parametrize("physical", [None, 4])
@pytest.mark.parametrize("name", UNLABELLED)
def test_batches_without_labels(name, physical):
    """Self-supervised: rows alone, whole or in parts."""
    steps, model, optimizer, loader = private(Autoencoder(), make_toy()[1][:1], max_physical_batch_size=physical)
    before, rows = flat(model), []
    for (x,) in loader:
        rows += [(row,) for row in x]
        optimizer.zero_grad()
        UNLABELLED[name](model, x).backward()
        optimizer.step()
        if steps.draws:
            break
    moved_by = moved(before, flat(model))
    model.load_state_dict(dict(zip(model.state_dict(), split_like(before, model), strict=True)))
    np.testing.assert_allclose(moved_by, oracle(model, UNLABELLED[name], rows), rtol=1e-3, atol=3e-5)
    assert not steps.passes.assumed


def split_like(values, model):
    state = model.state_dict().values()
    return [
        part.view_as(each) for part, each in zip(values.split([each.numel() for each in state]), state, strict=True)
    ]


def test_everyday_loops_are_left_alone():
    """Logs, an average of the weights, a scheduler, noise on inputs, dropout, an evaluation in between."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3))
    steps, model, optimizer, loader = private(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    average = [p.detach().clone() for p in model.parameters()]
    logged, right = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        outputs = model(x + 0.1 * torch.randn_like(x))
        loss = LOSS(outputs, y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        logged += loss.item()
        right += int((outputs.argmax(-1) == y).sum())
        print(f"loss {loss.item():.3f} {loss}")
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
        with torch.no_grad():
            model.eval()(x[:2])
            model.train()
    assert logged > 0
    assert right >= 0
    assert steps.ledger.spent == {steps.planned: 5}
    assert {read.operator for read in steps.passes.tracking.reads} >= {"local_scalar_dense"}
    assert all("test_tracking.py" in read.where for read in steps.passes.tracking.reads)


def test_time_steps_that_a_loop_draws_are_each_rows_own():
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.times, self.map = nn.Embedding(10, 5), nn.Linear(5, 5)

        def forward(self, x, t):
            return self.map(torch.tanh(x + self.times(t)))

    _, model, optimizer, loader = private(Denoiser())
    for x, _ in loader:
        t, noise = torch.randint(10, (len(x),)), torch.randn_like(x)
        kept = torch.linspace(0.9, 0.1, 10)[t][:, None]
        before = flat(model)
        expected = oracle(
            model,
            lambda m, x, t, noise: F.mse_loss(m(torch.linspace(0.9, 0.1, 10).to(x)[t][:, None] * x + noise, t), noise),
            list(zip(x, t, noise, strict=True)),
        )
        F.mse_loss(model(kept * x + noise, t), noise).backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)


def test_the_loss_of_a_transformers_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager"}
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6, **options)
    data = torch.randint(11, (40, 6)), torch.zeros(40)
    steps, model, optimizer, loader = private(transformers.GPT2LMHeadModel(config), data)

    def loss(m, x, y):
        return m(input_ids=x, labels=x).loss

    for _, (x, y) in zip(range(2), loader, strict=False):
        twin = copy.deepcopy(model)
        before, expected = flat(model), oracle(twin, loss, list(zip(x, y, strict=True)))
        loss(model, x, y).backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
    assert not steps.passes.assumed


def test_a_gradient_penalty_on_inputs_is_refused_in_words():
    model, _, loader = private(make_toy()[0])[1:]
    for x, _ in loader:
        with pytest.raises(ValueError, match="an input of the private model requires a gradient"):
            model(x.requires_grad_())
        break


# --- what a loop reads, and how its batches are made ------------------------------------------------------------------


def stated(data, collate=None, read=None):
    """What is said of each assumption after an epoch: its status and detail."""
    model, engine = nn.Linear(5, 3), PrivacyEngine()
    loader = DataLoader(data, batch_size=12, collate_fn=collate)
    moves = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=moves, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for x, y in loader:
        loss = LOSS(model(x), y)
        if read is not None:
            read(loss)
        loss.backward()
        optimizer.step()
    return {each["name"]: (each["status"], each["detail"]) for each in engine.guarantee(1e-3).listed}


@pytest.mark.parametrize("read", [float, Tensor.item, Tensor.tolist, bool, str], ids=lambda each: each.__name__)
def test_what_was_read_is_assumed_to_decide_nothing(read):
    """Python numbers are not followed: after a look at one, nothing is called checked that it could decide."""
    data = TensorDataset(*make_toy()[1])
    assert {stated(data)[name][0] for name in ("loss_per_example", "divisor")} == {"checked"}
    known = stated(data, read=read)
    for name in ("nothing_else", "loss_per_example", "divisor", "padding"):
        status, detail = known[name]
        assert status == "assumed"
        assert re.search(r"reads .*at \S*privacy_engine.test_tracking\.py:\d+", detail), detail


def test_what_a_later_step_reads_is_recorded_too():
    """What the passes show is written down again whenever it has changed."""
    losses = []

    def read(loss):
        losses.append(loss if len(losses) < 2 else float(loss))

    known = stated(TensorDataset(*make_toy()[1]), read=read)
    assert len(losses) > 2
    assert {known[name][0] for name in ("nothing_else", "loss_per_example", "divisor")} == {"assumed"}


def test_what_is_read_after_the_last_step_decides_nothing_of_its_loss():
    model, engine = nn.Linear(5, 3), PrivacyEngine()
    moves = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=moves, data_loader=DataLoader(TensorDataset(*make_toy()[1]), batch_size=12),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    for expected in ("checked", "assumed"):
        for x, y in loader:
            loss = LOSS(model(x), y)
            loss.backward()
            optimizer.step()
        assert engine.guarantee(1e-3).assumption("loss_per_example").status == expected
        print(loss.item())
        found = engine.guarantee(1e-3)
        assert "local_scalar_dense at" in found.assumption("nothing_else").detail
        assert found.assumption("loss_per_example").status == expected


def test_what_is_read_between_epochs_is_noted_beside_another_loop():
    kept = []
    for _ in range(2):
        steps, model, optimizer, loader = private(make_toy()[0])
        x, y = next(iter(loader))
        LOSS(model(x), y).backward()
        optimizer.step()
        kept.append((steps, x))
    assert not followed()
    for steps, x in kept:
        float(x.mean())
        assert steps.passes.tracking.reads


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return OwnProduct.apply(x, self.weight, self.bias)


def test_a_loop_is_followed_beside_another_at_rest():
    """Each by its own tracker: what is left of the other's examples is no matter of this one's backward pass."""
    kept = []
    for _ in range(3):
        loop = private(OwnLinear(5, 3))
        for x, y in loop[3]:
            same_step_of(lambda m, x, y: LOSS(m(x), y), *loop[1:3], x, y)
        kept.append((loop, x))


def test_a_distance_of_the_users_own_inside_a_loss_is_followed():
    """Its reads dispatch no operator: only the function mode sees them."""
    steps, model, _, loader = private(make_toy()[0])

    def distance(one, other):
        one.tolist()
        return (one - other).square().sum(-1)

    x, _ = next(iter(loader))
    out = model(x)
    F.triplet_margin_with_distance_loss(out, out + 1, out - 1, distance_function=distance).backward()
    assert {read.operator for read in steps.passes.tracking.reads} == {"tolist"}


def test_a_parameter_that_was_added_to_the_optimizer_is_not_moved_without_noise():
    steps, model, optimizer, loader = private(make_toy()[0])
    other = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [other]})
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    other.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"holds a parameter that is not the module's"):
        optimizer.step()
    assert not steps.ledger.spent


def example_by_example(rows):
    return torch.stack([(x - x.mean()) / x.std() for x, _ in rows]), torch.stack([y for _, y in rows])


def by_the_batch(rows):
    x = torch.stack([x for x, _ in rows])
    return (x - x.mean(0)) / x.std(0), torch.stack([y for _, y in rows])  # mixes


def by_numpy(rows):
    x = np.stack([x.numpy() for x, _ in rows])
    return torch.as_tensor(x - x.mean(0)), torch.stack([y for _, y in rows])


def padded_in_order(rows):
    return pad_sequence([x for x, _ in rows], batch_first=True), torch.stack([y for _, y in rows])


def filled(rows, shift=0):
    """Into a tensor that was made before, beside another one in the same memory."""
    x, others = torch.zeros(2, len(rows), 5)
    for place, (own, _) in enumerate(rows):
        x[(place + shift) % len(rows), :4] = own[:4]
        others[place] = own
    return x, torch.stack([y for _, y in rows])


def filled_elsewhere(rows):
    return filled(rows, shift=1)


def beside_its_mask(rows):
    """What is written of examples lies beside what is made of their lengths alone."""
    x, mask = torch.zeros(2, len(rows), 5)
    mask.fill_(0.5)
    for place, (own, _) in enumerate(rows):
        x[place, : len(own)], mask[place, : len(own)] = own, 1
    return x * mask, torch.stack([y for _, y in rows])


def of_numbers(rows):
    return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])


def out_of_order(rows):
    return torch.stack([x for x, _ in rows[::-1]]), torch.stack([y for _, y in rows])  # mixes


def test_a_collate_fn_is_followed():
    data = TensorDataset(*make_toy()[1])
    assert stated(data, example_by_example)["loss_per_example"][0] == "checked"
    assert stated(data, padded_in_order)["loss_per_example"][0] == "checked"
    assert stated(data, filled)["loss_per_example"][0] == "checked"
    assert stated(data, beside_its_mask)["loss_per_example"][0] == "checked"
    assert stated([(x, int(y)) for x, y in data], of_numbers)["loss_per_example"][0] == "assumed"
    with pytest.raises(ValueError, match="takes entries of several examples out of their order"):
        stated(data, filled_elsewhere)
    for leak in (by_the_batch, out_of_order):
        with pytest.raises(ValueError, match=r"at \S*privacy_engine.test_tracking\.py:\d+") as problem:
            stated(data, leak)
        line = int(re.search(r"test_tracking\.py:(\d+)", str(problem.value))[1])
        assert "# mixes" in linecache.getline(__file__, line)
    status, detail = stated(data, by_numpy)["loss_per_example"]
    assert (status, detail) == ("assumed", "a collate_fn of your own makes each row of its own example alone")


class Shifting(nn.Module):
    """Targets shifted by one place, as encoder-decoder models do, whatever their length."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)

    def forward(self, x, y):
        ids = y[:, None] + (x > 0)
        shifted = ids.new_zeros(ids.shape)
        shifted[:, 1:] = ids[:, :-1].clone()
        shifted[:, 0] = 2
        return self.head(self.table(shifted) + x[..., None]).mean(1)


@pytest.mark.parametrize("length", [1, 4])
def test_targets_that_are_shifted_inside_the_model(length):
    x, y = make_toy()[1]
    _, model, optimizer, loader = private(Shifting(), (x[:, :length], y))
    same_step_of(lambda m, a, b: F.cross_entropy(m(a, b), b), model, optimizer, *next(iter(loader)))


class ShiftedAcross(nn.Module):
    """A shift by one place of a flattened batch: the first place of a row takes the last one of the row before it."""

    def __init__(self, learned):
        super().__init__()
        self.before, self.head = nn.Linear(1, 1) if learned else nn.Identity(), nn.Linear(5, 3)

    def forward(self, x):
        flat = self.before(x.reshape(-1, 1)).clone()
        earlier = flat.clone()
        flat[1:] = earlier[:-1]
        return self.head(flat.view(x.shape))


@pytest.mark.parametrize("learned", [False, True])
def test_a_shift_of_a_flattened_batch_is_refused(learned):
    _, model, optimizer, loader = private(ShiftedAcross(learned))
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="takes entries of several examples"):
        F.cross_entropy(model(x), y).backward()


class ReadingLabels(nn.Linear):
    def forward(self, x, labels):
        return super().forward(x) * (labels > 0).sum().item()


def test_a_model_that_reads_its_labels_is_told_to_do_without():
    _, model, _, loader = private(ReadingLabels(5, 3))
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="looks at a value of the examples.* call the model without them"):
        model(x, labels=y)


# --- a loop that ended in an error --------------------------------------------------------------------------------------


def followed():
    """Whether operators are followed now."""
    return torch._C._len_torch_dispatch_stack() > 0


def broken_off():
    """The parts of a loop that ended between a batch and its step."""
    steps, model, optimizer, loader = private(make_toy()[0])
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    assert followed()
    return steps, model, optimizer, loader


def test_a_loop_that_broke_off_is_not_followed_once_it_is_gone():
    loop = broken_off()
    del loop
    gc.collect()
    assert not followed()


def test_a_loop_that_is_collected_in_another_thread_ends_where_the_next_begins():
    gc.disable()
    try:
        loop = broken_off()
        del loop
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join()
    finally:
        gc.enable()
    assert followed()  # modes belong to a thread: the other one could not take them off
    steps, model, optimizer, loader = private(make_toy()[0])
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    optimizer.step()
    assert not followed()
    assert torch.autograd.is_multithreading_enabled()


@pytest.mark.parametrize("where", ["modes of operators", "modes of functions"])
def test_a_loop_that_is_collected_where_modes_move_ends_where_the_next_begins(where):
    """A garbage collection runs after torch has looked for modes, and before it takes one."""
    module = torch.utils._python_dispatch if where == "modes of operators" else torch.overrides
    name = "_push_mode" if where == "modes of operators" else "_pop_mode"
    original = getattr(module, name)

    class Passed(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    loop, mode = [broken_off()], Passed()
    with mode, mock.patch.object(module, name, lambda *given: (loop.clear(), gc.collect(), original(*given))[2]), mode:
        assert len(torch.ones(2) + 1) == 2
    assert not loop
    test_a_loop_that_broke_off_is_not_followed_once_it_is_gone()


def test_a_closed_engine_follows_nothing():
    engine = PrivacyEngine(reproducible=3)
    model, data = make_toy()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data), batch_size=12), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    assert followed()
    engine.close()
    assert not followed()


def test_an_activation_whose_storage_was_taken_away_is_refused():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            self.kept = self.first(x).tanh()
            return self.second(self.kept)

    _, model, _, loader = private(Keeping())
    for x, y in loader:
        loss = LOSS(model(x), y)
        model.kept.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="resize_ of a storage .* took away what a tensor of the examples holds"):
            loss.backward()
        break

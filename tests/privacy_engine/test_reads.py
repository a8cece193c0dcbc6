"""Can one example decide about others by way of Python? Values that models read, keep and write, in both loops.

A loop refuses such a program. `vestige.train` runs each example by itself, and states what it assumes of the rest.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
import vestige.engines.example_axis.rules
from loops import LR, flat, oracle, private
from vestige.engines.example_axis.labels import Rows, Tracker

ROWS, BOUND = 12, 1.0


def sign(x):
    """A value that one large row decides for everybody."""
    return x.detach()[:, 0].sum().sign()


def without_a_rule(x):
    """The same numbers, by an operator of which nobody says what it does to examples."""
    return torch.addbmm(x, x.new_zeros(1, len(x), 1), x.new_zeros(1, 1, x.shape[1]))


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.map, self.head, self.change = nn.Linear(6, 6), nn.Linear(6, 3), change

    def hidden(self, x):
        return torch.tanh(self.map(x))

    def forward(self, x):
        return self.head(self.change(self, x))


def by(number):
    return lambda model, x: model.hidden(x) * number(x)


def collected(x):
    found = []
    sign(x)[None].apply_(lambda value: (found.append(value), value)[1])
    return found[0]


class Own:
    """An object that answers torch's functions in its own way."""

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return torch.tensor(args[0].held.tolist())[:, 0].sum().sign()


def on_the_gradient(read):
    def change(model, x):
        hidden = model.hidden(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * read(gradient))
        return hidden

    return change


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(np.sign(gradient.numpy()[0, 0]))


def packed(x):
    lengths = (3 + sign(x)).long()[None]
    return nn.utils.rnn.pack_padded_sequence(torch.ones(6, 1, 1), lengths).data.shape[0] - 3


def quantised(x):
    return torch.quantize_per_tensor_dynamic(x.detach().clamp(-1000, 0), torch.qint8, False).q_scale() - 0.5


SEEN = []


@torch.library.custom_op("vestige_tests::shown", mutates_args=())
def shown(x: Tensor) -> float:
    return float(sign(x))


@torch.library.custom_op("vestige_tests::kept", mutates_args=())
def kept(x: Tensor) -> None:
    SEEN[:] = [float(sign(x))]


def by_an_operator_that_gives_nothing(x):
    kept(x.detach())
    return SEEN[0]


def saved(model, x):
    """Hooks of saved tensors, of which one reads by NumPy."""
    hooks = lambda each: (each, np.sign(each.detach().numpy().sum())), lambda pair: pair[0] * float(pair[1])
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        return model.hidden(x) * x.detach()


READS = {
    "tensor": by(lambda x: torch.tensor([sign(x)])),
    "tensor of rows": by(lambda x: torch.tensor([row[0] for row in x.detach()]).sum().sign()),
    "as_tensor": by(lambda x: torch.as_tensor([sign(x)])),
    "new_tensor": by(lambda x: x.new_tensor([sign(x)])),
    "FloatTensor": by(lambda x: torch.FloatTensor([sign(x)])),
    "sparse_coo_tensor": by(lambda x: torch.sparse_coo_tensor([[0]], [sign(x)], (1,)).to_dense()),
    "tensor_split": by(lambda x: torch.tensor_split(x, (2 + sign(x)).long()[None], 1)[0].shape[1] - 2),
    "apply_": by(collected),
    "map_": by(lambda x: torch.zeros(1).map_(sign(x)[None], lambda _, value: value)),
    "q_scale": by(quantised),
    "pack_padded_sequence": by(packed),
    "an object's own function": by(lambda x: torch.relu(Own(x.detach()))),
    "numpy in a hook": on_the_gradient(lambda g: float(np.sign(g.detach().numpy()[0, 0]))),
    "tolist in a hook": on_the_gradient(lambda g: 1.0 if g.tolist()[0][0] > 0 else -1.0),
    "float in a hook": on_the_gradient(lambda g: 1.0 if float(g[0, 0]) > 0 else -1.0),
    "numpy in a hook of saved tensors": saved,
    "an operator of another library": by(lambda x: shown(x.detach())),
    "an operator that gives nothing": by(by_an_operator_that_gives_nothing),
    "numpy in a backward": lambda model, x: Reading.apply(model.hidden(x)),
}


def neighbours(flipped):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 6, generator=generator).abs() / 2
    x[0] = -1000.0 if flipped else 1000.0
    return x, torch.zeros(ROWS, dtype=torch.long)


def trained(make, data, steps=1, loss=F.cross_entropy, **options):
    """What the clipped sum of all rows is, and the run: almost without noise."""
    torch.manual_seed(0)
    model = make()
    before = flat(model)
    training = vestige.train(
        model, loss, data, noise_multiplier=1e-6, delta=1e-5, steps=steps, sample_rate=1.0, max_grad_norm=BOUND,
        lr=1.0, reproducible=7, **options,
    )  # fmt: skip
    torch.manual_seed(1)
    list(training)
    return (before - flat(model)).double() * ROWS, training


def assumed(training):
    return {each.name for each in training.guarantee().assumptions if each.status == "assumed"}


@pytest.mark.parametrize("name", READS)
def test_a_loop_refuses_a_model_that_reads_a_value(name):
    torch.manual_seed(0)
    _, model, _, loader = private(Net(READS[name]), neighbours(False), batch=ROWS)
    with pytest.raises(ValueError, match="looks at a value of the examples"):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("name", READS)
def test_training_runs_such_a_model_one_example_at_a_time(name):
    sums, runs = zip(
        *(trained(lambda: Net(READS[name]), neighbours(flipped)) for flipped in (False, True)), strict=True
    )
    assert torch.linalg.vector_norm(sums[0] - sums[1]) <= 2 * BOUND * 1.001
    assert sums[0].abs().max() > 0.01
    assert all("rows_apart" in assumed(run) for run in runs)


FACTS = {
    "sizes": by(lambda x: x.shape[1] / 6 * x.dim() / 2),
    "types": by(lambda x: 1.0 if x.is_floating_point() and x.dtype == torch.float32 else 0.0),
    "like another": by(lambda x: torch.ones(1).to(x) * torch.zeros(1).expand_as(x).add(1)),
    "a new tensor": by(lambda x: x.new_tensor([1.0]) * x.new_ones(1)),
    "a hook that reads nothing": on_the_gradient(lambda g: 1.0),
    "a tensor of public numbers": by(lambda x: torch.tensor([1.0] * x.shape[1])),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_about_a_tensor_are_no_values(name):
    data = neighbours(False)
    _, model, optimizer, loader = private(Net(FACTS[name]), data, batch=ROWS)
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert "rows_apart" not in assumed(trained(lambda: Net(FACTS[name]), data)[1])


# --- an order of rows that is none ------------------------------------------------------------------------------------


def by_dlpack(index):
    torch.from_dlpack(index)[:] = 5


def reversed_by_numpy(index):
    np.copyto(index.numpy(), index.numpy()[::-1].copy())


@pytest.mark.parametrize(
    "change",
    [lambda i: i.numpy().fill(5), lambda i: i.apply_(lambda _: 5), by_dlpack, reversed_by_numpy],
    ids=["numpy", "apply_", "dlpack", "reversed"],
)
def test_rows_in_an_order_that_was_changed_elsewhere_are_not_their_own(change):
    def picked(model, x):
        index = torch.arange(len(x))
        change(index)
        return model.hidden(x[index])

    data = neighbours(False)
    _, model, _, loader = private(Net(picked), data, batch=ROWS)
    with pytest.raises(ValueError, match="picks rows of other examples|puts examples in another order"):
        model(next(iter(loader))[0])
    with pytest.raises(ValueError, match="mixes the examples"):
        trained(lambda: Net(picked), data)


@pytest.mark.parametrize(
    "taken",
    [torch.empty, lambda size: torch.empty(size, out=torch.empty(0))],
    ids=["empty", "out"],
)
def test_memory_that_is_not_filled_holds_no_example(taken):
    def left_over(model, x):
        copy = x.detach().clone() * 3
        size = copy.shape
        del copy
        return model.hidden(x) * (taken(size)[:, 0].sum().sign() + 2)

    sums = [trained(lambda: Net(left_over), neighbours(flipped))[0] for flipped in (False, True)]
    assert torch.linalg.vector_norm(sums[0] - sums[1]) <= 2 * BOUND * 1.001


@pytest.mark.parametrize("whose", [None, Rows(-1, 1, 3, 1)], ids=["public", "an example"])
def test_memory_that_a_tensor_is_resized_to_holds_no_example(whose):
    tracker, given = Tracker(strict=False), torch.ones(2)
    if whose is not None:
        tracker.labels.set(given, whose)
    with tracker:
        for _ in range(100):
            held = [torch.full((1000,), 7.0) for _ in range(10)]
            del held
            found = given.clone().resize_(1000)
            assert found[:2].eq(1).all()
            assert found[2:].eq(0).all()


# --- what is written outside a pass -----------------------------------------------------------------------------------


class Polyak(torch.optim.Optimizer):
    """It keeps a loss, and steps by it."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.loss = None

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad * (1.0 if self.loss is None else self.loss))


def into_a_parameter(model, optimizer, x, loss):
    with torch.no_grad():
        next(model.parameters()).add_(x.mean())


def into_a_buffer(model, optimizer, x, loss):
    model.seen = x.mean(0)


def rate(model, optimizer, x, loss):
    optimizer.param_groups[0]["lr"] = loss.detach()


def schedule(model, optimizer, x, loss):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: loss.detach())


def betas(model, optimizer, x, loss):
    optimizer.param_groups[0]["betas"] = (x.mean().sigmoid(), 0.9)


def decay(model, optimizer, x, loss):
    optimizer.param_groups[0]["weight_decay"] = x.mean()


def momentum(model, optimizer, x, loss):
    optimizer.state[next(model.parameters())]["momentum_buffer"] = x.mean(0).expand(6, 6).clone()


def kept_loss(model, optimizer, x, loss):
    optimizer.loss = loss.detach()


def before_a_step(model, optimizer, x, loss):
    optimizer.register_step_pre_hook(lambda *_: (next(model.parameters()).grad.add_(x.mean()), None)[1])


def after_a_step(model, optimizer, x, loss):
    def hook(*_):
        with torch.no_grad():
            next(model.parameters()).add_(x.mean())

    optimizer.register_step_post_hook(hook)


WRITES = (
    into_a_parameter,
    into_a_buffer,
    rate,
    schedule,
    betas,
    decay,
    momentum,
    kept_loss,
    before_a_step,
    after_a_step,
)


@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_what_is_written_of_examples_is_found_at_the_next_step_or_at_the_end(write):
    model = Net(lambda model, x: model.hidden(x))
    model.register_buffer("seen", torch.zeros(6))
    engine, model, optimizer, loader = private(
        model, neighbours(False), batch=ROWS, optimizer=Polyak if write is kept_loss else torch.optim.SGD
    )

    def loop():
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                write(model, optimizer, x, loss)

    with pytest.raises(ValueError, match="holds something of the examples|mean at .* is a reduction over the batch"):
        loop()


@pytest.mark.parametrize("write", [into_a_parameter, into_a_buffer, kept_loss], ids=lambda each: each.__name__)
def test_what_is_written_after_the_last_step_is_found_when_something_is_said_of_the_run(write):
    model = Net(lambda model, x: model.hidden(x))
    model.register_buffer("seen", torch.zeros(6))
    engine = vestige.PrivacyEngine(reproducible=7)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=Polyak(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(*neighbours(False)), batch_size=ROWS),
    )  # fmt: skip
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        write(model, optimizer, x, loss)
    for said in (lambda: engine.guarantee(1e-3), lambda: engine.get_epsilon(1e-3), lambda: engine.finish({})):
        with pytest.raises(ValueError, match="holds something of the examples"):
            said()


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.last = nn.Linear(6, 3), None

    def forward(self, x):
        self.last = x.detach().clone()
        return self.head(x)

    def get_extra_state(self):
        return self.last

    def set_extra_state(self, state):
        self.last = state


def test_saved_state_of_a_module_holds_no_example():
    data = neighbours(False)
    _, model, _, loader = private(Extra(), data, batch=ROWS)
    with pytest.raises(ValueError, match="get_extra_state of a Extra gives something of the examples"):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="get_extra_state of a Extra gives something of the examples"):
        trained(Extra, data)


def test_two_engines_follow_each_others_batches():
    (x, y), parts = neighbours(False), []
    for seed in (7, 8):
        model = nn.Linear(6, 3)
        engine = vestige.PrivacyEngine(reproducible=seed)
        parts.append(
            engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=LR),
                data_loader=DataLoader(TensorDataset(x, y), batch_size=ROWS),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
        )
    (_, _, first), (model, _, second) = parts
    for (others, _), (own, _) in zip(first, second, strict=True):
        with pytest.raises(ValueError, match="sum at .* is a reduction over the batch"):
            model(own * sign(others))


# --- what makes batches -----------------------------------------------------------------------------------------------


class Read(torch.utils.data.Dataset):
    """Rows that are read one at a time, or several together."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, row):
        return self.data[0][row], int(self.data[1][row])


class ReadTogether(Read):
    def __getitems__(self, rows):
        decided = sign(self.data[0][rows])
        return [(self.data[0][row] * decided, int(self.data[1][row])) for row in rows]


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def test_rows_are_read_one_at_a_time():
    (one, run), (other, _) = (trained(mlp, ReadTogether(neighbours(flipped))) for flipped in (False, True))
    assert torch.linalg.vector_norm(one - other) <= 2 * BOUND * 1.001
    assert "rows_apart" in assumed(run)
    sums = []
    for flipped in (False, True):
        torch.manual_seed(0)
        model = mlp()
        before = flat(model)
        engine = vestige.PrivacyEngine(reproducible=7)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(ReadTogether(neighbours(flipped)), batch_size=ROWS),
            noise_multiplier=1e-6, max_grad_norm=BOUND,
        )  # fmt: skip
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        sums.append((before - flat(model)).double() * ROWS)
    assert torch.linalg.vector_norm(sums[0] - sums[1]) <= 2 * BOUND * 1.001


def test_a_collate_fn_that_replaces_the_loaders_own_is_refused():
    _, _, _, loader = private(mlp(), neighbours(False), batch=ROWS)
    loader.collate_fn = lambda rows: torch.utils.data.default_collate(rows)
    with pytest.raises(ValueError, match="collate_fn of the private loader was replaced"):
        next(iter(loader))


def test_a_collate_fn_that_reads_is_stated():
    def reading(rows):
        decided = 1.0 if sum(float(x[0]) for x, _ in rows) > 0 else -1.0
        return torch.stack([x for x, _ in rows]) * decided, torch.stack([y for _, y in rows])

    model = mlp()
    engine = vestige.PrivacyEngine(reproducible=7)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(*neighbours(False)), batch_size=ROWS, collate_fn=reading),
        noise_multiplier=1.0, max_grad_norm=BOUND,
    )  # fmt: skip
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert {each.name for each in engine.guarantee(1e-5).assumptions if each.status == "assumed"} >= {
        "loss_per_example"
    }


# --- examples that run one at a time ----------------------------------------------------------------------------------


def drawn(model, x):
    """More or fewer draws after those that count; rows of opposite sign are alike but for that."""
    signs = (torch.rand_like(x[:, :1]) - 0.5).sign()
    torch.poisson(x.detach().clamp(0.1, 30))
    return model.hidden(x.abs()) * signs


def test_how_many_numbers_an_example_draws_decides_about_no_other():
    one, other = (trained(lambda: Net(drawn), neighbours(flipped))[0] for flipped in (False, True))
    assert torch.equal(one, other)
    assert one.norm() > BOUND


class Tokens(nn.Module):
    """The mean of embeddings, times a number that depends on how many rows there are."""

    def __init__(self, factor):
        super().__init__()
        self.embedding, self.head, self.factor = nn.Embedding(10, 6), nn.Linear(6, 3), factor

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1) + 1) * self.factor(len(tokens))


@pytest.mark.parametrize("token", [2, 99], ids=["in range", "out of range"])
@pytest.mark.parametrize(
    ("factor", "loss"),
    [
        (lambda rows: 1.0, F.cross_entropy),
        (lambda rows: 1.0 if rows > 8 else -1.0, F.cross_entropy),
        (lambda rows: 1.0, lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(o)),
    ],
    ids=["plain", "a branch on the rows", "a sum over the rows"],
)
def test_a_row_that_fails_alone_is_left_out_and_moves_no_other(factor, loss, token):
    rows = [torch.tensor([place % 10, 3 * place % 10, 2]) for place in range(ROWS)]
    expected, _ = trained(lambda: Tokens(factor), [(each, 0) for each in rows], loss=loss)
    rows[5][2] = token
    found, run = trained(lambda: Tokens(factor), [(each, 0) for each in rows], loss=loss)
    assert torch.linalg.vector_norm(expected - found) <= BOUND * (1.001 if token == 99 else 1e-6)
    assert next(each for each in run.guarantee().assumptions if each.name == "bad_rows").status == "checked"


class Long(nn.Module):
    """It does what cannot be followed with long rows alone."""

    def __init__(self, change):
        super().__init__()
        self.head, self.change = nn.Linear(1, 3), change

    def forward(self, x):
        return self.head((self.change(x) if x.shape[1] > 8 else x).mean(1, keepdim=True))


@pytest.mark.parametrize("change", [lambda x: x / x.abs().max(), lambda x: without_a_rule(x)])
@pytest.mark.parametrize("length", [4, 40])
def test_a_row_of_a_rare_shape_neither_stops_training_nor_warns(change, length, recwarn):
    rows = [(torch.ones(length if place == 9 else 4) * place / ROWS, 0) for place in range(ROWS)]
    _, run = trained(lambda: Long(change), rows)
    assert next(each for each in run.guarantee().assumptions if each.name == "bad_rows").status == "checked"
    assert not [each for each in recwarn if "examples cannot" in str(each.message)]


def test_a_number_that_is_kept_for_other_examples_is_assumed_away():
    class Keeps(Net):
        greatest = 0.0

    def greatest(model, x):
        model.greatest = max(model.greatest, float(x.max()))
        return model.hidden(x) * (1.0 if model.greatest < 100 else -1.0)

    _, run = trained(lambda: Keeps(greatest), neighbours(True))
    found = next(each for each in run.guarantee().assumptions if each.name == "rows_apart")
    assert found.status == "assumed"
    assert "is kept for no other one" in str(found)


def test_an_example_that_is_kept_for_later_passes_is_refused():
    def kept(model, x):
        before, model.before = getattr(model, "before", None), without_a_rule(x).detach().sum().sign()
        return model.hidden(without_a_rule(x)) * (1.0 if before is None else before)

    with pytest.raises(ValueError, match="keeps something of an example for later passes"):
        trained(lambda: Net(kept), neighbours(False), steps=2)


def test_a_function_that_an_operator_is_given_may_hold_examples():
    """Nothing else that the operator is given is one."""

    def change(model, x):
        chosen = torch.ops.higher_order.cond(torch.tensor(True), lambda: (sign(x),), lambda: (-sign(x),), ())[0]
        return model.hidden(x) * chosen

    _, model, _, loader = private(Net(change), neighbours(False), batch=ROWS)
    with pytest.raises(ValueError, match="cond at .* is an operator without a rule"):
        model(next(iter(loader))[0])
    sums = [trained(lambda: Net(change), neighbours(flipped))[0] for flipped in (False, True)]
    assert torch.linalg.vector_norm(sums[0] - sums[1]) <= 2 * BOUND * 1.001
    assert sums[0].abs().max() > 0.01


class Force(nn.Module):
    """The gradient of an energy with respect to its input, as of a potential; or one step against a loss inside."""

    def __init__(self, way):
        super().__init__()
        self.map, self.energy, self.way = nn.Linear(6, 6), nn.Linear(6, 1), way

    def forward(self, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            energy = self.energy(torch.tanh(self.map(place))).sum()
            if self.way == "of the input":
                return torch.autograd.grad(energy, place, create_graph=True)[0]
            if self.way == "backward":
                energy.backward(retain_graph=True)
                return self.map(x)
            return self.map(x) - x @ torch.autograd.grad(energy, self.map.weight, create_graph=True)[0].t()


def test_a_model_may_return_the_gradient_of_its_input():
    data = neighbours(False)[0] / 100, torch.zeros(ROWS, 6)
    found, _ = trained(lambda: Force("of the input"), data, loss=F.mse_loss)
    torch.manual_seed(0)
    expected = oracle(Force("of the input"), lambda m, x, y: F.mse_loss(m(x), y), list(zip(*data, strict=True)), BOUND)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    _, model, optimizer, loader = private(Force("of the input"), data, batch=ROWS)
    x, y = next(iter(loader))
    F.mse_loss(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["of a parameter", "backward"])
def test_gradients_of_parameters_that_a_model_takes_inside_are_not_those_of_its_loss(way):
    data = neighbours(False)[0] / 100, torch.zeros(ROWS, 6)
    _, model, _, loader = private(Force(way), data, batch=ROWS)
    with pytest.raises(ValueError, match="takes gradients inside its forward pass|combines rows of different"):
        F.mse_loss(model(next(iter(loader))[0]), data[1]).backward()


def by_own_draws(model, x):
    """More or fewer draws from a generator that nobody seeds anew."""
    torch.poisson(x.detach().abs().clamp(0.1, 30), generator=model.generator)
    return model.hidden(x.abs()) * (torch.rand(x.shape, generator=model.generator) - 0.5).sign()


def test_draws_from_a_generator_of_the_users_are_stated():
    class Drawing(Net):
        generator = torch.Generator()

    assert "rows_apart" in assumed(trained(lambda: Drawing(by_own_draws), neighbours(False))[1])


# --- passes that are given up ------------------------------------------------------------------------------------------


class Later(nn.Module):
    """It changes what it does after so many passes."""

    def __init__(self, change, after):
        super().__init__()
        self.map, self.head, self.change, self.after = nn.Linear(6, 6), nn.Linear(6, 3), change, after
        self.passes, self.kept = 0, []

    def forward(self, x):
        self.passes += 1
        hidden = torch.tanh(self.map(x))
        return self.head(self.change(self, x, hidden) if self.passes > self.after else hidden)


def into_the_weights(model, x, hidden):
    model.head.bias.data.add_(x.detach().sum())
    return hidden


def into_a_new_buffer(model, x, hidden):
    model.register_buffer("seen", x.detach().clone())
    return hidden


def kept_of_the_batch(model, x, hidden):
    """Kept of all rows before an operator without a rule, and used of one."""
    if len(x) > 1:
        model.kept = [x.detach()]
    turned = without_a_rule(hidden)
    return turned * sign(model.kept[0]) if model.kept else turned


def kept_alone(model, x, hidden):
    """Of one example after the other."""
    turned = without_a_rule(hidden)
    kept = sign(model.kept[0]) if model.kept else 1.0
    model.kept = [x.detach()]
    return turned * kept * float(x[0, 0] == x[0, 0])


def kept_of_all_alone(model, x, hidden):
    """Of all of them by vmap: another batch's rows would be taken for this one's."""
    turned = without_a_rule(hidden)
    kept = model.kept[0] if model.kept else 1.0
    model.kept = [x.detach().mean(1, keepdim=True)]
    return turned * kept


@pytest.mark.parametrize("change", [into_the_weights, into_a_new_buffer], ids=lambda each: each.__name__)
def test_an_example_in_the_model_ends_the_run_whenever_that_happens(change):
    with pytest.raises(ValueError, match="holds something of the examples without noise"):
        trained(lambda: Later(change, 20), neighbours(False), steps=25)


@pytest.mark.parametrize("change", [kept_of_the_batch, kept_alone, kept_of_all_alone], ids=lambda each: each.__name__)
def test_what_a_pass_keeps_before_an_operator_without_a_rule_is_refused(change):
    with pytest.raises(ValueError, match="keeps something of an example for later passes"):
        trained(lambda: Later(change, 0), neighbours(False), steps=2)


def test_what_a_pass_keeps_later_on_reaches_no_example():
    one, other = (
        trained(lambda: Later(kept_of_the_batch, 4), neighbours(flipped), steps=9)[0] for flipped in (False, True)
    )
    assert torch.linalg.vector_norm(one - other) <= 2 * BOUND * 2 * 1.001


def test_a_value_that_is_read_later_is_not_shown():
    """A flag that Python would keep for the examples after it."""

    def flagged(model, x, hidden):
        model.kept.append(float(sign(x)))
        return hidden

    model = Later(flagged, 20)
    _, run = trained(lambda: model, neighbours(True), steps=25)
    assert not model.kept
    assert model.passes > 20
    assert "rows_apart" not in assumed(run)


def test_an_evaluation_knows_what_the_model_keeps_of_its_training():
    class Keeps(Later):
        def forward(self, x):
            if self.training:
                self.kept = [x.detach()]
                return self.head(torch.tanh(self.map(x)))
            return self.head(torch.tanh(self.map(x))) * sign(self.kept[0])

    with pytest.raises(ValueError, match="keeps something of an example for later passes"):
        trained(lambda: Keeps(None, 0), neighbours(False), evaluate=vestige.PrivateEvaluation(error=0.5))


def test_rows_of_an_earlier_batch_are_not_trained_on_again():
    class Late(Net):
        kept = None

        def forward(self, x):
            given, self.kept = x if self.kept is None or len(self.kept) != len(x) else self.kept, x.detach()
            return self.head(torch.tanh(self.map(given)))

    _, model, optimizer, loader = private(Late(None), neighbours(False), batch=ROWS)
    with pytest.raises(ValueError, match="about other rows than those of the call|rows of another batch"):
        for _ in range(2):
            for x, _ in loader:
                model(x).square().mean().backward()
                optimizer.step()
    with pytest.raises(ValueError, match="about other rows than those of the call|rows of another batch"):
        trained(lambda: Late(None), neighbours(False), loss=lambda out, y: out.square().mean(), steps=2)


def test_a_batching_rule_of_somebody_else_is_not_trusted():
    @torch.library.custom_op("vestige_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_autograd(lambda ctx, gradient: gradient * 2)

    @doubled.register_vmap
    def _(info, in_dims, x):
        return doubled(x) * sign(x.reshape(-1, 6)), in_dims[0]

    def change(model, x):
        return doubled(x) * model.hidden(x)

    sums = [trained(lambda: Net(change), neighbours(flipped))[0] for flipped in (False, True)]
    assert torch.linalg.vector_norm(sums[0] - sums[1]) <= 2 * BOUND * 1.001

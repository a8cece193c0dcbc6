"""Does a pass that is run again from its operators do what it would have done? Bit for bit, or it says that it cannot."""

from __future__ import annotations

import random
import types
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vestige
from vestige.engines.captures.capture_guards import NamesRead, NotCapturable
from vestige.engines.captures.operator_graph import GraphMemory, GuardFailed, OperatorGraph, Outside
from vestige.engines.example_axis.labels import Labels

# --- graphs by themselves ---------------------------------------------------------------------------------------------

RECORDINGS = 2
"""Until what a graph is given from outside has been seen twice."""


class Repeated:
    """A function of one tensor, recorded and then run from its operators."""

    def __init__(self, function, shape, parts=1):
        self.function, self.shape = function, shape
        self.given, self.found = torch.zeros(shape), None
        self.memory = GraphMemory(Outside(), [self.given], Labels(), NamesRead())
        self.graphs = [OperatorGraph(self.memory) for _ in range(parts)]
        self.state = {}

    def work(self, part):
        if part == 0:
            self.state["value"] = self.given
        functions = self.function if isinstance(self.function, tuple) else (self.function,)
        value = functions[part](self.state["value"])
        self.state["value"] = value
        if part == len(functions) - 1:
            self.found.copy_(value.detach())

    def __call__(self, value):
        self.given.copy_(value)
        if self.found is None:
            functions = self.function if isinstance(self.function, tuple) else (self.function,)
            state = torch.get_rng_state()
            for function in functions:
                value = function(value)
            torch.set_rng_state(state)
            self.found = torch.zeros_like(value)
            self.memory.own.append(self.found)
        if not self.memory.known:
            self.memory.forget()
        values = {}
        for part, graph in enumerate(self.graphs):
            graph.replay(partial(self.work, part), values)
        assert not any(isinstance(name, int) for name in values)  # tensors for later parts
        self.memory.complete()
        return self.found.clone()

    @property
    def replays(self):
        return self.graphs[0].run is not None


def ordinary(function, value):
    for each in function if isinstance(function, tuple) else (function,):
        value = each(value)
    return value.detach()


def with_gradient(x):
    x = x.clone().requires_grad_()
    y = (x.tanh() * x).softmax(dim=1)
    return torch.autograd.grad(y.square().sum(), x)[0]


def written_through_views(x):
    y = x.clone()
    y[1:].mul_(2)
    y.t()[0] = 3.0
    part, rest = y.split([2, len(y) - 2])
    rest.add_(part.sum())
    return y.reshape(-1).view(y.shape)


def scattered(x):
    found = torch.zeros(len(x), 5)
    found.scatter_(1, x.argsort(dim=1)[:, :5] % 5, x[:, :5])
    return found.index_select(1, torch.tensor([3, 1]))


def drawn(x):
    return F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(len(x), 1)


def reshaped_in_place(x):
    y = x.clone().t_()
    z = (y * 2).unsqueeze_(0)
    return z.squeeze_(0).t()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, signal):
        return signal * ctx.saved_tensors[0].sign()


def through_a_function(x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(Doubled.apply(x).exp().sum(), x)[0]


def checkpointed(x):
    x = x.clone().requires_grad_()
    y = checkpoint(lambda v: F.dropout(v.tanh(), 0.5) * v, x, use_reentrant=False)
    z = checkpoint(lambda v: F.dropout(v.sin(), 0.3) * v, y, use_reentrant=False)
    return torch.autograd.grad(z.sum(), x)[0] + torch.rand_like(x)


def batched(x):
    return torch.vmap(lambda row, other: row.outer(other).sum(dim=0))(x, x.flip(0))


FUNCTIONS = {
    "pointwise": lambda x: (x.exp() + 1).log() - x.abs().sqrt(),
    "gradient": with_gradient,
    "views": written_through_views,
    "indices": scattered,
    "draws": drawn,
    "shapes in place": reshaped_in_place,
    "a function of one's own": through_a_function,
    "checkpoints": checkpointed,
    "vmap": batched,
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)).sub(torch.mul(x, x, out=torch.zeros(0))),
    "lists": lambda x: torch.cat([torch.stack(x.unbind(1)).sum(dim=0, keepdim=True).expand(7, 6).t(), *x.chunk(3)]),
    "what nobody uses": lambda x: (x.clone().zero_(), torch.zeros(3).fill_(2), x + 1)[2],
    "constants": lambda x: x * torch.tensor([2.0]) + torch.arange(x.shape[1]) + torch.full((1,), 0.5),
    "two parts": (lambda x: x.tanh(), lambda x: x.cumsum(dim=1)),
    "three parts": (lambda x: x.tanh(), lambda x: x.view(-1), lambda x: x[::2] * 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_is_the_pass_itself(name):
    function, shape = FUNCTIONS[name], (6, 7)
    repeated = Repeated(function, shape, len(function) if isinstance(function, tuple) else 1)
    for number in range(6):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        torch.manual_seed(number)
        expected = ordinary(function, x)
        after = torch.get_rng_state()
        torch.manual_seed(number)
        assert torch.equal(repeated(x), expected)
        assert torch.equal(torch.get_rng_state(), after)
    assert repeated.replays


OPERATIONS = (
    lambda x, y: x + y,
    lambda x, y: x * y.tanh(),
    lambda x, y: x.t().contiguous().t() - y,
    lambda x, y: x.mul_(0.9),
    lambda x, y: x[1:].add_(y[:-1].clone()),
    lambda x, y: x[::2].neg_(),
    lambda x, y: y.copy_(x.flip(0)),
    lambda x, y: x @ y.t() @ x / 10,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: F.dropout(x, 0.2),
    lambda x, y: x.detach().mul_(y.sigmoid()),
    lambda x, y: torch.cat([x[2:], y[:2]]),
    lambda x, y: x.sort(dim=1)[0],
    lambda x, y: x.as_strided(x.shape, (x.shape[1], 1)).clone(),
    lambda x, y: x.clamp_(-3, 3),
)


def program(seed):
    """Some operators, in an order of their own, on two tensors that may share their memory."""
    order = random.Random(seed)
    chosen = [(order.choice(OPERATIONS), order.random() < 0.5, order.random() < 0.3) for _ in range(12)]

    def run(value):
        x, y = value.clone(), value.flip(1)
        for operation, swapped, shared in chosen:
            found = operation(*((y, x) if swapped else (x, y)))
            if found.shape == x.shape:
                x, y = found, (x if shared else y)
        return x + y

    return run


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed):
    repeated = Repeated(program(seed), (6, 4))
    for number in range(4):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * seed + number))
        torch.manual_seed(number)
        expected = ordinary(program(seed), x)
        torch.manual_seed(number)
        found = repeated(x)
        assert torch.equal(found, expected) or torch.equal(found.isnan(), expected.isnan())
    assert repeated.replays


def test_a_value_that_decides_is_looked_at_again():
    repeated = Repeated(lambda x: x * 2 + torch.rand(()) if bool((x > 0).all()) else x - 1, (3,))
    for _ in range(3):
        assert repeated(torch.ones(3)).mean() > 2
    state = torch.get_rng_state()
    with pytest.raises(GuardFailed):
        repeated(-torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)  # what takes its place draws the same
    assert repeated(torch.ones(3)).mean() > 2


def test_a_whole_number_that_decides_is_looked_at_again():
    repeated = Repeated(lambda x: x * int(x.argmax()), (3,))
    for _ in range(3):
        assert repeated(torch.tensor([0.0, 1.0, 2.0])).tolist() == [0, 2, 4]
    with pytest.raises(GuardFailed):
        repeated(torch.tensor([3.0, 1.0, 2.0]))


REFUSED = {
    "a number": lambda x: x * float(x.sum()),
    "sizes": lambda x: x[x > 0].sum() + x,
    "places": lambda x: x + len(x.nonzero()),
    "Python's numbers": lambda x: x * random.random(),
    "NumPy's numbers": lambda x: x * np.random.rand(),  # noqa: NPY002
    "a seed": lambda x: (torch.manual_seed(int(x.shape[0])), x + torch.rand_like(x))[1],
    "other memory": lambda x: torch.empty(0).set_(x.clone()) + 1,
    "a sparse tensor": lambda x: x + x.to_sparse().to_dense(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_again_is_not(name):
    repeated = Repeated(REFUSED[name], (3, 2))
    try:
        for _ in range(3):
            repeated(torch.randn(3, 2))
    except NotCapturable:
        return
    assert repeated.memory.refused
    assert not repeated.replays


def test_what_is_made_without_operators_is_not_taken_for_a_constant():
    """It would be that of the first pass for ever."""

    def by_numpy(x):
        return x + torch.from_numpy(np.sin(np.arange(3.0, dtype=np.float32)) + np.float32(next(turns)))

    turns = iter(range(100))
    repeated = Repeated(by_numpy, (3,))
    for _ in range(6):
        repeated(torch.zeros(3))
    assert repeated.memory.refused
    assert not repeated.replays


def test_a_number_that_changes_from_pass_to_pass_is_no_constant():
    passes = [[0]]

    def counted(x):
        passes[0][0] += 1
        return x * torch.tensor(float(passes[0][0]))

    repeated = Repeated(counted, (3,))
    for _ in range(6):
        repeated(torch.ones(3))
    assert repeated.memory.refused
    assert not repeated.replays


def test_memory_that_was_there_before_is_read_as_it_is_now():
    weight, count = torch.ones(3), torch.zeros(())
    repeated = Repeated(lambda x: (count.add_(1), x * weight + count)[1], (3,))
    for number in range(1, 8):
        weight.fill_(number)
        assert torch.equal(repeated(torch.ones(3)), weight + count)
    assert repeated.replays
    assert count == 8  # once more, to see its shape


def test_nothing_of_a_pass_stays_in_its_graph():
    """What is written to it, but for what its owner gave it, is gone when it ends."""
    repeated = Repeated((lambda x: x.tanh(), lambda x: x * 2), (4, 4), parts=2)
    for number in range(5):
        repeated(torch.randn(4, 4, generator=torch.Generator().manual_seed(number)))
    held = [tensor for graph in repeated.graphs for tensor in graph.held]
    assert {each.data_ptr() for each in held} <= {repeated.given.data_ptr(), repeated.found.data_ptr()}


# --- in training ------------------------------------------------------------------------------------------------------


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout2d(0.3))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 1, 4, 4)).amax(dim=(2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 4, 4))[0].mean(dim=1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = x.clone().requires_grad_() if self.training else x
        return self.other(checkpoint(lambda v: F.dropout(self.one(v).tanh(), 0.4), x, use_reentrant=False))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x.view(-1, 4, 4)).mean(dim=1))


class Standardised(nn.Module):
    """Weights that are functions of parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(16, 6))
        self.head = nn.utils.parametrizations.orthogonal(nn.Linear(6, 3))

    def forward(self, x):
        return self.head(self.layer(x).tanh())


MODELS = {
    "linear": lambda: nn.Linear(16, 3),
    "convolutional": Convolutional,
    "recurrent": Recurrent,
    "checkpointed": Checkpointed,
    "attending": Attending,
    "standardised": Standardised,
}


def data(count=60):
    random_ = torch.Generator().manual_seed(3)
    return torch.randn(count, 16, generator=random_), torch.randint(3, (count,), generator=random_)


@pytest.fixture
def replays(monkeypatch):
    """How many graphs were replayed."""
    counted, replay = [], OperatorGraph.replay

    def count(graph, work, values):
        known = graph._memory.known
        replay(graph, work, values)
        counted.extend([graph] if known else [])

    monkeypatch.setattr(OperatorGraph, "replay", count)
    return counted


def trained(make, cuda_graphs, rows=None, steps=30, **options):
    torch.manual_seed(0)
    model = make()
    options = {"batch_size": 6, "noise_multiplier": 0.5, "delta": 1e-5, "lr": 0.1, "max_grad_norm": 0.5} | options
    training = vestige.train(
        model, F.cross_entropy, rows or data(), steps=steps, cuda_graphs=cuda_graphs, reproducible=3, **options
    )
    training.run()
    return model.state_dict()


def looped(make, cuda_graphs, rows=None, steps=30, after=lambda model, step: None):
    torch.manual_seed(0)
    model = make()
    rows = TensorDataset(*data()) if rows is None else rows
    model, optimizer, loader = vestige.PrivacyEngine(reproducible=3, cuda_graphs=cuda_graphs).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.5, max_grad_norm=0.5,
        data_loader=DataLoader(rows, batch_size=6),
    )  # fmt: skip
    torch.manual_seed(1)
    step = 0
    while step < steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            after(model, step)
            step += 1
    return model.state_dict()


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", [trained, looped])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_bit_for_bit(name, way, replays):
    recorded = way(MODELS[name], True)
    assert len(replays) > 5
    counted = len(replays)
    same(recorded, way(MODELS[name], False))
    assert len(replays) == counted


def test_a_number_of_views_and_parts_of_a_sample(replays):
    options = {"max_physical_batch_size": 3, "steps": 40}
    same(trained(MODELS["convolutional"], True, **options), trained(MODELS["convolutional"], False, **options))
    assert replays


class Turning(Dataset):
    """Rows of which one is something else from some step on."""

    def __init__(self, value):
        self.rows, self.value, self.odd = data(), value, False

    def __len__(self):
        return len(self.rows[0])

    def __getitem__(self, place):
        x, y = self.rows[0][place], self.rows[1][place]
        return (torch.full_like(x, self.value), y) if self.odd and place == 7 else (x, y)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_an_example_that_is_no_number_goes_another_way(value, replays):
    """Its gradient is not finite, which a replay sees; the step is then taken without the graph, with the same draws."""
    found = []
    for cuda_graphs in (True, False):
        rows = Turning(value)
        rows.odd = False

        def after(model, step, rows=rows):
            rows.odd = step >= 25

        found.append(looped(MODELS["attending"], cuda_graphs, rows, steps=60, after=after))
    same(*found)
    assert all(each.isfinite().all() for each in found[0].values())
    assert replays


# --- what a replay must not miss --------------------------------------------------------------------------------------


def fixed(model, rows=None, batches=30, batch=6):
    """A loop over batches of one size, so that its passes are replayed from the fourth on."""
    rows = TensorDataset(*data()) if rows is None else rows
    return vestige.PrivacyEngine(reproducible=3).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.5, max_grad_norm=0.5,
        data_loader=DataLoader(rows, batch_size=batch), poisson_sampling=False,
    )  # fmt: skip


class Remembering(nn.Module):
    """Adds what it remembers, deep inside something that it holds."""

    def __init__(self):
        super().__init__()
        self.layer, self.held = nn.Linear(16, 3), {"more": [torch.zeros(6, 16)]}

    def forward(self, x):
        return self.layer(x + self.held["more"][0])


def test_examples_that_a_loop_puts_where_a_model_looks_are_seen(replays):
    inner = Remembering()
    model, optimizer, loader = fixed(inner)
    with pytest.raises(ValueError, match=r"rows of another batch|different batches|not a row's own|other rows"):
        for number, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number == 6:
                assert replays
                inner.held["more"][0].copy_(x)
    assert number == 7


class Keeping(nn.Module):
    """Keeps an activation for an auxiliary loss, from some pass on; what says so lies where no guard looks."""

    def __init__(self, first):
        super().__init__()
        self.layer, self.head, self.passes, self.first = nn.Linear(16, 8), nn.Linear(8, 3), [[0]], first
        self.kept = None

    def forward(self, x):
        hidden = self.layer(x).tanh()
        self.passes[0][0] += 1
        if self.passes[0][0] >= self.first:
            self.kept = hidden
        return self.head(hidden)


@pytest.mark.parametrize("first", [1, 2, 3, 4, 9])
def test_what_a_model_keeps_of_a_pass_is_that_of_this_pass(first, replays):
    inner = Keeping(first)
    model, optimizer, loader = fixed(inner)
    seen = []
    try:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if inner.kept is not None and len(inner.kept) == len(x):
                loss = loss + inner.kept.square().sum(dim=1).mean()
            loss.backward()
            optimizer.step()
            seen.append(float(loss))
    except RuntimeError as problem:  # it began in the pass that was recorded
        assert first > 1
        assert "second time" in str(problem)
    else:
        assert not replays


def test_a_model_that_writes_its_examples_to_memory_of_its_own_is_not_recorded(replays):
    class Scratch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.room = nn.Linear(16, 3), {"it": [torch.zeros(6, 16)]}

        def forward(self, x):
            return self.layer(torch.mul(x, 2, out=self.room["it"][0]))

    model, optimizer, loader = fixed(Scratch())
    try:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    except ValueError as problem:
        assert "\n" not in str(problem)
    assert not replays


def test_numpy_in_a_model_is_not_replayed(replays):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 3)

        def forward(self, x):
            table = torch.empty(16)
            table.numpy()[:] = np.arange(16)
            return self.layer(x + table / 16)

    plain = []
    for cuda_graphs in (True, False):
        plain.append(looped(Positions, cuda_graphs))
    same(*plain)
    assert not replays


def test_a_model_that_changes_its_way_is_recorded_anew(replays):
    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(16, 3), 1.0

        def forward(self, x):
            return self.layer(x) * self.scale

    def after(model, step):
        model.scale = 1.0 if step < 20 else 2.0

    same(looped(Scheduled, True, after=after, steps=60), looped(Scheduled, False, after=after, steps=60))
    assert replays


class Schedule:
    """As a user's own object that a model asks."""

    def __init__(self):
        self.factor, self.inner, self.rows = 1.0, types.SimpleNamespace(factor=1.0), [1.0, [1.0]]

    def value(self):
        return self.factor


FACTOR, TABLE, SCHEDULE, BANK = 1.0, {"a": {"b": 1.0}}, Schedule(), [torch.ones(1)]


def by_global(x):
    return x * FACTOR


def around():
    held, cell = [1.0], 1.0

    def by_closure(x):
        return x * held[0] * cell

    def change():
        nonlocal cell
        held[0], cell = 2.0, 1.5

    return by_closure, change


def counted():
    passes = 0

    def count(x):
        nonlocal passes
        passes += 1
        return x * (1 + (passes > 6))

    return count


CHANGING = {
    "a global": (lambda self, x: by_global(x), lambda self: globals().update(FACTOR=3.0)),
    "a global object": (lambda self, x: x * SCHEDULE.value(), lambda self: setattr(SCHEDULE, "factor", 3.0)),
    "a global table": (lambda self, x: x * TABLE["a"]["b"], lambda self: TABLE["a"].update(b=3.0)),
    "a global tensor": (lambda self, x: x * BANK[0], lambda self: BANK.__setitem__(0, torch.full((1,), 3.0))),
    "an object's object": (lambda self, x: x * self.held.inner.factor, lambda self: vars(self.held.inner).update(factor=3)),
    "a list in a list": (lambda self, x: x * self.held.rows[1][0], lambda self: self.held.rows[1].__setitem__(0, 3.0)),
    "a tensor in a list": (lambda self, x: x * self.bank[0], lambda self: self.bank.__setitem__(0, torch.full((1,), 3.0))),
    "a function's variables": (lambda self, x: self.around[0](x), lambda self: self.around[1]()),
    "a count": (lambda self, x: self.count(x), lambda self: None),
}  # fmt: skip


class Changes(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(16, 3), way
        self.held, self.bank, self.around, self.count = Schedule(), [torch.ones(1)], around(), counted()

    def forward(self, x):
        return self.layer(CHANGING[self.way][0](self, x))


@pytest.mark.parametrize("way", CHANGING)
def test_what_changes_in_python_changes_what_is_replayed(way, monkeypatch, replays):
    """What is replayed is the pass that would run, also where it looks at something deep in Python."""

    def after(model, step):
        if step == 20:
            CHANGING[way][1](model)

    found = []
    for cuda_graphs in (True, False):
        again = {"FACTOR": 1.0, "TABLE": {"a": {"b": 1.0}}, "SCHEDULE": Schedule(), "BANK": [torch.ones(1)]}
        for name, value in again.items():
            monkeypatch.setitem(globals(), name, value)
        found.append(looped(partial(Changes, way), cuda_graphs, after=after, steps=60))
    same(*found)
    if way == "a count":
        return
    assert replays
    assert any((found[0][name] != value).any() for name, value in looped(partial(Changes, way), True, steps=60).items())

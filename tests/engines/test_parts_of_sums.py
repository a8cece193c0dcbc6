"""Are each example's parts of a sum what they were when they were proved, in the right place, and nobody else's?"""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from loops import flat, oracle
from vestige.engines.per_example import gradient_maps

ROWS, BOUND = 8, 0.5


def data():
    torch.manual_seed(5)
    return torch.randn(ROWS, 6), torch.randint(3, (ROWS,))


class Layers(nn.Module):
    """`inside` is called with the activation between the layers."""

    def __init__(self, inside=lambda model, hidden: None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.inside = nn.Linear(6, 6), nn.Linear(6, 3), inside

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * 1
        self.inside(self, hidden)
        return self.last(hidden)


class Weight(nn.Module):
    """A weight that is a function of parameters."""

    def __init__(self, function, *shapes):
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.function = nn.ParameterList([torch.randn(shape) for shape in shapes]), function

    def forward(self, x):
        return self.function(x, *self.parts)


def looped(make, after=lambda x: None):
    """The clipped sum of a step of a loop; `after` is called between the backward pass and the step."""
    model = make()
    before = flat(model)
    engine = vestige.PrivacyEngine(reproducible=3)
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1e-7,
        data_loader=DataLoader(TensorDataset(*data()), batch_size=ROWS), max_grad_norm=BOUND,
    )  # fmt: skip
    try:
        for x, y in loader:
            F.cross_entropy(private(x), y).backward()
            after(x)
            optimizer.step()
    finally:
        engine.close()
    return (before - flat(model)) * ROWS


def trained(make):
    model = make()
    before = flat(model)
    options = {"noise_multiplier": 1e-7, "delta": 1e-5, "steps": 1, "sample_rate": 1.0, "lr": 1.0, "reproducible": 3}
    vestige.train(model, F.cross_entropy, data(), max_grad_norm=BOUND, **options).run()
    return (before - flat(model)) * ROWS


def expected(make):
    def loss(model, x, y):
        return F.cross_entropy(model(x), y)

    return torch.as_tensor(oracle(make(), loss, list(zip(*data(), strict=True)), BOUND))


def same(found, make):
    torch.testing.assert_close(found.double(), expected(make).double(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(x[:1, :1].sign()),
        lambda x: x.data.mul_(2),
        lambda x: torch.mul(x, 2, out=x),
        lambda x: x.zero_(),
        lambda x: x[1:].copy_(x[:-1].clone()),
    ],
)
def test_what_gradients_are_made_of_stays_as_it_is_until_the_step(write):
    with pytest.raises(ValueError, match="changes what gradients are made of until the step"):
        looped(Layers, write)
    same(looped(Layers), Layers)


def test_an_input_may_be_used_again_after_the_step():
    x = torch.zeros(ROWS, 6)

    class Copying(Layers):
        def forward(self, given):
            return super().forward(x.copy_(given).clone())

    for _ in range(2):
        same(looped(Copying), Layers)


def test_what_is_public_stays_as_it_is_too():
    """An example that was written over it would decide about all."""
    kept = []

    class Constant(Layers):
        def forward(self, x):
            kept.append(torch.ones(len(x), 6))
            return self.last(self.first(kept[-1]) * x)

    with pytest.raises(ValueError, match="changes what gradients are made of until the step"):
        looped(Constant, lambda x: kept.pop().mul_(x[:1, :1].sign()))


class Reached(nn.Module):
    """Of a weight that is a function of parameters and of something public."""

    def __init__(self, function, public, *shapes):
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.function = nn.ParameterList([torch.randn(shape) for shape in shapes]), function
        self.public = public

    def forward(self, x):
        return F.linear(x, self.function(self.public, *self.parts))


PUBLIC = {
    "rows of a table": (lambda index, table: table[index], lambda: torch.tensor([2, 0, 1]), (4, 6)),
    "rows of an embedding": (lambda index, table: F.embedding(index, table), lambda: torch.tensor([2, 0, 1]), (4, 6)),
    "a product": (lambda other, w: torch.sin(torch.tanh(w) @ other.to(w)), lambda: torch.randn(5, 6), (3, 5)),
    "a scale": (lambda scale, w: w * scale, lambda: torch.ones(3, 6), (3, 6)),
    "a mask": (lambda mask, w: torch.where(mask > 0, w, 0), lambda: torch.ones(3, 6), (3, 6)),
}


@pytest.mark.parametrize("largest", [gradient_maps.LARGEST, 8])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_operands_of_a_weight_are_taken_as_they_were(name, largest, monkeypatch):
    """Either they are used before, or a write to them is refused: also where parts are made later, as they are large."""
    monkeypatch.setattr(gradient_maps, "LARGEST", largest)
    function, public, shape = PUBLIC[name]
    made = []

    def make():
        torch.manual_seed(4)
        made.append(Reached(function, public(), shape))
        return made[-1]

    want = expected(make)
    try:
        found = looped(make, lambda x: made[-1].public.copy_(made[-1].public.flip(0) * 0))
    except ValueError as problem:
        assert "changes what gradients are made of until the step" in str(problem)
        return
    torch.testing.assert_close(found.double(), want.double(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", ["input", "activation", "and back"])
def test_storage_that_is_resized_before_the_step_is_refused(how):
    kept = []

    def resize(x):
        storage = (kept[-1] if how == "activation" else x).detach().untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        if how == "and back":
            again = [torch.zeros(size // 4) for _ in range(8)]
            storage.resize_(size)
            del again

    def make():
        return Layers(lambda model, hidden: kept.append(hidden))

    with pytest.raises(ValueError, match="resized before the step") as problem:
        looped(make, resize)
    assert "\n" not in str(problem.value)
    same(looped(make), make)


def test_gradients_that_are_discarded_are_made_of_nothing():
    model = Layers()
    private, optimizer, loader = vestige.PrivacyEngine(reproducible=3).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1e-7,
        data_loader=DataLoader(TensorDataset(*data()), batch_size=ROWS), max_grad_norm=BOUND,
    )  # fmt: skip
    x, y = next(iter(loader))
    F.cross_entropy(private(x), y).backward()
    optimizer.zero_grad()
    x.zero_()
    optimizer.zero_grad()


def mixes_the_activation(model, hidden):
    kept = hidden.detach()
    hidden.register_hook(lambda gradient: (kept.mul_(kept[:1, :1].sign()), None)[1])


def mixes_the_gradient(model, hidden):
    kept = []
    model.last.register_full_backward_hook(lambda layer, inner, outer: kept.append(outer[0]))
    hidden.register_hook(lambda gradient: [each.mul_(each[:1, :1].sign()) for each in kept] and None)


@pytest.mark.parametrize("inside", [mixes_the_activation, mixes_the_gradient])
def test_a_hook_changes_nothing_that_gradients_are_made_of(inside):
    with pytest.raises(ValueError, match="changes what gradients are made of until the step"):
        looped(lambda: Layers(inside))


class Scratch(torch.autograd.Function):
    """Both products are made in one buffer."""

    @staticmethod
    def forward(ctx, x, one, other):
        ctx.save_for_backward(x, one, other)
        return x.sin() @ one + x.cos() @ other

    @staticmethod
    def backward(ctx, gradient):
        x, one, other = ctx.saved_tensors
        buffer = torch.sin(x)
        first = buffer.t() @ gradient
        torch.cos(x, out=buffer)
        return None, first, buffer.t() @ gradient


def into(function, *shape, empty=torch.zeros):
    """A sum that is written to memory of one's own."""

    def written(gradient, x):
        made = empty(shape, dtype=x.dtype)
        function(gradient, x, made)
        return made

    return written


def in_rows(gradient, x, made):
    for row in range(3):
        made[row] = gradient[:, row] @ x


def of_each(gradient, x):
    return torch.stack([torch.outer(one, other) for one, other in zip(gradient, x, strict=True)])


def product(gradient, x):
    return gradient.t() @ x


WRITTEN = {
    "mm": into(lambda g, x, made: torch.mm(g.t(), x, out=made), 3, 6, empty=torch.empty),
    "mm resized": into(lambda g, x, made: torch.mm(g.t(), x, out=made), 0),
    "matmul": into(lambda g, x, made: torch.matmul(g.t(), x, out=made), 3, 6),
    "a part": lambda g, x: into(lambda g, x, made: torch.mm(g.t(), x, out=made[1:4]), 5, 6)(g, x)[1:4],
    "sum": into(lambda g, x, made: torch.sum(of_each(g, x), 0, out=made), 3, 6),
    "add": into(lambda g, x, made: torch.add(product(g, x), product(g, x), out=made), 3, 6),
    "mul": into(lambda g, x, made: torch.mul(product(g, x), 0.5, out=made), 3, 6),
    "mul into itself": lambda g, x: torch.mul(a := product(g, x), 0.5, out=a),
    "cat": into(lambda g, x, made: torch.cat([product(g, x)[:1], product(g, x)[1:]], out=made), 3, 6),
    "in place": into(lambda g, x, made: made.add_(product(g, x), alpha=2), 3, 6),
    "rows": into(in_rows, 3, 6),
    "addmm": lambda g, x: torch.addmm(x.new_zeros(3, 6), g.t(), x),
    "addmm without": lambda g, x: torch.addmm(x.new_ones(3, 6), g.t(), x, beta=0),
    "addmm to a sum": lambda g, x: torch.addmm(product(g, x), g.t(), x, beta=0.5, alpha=0.25),
    "addmm in place": lambda g, x: product(g, x).addmm_(g.t(), x, alpha=3),
    "addmm of what is public": lambda g, x: torch.addmm(product(g, x), x.new_zeros(3, 2), x.new_ones(2, 6)),
    "baddbmm": lambda g, x: torch.baddbmm(x.new_zeros(1, 3, 6), g.t()[None], x[None])[0],
    "addbmm": lambda g, x: torch.addbmm(x.new_zeros(3, 6), g[:, :, None], x[:, None]),
    "addr": lambda g, x: reduce(lambda made, both: torch.addr(made, *both), zip(g, x), x.new_zeros(3, 6)),  # noqa: B905
    "addmv": lambda g, x: torch.addmv(x.new_zeros(3), g.t(), x[:, 0])[:, None].expand(3, 6),
    "addcmul": lambda g, x: torch.addcmul(product(g, x), product(g, x), x.new_full((3, 6), 2.0), value=0.5),
    "addcdiv": lambda g, x: torch.addcdiv(x.new_zeros(3, 6), product(g, x), x.new_full((3, 6), 2.0)),
    "lerp": lambda g, x: torch.lerp(product(g, x), 2 * product(g, x), 0.25),
    "turned": lambda g, x: (x.t() @ g).t_(),
}
CHANGED = {
    "beside something public": lambda g, x: x.new_ones(3, 6).add_(product(g, x)) - 1,
    "addmm to something public": lambda g, x: torch.addmm(x.new_ones(3, 6), g.t(), x) - 1,
    "fill_diagonal_": lambda g, x: product(g, x).fill_diagonal_(1),
    "resize_": lambda g, x: product(g, x).resize_(3, 6),
    "by strides of its own": lambda g, x: torch.as_strided(a := product(g, x), (3, 6), a.stride()),
    "clamp": into(lambda g, x, made: torch.clamp(product(g, x), -0.1, 0.1, out=made), 3, 6),
    "an addend twice": into(lambda g, x, made: [made.addr_(*both) for both in zip(g, x, strict=True)], 3, 6),
}


def own_product(made):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):
            return None, made(gradient, *ctx.saved_tensors)

    return lambda: Weight(Own.apply, (3, 6))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_of_a_sum_is_each_examples_part(name):
    make = own_product(WRITTEN[name])
    same(looped(make), make)


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_made_of_a_sum_otherwise_is_refused_in_a_line(name):
    with pytest.raises(ValueError, match=r"this backward pass cannot be made private: .* at \S*test_parts") as problem:
        looped(own_product(CHANGED[name]))
    assert "\n" not in str(problem.value)


def test_a_buffer_that_is_filled_again_is_not_taken_for_what_it_was():
    def make():
        return Weight(Scratch.apply, (6, 3), (6, 3))

    with pytest.raises(ValueError, match="changes what gradients are made of until the step"):
        looped(make)
    with pytest.warns(UserWarning, match="left to the reference engine"):
        found = trained(make)
    same(found, make)


def gates(x, weight):
    one, other = weight[:, :6], weight[:, 6:]
    first = torch.stack([x @ one[place] for place in range(3)], 1)
    return torch.tanh(first) * torch.sigmoid(torch.stack([x @ other[place] for place in range(3)], 1))


def columns(x, weight):
    parts = [weight[:, place : place + 1].unbind(0) for place in range(3)]
    return torch.cat([sum(x[:, :1] * row for row in part) for part in parts], 1)


def wide(x):
    """As wide as gradients of a layer of one position that are kept as outer products."""
    return x @ torch.linspace(-1, 1, 6 * 32, dtype=x.dtype).reshape(6, 32).cos()


FUNCTIONS = {
    "rows of columns": (gates, (3, 12)),
    "columns one by one": (columns, (6, 3)),
    "scaled, then in another shape": (
        lambda x, v, s: F.linear(wide(x), (v * s).reshape(3, 32) * wide(torch.eye(3, 6, dtype=x.dtype))), (6, 16), (6, 1)
    ),
    "masked, then in another shape": (
        lambda x, v: F.linear(wide(x), v.masked_fill(torch.arange(6)[:, None] % 2 == 0, 0).reshape(3, 32) * wide(torch.eye(3, 6, dtype=x.dtype))), (6, 16)
    ),
    "a norm over the first axis": (
        lambda x, u, v: F.linear(wide(x), u * torch.linalg.vector_norm(v, dim=0)[:, None]), (3, 32), (4, 3)
    ),
    "solved by a parameter": (
        lambda x, a, b: x @ torch.linalg.solve_triangular(a.triu() + 4 * torch.eye(6), b, upper=True), (6, 6), (6, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", [looped, trained])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parts_are_put_where_they_belong(name, way):
    function, *shapes = FUNCTIONS[name]

    def make():
        return Weight(function, *shapes)

    same(way(make), make)


class Chosen(torch.autograd.Function):
    """Its backward pass makes something larger of a sum, and adds what is no longer zero."""

    @staticmethod
    def forward(ctx, weight):
        return weight.expand(3, 6).clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(torch.tensor(True), gradient.sum(0), torch.zeros(3, 6)).mean(0)


class Filled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        zeros = torch.zeros_like(gradient)
        zeros.numpy().fill(1.0)
        return gradient + zeros


class Turned(torch.autograd.Function):
    """Its backward pass copies a sum into memory whose axes lie in another order."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(gradient.t().contiguous()).t().copy_(gradient)


@pytest.mark.parametrize("way", [looped, trained])
def test_a_sum_that_is_copied_into_another_order(way):
    def make():
        return Weight(lambda x, weight: F.linear(x, Turned.apply(weight)), (3, 6))

    same(way(make), make)


@pytest.mark.parametrize("way", [looped, trained])
def test_a_choice_between_a_sum_and_something_larger(way):
    def make():
        return Weight(lambda x, weight: F.linear(x, Chosen.apply(weight)), (6,))

    same(way(make), make)


def test_what_numpy_has_filled_is_not_zero():
    with pytest.raises(ValueError, match="not linear in a sum over the batch"):
        looped(lambda: Weight(lambda x, weight: F.linear(x, Filled.apply(weight)), (3, 6)))


WRITES = {
    "clamp_": lambda gradient: gradient[0].clamp_(-0.01, 0.01),
    "fill_": lambda gradient: gradient[0].fill_(1.0),
    "sign_": lambda gradient: gradient.view(-1).sign_(),
    "normal_": lambda gradient: gradient[0].normal_(),
    "add_": lambda gradient: gradient[0].add_(1.0),
    "detach": lambda gradient: gradient.detach().clamp_(-0.01, 0.01),
    "foreach": lambda gradient: torch._foreach_clamp_min_([gradient], 0.1),
}


class Hooked(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.write = nn.Parameter(torch.randn(3, 6)), write

    def forward(self, x):
        weight = self.weight * 1
        weight.register_hook(lambda gradient: (self.write(gradient), None)[1])
        return F.linear(x, weight)


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_through_a_view_of_a_sum_is_not_lost(write):
    with pytest.raises(ValueError, match="not linear in a sum over the batch|without a rule"):
        looped(lambda: Hooked(WRITES[write]))


@pytest.mark.parametrize("write", [lambda g: g[0].zero_(), lambda g: g.mul_(0.5), lambda g: g[:, 2].mul_(3.0)])
@pytest.mark.parametrize("way", [looped, trained])
def test_linear_writes_to_a_sum_are_followed(write, way):
    same(way(lambda: Hooked(write)), lambda: Hooked(write))


def test_a_sum_that_is_kept_shows_nothing():
    kept = []
    looped(lambda: Hooked(kept.append))
    assert not kept[0].detach().numpy().any()


def test_a_sum_that_is_kept_is_refused_in_a_later_pass():
    kept = []
    looped(lambda: Hooked(kept.append))
    with pytest.raises(ValueError, match="a sum over the batch"):
        looped(lambda: Weight(lambda x, weight: F.linear(x, weight + kept[0]), (3, 6)))


@pytest.mark.parametrize("way", [looped, trained])
def test_hooks_on_parameters_are_said_not_to_be_called(way):
    def make():
        model = Layers()
        model.first.weight.register_hook(lambda gradient: gradient * 0.5)
        return model

    with pytest.warns(UserWarning, match="hooks on parameters .* are not called"):
        way(make)

"""Is a step on the user's own passes the step that one example at a time would make?"""

import copy
import gc
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import vestige
from loops import LOSS, flat, moved, oracle, plain, private, same_step
from vestige.engines.example_axis.labels import Tracker
from vestige.engines.example_axis.tracked_model import require_unwritten


class Tokens(nn.Module):
    """An embedding, positions shared by all, a class token, attention, a recurrent layer and a tied head."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(9, 8), nn.Embedding(4, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attend, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.recur = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x) + self.places(torch.arange(4, device=x.device))
        h = torch.cat([self.token.expand(len(x), -1, -1), h], dim=1)
        h = h + self.attend(h, h, h, need_weights=False)[0]
        return self.head(self.norm(self.recur(h)[0]).mean(dim=1))[:, :3]


class Custom(nn.Module):
    """Parameters of the user's own: a scale, a number, an RMSNorm, a table, a weight that is normalised first."""

    def __init__(self):
        super().__init__()
        self.scale, self.number = nn.Parameter(torch.rand(5) + 0.5), nn.Parameter(torch.tensor(0.7))
        self.gain, self.table = nn.Parameter(torch.ones(5)), nn.Parameter(torch.randn(3, 3))
        self.map = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))

    def forward(self, x):
        x = x * self.scale + self.number
        x = self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return self.map(x) @ self.table


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(checkpoint(self.body, self.first(x), use_reentrant=False))


class Packed(nn.Module):
    """Sequences of different lengths, packed before a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.first, self.then = nn.LSTM(1, 4, bidirectional=True, batch_first=True), nn.GRU(8, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        lengths = 1 + (x.abs().sum(1) * 10).long() % 5
        packed, _ = self.first(pack_padded_sequence(x[..., None], lengths.cpu(), True, enforce_sorted=False))
        outputs, ends = pad_packed_sequence(packed, batch_first=True)
        again = pack_padded_sequence(outputs.transpose(0, 1).tanh(), ends, enforce_sorted=False)
        again = PackedSequence(again.data * 2, again.batch_sizes, again.sorted_indices, again.unsorted_indices)
        _, last = self.then(again)
        return self.head(torch.cat([last[0], outputs.sum(1)[:, :3] / ends[:, None].to(outputs)], 1))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        with torch.no_grad():
            hidden = self.first(x)
        return self.last(hidden)


def fresh(name):
    torch.manual_seed(4)
    x, y = torch.randn(40, 5), torch.randint(3, (40,))
    if name == "mlp":
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)), (x, y)
    if name == "frozen":
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
        model[0].requires_grad_(False)
        model[2].bias.requires_grad_(False)
        return model, (x, y)
    if name == "cnn":
        layers = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)), (torch.randn(40, 2, 8, 8), y)
    if name == "upsampling":
        layers = [nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1), nn.Tanh(), nn.AvgPool2d(4)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)), (torch.randn(40, 2, 8, 8), y)
    if name == "twice used":
        layer = nn.Linear(5, 5)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3)), (x, y)
    if name == "tokens":
        return Tokens(), (torch.randint(9, (40, 4)), y)
    modules = {"custom": Custom, "checkpointed": Checkpointed, "one layer": lambda: nn.Linear(5, 3)}
    modules["inner custom"] = lambda: nn.Sequential(Custom(), nn.Tanh(), nn.Linear(3, 3))
    modules |= {"no_grad": Frozen, "packed": Packed}
    return modules[name](), (x, y)


NAMES = [
    "mlp", "frozen", "cnn", "upsampling", "twice used", "tokens", "custom", "inner custom", "checkpointed", "one layer",
    "no_grad", "packed",
]  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.everyday("-mlp-mean", "-one layer-sum", "replayed-packed-sum")
def test_a_step_is_the_clipped_sum_of_single_examples(name, reduction):
    model, data = fresh(name)
    _, model, optimizer, loader = private(model, data, loss_reduction=reduction)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name == "packed":
            warnings.filterwarnings("ignore", ".* cannot be captured .*pack.* at .*test_passes.py")
        for x, y in loader:
            same_step(model, optimizer, x, y, lambda m, x, y: LOSS(m(x), y, reduction=reduction))


@pytest.mark.parametrize("method", ["fo-dp-sgd", "dp-auto-clip", "sma-dp-sgd", "dp-sat"])
@pytest.mark.parametrize("name", ["mlp", "tokens", "custom"])
@pytest.mark.everyday(
    "-mlp-fo-dp-sgd",
    "-mlp-dp-auto-clip",
    "-mlp-dp-sat",
    "replayed-mlp-fo-dp-sgd",
    "replayed-mlp-dp-auto-clip",
    "replayed-mlp-sma-dp-sgd",
    "replayed-mlp-dp-sat",
)
def test_epochs_equal_those_of_vestige_train(name, method):
    model, data = fresh(name)
    alone = copy.deepcopy(model)
    options = {
        "method": vestige.make_method(method, max_grad_norm=0.3),
        "noise_multiplier": 1.0,
        "lr": 0.5,
        "reproducible": 3,
    }
    list(vestige.train(alone, LOSS, data, sample_rate=12 / 40, steps=6, delta=1e-3, **options))
    _, model, optimizer, loader = private(model, data, method=method, multiplier=1.0)
    for x, y in (pair for _ in range(2) for pair in loader):

        def closure(x=x, y=y):
            LOSS(model(x), y).backward()

        if method == "dp-sat":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert float((flat(model) - flat(alone)).norm() / flat(alone).norm()) < 1e-3


def test_a_poisoned_example_counts_for_nothing():
    model, (x, y) = fresh("mlp")
    x[7] = torch.inf
    _, model, optimizer, loader = private(model, (x, y), batch=40)
    x, y = next(iter(loader))
    before, sound = flat(model), [pair for pair in zip(x, y, strict=True) if pair[0].isfinite().all()]
    expected = oracle(model, lambda m, x, y: LOSS(m(x), y), sound)
    LOSS(model(x), y).backward()
    optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model), 40), expected, rtol=1e-3, atol=3e-5)


def test_the_users_own_hooks_run_once_and_see_gradients():
    model, data = fresh("mlp")
    _, model, optimizer, loader = private(model, data)
    seen = []
    batches = iter(loader)
    x, y = next(batches)
    LOSS(model(x), y).backward()
    optimizer.step()
    model[0].register_forward_hook(lambda module, inputs, output: seen.append("forward") or 2 * output)
    model[2].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape))
    x, y = next(batches)
    before = flat(model)

    def hooked(m, x, y):
        return LOSS(m[2](m[1](2 * nn.Linear.forward(m[0], x))), y)

    expected = oracle(model, hooked, list(zip(x, y, strict=True)))
    LOSS(model(x), y).backward()
    optimizer.step()
    assert seen == ["forward", (len(x), 3)]
    np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)


def test_dropout_is_that_of_the_users_pass():
    """Also inside a module that holds parameters of its own."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.map = nn.Parameter(torch.rand(5)), nn.Linear(5, 3)

        def forward(self, x):
            return self.map(nn.functional.dropout(x * self.scale, 0.5, self.training) * self.scale)

    torch.manual_seed(1)
    base = Dropping()
    _, model, optimizer, loader = private(copy.deepcopy(base), fresh("mlp")[1])
    optimizer.param_groups[0]["lr"] = 1.0
    for number, (x, y) in enumerate(loader):
        twin, before = plain(model), flat(model)
        torch.manual_seed(number)
        outputs = twin(x)
        rows = []
        for i in range(len(x)):  # the masks are drawn once, for the batch
            found = torch.autograd.grad(
                LOSS(outputs[i : i + 1], y[i : i + 1]), list(twin.parameters()), retain_graph=True
            )
            rows.append(torch.cat([g.ravel() for g in found]))
        rows = torch.stack(rows)
        expected = (rows * (0.3 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 12
        torch.manual_seed(number)
        LOSS(model(x), y).backward()
        optimizer.step()
        torch.testing.assert_close(before - flat(model), expected, rtol=1e-3, atol=1e-5)


def test_bfloat16_autocast_is_close_to_float32():
    model, data = fresh("cnn")
    ends = []
    for dtype in (torch.bfloat16, None):
        _, twin, optimizer, loader = private(copy.deepcopy(model), data)
        for x, y in loader:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = LOSS(twin(x), y)
            loss.backward()
            optimizer.step()
        ends.append(flat(twin) - flat(model))
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 0.03


@pytest.mark.everyday("")
def test_an_evaluating_encoder_takes_no_short_cut():
    """nn.TransformerEncoderLayer has a fast path past its layers when its weights need no gradients."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3))
    data = torch.randn(40, 4, 8), torch.randint(3, (40,))
    _, model, optimizer, loader = private(model, data)
    layer.eval()
    for x, y in loader:
        same_step(model, optimizer, x, y)


class Interrupting(nn.Module):
    def __init__(self, problem):
        super().__init__()
        self.problem, self.armed = problem, False

    def forward(self, x):
        if self.armed:
            raise self.problem
        return x


@pytest.mark.parametrize("problem", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_forward_pass_that_fails_leaves_the_model_as_it_was(problem):
    model, data = fresh("mlp")
    trap = Interrupting(problem)
    _, model, optimizer, loader = private(nn.Sequential(model[0], trap, *model[1:]), data)
    own = {name: id(p) for name, p in model.named_parameters()}
    for number, (x, y) in enumerate(loader):
        trap.armed = number == 1
        if trap.armed:
            with pytest.raises(type(problem)):
                model(x)
            trap.armed = False  # and the batch is used after all
        same_step(model, optimizer, x, y)
        assert {name: id(p) for name, p in model.named_parameters()} == own
        assert not any("forward" in vars(module) for module in model.modules())


def test_what_a_pass_holds_is_free_when_its_loss_is():
    """Without a garbage collection: on a GPU that may come late, and memory is what limits a batch."""
    _, model, optimizer, loader = private(*fresh("mlp"))
    gc.collect()
    gc.disable()
    try:
        alive = []
        for x, y in loader:
            LOSS(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            alive.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert len(set(alive[1:])) == 1


def test_a_backward_pass_that_fails_leaves_nothing():
    model, data = fresh("frozen")
    steps, model, optimizer, loader = private(model, data)
    x, y = next(iter(loader))
    outputs = model(x)

    def fail(*_):
        raise RuntimeError("half way")

    handle = model[2].register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="half way"):
        LOSS(model(x), y).backward()
    handle.remove()
    assert steps.passes._pending == []
    before = flat(model)
    expected = oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
    LOSS(outputs, y).backward()
    optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)


def test_a_step_between_forward_and_backward_is_refused_as_in_ordinary_training():
    model, data = fresh("mlp")
    _, model, optimizer, loader = private(model, data)
    x, y = next(iter(loader))
    outputs = model(x)
    LOSS(model(x), y).backward()
    optimizer.step()
    with pytest.raises((RuntimeError, ValueError), match="modified by an inplace operation|no batch"):
        LOSS(outputs, y).backward()


class TwoInputs(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.left, self.right, self.how = nn.Linear(5, 4), nn.Linear(5, 4), how

    def forward(self, x, other):
        return self.how(self, x, other)


def test_an_input_is_no_constant_if_it_may_hold_examples():
    def everyone(model, x, other):
        return model.left(x) @ model.right(other).t()

    x, y = torch.randn(12, 5), torch.randint(3, (12,))
    model, _, loader = private(TwoInputs(everyone), (x, y))[1:]
    rows = next(iter(loader))[0]
    with pytest.raises(ValueError, match=r"mm at .*test_passes.py:\d+ combines rows of different examples"):
        model(rows, rows)


def test_a_model_that_looks_at_its_examples_is_refused():
    def larger(model, x, other):
        return model.left(x) * (2.0 if float(x.detach().max()) > 1 else 1.0)

    model, _, loader = private(TwoInputs(larger), (torch.randn(12, 5), torch.randint(3, (12,))))[1:]
    rows = next(iter(loader))[0]
    with pytest.raises(ValueError, match=r"test_passes.py:\d+ looks at a value of the examples"):
        model(rows, rows)


def test_a_model_that_writes_examples_into_a_buffer_is_refused():
    def remembers(model, x, other):
        model.seen.copy_(x.detach().sum(0))
        return model.left(x)

    made = TwoInputs(remembers)
    made.register_buffer("seen", torch.zeros(5))
    model, _, loader = private(made, (torch.randn(12, 5), torch.randint(3, (12,))))[1:]
    rows = next(iter(loader))[0]
    with pytest.raises(ValueError, match="buffer 'seen' was changed by the forward pass"):
        model(rows, rows)


def test_a_value_at_which_gradients_are_taken_may_not_hold_examples():
    """It need not be the module's own: a method may ask elsewhere than at the parameters."""
    model, tracker = nn.Linear(3, 3), Tracker()
    elsewhere = {name: p.detach().clone() for name, p in model.named_parameters()}
    require_unwritten(model, tracker.labels, elsewhere)
    tracker.label_rows(elsewhere["weight"], 3, 1)
    with pytest.raises(ValueError, match="parameter 'weight' was changed by the forward pass"):
        require_unwritten(model, tracker.labels, elsewhere)


def test_a_mask_as_long_as_the_batch_is_a_constant():
    def masked(model, x, mask):
        return model.left(x) + (mask @ mask @ model.right(x)[..., None].expand(-1, 4, len(mask)).transpose(1, 2)).sum(1)

    model, _, loader = private(TwoInputs(masked), (torch.randn(12, 5), torch.randint(3, (12,))))[1:]
    rows = next(iter(loader))[0]
    LOSS(model(rows, torch.eye(len(rows))), torch.zeros(len(rows), dtype=torch.long)).backward()


def test_a_call_of_another_form_is_followed_by_itself():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x, shift=None, *, both=False):
            hidden = self.map(x) if shift is None else self.map(x) + shift
            return (self.out(hidden), hidden) if both else self.out(hidden)

    torch.manual_seed(1)
    _, model, optimizer, loader = private(Either(), fresh("mlp")[1])
    ways = [lambda m, x: m(x), lambda m, x: m(x, torch.ones(len(x), 5).to(x)), lambda m, x: m(x, both=True)[0]]
    for number, (x, y) in enumerate(pair for _ in range(2) for pair in loader):
        same_step(model, optimizer, x, y, lambda m, x, y, way=ways[number % 3]: LOSS(way(m, x), y))


WARNED = ("wrapped", "in place", "later", "inner")
"""Of what is compiled around the model's call nothing is said: torch does not trace what is followed."""


@pytest.mark.parametrize(
    "how",
    ["wrapped", "in place", "later", "wrapped later", pytest.param("wrapped step", marks=pytest.mark.slow), "inner"],
)
@pytest.mark.everyday("-wrapped", "-inner")
def test_compiled_models_train_uncompiled(how):
    base, data = fresh("mlp")

    def trained(how):
        model = copy.deepcopy(base)
        given = torch.compile(model, backend="eager") if how == "wrapped" else model
        if how in ("in place", "inner"):
            (model if how == "in place" else model[0]).compile(backend="eager")
        _, given, optimizer, loader = private(given, data, multiplier=1.0)
        if how == "later":
            given.compile(backend="eager")
        if how == "wrapped later":
            given = torch.compile(given, backend="eager")

        def loss(x, y):
            return LOSS(given(x), y)

        if how == "wrapped step":
            loss = torch.compile(loss, backend="eager")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for x, y in loader:
                optimizer.zero_grad()
                loss(x, y).backward()
                optimizer.step()
        assert len([w for w in said if "torch.compile is ignored" in str(w.message)]) == (how in WARNED)
        assert list(model.state_dict()) == list(base.state_dict())
        seen = given.eval()(data[0])  # compiled, where nothing is private
        torch.testing.assert_close(seen, plain(model).eval()(data[0]))
        return flat(model)

    want = trained("not at all")
    got = trained(how)
    torch._dynamo.reset()
    assert torch.equal(got, want)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_vestige_train_of_compiled_models(how):
    base, data = fresh("mlp")
    common = {"method": "fo-dp-sgd", "noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.3, "steps": 4, "lr": 0.1}
    ends = []
    for compiled in (False, True):
        model = copy.deepcopy(base)
        given = torch.compile(model, backend="eager") if compiled and how == "wrapped" else model
        if compiled and how == "in place":
            model.compile(backend="eager")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            list(vestige.train(given, LOSS, data, reproducible=1, **common))
        ends.append(
            (flat(model), ["torch.compile is ignored" in str(w.message) for w in said], list(model.state_dict()))
        )
    torch._dynamo.reset()
    assert torch.equal(ends[0][0], ends[1][0])
    assert [said for _, said, _ in ends] == [[], [True]]
    assert ends[0][2] == ends[1][2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_as_one_example_at_a_time(name):
    model, data = fresh(name)
    _, model, optimizer, loader = private(model.cuda(), data)
    for x, y in loader:
        before = flat(model).cpu()
        expected = oracle(plain(model).cpu(), lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
        optimizer.zero_grad()
        LOSS(model(x.cuda()), y.cuda()).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        gap = np.linalg.norm(moved(before, flat(model).cpu()) - expected) / np.linalg.norm(expected)
        assert gap < 5e-3


def test_a_parameter_frozen_later_stays_where_it_is():
    model, data = fresh("mlp")
    _, model, optimizer, loader = private(model, data, multiplier=1.0)
    for number, (inputs, targets) in enumerate(loader):
        model[0].requires_grad_(number != 1)
        before = [p.detach().clone() for p in model.parameters()]
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        stays = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert stays == ([True, True, False, False] if number == 1 else [False] * 4)


def balanced(logits, labels):
    """None of the usual losses."""
    return nn.functional.cross_entropy(logits, labels) + 0.1 * logits.mean(dim=0).square().sum()


class WithItsLoss(nn.Module):
    """As models for fine-tuning are: the loss of the batch beside the logits."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": balanced(logits, labels), "logits": logits}


def test_a_loss_of_the_whole_batch_can_be_looked_at_but_not_trained_on():
    _, model, optimizer, loader = private(WithItsLoss())
    own = nn.functional.cross_entropy
    for number, (x, y) in enumerate(loader):
        outputs = model(x, labels=y)
        assert float(outputs["loss"].detach()) == pytest.approx(
            float(balanced(outputs["logits"], y).detach()), rel=1e-5
        )
        if number == 0:
            for loss in (outputs["loss"], own(outputs["logits"], y) + 0.1 * outputs["loss"]):
                with pytest.raises(ValueError, match="no row for each example"):
                    loss.backward(retain_graph=True)
            outputs = model(x, labels=y)
        own(outputs["logits"], y).backward()
        optimizer.step()


def test_a_first_batch_of_single_positions_does_not_decide_where_the_examples_are():
    """Of one position, examples and positions in one axis look alike; of four, they do not."""

    class ByPosition(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(3, 4)

        def forward(self, x):
            by_position = torch.tanh(self.map(x.transpose(0, 1).reshape(-1, 3)))
            return by_position.reshape(x.shape[1], len(x), 4).mean(0)

    x, y = torch.randn(60, 4, 3), torch.randint(4, (60,))
    _, model, optimizer, loader = private(ByPosition(), (x, y))
    for positions, (inputs, targets) in zip((1, 4, 1, 3), loader, strict=False):
        same_step(model, optimizer, inputs[:, :positions], targets)

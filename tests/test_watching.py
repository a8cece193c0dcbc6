"""Is a step on the user's own passes the step that a second pass, or one example at a time, would make?"""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import vestige
from conftest import clip_and_sum, make_toy
from vestige import PrivacyEngine

LOSS = nn.functional.cross_entropy
BOUND, LR, BATCH = 0.3, 0.5, 12


def private(model, data=None, *, method="dp-sgd", multiplier=1e-9, optimizer=torch.optim.SGD, **options):
    """Almost without noise, so that a step shows its clipped sum."""
    engine = PrivacyEngine(reproducible=3)
    loader = DataLoader(TensorDataset(*(data or make_toy()[1])), batch_size=BATCH)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer(model.parameters(), lr=LR), data_loader=loader,
        noise_multiplier=multiplier, max_grad_norm=BOUND, method=method, **options,
    )  # fmt: skip
    steps = engine._steps
    steps.again = 0
    run_again = steps.caller.again

    def counted(*arguments):
        steps.again += 1
        return run_again(*arguments)

    steps.caller.again = counted
    return steps, model, optimizer, loader


def twice(steps):
    """Today's way before passes were watched."""
    steps.passes._watch = lambda call: None
    return steps


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters() if p.requires_grad]).clone()


def plain(model):
    """A copy that nobody watches."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    return model


def oracle(model, loss, examples, bound=BOUND):
    """The clipped sum, one example at a time in float64; `loss(model, *example)` of a batch of one."""
    model = plain(model).double()
    rows = []
    for example in examples:
        model.zero_grad()
        loss(model, *(part[None].double() if part.is_floating_point() else part[None] for part in example)).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
        rows.append(np.concatenate([g.numpy().ravel() for g in grads]))
    return clip_and_sum(np.stack(rows), bound)


def moved(before, after):
    """The clipped sum that a step of plain SGD has made."""
    return ((before - after) * BATCH / LR).double().numpy()


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
        layers = [
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3),
            nn.Flatten(),
        ]
        return nn.Sequential(*layers, nn.Linear(16, 3)), (torch.randn(40, 2, 8, 8), y)
    if name == "twice used":
        layer = nn.Linear(5, 5)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3)), (x, y)
    return Tokens(), (torch.randint(9, (40, 4)), y)


NAMES = ["mlp", "frozen", "cnn", "twice used", "tokens"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_clipped_sum_of_single_examples(name, reduction):
    model, data = fresh(name)
    steps, model, optimizer, loader = private(model, data, loss_reduction=reduction)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in loader:
            before = flat(model)
            expected = oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
            LOSS(model(x), y, reduction=reduction).backward()
            assert all(p.grad is None for p in model.parameters()), "a gradient without noise"
            optimizer.step()
            np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
            optimizer.zero_grad()
    assert steps.again == 0


@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd", "dp-auto-clip", "sma-dp-sgd"])
@pytest.mark.parametrize("name", NAMES)
def test_epochs_equal_those_with_a_second_pass(name, method):
    ends = []
    for way in (lambda steps: steps, twice):
        model, data = fresh(name)
        steps, model, optimizer, loader = private(
            model, data, method=method, multiplier=1.0, optimizer=torch.optim.Adam
        )
        way(steps)
        for x, y in [*loader, *loader]:
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()
        ends.append((flat(model), steps.again))
    (watched, none), (second, some) = ends
    assert none == 0 < some
    assert float((watched - second).norm() / second.norm()) < 1e-3


def both(model, data, loop, **options):
    """What a loop makes of a model when its passes are watched, and when they are run again; and the engines' steps."""
    found = []
    for way in (lambda steps: steps, twice):
        twin = copy.deepcopy(model)
        steps, twin, optimizer, loader = private(twin, data, **options)
        way(steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop(twin, optimizer, loader)
        found.append((flat(twin), steps))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-5)
    assert found[0][1].ledger.spent == found[1][1].ledger.spent
    assert not torch.equal(found[0][0], flat(model))
    return found[0][1]


def accumulated(model, optimizer, loader):
    for number, (x, y) in enumerate(loader):
        LOSS(model(x), y).backward()
        if number % 2:
            optimizer.step()


def forwards_first(model, optimizer, loader):
    for x, y in loader:
        one, other = model(x), model(2 * x)
        LOSS(other, y).backward()
        LOSS(one, y).backward()
        optimizer.step()


def one_backward_of_two(model, optimizer, loader):
    for x, y in loader:
        (LOSS(model(x), y) + model(2 * x).square().sum(1).mean()).backward()
        optimizer.step()


def two_losses(model, optimizer, loader):
    for x, y in loader:
        outputs = model(x)
        LOSS(outputs, y).backward(retain_graph=True)
        outputs.square().sum(1).mean().backward()
        optimizer.step()


def looked_at(model, optimizer, loader):
    """Evaluation in training mode, in evaluation mode, and steps with nothing to step on."""
    for x, y in loader:
        model(x)
        LOSS(model(x), y).backward()
        model(3 * x).sum()
        model.eval()
        model(x).sum().backward()
        model.train()
        with torch.no_grad():
            model(x)
        optimizer.step()
        optimizer.step()


def closures(model, optimizer, loader):
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = LOSS(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def left_early(model, optimizer, loader):
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            LOSS(model(x), y).backward()
            if number == 1:
                break
            optimizer.step()


def mixing(model, optimizer, loader):
    """A loss that is no sum over examples: what comes back to each output is still what is used."""
    for x, y in loader:
        outputs = model(x)
        (LOSS(outputs, y) + outputs.mean(0).square().sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [accumulated, forwards_first, one_backward_of_two, two_losses, looked_at, closures, left_early, mixing])  # fmt: skip
def test_whatever_loops_do(loop):
    model, data = fresh("mlp")
    assert both(model, data, loop).again == 0


@pytest.mark.parametrize("loop", [forwards_first, one_backward_of_two, two_losses, looked_at, mixing])
def test_whatever_loops_do_in_parts(loop):
    model, data = fresh("mlp")
    assert both(model, data, loop, max_physical_batch_size=5).again == 0


def test_a_method_that_asks_elsewhere():
    model, data = fresh("mlp")
    assert both(model, data, closures, method="dp-sat").again == 0


def test_two_losses_of_one_pass_are_clipped_apart():
    model, data = fresh("mlp")
    steps, model, optimizer, loader = private(model, data)
    x, y = next(iter(loader))
    before, examples = flat(model), list(zip(x, y, strict=True))
    expected = oracle(model, lambda m, x, y: LOSS(m(x), y), examples)
    expected += oracle(model, lambda m, x, y: m(x).square().sum(), examples)
    outputs = model(x)
    LOSS(outputs, y).backward(retain_graph=True)
    outputs.square().sum(1).mean().backward()
    with pytest.warns(UserWarning, match="2 times"):
        optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)


def test_what_several_passes_left_is_not_held_at_once():
    model, data = fresh("mlp")
    steps, model, optimizer, loader = private(model, data)
    held = []
    for x, y in loader:
        LOSS(model(x), y).backward()
        held.append(len(steps.gathered.waiting))
    assert held == [1] * len(held)
    assert len(held) > 2


def test_an_empty_batch():
    model, data = fresh("mlp")
    steps, model, optimizer, loader = private(model, data)
    for x, y in (next(iter(loader)), (torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)), next(iter(loader))):
        before = flat(model)
        LOSS(model(x), y).backward()
        optimizer.step()
        assert flat(model).isfinite().all()
        assert len(x) == 0 or not torch.equal(flat(model), before)
    assert steps.passes.second_passes is None


def test_a_poisoned_example_counts_for_nothing():
    model, (x, y) = fresh("mlp")
    steps, model, optimizer, _ = private(model)
    before = flat(model)
    expected = oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x[1:9], y[1:9], strict=True)))
    poisoned = x[:9].clone()
    poisoned[0] = torch.inf
    LOSS(model(x[:9]), y[:9])  # rehearsed on something sound
    LOSS(model(poisoned), y[:9]).backward()
    optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
    assert steps.again == 0


def test_the_users_own_hooks_run_once_and_see_gradients():
    model, data = fresh("mlp")
    steps, model, optimizer, loader = private(model, data)
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    optimizer.step()
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append("forward") or 2 * output)
    model[2].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape))
    before = flat(model)

    def hooked(m, x, y):
        return LOSS(m[2](m[1](2 * nn.Linear.forward(m[0], x))), y)

    expected = oracle(model, hooked, list(zip(x, y, strict=True)))
    LOSS(model(x), y).backward()
    optimizer.step()
    assert seen == ["forward", (len(x), 3)]
    assert steps.again == 0
    np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)


def test_a_loss_of_what_a_hook_caught_is_part_of_the_gradient():
    model, data = fresh("mlp")
    caught = {}
    steps, model, optimizer, loader = private(model, data)
    model[0].register_forward_hook(lambda module, inputs, output: caught.update(hidden=output.clone()))
    x, y = next(iter(loader))
    before = flat(model)

    def loss(m, x, y):
        return LOSS(m[2](m[1](m[0](x))), y) + nn.Linear.forward(m[0], x).square().sum(1).mean()

    expected = oracle(model, loss, list(zip(x, y, strict=True)))
    (LOSS(model(x), y) + caught["hidden"].square().sum(1).mean()).backward()
    optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)


def test_nothing_before_the_model_gets_a_gradient():
    model, data = fresh("mlp")
    _, model, optimizer, loader = private(model, data)
    before = nn.Linear(5, 5)
    for x, y in loader:
        LOSS(model(before(x)), y).backward()
        optimizer.step()
    assert before.weight.grad is None


def test_dropout_is_that_of_the_users_pass():
    model, data = fresh("mlp")
    model = nn.Sequential(*model, nn.Dropout(0.5))

    def loop(model, optimizer, loader):
        for number, (x, y) in enumerate(loader):
            torch.manual_seed(number)
            model(x)
            LOSS(model(x), y).backward()
            optimizer.step()

    assert both(model, data, loop).again == 0


def test_bfloat16_autocast_is_watched_and_float16_is_run_again():
    model, data = fresh("cnn")

    def loop(dtype):
        def body(model, optimizer, loader):
            for x, y in loader:
                with torch.autocast("cpu", dtype):
                    loss = LOSS(model(x).float(), y)
                loss.backward()
                optimizer.step()

        return body

    ends = []
    for dtype in (torch.bfloat16, torch.float16, None):
        steps, twin, optimizer, loader = private(copy.deepcopy(model), data)
        if dtype is None:
            for x, y in loader:
                LOSS(twin(x), y).backward()
                optimizer.step()
        else:
            loop(dtype)(twin, optimizer, loader)
        ends.append((flat(twin) - flat(model), steps.again))
    assert [again == 0 for _, again in ends] == [True, False, True]
    for end, _ in ends[:2]:
        assert float((end - ends[2][0]).norm() / ends[2][0].norm()) < 0.03


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 3)
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


class Custom(nn.Module):
    """A module whose gradient no rule knows."""

    def __init__(self):
        super().__init__()
        self.scale, self.map = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x):
        return self.map(x * self.scale)


class Without(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        with torch.no_grad():
            hidden = self.first(x)
        return self.last(hidden)


ODD = {
    "checkpointed": (lambda: Checkpointed(False), "ran under hooks on saved tensors"),
    "custom": (Custom, "has no rule of its own"),
    "inner custom": (lambda: nn.Sequential(Custom(), nn.Tanh(), nn.Linear(3, 3)), "has no rule of its own"),
    "one layer": (lambda: nn.Linear(5, 3), "was not called as in the rehearsal"),
    "no_grad": (Without, "ran without gradients"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_what_is_in_doubt_is_run_again_and_said_once(name):
    torch.manual_seed(2)
    build, reason = ODD[name]
    steps, model, optimizer, loader = private(build(), fresh("mlp")[1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in loader:
            before = flat(model)
            expected = oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            assert all(p.grad is None for p in model.parameters()), "a gradient without noise"
            optimizer.step()
            np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
    assert len([w for w in said if "runs the model a second time" in str(w.message)]) == 1
    assert reason in steps.passes.second_passes
    assert steps.again == len(list(loader))


def test_an_evaluating_encoder_takes_no_short_cut():
    """nn.TransformerEncoderLayer has a fast path past its layers when its weights need no gradients."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3))
    data = torch.randn(40, 4, 8), torch.randint(3, (40,))
    steps, model, optimizer, loader = private(model, data)
    layer.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in loader:
            before = flat(model)
            expected = oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
            LOSS(model(x), y).backward()
            optimizer.step()
            np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=5e-5)


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
    steps, model, optimizer, loader = private(nn.Sequential(model[0], trap, *model[1:]), data)
    own = {name: id(p) for name, p in model.named_parameters()}
    for number, (x, y) in enumerate(loader):
        trap.armed = number == 1
        if trap.armed:
            with pytest.raises(type(problem)):
                model(x)
            continue
        before = flat(model)
        expected = oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
        LOSS(model(x), y).backward()
        optimizer.step()
        assert {name: id(p) for name, p in model.named_parameters()} == own
        assert not any("forward" in vars(module) for module in model.modules())
        np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
    assert steps.again == 0


def test_an_interrupted_pass_is_closed_without_a_loader():
    model, data = fresh("mlp")
    trap = Interrupting(KeyboardInterrupt())
    steps, model, optimizer, loader = private(nn.Sequential(*model, trap), data, poisson_sampling=False)
    x, y = next(iter(loader))
    LOSS(model(x), y)
    trap.armed = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    trap.armed = False
    with pytest.raises(ValueError, match="interrupted"):
        model(x)
    before = flat(model)
    expected = oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
    LOSS(model(x), y).backward()
    optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)


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
    assert steps.gathered.waiting == []
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
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        LOSS(outputs, y).backward()


def test_copies_evaluate_and_do_not_train():
    model, data = fresh("mlp")
    steps, model, optimizer, loader = private(model, data)
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    twin = copy.deepcopy(model)
    assert torch.equal(twin.eval()(x), model.eval()(x))
    with pytest.raises(ValueError, match="copy of a private model"):
        twin.train()(x)
    model.train()
    optimizer.step()
    assert not torch.equal(twin.eval()(x), model.eval()(x))


def test_a_call_of_another_form_is_run_again():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x, shift=None, *, both=False):
            hidden = self.map(x) if shift is None else self.map(x) + shift
            return (self.out(hidden), hidden) if both else self.out(hidden)

    torch.manual_seed(1)
    steps, model, optimizer, loader = private(Either(), fresh("mlp")[1])
    ways = [
        lambda m, x, n: m(x), lambda m, x, n: m(x, torch.ones(n, 5).to(x)), lambda m, x, n: m(x, both=True)[0],
        lambda m, x, n: m(x),
    ]  # fmt: skip
    counts = []
    for way, (x, y) in zip(ways, [*loader, *loader], strict=False):
        before = flat(model)
        expected = oracle(model, lambda m, x, y: LOSS(way(m, x, len(x)), y), list(zip(x, y, strict=True)))  # noqa: B023
        LOSS(way(model, x, len(x)), y).backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
        counts.append(steps.again)
    assert counts == [0, 1, 2, 2]


@pytest.mark.parametrize("how", ["wrapped", "in place", "later", "inner"])
def test_compiled_models_train_uncompiled_and_say_so_once(how):
    base, data = fresh("mlp")

    def trained(how):
        model = copy.deepcopy(base)
        given = torch.compile(model, backend="eager") if how == "wrapped" else model
        if how in ("in place", "inner"):
            (model if how == "in place" else model[0]).compile(backend="eager")
        steps, given, optimizer, loader = private(given, data, multiplier=1.0)
        if how == "later":
            given.compile(backend="eager")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for x, y in [*loader, *loader]:
                optimizer.zero_grad()
                LOSS(given(x), y).backward()
                optimizer.step()
        assert steps.again == 0
        assert list(model.state_dict()) == list(base.state_dict())
        seen = given.eval()(data[0])  # compiled, where nothing is private
        torch.testing.assert_close(seen, plain(model).eval()(data[0]))
        return flat(model), [str(w.message) for w in said]

    want, nothing = trained("not at all")
    got, said = trained(how)
    torch._dynamo.reset()
    assert torch.equal(got, want)
    assert nothing == []
    assert ["compiled" in line for line in said] == [True]


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
        ends.append((flat(model), ["compiled" in str(w.message) for w in said], list(model.state_dict())))
    torch._dynamo.reset()
    assert torch.equal(ends[0][0], ends[1][0])
    assert [said for _, said, _ in ends] == [[], [True]]
    assert ends[0][2] == ends[1][2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_as_one_example_at_a_time(name):
    model, data = fresh(name)
    steps, model, optimizer, loader = private(model.cuda(), data)
    for x, y in loader:
        before = flat(model).cpu()
        expected = oracle(plain(model).cpu(), lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
        optimizer.zero_grad()
        LOSS(model(x.cuda()), y.cuda()).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        gap = np.linalg.norm(moved(before, flat(model).cpu()) - expected) / np.linalg.norm(expected)
        assert gap < 5e-3
    assert steps.again == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dropout_on_a_gpu_is_that_of_the_users_pass():
    model, (x, y) = fresh("mlp")

    def loop(model, optimizer, loader):
        for number, (x, y) in enumerate(loader):
            torch.manual_seed(number)
            model(x.cuda())
            LOSS(model(x.cuda()), y.cuda()).backward()
            optimizer.step()

    assert both(nn.Sequential(*model, nn.Dropout(0.5)).cuda(), (x, y), loop).again == 0


# --- what would move without noise, or by more than the bound --------------------------------------------------------


@pytest.mark.parametrize("watched", [True, False])
def test_a_parameter_unfrozen_later_gets_no_gradient_of_its_own(watched):
    model, data = fresh("frozen")
    steps, model, optimizer, loader = private(model, data)
    if not watched:
        twice(steps)
    inputs, targets = next(iter(loader))
    LOSS(model(inputs), targets).backward()
    optimizer.step()
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="'0.weight' became trainable after make_private"):
        model(inputs)
    assert model[0].weight.grad is None
    model[0].requires_grad_(False)
    LOSS(model(inputs), targets).backward()  # the refusal left nothing open
    optimizer.step()


def test_a_parameter_frozen_later_stays_where_it_is():
    model, data = fresh("mlp")
    steps, model, optimizer, loader = private(model, data, multiplier=1.0)
    for number, (inputs, targets) in enumerate(loader):
        model[0].requires_grad_(number != 1)
        before = [p.detach().clone() for p in model.parameters()]
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        stays = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert stays == ([True, True, False, False] if number == 1 else [False] * 4)


def test_a_foreign_parameter_added_to_the_optimizer_is_refused_before_anything_is_charged():
    model, data = fresh("mlp")
    steps, model, optimizer, loader = private(model, data)
    temperature = nn.Parameter(torch.ones(()))
    optimizer.add_param_group({"params": [temperature]})
    inputs, targets = next(iter(loader))
    LOSS(model(inputs) * temperature, targets).backward()
    with pytest.raises(ValueError, match="without noise"):
        optimizer.step()
    assert not steps.ledger.spent
    assert float(temperature.detach()) == 1.0


class Folded(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(5, 3), how

    def forward(self, x):
        return self.how(self.linear(x["inputs"] if isinstance(x, Box) else x))


class Box:
    """A batch that hides its tensors."""

    def __init__(self, inputs):
        self.inputs = inputs

    def __getitem__(self, name):
        return getattr(self, name)


@pytest.mark.parametrize("case", ["two views", "two batches", "positions as rows", "pooled", "hidden"])
def test_rows_that_are_no_examples_are_refused(case):
    torch.manual_seed(0)
    data = torch.randn(40, 4, 5), torch.randint(3, (40,))
    how = {"positions as rows": lambda h: h.flatten(0, 1), "pooled": lambda h: h.mean(dim=(0, 1))[None]}
    steps, model, optimizer, loader = private(Folded(how.get(case, lambda h: h.mean(dim=1))), data)
    batches = iter(loader)
    inputs, _ = next(batches)
    given = {
        "two views": lambda: torch.cat([inputs, inputs]),
        "two batches": lambda: torch.cat([inputs, next(batches)[0]]),
        "hidden": lambda: Box(inputs),
    }
    with warnings.catch_warnings(), pytest.raises(ValueError, match="every example must be one row"):
        warnings.simplefilter("ignore")
        model(given.get(case, lambda: inputs)())


def test_a_torch_that_cannot_tell_checkpointing_runs_models_again(monkeypatch):
    monkeypatch.setattr("vestige.engines.taps.hooks_on_saved_tensors", None)  # as before torch 2.8
    model, data = fresh("mlp")
    steps, model, optimizer, loader = private(model, data)
    inputs, targets = next(iter(loader))
    before = flat(model)
    want = oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(inputs, targets, strict=True)))
    with pytest.warns(UserWarning, match="cannot tell whether a layer is checkpointed"):
        LOSS(model(inputs), targets).backward()
    optimizer.step()
    assert steps.again == 1
    np.testing.assert_allclose(moved(before, flat(model)), want, atol=1e-4)


def test_a_frozen_batch_norm_that_is_set_to_train_later_is_refused_before_it_sees_anything():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    model[1].requires_grad_(False).eval()
    data = torch.randn(40, 5), torch.randint(3, (40,))
    steps, model, optimizer, loader = private(model, data)
    for number, (inputs, targets) in enumerate(loader):
        model.train(number == 1)
        model.training = True
        if number == 1:
            with pytest.raises(ValueError, match="mixes the examples"):
                model(inputs)
            continue
        LOSS(model(inputs), targets).backward()
        optimizer.step()
    assert not model[1].running_mean.any()
    assert not model[1].num_batches_tracked

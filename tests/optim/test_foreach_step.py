"""Are direct moves torch's own, bit for bit, and does anything that waits for the optimizer's step still get it?"""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import vestige
from vestige.engines.bookkeeping import BookKeeping
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat
from vestige.methods.registry import make_method
from vestige.optim.optimizers.foreach_step import Moves, balanced

CONSTANTS = (1.0, 0.7071067811865476, 0.25, 1.0, 0.08838834764831845)


class Counting(TorchDispatchMode):
    """Counts what would be a kernel on a GPU: every operation that is no view."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function is not torch.ops.aten.detach.default:
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(3, 2 + size, generator=generator)) for size in range(len(CONSTANTS))]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(3, 2 + size, generator=generator) for size in range(len(CONSTANTS))]


def scales_for(params, balance):
    return {id(p): scale for p, scale in zip(params, CONSTANTS, strict=True)} if balance else None


def moved(kind, options, balance, groups, directly, device="cpu"):
    params = [nn.Parameter(p.detach().to(device)) for p in parameters()]
    given = [{"params": params[:2], "lr": 0.3}, {"params": params[2:]}] if groups else params
    optimizer, scales = kind(given, lr=0.05, **options), scales_for(params, balance)
    moves, calls = Moves(optimizer), []
    own = kind.step
    for step in range(5):
        for p, gradient in zip(params, gradients(step), strict=True):
            p.grad = gradient.to(device)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        if directly:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kind, "step", lambda self: calls.append(1) or own(self))
                moves.step(scales)
        else:
            with balanced(optimizer, scales):
                optimizer.step()
    state = [value for p in params for _, value in sorted(optimizer.state.get(p, {}).items())]
    return params, state, len(calls)


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("balance", [False, True], ids=["plain", "balanced"])
@pytest.mark.parametrize(
    ("kind", "options", "left"),
    [
        (SGD, {}, 0),
        (SGD, {"foreach": True}, 0),
        (SGD, {"momentum": 0.9}, 5),
        (SGD, {"weight_decay": 0.1}, 5),
        (Adam, {"foreach": True}, 1),
        (Adam, {"foreach": True, "weight_decay": 0.1}, 5),
        (AdamW, {"foreach": True}, 1),
        (AdamW, {"foreach": True, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-3}, 1),
        (AdamW, {"foreach": True, "amsgrad": True}, 5),
        (AdamW, {"fused": True}, 5),
        (AdamW, {}, 5),
    ],
)
def test_a_direct_move_is_torchs_own_bit_for_bit(kind, options, left, balance, groups):
    ours, our_state, calls = moved(kind, options, balance, groups, directly=True)
    torchs, its_state, _ = moved(kind, options, balance, groups, directly=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
    assert len(our_state) == len(its_state)
    assert all(torch.equal(a, b) for a, b in zip(our_state, its_state, strict=True))
    assert calls == left  # how many steps were left to the optimizer: of Adam the first, which makes its state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize("balance", [False, True], ids=["plain", "balanced"])
def test_a_direct_move_on_a_gpu_is_torchs_own_bit_for_bit(kind, balance):
    ours, our_state, calls = moved(kind, {}, balance, True, directly=True, device="cuda")
    torchs, its_state, _ = moved(kind, {}, balance, True, directly=False, device="cuda")
    assert calls == (0 if kind is SGD else 1)
    for a, b in zip([*ours, *our_state], [*torchs, *its_state], strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_kernel_moves_parameters_of_different_constants():
    params = [nn.Parameter(p.detach().cuda()) for p in parameters()]
    for p in params:
        p.grad = torch.ones_like(p)
    moves = Moves(SGD(params, lr=0.1))
    with Counting() as counting:
        moves.step(scales_for(params, True))
        first = len(counting.seen)
        moves.step(scales_for(params, True))
    assert len(counting.seen) == first + 1


def one_step(prepare):
    """How often the optimizer's own step ran, of one that could be direct otherwise."""
    params, calls = parameters(), []
    optimizer = SGD(params, lr=0.1)
    for p, gradient in zip(params, gradients(0), strict=True):
        p.grad = gradient
    found = prepare(optimizer, params, calls)
    before = [p.detach().clone() for p in params]
    Moves(optimizer).step(found)
    moved = [not torch.equal(p, old) for p, old in zip(params, before, strict=True)]
    return calls, moved, optimizer


def test_hooks_run_and_a_scheduler_hears_of_the_step():
    def hooked(optimizer, params, calls):
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def for_all(optimizer, params, calls):
        handles.append(register_optimizer_step_post_hook(lambda *_: calls.append("after")))

    def scheduled(optimizer, params, calls):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)

    handles = []
    assert one_step(hooked)[0] == ["before", "after"]
    try:
        assert one_step(for_all)[0] == ["after"]
    finally:
        handles[0].remove()
    assert one_step(scheduled)[2]._opt_called


def test_what_has_no_gradient_stays_and_what_changed_since_is_seen():
    def without(optimizer, params, calls):
        params[1].grad = None

    assert one_step(without)[1] == [True, False, True, True, True]
    params = parameters()
    optimizer = SGD(params[:2], lr=0.1)
    moves = Moves(optimizer)
    for p in params:
        p.grad = torch.ones_like(p)
    moves.step()
    optimizer.add_param_group({"params": params[2:]})
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
    optimizer.param_groups[0]["params"][-1].grad = torch.ones(2)
    before = [p.detach().clone() for p in params]
    moves.step({id(p): 0.5 for p in params})
    assert all(torch.allclose(p, old - 0.05) for p, old in zip(params, before, strict=True))
    assert torch.allclose(optimizer.param_groups[0]["params"][-1], torch.full((2,), -0.1))


def counted(name, balance, options):
    torch.manual_seed(0)
    widths = (6, 24, 3, 96, 2)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    method = make_method(name, balance=balance)
    method = vestige.Method(**{**vars(method), "rule": type(method.rule)(method.rule.optimizer, options)})
    data = torch.randn(12, 6), torch.randint(2, (12,))
    records = iter(
        vestige.train(
            model,
            nn.functional.cross_entropy,
            data,
            method=method,
            sample_rate=1.0,
            steps=9,
            noise_multiplier=1.0,
            delta=1e-3,
            lr=0.1,
            cuda_graphs=False,
            secure_mode=False,
            reproducible=0,
        )
    )
    for _ in range(4):
        next(records)
    with Counting() as counting:
        next(records)
    records.close()
    return len(counting.seen), len(set(make_method(name, balance=balance).layout(model).constants_of_all.values()))


@pytest.mark.parametrize("name", ["dp-sgd", "fo-dp-sgd", "dp-adamw"])
def test_a_balanced_step_launches_what_a_plain_one_does(name):
    """On a GPU a small model's step is launches: no more of them but one move for each constant of SGD."""
    plain, _ = counted(name, "plain", {"foreach": True})
    relative, constants = counted(name, "relative", {"foreach": True})
    assert constants >= 3
    assert relative <= plain + (0 if name == "dp-adamw" else constants - 1)


def test_a_balanced_sum_takes_as_many_operations_as_a_plain_one():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = torch.randn(5, 6), torch.randint(3, (5,))
    names = [name for name, _ in model.named_parameters()]
    took = []
    for constants in (None, dict(zip(names, CONSTANTS, strict=False))):
        layout = Layout.of(copy.deepcopy(model), constants=constants)
        engine, into = BookKeeping(model, nn.functional.cross_entropy, layout), torch.zeros(layout.size)
        point = {name: p.detach() for name, p in layout.parameters(model).items()}
        engine(batch, point, Flat(1.0), into)
        with Counting() as counting:
            engine(batch, point, Flat(1.0), into)
        took.append(len(counting.seen))
    assert took[1] == took[0]


def test_a_parameter_that_was_replaced_in_its_group_is_the_one_that_moves():
    first, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=1.0)
    moves = Moves(optimizer)
    first.grad, other.grad = torch.ones(2), torch.ones(2)
    moves.step()
    optimizer.param_groups[0]["params"][0] = other
    moves.step()
    assert torch.equal(first, -torch.ones(2))
    assert torch.equal(other, -torch.ones(2))

"""Is the loss of a token, taken without its probabilities, torch's cross entropy? In value, gradient and memory."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import vestige
from vestige.fused import class_axis
from vestige.fused import token_losses as fused
from vestige.fused.class_axis import classes_last
from vestige.mechanism.losses import model_losses
from vestige.mechanism.losses.model_losses import each_token, losses_of, next_token
from vestige.tf32 import triton_available

IGNORED = -100
gpu = pytest.mark.skipif(not triton_available(), reason="needs a GPU and Triton")


def scores_and_targets(rows, classes, device, dtype=torch.float32):
    torch.manual_seed(0)
    scores = 5 * torch.randn(rows, classes, device=device)
    scores[1, : classes - 3] = -torch.inf  # all but a few words forbidden, whole blocks of them
    targets = torch.randint(classes, (rows,), device=device)
    targets[1], targets[2] = classes - 1, IGNORED
    return scores.to(dtype), targets


def losses_and_gradients(losses_of, scores, targets):
    scores = scores.clone().requires_grad_()
    losses = losses_of(scores, targets)
    losses.backward(torch.linspace(0.5, 2, len(losses), device=scores.device, dtype=losses.dtype))
    return losses.detach(), scores.grad


def torchs(scores, targets):
    return F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="none")


class Kernels:
    """What the Triton kernels find, in torch."""

    @staticmethod
    def log_totals(scores):
        most = scores.float().amax(dim=1)
        return most, (scores.float() - most[:, None]).exp().sum(dim=1).log()

    @staticmethod
    def gradients(scores, targets, most, rest, signal):
        shares = (scores.float() - most[:, None] - rest[:, None]).exp()
        shares -= F.one_hot(targets.clamp(min=0), scores.shape[1])
        return torch.where(targets[:, None] < 0, 0, shares * signal[:, None]).to(scores.dtype)


@pytest.fixture
def fuses(monkeypatch):
    """Without a GPU what is around the kernels is tested."""
    if not triton_available():
        monkeypatch.setitem(sys.modules, "vestige.fused.triton_tokens", Kernels)
        monkeypatch.setattr(vestige.fused, "triton_tokens", Kernels, raising=False)
        for place in (fused, class_axis, model_losses):
            monkeypatch.setattr(place, "fuses", lambda scores: True)
    return "cuda" if triton_available() else "cpu"


@pytest.mark.parametrize("options", [{}, {"ignore_index": 3}, {"reduction": "sum"}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("inside", [True, False, "bias"])
def test_a_loop_trains_on_fused_losses_as_on_torchs(options, inside, fuses):
    """The model's own loss, or one of its scores: clipped gradients against autograd's, one example at a time."""
    torch.manual_seed(2)

    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 1030)

        def forward(self, ids, targets):
            if inside == "bias":  # scores that depend on no example, of targets that do
                return F.cross_entropy(self.head.bias.expand(targets.numel(), -1), targets.flatten(), **options)
            scores = self.head(torch.tanh(self.embed(ids)))
            return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), **options) if inside else scores

    model = Writer().to(fuses)
    ids, targets = torch.randint(30, (12, 5), device=fuses), torch.randint(1030, (12, 5), device=fuses)
    targets[:, 4] = options.get("ignore_index", IGNORED)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = vestige.PrivacyEngine(reproducible=3).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1e-7, max_grad_norm=0.7,
        data_loader=DataLoader(TensorDataset(ids, targets), batch_size=12), poisson_sampling=False,
        loss_reduction=options.get("reduction", "mean"),
    )  # fmt: skip
    loop, optimizer, loader = own
    for x, y in loader:
        loss = loop(x, y)
        if not inside:
            loss = F.cross_entropy(loss.transpose(1, 2), y, **options)
        if not inside:
            fused_ones = [node for node in reached(loss) if "token_losses" in node.name()]
            assert bool(fused_ones) == ("label_smoothing" not in options)
        loss.backward()
        optimizer.step()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    exact, plain = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in before.items()}, Writer().double()
    plain.to(fuses).load_state_dict(before)
    for x, y in zip(ids, targets, strict=True):
        scores = plain.head(torch.tanh(plain.embed(x)))
        scores = 0 * scores + plain.head.bias if inside == "bias" else scores
        found = torch.autograd.grad(F.cross_entropy(scores, y, **options), list(plain.parameters()))
        norm = torch.cat([each.flatten() for each in found]).norm()
        for name, each in zip(exact, found, strict=True):
            exact[name] += each * min(1, 0.7 / float(norm))
    for name in exact:
        assert torch.allclose(12 * moved[name].double(), exact[name], atol=2e-5), name


def test_fused_losses_of_others_targets_are_refused(fuses):
    model = nn.Linear(4, 1030).to(fuses)
    model, optimizer, loader = vestige.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(1030, (40,))), batch_size=12),
    )  # fmt: skip
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="not each row's own"):
        F.cross_entropy(model(x.to(fuses)), y.to(fuses).flip(0)).backward()


def reached(loss):
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return seen


def test_a_gradient_of_fused_losses_is_differentiated_again(fuses):
    scores, targets = torch.randn(4, 1030, device=fuses), torch.randint(1030, (4,), device=fuses)
    targets[1] = IGNORED
    found = []
    for losses in (lambda s: losses_of(s, targets, IGNORED), lambda s: torchs(s, targets)):
        s = scores.clone().requires_grad_()
        (first,) = torch.autograd.grad((losses(s) ** 2).sum(), s, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), s)[0])
    torch.testing.assert_close(*found)


def test_on_a_cpu_it_is_torchs():
    scores, targets = scores_and_targets(5, 2000, "cpu")
    assert torch.equal(losses_of(scores, targets, IGNORED), torchs(scores, targets))


@gpu
@pytest.mark.parametrize("classes", [1024, 4096, 5003, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_value_and_gradient_are_those_in_float64(classes, dtype):
    scores, targets = scores_and_targets(37, classes, "cuda", dtype)
    losses, gradient = losses_and_gradients(lambda s, t: losses_of(s, t, IGNORED), scores, targets)
    want, wanted = losses_and_gradients(torchs, scores.double(), targets)
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    rough = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-7}
    torch.testing.assert_close(gradient.double(), wanted, **rough)
    assert gradient.dtype == dtype
    assert not gradient[2].any()
    few = losses_and_gradients(lambda s, t: losses_of(s, t, IGNORED), scores[:4], targets[:4])
    assert torch.equal(few[0], losses[:4])  # no other row has a say, to the last bit


@gpu
def test_on_a_gpu_it_takes_little_more_than_half_of_the_memory():
    scores, targets = scores_and_targets(512, 32000, "cuda")
    taken = []
    for own in (lambda s, t: losses_of(s, t, IGNORED), torchs):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses_and_gradients(own, scores, targets)
        taken.append(torch.cuda.max_memory_allocated() - before)
    assert taken[0] <= 0.6 * taken[1]


@gpu
def test_inside_transforms_and_for_few_classes_it_is_torchs():
    scores, targets = scores_and_targets(5, 2000, "cuda")
    each = torch.func.vmap(lambda s, t: losses_of(s[None], t[None], IGNORED)[0])(scores, targets)
    torch.testing.assert_close(each, torchs(scores, targets))
    few = losses_of(scores[:, -20:].clone().requires_grad_(), targets.clamp(0, 19), IGNORED)
    assert "token_losses" not in few.grad_fn.name()


@pytest.mark.parametrize("loss", [next_token, each_token])
def test_an_examples_loss_is_a_mean_over_its_own_tokens(loss):
    logits, labels = torch.randn(3, 6, 5), torch.randint(5, (3, 6))
    labels[0, 2:] = labels[1, 5:] = IGNORED
    whole = loss({"logits": logits}, {"labels": labels}, None)
    alone = [loss({"logits": logits[i : i + 1]}, {"labels": labels[i : i + 1]}, None) for i in range(3)]
    torch.testing.assert_close(whole, torch.cat(alone))


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"weight": torch.arange(1.0, 8.0)}, {"ignore_index": 3}]
)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_classes_side_by_side_are_scored_as_they_are(options, reduction):
    torch.manual_seed(0)
    scores, targets = torch.randn(5, 9, 7), torch.randint(7, (5, 9))
    for given in (scores.transpose(1, 2), scores[:, :-1].transpose(1, 2), scores.transpose(1, 2).contiguous()):
        own = targets[:, : given.shape[2]]
        expected = F.cross_entropy(given, own, **options, reduction=reduction)
        found = classes_last(F.cross_entropy, given, own, **options, reduction=reduction)
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_loss_of_ones_own_takes_its_softmax_along_the_last_axis():
    """Of rows by themselves, in a loop of `vestige.train`: along any other axis it takes a GPU many times as long."""
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    training = vestige.train(
        model, lambda scores, x: F.cross_entropy(scores[:, :-1].transpose(1, 2), x[:, 1:]),
        (torch.randint(11, (12, 8)),) * 2, noise_multiplier=1.0, delta=1e-3, batch_size=6, steps=2, max_grad_norm=1.0,
    )  # fmt: skip
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        training.run()
    shapes = [each.input_shapes[0] for each in seen.events() if each.name == "aten::_log_softmax"]
    assert shapes
    assert all(shape[-1] == 11 for shape in shapes)

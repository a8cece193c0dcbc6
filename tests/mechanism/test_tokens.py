"""Is the loss of a token, taken without its probabilities, torch's cross entropy? In value, gradient and memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import vestige
from vestige.mechanism.losses.criteria import classes_last
from vestige.mechanism.losses.model_losses import each_token, next_token
from vestige.mechanism.losses.tokens import TokenLosses, token_losses
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


def test_on_a_cpu_it_is_torchs():
    scores, targets = scores_and_targets(5, 2000, "cpu")
    assert torch.equal(token_losses(scores, targets, IGNORED), torchs(scores, targets))


@gpu
@pytest.mark.parametrize("classes", [1024, 4096, 5003, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_value_and_gradient_are_those_in_float64(classes, dtype):
    scores, targets = scores_and_targets(37, classes, "cuda", dtype)
    losses, gradient = losses_and_gradients(lambda s, t: token_losses(s, t, IGNORED), scores, targets)
    want, wanted = losses_and_gradients(torchs, scores.double(), targets)
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    rough = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-7}
    torch.testing.assert_close(gradient.double(), wanted, **rough)
    assert gradient.dtype == dtype
    assert not gradient[2].any()
    few = losses_and_gradients(lambda s, t: token_losses(s, t, IGNORED), scores[:4], targets[:4])
    assert torch.equal(few[0], losses[:4])  # no other row has a say, to the last bit


@gpu
def test_on_a_gpu_it_takes_little_more_than_half_of_the_memory():
    scores, targets = scores_and_targets(512, 32000, "cuda")
    taken = []
    for losses_of in (lambda s, t: token_losses(s, t, IGNORED), torchs):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses_and_gradients(losses_of, scores, targets)
        taken.append(torch.cuda.max_memory_allocated() - before)
    assert taken[0] <= 0.6 * taken[1]


@gpu
def test_inside_transforms_and_for_few_classes_it_is_torchs():
    scores, targets = scores_and_targets(5, 2000, "cuda")
    each = torch.func.vmap(lambda s, t: token_losses(s[None], t[None], IGNORED)[0])(scores, targets)
    torch.testing.assert_close(each, torchs(scores, targets))
    few = token_losses(scores[:, -20:].clone().requires_grad_(), targets.clamp(0, 19), IGNORED)
    assert not isinstance(few.grad_fn, TokenLosses._backward_cls)


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

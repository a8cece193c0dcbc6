"""Are priors made of nobody's data, and does a private run start from one: first its head, then all of it?"""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import vestige
from commands import as_json
from commands import vestige as command
from vestige.layout import Layout
from vestige.mechanism.groups import STILL, HeadAlone, HeadFirst, HeadLast
from vestige.priced_questions import SampledGaussian
from vestige.priors import generators
from vestige.priors.contrastive import Plan, contrast, make, views
from vestige.tasks.features.starting_weights import read
from vestige.training.job import Job, method_of

SMALL = Plan(generator="random-network", network="wrn10-1", size=8, images=32, steps=3, batch=16, lr=0.1)


@pytest.mark.parametrize("name", generators.GENERATORS)
def test_generators_draw_from_random_numbers_alone(name):
    draw = generators.generator(name)
    one, again = (draw(6, 16, torch.Generator().manual_seed(4)) for _ in range(2))
    assert one.shape == (6, 3, 16, 16)
    assert torch.equal(one, again)
    assert one.isfinite().all()
    assert 0 <= one.min() < one.max() <= 1
    other = draw(6, 16, torch.Generator().manual_seed(5))
    assert not torch.equal(one, other)
    spread = one.flatten(2).std(dim=-1).mean()
    assert spread > 0.02  # something is to be seen


def test_an_unknown_generator_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'dead-leaves'"):
        generators.generator("deadleaves")


def test_the_loss_is_alignment_and_uniformity():
    one, other = (nn.functional.normalize(torch.randn(5, 3, dtype=torch.float64), dim=1) for _ in range(2))
    aligned = sum(float(((a - b) ** 2).sum()) for a, b in zip(one, other, strict=True)) / 5
    uniform = 0.0
    for points in (one, other):
        pairs = [float(((points[i] - points[j]) ** 2).sum()) for i in range(5) for j in range(i)]
        uniform += np.log(np.mean(np.exp(-2 * np.array(pairs)))) / 2
    assert float(contrast(one, other)) == pytest.approx(aligned + uniform)


def test_views_are_of_their_own_image():
    images = torch.rand(4, 3, 8, 8)
    changed = images.clone()
    changed[0] = 0.5
    one, other = (views(each, torch.Generator().manual_seed(1)) for each in (images, changed))
    assert torch.equal(one[1:], other[1:])
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one, images)


def test_a_prior_is_a_function_of_its_plan_and_says_what_it_is_made_of():
    one, again = make(SMALL), make(SMALL)
    assert one.content == again.content
    assert make(replace(SMALL, seed=1)).content != one.content
    assert "no row of anybody's data" in one.statement["made_of"]
    assert (one.statement["generator"], one.statement["steps"], one.statement["images"]) == ("random-network", 3, 32)
    assert not any(name.startswith("7.") for name in one.weights)  # the head is the task's own
    with pytest.raises(ValueError, match="steps=0 must be a whole number"):
        replace(SMALL, steps=0)


# --- the head first --------------------------------------------------------------------------------------------------


def test_the_head_alone_is_bounded_and_the_rest_is_dropped():
    clip = HeadAlone(0.5)
    norms = torch.tensor([[3.0, 0.2], [0.1, 4.0]], dtype=torch.float64)
    assert clip.factors(norms).tolist() == [[0.0, 1.0], [0.0, 0.125]]
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    layout = Layout.of(model, HeadLast())
    noise = clip.sensitivity(layout)
    assert noise.tolist() == [0.5 * STILL] * 8 + [0.5] * 6
    # Whitened by the noise, one example moves the sum by at most 1, whatever its gradient is.
    gradient = torch.randn(14, dtype=torch.float64) * 100
    by_group = torch.stack([gradient[:8].norm(), gradient[8:].norm()])[None]
    moved = layout.expand(clip.factors(by_group)[0]) * gradient / noise.double()
    assert float(moved.norm()) <= 1 + 1e-12


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


DATA = torch.randn(200, 5), torch.randint(3, (200,))
GIVEN = {"noise_multiplier": 1.0, "sample_rate": 0.2, "delta": 1e-4, "lr": 0.5, "reproducible": 7}


def trained(clip, steps, grouping=True, **changes):
    model = two_layers()
    method = replace(vestige.dp_sgd(), clip=clip, grouping=HeadLast() if grouping else None)
    given = {**GIVEN, **changes}
    training = vestige.train(model, nn.functional.cross_entropy, DATA, method=method, steps=steps, **given)
    list(training)
    return model, training


def test_first_steps_train_the_head_as_if_the_rest_were_frozen_and_the_others_everything():
    before = two_layers()
    model, training = trained(HeadFirst(1.0, 4, 3.0), 4)
    assert (model[0].weight - before[0].weight).abs().max() < 1e-7
    assert not torch.equal(model[2].weight, before[2].weight)
    # The same as a model whose other layer is frozen, at three times the rate, but for the noise, which is drawn for
    # other coordinates: without noise to speak of, the same numbers.
    quiet = {"noise_multiplier": 1e-6, "secure_mode": False}
    model, _ = trained(HeadFirst(1.0, 4, 3.0), 4, **quiet)
    frozen = two_layers()
    frozen[0].requires_grad_(False)
    list(
        vestige.train(
            frozen, nn.functional.cross_entropy, DATA, method=vestige.dp_sgd(), steps=4, **{**GIVEN, **quiet, "lr": 1.5}
        )
    )
    assert torch.allclose(model[2].weight, frozen[2].weight, atol=1e-5)
    assert not torch.allclose(frozen[2].weight, before[2].weight, atol=1e-2)
    whole, training = trained(HeadFirst(1.0, 4, 3.0), 6)
    assert (whole[0].weight - before[0].weight).abs().max() > 1e-3
    assert Counter(training.ledger.spent) == Counter({SampledGaussian(0.2, 1.0): 6})
    assert training.guarantee().epsilon is None  # seeded noise protects nobody


def test_without_steps_for_the_head_it_is_the_flat_clip_bit_for_bit():
    one, _ = trained(HeadFirst(1.0, 0), 3)
    other, _ = trained(vestige.dp_sgd().clip, 3, grouping=False)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_run_that_stops_among_the_heads_steps_goes_on_where_it_was(tmp_path):
    whole, _ = trained(HeadFirst(1.0, 4, 3.0), 6)
    model = two_layers()
    method = replace(vestige.dp_sgd(), clip=HeadFirst(1.0, 4, 3.0), grouping=HeadLast())
    arguments = {"method": method, "steps": 6, "out": tmp_path / "run", **GIVEN}
    training = vestige.train(model, nn.functional.cross_entropy, DATA, **arguments)
    steps = training.steps()
    next(steps), next(steps)
    steps.close()
    training.ledger.close()
    fresh = two_layers()
    list(vestige.train(fresh, nn.functional.cross_entropy, DATA, resume=True, **arguments))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), fresh.parameters(), strict=True))


def test_what_has_no_head_or_no_steps_is_refused():
    with pytest.raises(ValueError, match="no linear layer that could be its head"):
        HeadLast()(nn.Sequential(nn.Conv2d(1, 1, 1)))
    with pytest.raises(ValueError, match="no trainable parameters beside a trainable head"):
        HeadLast()(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="steps=-1"):
        HeadFirst(1.0, -1)
    with pytest.raises(ValueError, match="head_pace=0"):
        HeadFirst(1.0, 1, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "dp-adamw"}, "goes with SGD: others \\(dp-adamw\\) move what is not asked"),
        ({"method": "dp-muon"}, "goes with SGD"),
        ({"optimizer": "adam"}, "goes with SGD: others \\(adam\\)"),
        ({"method": "sma-dp-sgd"}, "needs one flat clip, which sma-dp-sgd has not"),
        ({"head_lr": -1.0}, "head_lr=-1.0 must be positive"),
        ({"steps": 3}, "head_steps=4 must be at most steps=3"),
        ({"head_steps": 0, "head_lr": 1.0}, "give head_steps, or leave it out"),
    ],
)
def test_head_steps_that_would_move_the_rest_are_refused(changes, words):
    job = Job(**{"task": "digits-mlp", "method": "dp-sgd", "lr": 0.1, "head_steps": 4, **changes})
    with pytest.raises(ValueError, match=words):
        method_of(job)


def test_noise_of_the_heads_steps_is_that_of_the_plan():
    """Releases of nothing but noise: sigma times the bound on the head, next to none elsewhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 100), nn.Linear(100, 40))
    data = torch.zeros(50, 40), torch.zeros(50, dtype=torch.long)
    seen = []

    def loss(outputs, targets):
        return outputs.sum() * 0.0

    method = replace(vestige.dp_sgd(), clip=HeadFirst(0.5, 1), grouping=HeadLast())
    training = vestige.train(
        model, loss, data, method=method, noise_multiplier=2.0, sample_rate=0.1, steps=1, delta=1e-3, lr=1.0
    )
    training.curator.observer = lambda answer: seen.append(answer.release.total)
    list(training)
    head = seen[0][4100:]
    deviation = float(head.std())
    assert len(head) == 4040
    assert abs(deviation - 1.0) < 4 / (2 * 4040) ** 0.5
    assert not abs(deviation - 1.5) < 4 * 1.5 / (2 * 4040) ** 0.5
    assert seen[0][:4100].abs().max() < 1e-6


# --- from the terminal -----------------------------------------------------------------------------------------------


def test_a_prior_is_made_shown_and_trained_from(tmp_path):
    path = tmp_path / "prior.pt"
    flags = ("--generator", "random-network", "--model", "wrn10-1", "--size", "8", "--images", "16", "--batch", "8")
    made = as_json("prior", "make", *flags, "--steps", "2", "--out", path)
    assert as_json("prior", "show", path)["sha256"] == made["sha256"] == read(path).content
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nfrom vestige.tasks import models\n\n\ndef make():\n"
        "    x, y = torch.rand(60, 3, 8, 8), torch.randint(2, (60,))\n"
        "    return models.network('wrn10-1', (3, 8, 8), 2), nn.functional.cross_entropy, (x[9:], y[9:]), (x[:9], y[:9])\n"
    )
    flags = (
        "train",
        "--recipe",
        "images-prior",
        "--task",
        f"{tmp_path}/mine.py:make",
        "--epsilon",
        "8",
        "--prior",
        path,
    )
    flags += ("--delta", "1e-3", "--steps", "2", "--head-steps", "2", "--augment", "2")
    code, _, error = command(*flags, "--average", "last", "--out", tmp_path / "run")
    assert code == 0, error
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    assert written["prior"]["sha256"] == made["sha256"]
    assert written["prior"]["generator"] == "random-network"
    model = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    # Both steps were the head's: the rest is the prior, but for noise that is next to none.
    for name, value in read(path).weights.items():
        assert torch.allclose(model[name], value, atol=1e-6), name
    assert command("verify", tmp_path / "run")[0] == 0


def test_mistakes_about_priors_name_their_flag(tmp_path):
    (tmp_path / "there").write_text("")
    for words, message in (
        (("bake",), "must be make or show"),
        (("show",), "give the file to show"),
        (("show", tmp_path / "there"), "is no file of `vestige prior make`"),
        (("show", tmp_path / "there", "--steps", "3"), "--steps cannot be given too"),
        (("make", "--out", tmp_path / "there"), "exists: name another file"),
        (("make", "--generator", "people", "--out", tmp_path / "p"), "no such generator"),
        (("make", "--channels", "2", "--out", tmp_path / "p"), "--channels=2 must be 1 or 3"),
    ):
        code, _, error = command("prior", *words)
        assert code == 2, words
        assert message in error, error

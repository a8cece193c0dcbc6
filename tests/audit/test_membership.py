"""Do attacks on membership find what is there to be found? Scores whose law is known, and small models."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.nn import functional

from vestige import tasks
from vestige.audit import inference
from vestige.audit.inference import infer_membership, nonprivate_fit, nonprivate_gradient_norms
from vestige.audit.made_up_task import stand_in
from vestige.audit.membership import by_shadow_models, lira, logit_confidence, losses, output_features, success
from vestige.methods.registry import make_method

N, SHIFT, HARDNESS = 4000, 1.2, 3.0


def normal_models(models, random, spread=1.0):
    """Each model's number for an example is normal around the example's own mean, higher by SHIFT where it was in."""
    hard = np.random.default_rng(5).normal(0, HARDNESS, N)
    members = np.stack([random.permutation(N) < N // 2 for _ in range(models)])
    members[models // 2 :] = ~members[: models - models // 2]
    return hard + SHIFT * members + spread * random.normal(size=(models, N)), members


@pytest.mark.parametrize("models", [16, 80])  # one variance for all, one for each
def test_lira_attains_the_area_of_two_normals(models):
    random = np.random.default_rng(1)
    seen, members = normal_models(models, random)
    (target,), (inside,) = normal_models(1, random)
    # Means of models/2 estimates each: with few models the middle between them is uncertain, and little else.
    uncertain = 1 + 1 / models
    wanted = norm.cdf(SHIFT / np.sqrt(2 * uncertain))
    found = success([lira(target, seen, members)], [inside])
    assert found.area.estimate == pytest.approx(wanted, abs=0.03)
    offline = success([lira(target, seen, members, online=False)], [inside])
    assert offline.area.estimate == pytest.approx(norm.cdf(SHIFT / np.sqrt(2 * (1 + 2 / models))), abs=0.03)
    # One threshold for all examples does not know which are hard.
    threshold = success([target], [inside]).area.estimate
    assert threshold == pytest.approx(norm.cdf(SHIFT / np.sqrt(2 * (1 + HARDNESS**2))), abs=0.03)
    assert found.area.estimate > threshold + 0.1


def test_lira_detects_as_often_as_two_normals_allow():
    random = np.random.default_rng(2)
    seen, members = normal_models(200, random)
    targets, inside = normal_models(4, random)
    found = success([lira(each, seen, members) for each in targets], list(inside))
    assert found.detected_at_1_percent.estimate == pytest.approx(norm.cdf(SHIFT + norm.ppf(0.01)), abs=0.03)
    assert found.detected_at_1_permille.estimate == pytest.approx(norm.cdf(SHIFT + norm.ppf(0.001)), abs=0.02)


def test_lira_is_the_log_likelihood_ratio():
    """Of one example with 32 models on each side, by scipy."""
    random = np.random.default_rng(3)
    members = np.arange(64)[:, None] % 2 == 0
    seen = random.normal(size=(64, 1)) * np.where(members, 0.5, 2.0) + members
    a, b = seen[::2, 0], seen[1::2, 0]
    wanted = norm.logpdf(0.3, a.mean(), a.std(ddof=1)) - norm.logpdf(0.3, b.mean(), b.std(ddof=1))
    assert lira([0.3], seen, members) == pytest.approx([wanted])
    assert lira([0.3], seen, members, online=False) == pytest.approx([(0.3 - b.mean()) / b.std(ddof=1)])


def test_with_few_models_all_examples_share_one_variance_for_each_side():
    random = np.random.default_rng(8)
    members = np.arange(8)[:, None] % 2 == np.arange(3) % 2
    seen, target = random.normal(size=(8, 3)), random.normal(size=3)
    sides = [np.stack([seen[members[:, i] == side, i] for i in range(3)], axis=1) for side in (True, False)]
    a, b = ((side.mean(axis=0), np.sqrt(side.var(axis=0, ddof=1).mean())) for side in sides)
    assert lira(target, seen, members) == pytest.approx(norm.logpdf(target, *a) - norm.logpdf(target, *b))


@pytest.mark.parametrize("attack", ["lira", "lira-offline", "shadow"])
def test_members_that_were_shuffled_are_guessed(attack):
    random = np.random.default_rng(4)
    seen, members = normal_models(16, random)
    targets, inside = normal_models(6, random)
    wrong = [random.permutation(each) for each in inside]
    if attack != "shadow":
        scores = [lira(each, seen, members, online=attack == "lira") for each in targets]
    else:
        scores = [by_shadow_models(each[:, None], seen[..., None], members) for each in targets]
    assert success(scores, list(inside)).area.low > 0.55
    assert success(scores, wrong).area.estimate == pytest.approx(0.5, abs=0.02)
    assert success(scores, wrong, 0.999).area.low < 0.5 < success(scores, wrong, 0.999).area.high


def test_a_classifier_finds_the_feature_that_tells():
    """Two features, of which one is noise and the other tells: the area is that of the other."""
    random = np.random.default_rng(6)
    members = random.random((8, N)) < 0.5
    seen = np.stack([random.normal(size=(8, N)) * 10, random.normal(size=(8, N)) - SHIFT * members], axis=-1)
    found = success([by_shadow_models(seen[0], seen[1:], members[1:])], [members[0]])
    assert found.area.estimate == pytest.approx(norm.cdf(SHIFT / np.sqrt(2)), abs=0.02)


def test_numbers_of_outputs_are_those_of_torch():
    logits, labels = torch.randn(20, 5, dtype=torch.float64) * 4, torch.randint(5, (20,))
    sure = logits.softmax(1)[torch.arange(20), labels]
    assert losses(logits, labels) == pytest.approx(functional.cross_entropy(logits, labels, reduction="none").numpy())
    assert logit_confidence(logits, labels) == pytest.approx(torch.logit(sure).numpy())
    features = output_features(logits, labels)
    assert features[:, :3] == pytest.approx(logits.softmax(1).topk(3).values.numpy())
    assert (features[:, 4] == (logits.argmax(1) == labels).numpy()).all()


def test_intervals_over_targets_hold_the_mean():
    """Of targets that differ by luck, the interval of the mean area holds the truth nineteen times in twenty."""
    random, held = np.random.default_rng(7), 0
    inside = np.arange(400) < 200
    for _ in range(200):
        scores = [random.normal(size=400) + SHIFT * inside for _ in range(5)]
        area = success(scores, [inside] * 5).area
        held += area.low < norm.cdf(SHIFT / np.sqrt(2)) < area.high
    assert 180 <= held <= 199


def test_targets_that_agree_are_no_certainty():
    """No detection in any of two targets: the far end is that of so few examples."""
    scores, inside = np.arange(100.0), np.arange(100) < 50
    found = success([scores, scores], [inside, inside])
    assert found.detected_at_1_percent.estimate == 0
    assert 0 < found.detected_at_1_percent.high < 0.3
    assert found.area.estimate == 0


def test_gradient_norms_are_those_of_one_example_at_a_time():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5), nn.Tanh())
    model.append(nn.Linear(5, 3))
    inputs, targets = torch.randn(7, 1, 4, 4), torch.randint(3, (7,))
    found = nonprivate_gradient_norms(model, functional.cross_entropy, inputs, targets)
    assert found.shape == (7, 4)
    for row, each, target in zip(found, inputs, targets, strict=True):
        model.zero_grad()
        functional.cross_entropy(model(each[None]), target[None]).backward()
        assert torch.allclose(
            row, torch.stack([p.grad.norm() for p in [*model[4].parameters(), *model[6].parameters()]])
        )


# --- models ----------------------------------------------------------------------------------------------------------


def memorable(seed=0):
    """Random labels in many dimensions: whoever was in is remembered, and nobody else."""
    random = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(120, 40, generator=random), torch.randint(10, (120,), generator=random)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 10))
    return tasks.Task("memorable", model, functional.cross_entropy, (inputs, targets), (inputs, targets), 10, "")


@pytest.mark.slow
def test_a_model_that_memorises_is_vulnerable_and_a_private_one_is_not():
    task = memorable()
    before = [p.clone() for p in task.model.parameters()]
    exposed = infer_membership("non-private", task=task, shadows=4, targets=3, examples=120, steps=200, lr=0.01)
    assert exposed.nonprivate_accuracy_of_members > 0.98
    assert exposed.nonprivate_accuracy_of_others < 0.4
    assert exposed.epsilon is None
    for name in ("loss", "shadow", "lira-offline", "gradients"):
        assert exposed.attacks[name].area.estimate > 0.85, name
    private = infer_membership(
        make_method("dp-sgd"),
        task=task,
        epsilon=1,
        delta=1e-3,
        shadows=4,
        targets=3,
        examples=120,
        steps=10,
        sample_rate=0.1,
    )
    assert 0.9 < private.epsilon <= 1
    assert all(found.area.estimate < 0.65 for found in private.attacks.values())
    assert all((a == b).all() for a, b in zip(before, task.model.parameters(), strict=True))


def test_every_example_is_in_half_of_the_shadow_models_and_every_model_has_half(monkeypatch):
    seen, observe = [], inference.observe

    def noted(task, model, members, **more):
        seen.append(members)
        return observe(task, model, members, **more)

    monkeypatch.setattr(inference, "observe", noted)
    infer_membership("non-private", task="stand-in", attacks=["loss"], shadows=6, targets=2, examples=31, steps=1)
    members = np.stack(seen)
    assert members.shape == (8, 30)
    assert (members.sum(axis=1) == 15).all()
    assert (members[:6].sum(axis=0) == 3).all()
    assert len(np.unique(members, axis=0)) == 8


def test_an_inference_that_is_stopped_judges_the_targets_that_are_done():
    settings = {"task": "stand-in", "attacks": ["loss"], "shadows": 2, "targets": 3, "examples": 20, "steps": 2}
    found = infer_membership("non-private", **settings, on_models=lambda done: done < 3)
    assert (found.targets, found.wanted) == (1, 3)
    with pytest.raises(KeyboardInterrupt):
        infer_membership("non-private", **settings, on_models=lambda done: False)


def test_plain_training_sees_every_row_once_an_epoch():
    task, seen = stand_in(20), []

    def noted(outputs, targets):
        seen.append(len(targets))
        return functional.cross_entropy(outputs, targets)

    nonprivate_fit(task.model, noted, task.train, 0.3, 8)
    assert seen == [6, 6, 6, 2] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attacks": ["magic"]}, "magic"),
        ({"attacks": []}, "attacks="),
        ({"shadows": 3}, "shadows=3"),
        ({"shadows": 2}, "shadows=2"),
        ({"targets": 0}, "targets=0"),
        ({"examples": 4}, "examples=4"),
        ({"epsilon": 1}, "adds no noise"),
        ({"method": "dp-sgd"}, "epsilon=None"),
        ({"data": "x.npz"}, "data="),
        ({"confidence": 2}, "confidence=2"),
    ],
)
def test_what_cannot_be_done_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        infer_membership(**{"method": "non-private", "task": "stand-in", **change})


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no shadow model with them"):
        lira([0.0, 0.0], np.zeros((4, 2)), np.zeros((4, 2), dtype=bool))
    with pytest.raises(ValueError, match="shadows: the shape"):
        lira([0.0], np.zeros((4, 2)), np.zeros((4, 2), dtype=bool))
    with pytest.raises(ValueError, match="diverged"):
        losses([[np.nan, 0.0]], [0])
    with pytest.raises(ValueError, match="labels"):
        losses([[0.0, 0.0]], [2])
    with pytest.raises(ValueError, match="members"):
        success([[1.0, 2.0]], [[True, True]])

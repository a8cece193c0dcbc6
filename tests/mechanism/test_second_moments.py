"""Is the sum of second moments bounded, priced and solved as it says?"""

import hashlib
from math import exp, sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import vestige
from commands import vestige as command
from vestige import accounting
from vestige.engines.least_squares_moments import SecondMoments, layout_of
from vestige.mechanism.clipping import Flat
from vestige.mechanism.curator import Curator
from vestige.methods.registry import METHODS, SOLVERS, make_method
from vestige.optim.gradient_query_points import LeastSquares, ridge_solution
from vestige.randomness.sum_and_release_types import Release
from vestige.tasks.models import NARROW, Projection, Unit, network
from vestige.training.run import Settings, _check_solvable
from vestige.training.verify import verify

CLASSES, WIDTH = 3, 5
SILENT = 1e-7


def head(width=WIDTH, classes=CLASSES):
    return nn.Linear(width, classes, bias=False)


def examples(rows=40, width=WIDTH, classes=CLASSES, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, width, generator=generator) * scale
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long()


def summed(inputs, labels, clip=None, classes=CLASSES):
    model = head(inputs.shape[1], classes)
    into = torch.zeros(layout_of(model).size, dtype=torch.float64)
    norms = SecondMoments(model)((inputs, labels), {}, clip or Flat(1.0), into)
    return into, norms[:, 0]


def one_by_one(inputs, labels, bound=1.0, classes=CLASSES):
    """Each example's vector, the upper triangle weighted by sqrt(2), written out, clipped by itself."""
    found = []
    for x, label in zip(inputs.double(), labels, strict=True):
        y = -torch.ones(classes, dtype=torch.float64) / classes
        y[label] += 1
        outer = torch.outer(x, x)
        upper = torch.cat([outer.diagonal(), sqrt(2) * outer[tuple(torch.triu_indices(len(x), len(x), 1))]])
        vector = torch.cat([upper, torch.outer(x, y).flatten()]) / sqrt(1 + float(y @ y))
        found.append(vector * min(1.0, bound / float(vector.norm())))
    return torch.stack(found)


def as_triangle(total, width=WIDTH):
    """The same vector of a whole matrix of second moments."""
    second, cross = total[: width * width].view(width, width), total[width * width :]
    assert torch.allclose(second, second.t(), atol=1e-12)
    upper = sqrt(2) * second[tuple(torch.triu_indices(width, width, 1))]
    return torch.cat([second.diagonal(), upper, cross])


# --- sensitivity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_the_sum_is_that_of_clipped_vectors_one_by_one(scale, bound):
    inputs, labels = examples(scale=scale)
    expected = one_by_one(inputs, labels, bound)
    total, norms = summed(inputs, labels, Flat(bound))
    assert torch.allclose(as_triangle(total), expected.sum(0), rtol=1e-10, atol=1e-10)
    assert torch.allclose(norms.clamp(max=bound), expected.norm(dim=1), rtol=1e-10)


@pytest.mark.parametrize("scale", [0.2, 1.0, 1e6])
def test_no_neighbour_moves_the_sum_by_more_than_the_bound(scale):
    inputs, labels = examples(rows=20, scale=scale)
    whole, _ = summed(inputs, labels)
    for left_out in range(len(inputs)):
        kept = torch.arange(len(inputs)) != left_out
        without, _ = summed(inputs[kept], labels[kept])
        assert (whole - without).norm() <= 1 + 1e-9


def test_a_row_of_length_one_has_exactly_the_bound_whatever_its_class():
    """So noise of the bound is neither too little nor too much."""
    for classes in (2, 10):
        rows = nn.functional.normalize(torch.randn(classes, 4, dtype=torch.float64), dim=1)
        into, norms = summed(rows, torch.arange(classes), classes=classes)
        assert norms == pytest.approx(1.0, abs=1e-12)
        for row, label in zip(rows, range(classes), strict=True):
            alone, _ = summed(row[None], torch.tensor([label]), classes=classes)
            assert float(alone.norm()) == pytest.approx(1.0, abs=1e-12)
        assert into.norm() > 1


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_is_not_finite_contributes_nothing(broken):
    inputs, labels = examples()
    worse = torch.cat([inputs, torch.full((1, WIDTH), broken)])
    total, norms = summed(worse, torch.cat([labels, labels[:1]]))
    assert torch.equal(total, summed(inputs, labels)[0])
    assert norms[-1] == torch.inf


@pytest.mark.parametrize("label", [-1, CLASSES, -100])
def test_a_label_that_is_no_class_contributes_nothing(label):
    inputs, labels = examples()
    worse = torch.cat([inputs, torch.ones(1, WIDTH)]), torch.cat([labels, torch.tensor([label])])
    assert torch.equal(summed(*worse)[0], summed(inputs, labels)[0])


def test_an_empty_batch_has_no_norms():
    assert summed(torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.long))[1].shape == (0,)


# --- the law of the noise ----------------------------------------------------------------------------------------------


def test_the_mean_of_matrix_and_transpose_is_a_weighted_triangle_in_law():
    """Variance 1 on the diagonal and 1/2 beside it, as of an upper triangle of sqrt(2) x_i x_j with noise 1."""
    noise = torch.randn(40_000, 3, 3, generator=torch.Generator().manual_seed(0))
    symmetric = (noise + noise.transpose(1, 2)) / 2
    assert symmetric.var(dim=0) == pytest.approx(torch.eye(3).numpy() / 2 + 0.5, rel=0.05)


def test_what_is_released_has_the_noise_that_is_priced():
    """Rows of zeros: what is released of them is noise, of the multiplier's deviation and not of 2/3 or 3/2 of it."""
    model = head(60, 2)
    data = torch.zeros(50, 60), torch.zeros(50, dtype=torch.long)
    training = vestige.train(model, None, data, method="least-squares", noise_multiplier=2.0, delta=1e-3)
    seen = []
    training.curator.observer = lambda answer: seen.append(answer.release.total.double())
    list(training)
    (noise,) = seen
    assert len(noise) == 60 * 60 + 60 * 2
    for deviation, fits in ((2.0, True), (2.0 * 2 / 3, False), (3.0, False)):
        assert (abs(noise.std() / deviation - 1) < 5 / sqrt(2 * len(noise))) == fits
    assert abs(noise.mean()) < 5 * 2 / sqrt(len(noise))


def test_the_price_is_the_gaussian_mechanisms_closed_form():
    def delta_of(z, epsilon):
        """Balle and Wang 2018, theorem 8, of noise over sensitivity z."""
        return norm.cdf(0.5 / z - epsilon * z) - exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)

    model, data = head(), examples()
    for epsilon in (0.5, 3.0):
        training = vestige.train(model, None, data, method="least-squares", epsilon=epsilon, delta=1e-5)
        multiplier = training.plan.noise_multiplier
        assert training.facts.coordinates == WIDTH * (WIDTH + CLASSES)  # so many numbers have noise
        assert delta_of(multiplier, epsilon) <= 1e-5
        assert delta_of(multiplier * 0.995, epsilon) > 1e-5
        list(training)
        assert sum(training.ledger.spent.values()) == 1
        assert epsilon * 0.99 < training.guarantee().epsilon <= epsilon
        assert accounting.epsilon(training.ledger.spent, 1e-5) == training.guarantee().epsilon


# --- the solution ------------------------------------------------------------------------------------------------------


def test_without_noise_it_is_torchs_least_squares():
    rows = nn.functional.normalize(examples(rows=300)[0], dim=1)
    labels = examples(rows=300)[1]
    model = head()
    list(vestige.train(model, None, (rows, labels), method="least-squares", noise_multiplier=SILENT, delta=1e-4))
    targets = nn.functional.one_hot(labels, CLASSES).double() - 1 / CLASSES
    expected = torch.linalg.lstsq(rows.double(), targets).solution
    assert torch.allclose(model.weight.double(), expected.t(), atol=1e-5)


def test_the_ridge_is_the_public_one():
    inputs, labels = examples(rows=200)
    total, _ = summed(inputs, labels)
    release = Release(total.float(), 2.0, 200.0)
    weight = torch.randn(CLASSES, WIDTH)
    answer, _ = LeastSquares(ridge=0.5).ask(lambda at: release, {"weight": weight}, {})
    second, cross = total.split([WIDTH**2, WIDTH * CLASSES])
    penalty = 0.5 * 2.0 * sqrt(2 * WIDTH) * torch.eye(WIDTH)
    expected = torch.linalg.solve(second.view(WIDTH, WIDTH) + penalty, cross.view(WIDTH, CLASSES)).t()
    assert torch.allclose(weight - answer.total.view_as(weight) / 200, expected.float(), atol=1e-5)


def test_the_noises_largest_eigenvalue_is_what_the_ridge_counts_in():
    noise = torch.randn(400, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.linalg.eigvalsh((noise + noise.t()) / 2).max() == pytest.approx(sqrt(2 * 400), rel=0.05)


def test_negative_eigenvalues_are_noise():
    second, cross = torch.diag(torch.tensor([4.0, -3.0])).double(), torch.ones(2, 1).double()
    assert ridge_solution(second, cross, 1.0).flatten().tolist() == pytest.approx([0.2, 1.0])
    assert ridge_solution(second, cross, 0.0).flatten().tolist() == pytest.approx([0.25, 0.0])


def test_a_noised_matrix_is_made_symmetric_by_both_its_halves():
    second, cross = torch.tensor([[5.0, 1.0], [2.0, 5.0]]).double(), torch.ones(2, 1).double()
    expected = torch.linalg.solve(torch.tensor([[6.0, 1.5], [1.5, 6.0]]).double(), cross)
    assert torch.allclose(ridge_solution(second, cross, 1.0), expected)


def test_a_longer_row_is_an_example_of_less_weight():
    """Weighted least squares, in float64, with the weights that the clip gives."""
    inputs, labels = examples(rows=300, scale=2.0)
    model = head()
    list(vestige.train(model, None, (inputs, labels), method="least-squares", noise_multiplier=SILENT, delta=1e-4))
    lengths, spread = inputs.double().square().sum(1), 1 - 1 / CLASSES
    weights = (lengths * (lengths + spread) / (1 + spread)).sqrt().reciprocal().clamp(max=1.0)
    targets = nn.functional.one_hot(labels, CLASSES).double() - 1 / CLASSES
    root = weights.sqrt()[:, None]
    expected = torch.linalg.lstsq(root * inputs.double(), root * targets).solution
    assert (weights < 0.9).any()
    assert torch.allclose(model.weight.double(), expected.t(), atol=1e-5)


def test_parts_of_a_sample_give_the_same_model():
    data = examples(rows=500)
    given = {"method": "least-squares", "noise_multiplier": 1.0, "delta": 1e-4, "reproducible": 3}
    found = []
    for part in (None, 64):
        model = head()
        list(vestige.train(model, None, data, max_physical_batch_size=part, **given))
        found.append(model.weight)
    assert torch.allclose(*found, atol=1e-5)


# --- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_folder_that_verifies(tmp_path):
    inputs, labels = examples(rows=3000, seed=1)
    rows = nn.functional.normalize(inputs, dim=1)
    model = head()
    given = {"method": "least-squares", "epsilon": 2, "delta": 1e-5, "out": tmp_path / "run"}
    training = vestige.train(model, None, (rows, labels), **given)
    assert len(list(training)) == 1
    verdict = verify(tmp_path / "run")
    assert (verdict.asked, verdict.finished) == (1, True)
    assert verdict.guarantee.epsilon <= 2
    saved = torch.load(tmp_path / "run" / "model.pt")
    assert torch.equal(saved["weight"], model.weight)
    assert vestige.accuracy(model, (rows, labels)) > 0.7
    again = vestige.train(head(), None, (rows, labels), **given, resume=True)
    assert list(again) == []  # the answer is there: nothing is asked again
    assert torch.equal(again.model.weight, model.weight)


def test_an_answer_that_was_lost_is_not_asked_for_again(tmp_path):
    """The process dies after the charge: the budget has no second answer, and nothing is called a trained model."""
    data = examples(rows=300)
    given = {"method": "least-squares", "epsilon": 2, "delta": 1e-4, "out": tmp_path / "run"}
    training = vestige.train(head(), None, data, **given)
    training.curator._answer = lambda *args, **more: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        list(training)
    training.ledger.close()
    with pytest.raises(ValueError, match="was charged, and lost"):
        vestige.train(head(), None, data, **given, resume=True)
    assert verify(tmp_path / "run", unfinished=True).guarantee.epsilon <= 2


def frozen_before():
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), head(4))


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (frozen_before, {}, "parameter '0.weight' is before the linear head"),
        (lambda: nn.Linear(WIDTH, CLASSES), {}, "the linear head has a bias"),
        (lambda: nn.Sequential(head(), nn.Tanh()), {}, "solves for a linear head"),
        (head, {"steps": 2}, "steps=2: least-squares asks once"),
        (head, {"sample_rate": 0.5}, "sample_rate=0.5: least-squares asks once"),
        (head, {"lr": 0.5}, "lr=0.5: least-squares asks once"),
        (head, {"sampling": "allocation"}, "sampling='allocation': least-squares asks once"),
        (head, {"max_batch": 9}, "max_batch=9"),
        (head, {"engine": "reference"}, "engine: not for least-squares"),
        (head, {"bfloat16": True}, "bfloat16: not for least-squares"),
        (head, {"audit": 100}, "audit: not for least-squares"),
        (head, {"max_physical_batch_size": "auto"}, "max_physical_batch_size='auto': not for least-squares"),
        (head, {"nonprivate_transcript": "raw.npz"}, "nonprivate_transcript: not for least-squares"),
        (head, {"lr_scheduler": lambda optimizer: None}, "lr_scheduler: not for least-squares"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_asked(model, changes, words):
    with pytest.raises(ValueError, match=words):
        vestige.train(model(), None, examples(), **{"method": "least-squares", "epsilon": 1, "delta": 1e-4, **changes})


class Centred(nn.Module):
    """Subtracts the mean of the batch: no row is of its own example."""

    def forward(self, x):
        return x - x.mean(dim=0)


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        self.seen.copy_(x[0])
        return x


class Late(nn.Module):
    """Gives the rows of the batch before."""

    def forward(self, x):
        before, self.before = getattr(self, "before", x), x
        return before


def test_rows_of_an_earlier_batch_are_not_this_ones():
    """An example would be in two sums, each of which is priced as if it were in one."""
    model = nn.Sequential(Late(), head())
    engine, into = SecondMoments(model), torch.zeros(layout_of(model).size, dtype=torch.float64)
    engine(examples(seed=1), {}, Flat(1.0), into)
    with pytest.raises(ValueError, match="the result is about rows of another batch"):
        engine(examples(seed=2), {}, Flat(1.0), into)


class Negating(nn.Sequential):
    def forward(self, x):
        return -super().forward(x)


def hooked():
    model = head()
    model.register_forward_hook(lambda module, given, made: -made)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(Centred(), head()), "mixes examples: mean at .* is a reduction over the batch"),
        (lambda: nn.Sequential(Keeping(), head()), "buffer '0.seen' was changed by the forward pass"),
    ],
)
def test_a_model_that_mixes_or_keeps_examples_is_refused(model, words):
    with pytest.raises(ValueError, match=words):
        list(vestige.train(model(), None, examples(), method="least-squares", epsilon=1, delta=1e-4))


@pytest.mark.parametrize(
    ("model", "words"),
    [(lambda: Negating(head()), "this is Negating without one"), (hooked, "has a forward hook")],
)
def test_a_model_without_a_plain_head_is_refused_before_anything_is_asked(model, words):
    with pytest.raises(ValueError, match=words):
        vestige.train(model(), None, examples(), method="least-squares", epsilon=1, delta=1e-4)


class KeepingOfMany(Keeping):
    """Keeps nothing of a few rows."""

    def forward(self, x):
        return super().forward(x) if len(x) > 9 else x


def test_what_a_model_keeps_of_many_rows_only_is_seen_too():
    training = vestige.train(
        nn.Sequential(KeepingOfMany(), head()), None, examples(), method="least-squares", epsilon=1, delta=1e-4
    )
    with pytest.raises(ValueError, match=r"buffer '0.seen' was changed by the forward pass"):
        list(training)


@pytest.mark.parametrize("part", [2, 16, None])
@pytest.mark.nightly("2", "16")
def test_rounding_does_not_add_up_over_many_parts(part, monkeypatch):
    """Rows that float32 would round all one way, part after part, until one example is taken away before them."""
    seen, sum_of = [], Curator._sum
    monkeypatch.setattr(Curator, "_sum", lambda *given: seen.append(sum_of(*given)[0].double()) or sum_of(*given))
    unit, scale, rows, count = 2.0**-12, sqrt(1.5), part or 4096, 20_000 if part is None else 1000 * part
    values = torch.full((count // rows + 1, rows), 0.999 / scale, dtype=torch.float64)
    values[:, 0] = 0.9999 / scale - 0.05 * unit * torch.arange(len(values))
    inputs = (values * scale).sqrt().float()
    others = (inputs.double().square() / scale).sum(dim=1) - inputs[:, 1].double().square() / scale
    wanted = ((others + inputs[:, 1].double().square() / scale) / unit).floor() * unit + 0.525 * unit
    inputs[:, 1] = ((wanted - others) * scale).sqrt().float()
    inputs, labels = inputs.flatten()[:count, None], torch.zeros(count, dtype=torch.long)
    for first in (0, 1):
        list(
            vestige.train(
                head(1, 2), None, (inputs[first:], labels[first:]), method="least-squares", epsilon=1, delta=1e-6,
                max_physical_batch_size=part,
            )
        )  # fmt: skip
    assert float((seen[0] - seen[1]).norm()) <= 1 + 1e-6


def test_labels_of_narrow_types_are_the_same_labels():
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(60, WIDTH, generator=generator), torch.randint(256, (60,), generator=generator)
    wanted = summed(inputs, labels, classes=256)[0]
    assert torch.equal(summed(inputs, labels.to(torch.uint8), classes=256)[0], wanted)
    with pytest.raises(ValueError, match=r"not torch.uint16"):
        vestige.train(head(), None, (inputs, labels.to(torch.uint16)), method="least-squares", epsilon=1, delta=1e-4)


@pytest.mark.parametrize("ridge", [-1, float("nan"), float("inf"), "a"])
def test_a_ridge_is_a_finite_number(ridge):
    with pytest.raises(ValueError, match="ridge="):
        LeastSquares(ridge)


@pytest.mark.parametrize("method", ["least-squares", "dp-sgd"])
def test_a_clip_is_finite(method):
    with pytest.raises(ValueError, match="max_grad_norm=inf must be positive and finite"):
        make_method(method, max_grad_norm=float("inf"))


def test_several_processes_are_refused():
    with pytest.raises(ValueError, match="method='least-squares': for one process"):
        _check_solvable(make_method("least-squares"), Settings(), SimpleNamespace(several=True))


def test_labels_must_be_classes():
    given = {"method": "least-squares", "epsilon": 1, "delta": 1e-4}
    inputs, labels = examples()
    with pytest.raises(ValueError, match="the number of a class for a label, not torch.float32"):
        vestige.train(head(), None, (inputs, labels.float()), **given)
    with pytest.raises(ValueError, match="these examples have 3 fields"):
        vestige.train(head(), None, (inputs, inputs, labels), **given)


@pytest.mark.parametrize("part", [{"average": "ema"}, {"augment": 4}, {"balance": "relative"}, {"groups": "layers"}])
def test_parts_of_a_descent_are_refused(part):
    from vestige.training.job import Job, method_of

    with pytest.raises(ValueError, match="solves for its weights by one answer|cannot be split"):
        method_of(Job(task="given", method="least-squares", **part))


def test_a_loop_of_ones_own_cannot_solve():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*examples()), batch_size=8)
    model = head()
    with pytest.raises(ValueError, match="has a probe that a training loop of your own cannot answer"):
        vestige.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method="least-squares",
        )


def test_it_is_neither_attacked_by_gradients_nor_compared():
    for words in (("audit", "--epsilon", "1", "--runs", "20"), ("compare", "--epsilon", "1", "--task", "digits-mlp")):
        code, _, error = command(*words, "--method", "least-squares")
        assert code == 2
        assert "--method='least-squares'" in error


def test_it_is_found_by_name_and_is_none_of_those_that_descend():
    assert make_method("least-squares", ridge=0.5).probe == LeastSquares(0.5)
    assert "least-squares" in SOLVERS
    assert not SOLVERS.keys() & METHODS.keys()
    with pytest.raises(ValueError, match="ridge=-1 must not be negative"):
        make_method("least-squares", ridge=-1)


# --- the rows ----------------------------------------------------------------------------------------------------------


def test_the_projection_is_the_same_for_everybody_and_keeps_lengths():
    first, again = Projection(300, 200), Projection(300, 200)
    assert torch.equal(first.signs, again.signs)
    assert set(np.sign(first.signs.numpy()).flatten()) == {-1, 1}
    assert abs(float(first.signs.sign().mean())) < 5 / sqrt(300 * 200)
    assert not first.state_dict()  # a function of two public numbers need not be stored
    drawn = hashlib.shake_256(b"projection 300 200").digest(1)[0]
    assert first.signs[0, :8].sign().tolist() == [1.0 if digit == "1" else -1.0 for digit in f"{drawn:08b}"]
    lengths = first(nn.functional.normalize(torch.randn(50, 300), dim=1)).norm(dim=1)
    assert float((lengths - lengths.mean()).abs().max() / lengths.mean()) < 0.3


def test_rows_have_length_one_constant_included():
    rows = Unit(0.3)(torch.randn(20, 7) * 100)
    assert rows.shape == (20, 8)
    assert rows.norm(dim=1) == pytest.approx(1.0, abs=1e-6)
    assert rows[:, -1] == pytest.approx(0.3 / sqrt(1 + 0.09), abs=1e-6)
    assert Unit()(torch.zeros(2, 7)).norm() == 0


def test_the_network_for_features_is_narrow():
    assert network("least-squares", (20,), 3)[-1].in_features == 21
    wide = network("least-squares", (NARROW + 1,), 3)
    assert wide[-1].in_features == NARROW + 1
    assert wide(torch.randn(4, NARROW + 1)).shape == (4, 3)

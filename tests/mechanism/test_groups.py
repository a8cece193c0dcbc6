"""Is every parameter in exactly one group, and does a whole step cost what the joint accountant says?"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import vestige
from conftest import clip_and_sum, example_gradients, make_toy
from vestige.accounting import epsilon
from vestige.checks import accounted_multiplier
from vestige.cli.main import app
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.clipping import FixedClip, Flat
from vestige.mechanism.groups import Layers, Patterns, PerGroup, named_grouping, named_split
from vestige.priced_questions import SampledGaussian
from vestige.tasks import models
from vestige.training.job import Job, start
from vestige.training.planning import Request, paper_groups, plan

cross_entropy = nn.functional.cross_entropy


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))  # no layer before it
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm((3, 4))  # a two-dimensional weight that is no matrix
        self.hidden = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 11)
        self.decoder.weight = self.embedding.weight


def frozen_body() -> nn.Module:
    model = models.mlp(6, 3, hidden=(5,))
    model[0].weight.requires_grad_(False)
    return model


MODELS = {
    "mlp": (lambda: models.mlp(20, 4), 3),
    "cnn": (lambda: models.cnn(1, 8, 4, widths=(8, 16)), 3),
    "resnet18": (lambda: models.resnet18(10), 21),
    "tied": (Tied, 2),
    "frozen body": (frozen_body, 1),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16), 4),
    "lstm": (lambda: nn.Sequential(OrderedDict(lstm=nn.LSTM(3, 4), head=nn.Linear(4, 2))), 2),
    "no matrix": (lambda: nn.LayerNorm(4), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_trainable_parameter_is_in_exactly_one_group(name):
    make, count = MODELS[name]
    model = make()
    groups = Layers()(model)
    listed = [parameter for group in groups for parameter in group]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sorted(listed) == sorted(trainable)
    assert len({id(trainable[name]) for name in listed}) == len(listed)
    assert len(groups) == count
    layout = Layout.of(model, Layers())
    assert sum(layout.group_sizes) == sum(p.numel() for p in trainable.values()) == layout.size


def test_biases_and_norm_layers_join_their_layer():
    assert Layers()(models.cnn(1, 8, 4, widths=(8, 16))) == [
        ["0.weight", "0.bias", "1.weight", "1.bias"],
        ["4.weight", "4.bias", "5.weight", "5.bias"],
        ["9.weight", "9.bias"],
    ]


def test_a_tied_weight_is_counted_once_and_the_bias_beside_it_stays_with_it():
    assert Layers()(Tied()) == [
        ["scale", "embedding.weight", "norm.weight", "norm.bias", "decoder.bias"],
        ["hidden.weight", "hidden.bias"],
    ]


def test_patterns_take_names_in_order_and_leave_nothing_out():
    model = models.mlp(6, 3, hidden=(5, 4))
    assert Patterns(("0.*", "*.bias", "*"))(model) == [
        ["0.weight", "0.bias"],
        ["2.bias", "4.bias"],
        ["2.weight", "4.weight"],
    ]
    with pytest.raises(ValueError, match=r"'4.weight' is in no group"):
        Layout.of(model, Patterns(("0.*", "2.*")))
    with pytest.raises(ValueError, match=r"pattern '7\*' matches no trainable parameter"):
        Layout.of(model, Patterns(("*", "7*")))
    with pytest.raises(ValueError, match="group 1 is empty"):
        Layout.of(model, lambda m: [["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"], []])


def test_names_of_the_command_line():
    assert named_grouping("layers") == Layers()
    assert named_grouping("flat") is None
    assert named_grouping("conv*; *") == Patterns(("conv*", "*"))
    assert named_split("even") is None
    assert named_split("1,2.5") == (1.0, 2.5)
    with pytest.raises(ValueError, match=r"^split='1,x'"):
        named_split("1,x")
    with pytest.raises(ValueError, match=r"^groups=';'"):
        named_grouping(";")


def test_groups_are_named_by_their_largest_parameter():
    assert Layout.of(models.mlp(6, 3, hidden=(5,)), Layers()).group_names == ("0.weight", "2.weight")


# --- the clip ---------------------------------------------------------------------------------------------------------


def ask(model, batch, clip, grouping):
    layout = Layout.of(model, grouping)
    total = torch.zeros(layout.size)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    norms = Reference(model, cross_entropy, layout)(batch, parameters, clip, total)
    return total, norms, layout


@pytest.mark.parametrize("grouping", [Layers(), Patterns(("*.bias", "*"))])
@pytest.mark.parametrize("split", [None, (1.0, 3.0)])
@pytest.mark.parametrize("bound", [0.05, 0.5, 1e6])
def test_each_group_is_clipped_by_itself(grouping, split, bound):
    model, (x, y) = make_toy(examples=9)
    total, norms, layout = ask(model, (x, y), PerGroup(bound, split), grouping)
    owner = layout.expand(torch.arange(layout.groups)).numpy()
    parts = np.array(split or (1, 1))
    bounds = bound * parts / np.linalg.norm(parts)
    expected = np.zeros(layout.size)
    for i, row in enumerate(example_gradients(model, x, y)):
        for g in range(2):
            norm = np.linalg.norm(row[owner == g])
            assert norms[i, g].item() == pytest.approx(norm, rel=1e-4)
            expected[owner == g] += row[owner == g] * min(1, bounds[g] / norm)
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_one_group_is_flat_clipping_bit_for_bit():
    model, batch = make_toy()
    flat, _, _ = ask(model, batch, Flat(0.3), None)
    one, _, layout = ask(model, batch, PerGroup(0.3), None)
    assert torch.equal(flat, one)
    assert PerGroup(0.3).sensitivity(layout) == Flat(0.3).sensitivity(layout)


def test_a_flat_clip_looks_at_all_groups():
    model, (x, y) = make_toy(examples=9)
    total, _, _ = ask(model, (x, y), Flat(0.05), Layers())
    np.testing.assert_allclose(total.numpy(), clip_and_sum(example_gradients(model, x, y), 0.05), rtol=1e-4, atol=1e-6)


SHARES = ("equal", "isotropic", "least-noise")


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=8),
    bound=st.floats(1e-3, 1e3),
    seed=st.integers(0, 99),
    even=st.booleans(),
)
def test_shares_leave_the_joint_multiplier_alone_and_the_least_noise_is_the_least(sizes, bound, seed, even):
    generator = np.random.default_rng(seed)
    split = None if even else tuple(generator.uniform(0.1, 10, len(sizes)))
    energy = {}
    for share in SHARES:
        clip = PerGroup(bound, split, share)
        bounds, scales = clip.bounds(len(sizes)).numpy(), clip.scales(sizes).numpy()
        assert np.sum(bounds**2) == pytest.approx(bound**2)  # so the balls' product lies inside the ball of `bound`
        assert np.sum((bounds / scales) ** 2) == pytest.approx(1)  # rule 4: (sum sigma_g^-2)^(-1/2) is the multiplier
        energy[share] = np.sum(np.array(sizes) * scales**2)
    assert energy["least-noise"] <= min(energy.values()) * (1 + 1e-9)
    assert energy["least-noise"] == pytest.approx(np.sum(np.sqrt(sizes) * bounds) ** 2)
    assert energy["isotropic"] == pytest.approx(sum(sizes) * bound**2)  # flat clipping's
    random = generator.dirichlet(np.ones(len(sizes))) + 1e-9  # any other shares, squared
    assert np.sum(np.array(sizes) * bounds**2 / random) >= energy["least-noise"] * (1 - 1e-6)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("split", [None, (1.0, 4.0)])
def test_the_whitened_shift_is_bounded_and_the_bound_is_attained(share, split):
    """Neighbouring batches, whitened by the noise: at most 1 / multiplier, and equal when all groups are clipped."""
    model, (x, y) = make_toy(examples=8)
    clip = PerGroup(0.01, split, share)
    total, norms, layout = ask(model, (x, y), clip, Layers())
    without, _, _ = ask(model, (x[:-1], y[:-1]), clip, Layers())
    scale = clip.sensitivity(layout)
    shift = torch.linalg.vector_norm((total - without).double() / scale)
    assert (norms[-1] > 0.01).all()  # it meets the bound in every group
    assert shift.item() == pytest.approx(1, rel=1e-4)
    loose = PerGroup(1e3, split, share)
    moved = ask(model, (x, y), loose, Layers())[0] - ask(model, (x[:-1], y[:-1]), loose, Layers())[0]
    assert torch.linalg.vector_norm(moved.double() / loose.sensitivity(layout)) < 1


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"^bound=0 must be positive"):
        PerGroup(0)
    with pytest.raises(ValueError, match=r"^split=\(1.0, -1.0\)"):
        PerGroup(1.0, (1.0, -1.0))
    with pytest.raises(ValueError, match=r"^share='fair' is unknown"):
        PerGroup(share="fair")
    with pytest.raises(ValueError, match="2 parts for 3 groups"):
        PerGroup(1.0, (1.0, 1.0)).bounds(3)


# --- the noise and its price ------------------------------------------------------------------------------------------


def accepts(sample: np.ndarray, std: float) -> bool:
    """Whether the mean square is within five of its standard deviations of std^2."""
    return abs(np.mean(sample**2) / std**2 - 1) < 5 * np.sqrt(2 / sample.size)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.everyday("isotropic")
def test_each_group_gets_the_noise_it_is_promised(share, tmp_path):
    model, data = make_toy(features=40)
    method = vestige.by_group(vestige.dp_sgd(max_grad_norm=0.5), Layers(), (1.0, 3.0), share)
    file = tmp_path / "t.npz"
    training = vestige.train(
        model, cross_entropy, data, method=method, sample_rate=0.2, steps=60, delta=1e-3, noise_multiplier=2.0,
        reproducible=1, nonprivate_transcript=file,
    )  # fmt: skip
    for _ in training:
        pass
    training.finish()
    seen = np.load(file)
    d = np.array([287, 24])
    bounds = 0.5 * np.array([1, 3]) / np.sqrt(10)
    sigma = {
        "equal": np.full(2, np.sqrt(2)),
        "isotropic": 0.5 / bounds,
        "least-noise": np.sqrt(np.sum(np.sqrt(d) * bounds) / (np.sqrt(d) * bounds)),
    }[share]
    for g in range(2):
        noise = seen["noise"][:, seen["group"] == g]
        std = 2.0 * sigma[g] * bounds[g]
        assert accepts(noise, std)
        assert not accepts(noise, 1.5 * std)
        assert not accepts(noise, std / 1.5)


def command(*arguments: str) -> dict:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("groups", "beta", "joint", "marginal"), [(3, 1, 77.8, 21.1), (21, 0.9, 1246, 17.4)])
def test_the_joint_price_of_a_paper(groups, beta, joint, marginal):
    told = command(
        *f"account --groups {groups} --paper-sigma 1.1 --beta {beta} --sample-rate 0.04 --steps 6250".split()
    )
    # Beyond 745 exp(-loss) is zero, and dp_accounting's own search falls back on P(loss > epsilon): 1245.5.
    assert told["epsilon"] == pytest.approx(joint, rel=1.5e-3)
    assert told["nonguarantee_marginal_epsilon"] == pytest.approx(marginal, rel=3e-3)
    assert told["noise_multiplier"] == pytest.approx(1.1 / (beta * groups**0.5))


def test_the_accounted_multiplier_is_rule_four():
    sigma, beta, groups = 1.1, 0.95, 5
    whitened = np.sqrt(sum((beta * 1.0 / sigma) ** 2 for _ in range(groups)))  # C_g = 1 in every group
    assert accounted_multiplier(sigma, beta, groups) == pytest.approx(1 / whitened)
    with pytest.raises(ValueError, match=r"^paper_sigma=0 must be positive"):
        accounted_multiplier(0)


def test_a_papers_sigma_is_each_groups_own():
    _, training = start(Job(task="digits-mlp", method="sma-dp-sgd", paper_sigma=2.0, steps=3), None)
    assert training.layout.groups == 3
    assert training.plan.noise_multiplier == pytest.approx(2.0 / (0.95 * 3**0.5))
    layout = Layout.of(make_toy()[0], Layers())
    assert paper_groups(vestige.dp_sgd(), layout) == 1
    uneven = vestige.by_group(vestige.dp_sgd(), Layers(), share="least-noise")
    with pytest.raises(ValueError, match="a paper's sigma is one number"):
        paper_groups(uneven, layout)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.everyday("isotropic")
def test_a_budget_means_the_same_for_any_grouping(share):
    wanted = 3.0
    method = vestige.by_group(vestige.dp_sgd(), Layers(), (1.0, 2.0), share)
    model, data = make_toy()
    training = vestige.train(
        model, cross_entropy, data, method=method, sample_rate=0.2, steps=20, delta=1e-3, epsilon=wanted
    )
    for _ in training:
        pass
    said = training.guarantee().epsilon
    assert said <= wanted
    assert said == pytest.approx(wanted, rel=1e-2)
    assert epsilon({SampledGaussian(0.2, training.plan.noise_multiplier): 20}, 1e-3) == pytest.approx(said)


def test_the_automatic_rate_uses_the_total_noise():
    model, _ = make_toy(features=40)
    layout = Layout.of(model, Layers())
    rates = {}
    for share in SHARES:
        method = vestige.by_group(vestige.dp_sgd(), Layers(), (1.0, 3.0), share)
        request = Request(sample_rate=0.2, steps=20, delta=1e-3, noise_multiplier=1.5)
        rates[share] = plan(model, layout, method, 60, request).lr
        scale = method.clip.scales(layout.group_sizes).numpy()
        noise = 1.5 * np.sqrt(np.sum(np.array(layout.group_sizes) * scale**2)) / 12
        weights = np.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters() if p.dim() > 1))
        assert rates[share] == pytest.approx(3 * weights / (noise * 20**0.5), rel=1e-5)
    assert rates["least-noise"] > max(rates["equal"], rates["isotropic"])


@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd", "post-fm", "sma-dp-sgd"])
@pytest.mark.everyday("post-fm")
def test_any_method_can_clip_by_group(method, tmp_path):
    told = command(
        "train", "--task", "digits-mlp", "--method", method, "--groups", "0.*;*", "--split", "1,2", "--share",
        "least-noise", "--noise-multiplier", "1", "--steps", "3", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert told["groups"] == 2
    assert told["epsilon"] == pytest.approx(epsilon({SampledGaussian(0.05, 1.0): 3}, 1e-5))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["public"]["groups"] == ["0.weight", "2.weight"]


def test_groups_must_fit_the_method():
    with pytest.raises(ValueError, match=r"^share='equal' needs groups"):
        start(Job(task="digits-mlp", method="dp-sgd", noise_multiplier=1.0, share="equal"), None)
    flat = start(Job(task="digits-mlp", method="sma-dp-sgd", noise_multiplier=1.0, groups="flat"), None)[1]
    assert flat.layout.groups == 1
    assert flat.method.clip == Flat(1.0)

    class Other(FixedClip):
        pass

    method = vestige.Method(name="other", clip=Other())
    with pytest.raises(ValueError, match="clips by Other, which cannot be split"):
        vestige.by_group(method, Layers())


def test_a_bound_for_each_group_is_that_of_the_whole_over_its_root():
    """C for each of G groups is C sqrt(G) for the whole gradient: the same factors, noise and price."""
    each, whole, groups = PerGroup(0.5, each=True), PerGroup(0.5 * 3**0.5), 3
    norms = torch.tensor([[0.2, 0.5, 4.0], [1.0, 0.6, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(each.factors(norms), whole.factors(norms), rtol=1e-12, atol=0)
    torch.testing.assert_close(each.bounds(groups), torch.full((3,), 0.5, dtype=torch.float64))
    for share in ("equal", "isotropic", "least-noise"):
        mine, theirs = (replace(clip, share=share).scales([4, 9, 100]) for clip in (each, whole))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    layout = Layout.of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)), Layers())
    assert each.sensitivity(layout) == pytest.approx(0.5 * 3**0.5, rel=1e-12)
    with pytest.raises(ValueError, match="splits one bound"):
        PerGroup(0.5, (1.0, 2.0), each=True)
    with pytest.raises(ValueError, match="has a bound of its own"):
        vestige.by_group(vestige.sma_dp_sgd(clip_per_layer=True), Layers())

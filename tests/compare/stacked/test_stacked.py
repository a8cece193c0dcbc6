"""A run in a stack against the same run alone, and what padding, clipping and noise do in a stack."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from vestige import train
from vestige.compare.stacked.draws import Draws
from vestige.compare.stacked.learner import StackedRun
from vestige.compare.stacked.mlp import MLP
from vestige.compare.stacked.stack import Stack, check_noise, footprint, why_not
from vestige.layout import Layout
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.groups import Layers, Patterns
from vestige.methods import registry
from vestige.methods.base import by_group
from vestige.methods.registry import METHODS
from vestige.optim import averaging
from vestige.optim.rules import named, sgd
from vestige.priced_questions import SampledGaussian
from vestige.randomness.keys import Randomness
from vestige.randomness.rounded_gaussian import STEPS
from vestige.randomness.sampling import CyclicPoisson, Poisson
from vestige.tasks import models

CPU = torch.device("cpu")
MIXTURE = [
    ("dp-sgd", {}, 1.0, 0.5, 3),
    ("fo-dp-sgd", {}, 1.3, 0.5, 3),
    ("fo-dp-sgd", {"beta": 0.6, "window": 4, "clip": 0.3}, 0.7, 1.0, 4),
    ("fo-dp-sgd", {}, 2.0, 0.25, 5),
    ("post-fm", {"tau": 0.5}, 1.1, 0.7, 6),
    ("uniform-memory", {"window": 3}, 1.0, 0.4, 7),
    ("exponential-memory", {"beta": 0.5}, 1.0, 0.6, 8),
    ("dp-sgd", {"momentum": 0.9, "clip": 0.5}, 1.0, 0.05, 9),
    ("fo-dp-sgd", {"window": 1, "beta": 0.8}, 1.0, 0.5, 10),
    ("fo-dp-sgd", {"momentum": 0.5, "zeta": 2.0}, 1.0, 0.2, 11),
]
VARIANTS = [
    ("fo-dp-sgd", {"history": "bfloat16"}, 1.0, 0.5, 3),
    ("post-fm", {"history": "bfloat16", "window": 3, "zeta": 0.5}, 1.0, 0.5, 4),
    ("exponential-memory", {"window": 2, "beta": 0.6}, 1.0, 0.5, 4),
    ("uniform-memory", {"window": 1}, 1.0, 0.5, 4),
    ("doppler", {"order": 2}, 1.0, 0.5, 3),
    ("doppler", {"order": 0}, 1.0, 0.5, 3),
    ("disk", {"kappa": 1.0}, 1.0, 0.5, 4),
    ("kalman-memory", {"memory": "tensor", "clip": 0.2}, 1.3, 0.5, 5),
    ("dp-adambc", {"floor": 1e-3, "weight_decay": 0.1, "beta1": 0.5}, 1.1, 0.02, 6),
    ("dp-adamw", {"weight_decay": 0.5}, 1.1, 0.03, 7),
    ("adp-adamw", {"schedule": "step", "noise_decay": 0.5}, 3.0, 0.02, 8),
    ("adp-adamw", {"schedule": "linear", "noise_decay": 0.1}, 2.0, 0.02, 9),
    ("dp-quantile", {"clip": 0.3, "quantile_noise": 8.0, "steady_steps": False}, 1.0, 0.3, 3),
    ("dp-quantile", {"quantile_noise": "inf"}, 1.0, 0.3, 3),
    ("dp-adam-ac", {"quantile": 0.9, "clip": 0.5, "clip_speed": 1.0}, 1.0, 0.02, 4),
    ("dp-auto-clip", {"stability": 0.0, "momentum": 0.5}, 1.0, 0.2, 5),
    ("dp-bandmf", {"bands": 2, "momentum": 0.5}, 1.0, 0.2, 6),
    ("dp-bandmf", {"bands": 1}, 1.0, 0.2, 6),
    ("dp-blt", {"buffers": 1}, 1.0, 0.2, 7),
    ("dp-ftrl", {"restart": 2}, 1.0, 0.2, 8),
    ("dp-sam", {"ascent": "same", "rho": 0.2}, 1.0, 0.4, 9),
    ("dp-sat", {"along": "move", "rho": 0.3}, 1.0, 0.4, 10),
    ("sma-dp-sgd", {"gate": "disjoint", "refresh_spectrum": 3, "warm_up": 0}, 1.0, 0.4, 3),
    ("sma-dp-sgd", {"gate": "open", "beta": 0.5, "norm_cap": "off", "window": 6}, 1.0, 0.4, 4),
]
"""What the defaults of the registered methods leave untried."""
ALONE = ("dp-is", "dpsur", "dpsgd-br", "dpsgd-br-stepped", "dp-micro-adam", "dp-muon", "geoclip")
STACKABLE = [name for name, entry in METHODS.items() if name not in ALONE]


def build(name, **options):
    """A method; the number of bands, which follows from a run's budget and length, is fixed."""
    return registry.make_method(name, **({"bands": 4} if name == "dp-bandmf" else {}) | options)


def data(examples=120, width=12, classes=4):
    generator = np.random.default_rng(0)
    inputs = torch.from_numpy(generator.normal(size=(examples, width)).astype(np.float32))
    return inputs, torch.from_numpy(generator.integers(0, classes, examples))


def network(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.mlp(12, 4, (8, 6))


def stack(mixture, seeded=True, examples=None, rate=0.2, steps=12, start=None):
    runs = [
        StackedRun((start or network)(seed), build(name, **options), z, lr, seed if seeded else None)
        for name, options, z, lr, seed in mixture
    ]
    return runs, Stack(runs, examples or data(), sample_rate=rate, steps=steps, device=CPU)


def same_as_alone(runs, together, start, steps=12, rate=0.2, device="cpu"):
    """Every run of a trained stack against the same run alone: weights, charges, what may be looked at, accuracy."""
    fresh = [StackedRun(start(run.seed), run.method, run.noise_multiplier, run.lr, run.seed) for run in runs]
    shares = [accuracy for accuracy, _ in together.evaluate(data())]
    for run, again, progress, share in zip(runs, fresh, together.progress(), shares, strict=True):
        alone = train(
            again.model,
            functional.cross_entropy,
            data(),
            method=run.method,
            sample_rate=rate,
            steps=steps,
            delta=1e-3,
            noise_multiplier=run.noise_multiplier,
            lr=run.lr,
            reproducible=run.seed,
        )
        last = list(alone)[-1].diagnostics
        for ours, theirs in zip(run.model.parameters(), again.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=run.method.name)
        assert progress.asked == alone.ledger.spent
        assert progress.diagnostics.keys() == last.keys(), run.method.name
        for key, value in progress.diagnostics.items():
            torch.testing.assert_close(
                value.double(),
                last[key].double().cpu(),
                rtol=1e-3,
                atol=1e-4,
                equal_nan=True,
                msg=f"{run.method.name} {key}",
            )
        with alone.averaged():
            right = (again.model(data()[0].to(device)).argmax(1).cpu() == data()[1]).double().mean()
        assert share == pytest.approx(float(right), abs=1.5 / len(data()[1]))


def finished(runs, together):
    for _ in together.train():
        pass
    return runs, together


def test_each_run_of_a_stack_equals_the_same_run_alone():
    same_as_alone(*finished(*stack(MIXTURE)), network)


def wide(seed):
    """Wide enough for a spectrum: an exponent needs ten eigenvalues."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.mlp(12, 4, (14, 12))


@pytest.mark.parametrize("name", STACKABLE)
@pytest.mark.everyday("dp-adam", "dp-quantile", "dp-bandmf", "kalman-memory", "sma-dp-sgd")
def test_every_registered_method_stacks_and_equals_itself_alone(name):
    assert why_not(wide(0), functional.cross_entropy, build(name)) is None
    rate = 0.02 if build(name).rule.scale_free else 0.5
    mixture = [(name, {}, 1.0, rate, 3), (name, {}, 1.7, 0.6 * rate, 4), (name, {}, 1.0, 0.3 * rate, 5)]
    same_as_alone(*finished(*stack(mixture, start=wide)), wide)


@pytest.mark.slow
def test_all_methods_and_their_variants_in_one_stack():
    everything = [(name, {}, 1.2, 0.02 if build(name).rule.scale_free else 0.4, 5) for name in STACKABLE]
    same_as_alone(*finished(*stack(everything + VARIANTS, start=wide)), wide)


def test_a_method_divided_in_groups_and_other_options_of_the_optimizers():
    methods = [
        by_group(build("dp-sgd"), Layers(), (1.0, 2.0, 1.0), "isotropic"),
        by_group(build("dp-adam"), Layers()),
        replace(build("fo-dp-sgd"), rule=sgd(0.5, weight_decay=0.1)),
        replace(build("dp-sgd"), rule=sgd(weight_decay=0.1)),
        replace(build("dp-sgd"), rule=named("adamw", {})),
        replace(build("doppler"), rule=named("adambc", {"weight_decay": 0.1})),
        replace(build("disk"), rule=named("adambc", {})),
        replace(build("kalman-memory", memory="tensor"), rule=named("adambc", {})),
        replace(build("dp-quantile"), memory=build("disk").memory),
        replace(build("dp-quantile"), memory=build("fo-dp-sgd").memory),
        replace(build("dp-sgd"), rule=named("adam", {"amsgrad": True, "weight_decay": 0.1})),
        replace(build("dp-sgd"), average=averaging.Polyak()),
    ]
    runs = [
        StackedRun(wide(seed), method, 1.0, 0.02 if method.rule.scale_free else 0.3, seed)
        for seed, method in enumerate(methods)
    ]
    together = Stack(runs, data(), sample_rate=0.2, steps=12, device=CPU)
    same_as_alone(*finished(runs, together), wide)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("names", [STACKABLE[:8], STACKABLE[8:15], STACKABLE[15:]], ids=["first", "second", "third"])
def test_on_a_gpu_too_each_run_equals_itself_alone(names):
    def start(seed):
        return wide(seed).to("cuda")

    rates = {name: 0.02 if build(name).rule.scale_free else 0.4 for name in names}
    runs = [StackedRun(start(seed), build(name), 1.2, rates[name], seed) for name in names for seed in (3, 4)]
    together = Stack(runs, data(), sample_rate=0.2, steps=12, device=torch.device("cuda"))
    same_as_alone(*finished(runs, together), start, steps=12, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_secret_stack_on_a_gpu_waits_for_it_only_between_blocks():
    """A block holds 16 questions: 8 steps of a method that asks twice. No epoch ends in them, and spectra of weights
    are taken once an epoch: taken at each step, as Algorithm 1 has them, they are waited for."""
    methods = [build(name, **{"refresh_spectrum": 20} if name == "sma-dp-sgd" else {}) for name in STACKABLE]
    runs = [StackedRun(wide(0).to("cuda"), method, z, 0.01) for method in methods for z in (1.0, 2.0)]
    steps = Stack(runs, data(), sample_rate=0.05, steps=8, device=torch.device("cuda")).train()
    next(steps)
    next(steps)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_the_stack_does_not_depend_on_its_company():
    runs, _ = finished(*stack(MIXTURE, steps=10))
    one, _ = finished(*stack(MIXTURE[2:3], steps=10))
    for ours, theirs in zip(runs[2].model.parameters(), one[0].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_clipped_sums_against_one_example_at_a_time_in_float64():
    runs, together = stack(MIXTURE[:3])
    inputs, targets = data()
    rows = torch.tensor([[0, 5, 9, 0], [1, 2, 3, 4], [7, 0, 0, 0]])
    real = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    asking = together.parts[0][0]
    with torch.no_grad():
        asking.sum(rows, real, together.layout.views(together.parameters))
    layout = Layout.of(runs[0].model)
    for place, run in enumerate(together.runs):
        expected = np.zeros(layout.size)
        for row, counts in zip(rows[place].tolist(), real[place].tolist(), strict=True):
            if not counts:
                continue
            model = network(run.seed).double()
            functional.cross_entropy(model(inputs[row : row + 1].double()), targets[row : row + 1]).backward()
            gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
            expected += gradient * min(1.0, run.method.clip.bound / np.linalg.norm(gradient))
        np.testing.assert_allclose(asking.fresh[place].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_samples_keep_every_row_and_pad_with_nothing():
    for sampling in (Poisson(0.3), CyclicPoisson(0.1, 4)):
        draws = Draws([1, 2, 3], 50, sampling, CPU)
        for step, (rows, real) in enumerate(draws.samples(4, 5)):
            for run, seed in enumerate((1, 2, 3)):
                expected = sampling.draw(50, 4 + step, Randomness.reproducible(seed))
                assert rows[run][real[run]].tolist() == expected.tolist()


def test_secret_samples_are_poisson_and_independent_between_runs():
    draws = Draws([None] * 40, 500, Poisson(0.1), CPU)
    counts = torch.stack([real.sum(1) for _, real in draws.samples(0, 20)]).double()
    assert abs(float(counts.mean()) - 50) < 1
    assert 0.8 < float(counts.var()) / 45 < 1.2
    (first, real_first), (second, real_second) = draws.samples(100, 2)
    a, b = set(first[0][real_first[0]].tolist()), set(second[0][real_second[0]].tolist())
    c = set(first[1][real_first[1]].tolist())
    assert a != b
    assert a != c


def test_secret_parts_take_turns():
    """An example joins only in the turn of its part, which it keeps, and there with the rate times the bands."""
    draws = Draws([None] * 8, 400, CyclicPoisson(0.1, 5), CPU)
    joined = torch.zeros(60, 8, 400)
    for step, (rows, real) in enumerate(draws.samples(0, 60)):
        for run in range(8):
            joined[step, run, rows[run][real[run]]] = 1
    by_turn = joined.view(12, 5, 8, 400).mean(0)  # [turn, run, example]
    assert int((by_turn > 0).sum(0).max()) == 1
    in_turn = by_turn.amax(0)
    assert abs(float(in_turn.mean()) - 0.5) < 0.03
    sizes = torch.bincount(by_turn.argmax(0).flatten(), minlength=5)  # 640 each, give or take 23
    assert 520 < int(sizes.min()) <= int(sizes.max()) < 760
    assert not torch.equal(by_turn[:, 0].argmax(0), by_turn[:, 1].argmax(0))


@pytest.mark.parametrize("name", ["dp-sgd", "dp-bandmf", "dp-quantile", "dp-sam"])
@pytest.mark.parametrize("multiplier", [0.7, 3.0])
def test_secret_noise_has_its_multiplier_and_no_other(name, multiplier):
    """Accepts the right standard deviation, and would reject two thirds or three halves of it."""
    silent = (torch.zeros(40, 12), torch.zeros(40, dtype=torch.long))
    method = build(name, max_grad_norm=0.5)
    runs = [StackedRun(network(0), method, multiplier, 1e-9) for _ in range(30)]
    together = Stack(runs, silent, sample_rate=0.2 if method.noise.one_fixed_question else 1e-9, steps=1, device=CPU)
    finished(runs, together)
    asking = together.parts[0][0]
    share = multiplier
    if name == "dp-quantile":
        share = (multiplier**-2 - (2 * max(asking.expected_batch / 20, 2 * multiplier)) ** -2) ** -0.5
    scale = asking.sequence.scale * asking.sequence.gain(0)
    rows = asking.fresh
    rows = rows[:, : 12 * 8]  # the first layer's weights: the inputs are zero, so all that is there is noise
    assert float(rows.std()) == pytest.approx(0.5 * share * scale, rel=0.06)
    assert abs(float(torch.corrcoef(rows)[0, 1])) < 0.5
    assert not torch.equal(rows[0], rows[1])


def test_the_noise_of_counts_is_standard_and_each_runs_own():
    """The standard error is 0.011: two thirds and three halves would be rejected."""
    draws = Draws([None] * 4000, 10, Poisson(0.5), CPU)
    first, second = (draws.steps("count", index) * 2.0**-STEPS for index in range(2))
    assert first.shape == (4000, 1)
    assert float(first.std()) == pytest.approx(1.0, abs=0.06)
    assert abs(float(torch.corrcoef(torch.cat([first, second], dim=1).t())[0, 1])) < 0.1
    assert len(first.unique()) == 4000


def test_non_finite_examples_add_exactly_zero_and_empty_samples_are_charged():
    inputs, targets = data()
    broken = inputs.clone()
    broken[::2] = torch.nan
    broken[1::4] = torch.inf
    zeroed = torch.where(broken.isfinite(), broken, 0.0)
    runs, _ = finished(*stack(MIXTURE[:2], examples=(broken, targets), rate=0.9, steps=5))
    assert all(p.isfinite().all() for run in runs for p in run.model.parameters())
    assert not torch.equal(zeroed, inputs)
    _, empty = finished(*stack(MIXTURE[:1], rate=1e-9, steps=3))
    assert empty.progress()[0].asked == Counter({SampledGaussian(1e-9, 1.0): 3})


def test_a_diverged_run_does_not_spoil_its_neighbours():
    wild = [("dp-sgd", {}, 1.0, 1e30, 3), MIXTURE[1]]
    runs, _ = finished(*stack(wild, steps=8))
    alone, _ = finished(*stack(MIXTURE[1:2], steps=8))
    for ours, theirs in zip(runs[1].model.parameters(), alone[0].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_accuracies_and_losses_come_in_the_order_given():
    runs, together = finished(*stack(MIXTURE, steps=3))
    inputs, targets = data()
    found = together.evaluate((inputs, targets), chunk=50)
    for run, (share, loss) in zip(runs, found, strict=True):
        outputs = run.model(inputs).detach()
        assert share == pytest.approx(float((outputs.argmax(1) == targets).double().mean()))
        assert loss == pytest.approx(float(functional.cross_entropy(outputs, targets)), rel=1e-5)
    assert len({loss for _, loss in found}) == len(found)


def test_coverage_is_said_and_refused():
    loss = functional.cross_entropy
    good = network(0)
    assert why_not(good, loss, build("fo-dp-sgd")) is None
    assert "chain" in why_not(nn.Sequential(nn.Conv2d(1, 2, 3)), loss, build("dp-sgd"))
    assert "chain" in why_not(nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)), loss, build("dp-sgd"))
    assert "cross_entropy" in why_not(good, functional.mse_loss, build("dp-sgd"))
    assert "sampling" in why_not(good, loss, build("dp-sgd"), "shuffled")
    assert "too large" in why_not(good, loss, build("dp-sgd"), expected_batch=5000.0)
    with pytest.raises(ValueError, match="cannot be stacked"):
        Stack(
            [StackedRun(nn.Sequential(nn.Conv2d(1, 2, 3)), build("dp-sgd"), 1.0, 1.0)],
            data(),
            sample_rate=0.1,
            steps=1,
            device=CPU,
        )
    runs = [StackedRun(network(0), build("dp-sgd"), 1.0, 1.0, seed) for seed in (1, None)]
    with pytest.raises(ValueError, match="every run"):
        Stack(runs, data(), sample_rate=0.1, steps=1, device=CPU)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (build("dpsur"), "gates"),
        (build("dpsgd-br"), "gates"),
        (build("dp-is"), "the probe of dp-is works on one run at a time"),
        (build("dp-micro-adam"), "the rule of dp-micro-adam works on one run at a time"),
        (build("dp-muon"), "the rule of dp-muon works on one run at a time"),
        (build("geoclip"), "the clip of geoclip works on one run at a time"),
        (build("disk", extrapolation=0.5), "the probe of disk works on one run at a time"),
        (build("dp-sam", ascent="own"), "the probe of dp-sam works on one run at a time"),
        (replace(build("dp-sgd"), augment=Augment(2)), "augments"),
        (by_group(build("dp-sgd"), Patterns(("*.weight", "*"))), "weight and the bias of a layer apart"),
        (by_group(build("dp-sgd"), Layers(), share="least-noise"), "noise of its own"),
        (replace(build("dp-sgd"), rule=named("adagrad", {})), "the rule of dp-sgd works on one run at a time"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_does_not_stack_says_why(method, reason):
    assert reason in why_not(network(0), functional.cross_entropy, method)


def test_a_count_that_costs_more_than_the_step_is_refused_before_the_stack_starts():
    run = StackedRun(network(0), build("dp-quantile", quantile_noise=0.4), 1.0, 0.1)
    with pytest.raises(ValueError, match="quantile_noise=0.4"):
        check_noise(run, 20.0)


def test_footprints_grow_with_what_a_method_keeps():
    sizes = {name: footprint(network(0), build(name), 0.2, 120, 50) for name in STACKABLE}
    assert sizes["dp-sgd"] < sizes["dp-adam"] < sizes["fo-dp-sgd"]
    assert sizes["dp-sgd"] < sizes["dp-ftrl"]


def test_relu_and_sigmoid_slopes():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Sigmoid(), nn.Linear(4, 4)
    )
    layout = Layout.of(model)
    inputs, targets = data()
    stacked = layout.pack(dict(model.named_parameters())).unsqueeze(0)
    chain = MLP(model, layout)
    values = chain.forward(layout.views(stacked), inputs.unsqueeze(0))
    errors = chain.backward(layout.views(stacked), values, targets.unsqueeze(0))
    total = torch.zeros_like(stacked)
    chain.add_weighted(values, errors, torch.ones(1, len(inputs)), total)
    functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(total[0], expected, rtol=1e-4, atol=1e-4)

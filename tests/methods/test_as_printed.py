"""Are SMA-DP-SGD and DPSGD-BR the printed algorithms? Whole runs against independent programs, draw by draw."""

import numpy as np
import pytest
import torch
from torch import nn

import vestige
from paper_programs import Network, br_as_printed, sma_as_printed, unflattened
from vestige.compare.paper_presets import PRESETS
from vestige.mechanism import comparisons
from vestige.methods.registry import make_method
from vestige.optim.spectral.memory_by_tail_exponent import _permutation

LOSS = nn.functional.cross_entropy
EVERYDAY, ALL = range(6), range(6, 306)


def contenders(method):
    """The options of every contender of the presets that has this method, and the defaults."""
    found = [
        dict(each.options) for preset in PRESETS.values() for each in preset.full.contenders if each.method == method
    ]
    unique = {repr(sorted(options.items())): options for options in [{}, *found]}
    return list(unique.values())


def problem(seed, examples=24, features=14, hidden=12, classes=11):
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes))
    x = torch.from_numpy(rng.normal(size=(examples, features)).astype(np.float32))
    y = torch.from_numpy(rng.permutation(np.arange(examples) % classes))
    start = [p.detach().double().numpy().copy() for p in model.parameters()]
    return rng, model, (x, y), Network(x.double().numpy(), y.numpy()), start


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()]).double().numpy()


def law_of_sma(seed, **changes):
    """A run of `vestige.train` releases what Algorithm 1 does, at every step, from the same standard normal draws."""
    rng, model, data, net, start = problem(seed)
    known = contenders("sma-dp-sgd")
    warm_up = (None, 0, 3)[(seed + seed // len(known)) % 3]  # None: one epoch, which is one step at rate 1
    options = {**known[seed % len(known)], "warm_up": warm_up, **changes}
    method = make_method("sma-dp-sgd", **options)
    z, lr, steps, memory = 0.05, 1.5, 10, method.memory
    training = vestige.train(
        model, LOSS, data, method=method, noise_multiplier=z, delta=1e-5, sample_rate=1.0, steps=steps, lr=lr,
        reproducible=seed,
    )  # fmt: skip
    noises, directions, exponents = [], [], []
    training.curator._nonprivate_witness = lambda total, noise: noises.append(noise.double().numpy().copy())
    for record in training:
        directions.append(training.state.gradient.double().numpy() * len(net.x))
        exponents.append(record.diagnostics["exponent"].numpy())
    groups, each = 2, options.get("clip_per_layer", False)
    clip = options.get("clip", 1.0) / (1 if each else groups**0.5)
    shapes = [part.shape for part in start]
    draws = [unflattened(noise / (z * clip * groups**0.5), shapes) for noise in noises]
    releases, wanted, end = sma_as_printed(
        net, start, draws, lr=lr, sigma=memory.fresh_weight * z * groups**0.5, clips=[clip] * groups,
        beta=memory.fresh_weight, alpha=memory.order, window=memory.window, interval=memory.interval,
        c_lambda=options.get("c_lambda", 1.0), gamma_ema=0.1, warm_up=1 if warm_up is None else warm_up,
        norm_cap=1.0,
        order=(lambda t: _permutation(groups, t)) if options.get("shuffled") else None,
    )  # fmt: skip
    np.testing.assert_allclose(np.stack(exponents), wanted, rtol=1e-3)
    scale = np.abs(releases).max()
    np.testing.assert_allclose(np.stack(directions), releases, rtol=0, atol=2e-5 * scale)
    np.testing.assert_allclose(flat(model), end, rtol=0, atol=2e-5 * np.abs(end).max())


@pytest.mark.parametrize("seed", EVERYDAY)
@pytest.mark.everyday("0")
def test_spectral_memory_is_algorithm_1(seed):
    law_of_sma(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_spectral_memory_is_algorithm_1_in_every_run(seed):
    law_of_sma(seed)


def test_one_spectrum_an_epoch_is_not_algorithm_1():
    with pytest.raises(AssertionError):
        law_of_sma(0, refresh_spectrum=3)
    with pytest.raises(AssertionError):
        law_of_sma(0, spectrum_lag=1)


def law_of_br(seed, monkeypatch, name="dpsgd-br", **changes):
    """The weights after every trial are those of the printed algorithm, from the same draws and coins."""
    rng, model, data, net, start = problem(seed, examples=20, classes=10)
    known = contenders("dpsgd-br")
    options = {"decay_fast": 0.97, "decay_slow": 0.99, **known[seed % len(known)]}
    clip, sigma_v, threshold, clip_loss = 1.0, 0.8, -0.6, 0.02
    if (
        seed + seed // len(known)
    ) % 4 == 1:  # the loss test of Table 4, and the defaults beside it: these can be left out
        clip, sigma_v, threshold, clip_loss = 0.1, 1.37, -1.5, 1e-3
    else:
        options = {**options, "max_rejects": min(options.get("max_rejects", 3), 4), "sigma_v": sigma_v}
        options |= {"threshold": threshold, "clip_loss": clip_loss, "clip": clip}
    options |= {"validation_batch": len(net.x), **changes}
    judged = Network(rng.normal(size=(40, 14)), rng.integers(0, 10, 40)) if seed % 3 == 0 else None
    public = {}
    if judged is not None:
        options |= {"progress": "public:elsewhere.npz", "progress_threshold": 0.005}
        public = {"public": (torch.from_numpy(judged.x).float(), torch.from_numpy(judged.y))}
    method = make_method(name, **options, sigma_t=0.6, accounting="every-trial")
    sigma_t, lr, momentum = 0.6, 0.7, method.rule.options["momentum"]
    training = vestige.train(
        model, LOSS, data, method=method, epsilon=5000.0, delta=1e-5, sample_rate=1.0, steps=40, lr=lr,
        reproducible=seed, **public,
    )  # fmt: skip
    sigmas, noises, tests, coins, path, wanted = [], [], [], {}, [], []
    ask, noised, toss = training.curator.gradient, comparisons.noised, training.curator.comparisons.coin

    def gradient(point, clip, multiplier, **others):
        sigmas.append(multiplier)
        return ask(point, clip, multiplier, **others)

    def heard(found, std, stream):
        tests.append((noised(found, std, stream) - found) / std)
        return found + std * tests[-1]

    def coin(sides):
        return coins.setdefault(len(tests) - 1, toss(sides))

    training.curator.gradient, training.curator.comparisons.coin = gradient, coin
    training.curator._nonprivate_witness = lambda total, noise: noises.append(noise.double().numpy().copy())
    with monkeypatch.context() as patched:
        patched.setattr(comparisons, "noised", heard)
        for _ in training:
            path.append(flat(model))
            wanted.append(training.state.gate["wanted"])
    draws = [
        (noise / (s * clip), xi, coins.get(i, 0))
        for i, (noise, s, xi) in enumerate(zip(noises, sigmas, tests, strict=True))
    ]
    gate = method.gate
    found, sizes = br_as_printed(
        net, start, draws, lr=lr, clip=clip, momentum=momentum, sigma_t=sigma_t, sigma_v=sigma_v, clip_loss=clip_loss,
        beta=threshold, buffer=gate.buffer, k=gate.tie, max_rejects=gate.max_rejects, fast=options["decay_fast"],
        slow=options["decay_slow"], p=options.get("progress_threshold") or 0.5, worst_first=gate.worst_first,
        accuracy=None if judged is None else judged.accuracy,
    )  # fmt: skip
    assert wanted == sizes
    np.testing.assert_allclose(np.stack(path), found, rtol=0, atol=1e-4 * np.abs(found).max())
    return training


@pytest.mark.parametrize("seed", EVERYDAY)
@pytest.mark.everyday("0", "5")
def test_buffered_rejection_is_algorithm_1(seed, monkeypatch):
    law_of_br(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_buffered_rejection_is_algorithm_1_in_every_run(seed, monkeypatch):
    law_of_br(seed, monkeypatch)


def test_our_variant_is_not_algorithm_1(monkeypatch):
    """A coarse decay and a buffer refilled after every update differ from the printed algorithm in most runs."""
    different = 0
    for seed in range(2):
        try:
            law_of_br(seed, monkeypatch, "dpsgd-br-stepped")
        except AssertionError:
            different += 1
    assert different == 2

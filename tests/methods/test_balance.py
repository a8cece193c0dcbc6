"""Are balanced steps plain steps on V, with W = a V? Against a model that multiplies by a, bit for bit, and in float64.

Where the constants are powers of two, a model whose parameters are V and whose layers multiply them by a computes the
very numbers of the balanced run: whatever a method does, the two must end at W = a V exactly.
"""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from commands import as_json
from commands import vestige as command
from comparisons import AUTO
from conftest import clip_and_sum, example_gradients
from vestige import PrivacyEngine, layerwise_scaling, tasks
from vestige.compare.arguments import contenders
from vestige.compare.execute_run import Machine, perform
from vestige.compare.run_grid import due, grid_of
from vestige.compare.specification import Contender
from vestige.compare.stacked import Stack, StackedRun, why_not
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.reference import Reference
from vestige.layerwise_scaling import LEAST, Relative, rounded
from vestige.layout import Layout
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.clipping import Flat
from vestige.mechanism.groups import Layers, PerGroup
from vestige.methods.base import Method
from vestige.methods.registry import METHODS, make_method
from vestige.optim.averaging import Polyak
from vestige.optim.rules import Rule, named, sgd
from vestige.run_records import PrivacyTarget
from vestige.training.automatic_rate import WALK
from vestige.training.job import load
from vestige.training.planning import questions
from vestige.training.run_folder import RunFolder
from vestige.training.verify import verify

LOSS = nn.functional.cross_entropy
FEATURES, CLASSES, EXAMPLES = 64, 3, 60
COMMON = {"sample_rate": 0.3, "steps": 6, "noise_multiplier": 1.0, "delta": 1e-5, "lr": 0.3, "reproducible": 4}


class Multiplied(nn.Linear):
    """A linear layer of V, which computes with W = a V."""

    a_weight = a_bias = 1.0

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight * self.a_weight, self.bias * self.a_bias)


def network(linear=nn.Linear):
    torch.manual_seed(0)
    return nn.Sequential(linear(FEATURES, 7), nn.Tanh(), linear(7, CLASSES))


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def reparametrised(constants):
    """The same function as `network()`, by V."""
    model = network(Multiplied)
    for name, parameter in model.named_parameters():
        parameter.data /= constants[name]
        layer, kind = name.split(".")
        setattr(model[int(layer)], f"a_{kind}", constants[name])
    return model


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def by_coordinate(model, constants):
    return torch.cat([torch.full((p.numel(),), constants[name]) for name, p in model.named_parameters()])


CONSTANTS = {"0.weight": 0.5, "0.bias": 0.25, "2.weight": 1.0, "2.bias": 0.25}
RELATIVE = Relative()(network())


@dataclass(frozen=True)
class Powers:
    """Powers of two, for the network of these tests."""

    def __call__(self, model):
        return CONSTANTS


def same_as_on_v(method, engine="reference", exact=True, **changes):
    """A balanced run against the plain run of the model that multiplies."""
    options = {**COMMON, **changes}
    model, twin = network(), reparametrised(CONSTANTS)
    torch.testing.assert_close(model(data()[0]), twin(data()[0]), rtol=0, atol=0)
    first = vestige.train(model, LOSS, data(), method=replace(method, balance=Powers()), engine=engine, **options)
    second = vestige.train(twin, LOSS, data(), method=method, engine="reference", **options)
    shown = [(a.diagnostics, b.diagnostics) for a, b in zip(first, second, strict=True)]
    assert first.ledger.spent == second.ledger.spent
    with first.averaged(), second.averaged():
        found, expected = flat(model), flat(twin) * by_coordinate(twin, CONSTANTS)
    assert not torch.equal(found, flat(network()))
    if exact:
        assert torch.equal(found, expected)
        for ours, theirs in shown:
            for name, value in ours.items():
                torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, equal_nan=True)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def made(name, **options):
    fixed = {"progress": "none", "bands": 4}
    return make_method(name, **{key: value for key, value in fixed.items() if key in METHODS[name].options} | options)


def test_the_constants_of_these_tests_differ():
    expected = {"0.weight": rounded((7 / FEATURES) ** 0.5), "0.bias": 1.0, "2.weight": 1.0, "2.bias": 1.0}
    assert expected == RELATIVE


BALANCED = [name for name in METHODS if name not in ("dp-micro-adam", "dp-muon")]


@pytest.mark.parametrize("name", ["dp-micro-adam", "dp-muon"])
def test_a_rule_that_looks_across_coordinates_is_refused(name):
    with pytest.raises(ValueError, match="is not known to move in proportion to its learning rate"):
        made(name, balance="relative")


@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.everyday(
    "dp-adam", "dp-adambc", "dp-sgd", "dp-quantile", "dp-bandmf", "kalman-memory", "fo-dp-sgd", "dp-is", "dpsur"
)
def test_every_method_is_itself_on_v(name):
    same_as_on_v(made(name), lr=0.02 if "adam" in name else 0.3, sample_rate=0.25)


VARIANTS = {
    "momentum": sgd(0.9),
    "decay": sgd(0.5, weight_decay=0.1),
    "adamw": Rule(torch.optim.AdamW, {"weight_decay": 0.3}),
    "adam, coupled decay": Rule(torch.optim.Adam, {"weight_decay": 0.3}),
    **{name: named(name, {}) for name in ("nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop")},
}


@pytest.mark.parametrize("rule", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.everyday("momentum", "adam, coupled decay")
def test_every_optimizer_moves_as_on_v(rule):
    same_as_on_v(replace(make_method("dp-sgd"), rule=rule), lr=0.05)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dp-sgd", {"groups": "layers"}),
        ("dp-adambc", {"weight_decay": 0.2, "groups": "layers"}),
        ("fo-dp-sgd", {"groups": "0.*;*"}),
        ("dp-sam", {"ascent": "same"}),
        ("dp-sam", {"ascent": "own"}),
        ("dp-sat", {"along": "move"}),
        ("disk", {"extrapolation": 0.5}),
        ("dp-adam-ac", {"clip": 0.5}),
    ],
)
@pytest.mark.everyday("dp-sgd-options0", "dp-sam-options4", "disk-options6")
def test_groups_and_probes_are_those_of_v(name, options):
    same_as_on_v(made(name, **options), lr=0.05)


def test_a_noise_level_for_each_group_is_that_of_v():
    divided = replace(make_method("dp-sgd"), clip=PerGroup(0.7, (1.0, 3.0), "least-noise"), grouping=Layers())
    same_as_on_v(divided)
    same_as_on_v(replace(divided, rule=make_method("dp-adambc", weight_decay=0.1).rule), lr=0.02)


def test_averages_schedulers_and_parameter_groups():
    same_as_on_v(replace(make_method("dp-sgd"), average=Polyak()))
    same_as_on_v(
        make_method("dp-adamw"),
        lr=0.05,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6, eta_min=0.01),
    )
    ends = []
    for model, balanced in ((network(), Powers()), (reparametrised(CONSTANTS), None)):
        groups = [{"params": [model[0].weight, model[2].bias], "weight_decay": 0.3, "lr": 0.1}]
        groups += [{"params": [model[0].bias, model[2].weight]}]
        method = replace(make_method("dp-adamw"), balance=balanced)
        run = vestige.train(model, LOSS, data(), method=method, engine="reference", param_groups=groups, **COMMON)
        list(run)
        assert [len(group["params"]) for group in run.state.optimizer.param_groups] == [2, 2]  # as the user has them
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1] * by_coordinate(network(), CONSTANTS))


@pytest.mark.parametrize("name", ["dp-sgd", "disk", "dp-auto-clip", "dp-is"])
def test_the_fast_engine_agrees_with_the_reference(name):
    options = {"extrapolation": 0.5} if name == "disk" else {}  # two gradients of each example
    part = None if name == "dp-sgd" else 7
    same_as_on_v(made(name, **options), "bookkeeping", exact=False, steps=3, max_physical_batch_size=part)


# --- in float64, one example at a time ---


def step_on(model, method, inputs, targets, lr=0.5, engine="bookkeeping"):
    """What one step at rate 1, almost without noise, moves the parameters by, times the examples over the rate."""
    before = flat(model).double()
    run = vestige.train(
        model, LOSS, (inputs, targets), method=method, sample_rate=1.0, steps=1, noise_multiplier=1e-9, delta=1e-6,
        lr=lr, reproducible=0, engine=engine,
    )  # fmt: skip
    list(run)
    return ((before - flat(model).double()) * len(targets) / lr).numpy()


@pytest.mark.parametrize("engine", ["bookkeeping", "unrecorded", "reference"])
def test_a_step_in_float64(engine):
    model, (inputs, targets) = network(), data()
    a = by_coordinate(model, RELATIVE).double().numpy()
    expected = a * clip_and_sum(example_gradients(model, inputs, targets) * a, 0.4)
    moved = step_on(model, make_method("dp-sgd", max_grad_norm=0.4, balance="relative"), inputs, targets, engine=engine)
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-4)


def test_a_step_by_layers_in_float64():
    model, (inputs, targets) = network(), data()
    a = by_coordinate(model, RELATIVE).double().numpy()
    rows, cut = example_gradients(model, inputs, targets) * a, 7 * FEATURES + 7
    parts = [clip_and_sum(part, 0.4 / 2**0.5) for part in (rows[:, :cut], rows[:, cut:])]
    method = make_method("dp-sgd", max_grad_norm=0.4, balance="relative", groups="layers")
    moved = step_on(model, method, inputs, targets)
    np.testing.assert_allclose(moved, a * np.concatenate(parts), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e8])
@pytest.mark.parametrize("kind", [Reference, BookKeeping])
def test_an_example_contributes_at_most_the_bound(kind, scale):
    """Balanced, whatever its size: in V, where the noise is added."""
    model, (inputs, targets) = network(), data()
    layout = Layout.of(model, None, CONSTANTS)
    point = {name: p.detach() for name, p in model.named_parameters()}
    engine, met = kind(model, LOSS, layout), 0
    for x, y in zip(inputs[:8] * scale, targets[:8], strict=True):
        into = torch.zeros(layout.size)
        (norm,) = engine((x[None], y[None]), point, Flat(0.4), into).flatten().tolist()
        length = float(torch.linalg.vector_norm(into.double()))
        assert length <= 0.4 * (1 + 1e-6)
        rows = example_gradients(model, x[None], y[None]) * by_coordinate(model, CONSTANTS).double().numpy()
        assert norm == pytest.approx(np.linalg.norm(rows), rel=1e-4)
        assert length == pytest.approx(min(0.4, norm), rel=1e-4)
        met += norm > 0.4
    assert met or scale < 1


class Net(nn.Module):
    """A convolution without norms, and views of its images."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.conv(x))).flatten(1))


@pytest.mark.parametrize("name", ["dp-sgd", "disk"])
def test_views_and_convolutions_on_both_engines(name):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(30, 3, 8, 8, generator=generator), torch.randint(3, (30,), generator=generator)
    constants = Relative()(Net())
    assert len(set(constants.values())) > 1
    ends = {}
    for augment in (None, Augment(2, padding=1)):
        for engine in ("bookkeeping", "reference"):
            method, model = replace(make_method(name, balance="relative"), augment=augment), Net()
            options = {**COMMON, "noise_multiplier": 1e-9}
            list(vestige.train(model, LOSS, images, method=method, engine=engine, **options))
            ends[engine] = flat(model)
        if augment is None:  # the engines draw other views
            torch.testing.assert_close(ends["bookkeeping"], ends["reference"], rtol=1e-4, atol=1e-5)
        assert all(end.isfinite().all() for end in ends.values())


# --- nothing changes where there is nothing to balance ---


@pytest.mark.parametrize("engine", ["bookkeeping", "reference"])
def test_constants_of_one_are_the_plain_run(engine):
    ends = []
    for balanced in (None, lambda model: {name: 1.0 for name, _ in model.named_parameters()}):
        for name in ("dp-adamw", "dp-sat"):
            model = network()
            run = vestige.train(
                model, LOSS, data(), method=replace(make_method(name), balance=balanced), engine=engine, **COMMON
            )
            list(run)
            assert run.layout.constants is None
            ends.append(flat(model))
    for plain, ones in zip(ends[:2], ends[2:], strict=True):
        assert torch.equal(plain, ones)


def test_balance_is_no_part_of_the_price():
    for name in BALANCED:
        plain, balanced = made(name), made(name, balance="relative")
        asked = [questions(replace(each, gate=each.gate.at(100)), 0.2, 1.3, 10) for each in (plain, balanced)]
        assert asked[0] == asked[1]
        assert balanced.clip.sensitivity(balanced.layout(network())) == plain.clip.sensitivity(plain.layout(network()))


# --- stacks and loops ---


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dp-sgd", {}),
        ("dp-sgd", {"groups": "layers", "momentum": 0.5}),
        ("dp-adamw", {"weight_decay": 0.5}),
        ("dp-adambc", {"weight_decay": 0.5}),
        ("fo-dp-sgd", {}),
        ("dp-sat", {"along": "move"}),
        ("dp-sam", {"ascent": "same"}),
        ("dp-quantile", {}),
        ("dp-blt", {}),
    ],
)
@pytest.mark.everyday("dp-sgd-options0", "dp-sgd-options1", "dp-blt-options8")
def test_a_stack_is_its_runs_alone(name, options):
    """One of them plain, one with weights of another size, and so other constants, one whose biases have their own."""

    def start(seed):
        model = network()
        if seed == 6:
            model[0].weight.data *= 0.2
        return model

    kinds = {4: Relative(), 5: None, 6: Relative(), 7: Powers()}
    runs = [
        StackedRun(start(seed), replace(make_method(name, **options), balance=kind), 1.0, 0.05, seed)
        for seed, kind in kinds.items()
    ]
    assert why_not(runs[0].model, LOSS, runs[0].method) is None
    stack = Stack(runs, data(), sample_rate=0.3, steps=6, device=torch.device("cpu"))
    list(stack.train())
    for run in runs:
        alone = start(run.seed)
        options = {**COMMON, "lr": 0.05, "reproducible": run.seed}
        list(vestige.train(alone, LOSS, data(), method=run.method, **options))
        torch.testing.assert_close(flat(run.model), flat(alone), rtol=2e-4, atol=2e-5)


def test_decay_through_the_gradient_in_a_stack():
    ends = []
    method = replace(make_method("dp-sgd", balance="relative"), rule=sgd(0.5, weight_decay=0.4))
    run = StackedRun(network(), method, 1.0, 0.05, 4)
    list(Stack([run], data(), sample_rate=0.3, steps=6, device=torch.device("cpu")).train())
    alone = network()
    list(vestige.train(alone, LOSS, data(), method=method, **{**COMMON, "lr": 0.05}))
    ends = [flat(run.model), flat(alone)]
    torch.testing.assert_close(*ends, rtol=2e-4, atol=2e-5)


def loop(method, model, optimizer, *, epochs=2, ledger=None, resume=False, checkpoint=None, scheduler=None):
    engine = PrivacyEngine(reproducible=5, ledger=ledger, resume=resume)
    loader = DataLoader(TensorDataset(*data()), batch_size=12)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, method=method
    )
    if checkpoint is not None:
        engine.load_checkpoint(path=checkpoint, module=model, optimizer=optimizer)
    scheduler = scheduler and scheduler(optimizer)
    for _ in range(epochs):
        for x, y in loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = LOSS(model(x), y)
                loss.backward()
                return loss

            if make_method(method.name).probe.at_parameters:
                closure()
                optimizer.step()
            else:
                optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()
    return engine, model


@pytest.mark.parametrize("name", ["dp-sgd", "fo-dp-sgd", "dp-sat", "sma-dp-sgd"])
@pytest.mark.parametrize("groups", [None, "layers"])
@pytest.mark.everyday("None-dp-sgd", "layers-sma-dp-sgd")
def test_a_loop_is_vestige_train(name, groups):
    if groups and name == "sma-dp-sgd":
        pytest.skip("SMA-DP-SGD has groups of its own")
    method, alone = make_method(name, balance="relative", groups=groups), network()
    list(vestige.train(alone, LOSS, data(), method=method, **{**COMMON, "sample_rate": 0.2, "steps": 10, "lr": 0.1,
                                                              "reproducible": 5}))  # fmt: skip
    model = network()
    loop(method, model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(flat(model), flat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_a_loop_leaves_the_users_groups_and_schedule_alone(kind):
    """The user's optimizer keeps its groups and rates; a schedule with an absolute end is one of V."""

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=0.01)

    model, alone = network(), network()
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.1)
    loop(make_method("dp-sgd", balance="relative"), model, optimizer, scheduler=scheduler)
    (group,) = optimizer.param_groups
    assert len(group["params"]) == 4
    assert group["weight_decay"] == 0.1
    assert group["lr"] == pytest.approx(0.02, rel=0.5)
    method = replace(make_method("dp-sgd", balance="relative"), rule=Rule(kind, {"weight_decay": 0.1}))
    rates = [group["lr"] for group in scheduler_rates(kind)]
    run = vestige.train(
        alone, LOSS, data(), method=method,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: rates[min(step, 9) // 5] / 0.05),
        **{**COMMON, "sample_rate": 0.2, "steps": 10, "lr": 0.05, "reproducible": 5},
    )  # fmt: skip
    list(run)
    torch.testing.assert_close(flat(model), flat(alone), rtol=1e-4, atol=1e-5)


def scheduler_rates(kind):
    """The rates of the two epochs of a loop."""
    optimizer = kind(network().parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=0.01)
    found = [dict(optimizer.param_groups[0])]
    optimizer.step()
    schedule.step()
    return [*found, dict(optimizer.param_groups[0])]


# --- the constants are those of the beginning ---


def test_a_resumed_run_keeps_its_constants(tmp_path):
    whole = network()
    list(vestige.train(whole, LOSS, data(), method=make_method("dp-adamw", balance="relative"), **COMMON))
    options = {**COMMON, "method": make_method("dp-adamw", balance="relative"), "out": tmp_path / "run"}
    run = vestige.train(network(), LOSS, data(), **options)
    records = run.steps()
    next(records), next(records)
    records.close()
    run.ledger.close()
    other = network()
    other[0].weight.data *= 30
    assert Relative()(other) != RELATIVE
    again = vestige.train(other, LOSS, data(), resume=True, **options)
    assert again.layout.constants == RELATIVE
    list(again)
    assert torch.equal(flat(other), flat(whole))
    assert again.folder.request()["public"]["balance"] == RELATIVE
    with pytest.raises(ValueError, match="resume: method is"):
        vestige.train(network(), LOSS, data(), resume=True, **{**options, "method": "dp-adamw"})


def test_a_resumed_loop_keeps_its_constants(tmp_path):
    method, path = make_method("dp-sgd", balance="relative"), tmp_path / "ledger.jsonl"
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _ = loop(method, model, optimizer, epochs=1, ledger=path)
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    engine._ledger.close()
    other = network()
    other[0].weight.data *= 30
    kept = torch.optim.SGD(other.parameters(), lr=0.1)
    again, _ = loop(method, other, kept, epochs=0, ledger=path, resume=True, checkpoint=tmp_path / "c.pt")
    assert again._steps.passes.layout.constants == RELATIVE
    assert torch.equal(flat(other), flat(model))


# --- the rule ---


class Adapted(nn.Module):
    """Of every kind of parameter one: an embedding, attention, LoRA, norms, a head at zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.attention = nn.Embedding(50, 32), nn.MultiheadAttention(32, 2)
        self.norm, self.wide_norm = nn.LayerNorm(32), nn.LayerNorm((4, 32))
        self.a, self.b = nn.Linear(32, 8, bias=False), nn.Linear(8, 32, bias=False)
        nn.init.zeros_(self.b.weight)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 2)
        nn.init.zeros_(self.head.weight)


def test_constants_by_kind():
    found = Relative()(Adapted())
    assert not any(name.startswith("frozen") for name in found)
    assert found["words.weight"] == 1.0  # rms 1, the largest
    assert found["a.weight"] == pytest.approx(96**-0.5, rel=0.15)  # by its own rms
    assert found["b.weight"] == pytest.approx(24**-0.5, rel=0.15)  # at zero: by its fan-in, 8
    assert found["head.weight"] == pytest.approx(96**-0.5, rel=0.15)
    assert found["attention.in_proj_weight"] == pytest.approx((6 / 128 / 3) ** 0.5, rel=0.15)
    others = {"norm.weight", "norm.bias", "wide_norm.weight", "head.bias", "attention.in_proj_bias"}
    assert {found[name] for name in others} == {found["b.weight"]}  # the largest of the weights that are no embedding
    assert Relative()(network())["0.bias"] == 1.0


def test_constants_follow_the_scale_of_weights_and_nothing_else():
    model = network()
    model[0].weight.data *= 2**-5
    assert Relative()(model)["0.weight"] == RELATIVE["0.weight"] * 2**-5
    model[0].weight.data *= 2**-30
    assert Relative()(model)["0.weight"] == LEAST
    model = network()
    for parameter in model.parameters():
        parameter.data *= 1000
    assert Relative()(model) == RELATIVE
    assert Relative()(nn.LayerNorm(4)) == {"weight": 1.0, "bias": 1.0}


@pytest.mark.parametrize("constant", [2.0, 0.0, LEAST / 2, float("nan"), torch.ones(3), "1"])
def test_constants_out_of_range_are_refused(constant):
    with pytest.raises(ValueError, match="'0.weight' is .* must be a number in"):
        Layout.of(network(), None, {**CONSTANTS, "0.weight": constant})


def test_each_parameter_needs_its_constant():
    with pytest.raises(ValueError, match="'2.bias'"):
        Layout.of(network(), None, {name: 1.0 for name in CONSTANTS if name != "2.bias"})


def test_what_cannot_be_balanced_is_refused():
    for optimizer in ("rprop", "asgd", "adafactor"):
        with pytest.raises(ValueError, match="balance: the optimizer"):
            replace(make_method("dp-sgd", balance="relative"), rule=named(optimizer, {}))

    class Mine(torch.optim.SGD):
        pass

    model = network()
    with pytest.raises(ValueError, match="balance: the optimizer Mine"):
        loop(make_method("dp-sgd", balance="relative"), model, Mine(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="balance='much' is unknown; choose from plain, relative"):
        make_method("dp-sgd", balance="much")


def test_it_is_part_of_a_methods_identity():
    assert make_method("dp-sgd", balance="relative").identity["parts"] == {"balance": "Relative()"}
    assert make_method("dp-sgd", balance="plain").identity == make_method("dp-sgd").identity
    assert Method(balance=layerwise_scaling.named("relative")) != Method()


# --- the automatic rate ---


@pytest.mark.parametrize("name", ["dp-sgd", "dp-adamw"])
def test_the_automatic_rate_is_that_of_v(name):
    """The rule of plain steps on V, with a constant of its own."""
    options = {**COMMON, "lr": "auto"}
    ours = vestige.train(network(), LOSS, data(), method=make_method(name, balance="relative"), **options)
    theirs = vestige.train(reparametrised(RELATIVE), LOSS, data(), method=name, engine="reference", **options)
    assert ours.plan.lr == pytest.approx(theirs.plan.lr, rel=1e-6)
    assert f"{WALK:g} * |V0|" in ours.plan.lr_reason
    assert f"{WALK:g} * |W0|" in theirs.plan.lr_reason


# --- from the terminal ---


def test_the_command_trains_balanced_and_standardised_and_resumes_so(tmp_path):
    words = ["train", "--task", "digits-mlp", "--method", "dp-adamw", "--noise-multiplier", "1", "--steps", "4"]
    result = as_json(*words, "--balance", "relative", "--standardise", "--out", tmp_path / "run")
    assert result["steps"] == 4
    public = json.loads((tmp_path / "run" / "run.json").read_text())["public"]
    assert public["method"]["parts"] == {"balance": "Relative()"}
    assert public["balance"] == Relative()(tasks.load("digits-mlp").model)
    assert f"{WALK:g} * |V0|" in public["lr_reason"]
    job = load(RunFolder(tmp_path / "run"))
    assert (job.balance, job.standardise) == ("relative", True)
    assert verify(tmp_path / "run").guarantee.epsilon == result["epsilon"]
    code, _, error = command(*words, "--balance", "much")
    assert (code, "choose from plain, relative" in error) == (2, True)


@pytest.mark.parametrize("stack", [True, False])
def test_a_comparison_has_both(stack):
    both = [
        Contender(label, name, options) for label, name, options in contenders(["dp-sgd", "dp-sgd:balance=relative"])
    ]
    noise = (PrivacyTarget("noise_multiplier", 1.0),)
    asked = replace(AUTO, contenders=tuple(both), budgets=noise, reproducible=True)
    wanted = due(asked, grid_of(asked), {})
    made = {record.run.label: record for record in perform(wanted, Machine(stack=stack))}
    assert made["dp-sgd"].charged == made["dp-sgd:balance=relative"].charged
    assert made["dp-sgd"].statement.lr != made["dp-sgd:balance=relative"].statement.lr
    assert all(record.stacked == (2 if stack else 1) for record in made.values())

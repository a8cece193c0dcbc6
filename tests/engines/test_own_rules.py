"""Is a rule of a user's own used where it is right, and refused where it is not?"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vestige
from commands import vestige as command
from engine_checks import square
from loops import private, same_step
from other_models import exact
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.example_axis.composite_layers import REGISTERED
from vestige.engines.parity import compare_engines
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-layer.md"


@pytest.fixture(autouse=True)
def _own_rules():
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


@pytest.fixture
def page(monkeypatch):
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    exec(code, module.__dict__)
    return module


def around(layer: nn.Module, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), layer, nn.Flatten(), nn.Linear(width, 2))


def batch(examples: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 3), torch.randn(examples, 2)


def test_the_rule_of_the_page_is_exact_in_the_engine_and_in_a_loop(page):
    exact(around(page.Gain(4)), batch(), square)
    x, y = batch(12)
    _, model, optimizer, loader = private(around(page.Gain(4)), (x, y))
    for x, y in loader:
        same_step(model, optimizer, x, y, loss=lambda m, x, y: nn.functional.mse_loss(m(x), y))
        break
    assert compare_engines(around(page.Gain(4)), square, batch()).agrees


def test_a_function_of_torchs_operators_needs_no_rule(page):
    REGISTERED.clear()
    exact(around(page.Gain(4)), batch(), square)


@torch.library.custom_op("vestige_tests::own", mutates_args=())
def own(x: Tensor, scale: Tensor) -> Tensor:
    return x.exp() * scale


own.register_autograd(
    lambda ctx, signal: (signal * ctx.x.exp() * ctx.scale, (signal * ctx.x.exp()).sum(dim=0)),
    setup_context=lambda ctx, inputs, output: vars(ctx).update(x=inputs[0], scale=inputs[1]),
)


def test_without_a_rule_a_kernel_is_left_to_the_reference_engine(page, monkeypatch):
    REGISTERED.clear()
    monkeypatch.setattr(page.Gain, "forward", lambda self, x: own(x, self.scale))
    model = around(page.Gain(4))
    layout = Layout.of(model)
    with pytest.warns(
        UserWarning, match="own, an operator of another library.*such steps are left to the reference engine"
    ):
        BookKeeping(model, square, layout)(batch(), layout.parameters(model), Flat(1.0), torch.zeros(layout.size))


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen = nn.Linear(4, 4), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, input: Tensor, *, power: Tensor | None = None) -> Tensor:
        return self.inner(input) * self.frozen


def right(module, inputs, signal):
    return {"inner.weight": signal[:, :, None] * inputs[0][:, None, :], "inner.bias": signal}


WRONG = {
    "twice as large": lambda m, i, g: {**right(m, i, g), "inner.bias": 2 * g},
    "off by a hundredth": lambda m, i, g: {**right(m, i, g), "inner.bias": 1.01 * g},
    "zero": lambda m, i, g: {**right(m, i, g), "inner.weight": torch.zeros(len(g), 4, 4)},
    "everybody's": lambda m, i, g: {**right(m, i, g), "inner.bias": g.mean(dim=0).expand_as(g)},
    "another's": lambda m, i, g: {name: each.flip(0) for name, each in right(m, i, g).items()},
    "of positive inputs": lambda m, i, g: {**right(m, i, g), "inner.weight": g[:, :, None] * i[0].abs()[:, None, :]},
}


def test_a_right_rule_for_a_module_with_others_inside_and_frozen_parameters():
    vestige.register_rule(Affine, right)
    exact(around(Affine()), batch(), square)
    REGISTERED.pop(Affine)
    exact(around(Affine()), batch(), square)


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.everyday("False-twice as large", "False-zero")
def test_a_wrong_rule_is_refused_by_name(how, first):
    vestige.register_rule(Affine, WRONG[how])
    model = nn.Sequential(Affine(), nn.Linear(4, 2)) if first else around(Affine())
    data = (torch.randn(12, 4 if first else 3), torch.randn(12, 2))
    layout = Layout.of(model)
    with pytest.raises(ValueError, match="the rule for Affine gives another gradient of '.*inner.(weight|bias)'"):
        BookKeeping(model, square, layout)(data, layout.parameters(model), Flat(1.0), torch.zeros(layout.size))
    _, model, _, loader = private(model, data)
    with pytest.raises(ValueError, match="the rule for Affine gives another gradient of"):
        for x, y in loader:
            square(model(x), y).mean().backward()


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (lambda m, i, g: {"inner.weight": right(m, i, g)["inner.weight"]}, "no gradient of 'inner.bias'"),
        (lambda m, i, g: {**right(m, i, g), "inner.bias": g.sum(0)}, r"gives \(4,\) of 'inner.bias', where \(\d+, 4\)"),
        (lambda m, i, g: {**right(m, i, g), "inner.bias": 0.0}, "gives float of 'inner.bias'"),
        (lambda m, i, g: None, "no gradient of 'inner.weight'"),
    ],
)
def test_a_rule_that_gives_something_else_is_told_so(rule, problem):
    vestige.register_rule(Affine, rule)
    _, model, _, loader = private(around(Affine()), batch(12))
    with pytest.raises(ValueError, match=f"the rule for Affine .*{problem}"):
        for x, y in loader:
            square(model(x), y).mean().backward()


def test_a_subclass_that_computes_something_else_has_no_rule():
    vestige.register_rule(Affine, WRONG["zero"])

    class Other(Affine):
        def forward(self, input: Tensor) -> Tensor:
            return self.inner(input) + 1

    exact(around(Other()), batch(), square)


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine, self.head = Affine(), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.tanh(self.affine(input.flatten(0, 1))).view_as(input).mean(dim=1))


def test_rows_of_one_example_are_added_up():
    vestige.register_rule(Affine, right)
    exact(Folded(), (torch.randn(4, 3, 4), torch.randn(4, 2)), square)


@pytest.mark.parametrize("thing", [torch.exp, nn.Linear(2, 2), int])
def test_only_classes_of_modules_have_rules(thing):
    with pytest.raises(TypeError, match="register_rule takes a class of modules"):
        vestige.register_rule(thing, right)
    with pytest.raises(TypeError, match="the rule for Affine must be a function"):
        vestige.register_rule(Affine, 3)


def test_the_doctor_holds_a_rule_against_the_reference(tmp_path):
    page = PAGE.read_text().split("```python\n")[1].split("```")[0]
    task = (
        "\n\ndef task():\n    model = torch.nn.Sequential(torch.nn.Linear(3, 4), Gain(4))\n"
        "    return model, torch.nn.functional.mse_loss, (torch.randn(64, 3), torch.randn(64, 4))\n"
    )
    (tmp_path / "right.py").write_text(page + task)
    (tmp_path / "wrong.py").write_text(
        page.replace("output_gradient * inputs", "0.9 * output_gradient * inputs") + task
    )
    code, out, _ = command("doctor", f"{tmp_path / 'right.py'}:task", "--parity")
    assert code == 0, out
    code, out, err = command("doctor", f"{tmp_path / 'wrong.py'}:task", "--parity")
    assert code != 0
    assert "the rule for Gain gives another gradient" in out + err

"""Are the models people train exact, in the engine and in a loop of their own, and is none of their uses replayed?"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.optim import SGD

from loops import flat, oracle, private
from other_models import OTHERS, built, called, exact, nothing_replayed, positional
from vestige.engines.example_axis import sums
from vestige.engines.per_example import kernels

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

FAR = 256.0
"""So large a step that the rounding of the weights does not hide what it was made of."""


def slow(name):
    """A model that takes seconds, where others stand for it from day to day."""
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.everyday("GPT-2 124M")
def test_norms_and_clipped_sum_in_the_engine(name):
    exact(*positional(name, 4))


def step_of_a_loop(model, name, context=nullcontext, padded=0):
    """(the clipped sum that a step of a user's loop makes, the same by one example at a time in float64)"""
    other = OTHERS[name]
    batch = other.examples(4, True)
    if padded:
        batch["attention_mask"][1:, -padded:] = 0

    def loss(model, *example):
        given = dict(zip(batch, example, strict=True))
        return other.loss(called(model, given), given)

    expected = torch.from_numpy(oracle(model, loss, list(zip(*batch.values(), strict=True))))
    _, model, optimizer, loader = private(
        model, tuple(batch.values()), batch=4, optimizer=lambda parameters, lr: SGD(parameters, lr=FAR)
    )
    before = flat(model)
    with nothing_replayed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch's, on a CPU without bfloat16
        for rows in loader:
            with context():
                value = loss(model, *rows)
            value.backward()
            optimizer.step()
    return (before - flat(model)).double() * 4 / FAR, expected


def off(pair):
    got, expected = pair
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.everyday("GPT-2 124M", "Mixtral 140M", "T5-small")
def test_a_step_of_a_loop(name):
    assert off(step_of_a_loop(built(name), name)) < 1e-5


@pytest.mark.parametrize("name", ["GPT-2 124M", "Llama 0.9B LoRA", slow("T5-small"), "ViT-B/16"])
@pytest.mark.everyday("GPT-2 124M")
def test_rows_that_are_laid_apart(name, monkeypatch):
    apart, laid = [], sums.laid
    monkeypatch.setattr(kernels, "ALIGNED", {"cpu"})
    monkeypatch.setattr(kernels, "LONG", 5)
    monkeypatch.setattr(kernels, "LARGE", 1)
    monkeypatch.setattr(sums, "laid", lambda tracker, rows: apart.append(laid(tracker, rows)) or apart[-1])
    assert off(step_of_a_loop(built(name), name)) < 1e-5
    exact(*positional(name, 4))
    assert any(signal.shape[-1] == 97 and signal.stride(-2) == 128 for signal in apart) is (
        name in {"GPT-2 124M", "T5-small"}
    )


@pytest.mark.parametrize("name", ["BERT-base", slow("T5-small"), "Llama 0.9B LoRA"])
def test_padded_sentences(name):
    assert off(step_of_a_loop(built(name), name, padded=4)) < 1e-5


# --- as people run them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GPT-2 124M", slow("Llama 0.9B DoRA"), slow("T5-small")])
def test_activation_checkpointing(name):
    model = built(name)
    model.gradient_checkpointing_enable()
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    model.config.use_cache = False
    assert off(step_of_a_loop(model, name)) < 1e-5


@pytest.mark.parametrize("name", ["BERT-base", slow("T5-small")])
def test_attention_of_its_own_spelling(name):
    model = built(name)
    assert model.config._attn_implementation == "sdpa", "as the other tests have it"
    model.set_attn_implementation("eager")
    assert off(step_of_a_loop(model, name)) < 1e-5


@pytest.mark.parametrize("name", ["GPT-2 124M", "Llama 0.9B LoRA", slow("T5-small"), "ViT-B/16", slow("Mixtral 140M")])
def test_bfloat16_autocast(name):
    found = step_of_a_loop(built(name), name, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert 1e-5 < off(found) < 0.05, "rounded, and no more than that"


@pytest.mark.parametrize("name", ["Llama 0.9B LoRA", slow("Llama 0.9B DoRA")])
def test_frozen_weights_in_bfloat16_under_adapters_in_float32(name):
    model = built(name)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert 1e-5 < off(step_of_a_loop(model, name)) < 0.05


def test_dropout_and_stochastic_depth_stay_in_the_fast_path():
    for name in ("GPT-2 124M", "T5-small", "ConvNeXt-T"):
        torch.manual_seed(0)
        model, other = OTHERS[name].build(True).train(), OTHERS[name]
        batch = other.examples(4, True)
        _, model, optimizer, loader = private(model, tuple(batch.values()), batch=4)
        with nothing_replayed():
            for rows in loader:
                given = dict(zip(batch, rows, strict=True))
                other.loss(called(model, given), given).backward()
                optimizer.step()


def test_a_loss_that_balances_the_experts_over_the_batch_is_refused():
    model, other = built("Mixtral 140M"), OTHERS["Mixtral 140M"]
    model.config.output_router_logits = True
    batch = other.examples(4, True)
    _, model, _, loader = private(model, tuple(batch.values()), batch=4)
    for rows in loader:
        given = dict(zip(batch, rows, strict=True))
        outputs = called(model, given)
        with pytest.raises(
            ValueError, match="no row for each example .scatter_add_ at .*places that are not their own"
        ):
            (other.loss(outputs, given) + outputs.aux_loss).backward()

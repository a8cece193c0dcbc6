"""Are texts of many lengths trained on in a few passes, and as if each were alone? Beside one example at a time."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vestige
from captured_on_cpu import captured_on_cpu
from vestige.mechanism.loading import Rows
from vestige.mechanism.text_padding import PaddedAlone, TextPadding, shortest_on_gpu

transformers = pytest.importorskip("transformers")
ROWS, POSITIONS = 40, 80


def classifier() -> nn.Module:
    sizes = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 20}
    config = transformers.DistilBertConfig(
        **sizes,
        max_position_embeddings=POSITIONS,
        num_labels=3,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
    )
    return transformers.DistilBertForSequenceClassification(config)


def writer() -> nn.Module:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": POSITIONS}
    config = transformers.GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def untrained() -> nn.Module:
    """A writer whose outputs are zeros: they tell nothing about padding."""
    model = writer()
    model.lm_head = nn.Linear(8, 20, bias=False)
    nn.init.zeros_(model.lm_head.weight)
    return model


def texts(long: int, labels: str):
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, long, (ROWS,), generator=random).tolist()
    ids = [torch.randint(1, 20, (length,), generator=random) for length in lengths]
    return [
        {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each if labels == "next" else label}
        for each, label in zip(ids, torch.randint(3, (ROWS,), generator=random), strict=True)
    ]


def next_word(outputs, labels):
    return F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:])


def over_all(outputs, labels):
    """A loss that takes notice of padding."""
    return outputs.logits.square().mean()


def of_class(outputs, labels):
    return F.cross_entropy(outputs.logits, labels)


def alone(model, loss, data, lr, bound):
    """One step by plain autograd, one text at a time, as it is written."""
    before, total = [p.detach().clone() for p in model.parameters()], [torch.zeros_like(p) for p in model.parameters()]
    for row in data:
        target = row["labels"][None]
        outputs = model(**{name: row[name][None] for name in ("input_ids", "attention_mask")})
        gradients = torch.autograd.grad(loss(outputs, target), list(model.parameters()), allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(before, gradients, strict=True)]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient * min(1.0, bound / max(float(norm), 1e-30))
    return torch.cat([(p - lr * sum_ / len(data)).flatten() for p, sum_ in zip(before, total, strict=True)])


def trained(model, loss, data, **options):
    """One step on all texts; and in how many passes of the model."""
    passes = []
    given = {"sample_rate": 1.0, "steps": 1, "delta": 1e-5, "noise_multiplier": 1e-9, "lr": 0.5, "max_grad_norm": 0.1}
    training = vestige.train(model, loss, data, reproducible=1, **given, **options)
    hook = model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    list(training)
    hook.remove()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), sum(passes)


CASES = {
    "a class": (classifier, of_class, "class", 3),  # 32, 64 and 78: there is no place for more
    "next word": (writer, next_word, "next", 3),
    "a loss that takes notice": (writer, over_all, "next", None),
    "a loss that takes notice, of zeros": (untrained, over_all, "next", None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.everyday("next word", "a loss that takes notice, of zeros")
def test_texts_of_many_lengths_are_trained_on_in_a_few_passes(case):
    build, loss, labels, passes = CASES[case]
    torch.manual_seed(0)
    model, data = build(), texts(POSITIONS - 2, labels)
    expected = alone(deepcopy(model).double(), loss, data, 0.5, 0.1)
    found, count = trained(model, loss, data)
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert count == (passes if passes is not None else len({len(row["input_ids"]) for row in data}))


def test_captured_steps_take_large_groups_in_parts():
    def run(captured):
        torch.manual_seed(0)
        model, data = classifier(), texts(60, "class")
        options = {"batch_size": 12, "steps": 4, "delta": 1e-5, "noise_multiplier": 1e-9, "lr": 0.5, "reproducible": 1}
        list(vestige.train(model, F.cross_entropy, data, **options, cuda_graphs=captured))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plain = run(captured=False)
    with captured_on_cpu() as graphs:
        replayed = run(captured=True)
    assert graphs.replays >= 8
    assert torch.allclose(plain, replayed, atol=1e-6)


def test_a_sample_is_one_pass_for_each_of_its_lengths():
    """How many texts of one length a sample has is left to chance: few samples have more than the first graph takes."""
    steps, lengths = 20, 2
    with captured_on_cpu() as graphs:
        training = vestige.train(
            classifier(), F.cross_entropy, texts(60, "class"), sample_rate=0.6, steps=steps, noise_multiplier=1.0,
            delta=1e-5, lr=0.1, device="cpu", target="labels", reproducible=3,
        )  # fmt: skip
        list(training)
    assert steps < graphs.replays <= lengths * steps, graphs.replays


def test_texts_of_one_padded_length_are_read_as_one_batch():
    """Those that have it already, too."""
    lengths = [20, 64, 33, 64, 7]
    data = [{"input_ids": torch.arange(1, n + 1), "attention_mask": torch.ones(n).long(), "labels": n} for n in lengths]
    rows = Rows(data, None, "labels")
    rows.pad(PaddedAlone(TextPadding(token=9, longest=512), ("input_ids", "attention_mask", "labels"), shortest=64))
    [[ids, mask, labels]] = rows.groups(range(5))
    assert labels.tolist() == lengths
    assert mask.sum(dim=1).tolist() == lengths
    expected = [F.pad(row["input_ids"], (0, 64 - len(row["input_ids"])), value=9) for row in data]
    assert torch.equal(ids, torch.stack(expected))
    assert len(rows.groups([0])[0]) == 3
    rows.pad(PaddedAlone(TextPadding(token=9, longest=512), ("input_ids", "attention_mask", "labels"), shortest=32))
    assert sorted(len(batch[0]) for batch in rows.groups(range(5))) == [2, 3]


def test_small_samples_are_of_fewer_lengths_on_a_gpu():
    """Half of few positions take it hardly less time, and another length is another pass."""
    assert [shortest_on_gpu(rows) for rows in (1, 32, 63.9, 64, 1000)] == [128, 128, 128, 64, 64]


def test_workers_pad_texts_too():
    found = []
    for workers in (0, 1):
        torch.manual_seed(0)
        found.append(trained(classifier(), F.cross_entropy, texts(60, "class"), num_workers=workers))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == 2

"""Is `model(**batch).loss` of a Hugging Face model the mean of its examples' own losses, and private as such?"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import vestige
from conftest import clip_and_sum
from loops import BOUND, LR, flat
from vestige import PrivacyEngine

transformers = pytest.importorskip("transformers")

ROWS, BATCH, LENGTH = 60, 10, 8
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def tokens(low=3):
    return torch.randint(low, 90, (ROWS, LENGTH))


def masked():
    """Sentences of several lengths, padded at their end; labels are ignored there."""
    ids, lengths = tokens(), torch.randint(3, LENGTH + 1, (ROWS, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def bert(kind, **options):
    config = transformers.BertConfig(
        vocab_size=97, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        **TINY, **options,
    )  # fmt: skip
    return getattr(transformers, f"BertFor{kind}")(config)


def gpt2():
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 97, "n_positions": 16}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **sizes, bos_token_id=0, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
    )


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 97}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


def bart():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 97, "max_position_embeddings": 16}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, dropout=0.0, decoder_start_token_id=2, forced_eos_token_id=None)
    )


def deberta():
    config = transformers.DebertaV2Config(
        vocab_size=97, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pooler_dropout=0.0, num_labels=1, relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True,
        norm_rel_ebd="layer_norm", position_buckets=4, position_biased_input=False, **TINY,
    )  # fmt: skip
    return transformers.DebertaV2ForSequenceClassification(config)


def segformer():
    sizes = {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
    drops = {"classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    config = transformers.SegformerConfig(**sizes, **drops, decoder_hidden_size=8, num_labels=5)
    return vestige.fix(transformers.SegformerForSemanticSegmentation(config))


def prompted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(gpt2(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def ended():
    ids = tokens(3)
    ids[:, -1] = 2
    return ids


def ending():
    """BART classifies by what it makes of the token at the end, and refuses sequences without one."""
    config = bart().config
    config.num_labels, config.classifier_dropout = 3, 0.0
    return transformers.BartForSequenceClassification(config)


def boxes():
    config = transformers.LayoutLMConfig(
        vocab_size=97, max_position_embeddings=16, max_2d_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=97, **TINY,
    )  # fmt: skip
    return transformers.LayoutLMForTokenClassification(config)


def of_classes():
    return {**masked(), "labels": torch.randint(3, (ROWS,))}


CASES = {
    "next token": (gpt2, masked),
    "masked tokens": (lambda: bert("MaskedLM"), masked),
    "tags": (lambda: bert("TokenClassification", num_labels=97), masked),
    "classes": (lambda: bert("SequenceClassification", num_labels=3), of_classes),
    "numbers": (
        lambda: bert("SequenceClassification", num_labels=1),
        lambda: {**masked(), "labels": torch.rand(ROWS)},
    ),
    "two numbers": (
        lambda: bert("SequenceClassification", num_labels=2, problem_type="regression"),
        lambda: {**masked(), "labels": torch.rand(ROWS, 2)},
    ),
    "several classes": (
        lambda: bert("SequenceClassification", num_labels=4, problem_type="multi_label_classification"),
        lambda: {**masked(), "labels": torch.randint(2, (ROWS, 4)).float()},
    ),
    "a span": (
        lambda: bert("QuestionAnswering"),
        lambda: {
            **{name: part for name, part in masked().items() if name != "labels"},
            "start_positions": torch.randint(LENGTH, (ROWS,)),
            "end_positions": torch.randint(LENGTH, (ROWS,)),
        },
    ),
    "a decoder": (t5, masked),
    "a decoder that reads what was to be written": (
        bart,
        lambda: {**masked(), "labels": torch.randint(3, 90, (ROWS, LENGTH - 2))},
    ),
    "numbers without an axis": (deberta, lambda: {**masked(), "labels": torch.rand(ROWS)}),
    "pixels": (
        segformer,
        lambda: {
            "pixel_values": torch.randn(ROWS, 3, 32, 32),
            "labels": torch.where(torch.rand(ROWS, 16, 16) < 0.2, 255, torch.randint(5, (ROWS, 16, 16))),
        },
    ),
    "after a prompt": (prompted, masked),
    "of sequences that must end": (ending, lambda: {**of_classes(), "input_ids": ended()}),
    "of boxes": (boxes, lambda: {**masked(), "bbox": torch.randint(50, (ROWS, LENGTH, 4)).sort(dim=2).values}),
}


class Sentences(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return {name: part[row] for name, part in self.columns.items()}


def private(model, columns, **options):
    engine = PrivacyEngine(reproducible=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(Sentences(columns), batch_size=BATCH),
        noise_multiplier=1e-9, max_grad_norm=BOUND, **options,
    )  # fmt: skip
    return engine, model, optimizer, loader


def oracle(model, batch, divided=lambda own, row: own):
    """Each example by itself, in float64, with the loss that the model itself computes of it."""
    twin = copy.deepcopy(model).double()
    twin._forward_hooks.clear(), twin._forward_pre_hooks.clear()
    rows = []
    for place in range(len(batch["labels" if "labels" in batch else "input_ids"])):
        row = {name: part[[place]] for name, part in batch.items()}
        row = {name: part.double() if part.is_floating_point() else part for name, part in row.items()}
        twin.zero_grad()
        divided(twin(**row).loss, row).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters() if p.requires_grad]
        rows.append(np.concatenate([g.numpy().ravel() for g in grads]))
    return clip_and_sum(np.stack(rows), BOUND)


def step(model, optimizer, batch, **more):
    before = flat(model)
    optimizer.zero_grad()
    outputs = model(**batch, **more)
    outputs.loss.backward()
    optimizer.step()
    return outputs, ((before - flat(model)) * BATCH / LR).double().numpy()


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_model_is_that_of_its_examples(name):
    torch.manual_seed(0)
    build, columns = CASES[name]
    engine, model, optimizer, loader = private(build().train(), columns())
    for place, batch in zip(range(2), loader, strict=False):
        expected = oracle(model, batch)
        outputs, moved = step(model, optimizer, batch)
        np.testing.assert_allclose(moved, expected, rtol=2e-3, atol=5e-5)
        assert next(iter(outputs)) == "loss"
        assert outputs[0] is outputs.loss
        assert engine._ledger.spent.total() == place + 1
    assert engine.guarantee(1e-3).assumption("loss_per_example").status == "checked"
    alone = [float(copy.deepcopy(model).eval()(**{k: v[[i]] for k, v in batch.items()}).loss) for i in range(3)]
    assert len(set(alone)) == 3


LOOKS_USUAL = {
    "classes with weights": lambda logits, labels: (F.cross_entropy(logits, labels, reduction="none") * (1 + (labels > 1))).mean(),
    "a class that is ignored": lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=2, reduction="sum")
    / (labels != 2).sum().clamp(min=1),
    "an error that grows slowly": lambda logits, labels: F.huber_loss(logits[:, :1].flatten(), labels, delta=1.5),
}  # fmt: skip


class LooksUsual(nn.Module):
    """A model whose own loss is one of the usual on labels of two classes, or on numbers between 0 and 1."""

    def __init__(self, way):
        super().__init__()
        self.way, self.config = way, None
        self.inner = bert("SequenceClassification", num_labels=1 if "error" in way else 3)

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.inner(input_ids, attention_mask).logits
        loss = None if labels is None else LOOKS_USUAL[self.way](logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("way", LOOKS_USUAL)
def test_a_loss_that_only_looks_usual_is_not_replaced(way):
    torch.manual_seed(0)
    columns = of_classes() if "error" not in way else {**masked(), "labels": torch.rand(ROWS)}
    engine, model, optimizer, loader = private(LooksUsual(way).train(), columns)
    with pytest.raises(ValueError, match="none of the usual"):
        step(model, optimizer, next(iter(loader)))


def test_a_public_number_of_tokens():
    torch.manual_seed(0)
    engine, model, optimizer, loader = private(gpt2().train(), masked(), tokens_per_example=5)
    batch = next(iter(loader))
    counted = lambda own, row: own * (row["labels"][:, 1:] != -100).sum() / 5
    expected = oracle(model, batch, counted)
    np.testing.assert_allclose(step(model, optimizer, batch)[1], expected, rtol=2e-3, atol=5e-5)


def test_everybodys_number_of_tokens_is_no_divisor():
    torch.manual_seed(0)
    engine, model, optimizer, loader = private(gpt2().train(), masked())
    batch = next(iter(loader))
    expected = oracle(model, batch)
    moved = step(model, optimizer, batch, num_items_in_batch=torch.tensor(17))[1]
    np.testing.assert_allclose(moved, expected, rtol=2e-3, atol=5e-5)


def test_labels_are_kept_from_a_model_that_needs_them_for_its_loss_only():
    for build, dropped in ((gpt2, True), (t5, False)):
        torch.manual_seed(0)
        engine, model, optimizer, loader = private(build().train(), masked())
        step(model, optimizer, next(iter(loader)))
        assert [known.dropped for known in engine._steps.passes._labels._known.values()] == [dropped]


def test_a_loss_that_is_none_of_the_usual_can_be_looked_at():
    class Balanced(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = gpt2()

        def forward(self, **batch):
            outputs = self.body(**batch)
            outputs.loss = outputs.loss + 0.1 * outputs.logits.square().mean()
            return outputs

    engine, model, optimizer, loader = private(Balanced().train(), masked())
    outputs = model(**next(iter(loader)))
    assert float(outputs.loss.detach()) > 0
    with pytest.raises(ValueError, match="no row for each example"):
        outputs.loss.backward()


def padded_to_the_longest(rows):
    length = max(int(row["attention_mask"].sum()) for row in rows)
    return {name: torch.stack([row[name][:length] for row in rows]) for name in rows[0]}


def test_sentences_padded_to_the_longest_of_their_batch():
    """An example's loss is the mean over its own tokens, however far it was padded; what is assumed is said."""
    torch.manual_seed(1)
    model, columns = gpt2().train(), masked()
    engine = PrivacyEngine(reproducible=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(Sentences(columns), batch_size=2, collate_fn=padded_to_the_longest)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1e-9, max_grad_norm=BOUND
    )
    seen = set()
    for batch in loader:
        expected = (
            oracle(model, batch) if batch["input_ids"][:, :-1].any() else 0.0
        )  # an empty sample is one made-up row
        moved = step(model, optimizer, batch)[1] * 2 / BATCH
        np.testing.assert_allclose(moved, expected, rtol=2e-3, atol=5e-5)
        seen.add(batch["input_ids"].shape[1])
    assert len(seen) > 1
    assert engine.guarantee(1e-3).assumption("padding").status == "assumed"


def trained_on_lengths(model, loss, columns):
    """A loop over batches of which every other one is longer."""
    engine = PrivacyEngine(reproducible=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(Sentences(columns), batch_size=BATCH)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1e-9, max_grad_norm=BOUND
    )
    for place, batch in enumerate(loader):
        cut = {name: part[:, : LENGTH - place % 2] if part.dim() > 1 else part for name, part in batch.items()}
        loss(engine, model, cut).backward()
        optimizer.step()


def test_a_divisor_of_the_longest_example_is_refused_however_the_loss_is_taken():
    torch.manual_seed(0)
    numbers = {"input_ids": torch.randn(ROWS, LENGTH, 3), "labels": torch.randn(ROWS, LENGTH, 2)}

    def by_criterion(engine, model, batch):
        return engine.criterion(nn.MSELoss())(model(batch["input_ids"]), batch["labels"])

    with pytest.raises(ValueError, match="decided by the longest example"):
        trained_on_lengths(nn.Linear(3, 2), by_criterion, numbers)
    build, columns = CASES["a span"]
    answers = {**columns(), "start_positions": torch.randint(3, (ROWS,)), "end_positions": torch.randint(3, (ROWS,))}
    with pytest.raises(ValueError, match="decided by the longest example"):
        trained_on_lengths(build().train(), lambda engine, model, batch: model(**batch).loss, answers)


def test_whoever_collates_is_told_what_padding_must_not_do():
    for collate, said in ((None, False), (padded_to_the_longest, True)):
        engine, model = PrivacyEngine(), gpt2().train()
        loader = DataLoader(Sentences(masked()), batch_size=BATCH, collate_fn=collate)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=BOUND
        )
        assert (engine.guarantee(1e-3).assumption("padding").status == "assumed") == said


def test_sentences_of_one_token_have_a_loss():
    columns = {name: part[:, :1] for name, part in masked().items()}
    engine, model, optimizer, loader = private(gpt2().train(), columns)
    outputs, moved = step(model, optimizer, next(iter(loader)))
    assert float(outputs.loss.detach()) == 0.0
    np.testing.assert_allclose(moved, 0.0, atol=1e-6)  # nothing but the noise


def test_a_label_that_is_no_class_is_not_shown():
    columns = {**of_classes(), "labels": torch.full((ROWS,), 987654)}
    engine, model, optimizer, loader = private(bert("SequenceClassification", num_labels=3).train(), columns)
    with pytest.raises(ValueError, match="outside the model's 3 classes") as error:
        model(**next(iter(loader)))
    assert "987654" not in str(error.value)

"""Which data does `vestige.train` take? Rows and columns, by place and by name, of any length, from anywhere."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import vestige
from conftest import make_toy
from vestige.training.doctor import examine

LOSS = nn.functional.cross_entropy
BASE = {
    "noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 4, "lr": 0.1, "method": "dp-sgd",
    "reproducible": 1,
}  # fmt: skip


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters() if p.requires_grad])


def trained(data, model=None, loss=LOSS, **changes):
    model = model or make_toy()[0]
    list(vestige.train(model, loss, data, **{**BASE, **changes}))
    return flat(model)


class Named(nn.Module):
    """Takes its input by name, and answers as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.toy = make_toy()[0]

    def forward(self, *, inputs, attention_mask=None):
        logits = self.toy(inputs)
        return _output(logits) if attention_mask is None else _output(logits + 0 * attention_mask[:, :1])


def _output(logits):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.SequenceClassifierOutput(logits=logits)


X, Y = make_toy()[1]
BY_PLACE = {
    "tensors": (X, Y),
    "a list of tensors": [X, Y],
    "numpy": (X.numpy(), Y.numpy()),
    "numpy in float64": (X.double().numpy(), Y.numpy()),
    "lists of numbers": (X.tolist(), Y.tolist()),
    "a TensorDataset": TensorDataset(X, Y),
    "a list of tuples": list(zip(X, Y, strict=True)),
    "a list of numpy rows": [(x.numpy(), int(y)) for x, y in zip(X, Y, strict=True)],
    "a list of lists": [[x.tolist(), int(y)] for x, y in zip(X, Y, strict=True)],
    "a loader": DataLoader(TensorDataset(X, Y), batch_size=12),
    "a loader with workers": DataLoader(TensorDataset(X, Y), batch_size=12, num_workers=1),
}
BY_NAME = {
    "columns": {"inputs": X, "labels": Y},
    "rows": [{"inputs": x, "labels": y} for x, y in zip(X, Y, strict=True)],
    "rows of plain numbers": [{"labels": int(y), "inputs": x.tolist()} for x, y in zip(X, Y, strict=True)],
}


@pytest.mark.filterwarnings("ignore:data is a DataLoader")
@pytest.mark.parametrize("kind", BY_PLACE)
@pytest.mark.everyday("tensors", "a TensorDataset")
def test_the_same_examples_train_the_same_model_whatever_holds_them(kind):
    assert torch.equal(trained(BY_PLACE[kind]), trained((X, Y)))


@pytest.mark.parametrize("kind", BY_NAME)
def test_columns_are_given_to_the_model_by_name_and_its_logits_to_the_loss(kind):
    assert torch.equal(trained(BY_NAME[kind], Named()), trained((X, Y)))


def test_hugging_face_datasets_are_data_in_any_format():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"inputs": X.tolist(), "attention_mask": [[1.0]] * 60, "kind": Y.tolist()})
    wanted = trained((X, Y))
    for each in (data, data.with_format("torch"), data.with_format("numpy")):
        torch.testing.assert_close(trained(each, Named(), target="kind"), wanted)
    torch.testing.assert_close(trained(data, Named(), target="kind", num_workers=2), wanted)
    with pytest.raises(ValueError, match=r"dictionary of train: choose one, such as data\['train'\]"):
        trained(datasets.DatasetDict({"train": data}), Named())


def test_every_engine_and_gate_takes_rows_with_names():
    for changes in ({"engine": "reference"}, {"cuda_graphs": False}, {"max_physical_batch_size": "auto"}):
        torch.testing.assert_close(trained(BY_NAME["rows"], Named(), **changes), trained((X, Y)))
    selective = {"method": "dpsur", "epsilon": 8.0, "noise_multiplier": None}
    assert torch.equal(trained(BY_NAME["rows"], Named(), **selective), trained((X, Y), **selective))


def test_empty_samples_of_rows_with_names_are_steps():
    assert len(trained(BY_NAME["rows"], Named(), sample_rate=1e-9, lr=1e-9)) > 0


# --- lengths ----------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Reads tokens up to a mask: the mean of their embeddings, classified."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(20, 6), nn.Linear(6, 2)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask.unsqueeze(-1).float()
        return _output(self.out((self.embed(input_ids) * weights).sum(1) / weights.sum(1)))


def sentences(count=60):
    lengths = [2 + (7 * i) % 5 for i in range(count)]
    return [
        {"input_ids": [(i + j) % 20 for j in range(n)], "attention_mask": [1] * n, "labels": i % 2}
        for i, n in enumerate(lengths)
    ]


def pad(rows, to=None):
    to = to or max(len(row["input_ids"]) for row in rows)
    filled = {
        key: torch.tensor([row[key] + [0] * (to - len(row[key])) for row in rows])
        for key in ("input_ids", "attention_mask")
    }
    return {**filled, "labels": torch.tensor([row["labels"] for row in rows])}


def logits_loss(outputs, targets):
    return LOSS(outputs.logits, targets)


@pytest.mark.parametrize("loss", [LOSS, nn.CrossEntropyLoss()])
@pytest.mark.everyday("cross_entropy")
def test_sentences_of_any_length_train_alike_however_they_are_padded(loss):
    as_they_are = trained(sentences(), Reader(), loss)
    for changes in ({"collate_fn": pad}, {"collate_fn": lambda rows: pad(rows, 16)}, {"max_physical_batch_size": 3}):
        torch.testing.assert_close(trained(sentences(), Reader(), loss, **changes), as_they_are)


def test_a_token_classifier_has_its_classes_last():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(20, 6), nn.Linear(6, 3)

        def forward(self, tokens):
            return _output(self.out(self.embed(tokens)))

    def by_hand(outputs, targets):
        return LOSS(outputs.logits.transpose(1, 2), targets)

    rows = [(row["input_ids"], [t % 3 for t in row["input_ids"]]) for row in sentences()]
    torch.testing.assert_close(trained(rows, Tagger()), trained(rows, Tagger(), by_hand))


def test_a_hugging_face_model_trains_on_a_dataset_with_its_collator():
    transformers = pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    texts = [" ".join("abc"[(i + j) % 3] for j in range(1 + i % 5)) for i in range(60)]
    raw = datasets.Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(60)]})
    data = datasets.Dataset.from_list([{**tokenizer(row["text"]), **row} for row in raw])
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}

    def model():
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=5, **sizes)).eval()

    with pytest.raises(ValueError, match=r"column 'text' holds a str, .*remove_columns") as refusal:
        trained(data, model())
    assert not any(text in str(refusal.value) for text in texts if len(text) > 1)
    data = data.remove_columns("text")
    padded = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4)
    torch.testing.assert_close(trained(data, model(), collate_fn=padded), trained(data, model()))


def test_a_model_of_the_next_token_needs_a_loss_that_shifts():
    class ToyForCausalLM(Reader):
        pass

    rows = sentences()
    with pytest.raises(ValueError, match=r"ToyForCausalLM predicts the next token.*labels\[:, 1:\]"):
        trained(rows, ToyForCausalLM())
    trained(rows, ToyForCausalLM(), logits_loss)


def test_outputs_of_any_class_are_followed():
    class Closed(Reader):
        def forward(self, **columns):
            return SimpleNamespace(scores=super().forward(**columns).logits)

    found = trained(sentences(), Closed(), lambda outputs, targets: LOSS(outputs.scores, targets))
    torch.testing.assert_close(found, trained(sentences(), Reader(), logits_loss))


# --- loaders ----------------------------------------------------------------------------------------------------------


def test_a_loaders_batches_are_replaced_and_that_is_said():
    model, data = make_toy()
    loader = DataLoader(TensorDataset(*data), batch_size=12, shuffle=True)
    with pytest.warns(UserWarning, match=r"replaced by Poisson samples at sample_rate=0\.2"):
        training = vestige.train(model, LOSS, loader, **{**BASE, "sample_rate": None})
    assert training.plan.sample_rate == 12 / 60
    with pytest.raises(ValueError, match="num_workers and pin_memory of its own"):
        vestige.train(model, LOSS, loader, num_workers=2, **BASE)
    weighted = DataLoader(TensorDataset(*data), 12, sampler=WeightedRandomSampler([1.0] * 60, 60))
    with pytest.raises(ValueError, match="data has a WeightedRandomSampler"):
        vestige.train(model, LOSS, weighted, **BASE)


# --- mistakes ---------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield X[0], Y[0]


class Endless(Dataset):
    def __getitem__(self, index):
        return X[0], Y[0]


SECRET = "a secret value"
MISTAKES = {
    "nothing to read": (Stream(), {}, "data is a Stream: .* examples with indices"),
    "no length": (Endless(), {}, "data is a Endless"),
    "no example": ([], {}, "data holds no examples"),
    "one number": ([1.0, 2.0], {}, "an example is a float; it must be a tuple"),
    "no target": ([{"x": 1.0, "y": 2}], {}, r"columns x, y; say which .* target='...'"),
    "another target": ([{"x": 1.0, "y": 2}], {"target": "z"}, "target='z' is none of them"),
    "nothing but a target": ([{"label": 1}], {}, "column 'label' only"),
    "a target of tuples": ((X, Y), {"target": "y"}, "target='y' names a column, but examples are tuples"),
    "text": ([(SECRET, 1)], {}, "field 0 holds a str"),
    "none": ([{"x": None, "label": 1}], {}, "column 'x' holds a NoneType"),
    "ragged": ([([[1.0], [2.0, 3.0]], 1)], {}, "field 0 holds a list that is no array of numbers"),
    "columns of text": ({"x": [SECRET] * 60, "label": Y}, {}, "column 'x' holds a list that is no array"),
    "counts": ((X, Y[:5]), {}, r"hold \[5, 60\] examples"),
    "collated tensors": ((X, Y), {"collate_fn": list}, "collate_fn is for rows that are read one by one"),
    "no function": ([(X[0], Y[0])], {"collate_fn": 3}, "collate_fn=int must be a function"),
    "no rows": ([(X[0], 1)], {"collate_fn": lambda r: r[0]}, "collate_fn made a tensor of shape .* one row"),
    "no rate": ((X, Y), {"sample_rate": None}, "batch_size=None: give the expected size"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_named_in_one_line_without_a_value_of_the_data(kind):
    data, changes, message = MISTAKES[kind]
    with pytest.raises(ValueError, match=message) as refusal:
        trained(data, **changes)
    assert "\n" not in str(refusal.value)
    assert SECRET not in str(refusal.value)


def test_rows_that_change_their_fields_are_named_to_their_owner_and_stop_nothing():
    """That training stops would tell that such a row is there."""
    rows = [{"inputs": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    rows[1] = {"other": X[1], "labels": Y[1]}
    fewer = [*zip(X, Y, strict=True)]
    fewer[5] = (X[5], X[5], Y[5])
    for data, model, message in (
        (rows, Named(), "no column 'inputs', which others have"),
        (fewer, None, "some examples have 3 fields, others 2"),
        ([*zip(X, Y, strict=True), None], None, "some examples are of type NoneType, others have fields in order"),
    ):
        trained(data, model, sample_rate=1.0)
        found = [finding.what for finding in examine(model or nn.Linear(len(X[0]), 2), LOSS, data)]
        assert any(message in what for what in found), found


def test_numbers_that_are_not_torchs_take_its_default_precision():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained((np.asarray(X, dtype=np.float64), np.asarray(Y)))

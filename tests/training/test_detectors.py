"""Is it said, once, where objects of a pipeline show that an assumption is in doubt?"""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import vestige
from vestige.training.assumption_doubts import doubts, refuse_training_data
from vestige.training.job import Job, start

X, Y = torch.randn(60, 4), torch.randint(2, (60,))
WHOLE = TensorDataset(X, Y)
GIVEN = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-3, "sample_rate": 0.2, "steps": 2}


class Scaled(Dataset):
    def __init__(self, fitted=True, pipeline=False, held=lambda scaler: scaler):
        preprocessing = pytest.importorskip("sklearn.preprocessing")
        scaler = preprocessing.StandardScaler()
        if pipeline:
            from sklearn.pipeline import make_pipeline

            scaler = make_pipeline("passthrough", scaler)
        if fitted:
            scaler.fit(X.numpy())
        self.scaler = held(scaler)

    def __len__(self):
        return 60

    def __getitem__(self, place):
        return X[place], Y[place]


class Wrapped(Dataset):
    """As people augment: a dataset in a dataset."""

    def __init__(self, dataset):
        self.dataset, self.again = dataset, self

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, place):
        return self.dataset[place]


CASES = {
    "the same tensors": (
        lambda: ConcatDataset([WHOLE, TensorDataset(X, Y)]),
        "one_example_per_row",
        "one dataset twice",
    ),
    "overlapping halves": (
        lambda: ConcatDataset([Subset(WHOLE, range(40)), Subset(Subset(WHOLE, range(30, 60)), range(20))]),
        "one_example_per_row",
        "one row of it",
    ),
    "inside a dataset of one's own": (lambda: Wrapped(ConcatDataset([WHOLE, WHOLE])), "one_example_per_row", "twice"),
    "a scaler's method": (lambda: Scaled(held=lambda s: s.transform), "nothing_fitted", "a fitted StandardScaler"),
    "a scaler's part": (lambda: Scaled(held=lambda s: [partial(s.transform)]), "nothing_fitted", "a fitted"),
    "a scaler in a dictionary": (lambda: Wrapped(Scaled(held=lambda s: {"x": s})), "nothing_fitted", "a fitted"),
    "one dataset twice": (lambda: ConcatDataset([WHOLE, WHOLE]), "one_example_per_row", "one dataset twice"),
    "repeated indices": (lambda: Subset(WHOLE, [*range(60), 3]), "one_example_per_row", "one row several times"),
    "the same object": (lambda: [(X[0], Y[0])] * 2 + list(zip(X, Y, strict=True)), "one_example_per_row", "a list"),
    "a split": (lambda: random_split(WHOLE, [40, 20])[0], "public_evaluation", "random_split"),
    "a scaler": (lambda: Scaled(), "nothing_fitted", "a fitted StandardScaler"),
    "a pipeline": (lambda: Scaled(pipeline=True), "nothing_fitted", "a fitted Pipeline"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_once_and_written_beside_the_assumption(name):
    make, assumption, words = CASES[name]
    data = make()
    if name == "the same object":
        data = [data[0], *data]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        training = vestige.train(nn.Linear(4, 2), nn.functional.cross_entropy, data, **GIVEN)
    assert sum(words in str(each.message) for each in told) == 1
    found = training.guarantee().assumption(assumption)
    assert found.status == "assumed"
    assert words in found.detail


@pytest.mark.parametrize("name", ["one dataset twice", "a split", "a scaler's method"])
def test_a_loop_says_it_too(name):
    make, assumption, words = CASES[name]
    model, engine = nn.Linear(4, 2), vestige.PrivacyEngine()
    with pytest.warns(UserWarning, match=words if name != "a split" else "random_split"):
        engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(make(), batch_size=10),
        )  # fmt: skip
    assert words in engine.guarantee(1e-3).assumption(assumption).detail


def test_nothing_is_said_of_a_plain_pipeline():
    halves = ConcatDataset([Subset(WHOLE, range(30)), Subset(WHOLE, range(30, 60))])
    assert "one_example_per_row" not in dict(doubts(halves))
    for data in (WHOLE, (X, Y), DataLoader(WHOLE), Scaled(fitted=False), Wrapped(WHOLE), ["yes", "yes", 1, 1]):
        assert doubts(data) == []


def test_weights_by_which_rows_are_drawn_are_refused():
    loader = DataLoader(WHOLE, batch_size=6, sampler=WeightedRandomSampler(torch.ones(60), 60))
    with pytest.raises(ValueError, match="WeightedRandomSampler"):
        vestige.train(nn.Linear(4, 2), nn.functional.cross_entropy, loader, **{**GIVEN, "sample_rate": None})


# --- training data that are evaluated on ------------------------------------------------------------------------------

LISTED = [{"x": row} for row in X.tolist()]
TRAIN, REST = random_split(WHOLE, [40, 20])
PRIVATE = {
    "themselves": ((X, Y), (X, Y)),
    "some of them": ((X[:3], Y[:3]), (X, Y)),
    "with other labels": ((X, 1 - Y), (X, Y)),
    "another dataset of them": (TensorDataset(X, Y), DataLoader(WHOLE)),
    "a part of a part": (Subset(Subset(WHOLE, [7, 8, 9]), [2]), Subset(WHOLE, [1, 9])),
    "beside others": (ConcatDataset([TensorDataset(X + 1, Y), Subset(WHOLE, [5])]), WHOLE),
    "a part of one's own dataset": (Subset(WRAPPED := Wrapped(WHOLE), [3]), WRAPPED),
    "rows of a list": (LISTED[:2], LISTED),
    "one of several": ({"public": TensorDataset(X + 1, Y), "other": WHOLE}, WHOLE),
    "memory that NumPy shares": ((X.numpy()[5:],), (X,)),
}
PUBLIC = {
    "the rest of a split": (REST, TRAIN),
    "the other half": ((X[:30], Y[:30]), (X[30:], Y[30:])),
    "every second row": ((X[::2], Y[::2]), (X[1::2], Y[1::2])),
    "labels that are shared": ((X + 1, Y), (X, Y)),
    "another list": ([{"x": [1.0]}], LISTED),
    "numbers": ([1, 2, 3], [1, 2, 3]),
    "none": ((X[:0], Y[:0]), (X, Y)),
    "nothing": (None, WHOLE),
    "no row of it": (Subset(WHOLE, []), WHOLE),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_training_data_are_not_evaluated_on(name):
    given, training = PRIVATE[name]
    with pytest.raises(ValueError, match=r"eval_dataset is the training data.*Give data that are public"):
        refuse_training_data(given, training, "eval_dataset")


@pytest.mark.parametrize("name", PUBLIC)
def test_other_data_are(name):
    refuse_training_data(*PUBLIC[name], "eval_dataset")


def test_a_schedule_does_not_look_at_them():
    with pytest.raises(ValueError, match="validation_data is the training data, or holds rows"):
        vestige.train(nn.Linear(4, 2), nn.functional.cross_entropy, (X, Y), validation_data=(X[50:], Y[50:]), **GIVEN)


def test_a_task_is_not_judged_by_them_but_privately(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    x, y = torch.randn(60, 4), torch.randint(2, (60,))\n"
        "    return nn.Linear(4, 2), nn.functional.cross_entropy, (x, y), (x[:9], y[:9])\n"
    )
    job = {"task": f"{file}:make", "noise_multiplier": 1.0, "epsilon": None, "delta": 1e-3, "steps": 1}
    with pytest.raises(ValueError, match="its test set is the training data, or holds rows of them"):
        start(Job(**job, sample_rate=0.2), None)
    start(Job(**job, sample_rate=0.2, evaluate="private"), None)

"""Does a row that cannot be read, collated or computed contribute nothing, and stop nothing?"""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import vestige
from vestige.mechanism.bad_rows import made_up_pass
from vestige.mechanism.losses.criteria import Form

ROWS, BAD = 40, 7
LOSS = nn.functional.cross_entropy
GIVEN = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-3, "sample_rate": 1.0, "steps": 3, "reproducible": 5}


def toy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(ROWS, 4), torch.randint(3, (ROWS,))


class Rows(Dataset):
    """Rows of which one is at fault."""

    def __init__(self, inputs, labels, fault=None, bad=BAD):
        self.inputs, self.labels, self.fault, self.bad = inputs, labels, fault, bad

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, place):
        row = self.inputs[place], self.labels[place]
        return self.fault(row) if self.fault is not None and place == self.bad else row


def unreadable(row):
    raise OSError("torn")


FAULTS = {
    "unreadable": unreadable,
    "a field fewer": lambda row: row[:1],
    "a text": lambda row: ("nonsense", row[1]),
    "too wide": lambda row: (torch.randn(5), row[1]),
    "another dimension": lambda row: (torch.randn(4, 4), row[1]),
    "label out of range": lambda row: (row[0], torch.tensor(99)),
    "negative label": lambda row: (row[0], torch.tensor(-7)),
    "not finite": lambda row: (row[0] * torch.nan, row[1]),
}


def blank(row):
    return row[0] * torch.inf, row[1]


def trained(data, model, **more):
    training = vestige.train(model, LOSS, data, **{**GIVEN, **more})
    assert len(list(training)) == GIVEN["steps"]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), training


@pytest.mark.parametrize(
    ("fault", "bad"),
    [
        *((fault, BAD) for fault in FAULTS),
        *(pytest.param(fault, 0, marks=() if fault == "too wide" else pytest.mark.slow) for fault in FAULTS),
    ],
)
@pytest.mark.everyday("negative label-7")
def test_such_a_row_contributes_what_a_blank_one_does(fault, bad):
    """The same weights, up to rounding, as with a row whose gradient counts for nothing."""
    model, *data = toy()
    found, training = trained(Rows(*data, FAULTS[fault], bad), model)
    model, *data = toy()
    expected, _ = trained(Rows(*data, blank, bad), model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert training.guarantee().assumption("bad_rows").status == "checked"


@pytest.mark.parametrize("label", [99, -7])
def test_a_label_out_of_range_among_tensors(label):
    model, inputs, labels = toy()
    labels[BAD] = label
    found, _ = trained((inputs, labels), model)
    model, inputs, labels = toy()
    inputs[BAD] = torch.inf
    expected, _ = trained((inputs, labels), model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_criterion_of_ones_own_is_asked_which_labels_it_takes():
    def own(outputs, labels):
        return -outputs.log_softmax(-1).gather(1, labels[:, None]).mean()

    model, inputs, labels = toy()
    labels[BAD] = 3
    training = vestige.train(model, own, (inputs, labels), **GIVEN)
    assert len(list(training)) == 3
    assert training._examples._valid.tolist() == [place != BAD for place in range(ROWS)]


@pytest.mark.parametrize(
    ("labels", "taken"),
    [
        ([0, 5, 999], [True, True, True]),
        ([0, 5, 1000], [True, True, False]),
        ([-100, 3, 999], [True, True, True]),
        ([-100, -99, -1, 500], [True, False, False, True]),
        ([-100, -1, -50], [True, False, False]),
        ([1005], [False]),
    ],
)
def test_of_many_classes_only_a_few_are_tried(labels, taken):
    tried = []

    def loss(outputs, targets):
        tried.append(int(targets))
        return nn.functional.cross_entropy(outputs, targets)

    row = [torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)]
    admissible = made_up_pass(nn.Linear(4, 1000), loss, Form(), row)
    tried.clear()
    assert admissible(torch.tensor(labels)).tolist() == taken
    assert len(tried) <= len(labels)
    assert admissible(torch.arange(1000)).all()
    assert 500 not in tried or 500 in labels


def test_a_row_whose_computation_fails_alone():
    """As one long row does that runs out of memory."""

    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, inputs):
            if bool((inputs.detach() > 1e6).any()):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return self.inner(inputs)

    _, inputs, labels = toy()
    inputs[BAD] = 1e9
    torch.manual_seed(1)
    found, _ = trained((inputs, labels), Limited(), engine="reference")
    inputs[BAD] = torch.inf
    torch.manual_seed(1)
    plain = Limited()
    plain.forward = lambda inputs: plain.inner(inputs)
    expected, _ = trained((inputs, labels), plain, engine="reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_private_evaluation_is_answered_all_the_same():
    model, *data = toy()
    found, training = trained(Rows(*data, FAULTS["too wide"]), model, evaluate="private")
    assert training.result().private_accuracy is not None


@pytest.mark.slow
def test_workers_read_on():
    model, *data = toy()
    trained(Rows(*data, unreadable), model, num_workers=1)


def test_a_mistake_of_the_program_is_still_an_error():
    model, inputs, labels = toy()
    with pytest.raises(Exception, match="shape"):
        list(vestige.train(model, LOSS, (torch.randn(ROWS, 5), labels), **GIVEN))
    with pytest.raises(OSError, match="torn"):
        vestige.train(model, LOSS, [1] and Broken(), **GIVEN)


class Broken(Rows):
    def __init__(self):
        super().__init__(*toy()[1:])

    def __getitem__(self, place):
        raise OSError("torn")

"""Does every surface print the assumptions that are in the ledger, and all of them?"""

import json
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vestige
from assumption_lists import in_card, in_ledger, in_terminal, listed
from commands import TRAIN, as_json
from commands import vestige as command
from conftest import make_toy
from vestige.accounting.ledger import LedgerError
from vestige.assumptions import PRICE_ALONE
from vestige.training.verify import verify

LOSS = nn.functional.cross_entropy
CHECKED = {
    "bad_rows",
    "adjacency",
    "divisor",
    "fixed_steps",
    "key",
    "loss_per_example",
    "noise",
    "padding",
    "rows_apart",
    "sampling",
}
"""What `vestige.train` checks on rows in memory."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("everywhere") / "run"
    code, out, error = command(*TRAIN, "--out", folder)
    assert code == 0, error
    (folder.parent / "stdout").write_text(out)
    return folder


def test_every_surface_of_a_run_prints_the_list_of_its_ledger(run, tmp_path):
    """Forget one surface, and it is missing here."""
    known = in_ledger(run / "ledger.jsonl")
    assert {name for name, (status, _) in known.items() if status == "checked"} == CHECKED
    assert listed(json.loads((run / "result.json").read_text())["assumptions"]) == known
    assert listed(as_json("verify", run)["assumptions"]) == known
    assert listed(as_json(*TRAIN, "--out", tmp_path / "again")["assumptions"]) == known
    assert in_card(vestige.model_card(run)) == known
    assert command("report", run)[0] == 0
    assert in_card((run / "report.md").read_text()) == known
    statuses = {name: status for name, (status, _) in known.items()}
    assert in_terminal(command("verify", run)[1]) == statuses
    assert in_terminal((run.parent / "stdout").read_text()) == statuses
    assert in_terminal(str(verify(run).guarantee)) == statuses


class Rows(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, place):
        return self.data[0][place], self.data[1][place]


@pytest.mark.parametrize("arranged", [lambda data: data, Rows], ids=["tensors", "a dataset"])
def test_what_vestige_train_checks_is_not_assumed(tmp_path, arranged):
    model, data = make_toy()
    given = {"method": "dp-sgd", "epsilon": 3, "delta": 1e-3, "sample_rate": 0.2, "steps": 3}
    training = vestige.train(model, LOSS, arranged(data), **given, out=tmp_path / "run")
    assert training.guarantee().assumption("fixed_steps").status == "assumed"  # it may still be broken off
    for _ in training:
        pass
    said = {each.name: (each.status, each.detail) for each in training.guarantee().assumptions}
    by_groups = {"rows_apart"} if arranged is Rows else set()  # rows of one shape are a batch, and how many is private
    assert {name for name, (status, _) in said.items() if status == "checked"} == CHECKED - by_groups
    assert {name for name, (status, _) in said.items() if status == "not needed"} == {"processes"}
    assert said == in_ledger(tmp_path / "run" / "ledger.jsonl")


@pytest.mark.parametrize(
    ("loss", "collate", "expected"),
    [
        (LOSS, None, {"loss_per_example": "checked", "divisor": "checked", "padding": "not needed"}),
        (LOSS, torch.utils.data.default_convert, {"padding": "assumed"}),
    ],
    ids=["plain", "padded"],
)
def test_what_a_loop_met_reaches_card_verify_and_report(tmp_path, loss, collate, expected):
    model, data = make_toy()
    stack = None if collate is None else (lambda rows: [torch.stack(part) for part in zip(*rows, strict=True)])
    engine = vestige.PrivacyEngine(ledger=tmp_path / "ledger.jsonl", audit=8)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=0.7,
        data_loader=DataLoader(TensorDataset(*data), batch_size=12, collate_fn=stack), target_delta=1e-3,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    known = in_ledger(tmp_path / "ledger.jsonl")
    assert {name: known[name][0] for name in expected} == expected
    assert {each.name: (each.status, each.detail) for each in engine.guarantee(1e-3).assumptions} == known
    assert listed(engine.audit().to_json()["assumptions"]) == known
    assert listed(as_json("verify", tmp_path, "--unfinished")["assumptions"]) == known
    assert in_card(command("card", tmp_path)[1]) == known
    assert command("report", tmp_path)[0] == 0
    assert in_card((tmp_path / "report.md").read_text()) == known


@pytest.mark.parametrize(
    "call",
    [
        ("account", "--sample-rate", 0.04, "--noise-multiplier", 1.2, "--steps", 10, "--delta", 1e-5),
        ("plan", "--examples", 50000, "--epsilon", 3, "--time", "1h", "--views-per-second", 1000),
    ],
    ids=lambda call: call[0],
)
@pytest.mark.everyday("account")
def test_a_price_without_a_run_assumes_everything(call):
    assert as_json(*call)["assumptions"] == list(PRICE_ALONE)
    assert all(each["status"] == "assumed" for each in PRICE_ALONE)


def forged(run, file, old, new):
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("file", ["ledger.jsonl", "result.json"])
def test_a_forged_assumption_fails_verification(run, tmp_path, file):
    copy = shutil.copytree(run, tmp_path / "run")
    assert verify(copy).finished
    forged(copy, file, '"a row is a unit of its own"', '"a person is one row"')
    with pytest.raises(LedgerError, match="edited" if file == "ledger.jsonl" else "of the assumption unit"):
        verify(copy)


def test_a_forged_page_fails_verification(run, tmp_path):
    """A report or a card that lies in the folder, and says more than its ledger."""
    copy = shutil.copytree(run, tmp_path / "run")
    assert command("report", copy)[0] == 0
    page = (copy / "report.md").read_text()
    (copy / "README.md").write_text("# A model\n\n" + page)
    assert as_json("verify", copy)["unchecked"] == []
    for old, new in (("Evaluation data are public | assumed", "Evaluation data are public | checked"), ("psilon", "E")):
        forged(copy, "README.md", old, new)
        code, _, error = command("verify", copy)
        assert (code, "README.md says something else" in " ".join(error.split())) == (1, True)
        (copy / "README.md").write_text(page)
    (copy / "README.md").write_text("# A model of somebody's")
    (copy / "report.md").write_text("## Differential privacy\n\nas an earlier version said it")
    assert as_json("verify", copy)["unchecked"] == ["report.md"]


def test_an_assumption_left_out_of_a_result_fails_verification(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    content = json.loads((copy / "result.json").read_text())
    content["assumptions"] = [each for each in content["assumptions"] if each["name"] != "unit"]
    (copy / "result.json").write_text(json.dumps(content))
    with pytest.raises(LedgerError, match="of the assumption unit"):
        verify(copy)

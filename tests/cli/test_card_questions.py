"""Can a reader who sees only the card answer ten questions? Written down, with the answers, before the card was shown."""

import pytest

import vestige
from commands import TRAIN
from commands import vestige as command

QUESTIONS = {
    "Whose privacy is it?": ("one example: one row of the training data", "A row is a unit of its own"),
    "Which change of the data is it about?": ("zero-out: of two neighbouring datasets one has a row where the other",),
    "Is the number of rows secret?": ("the number of rows is public",),
    "May the scaler have been fitted to the rows?": ("no scaler, imputer, vocabulary, class weights",),
    "And what if it was?": ("ask for it by vestige.private_statistics, which is charged",),
    "Is the test set public?": (
        "Evaluation data are public | assumed (the model was evaluated on the test set of its task",
    ),
    "What if a person has three rows?": (
        "A person with several rows",
        "for somebody with three rows it is up to three times as large",
    ),
    "Could the noise be known to somebody?": ("Random numbers are secret | checked (drawn from the operating system",),
    "Were hyper-parameters searched on these rows?": ("the search for them was priced separately (tuned_epsilon)",),
    "Does a second run on the same rows cost more?": ("Every further run on them",),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions") / "run"
    assert command(*TRAIN, "--out", folder)[0] == 0
    return vestige.model_card(folder)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_card_answers(page, question):
    for words in QUESTIONS[question]:
        assert words.lower() in page.lower(), question


def test_the_documentation_has_the_same_list():
    from pathlib import Path

    from vestige.assumptions import ASSUMPTIONS

    text = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    for each in ASSUMPTIONS.values():
        assert f"| `{each.name}` | {each.sentence} | {each.if_false} |" in text, each.name

"""Are made-up texts written by a model that learned privately, with the labels named, at the price stated?"""

import json

import pytest
import torch
import torch.nn.functional as F

import vestige
from commands import as_json
from commands import vestige as command

pytest.importorskip("transformers")
pytest.importorskip("peft")

from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import checkpoint, rows
from vestige import accounting
from vestige.accounting.ledger import LedgerError, read
from vestige.mechanism.losses.model_losses import next_token
from vestige.priced_questions import Gaussian
from vestige.synthesis.text_sampling import Drawing, _likeliest, sampled, without_repeats, written
from vestige.synthesis.texts import TextRun, TextSynthesis, label_multiplier
from vestige.synthesis.texts_with_label_prompts import LabelCounts, Prompts, counts_of
from vestige.training.verify import verify

SMALL = {"epsilon": 8.0, "delta": 1e-3, "batch": 10, "steps": 2, "max_length": 20, "label_column": "label"}
SMALL |= {"labels": ("neg", "pos")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    checkpoint(folder / "lm")
    checkpoint(folder / "unpadded", pad=False)
    rows(folder / "reviews.jsonl")
    rows(folder / "test.jsonl", 12)
    return folder


def synthesis(made, out, **settings):
    return vestige.synthesize(
        made / "reviews.jsonl", model=str(made / "lm"), out=out, **{**SMALL, "samples": 9, **settings}
    )


# --- examples ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_of_the_text_alone_and_divided_by_its_own_tokens(made):
    """Against the model's own logits of each text, unpadded, in float64."""
    tokenizer = AutoTokenizer.from_pretrained(made / "lm")
    model = AutoModelForCausalLM.from_pretrained(made / "lm").double().eval()
    prompts = Prompts.of(tokenizer, ("neg", "pos"))
    texts = prompts.read(str(made / "reviews.jsonl"), "text", "label", tokenizer, 30)
    for row in (0, 3):
        example = texts[row]
        batch = {name: value[None] for name, value in example.items()}
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        found = next_token(outputs, {"labels": batch["labels"]}, None)
        whole = list(prompts.tokens[row % 2])
        own = tokenizer(json.loads((made / "reviews.jsonl").read_text().splitlines()[row])["text"])["input_ids"]
        own = [*own, tokenizer.eos_token_id]
        logits = model(input_ids=torch.tensor([[*whole, *own]])).logits[0, len(whole) - 1 : -1]
        wanted = F.cross_entropy(logits, torch.tensor(own))
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_labels_are_counted_by_their_prompts(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "lm")
    prompts = Prompts.of(tokenizer, ("neg", "pos"))
    texts = prompts.read(str(made / "reviews.jsonl"), "text", "label", tokenizer, 20)
    batch = [torch.stack([texts[row]["input_ids"] for row in range(7)])]
    counts = LabelCounts(prompts, 5.0, made / "none.json")
    assert counts.of(batch).tolist() == [[4.0, 3.0]]
    assert counts.questions == (Gaussian(5.0),)


def test_samples_are_divided_by_shares():
    assert counts_of({"a": 0.5, "b": 0.5}, 9) == {"a": 5, "b": 4}
    assert counts_of({"a": 0.0, "b": 1.0}, 3) == {"a": 0, "b": 3}


# --- writing ----------------------------------------------------------------------------------------------------------


def test_writing_with_a_cache_is_as_likely_as_without(made):
    """Every drawn token is among those that the model without a cache finds likeliest; next to no temperature: its
    favourite."""
    tokenizer = AutoTokenizer.from_pretrained(made / "lm")
    model = AutoModelForCausalLM.from_pretrained(made / "lm").eval()
    prompt = [0, 40, 50]
    cold = written(model, prompt, 3, Drawing(12, temperature=1e-4), tokenizer.eos_token_id, 1, 0)
    assert cold[0] == cold[1] == cold[2]
    tokens = list(prompt)
    for token in cold[0]:
        logits = model(torch.tensor([tokens])).logits[0, -1]
        logits[1] = -torch.inf
        assert token == int(logits.argmax())
        tokens.append(token)
    warm = written(model, prompt, 3, Drawing(12), tokenizer.eos_token_id, 1, 0)
    assert warm == written(model, prompt, 3, Drawing(12), tokenizer.eos_token_id, 1, 0)
    assert warm != written(model, prompt, 3, Drawing(12), tokenizer.eos_token_id, 1, 1)
    assert all(0 < len(text) <= 9 and 1 not in text for text in warm)


def test_guidance_draws_away_from_what_other_labels_give(made):
    model = AutoModelForCausalLM.from_pretrained(made / "lm").eval()
    own, other = [0, 40], [0, 50, 60]
    tokens = written(model, own, 2, Drawing(6, temperature=1e-4, guidance=3.0), None, None, 0, [other])[0]
    said = list(tokens)
    for place, token in enumerate(said):
        logs = [model(torch.tensor([[*each, *said[:place]]])).logits[0, -1].log_softmax(-1) for each in (own, other)]
        assert token == int((logs[0] + 3.0 * (logs[0] - (logs[0] + logs[1]) / 2)).argmax())
    assert said != written(model, own, 2, Drawing(6, temperature=1e-4), None, None, 0, [other])[0]


def test_the_likeliest_tokens_are_kept_and_no_others():
    shares = _likeliest(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), 0.75)
    assert (shares > 0).tolist() == [[True, True, False, False]]
    assert (_likeliest(torch.tensor([[0.5, 0.3, 0.2]]).log(), 1.0) > 0).all()


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
def test_the_likeliest_tokens_are_those_that_sorting_finds(top_p, spread):
    logits = spread * torch.randn(50, 700, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = -torch.inf
    found, shares = _likeliest(logits, top_p), logits.softmax(dim=-1)
    for row, mine in zip(shares, found, strict=True):
        falling = row.double().sort(descending=True).values
        count = int((falling.cumsum(0) < top_p - 1e-6).sum()) + 1
        assert abs(int((mine > 0).sum()) - count) <= 1  # the mass of one may round to either side
        assert torch.equal(
            mine.sort(descending=True).values[: count - 1], row.sort(descending=True).values[: count - 1]
        )


def test_an_interrupted_writing_goes_on_and_drops_a_torn_batch(made, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(made / "lm")
    model = AutoModelForCausalLM.from_pretrained(made / "lm").eval()
    prompts, counts, drawing = {"neg": [0, 40], "pos": [0, 50]}, {"neg": 5, "pos": 4}, Drawing(8, batch=2)
    whole = sampled(model, tokenizer, prompts, counts, drawing, tmp_path / "whole", lambda *told: True)
    assert [label for label, _ in whole] == ["neg"] * 5 + ["pos"] * 4
    part = tmp_path / "part"
    assert sampled(model, tokenizer, prompts, counts, drawing, part, lambda done, *told: done < 4) is None
    part.write_text(part.read_text() + '[["neg", "to')
    assert sampled(model, tokenizer, prompts, counts, drawing, part, lambda *told: True) == whole
    assert without_repeats([("a", "x"), ("b", "x"), ("a", "y")]) == [("a", "x"), ("a", "y")]


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_a_synthesis_verifies_and_charges_its_labels(made, tmp_path):
    out = tmp_path / "synth"
    found = synthesis(made, out, lora=2, test=str(made / "test.jsonl"))
    assert found.guarantee.epsilon <= 8
    assert found.asked == 3
    asked = read(out / "ledger.jsonl").asks
    job = TextSynthesis(model="", data="", samples=1, epsilon=8.0, delta=1e-3)
    assert asked[Gaussian(label_multiplier(job))] == 1
    assert accounting.epsilon(asked, 1e-3) == pytest.approx(found.guarantee.epsilon, rel=1e-6)
    assert verify(out).finished
    assert verify(out).unchecked == ()
    lines = [json.loads(line) for line in (out / "data.jsonl").read_text().splitlines()]
    assert len(lines) == found.count <= 9
    assert {line["label"] for line in lines} <= {"neg", "pos"}
    assert (out / "adapter" / "adapter_config.json").exists()
    assert not (out / "samples.part").exists()
    assert "made-up texts" in (out / "README.md").read_text()
    assert {"test_accuracy", "word_divergence", "perplexity", "tokens_per_second"} <= found.quality.keys()
    assert found.nonprivate_seconds > 0
    for name in ("README.md", "report.html", "synthesis.json", "result.json"):
        assert "seconds" not in (out / name).read_text()
    (out / "data.jsonl").write_text("{}\n")
    with pytest.raises(LedgerError, match="is not what the run left"):
        verify(out)


def test_a_run_that_was_interrupted_twice_resumes(made, tmp_path):
    out = tmp_path / "synth"
    job = TextSynthesis(model=str(made / "lm"), data=str(made / "reviews.jsonl"), samples=6, sampling_batch=2, **SMALL)
    assert TextRun(job, out).complete(on_record=lambda record: False) is None
    assert TextRun(job, out, resume=True).complete(on_batch=lambda *told: False) is None
    assert len((out / "samples.part").read_text().splitlines()) == 1
    found = as_json("synthesize", "--resume", out)
    assert found["samples"] <= 6
    verdict = verify(out)
    assert verdict.attempts == 3
    assert verdict.asked == 3
    assert "already finished" in command("synthesize", "--resume", out)[2]


@pytest.mark.parametrize("change", [{"max_length": 18}, {"labels": ("pos", "neg")}])
def test_a_run_is_resumed_as_it_was_begun(made, tmp_path, change):
    given = {"model": str(made / "lm"), "data": str(made / "reviews.jsonl"), "samples": 6, **SMALL}
    assert TextRun(TextSynthesis(**given), tmp_path / "synth").complete(on_record=lambda record: False) is None
    with pytest.raises(ValueError, match=f"resume: {next(iter(change))} is not what it was"):
        TextRun(TextSynthesis(**{**given, **change}), tmp_path / "synth", resume=True)


def test_a_row_whose_mask_leaves_nothing_out_shows_that_adapters_learn(made, tmp_path, recwarn):
    assert synthesis(made, tmp_path / "synth", lora=2, labels="neg, pos").count
    assert not [each for each in recwarn if "no gradient of its own" in str(each.message)]


def test_public_shares_ask_nothing_and_canaries_in_the_training_rows_stay_below_epsilon(made, tmp_path):
    out = tmp_path / "synth"
    asked = synthesis(made, out, label_shares=(3.0, 1.0), audit=20)
    assert asked.asked == 2
    assert not (out / "labels.json").exists()
    assert asked.rows["label"].count("neg") >= asked.rows["label"].count("pos")
    found = as_json("audit", out)
    assert found["canaries"] == 20
    assert found["epsilon_lower_bound"] <= 8
    assert not found["contradicts"]


@pytest.mark.slow
def test_all_texts_of_a_user_are_protected_together(made, tmp_path):
    file = tmp_path / "reviews.jsonl"
    lines = [json.loads(line) for line in (made / "reviews.jsonl").read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "author": place // 2}) + "\n" for place, row in enumerate(lines)))
    found = vestige.synthesize(
        file, model=str(made / "lm"), out=tmp_path / "synth", user_column="author", rows_per_user=2, samples=4,
        label_shares=(1.0, 1.0), **SMALL,
    )  # fmt: skip
    assert "user" in found.guarantee.adjacency
    assert found.guarantee.epsilon <= 8
    assert verify(tmp_path / "synth").guarantee.unit == "user"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"labels": None}, "labels=None"),
        ({"label_column": None}, "label_column=None"),
        ({"labels": ("neg",)}, "two or more"),
        ({"labels": ("neg", "odd")}, "none of the 2 that are declared"),
        ({"label_shares": (1.0, 0.0)}, "a class without a share is empty"),
        ({"label_shares": (1.0,)}, "one number for each"),
        ({"text_column": "body"}, "text_column='body'"),
        ({"model": "unpadded"}, "has no padding token"),
        ({"model": "nowhere"}, "is no checkpoint"),
        ({"max_length": 3}, "leaves no room"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"audit": 20}, "needs public label_shares"),
        ({"user_column": "author"}, "needs public label_shares"),
        ({"user_column": "author", "label_shares": (1.0, 1.0)}, "rows_per_user=None"),
        ({"samples": 0}, "samples=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"batch": 0}, "batch=0"),
        ({"text_column": "label"}, "is the label_column, too"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"guidance": "1"}, "guidance=1 must be a number"),
        ({"labels": None, "label_column": None, "guidance": 2.0}, "tells labels apart"),
        ({"out": None}, "out=None"),
        ({"columns": "age=1..2"}, "columns='age=1..2' is unknown"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_written(made, tmp_path, settings, words):
    model = str(made / settings.get("model", "lm"))
    given = {**SMALL, "samples": 4, "out": tmp_path / "synth", **settings, "model": model}
    with pytest.raises(ValueError, match=words):
        vestige.synthesize(made / "reviews.jsonl", **given)
    assert not (tmp_path / "synth").exists()


def test_the_command_refuses_what_goes_with_the_other_kind(made, tmp_path):
    base = ["synthesize", "--data", made / "reviews.jsonl", "--epsilon", "1", "--out", tmp_path / "synth"]
    for flags, words in (
        ([], "--columns is missing"),
        (["--columns", "a=1..2", "--model", made / "lm"], "one of them"),
        (["--columns", "a=1..2", "--lora", "4"], "--lora cannot be given too: it is of texts"),
        (["--model", made / "lm", "--samples", "4", "--bins", "4"], "--bins cannot be given too: it is of rows"),
        (["--model", made / "lm"], "--samples is missing"),
        (["--model", made / "unpadded", "--samples", "4"], "has no padding token"),
        (["--model", made / "lm", "--samples", "4", "--label-shares", "a,b"], "must be numbers"),
    ):
        code, _, error = command(*base, *flags)
        assert code == 2
        assert words in error, error
        assert error.count("\n") == 1
    assert not (tmp_path / "synth").exists()

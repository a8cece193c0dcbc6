"""What does a user see at the terminal: the promised keys, one-line errors, exit codes?"""

import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from commands import TRAIN, as_json, started, vestige
from recursions import paper_weights
from vestige.cli import main
from vestige.cli.errors import in_flags
from vestige.cli.models.method_flags import help_of

SELECTIVE = [
    "--method",
    "dpsur",
    "--sample-rate",
    "0.1",
    "--trials",
    "9",
    "--validation-rate",
    "0.2",
    "--sigma-v",
    "1",
    "--threshold",
    "-1",
]


FO = "--lr auto --clip 1.0 --beta 0.9 --alpha 0.8 --window 8 --lam 0.01 --tau 0.1 --gamma 0.2 --kappa 1e-6 --zeta auto --seed 0"


def test_the_issues_command_gives_the_promised_keys(tmp_path):
    result = as_json(*TRAIN, "--method", "fo-dp-sgd", "--delta", "1e-5", *FO.split(), "--out", tmp_path / "run")
    assert "seconds" not in (tmp_path / "run" / "result.json").read_text()
    for key in ("accuracy", "lr", "epsilon", "delta", "noise_multiplier", "steps", "accountant", "run"):
        assert key in result
    assert 7.99 < result["epsilon"] <= 8
    assert result["steps"] == 20
    assert result["run"] == str(tmp_path / "run")
    verdict = as_json("verify", tmp_path / "run")
    assert verdict["verified"]
    assert verdict["epsilon"] == result["epsilon"]


@pytest.mark.parametrize("method", ["dp-sgd", "post-fm", "uniform-memory", "exponential-memory"])
@pytest.mark.everyday("dp-sgd")
def test_the_other_methods_train_with_their_defaults(tmp_path, method):
    assert as_json(*TRAIN, "--method", method, "--out", tmp_path / "run")["epsilon"] <= 8


@pytest.mark.parametrize(
    ("words", "key", "value", "within"),
    [
        ("--noise-multiplier 1.2222 --steps 6250 --accountant pld", "epsilon", 17.44, 0.01),
        ("--noise-multiplier 1.2222 --steps 6250 --accountant rdp", "epsilon", 18.70, 0.01),
        ("--paper-sigma 1.1 --beta 0.9 --steps 6250", "epsilon", 17.44, 0.01),
        ("--epsilon 3 --steps 6250", "noise_multiplier", 4.473, 0.01),
    ],
)
def test_account_gives_the_published_figures(words, key, value, within):
    result = as_json("account", "--sample-rate", "0.04", "--delta", "1e-5", *words.split())
    assert result[key] == pytest.approx(value, abs=within)


def test_paper_sigma_is_the_papers_and_the_accounted_multiplier_is_ours(tmp_path):
    words = [*(w for w in TRAIN if w not in ("--epsilon", "8")), "--steps", "2"]
    result = as_json(*words, "--method", "fo-dp-sgd", "--beta", "0.5", "--paper-sigma", "1.0", "--out", tmp_path / "a")
    assert result["noise_multiplier"] == 2.0
    result = as_json(*words, "--method", "post-fm", "--beta", "0.5", "--paper-sigma", "1.0", "--out", tmp_path / "b")
    assert result["noise_multiplier"] == 1.0


def test_the_seed_fixes_weights_but_never_noise_unless_told_so(tmp_path):
    def run(name, *extra):
        words = [*TRAIN, "--steps", "3", "--out", tmp_path / name]
        return as_json(*words, "--nonprivate-transcript", tmp_path / f"{name}.npz", *extra)

    run("a"), run("b"), run("c", "--reproducible"), run("d", "--reproducible")
    load = lambda name: np.load(tmp_path / f"{name}.npz")
    assert not np.array_equal(load("a")["noise"], load("b")["noise"])
    for key in ("clipped_sum", "noise", "release"):
        assert np.array_equal(load("c")[key], load("d")[key])


def test_reproducible_runs_have_no_epsilon_and_say_so(tmp_path):
    code, out, error = vestige(*TRAIN, "--reproducible", "--out", tmp_path / "run", "--json")
    result = json.loads(out)
    assert result["epsilon"] is None
    assert 7.99 < result["epsilon_if_noise_were_secret"] <= 8
    assert "protects nobody" in error


def test_the_transcript_lets_anyone_check_the_mechanism(tmp_path):
    beta, sigma = 0.8, 1.1
    words = [w for w in TRAIN if w not in ("--epsilon", "8")]
    code, _, error = vestige(
        *words, "--method", "fo-dp-sgd", "--beta", beta, "--paper-sigma", sigma, "--max-grad-norm", 0.5, "--window", 4, "--zeta", 3.0,
        "--nonprivate-transcript", tmp_path / "t.npz", "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert code == 0
    assert "guarantee is void" in error
    file = np.load(tmp_path / "t.npz")
    s, z, release = (file[key].astype(np.float64) for key in ("clipped_sum", "noise", "release"))
    assert file["release"].dtype == np.float32
    assert s.shape == z.shape == release.shape
    assert s.shape[0] == 20
    assert z.std() == pytest.approx(sigma * 0.5, rel=0.01)
    trend = None
    for t in range(20):
        past = release[max(0, t - 3) : t][::-1]
        u = 0
        if t:
            u = paper_weights(past, trend, alpha=0.8, lam=0.01, tau=0.1, kappa=1e-6, zeta=3.0) @ past
        np.testing.assert_allclose(release[t], beta * s[t] + (1 - beta) * u + z[t], rtol=1e-3, atol=1e-4)
        trend = release[t] if trend is None else 0.2 * release[t] + 0.8 * trend


def test_account_prices_other_samplings():
    epochs = ("--epochs", "2", "--steps-per-epoch", "6", "--noise-multiplier", "1")
    allocated = as_json("account", "--sampling", "allocation", *epochs)
    poisson = as_json("account", *epochs)
    truncated = as_json("account", "--sampling", "truncated", "--max-batch", "24", "--examples", "120", *epochs)
    assert (allocated["epochs"], allocated["steps_per_epoch"], allocated["steps"]) == (2, 6, 12)
    assert allocated["epsilon"] < poisson["epsilon"] < truncated["epsilon"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TRAIN, "--sample-rate", "1.5"], "--sample-rate=1.5"),
        ([*TRAIN, "--delta", "0.01"], "--delta=0.01"),
        ([*TRAIN, "--window", "-2"], "--window=-2"),
        ([*TRAIN, "--beta", "0"], "--beta=0.0"),
        ([*TRAIN, "--lr", "fast"], "--lr='fast'"),
        ([*TRAIN, "--epsilon", "much"], "'--epsilon': 'much'"),
        ([*TRAIN, "--epsilon=much"], "'--epsilon': 'much'"),
        ([*TRAIN, "--steps", "2.5"], "'2.5'"),
        ([*TRAIN, "--steps", "-3"], "--steps=-3"),
        ([*TRAIN, "--seed", "-1"], "'--seed': '-1'"),
        ([*TRAIN, "--evaluate-every", "0"], "--evaluate-every=0"),
        ([*TRAIN, "--noise-multiplier", "inf"], "--noise-multiplier=inf must be positive and finite"),
        ([*TRAIN, "--groups", "foo"], "--groups='foo'"),
        ([*TRAIN, "--device", "moon"], "--device='moon' cannot be used"),
        ([*TRAIN, "--nonprivate-transcript", "/nowhere/t.npz"], "--nonprivate-transcript='/nowhere/t.npz'"),
        ([*TRAIN, "--method", "fo-dp-sdg"], "did you mean 'fo-dp-sgd'"),
        ([*TRAIN, "--method", "dp-sgd", "--alpha", "0.5"], "--alpha=0.5 is not an option of dp-sgd"),
        ([*TRAIN, "--task", "digit-mlp"], "digits-mlp"),
        ([*TRAIN, "--task", "mnist-mlp"], "--data"),
        ([*TRAIN, "--task", "mnist-mlp", "--data", "/nowhere.npz"], "/nowhere.npz"),
        ([*TRAIN, "--optimizer", "sdg"], "--optimizer='sdg'"),
        ([*TRAIN, "--paper-sigma", "1", "--noise-multiplier", "1"], "--paper-sigma=1.0 and --noise-multiplier=1.0"),
        (["train", "--task", "digits-mlp"], "give --epsilon=3, say, or --noise-multiplier=1"),
        (["train", "--method", "dpsgd-br"], "--epsilon is missing"),
        (["account", "--sample-rate", "0.1", "--steps", "10"], "exactly one of"),
        (["account", "--sample-rate", "0.1", "--steps", "10", "--epsilon", "1", "--sampling", "shuffled"], "shuffled"),
        (["account", "--sample-rate", "0.1", "--steps", "10", "--noise-multiplier", "-1"], "--noise-multiplier=-1"),
        (
            ["account", "--sampling", "allocation", "--sample-rate", "0.1", "--steps", "10", "--epsilon", "1"],
            "--epochs",
        ),
        (
            [
                *["account", "--sampling", "truncated", "--max-batch", "7", "--examples", "9000000000000"],
                *["--sample-rate", "0.1", "--steps", "10", "--epsilon", "1"],
            ],
            "--examples=9000000000000 must be at most",
        ),
        (
            ["account", "--sampling", "truncated", "--sample-rate", "0.1", "--steps", "10", "--epsilon", "1"],
            "--max-batch",
        ),
        (["account", "--sample-rate", "0.1", "--steps", "10", "--epsilon", "1", "--max-batch", "9"], "--max-batch=9"),
        (
            ["account", "--sample-rate", "0.1", "--steps", "10", "--noise-multiplier", "1e-300"],
            "--noise-multiplier=1e-300",
        ),
        (
            ["account", "--sample-rate", "0.1", "--steps", "10", "--noise-multiplier", "1", "--accepted", "3"],
            "--accepted cannot",
        ),
        (
            [
                "account",
                "--sample-rate",
                "0.1",
                "--steps",
                "10",
                "--noise-multiplier",
                "1",
                "--accounting",
                "published",
            ],
            "--accounting cannot",
        ),
        (["account", *SELECTIVE, "--sigma-t", "1", "--epsilon", "3"], "--epsilon cannot be given too"),
        (
            ["account", *SELECTIVE, "--sigma-t", "1", "--noise-multiplier", "3"],
            "--noise-multiplier cannot be given too",
        ),
        (["account", *SELECTIVE, "--sigma-t", "-1"], "--sigma-t=-1.0"),
        (["account", *SELECTIVE, "--sigma-t", "1", "--trials", "0"], "--trials=0"),
        (["account", *SELECTIVE, "--sigma-t", "1", "--threshold", "nan"], "--threshold=nan"),
        (["verify", "/nowhere"], "no such folder"),
        (["verify", "/"], "holds neither a run (run.json, ledger.jsonl) nor a comparison (spec.json)"),
        (["train", "--resume", "/nowhere"], "--resume='/nowhere' holds no run"),
        (["train", "--device", "meta"], "--device='meta' cannot be used: it holds no numbers"),
        (["compare", "--quick", "--method", "fo-dp-sgd"], "--method cannot be given too: --quick is one fixed"),
        (["compare", "--resume", "/nowhere", "--steps", "3"], "--steps cannot be given too"),
        (["compare", "--resume", "/nowhere"], "/nowhere"),
        (["compare", "--task", "digit-mlp"], "did you mean 'digits-mlp'"),
        (["compare", "--task", "cifar10-mlp"], "--data is missing"),
        (["compare", "--task", "cifar10-mlp", "--data", "/nowhere.npz"], "--data=/nowhere.npz"),
        (["compare", "--factors", "1,2", "--lrs", "0.1"], "--factors cannot be given too: --lrs is a grid"),
        (
            ["compare", "--rates", "auto", "--tune", "beta=0.5"],
            "--tune cannot be given too: --rates auto tunes nothing",
        ),
        (["compare", "--rates", "tuned", "--lr", "0.1"], "--lr cannot be given too: --rates tuned has no rows"),
        (["compare", "--tune", "beta=0.5", "--tune", "beta=0.6"], "beta has a grid already"),
        (["compare", "--method", "fo-dp-sgd", "--tune", "beta=0.9,abc"], "--tune=beta='abc' cannot be built"),
        (["compare", "--method", "fo-dp-sgd", "--tune", "beta=9"], "beta=9"),
        (["compare", "--method", "fo-dp-sgd:beta=abc"], "--method='fo-dp-sgd:beta=abc' cannot be built"),
        (["compare", "--method", "dpsur:threshold=Infinity"], "threshold"),
        (["compare", "--epsilon", "3", "--epsilon", "3.0000001"], "'epsilon 3' is there twice"),
        (["compare", "--task", "digits-mlp", "--task", "digits-mlp"], "'digits-mlp' is there twice"),
        (["compare", "--workers", "0"], "--workers=0"),
        (["compare", "--engine", "slurm"], "--engine='slurm' is unknown; choose local or ray"),
        (["reproduce", "fo-table1", "--data", "/", "--workers", "4"], "leave --workers and --engine out"),
        (["reproduce", "fo-tabel3"], "did you mean 'fo-table3'"),
        (["reproduce", "fo-table3", "--small"], "--data is missing"),
        ([*TRAIN, "--log-to", "paper:x"], "--log-to='paper:x'"),
        ([*TRAIN, "--nonprivate-logs"], "--nonprivate-logs goes with --log-to"),
        ([*TRAIN, "--augment", "4"], "--augment=4 flips and crops images"),
        (
            ["account", "--sample-rate", "0.1", "--steps", "10", "--method", "dp-sgd"],
            "--method='dp-sgd' makes no trials",
        ),
        (["account", "--sample-rate", "0.1", "--steps", "10", "--method", "dpsur"], "--sigma-t is missing"),
        (["doctor", "digits-mlp", "--parity", "--batch", "0"], "--batch=0"),
        (["doctor", "digits-mlp", "--device", "moon"], "--device='moon' cannot be used"),
        (["methods", "dp-sdg"], "method='dp-sdg' is unknown (did you mean 'dp-sgd'?)"),
        (["methods", "--jsn"], "--json); see vestige methods --help"),
        (["train", "--epsilom", "8"], "--epsilon"),
        (["train", "extra"], "extra"),
        (["verify"], "Missing argument"),
        (["trian"], "Did you mean 'train'?"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_two(tmp_path, words, message):
    out = tmp_path / "run"
    writes = words[0] in ("train", "compare", "reproduce") and not {"--resume", "--quick"} & set(words)
    code, _, error = vestige(*words, *(["--out", out] if writes else []))
    assert code == 2
    assert message in error
    assert error.startswith("vestige: ")
    assert error.count("\n") == 1
    assert not out.exists(), "nothing may be half-written"


@pytest.mark.parametrize(
    "words", [TRAIN, ["compare", "--method", "dp-sgd", "--steps", "2"], ["report", "FOLDER", "--figures", "x"]]
)
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, words):
    (tmp_path / "file").write_text("no folder")
    comparison = tmp_path / "comparison"
    if words[0] == "report":
        made = vestige(
            "compare",
            "--method",
            "dp-sgd",
            "--steps",
            2,
            "--seeds",
            1,
            "--factors",
            1,
            "--workers",
            1,
            "--out",
            comparison,
        )
        assert made[0] == 0, made
    out = tmp_path / "file" / "run"
    code, _, error = vestige(*(comparison if word == "FOLDER" else word for word in words), "--out", out)
    assert code == 2
    assert error.startswith(f"vestige: --out='{out if words[0] != 'report' else out.parent}' cannot be made")
    assert error.count("\n") == 1


def test_messages_change_words_that_are_flags_and_no_others():
    flags = ["--sample-rate", "--delta", "--data", "--resume", "task"]
    say = lambda message: in_flags(message, flags)
    assert say("sample_rate=2 and delta=1e-5, if sample_rate") == "--sample-rate=2 and --delta=1e-5, if --sample-rate"
    assert say("delta=None: a delta is due") == "--delta is missing: a delta is due"
    assert say("task='x' has no other_name, (data=y)") == "task='x' has no other_name, (--data=y)"
    assert say("'/a/data=3/b' `resume=True` x.data=3 data==3") == "'/a/data=3/b' `resume=True` x.data=3 data==3"


def test_an_occupied_folder_is_refused_and_left_alone(tmp_path):
    as_json(*TRAIN, "--out", tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    code, _, error = vestige(*TRAIN, "--out", tmp_path / "run")
    assert code == 2
    assert "already holds a run" in error
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_verify_fails_with_exit_code_one(tmp_path):
    as_json(*TRAIN, "--out", tmp_path / "run")
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"rate": 0.05', '"rate": 0.01', 1))
    code, out, _ = vestige("verify", tmp_path / "run", "--json")
    assert code == 1
    assert json.loads(out)["verified"] is False


def test_doctor_and_lists():
    assert as_json("doctor", "digits-mlp") == {"healthy": True, "findings": []}
    assert {"dp-sgd", "fo-dp-sgd"} <= {row["name"] for row in as_json("methods")["methods"]}
    assert "digits-mlp" in {row["name"] for row in as_json("tasks")["tasks"]}


MIXING = (
    "import torch\nfrom torch import nn\n"
    "def make():\n"
    "    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))\n"
    "    data = torch.randn(40, 4), torch.randint(2, (40,))\n"
    "    return model, nn.functional.cross_entropy, data, data\n"
)


def test_doctor_names_the_fault_in_a_users_own_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MIXING)
    code, out, _ = vestige("doctor", f"{file}:make", "--json")
    assert code == 1
    assert "BatchNorm1d" in out
    assert "vestige.fix(model)" in out


def test_doctor_examines_a_model_as_it_is_when_fixed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MIXING)
    line = "layer '1' (BatchNorm1d): nn.GroupNorm(1, 8) takes its place"
    code, out, _ = vestige("doctor", f"{file}:make", "--fix", "--parity")
    assert code == 0
    assert out.splitlines()[:2] == [f"replaced: {line}", "in Python: model = vestige.fix(model)"]
    assert "the engines agree" in out
    assert as_json("doctor", f"{file}:make", "--fix") == {"healthy": True, "findings": [], "replaced": [line]}
    assert as_json("doctor", "digits-mlp", "--fix") == {"healthy": True, "findings": [], "replaced": []}
    assert vestige("doctor", "digits-mlp", "--fix")[1].startswith("vestige.fix finds nothing to replace\n")
    file.write_text(MIXING.replace("BatchNorm1d(8)", "LazyBatchNorm1d()"))
    code, _, error = vestige("doctor", f"{file}:make", "--fix")
    assert code == 2
    assert "layer '1' (LazyBatchNorm1d) does not know its channels yet" in error


@pytest.mark.parametrize("command", ["train", "doctor"])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", r"broken\(\) failed \(line 6\): KeyError: 'gone'"),
        ("narrow", "cannot take a test example of shape \\(4,\\)|no gradient of one example could be taken"),
    ],
)
def test_an_error_in_a_users_own_file_is_one_line(tmp_path, command, function, message):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "data = torch.randn(40, 4), torch.randint(2, (40,))\n"
        "def narrow(): return nn.Linear(3, 2), nn.functional.cross_entropy, data, data\n"
        "def broken():\n"
        "    return {}['gone']\n"
    )
    words = ["--task", f"{file}:{function}", "--epsilon", "8"] if command == "train" else [f"{file}:{function}"]
    code, out, error = vestige(command, *words)
    assert code != 0
    assert re.search(message, out + error)


def test_a_file_that_cannot_be_imported_is_one_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import torch\nimport no_such_package\n")
    code, _, error = vestige("doctor", f"{file}:make")
    assert code == 2
    assert "line 2" in error
    assert "no_such_package" in error


def test_an_option_that_methods_share_is_told_apart_where_they_differ():
    from vestige.methods.registry import METHODS

    users = {name: entry.options for name, entry in METHODS.items()}
    helps = help_of({name: options["kappa"] for name, options in users.items() if "kappa" in options}, len(METHODS))
    assert "share of the fresh release (disk); smallest scale" in helps
    assert helps.endswith("[default: 1e-06; 0.7 for disk]")
    everyone = help_of({name: options["max_grad_norm"] for name, options in users.items()}, len(METHODS))
    assert "(dp-sgd" not in everyone


def test_a_switch_that_is_on_can_be_turned_off(tmp_path):
    words = [*TRAIN, "--method", "dp-quantile", "--no-steady-steps", "--out", tmp_path / "run"]
    as_json(*words)
    job = json.loads((tmp_path / "run" / "run.json").read_text())["job"]
    assert job["options"] == {"steady_steps": False}


@pytest.mark.parametrize("name", main.COMMANDS)
def test_what_is_known_of_a_command_is_what_it_says_itself(name):
    assert main.load(name).name == name
    assert main.load(name).help.split("\n\n")[0] == main.COMMANDS[name][1]


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], ["torch", "scipy", "numpy"]),
        (["--version"], ["torch", "scipy", "numpy"]),
        (["trian"], ["torch", "scipy", "numpy"]),
        (["methods", "--jsn"], ["torch", "scipy", "numpy"]),
        (["compare", "--help"], ["torch", "scipy", "numpy"]),
        (["account", "--sample-rate", "0.1", "--steps", "10", "--noise-multiplier", "1"], ["torch"]),
        (["account", *SELECTIVE, "--sigma-t", "1"], ["torch"]),
    ],
)
@pytest.mark.everyday("words0-heavy0", "words1-heavy1")
def test_a_quick_answer_imports_nothing_heavy(words, heavy):
    code = (
        "import sys\nfrom vestige.cli import main\n"
        f"sys.argv = ['vestige', *{words}]\n"
        f"try:\n    main.main()\nfinally:\n    assert not {set(heavy)} & set(sys.modules), 'too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "too much" not in done.stderr
    assert done.stdout if done.returncode == 0 else done.stderr.startswith("vestige: ")


def test_the_version():
    import vestige as package

    assert vestige("--version") == (0, f"vestige {package.__version__}\n", "")


@pytest.mark.parametrize(
    "command", ["train", "account", "verify", "doctor", "methods", "compare", "report", "reproduce"]
)
def test_every_command_has_help_with_an_example(command):
    code, out, _ = vestige(command, "--help")
    assert code == 0
    assert f"vestige {command}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["methods", "--jsn"], "vestige: No such option"),
        pytest.param(
            [*TRAIN, "--max-grad-norm", "-1"], "--max-grad-norm=-1.0 must be positive", marks=pytest.mark.slow
        ),
    ],
    ids=["quick", "training"],
)
def test_a_real_process_fails_with_one_line(words, message):
    process = started(*words)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == ""
    assert error.strip().count("\n") == 0
    assert error.startswith("vestige: ")
    assert message in error


@pytest.mark.parametrize("name", ["train", "finetune"])
def test_every_group_of_the_help_fits_a_screen(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    _, out, _ = vestige(name, "--help")
    panels = [part.splitlines() for part in out.split("╭")[1:]]
    assert len(panels) > 5
    assert max(map(len, panels)) <= 50


def test_commands_that_begin_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-120000")
    for _ in range(3):
        code, _, error = vestige(
            "train", "--task", "digits-mlp", "--method", "dp-sgd", "--epsilon", 1, "--steps", 1, "--sample-rate", 0.01
        )
        assert code == 0, error
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == [f"digits-mlp-dp-sgd-20260101-120000{number}" for number in ("", "-2", "-3")]


@pytest.mark.parametrize("words", [TRAIN, ("compare", "--quick")])
def test_a_file_is_no_folder_for_a_run(tmp_path, words):
    (tmp_path / "file").touch()
    code, _, error = vestige(*words, "--out", tmp_path / "file")
    assert (code, "is a file: choose a folder" in error) == (2, True)


@pytest.mark.parametrize("share", ["-1", "0", "nan"])
def test_a_private_evaluation_without_noise_is_refused_by_its_flag(tmp_path, share):
    given = ("--evaluate", "private", "--evaluate-error", share, "--out", tmp_path / "run")
    code, _, error = vestige(*TRAIN, *given)
    assert (code, f"--evaluate-error={float(share)} must be" in error) == (2, True)
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_the_command_is_imported_is_one_line():
    program = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from vestige.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "vestige: interrupted\n")


def test_a_spent_budget_in_a_shell_is_said_without_python(capsys):
    from vestige import accounting
    from vestige.accounting.ledger import Ledger
    from vestige.cli.errors import one_line_errors
    from vestige.priced_questions import Gaussian

    ledger = Ledger(None)
    ledger.open({})
    ledger.budget = accounting.Budget(1.0, 1e-5, {})
    with pytest.raises(SystemExit), one_line_errors():
        ledger.ask(Gaussian(0.1), step=0, part=0, sensitivity=1.0)
    error = capsys.readouterr().err
    assert "one more would exceed it. Nothing was asked or moved; stop training here" in error
    assert "except" not in error

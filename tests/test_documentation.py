"""Does what the documentation shows really run?"""

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
import types
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

import vestige
from test_architecture import ABOVE
from vestige.methods.registry import METHODS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def test_the_readmes_ten_lines_train_privately(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = blocks((ROOT / "README.md").read_text())[0].replace("steps=500", "steps=12")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(code, {})
    assert "epsilon 2.99" in capsys.readouterr().out
    assert (tmp_path / "my-run" / "ledger.jsonl").exists()


def test_the_example_of_either_library_learns(monkeypatch, capsys):
    """Four epochs of it, in this process."""
    code = (ROOT / "examples" / "opacus_or_vestige.py").read_text()
    assert code.count("epochs=20") == code.count("range(20)") == 1
    monkeypatch.setattr(sys, "argv", ["opacus_or_vestige.py"])
    exec(code.replace("epochs=20", "epochs=4").replace("range(20)", "range(4)"), {})
    accuracy, epsilon = map(
        float, re.search(r"accuracy ([\d.]+)% at epsilon ([\d.]+)", capsys.readouterr().out).groups()
    )
    assert 2.9 < epsilon <= 3.0
    assert accuracy > 50


@pytest.mark.slow
@pytest.mark.parametrize("library", ["vestige", "opacus"])
def test_the_example_runs_with_either_library(library):
    pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "opacus_or_vestige.py"), library],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+)% at epsilon ([\d.]+)", done.stdout).groups())
    assert 2.9 < epsilon <= 3.0
    assert accuracy > 50


@mock.patch.dict(METHODS)
def test_the_method_of_the_page_on_adding_one_trains_and_filters_as_it_says(monkeypatch):
    code = "".join(textwrap.dedent(block) for block in blocks((ROOT / "docs" / "adding-a-method.md").read_text()))
    # Annotations are read by name, so the page needs a module of its own.
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    exec(code, page.__dict__)

    def final(method):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        data = torch.randn(60, 3), torch.randint(2, (60,))
        given = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 6, "lr": 0.5, "delta": 1e-5, "reproducible": 3}
        list(vestige.train(model, torch.nn.functional.cross_entropy, data, method=method, **given))
        return model.weight.detach()

    assert torch.equal(final(page.half_life(half_life=0.0)), final(vestige.dp_sgd()))
    assert not torch.equal(final("half-life"), final(vestige.dp_sgd()))
    with pytest.raises(ValueError, match="half_life=-1.0 must be at least 0"):
        vestige.make_method("half-life", half_life=-1.0)

    memory = page.HalfLife(2.0)
    releases = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state = {"total": torch.zeros(4, dtype=torch.float64), "weight": 0.0}
    for past in range(7):
        filtered = memory.step(page.Release(releases[past], 1.0, 1.0, 0.1), state, {})
        weights = 0.5 ** (torch.arange(past, -1, -1, dtype=torch.float64) / 2)
        torch.testing.assert_close(filtered.direction, weights @ releases[: past + 1] / weights.sum())


def anchors(page):
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" not in target:
                there = page.parent / target if target else page
                assert there.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


def test_every_table_of_results_begins_with_the_command_that_makes_it():
    for page in set((ROOT / "docs" / "results").glob("*.md")) - {ROOT / "docs" / "results" / "README.md"}:
        head = page.read_text().split("```")[:2]
        scripts = re.findall(r"python (bench/\w+\.py)", head[1])
        assert "|" not in head[0], page.name
        assert scripts, page.name
        assert all((ROOT / script).exists() for script in scripts), page.name


def closure(imports):
    """Everything that each package imports, directly or not."""
    reached = {name: set(found) for name, found in imports.items()}
    for middle in reached:
        for found in reached.values():
            found |= reached[middle] if middle in found else set()
    return reached


def test_the_map_of_packages_is_true():
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert set(ABOVE) - {""} <= set(re.findall(r"`([\w.]+)`", page))

    allowed = {name: set() for name in ABOVE if name and "." not in name}
    for name, above in ABOVE.items():
        if name:  # the packages inside one are drawn as that one
            allowed[name.split(".")[0]] |= {other.split(".")[0] for other in above.split()} - {name.split(".")[0]}
    drawn = {name: set() for name in allowed}
    for line in re.findall(r"```mermaid\n.*?\n(.*?)```", page, flags=re.S)[0].splitlines():
        stops = [stop.replace("&", " ").split() for stop in line.split("-->")]
        for importers, imported in pairwise(stops):
            for importer in importers:
                drawn[importer] |= set(imported)
    assert all(drawn[name] <= allowed[name] for name in drawn)
    assert closure(drawn) == closure(allowed)


# --- the site --------------------------------------------------------------------------------------------------------


def directives(page, name):
    """What is given to a directive of a page, and the lines below it."""
    return re.findall(rf"```\{{{name}\}} ?(.*?)\n(.*?)```", page.read_text(), flags=re.S)


def test_every_page_is_in_one_list_of_the_site():
    lists = [below.split("\n") for _, below in directives(DOCS / "index.md", "toctree")]
    listed = [line for lines in lists for line in lines if line and not line.startswith(":")]
    assert len(listed) == len(set(listed))
    assert {f"{entry}.md" for entry in listed} == {str(page.relative_to(DOCS)) for page in PAGES} - {"index.md"}


def test_what_pages_include_is_there_and_every_example_is_shown():
    shown = set()
    for page in PAGES:
        for name in ("include", "literalinclude"):
            for given, below in directives(page, name):
                file = (page.parent / given).resolve()
                assert file.exists(), f"{page.name} includes {given}"
                for start in re.findall(r":start-at: (.*)", below):
                    assert start in file.read_text(), f"{page.name} begins at {start}"
                shown.add(file.name)
    assert {path.name for path in (ROOT / "examples").glob("*.py")} <= shown


def messages():
    """Every text of the sources, with a mark where something is filled in."""
    for path in (ROOT / "src" / "vestige").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


def test_every_message_of_the_page_on_errors_is_one_of_ours():
    ours = list(messages())
    quoted = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), flags=re.M)
    assert len(quoted) == len(set(quoted)) > 50
    for message in quoted:
        pattern = re.compile(".*".join(map(re.escape, message.split("..."))), flags=re.S)
        assert any(pattern.search(text) for text in ours), message


def test_every_pitfall_has_a_severity_and_names_tests_that_exist():
    page = (DOCS / "pitfalls.md").read_text()
    rows = [
        [cell.strip() for cell in row.split(" |")] for row in re.findall(r"^\| (?!pitfall)(.*) \|$", page, flags=re.M)
    ]
    here = (ROOT / "tests" / "test_pitfalls.py").read_text()
    named = set()
    for pitfall, severity, _, prevented, unseen, tests in rows:
        assert severity.split()[0] in ("void", "larger", "weaker"), pitfall
        assert prevented or unseen, pitfall
        assert tests or "test" not in prevented, pitfall
        for test in re.findall(r"`([^`]+)`", tests):
            file, _, name = test.rpartition("::")
            text = (ROOT / file).read_text() if file else here
            assert f"def {name}(" in text, f"{pitfall}: {test}"
            named.add(name)
    assert set(re.findall(r"^def (test_(?!refused)\w+)", here, flags=re.M)) <= named
    assert set(re.findall(r"^    (\w+): \"", here, flags=re.M)) <= named, "refused, but on no row"


def test_the_reference_has_every_public_name():
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    whole = {"vestige.methods"} & set(re.findall(r"automodule:: (\S+)", pages))
    assert whole
    methods = set(sys.modules["vestige.methods"].__all__)
    assert set(vestige.__all__) <= methods | set(re.findall(r"auto\w+:: vestige\.(\w+)$", pages, flags=re.M))
    assert "automodule:: vestige.accounting\n" in pages


def test_the_project_of_the_page_on_the_command_trains():
    page = {}
    exec(blocks((DOCS / "command.md").read_text())[0], page)
    model, loss, train, test = page["make"]()
    given = {"epsilon": 3, "delta": 1e-5, "sample_rate": 0.1, "steps": 2}
    assert len(list(vestige.train(model, loss, train, **given))) == 2
    assert 0 <= vestige.accuracy(model, test) <= 1


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    if not all(map(find_spec, ("sphinx", "myst_parser", "furo"))):
        pytest.skip("the site needs the extra 'docs'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        if "_downloads" not in page.parts:
            loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(https?:[^\"]*)", page.read_text())
            assert not loaded, page.name
    shown = re.sub(r"<[^>]*>", "", (tmp_path / "getting-started.html").read_text())
    assert "load_digits()" in shown  # the example, not the line that includes it


def test_the_answers_of_how_do_i_run_as_they_stand(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    page, code = {}, blocks((DOCS / "how-do-i.md").read_text())
    assert len(code) > 10
    for block in code:
        exec(block, page)
    assert 0 < float(capsys.readouterr().out) < 3


def test_the_landing_page_shows_lines_that_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks((DOCS / "index.md").read_text())
    exec(code.replace("steps=500", "steps=3"), {})
    assert "epsilon 2.99" in capsys.readouterr().out


def test_the_readme_is_short_and_its_numbers_are_those_of_the_documents():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert re.search(r"^make test +#", text, flags=re.M)
    results, speed = (part.split("\n## ")[0] for part in text.split("\n## Results")[1:] + text.split("\n## Speed")[1:])
    cells = [row.strip("| ").split(" | ") for row in re.findall(r"^\|.*\d.*\|$", results, flags=re.M)]
    there = (DOCS / "results" / "records.md").read_text()
    for task, epsilon, recipe, ours in cells:
        assert re.search(rf"^\| {task} \| {epsilon} \| {re.escape(recipe)} \| {re.escape(ours)} ", there, flags=re.M), (
            task
        )
    there = (DOCS / "benchmarks.md").read_text()
    for row in re.findall(r"^\|.*\dx \|$", speed, flags=re.M):
        name, *ratios = row.strip("| ").split(" | ")
        assert re.search(
            rf"^\| {re.escape(name)} \|.* \| {' . '.join(map(re.escape, ratios))} \|", there, flags=re.M
        ), name


def test_there_is_one_version_number():
    made = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1]
    assert made == newest == vestige.__version__

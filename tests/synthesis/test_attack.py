"""Does the attack on a made-up set find copies where there are some, and nothing where noise hides them?"""

import json

import numpy as np
import pytest

import vestige
from commands import vestige as command
from vestige.synthesis import attack as attacks
from vestige.synthesis.schema import columns_of

COLUMNS = "age=18..80;work=office|field|home;pay=0.0..9000.0"


def people(count, seed):
    random = np.random.default_rng(seed)
    work = random.integers(0, 3, count)
    pay = random.uniform(0, 9000, count)
    age = random.integers(18, 81, count)
    return {"age": age.tolist(), "work": np.array(["office", "field", "home"])[work].tolist(), "pay": pay.tolist()}


def written(path, rows):
    lines = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_copies_of_members_are_found_and_strangers_are_not():
    columns = columns_of(";".join(f"c{place}=0.0..1.0" for place in range(6)))
    random = np.random.default_rng(0)
    members, reference, others, strangers = (
        np.column_stack([random.integers(0, column.cells, 300) for column in columns]) for _ in range(4)
    )
    asked = np.concatenate([members, others])
    there = np.arange(600) < 300
    for made, low, high in ((members, 0.9, 1.0), (strangers, 0.4, 0.6)):
        scores = attacks.of_rows(made, reference, asked, columns)
        for values in scores.values():
            assert low <= attacks.success([values], [there]).area.estimate <= high


def test_texts_that_were_copied_are_found_and_others_are_not():
    random = np.random.default_rng(0)
    words = [f"w{number}" for number in range(400)]
    members, reference, others, strangers = ([" ".join(random.choice(words, 12)) for _ in range(100)] for _ in range(4))
    there = np.arange(200) < 100
    for made, low, high in ((members, 0.95, 1.0), (strangers, 0.35, 0.65)):
        for values in attacks.of_texts(made, reference, [*members, *others]).values():
            assert low <= attacks.success([values], [there]).area.estimate <= high


def test_the_command_attacks_a_synthesis_and_finds_no_more_than_its_guarantee_allows(tmp_path):
    data, others = written(tmp_path / "people.csv", people(400, 0)), written(tmp_path / "others.csv", people(400, 1))
    vestige.synthesize(str(data), columns=COLUMNS, epsilon=1, delta=1e-5, out=tmp_path / "synth")
    base = ["audit", tmp_path / "synth", "--membership", "synthetic"]
    copy = tmp_path / "copy.csv"
    copy.write_text(data.read_text())
    for same in (data, copy):
        code, _, error = command(*base, "--data", data, "--others", same)
        assert (code, "are the members: give rows that the generator was not made from" in error) == (2, True)
    code, said, error = command(*base, "--data", data, "--others", others, "--json")
    found = json.loads(said)
    assert code == 0
    assert not found["contradicts"]
    assert found["nonprivate"]
    assert 0.5 < found["area_allowed"] < 0.95
    assert found["attacks"]["nearest"]["area"]["estimate"] == pytest.approx(0.5, abs=0.1)
    assert "keep what is printed to yourself" in error
    assert "give a folder" in command(*base, "--data", data)[2]
    assert "--others cannot be given too" in command("audit", "--epsilon", "1", "--others", others)[2]

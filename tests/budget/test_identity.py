"""Are the same rows recognised, whatever their order, file or type, and are others told apart?"""

import csv
import json
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from vestige.budget import BookError
from vestige.budget.identity import RowSet, fingerprint, hashes_of, make_key, read_key, require_rows
from vestige.tasks import of_file, of_task

KEY = bytes(range(32))
ROWS = [
    {"age": 31, "height": 1.71, "name": "Ann\u00e9", "member": True, "since": "2024-01-02"},
    {"age": 45, "height": 1.6, "name": "Bo\nb", "member": False, "since": None},
    {"age": 7, "height": 0.1, "name": "007", "member": True, "since": "2020-12-31"},
]


def same(*datasets):
    found = [sorted(hashes_of(each, KEY).tolist()) for each in datasets]
    return all(each == found[0] for each in found)


def write(folder, kind, rows):
    path = folder / f"people.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {name: [row[name] for row in rows] for name in rows[0]}
        columns["height"] = pa.array(columns["height"], pa.float32())
        parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_the_same_rows_in_another_file_or_order_are_the_same(tmp_path, kind):
    [(_, known)] = of_file(str(write(tmp_path, "jsonl", ROWS)), KEY)
    backwards = [{name: row[name] for name in reversed(row)} for row in reversed(ROWS)]
    (tmp_path / "other").mkdir()
    [(_, found)] = of_file(str(write(tmp_path / "other", kind, backwards)), KEY)
    assert sorted(found.tolist()) == sorted(known.tolist())
    assert found.tolist() == known.tolist()[::-1]


def test_arrays_tensors_lists_and_datasets_are_the_same():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, 2, generator=generator), torch.arange(20) % 3
    rows = [(a, int(b)) for a, b in zip(x, y, strict=True)]
    assert same((x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), rows, (x.double(), y.to(torch.uint8)), [x, y])
    assert same((x, y), (x.flatten(1), y.double()), (x.numpy().astype(np.float64), y.tolist()))
    assert same({"a": x, "b": y}, [{"b": b, "a": a} for a, b in rows])
    assert not same((x, y), (y, x))
    assert not same((x, y), (x + 1e-3, y))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, "1"), (1, 1.0), (1.0, " 1.000 "), (0.1, np.float32(0.1)), (0.1, "1e-1"), (None, ""), (None, float("nan")),
        (True, "TRUE"), (False, "false"), (-0.0, 0), ("a\r\nb", "a\nb"), ("e\u0301", "\u00e9"), (2**60, str(2**60)),
        (Decimal("2.5"), 2.5), (date(2024, 1, 2), "2024-01-02"), (datetime(2024, 1, 2, 3, 4), "2024-01-02 03:04:00"),
        ([1, 2], (1, 2)), ({"b": 2, "a": 1}, [1, 2]), (np.array([1, 2]), [1, 2]),
    ],
)  # fmt: skip
def test_values_that_are_the_same(one, other):
    assert same([{"x": one}], [{"x": other}])


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 2), (0.1, 0.1001), ("a", "b"), ("a", "A"), (None, 0), (True, 1), ("1a", "1"), (2**60, 2**60 + 1), (b"1", "1"),
     (2.0**24, 2.0**24 + 1), ("ab", "a b"), (["a", "b"], ["ab", ""])],
)  # fmt: skip
def test_values_that_are_not(one, other):
    assert not same([{"x": one}], [{"x": other}])


def test_without_the_key_a_row_cannot_be_tried_out():
    assert hashes_of([(1, 2)], KEY) != hashes_of([(1, 2)], bytes(32))


def test_the_hash_is_the_documented_one():
    """Written out by hand: a number, a text and nothing."""
    import hashlib
    import hmac
    import struct

    row = b"n" + struct.pack(">d", 3.0) + b"t" + (2).to_bytes(4, "big") + b"hi" + b"n" + struct.pack(">d", float("nan"))
    seal = hmac.new(KEY, row, hashlib.sha256).digest()[:8]
    assert hashes_of([[3, "hi", None]], KEY).tolist() == [int.from_bytes(seal, "little")]
    row = b"".join(b"n" + struct.pack(">d", value) for value in (1.5, float(np.float32(0.1)), 7.0))
    seal = hmac.new(KEY, row, hashlib.sha256).digest()[:8]
    assert hashes_of((np.array([[1.5, 0.1]]), np.array([7])), KEY).tolist() == [int.from_bytes(seal, "little")]


def test_rows_of_a_book_are_found_whole_and_in_part_and_others_are_not(tmp_path):
    hashes = hashes_of([(i, i) for i in range(100)], KEY)
    known = RowSet.of(hashes)
    known.write(tmp_path / "rows")
    assert (tmp_path / "rows").stat().st_mode & 0o077 == 0
    again = RowSet.read(tmp_path / "rows", known.root, 100)
    assert require_rows(again, [("x", hashes[::-1])], "book") == ("all rows", None)
    assert require_rows(again, [("x", hashes[:7])], "book") == ("7 rows", None)
    other = hashes_of([(i, -i) for i in range(1, 101)], KEY)
    assert require_rows(again, [("file", other), ("task", hashes)], "book") == ("all rows", None)
    with pytest.raises(ValueError, match="none of 100 rows are those that book is about; .* derived_from=FILE"):
        require_rows(again, [("x", other)], "book")
    with pytest.raises(ValueError, match="100 of 200 rows .* open a book for all of them"):
        require_rows(again, [("x", np.concatenate([hashes, other]))], "book")
    with pytest.raises(ValueError, match="100 of 101 rows"):
        require_rows(again, [("x", np.concatenate([hashes, hashes[:1]]))], "book")
    with pytest.raises(ValueError, match="none to compare"):
        require_rows(again, [], "book")
    with pytest.raises(BookError, match="edited or replaced"):
        RowSet.read(tmp_path / "rows", "0" * 64, 100)
    with pytest.raises(BookError, match="belong beside the book"):
        RowSet.read(tmp_path / "gone", known.root, 100)


def test_a_key_is_drawn_once_and_read_by_its_owner_alone(tmp_path):
    key = make_key(tmp_path / "key")
    assert make_key(tmp_path / "key") == read_key(tmp_path / "key") == key
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert fingerprint(key) != fingerprint(KEY)
    (tmp_path / "other").write_text("hello")
    for name, problem in (("other", "is not the key"), ("gone", "cannot be read"), ("no/folder", "cannot be")):
        with pytest.raises(ValueError, match=problem):
            (make_key if name == "no/folder" else read_key)(tmp_path / name)


def test_a_task_is_known_by_its_own_rows(tmp_path):
    from sklearn.datasets import load_digits

    [(name, found)] = of_task("digits-mlp", None, KEY)
    assert name == "digits-mlp"
    digits = load_digits()
    everything = hashes_of((digits.images, digits.target), KEY)
    assert 0 < len(found) < len(everything)
    assert np.isin(found, everything).all()
    x, y = digits.images.astype(np.uint8), digits.target
    np.savez(tmp_path / "digits.npz", x_train=x[:50], y_train=y[:50], x_test=x[50:], y_test=y[50:])
    for [(_, hashes)] in (
        of_task("digits-mlp", str(tmp_path / "digits.npz"), KEY),
        of_task(None, str(tmp_path / "digits.npz"), KEY),
    ):
        assert hashes.tolist() == everything[:50].tolist()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("gone.csv", None, "there is no such file"),
        ("a.txt", "x", "a book is about the rows of"),
        ("a.csv", "", "holds no rows"),
        ("a.csv", "x,x\n1,2\n", "two columns of one name"),
        ("a.csv", "x,y\n1,2,3\n", "row 1 has more fields"),
        ("a.jsonl", "hello\n", "line 1 is not a JSON object"),
        ("a.csv", b"\xff\xfe\n1\n", "not text in UTF-8"),
        ("a.parquet", "hello", "not a readable .parquet"),
    ],
)
def test_files_that_are_wrong(tmp_path, name, content, problem):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=problem):
        of_file(str(path), KEY) if content is None else of_task(None, str(path), KEY)


def test_data_without_rows_say_so():
    with pytest.raises(ValueError, match="whose rows have no numbers"):
        hashes_of(iter([1, 2]), KEY)
    with pytest.raises(ValueError, match=r"the columns hold \[2, 3\] rows"):
        hashes_of((np.zeros(2), np.zeros(3)), KEY)
    with pytest.raises(ValueError, match="a field of type object has no canonical form"):
        hashes_of([[object()]], KEY)

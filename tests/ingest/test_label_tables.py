"""Tables of labels: every way of writing one, and every fault is one line with file, line and remedy."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import UsageError
from hapi.ingest.labels.matching import LabelledFiles
from hapi.ingest.labels.options import LabelOptions, column_names
from hapi.ingest.labels.table import read_table
from hapi.ingest.labels.values import array_labels


def read(
    path: Path, content: str | bytes, classes: tuple[str, ...] | None = None, **options: Any
) -> LabelledFiles:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    columns = column_names(options.pop("label", None))
    return LabelledFiles.read(LabelOptions(labels=path, label_columns=columns, **options), classes)


def values_of(found: LabelledFiles) -> dict[str, Any]:
    return dict(zip(found.table.files, found.labels.values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "path,kind\na.png,cat\nb.png,dog\n"),
        ("t.csv", "\ufeffpath,kind\r\na.png,cat\r\nb.png,dog\r\n"),
        ("t.csv", 'path;kind\n"a.png";"cat"\n\n"b.png";"dog"\n;\n'),
        ("t.tsv", "kind\tfile\ncat\ta.png\ndog\tb.png"),
        ("t.csv", "id|kind|FileName\n1|cat|a.png\n2|dog|b.png\n"),
        ("t.csv", "a.png  cat\nb.png dog\n"),
        ("t.csv", "./a.png, cat\n./b.png, dog\n"),
        (
            "t.jsonl",
            '{"file_name": "a.png", "kind": "cat"}\n\n{"kind": "dog", "file_name": "b.png", "more": 1}\n',
        ),
    ],
)
def test_forms_of_one_table(tmp_path: Path, name: str, text: str) -> None:
    label = "kind" if "kind" in text and "id|" in text else None
    found = read(tmp_path / name, text, label=label)
    assert [file.removeprefix("./") for file in found.table.files] == ["a.png", "b.png"]
    assert found.labels.classes == ("cat", "dog") and found.labels.values.tolist() == [0, 1]
    assert found.row_of("b.png") == 1 and found.row_of("a") == 0 and found.row_of("c.png") is None


def test_utf16_as_spreadsheets_write_it(tmp_path: Path) -> None:
    found = read(tmp_path / "t.csv", "path\tkind\r\né.png\tgrün\r\n".encode("utf-16"))
    assert found.labels.classes == ("grün",) and found.row_of("e\u0301.png") == 0


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"image": ["a.png", "b.png"], "age": [1.5, 7.25], "tags": [["x"], ["x", "y"]]})
    parquet.write_table(table, tmp_path / "t.parquet")
    options = LabelOptions(labels=tmp_path / "t.parquet", label_columns=("age",))
    assert values_of(LabelledFiles.read(options, None)) == {"a.png": [1.5], "b.png": [7.25]}
    options = LabelOptions(labels=tmp_path / "t.parquet", label_columns=("tags",))
    found = LabelledFiles.read(options, None)
    assert found.labels.kind == "multi" and values_of(found) == {"a.png": [1, 0], "b.png": [1, 1]}
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(UsageError, match=r"t\.parquet: cannot be read: "):
        read_table(options)


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match="need pyarrow, which is not installed: pip install pyarrow"):
        read(tmp_path / "t.parquet", b"PAR1")


ELPV = "images/cell0001.png  1.0                 mono\nimages/cell0002.png  0.3333333333333333  poly\n"


def test_columns_by_number_and_without_a_header(tmp_path: Path) -> None:
    """As the solar cells of elpv-dataset have them."""
    kinds = read(tmp_path / "labels.csv", ELPV, label="3")
    assert kinds.labels.classes == ("mono", "poly") and kinds.labels.kind == "single"
    found = read(tmp_path / "labels.csv", ELPV, label="2")
    assert found.labels.kind == "regression" and found.labels.classes == ("column 2",)
    assert found.labels.values.tolist() == np.array([[1], [1 / 3]], np.float32).tolist()
    assert read(tmp_path / "labels.csv", ELPV, label="2", label_kind="single").labels.classes == (
        "0.3333333333333333",
        "1.0",
    )
    numbered = read(tmp_path / "labels.csv", "image,0,1\nx.png,1,0\ny.png,0,1\n", label="0,1")
    assert numbered.labels.kind == "multi" and numbered.labels.classes == ("0", "1")


@pytest.mark.parametrize(
    ("rows", "kind", "classes", "labels"),
    [
        (["10", "9", "-1"], "single", ("-1", "9", "10"), [2, 1, 0]),
        (["1.5", "2", "-.5e1"], "regression", ("y",), [[1.5], [2], [-5]]),
        (["b", "a", "10"], "single", ("10", "a", "b"), [2, 1, 0]),
        (["9" * 40, "1"], "single", ("1", "9" * 40), [1, 0]),
        (["1,0", "0,1.0"], "multi", ("y", "z"), [[1, 0], [0, 1]]),
        (["1,0", "0,2"], "regression", ("y", "z"), [[1, 0], [0, 2]]),
    ],
)
def test_kinds_by_their_values(
    tmp_path: Path, rows: list[str], kind: str, classes: tuple[str, ...], labels: list[Any]
) -> None:
    columns = classes if len(classes) == rows[0].count(",") + 1 and "," in rows[0] else ("y",)
    text = f"path,{','.join(columns)}\n" + "".join(f"{n}.png,{row}\n" for n, row in enumerate(rows))
    found = read(tmp_path / "t.csv", text, label=",".join(columns))
    assert (found.labels.kind, found.labels.classes, found.labels.values.tolist()) == (kind, classes, labels)


def test_several_labels_in_one_cell(tmp_path: Path) -> None:
    found = read(tmp_path / "t.csv", "path,tags\na,x;y\nb,y\nc,z|x\n", label_kind="multi")
    assert found.labels.classes == ("x", "y", "z")
    assert found.labels.values.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
    lists = read(tmp_path / "t.jsonl", '{"path": "a", "tags": ["y"]}\n{"path": "b", "tags": []}', ("x", "y"))
    assert lists.labels.kind == "multi" and lists.labels.values.tolist() == [[0, 1], [0, 0]]
    one = read(tmp_path / "t.csv", "path,bad\na,1\nb,0\n", label_kind="multi")
    assert one.labels.classes == ("bad",) and one.labels.values.tolist() == [[1], [0]]


def test_classes_that_are_given(tmp_path: Path) -> None:
    text = "path,y\na,dog\nb,cat\n"
    assert read(tmp_path / "t.csv", text, ("dog", "cat", "eel")).labels.values.tolist() == [0, 1]
    numbers = read(tmp_path / "t.csv", "path,y\na,2\nb,0\n", ("dog", "cat", "eel"))
    assert numbers.labels.values.tolist() == [2, 0] and numbers.labels.classes == ("dog", "cat", "eel")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "has no rows"),
        ("path,y\n", {}, "has no rows below its header"),
        ("path\na.png\n", {}, "has one column; a table needs"),
        ("path,y\na,cat\nb,dog,eel\n", {}, "line 3: has 3 cells, the first row has 2"),
        ('path,y\na,"cat\n', {}, "line 2: unexpected end of data"),
        ("path,y\na,cat\n,dog\n", {}, "line 3: has no file's name"),
        ("path,y\na,cat\nb,\n", {}, "line 3, y: the cell is empty; fill it in, or remove the row"),
        ("path,y,z\na,1,2\n", {}, "give the label's column with --label; its columns are path, y, z"),
        ("path,y\na,1\n", {"label": "x"}, "--label 'x': there is no such column; its columns are path, y"),
        ("a.png,1\nb.png,2\n", {"label": "y"}, "it has no header: columns are named by number, 1 to 2"),
        ("path,y\na,1\n", {"label_file_column": "f"}, "--label-file-column 'f': there is no such column"),
        ("path,y,y\na,1,2\n", {"label": "y"}, "two columns are named 'y'; give its number"),
        ("path,y\na,1\n", {"label": "y,path"}, "no column is left for the files' names"),
        ("path,y\na,cat\nb,dog\na,dog\n", {}, "line 4: a has another label than in line 2; remove one"),
        ("path,y\na,1.5\nb,nan\n", {}, "line 3, y: nan is no finite number of 32 bits"),
        ("path,y\na,1.5\nb,1e39\n", {}, "line 3, y: 1e39 is no finite number of 32 bits"),
        ("path,y\na,1.5\nb,x\n", {"label_kind": "regression"}, "line 3, y: 'x' is no number"),
        ("path,y,z\na,1,0\nb,1,x\n", {"label": "y,z"}, "line 3, z: 'x' is no number"),
        ("path,y,z\na,1,2\n", {"label": "y,z", "label_kind": "multi"}, "line 2, z: '2' is neither 0 nor 1"),
        ("path,y,z\na,1,2\n", {"label": "y,z", "label_kind": "single"}, r"has one column, not 2 \(y, z\)"),
        ("path,y\na,x;y\nb,;\n", {"label_kind": "multi"}, "line 3, y: the cell is empty; for rows without"),
        ("path,y\na,x;y\nb,\n", {"label_kind": "multi"}, "line 3, y: the cell is empty; for rows without"),
        ("path,y,z\na,1,0\nb,1,\n", {"label": "y,z"}, "line 3, z: the cell is empty; fill it in"),
        (
            "path,y\na,cat\nb,cow\n",
            {"classes": ("cat", "dog")},
            "line 3, y: the label 'cow' is not among --classes",
        ),
        ("path,y\na,1\nb,3\n", {"classes": ("p", "q")}, "line 3, y: the label '3' is not among --classes"),
        ("path,y\na,1.5\n", {"classes": ("p", "q")}, "--classes has 2 names for 1 column; give"),
        (b"path,y\na,1\nb,\xff\n", {}, "line 3: is no UTF-8 text; save it as UTF-8"),
    ],
)
def test_every_fault_is_one_clear_line(
    tmp_path: Path, text: str | bytes, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^--labels .*t.csv.*{message}") as raised:
        read(tmp_path / "t.csv", text, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is no JSON"),
        ("[1]", "line 2: is no JSON object, such as"),
        ('{"file": "b"}', "line 2, y: the cell is empty"),
        ('{"y": 1}', "line 2: has no file's name"),
        ('{"file": "b", "y": {}}', "line 2, y: {} is no label"),
        ('{"file": "b", "y": NaN}', "line 2: is no JSON: NaN"),
        ('{"file": ["b"], "y": 1}', "line 2: has no file's name"),
    ],
)
def test_faults_of_json_lines(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^--labels .*t.jsonl.*{message}"):
        read(tmp_path / "t.jsonl", '{"file": "a", "y": 1}\n' + line + "\n")


def test_options_that_need_a_table(tmp_path: Path) -> None:
    for wrong, message in (
        (LabelOptions(label_file_column="f"), "--label-file-column is for a file of labels"),
        (LabelOptions(skip_unmatched=True), "--skip-unmatched is for a file of labels"),
        (LabelOptions(labels=tmp_path, label_columns=("a", "a")), "a column is named twice"),
        (LabelOptions(labels=tmp_path, label_columns=("a", "")), "a column has no name"),
        (LabelOptions(label_kind="other"), "label kind 'other': expected one of auto, single"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=message):
            wrong.checked()
    assert LabelOptions(labels=Path("y.npy")).table is LabelOptions(labels=Path("y.txt")).table is None


def test_arrays_of_numbers() -> None:
    found = array_labels(np.array([[0, 1], [1, 1]]), "multi", None, "y")
    assert found.values.dtype == np.float32 and found.classes == ("0", "1")
    assert array_labels(np.array([1.5, 2]), "regression", ("age",), "y").values.tolist() == [[1.5], [2]]
    for values, kind, classes, message in (
        (np.array([[0, 2]]), "multi", None, "the label of sample 0 has 2, expected 0 or 1"),
        (np.array([1.0, np.nan]), "regression", None, "the label of sample 1 has nan, expected a finite"),
        (np.array([1.0]), "regression", ("a", "b"), "1 value in a label, and 2 names; give as many"),
        (np.array(["a"]), "regression", None, "expected numbers of shape"),
    ):
        with pytest.raises(UsageError, match=f"^y: .*{message}"):
            array_labels(values, kind, classes, "y")  # type: ignore[arg-type]


_cells = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\r\n", exclude_categories=("Cc", "Zl", "Zp", "Zs")),
    min_size=1,
    max_size=12,
)


@given(
    st.dictionaries(_cells, _cells, min_size=1, max_size=20),
    st.sampled_from([",", "\t", ";", "|"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
)
def test_any_table_that_is_quoted_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    rows: dict[str, str],
    delimiter: str,
    end: str,
    bom: bool,
    quoting: Any,
) -> None:
    written = io.StringIO(newline="")
    writer = csv.writer(written, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerow(["path", "the label"])
    for file, label in rows.items():
        writer.writerow([f"x/{file}", label])
    path = tmp_path_factory.mktemp("table") / "t.csv"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + written.getvalue().encode())
    table = read_table(LabelOptions(labels=path))
    assert table.files == [f"x/{file}" for file in rows] and table.cells == [list(rows.values())]
    assert table.lines == list(range(2, len(rows) + 2))
    path.with_suffix(".jsonl").write_text(
        "".join(json.dumps({"path": f"x/{file}", "y": label}) + "\n" for file, label in rows.items())
    )
    same = read_table(LabelOptions(labels=path.with_suffix(".jsonl")))
    assert same.files == table.files and same.cells == table.cells


@given(st.binary(max_size=200), st.sampled_from([".csv", ".tsv", ".jsonl"]))
def test_any_bytes_are_a_table_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("bytes") / f"t{suffix}"
    path.write_bytes(content)
    try:
        found = LabelledFiles.read(LabelOptions(labels=path), None)
    except UsageError as error:
        assert str(error).isprintable() and str(path) in str(error)
    else:
        assert len(found.labels.values) == len(found.table.files) > 0

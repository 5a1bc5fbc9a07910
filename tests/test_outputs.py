"""The verdict as JSON, as Markdown and as GitHub annotations, on verdicts written by hand."""

import json
import math
from pathlib import Path

import jsonschema
import pytest

from tests.bench import annotations, baseline, markdown, verdict_json
from tests.bench.errors import BaselineError
from tests.bench.gate.verdict import WORST_FIRST, CellVerdict, Drift, Timing
from tests.verdicts import cell, verdict_of

SLOW = Timing(1.12, 1.09, math.inf, 48, 3.0)
ENVIRONMENT = {"jax": "0.10.2", "cores": 2, "gpu": None, "pinned": (0, 1), "x64": False}
RICH = verdict_of(
    cell("a", "unchanged"),
    cell("b", "regressed", "time: x1.12 | 5%", "50% more", timing=SLOW),
    cell("maxtok/c", "missing", "flops vanished", now={"flops": math.nan}, suite="maxtok"),
    CellVerdict("d", "new", ("no stored record",), None, cell("d", "new").today),
    CellVerdict("e", "skipped", ("over a limit",)),
    cell("f", "improved", "temp_bytes fell"),
    cell("g", "inconclusive", "6 s did not decide"),
    "wrong",
    partial=True,
    faults=("a <file> is\ndamaged",),
    drift=(Drift("compiler", "flops 1 -> 2", "a"), Drift("environment", "cores: 2 -> 4")),
    notes=("controls moved",),
    environment=ENVIRONMENT,
)
SCHEMA = json.loads(verdict_json.SCHEMA_FILE.read_text(encoding="utf-8"))
REPOSITORY = Path(__file__).parents[1]


def validate(document):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)


# JSON


@pytest.mark.parametrize("verdict", [RICH, verdict_of()], ids=["rich", "empty"])
def test_written_verdict_fits_its_schema(tmp_path, verdict):
    path = tmp_path / "reports" / "verdict.json"
    verdict_json.write(path, verdict, 11)
    document = json.loads(path.read_text(encoding="utf-8"))
    validate(document)
    assert document == verdict_json.document(verdict, 11)
    assert [other.name for other in path.parent.iterdir()] == ["verdict.json"]


def test_document_holds_the_verdict():
    document = verdict_json.document(RICH, 11)
    assert (document["schema"], document["exit_code"], document["partial"]) == (1, 11, True)
    assert document["baseline"] == "baselines/cpu-jax0/0001_default.json"
    assert document["compared"] == 4
    assert document["counts"] == dict.fromkeys(WORST_FIRST, 1)
    assert [found["status"] for found in document["cells"]] == list(WORST_FIRST)
    assert document["drift"][0] == {"kind": "compiler", "text": "flops 1 -> 2", "id": "a"}
    by_id = {found["id"]: found for found in document["cells"]}
    assert by_id["b"]["reasons"] == ["time: x1.12 | 5%", "50% more"]
    assert by_id["b"]["timing"]["ratio"] == 1.12
    assert by_id["d"]["stored"] is None
    assert by_id["a"]["stored"]["temp_bytes"] == 10_000_000


def test_figures_that_are_not_finite_are_null():
    by_id = {found["id"]: found for found in verdict_json.document(RICH, 11)["cells"]}
    assert by_id["maxtok/c"]["today"]["flops"] is None
    assert by_id["maxtok/c"]["stored"]["flops"] == 5e6
    assert by_id["b"]["timing"]["high"] is None


def test_writing_changes_no_record():
    verdict_json.document(RICH, 11)
    assert math.isnan(RICH.cells[2].today["flops"])


def test_value_that_json_cannot_hold_leaves_the_old_file(tmp_path):
    path = tmp_path / "verdict.json"
    verdict_json.write(path, verdict_of("unchanged"), 0)
    before = path.read_bytes()
    with pytest.raises(BaselineError, match="JSON cannot"):
        verdict_json.write(path, verdict_of(cell("a", "unchanged", now={"flops": {1}})), 0)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema",), 2),
        (("exit_code",), "0"),
        (("counts", "odd"), 1),
        (("drift", 0, "kind"), "weather"),
        (("cells", 0, "status"), "fine"),
        (("cells", 0, "today"), 3),
    ],
)
def test_schema_refuses(place, value):
    document = verdict_json.document(RICH, 11)
    inside = document
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def properties(schema):
    """Each property of the schema, at every depth."""
    for name, found in schema.get("properties", {}).items():
        yield name, found
        yield from properties(found)
    for definition in schema.get("$defs", {}).values():
        yield from properties(definition)


def test_every_field_of_the_schema_is_described():
    found = list(properties(SCHEMA))
    assert len(found) > 80
    assert [name for name, field in found if not field.get("description")] == []


def test_every_stored_field_is_in_the_schema():
    """Of this repository's own baselines: a field that a record gains is described with it."""
    path = sorted((REPOSITORY / "baselines").glob("cpu-jax*/*_default.json"))[-1]
    stored = baseline.load(path)
    cells = [
        CellVerdict(identity, "unchanged", (), entry["extra_info"], entry["extra_info"])
        for identity, entry in stored.records.items()
    ]
    validate(verdict_json.document(verdict_of(*cells, environment=stored.environment), 0))
    fields = {name for entry in stored.records.values() for name in entry["extra_info"]}
    assert fields - SCHEMA["$defs"]["record"]["properties"].keys() == set()
    assert stored.environment.keys() - SCHEMA["$defs"]["environment"]["properties"].keys() == set()


# Markdown


def test_whole_markdown():
    verdict = verdict_of(
        cell("a", "unchanged"),
        cell("b", "regressed", "time | 5%", "more", timing=Timing(1.12, 1.09, 1.15, 48, 3.0)),
        drift=(Drift("environment", "cpu: A*B"), Drift("compiler", "flops | 1", "a")),
        notes=("controls <moved>",),
        environment=ENVIRONMENT,
    )
    assert (
        markdown.text(verdict, 10)
        == r"""## Regressed: 1 regressed, 1 unchanged

2 compared (bytes, flops and time) with `baselines/cpu-jax0/0001_default.json`; exit code 10

| verdict | cell | temp MiB | side by side | time ms | of matmul | why |
| --- | --- | --- | --- | --- | --- | --- |
| regressed | `b` | 9.50 | x1.12 (1.09 to 1.15) | 30.0 | 80% | time \| 5%<br>more |

- compiler drift: the same program gets other bytes or flops from this compiler or its flags: `a` (flops \| 1)
- environment drift: the run took place elsewhere, or with other settings: cpu: A\*B

- note: controls &lt;moved>

- if this is meant, accept it: `tox run -e baseline -- --reason "..." --accept-slower "..."`

<details><summary>The other cells</summary>

| verdict | cell | temp MiB | time ms | of matmul |
| --- | --- | --- | --- | --- |
| unchanged | `a` | 9.50 | 30.0 | 80% |

</details>

<details><summary>Environment of this run</summary>

- jax: 0.10.2
- cores: 2
- pinned: (0, 1)
- x64: False

</details>
"""
    )


def test_table_holds_what_is_told_worst_first_and_the_rest_is_folded():
    told, _, folded = markdown.text(RICH, 11).partition("<details>")
    cells = [line.split(" | ")[1] for line in told.splitlines() if line.startswith("| ")][2:]
    assert cells == ["`cell7`", "`maxtok/c`", "`b`", "`g`", "`d`", "`f`"]
    assert "| skipped | `e` |" in folded
    assert "| unchanged | `a` |" in folded
    assert "**PARTIAL**" in told
    assert "- **integrity**: a &lt;file> is damaged" in told


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["unchanged"], "Unchanged: 1 unchanged"),
        (["new", "improved", "unchanged"], "Improved: 1 new, 1 improved, 1 unchanged"),
        (["improved", "regressed"], "Regressed: 1 regressed, 1 improved"),
        (["regressed", "inconclusive", "missing"], "Cells or metrics are missing: "),
        (["missing"], "Cells or metrics are missing: 1 missing"),
        (["wrong", "missing"], "Wrong numbers: "),
        (["inconclusive", "unchanged"], "Inconclusive: "),
        (["new", "unchanged"], "New cells: "),
        (["new", "skipped"], "Nothing was compared: "),
        ([], "Nothing was compared: no cell"),
    ],
)
def test_headline_has_the_verdict_in_words(found, said):
    assert markdown.text(verdict_of(*found), 0).startswith(f"## {said}")


def test_fault_leads_the_headline_unless_numbers_are_wrong():
    assert markdown.text(verdict_of("wrong", faults=("x",)), 1).startswith("## Wrong numbers: 1 wrong")
    assert markdown.text(verdict_of("regressed", faults=("x",)), 11).startswith(
        "## Integrity fault: 1 regressed"
    )


def test_cell_id_cannot_break_out_of_its_table():
    said = markdown.text(verdict_of(cell("a`|b", "regressed")), 10)
    assert r"| `a'\|b` |" in said


def test_long_verdict_fits_a_comment_on_github():
    identity = "dropless:ragged_dot:sorted-float32-t16384-e64-k2-s0.0-d512-h1024-train_step_donated"
    why = "temp_bytes 10,000,000 -> 33,554,432 (+235.5%) (limit 1% and 4096)"
    cells = [cell(f"{identity}-{number}", "regressed", why, why) for number in range(400)]
    cells += [cell(f"{identity}-{number}", "unchanged") for number in range(400)]
    said = markdown.text(verdict_of(*cells, notes=(why,) * 400), 10)
    assert said.count("and 300 more") == 3
    assert len(said) < 65_536


# Annotations


def test_nothing_is_said_outside_github(tmp_path):
    summary = tmp_path / "summary.md"
    for environ in ({}, {"GITHUB_ACTIONS": "false"}, {"GITHUB_ACTIONS": ""}):
        assert annotations.to_github(RICH, 11, environ | {"GITHUB_STEP_SUMMARY": str(summary)}) == []
    assert not summary.exists()


def test_each_cell_is_annotated_at_its_suite_with_its_level():
    assert annotations.to_github(RICH, 11, {"GITHUB_ACTIONS": "true"}) == [
        "::error title=integrity::a <file> is%0Adamaged",
        "::error title=wrong%3A cell7,file=tests/bench/test_layer.py::wrong: cell7",
        "::error title=missing%3A maxtok/c,file=tests/bench/test_maxtok.py::flops vanished",
        "::error title=regressed%3A b,file=tests/bench/test_layer.py::time: x1.12 | 5%25%0A50%25 more",
        "::warning title=inconclusive%3A g,file=tests/bench/test_layer.py::6 s did not decide",
        "::notice title=improved%3A f,file=tests/bench/test_layer.py::temp_bytes fell",
        "::notice title=new%3A d,file=tests/bench/test_layer.py::no stored record",
    ]


def test_escaping():
    said = annotations.command("error", "a%0A, b:\r\nc", title="50%, a:b\n", file="f")
    assert said == "::error title=50%25%2C a%3Ab%0A,file=f::a%250A, b:%0D%0Ac"


@pytest.mark.parametrize(
    ("verdict", "code", "said"),
    [
        (verdict_of("unchanged"), 0, []),
        (
            verdict_of("skipped"),
            11,
            ["::error title=moe bench::exit code 11: Nothing was compared: 1 skipped"],
        ),
        (
            verdict_of("unchanged", partial=True),
            11,
            [
                "::error title=moe bench::exit code 11: Unchanged: 1 unchanged (PARTIAL: this run was narrowed; "
                "cells that did not run were not compared, and it is no baseline)"
            ],
        ),
    ],
)
def test_failure_without_a_cell_to_blame_is_annotated(verdict, code, said):
    assert annotations.lines(verdict, code) == said


def test_no_more_annotations_than_github_shows():
    said = annotations.lines(verdict_of(*["regressed"] * 30, *["improved"] * 10, *["unchanged"] * 3), 10)
    assert [line.split()[0] for line in said] == ["::error"] * 10 + ["::notice"] * 10
    assert said[8].endswith("::regressed: cell8")
    assert said[9] == "::error title=moe bench::and 21 more; the job's summary has them"
    assert said[19].endswith("::improved: cell39")


def test_markdown_is_appended_to_the_summary(tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("before", encoding="utf-8")
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    assert annotations.to_github(RICH, 11, environ) == annotations.lines(RICH, 11)
    assert summary.read_text(encoding="utf-8") == "before\n" + markdown.text(RICH, 11)


def test_summary_that_cannot_be_written_is_a_warning(tmp_path):
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "none" / "summary.md")}
    *rest, last = annotations.to_github(RICH, 11, environ)
    assert rest == annotations.lines(RICH, 11)
    assert last.startswith("::warning title=moe bench::")
    assert "cannot be written to" in last

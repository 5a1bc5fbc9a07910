"""A change that is meant: what `--accept-slower` lets pass, what it never does, and where its reason is told."""

import json
from pathlib import Path

import jsonschema
import pytest

from tests.bench import annotations, baseline, markdown, options, report, verdict_json, wording
from tests.bench.errors import GridError
from tests.bench.gate.evidence import Evidence
from tests.bench.gate.judge import Run, judge
from tests.verdicts import record

WHY = "half the memory | *at* 128 rows"


def judged(before, today, *, why=WHY, **more):
    stored = baseline.Baseline(Path("b.json"), {}, {i: {"extra_info": r} for i, r in before.items()}, {})
    return judge(stored, Run([*today, *more.get("wrong", ())], today, accepted=why, **more))


LARGER = {"a": record()}, {"a": record(temp_bytes=20_000_000)}
FLOPS = {"a": record()}, {"a": record(flops=6e6)}


@pytest.mark.parametrize(("before", "today"), [LARGER, FLOPS], ids=["bytes", "flops"])
def test_reason_makes_a_regression_pass_and_leaves_its_status(before, today):
    (cell,) = judged(before, today).cells
    assert (cell.status, cell.accepted, cell.failing) == ("regressed", True, False)
    assert judged(before, today).exit_code(strict=False) == 0
    (cell,) = judged(before, today, why=None).cells
    assert (cell.accepted, cell.failing) == (False, True)
    assert judged(before, today, why=None).exit_code(strict=False) == 10


def test_integrity_and_lost_metrics_are_not_accepted():
    assert judged(*LARGER, faults=("damaged",)).exit_code(strict=False) == 11
    assert judged({"a": record()}, {"a": record(flops=None)}).exit_code(strict=False) == 11
    assert judged({"a": record(), "gone": record()}, LARGER[1]).exit_code(strict=False) == 11


def test_wrong_cell_is_not_accepted():
    found = judged({"a": record(), "w": record()}, LARGER[1], wrong=("w",))
    assert [(cell.id, cell.accepted) for cell in found.cells] == [("w", False), ("a", True)]
    assert wording.headline(found) == "Wrong numbers: 1 wrong, 1 regressed (1 accepted)"


def test_program_that_cannot_be_stored_any_more_is_not_accepted():
    seen = {"a": Evidence(None, None, unstorable="it calls back into Python")}
    found = judged({"a": record(program="0" * 64)}, {"a": record()}, evidence=seen)
    assert (found.cells[0].status, found.cells[0].accepted) == ("regressed", False)
    assert found.exit_code(strict=False) == 10


def test_reason_is_told_everywhere():
    found = judged(*LARGER)
    said = report.lines(found)
    assert any(line.startswith("  regressed, accepted  ") for line in said)
    assert f"accepted (1 cell): {WHY}" in said
    assert "verdict: 1 regressed (1 accepted); 1 compared (bytes and flops)" in said
    assert said[-1].startswith(
        "accepted for this run alone; record it, or the next one fails: tox run -e bas"
    )
    page = markdown.text(found, 0)
    assert page.startswith("## Regressed, accepted: 1 regressed (1 accepted)\n")
    assert "| regressed, accepted | `a` |" in page
    assert r"- **accepted (1 cell): half the memory \| \*at\* 128 rows**" in page
    (line,) = annotations.lines(found, 0)
    assert line.startswith("::notice title=regressed, accepted%3A a,".replace("d, a", "d%2C a"))
    assert line.endswith(f"%0Aaccepted: {WHY}")
    document = verdict_json.document(found, 0)
    jsonschema.validate(document, json.loads(verdict_json.SCHEMA_FILE.read_text("utf-8")))
    assert document["accepted"] == WHY
    assert [cell["accepted"] for cell in document["cells"]] == [True]


def test_reason_that_nothing_needed_is_told():
    found = judged({"a": record()}, {"a": record()})
    assert f"accepted (no cell needed it): {WHY}" in report.lines(found)
    assert wording.headline(found) == "Unchanged: 1 unchanged"
    assert wording.accept(found) == []


@pytest.mark.parametrize(("given", "kept"), [(" a\n::error::b\x1b[31m ", "a ::error::b [31m"), (None, None)])
def test_reason_is_one_printable_line(given, kept):
    assert options._reason(given) == kept


@pytest.mark.parametrize("given", ["", " \n", "\x1b"])
def test_empty_reason_is_refused(given):
    with pytest.raises(GridError, match="--accept-slower is empty"):
        options._reason(given)

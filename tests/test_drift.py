"""Drift: code, JAX, compiler and environment told apart, and only code blamed on the change."""

from pathlib import Path

import pytest

from tests.bench import baseline
from tests.bench.gate import drift
from tests.bench.gate.evidence import Evidence
from tests.bench.gate.judge import Run, judge
from tests.bench.gate.limits import Limit
from tests.bench.gate.paired import Pairs
from tests.verdicts import FIGURES, record

HERE = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "backend": "cpu",
    "device_kind": "cpu",
    "xla_flags": None,
    "x64": False,
    "matmul_precision": None,
    "cpu": "a CPU",
    "cores": 2,
    "python": "3.11.7",
    "gpu": None,
}
MORE = FIGURES | {"temp_bytes": 12_000_000}
LESS = FIGURES | {"temp_bytes": 8_000_000}
NEARLY = FIGURES | {"temp_bytes": 10_000_100}
EQUAL = Pairs((0.0,) * 12, "equal", 1.0)


def judged(seen, today=FIGURES, environment=None, settings=(), **stored):
    """The verdict of one cell whose stored figures are FIGURES."""
    before = baseline.Baseline(
        Path("baselines/cpu-jax0.10.2/0001_default.json"),
        HERE,
        {"a": {"extra_info": record(id="a", program="stored", **stored)}},
        {},
    )
    records = {"a": record(id="a", program=seen.digest, **today)}
    run = Run(["a"], records, environment=HERE | (environment or {}), evidence={"a": seen})
    return judge(before, run, settings)


def another(figures=FIGURES, pairs=EQUAL, asked_by="code"):
    """Evidence of a changed program; `figures` are the stored one's, compiled now."""
    return Evidence("today", "stored", figures, pairs, asked_by)


SAME = Evidence("stored", "stored")
JAX = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}


@pytest.mark.parametrize(
    ("seen", "today", "environment", "status", "kinds"),
    [
        # One program
        (SAME, FIGURES, {}, "unchanged", []),
        (SAME, NEARLY, {}, "unchanged", []),
        (SAME, MORE, {}, "unchanged", ["compiler"]),
        (SAME, LESS, {}, "unchanged", ["compiler"]),
        (SAME, MORE, {"xla_flags": "--xla_cpu_x"}, "unchanged", ["environment", "compiler"]),
        (SAME, MORE, {"jaxlib": "0.10.3"}, "unchanged", ["environment", "compiler"]),
        # Another program: held against the stored one as this compiler compiles it
        (another(), FIGURES, {}, "unchanged", ["code"]),
        (another(), MORE, {}, "regressed", ["code"]),
        (another(), LESS, {}, "improved", ["code"]),
        (another(MORE), MORE, {}, "unchanged", ["code", "compiler"]),
        (another(MORE), FIGURES, {}, "improved", ["code", "compiler"]),
        (another(LESS), FIGURES, {}, "regressed", ["code", "compiler"]),
        # Another JAX lowers the same source otherwise: shown, not blamed
        (
            another(MORE, None, "jax"),
            MORE,
            JAX,
            "unchanged",
            ["jax", "environment", "environment", "compiler"],
        ),
        (another(FIGURES, None, "jax"), MORE, JAX, "unchanged", ["jax", "environment", "environment"]),
        (SAME, FIGURES, JAX, "unchanged", ["environment", "environment"]),
        # Elsewhere, with the same code
        (SAME, FIGURES, {"cpu": "another", "cores": 64}, "unchanged", ["environment", "environment"]),
        (SAME, FIGURES, {"python": "3.12.1", "gpu": "one"}, "unchanged", []),
        # No stored program, or none of today's: only the figures are left
        (Evidence("today", None), MORE, {}, "regressed", []),
        (Evidence(None, None), FIGURES, {}, "unchanged", []),
    ],
)
def test_kinds_of_drift_and_what_is_blamed(seen, today, environment, status, kinds):
    verdict = judged(seen, today, environment)
    assert [cell.status for cell in verdict.cells] == [status]
    assert sorted(found.kind for found in verdict.drift) == sorted(kinds)
    assert verdict.exit_code(strict=True) == (10 if status == "regressed" else 0)
    # A drift of the environment is the run's, every other one a cell's.
    assert all((found.id is None) == (found.kind == "environment") for found in verdict.drift)


@pytest.mark.parametrize("name", [*drift.COMPILED_BY, *drift.TIMED_BY])
def test_every_field_that_decides_is_told_with_both_values(name):
    verdict = judged(SAME, environment={name: "other"})
    found = [told for told in verdict.drift if told.kind == "environment"]
    assert [told.text for told in found] == [f"{name}: {HERE[name]} -> other"]
    assert drift.compiled_alike(HERE | {name: "other"}, HERE) == (name in drift.TIMED_BY)


def test_a_field_that_an_older_baseline_lacks_is_told():
    older = {name: value for name, value in HERE.items() if name != "cores"}
    assert [told.text for told in drift.of_environment(HERE, older)] == ["cores: None -> 2"]


@pytest.mark.parametrize(
    ("seen", "today", "texts"),
    [
        (another(), FIGURES, ["another program: same bytes and flops"]),
        (
            another(),
            MORE | {"flops": 4e6},
            [
                "another program: temp_bytes 10,000,000 -> 12,000,000 (+20.0%); "
                "flops 5,000,000 -> 4,000,000 (-20.0%)"
            ],
        ),
        # What this compiler makes of it is no part of what the code did.
        (
            another(MORE),
            MORE,
            [
                "the stored program: temp_bytes 10,000,000 -> 12,000,000 (+20.0%) (limit 1% and 4096)",
                "another program: same bytes and flops",
            ],
        ),
        (
            SAME,
            LESS,
            ["the stored program: temp_bytes 10,000,000 -> 8,000,000 (-20.0%) (limit 1% and 4096)"],
        ),
        # Nothing was compiled: the figures of then and now are of two compilers, perhaps.
        (another(None, None), MORE, ["another program: the stored one was not compiled here"]),
    ],
    ids=["same figures", "other figures", "both", "compiler", "not compiled"],
)
def test_what_drift_says(seen, today, texts):
    assert [found.text for found in judged(seen, today).drift] == texts


def test_limits_hold_for_compiler_drift_too():
    wider = (Limit("a", "temp_bytes", 0.3, 0, "a reason"),)
    assert judged(SAME, MORE, settings=wider).drift == ()
    assert len(judged(SAME, MORE, settings=(Limit("b", "temp_bytes", 0.3),)).drift) == 1


def test_time_of_one_program_is_not_judged_where_the_compiler_drifted():
    """Its bytes moved, and it is still the same code: exit 0."""
    verdict = judged(SAME, MORE | {"median_ms": 900.0})
    assert verdict.cells[0].timing is None
    assert verdict.exit_code(strict=True) == 0


def test_another_jax_is_noted():
    (note,) = [note for note in judged(SAME, environment=JAX).notes if "another JAX's" in note]
    assert "gates nothing" in note
    assert not [note for note in judged(SAME).notes if "JAX" in note]


def test_a_figure_that_only_one_program_has_is_no_drift():
    """The stored record never had flops, and this compiler counts them for the stored program alone."""
    verdict = judged(another(), FIGURES | {"flops": None}, flops=None)
    assert [found.text for found in verdict.drift] == ["another program: same bytes and flops"]
    assert verdict.cells[0].status == "unchanged"


def test_a_faulty_stored_program_is_missing_and_tells_no_drift():
    verdict = judged(Evidence("today", "stored", fault="stored.bin is damaged"), MORE)
    assert verdict.cells[0].status == "missing"
    assert verdict.cells[0].reasons == ("stored.bin is damaged",)
    assert verdict.drift == ()
    assert verdict.exit_code(strict=False) == 11


@pytest.mark.parametrize(("stored", "status"), [("stored", "regressed"), (None, "unchanged")])
def test_a_program_that_can_no_longer_be_stored_is_blamed(stored, status):
    """A callback was put into the layer; where the stored cell had one too, nothing changed."""
    seen = Evidence(against=stored, unstorable="calls the host")
    before = baseline.Baseline(
        Path("0001_default.json"), HERE, {"a": {"extra_info": record(id="a", program=stored)}}, {}
    )
    verdict = judge(before, Run(["a"], {"a": record(id="a")}, environment=HERE, evidence={"a": seen}))
    assert verdict.cells[0].status == status
    assert verdict.cells[0].reasons == (("calls the host",) if stored else ())

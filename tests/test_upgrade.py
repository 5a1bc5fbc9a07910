"""One source on two sides: other flags, what cannot be had, a side that dies, and what is blamed for what moved.

Both sides are real processes with the JAX at hand; a real installation is marked `large`.
"""

import json
import sys
import textwrap

import pytest

from tests.bench import child, home, installed, stored_program, upgrade_contest
from tests.bench.__main__ import main, spelled
from tests.bench.cell import Cell
from tests.bench.errors import EnvironmentFault
from tests.bench.gate.paired import Pairs
from tests.bench.grid import CHUNKED, DENSE
from tests.bench.program import flat
from tests.bench.upgrade_side import Side

CELL = Cell("layer", CHUNKED, "float32", 32, 4, 2, "forward", d_model=16, d_hidden=24)
OTHER = Cell("layer", DENSE, "float32", 32, 4, 2, "forward", d_model=16, d_hidden=24)
HARMLESS = "--xla_dump_to=/dev/null --xla_dump_hlo_as_text=false"
EQUAL = Pairs((0.0,) * 12, "equal", 1.0)

# A side that answers at once, as SCRIPT says for it: what its records hold, and the cell at which it dies.
SIDE = """
    import json, os
    from tests.bench import child

    script = json.loads(os.environ["SCRIPT"])[SIDE]

    class Side:
        def begin(self, grid, only):
            environment = {"jax": script["jax"], "jaxlib": "0", "python": "3", "xla_flags": None}
            return {"environment": environment, "cells": script["cells"], "skipped": script["skipped"]}
        def load(self, cell, path):
            from tests.bench.cell import Cell
            its = Cell(**cell)
            if its.id == script["dies"]:
                os._exit(7)
            if its.id == script["wrong"]:
                raise AssertionError("rel_err_out=1")
            return {**its.fields(), **script["record"], "unstorable": None}
        def ready(self, cell):
            pass
        def compiled(self, path):
            return script["compiled"]
        def time(self, times):
            return times * script["seconds"]

    side = Side()
    child.serve(lambda verb, *arguments: getattr(side, verb)(*arguments))
"""
RECORD = {
    "temp_bytes": 10_000_000, "argument_bytes": 5_000, "output_bytes": 5_000, "alias_bytes": 0, "flops": 1e6,
    "xla_temp_mb": 9.54, "compile_s": 0.5, "rel_err_out": 1e-7, "program": "p",
}  # fmt: skip


def script(jax="0.10.2", cells=(CELL, OTHER), seconds=0.01, compiled=None, dies=None, wrong=None, **record):
    known = {cell.id: dict(vars(cell)) for cell in cells}
    return {
        "jax": jax, "cells": known, "skipped": {}, "dies": dies, "wrong": wrong, "seconds": seconds,
        "compiled": compiled, "record": RECORD | record,
    }  # fmt: skip


@pytest.fixture
def played(monkeypatch, tmp_path, capsys):
    """Runs the verb on two sides that play a script: (exit code, verdict, what was said)."""

    def play(old, new):
        start, text = child.subprocess.Popen, textwrap.dedent(SIDE)
        monkeypatch.setenv("SCRIPT", json.dumps({"old": old, "new": new}))

        def instead(command, **how):
            which = "new" if how["env"].get("XLA_FLAGS") else "old"
            return start([sys.executable, "-c", text.replace("SIDE]", f"{which!r}]")], **how)

        monkeypatch.setattr(child.subprocess, "Popen", instead)
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        reports = tmp_path / "reports"
        code = main(["upgrade", "--xla-flags", "--a=b", "--gate-seconds", "1", "--reports", str(reports)])
        said = capsys.readouterr()
        file = reports / "upgrade.json"
        verdict = json.loads(file.read_text("utf-8")) if file.exists() else None
        return code, verdict, said.err + said.out

    return play


def statuses(verdict):
    return {cell["id"]: cell["status"] for cell in verdict["cells"]}


def last(said):
    return said.strip().splitlines()[-1]


# Two sides of the JAX at hand


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """One run of the verb, with a flag that changes nothing, on one small cell."""
    reports = tmp_path_factory.mktemp("reports")
    words = ["upgrade", "--xla-flags", HARMLESS, "--grid", "aa", "--only", "dense*float32-t512*forward"]
    code = main([*words, "--gate-seconds", "0.5", "--reports", str(reports)])
    return (
        code,
        json.loads((reports / "upgrade.json").read_text("utf-8")),
        (reports / "upgrade.md").read_text(),
    )


def test_a_flag_that_changes_nothing_moves_no_byte(real):
    code, verdict, _ = real
    assert code in (0, 10, 12)  # Time may do as it likes here.
    (cell,) = verdict["cells"]
    before, today = cell["stored"], cell["today"]
    assert before["program"] == today["program"]
    assert before["temp_bytes"] == today["temp_bytes"] > 0
    assert before["flops"] == today["flops"]
    assert before["compile_s"] > 0
    assert today["rel_err_out"] < 5e-7
    assert cell["timing"]["pairs"] >= 1
    assert {its["kind"] for its in verdict["drift"]} == {"environment"}
    assert verdict["environment"]["xla_flags"] == HARMLESS


def test_the_markdown_holds_the_table_and_the_word(real):
    _, verdict, text = real
    heading, _, row, *_ = text.splitlines()
    assert heading == "| verdict | cell | temp MiB | flops | time | compile s | rel_err | drift |"
    assert row.split(" | ")[1] == verdict["cells"][0]["id"]
    assert "\n**safe**\n" in text or "\n**not safe: these cells: " in text


# What is blamed, and on whom


def test_equal_sides_are_safe(played):
    code, verdict, said = played(script(), script(jax="0.12.0"))
    assert code == 0, said
    assert statuses(verdict) == {CELL.id: "unchanged", OTHER.id: "unchanged"}
    assert last(said) == "safe"
    assert "gates nothing" not in said


def test_a_lowering_that_takes_more_bytes_is_lowering_drift_and_not_safe(played):
    """Its own compiler gives the stored program the old bytes, so only the lowering moved."""
    figures = {name: RECORD[name] for name in RECORD if name.endswith("_bytes") or name == "flops"}
    new = script(jax="0.12.0", program="q", temp_bytes=12_000_000, compiled=figures)
    code, verdict, said = played(script(), new)
    assert code == 10
    assert set(statuses(verdict).values()) == {"regressed"}
    cells = [its for its in verdict["drift"] if its["id"] == CELL.id]
    assert [its["kind"] for its in cells] == ["jax"]
    assert "temp_bytes 10,000,000 -> 12,000,000" in cells[0]["text"]
    assert last(said) == f"not safe: these cells: {CELL.id} (regressed), {OTHER.id} (regressed)"
    assert [line.split()[-1] for line in said.splitlines() if line.startswith("  regressed")] == [
        "lowering"
    ] * 2


def test_one_program_with_other_bytes_is_compiler_drift_and_not_safe(played):
    code, verdict, _ = played(script(), script(temp_bytes=12_000_000))
    assert code == 10
    assert {its["kind"] for its in verdict["drift"] if its["id"]} == {"compiler"}


def test_both_drifts_stand_apart(played):
    figures = {name: RECORD[name] for name in RECORD if name.endswith("_bytes") or name == "flops"}
    new = script(program="q", temp_bytes=14_000_000, compiled=figures | {"temp_bytes": 12_000_000})
    _, verdict, _ = played(script(), new)
    texts = {its["kind"]: its["text"] for its in verdict["drift"] if its["id"] == CELL.id}
    assert "12,000,000 -> 14,000,000" in texts["jax"]
    assert "10,000,000 -> 12,000,000" in texts["compiler"]


def test_a_program_that_the_other_side_cannot_read_is_said(played):
    new = script(jax="0.12.0", program="q", compiled={"unreadable": "version 9 is too old"})
    code, verdict, said = played(script(), new)
    assert code == 0, said
    assert (
        "compiler drift cannot be told from lowering drift in 2 cells: version 9 is too old"
        in verdict["notes"]
    )
    assert {its["kind"] for its in verdict["drift"] if its["id"]} == {"jax"}


@pytest.mark.parametrize(("seconds", "status", "code"), [(0.012, "regressed", 10), (0.008, "improved", 0)])
def test_time_is_the_later_sides_over_the_earlier_and_confirmed(played, seconds, status, code):
    found, verdict, said = played(script(), script(seconds=seconds))
    assert found == code, said
    assert set(statuses(verdict).values()) == {status}
    timing = verdict["cells"][0]["timing"]
    assert timing["ratio"] == timing["confirmed"] == pytest.approx(seconds / 0.01)


def test_wrong_numbers_end_with_1(played):
    code, verdict, said = played(script(), script(wrong=CELL.id))
    assert code == 1
    assert statuses(verdict) == {CELL.id: "wrong", OTHER.id: "unchanged"}
    assert last(said) == f"not safe: these cells: {CELL.id} (wrong)"
    assert "AssertionError: rel_err_out=1" in said


def test_a_worker_that_dies_fails_its_cell_and_the_others_go_on(played):
    code, verdict, said = played(script(), script(dies=CELL.id))
    assert code == 1
    assert statuses(verdict) == {CELL.id: "wrong", OTHER.id: "unchanged"}
    assert "the to side's worker ended with 7" in said


def test_what_the_earlier_side_cannot_run_is_listed_as_not_compared(played):
    code, verdict, said = played(script(dies=CELL.id), script())
    assert code == 0, said
    assert verdict["partial"]
    assert statuses(verdict) == {OTHER.id: "unchanged"}
    assert f"not compared: {CELL.id}, since from: JAX 0.10.2" in said
    assert last(said) == "safe, as far as it was compared"


def test_a_cell_that_only_one_side_has_is_listed(played):
    code, verdict, said = played(script(), script(cells=(CELL,)))
    assert code == 0, said
    assert verdict["partial"]
    assert any(
        note.startswith("only from: ") and note.endswith(f" has {OTHER.id}") for note in verdict["notes"]
    )


def test_nothing_in_common_is_not_safe(played):
    code, _, said = played(script(cells=(OTHER,)), script(cells=(CELL,)))
    assert code == 11
    assert last(said) == "not safe: nothing was compared"


# The worker


def test_a_side_compiles_the_other_sides_program(tmp_path):
    path = tmp_path / "p.bin"
    with Side() as side:
        record = side.load(dict(vars(CELL)), str(path))
        assert record["program"] == stored_program.export(flat(CELL)).digest
        assert record["unstorable"] is None
        assert side.compiled(str(path))["temp_bytes"] == record["temp_bytes"]
        assert side.time(3) > 0
        path.write_bytes(path.read_bytes()[:-9])
        assert "is no stored program" in side.compiled(str(path))["unreadable"]


def test_a_worker_sees_its_own_flags_and_no_compiled_programs(monkeypatch):
    given = []
    monkeypatch.setattr(upgrade_contest, "Child", lambda *words, **how: given.append(how["environment"]))
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    for under in (
        upgrade_contest.Under("to", "python", "--b=2"),
        upgrade_contest.Under("to", "python", made=True),
    ):
        upgrade_contest.Worker(under, None)._start()
    here, made = given
    assert (here["XLA_FLAGS"], made["XLA_FLAGS"]) == ("--a=1 --b=2", "--a=1")
    assert here["PYTHONPATH"].endswith("/elsewhere")
    assert made["PYTHONPATH"] == str(home.ROOT)
    assert "JAX_COMPILATION_CACHE_DIR" not in here | made


# What is asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "both sides are the same; give --to jax==VERSION, --to-python EXE or --xla-flags FLAGS"),
        (["--from", "jax==1", "--to", "jax==1"], "both sides are the same"),
        (["--xla-flags", "--a=1", "--from-xla-flags", "a=1"], "both sides are the same"),
        (["--to", "--pre"], "--to='--pre' must be requirements"),
        (["--to-python", "no-such-python"], "--to-python='no-such-python' is no program"),
        (["--xla-flags", "a=1", "--cores", "999"], "may use 1.."),
    ],
)
def test_what_cannot_be_meant_ends_with_2_and_writes_nothing(words, said, tmp_path, capsys):
    words = [f"{words[0]}={words[1]}"] if words[:1] == ["--to"] else words
    assert main(["upgrade", *words, "--reports", str(tmp_path / "reports")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()


def test_an_unknown_flag_ends_with_2(tmp_path, capsys):
    words = [
        "upgrade",
        "--xla-flags",
        "--xla_no_such_flag=1",
        "--grid",
        "aa",
        "--reports",
        str(tmp_path / "r"),
    ]
    assert main(words) == 2
    assert "error: --to: the to side's worker ended with" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_flags_may_follow_their_option():
    words = ["upgrade", "--xla-flags", "--a=1 --b=2", "--grid", "aa"]
    assert spelled(words) == ["upgrade", "--xla-flags=--a=1 --b=2", "--grid", "aa"]


# Environments


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A pip that is told what to do; the commands that were run."""
    commands = []

    def run(command, otherwise):
        commands.append(command)
        if "venv" in command:
            folder = installed.Path(command[-1])
            assert folder.parent == installed.FOLDER
            python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        elif any(word == "jax==99" for word in command):
            raise EnvironmentFault(otherwise)

    monkeypatch.setattr(installed, "FOLDER", tmp_path / "upgrade")
    monkeypatch.setattr(installed, "_run", run)
    return commands


def test_an_environment_is_made_once_and_again_where_another_is_asked(pip):
    first = installed.interpreter(["jax==1"], sys.executable)
    assert len(pip) == 2
    assert pip[1][-1] == "jax==1"
    assert any(word.startswith("flatbuffers") for word in pip[1])
    assert [word for word in pip[1] if word.startswith("jax=") or word.startswith("jax>")] == ["jax==1"]
    assert installed.interpreter(["jax==1"], sys.executable) == first
    assert len(pip) == 2
    assert installed.interpreter(["jax==2"], sys.executable) != first
    assert len(pip) == 4


def test_a_half_environment_is_made_anew(pip):
    first = installed.interpreter(["jax==1"], sys.executable)
    (first.parents[1] / installed.ASKED).unlink()
    installed.interpreter(["jax==1"], sys.executable)
    assert len(pip) == 4


def test_what_cannot_be_installed_ends_with_2_and_leaves_nothing(pip, tmp_path, capsys):
    assert main(["upgrade", "--to", "jax==99", "--reports", str(tmp_path / "reports")]) == 2
    assert "error: jax==99 cannot be installed for Python 3." in capsys.readouterr().err
    assert list(installed.FOLDER.iterdir()) == []
    assert not (tmp_path / "reports").exists()


def test_pip_is_quoted_by_its_last_useful_line():
    said = "ERROR: none\nERROR: No matching distribution found for jax==99\n\n[notice] A new release of pip\n"
    assert installed.last_useful(said) == "No matching distribution found for jax==99"
    said = "ERROR: Cannot install a and b\nERROR: ResolutionImpossible: for help visit https://pip.pypa.io"
    assert installed.last_useful(said) == "Cannot install a and b"
    assert installed.last_useful("fatal\n") == "fatal"
    assert installed.last_useful("") == "it said nothing"


def test_what_is_no_python_is_said(tmp_path):
    with pytest.raises(EnvironmentFault, match="is no Python that runs"):
        installed.interpreter(["jax==1"], str(tmp_path / "none"))


@pytest.mark.large
def test_another_jax_is_installed_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(installed, "FOLDER", tmp_path / "upgrade")
    words = [
        "upgrade",
        "--to",
        f"jax=={installed.version('jax')} numpy",
        "--grid",
        "aa",
        "--reports",
        str(tmp_path),
    ]
    code = main([*words, "--only", "dense*float32-t512*forward", "--gate-seconds", "1"])
    said = capsys.readouterr().out
    assert code in (0, 10, 12), said
    verdict = json.loads((tmp_path / "upgrade.json").read_text("utf-8"))
    (cell,) = verdict["cells"]
    assert cell["stored"]["temp_bytes"] > 0
    assert cell["today"]["program"]


@pytest.mark.large
def test_a_version_that_does_not_exist_ends_with_pips_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(installed, "FOLDER", tmp_path / "upgrade")
    assert main(["upgrade", "--to", "jax==0.0.99", "--reports", str(tmp_path / "r")]) == 2
    assert "No matching distribution found for jax==0.0.99" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()

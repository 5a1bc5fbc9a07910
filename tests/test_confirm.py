"""The fresh process that confirms a suspect: what it answers, and what is said where it gives no answer."""

import dataclasses
import functools

import pytest

from tests.bench import faults, program, stored_program
from tests.bench.cell import Cell
from tests.bench.gate import confirm
from tests.bench.grid import CHUNKED

CELL = Cell("layer", CHUNKED, "float32", 16, 4, 2, "train_step_donated", d_model=8, d_hidden=16)


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Race a program that waits for 20,000 tiny products against the cell's own; options go to `confirm`."""
    stored = stored_program.export(program.flat(CELL))
    path = tmp_path / "wörds and spaces.bin"
    path.write_bytes(stored.pack())
    waiting = functools.partial(faults.delayed, turns=20000)
    monkeypatch.setattr(program, "implementation", faults._changed(program.implementation, waiting))
    slower = stored_program.export(program.flat(CELL))

    def ask(today=slower, file=path, budget_s=20.0):
        return confirm.confirm(
            dataclasses.asdict(CELL), today, file, cores=None, budget_s=budget_s, limit=1.05
        )

    ask.stored, ask.slower, ask.folder = stored, slower, tmp_path
    return ask


def test_arms_are_swapped_and_the_answer_is_of_today_over_stored(ask):
    found = ask()
    assert found.end == "slower"
    assert found.ratio > 1.05


def test_a_faster_program_is_told_as_one(ask):
    path = ask.folder / "slower.bin"
    path.write_bytes(ask.slower.pack())
    assert ask(ask.stored, path).end == "faster"


def test_a_process_that_fails_says_its_last_words(ask):
    path = ask.folder / "cut.bin"
    path.write_bytes(ask.stored.pack()[:-40])
    with pytest.raises(confirm.NotConfirmed, match=r"ended with 1: .*cut\.bin"):
        ask(file=path)


def test_a_process_that_takes_too_long_is_ended(ask, monkeypatch):
    monkeypatch.setattr(confirm, "SPARE_S", 0.1)
    with pytest.raises(confirm.NotConfirmed, match="gave no answer"):
        ask(budget_s=0.1)

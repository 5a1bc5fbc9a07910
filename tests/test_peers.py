"""Contests with peers: who may run what, turns, and what becomes of an arm that is wrong, fails or dies.

The workers are real processes with sides made here; torch itself is not needed.
"""

import dataclasses
import sys
import textwrap

import numpy as np
import pytest

from tests.bench import child
from tests.bench.cell import Cell
from tests.bench.grid import CHUNKED, DONATED
from tests.bench.inputs import make_inputs
from tests.bench.numerics import reference
from tests.bench.peers import contest, shapes, table
from tests.bench.peers.contest import Result, Worker
from tests.bench.peers.shapes import Arm

CELL = Cell("layer", CHUNKED, "float32", 32, 4, 2, "forward", d_model=16, d_hidden=24)
SIDE = """
    import sys, os, time
    import numpy as np
    from tests.bench.peers.worker import serve

    class Side:
        def load(self, cell, inputs):
            self.x = np.load(inputs)["x"]
            self.calls = []
        def prepare(self, arm):
            if arm == "unready":
                raise ValueError("no kernel for this shape")
            print("a library talks")
        def output(self, arm, path):
            if arm == "dead":
                os._exit(7)
            y = np.load(os.environ["RIGHT"])
            np.save(path, y * (1.1 if arm == "wrong" else 1))
        def run(self, arm):
            time.sleep(0.03 if arm == "slow" else 0.13 if arm == "slowest" else 0.002)

    serve(Side())
"""


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Workers whose side is SIDE."""
    np.save(tmp_path / "right.npy", np.asarray(reference(CELL).y))
    monkeypatch.setenv("RIGHT", str(tmp_path / "right.npy"))
    start = child.subprocess.Popen
    script = textwrap.dedent(SIDE)
    monkeypatch.setattr(
        child.subprocess, "Popen", lambda command, **how: start([sys.executable, "-c", script], **how)
    )
    return Worker


def hold(monkeypatch, worker, arms, memory=False, rounds=4):
    monkeypatch.setattr(contest, "arms", lambda cell: [Arm(name, "it") for name in arms])
    with worker("it", None) as it:
        return contest.hold(
            CELL, {"it": it}, rounds=rounds, cores=None, memory=memory, rng=np.random.default_rng(0)
        )


def test_arms_take_turns_and_the_longer_ones_fewer(monkeypatch, worker):
    ours, slow, slowest = hold(monkeypatch, worker, ["ours", "slow", "slowest"], rounds=15)
    assert len(ours.seconds) == 15
    assert 1 <= len(slowest.seconds) < len(slow.seconds) < 15
    assert all(seconds >= 0.002 for seconds in ours.seconds)
    assert ours.rel_err_out == 0
    assert (ours.fault, ours.peak_bytes) == (None, None)


def test_without_ours_all_have_as_many_turns(monkeypatch, worker):
    fast, slow = hold(monkeypatch, worker, ["fast", "slow"])
    assert (len(fast.seconds), len(slow.seconds)) == (4, 4)


def test_what_is_wrong_or_cannot_run_takes_no_turn_and_the_others_go_on(monkeypatch, worker):
    wrong, unready, right = hold(monkeypatch, worker, ["wrong", "unready", "right"])
    assert wrong.fault == "rel_err_out=1.0e-01 is over 1.0e-06"
    assert unready.fault == "ValueError: no kernel for this shape"
    assert wrong.seconds == unready.seconds == ()
    assert len(right.seconds) == 4


def test_a_dead_worker_is_an_arm_that_failed(monkeypatch, worker):
    (dead,) = hold(monkeypatch, worker, ["dead"])
    assert dead.fault == "the it worker ended with 7"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak")
def test_peak_memory_is_of_a_process_of_its_own(monkeypatch, worker):
    (result,) = hold(monkeypatch, worker, ["right"], memory=True)
    assert result.peak_bytes is not None
    assert 0 <= result.peak_bytes < 100 * 2**20


def test_inputs_are_the_cells_own(tmp_path):
    its = dataclasses.replace(CELL, dtype="bfloat16")
    found = np.load(contest.write_inputs(its, tmp_path / "inputs.npz"))
    params, x, _ = make_inputs(its)
    np.testing.assert_array_equal(found["x"], np.asarray(x.astype("float32")))
    assert {name: array.shape for name, array in found.items()} == {
        "router": (16, 4), "gate": (4, 16, 24), "up": (4, 16, 24), "down": (4, 24, 16), "x": (32, 16),
    }  # fmt: skip
    np.testing.assert_array_equal(found["gate"], np.asarray(params.gate.astype("float32")))


@pytest.mark.parametrize("arm", [arm.name for arm in shapes.JAX if arm.impl is not None])
@pytest.mark.parametrize("op", DONATED)
def test_our_side_runs_each_implementation(tmp_path, arm, op):
    from tests.bench.peers.jax_side import Jax

    its, side = dataclasses.replace(CELL, op=op), Jax()
    side.load(dataclasses.asdict(its), "")
    side.output(arm, str(tmp_path / "y.npy"))
    assert np.load(tmp_path / "y.npy").shape == (32, 16)
    side.prepare(arm)
    side.run(arm)


def test_arms_of_a_cell():
    names = [arm.name for arm in shapes.arms(CELL)]
    assert names[:5] == ["ours", "capacity", "dense", "ragged_dot", "jax.lax.ragged_dot"]
    assert names[6:] == ["torch eager", "torch grouped_mm"]
    train = shapes.arms(dataclasses.replace(CELL, op="train_step_donated"))
    assert [arm.name for arm in train][6:] == [
        "torch eager fused", "torch eager foreach", "torch grouped_mm fused", "torch grouped_mm foreach",
    ]  # fmt: skip
    large = [arm.name for arm in shapes.arms(dataclasses.replace(CELL, tokens=16384, experts=64))]
    assert large == ["ours", "capacity", "ragged_dot", "torch eager", "torch grouped_mm"]


def test_cells_are_the_core_table_and_one_factor_at_a_time():
    found = shapes.cells()
    assert len({cell.id for cell in found}) == len(found) == 12 * 3 * 2
    assert {(c.tokens, c.experts, c.top_k, c.skew, c.d_hidden) for c in found} == {
        *((t, e, 2, 0.0, 1024) for t in (1024, 4096, 16384) for e in (8, 64)),
        *((4096, 8, k, 0.0, 1024) for k in (1, 4, 8)),
        (4096, 8, 2, 0.9, 1024), (4096, 128, 8, 0.0, 256), (4096, 60, 4, 0.0, 704),
    }  # fmt: skip


RESULTS = [
    Result("torch eager", (0.2, 0.3, 0.4), 1e-7),
    Result("ours", (0.1, 0.15, 0.2), 1e-7, peak_bytes=3 * 2**20),
    Result("torch grouped_mm", (0.25, 0.25, 0.25), 1e-7),
    Result("dense", fault="rel_err_out=1.0e-01 is over 5.0e-07"),
]


def test_table_is_fastest_first_with_ours_over_each():
    said = table.lines(CELL, RESULTS)
    assert [line.split()[:2] for line in said[2:]] == [
        ["ours", "100.00"], ["torch", "grouped_mm"], ["torch", "eager"], ["dense", "rel_err_out=1.0e-01"],
    ]  # fmt: skip
    assert "0.500  0.500" in said[4]
    assert said[2].endswith("3.0")


def test_what_drops_assignments_is_also_compared_by_those_it_kept():
    dropping = Result("capacity", (0.1, 0.1, 0.1), 1e-7, kept=0.8)
    said = table.lines(CELL, [RESULTS[1], dropping])
    assert said[2].endswith("kept 80.0%: 0.800 1.200 for each kept")
    assert "kept" not in said[3]


def test_the_best_variant_of_torch_counts():
    said = table.summary([(CELL, RESULTS)])[-1].split(" | ")
    assert said[1:] == ["0.40 / 0.60", "", "", "", " |"]  # 0.1 and 0.15 over grouped_mm's 0.25

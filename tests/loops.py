"""The loops of a compiled program: which slices their bodies write, and into how large a buffer."""

import itertools
import math
import re
from typing import NamedTuple

BITS = {
    "pred": 8,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "bf16": 16,
    "f16": 16,
    "s64": 64,
    "u64": 64,
    "f64": 64,
}
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$")
ARRAY = re.compile(r"^([a-z]+\d*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
CALLED_SET = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")


class Instruction(NamedTuple):
    """One line: its array's bytes (0 for tuples), operation, names of operands and of computations it calls."""

    size: int
    operation: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    line: str


class Update(NamedTuple):
    """A write of `slice_bytes` into a buffer of `buffer_bytes`, inside a loop."""

    slice_bytes: int
    buffer_bytes: int
    line: str


def updates_in_loops(text: str) -> list[Update]:
    """Every dynamic-update-slice and scatter that a while loop's body reaches, in HLO text."""
    computations = parse(text)
    found = []
    for name in _inside_loops(computations):
        instructions = computations[name]
        for instruction in instructions.values():
            # The operand that holds what is written: (buffer, update, ...) or (buffer, indices, updates).
            which = {"dynamic-update-slice": 1, "scatter": 2}.get(instruction.operation)
            if which is not None:
                written = instructions[instruction.operands[which]].size
                found.append(Update(written, instruction.size, instruction.line))
    return found


def parse(text: str) -> dict[str, dict[str, Instruction]]:
    """Computation name -> instruction name -> instruction."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if start := COMPUTATION.match(line.strip()):
            current = computations.setdefault(start[1], {})
        elif found := INSTRUCTION.match(line):
            name, shape, operation, rest = found.groups()
            called = CALLED.findall(rest)
            for names in CALLED_SET.findall(rest):
                called += [word.strip().lstrip("%") for word in names.split(",")]
            current[name] = Instruction(
                _bytes(shape), operation, _operands(rest), tuple(called), line.strip()
            )
    return computations


def _operands(rest: str) -> tuple[str, ...]:
    """Names up to the closing parenthesis; some versions print the shape before each name, some don't."""
    depths = itertools.accumulate({"(": 1, ")": -1}.get(letter, 0) for letter in rest)
    end = next((index for index, depth in enumerate(depths) if depth < 0), len(rest))
    inner = re.sub(r"\{[^}]*\}|\[[^\]]*\]|/\*.*?\*/", "", rest[:end])
    return tuple(word.split()[-1].lstrip("%") for word in inner.split(",") if word.strip())


def _bytes(shape: str) -> int:
    array = ARRAY.match(shape)
    if not array:
        return 0
    kind, dims = array.groups()
    return math.prod(int(n) for n in dims.split(",") if n) * BITS.get(kind, 32) // 8


def _inside_loops(computations: dict[str, dict[str, Instruction]]) -> set[str]:
    """Names of the computations that run once for each iteration of some loop."""
    everything = [one for instructions in computations.values() for one in instructions.values()]
    todo = [name for one in everything if one.operation == "while" for name in one.called]
    inside: set[str] = set()
    while todo:
        name = todo.pop()
        if name in inside or name not in computations:
            continue
        inside.add(name)
        todo += [called for one in computations[name].values() for called in one.called]
    return inside

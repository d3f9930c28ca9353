"""What a compiled program moves, read from its text: its collectives, as often as the loops around them run."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
_SHAPE = re.compile(r"\b(pred|bf16|[sfu]\d+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")


class Collective(NamedTuple):
    """One collective of a program: how often it runs, and the bytes of whole arrays that cross in each run."""

    kind: str
    trips: int
    bytes: int


@dataclass
class _Computation:
    collectives: list[tuple[str, int]] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)  # name, trips


def collectives(text: str) -> list[Collective]:
    """The collectives of `compiled.as_text()`, each with the trips of the loops around it.

    Bytes are those of the whole array: what is reduced, what comes out of a gather, what goes into a scatter. A loop
    without a known trip count raises: counted once, it would hide most of what it moves.
    """
    computations, entry = _parse(text)
    found: list[Collective] = []

    def visit(name: str, trips: int) -> None:
        computation = computations.get(name)
        if computation is None:
            return
        found.extend(Collective(kind, trips, size) for kind, size in computation.collectives)
        for called, times in computation.calls:
            if times < 0 and _has_collective(computations, called):
                raise ValueError(f"{called}: a loop with collectives and no known trip count")
            visit(called, trips * max(times, 1))

    visit(entry, 1)
    return found


def trip_weighted_bytes(found: list[Collective]) -> dict[str, int]:
    """Bytes by kind, over all trips."""
    total: dict[str, int] = defaultdict(int)
    for kind, trips, size in found:
        total[kind] += trips * size
    return dict(total)


def _has_collective(computations: dict[str, _Computation], name: str) -> bool:
    computation = computations.get(name, _Computation())
    return bool(computation.collectives) or any(_has_collective(computations, c) for c, _ in computation.calls)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current, shapes = "", _Computation(), dict[str, str]()
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current, shapes = _Computation(), {}
            computations[start[2]] = current
            entry = start[2] if start[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            name, rest = instruction.groups()
            result, opcode, operands, attributes = _split(rest)
            shapes[name] = result
            kind = opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                taken = sum(_size(shapes.get(operand, "")) for operand in re.findall(r"%?([\w.\-]+)", operands))
                size = taken * _group_size(attributes) if kind == "all-gather" else taken
                current.collectives.append((kind, size))
            elif opcode == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes)
                body = re.search(r"body=%?([\w.\-]+)", attributes)
                assert body is not None, line
                current.calls.append((body[1], int(trips[1]) if trips else -1))
            else:
                current.calls.extend((called, 1) for called in _called(attributes))
    return computations, entry


def _called(attributes: str) -> Iterator[str]:
    for match in re.finditer(
        r"(?:calls|to_apply|called_computations|branch_computations)=\{?([^}]*?)(?:\}|, \w+=|$)", attributes
    ):
        yield from (name.strip().lstrip("%") for name in match[1].split(",") if name.strip())


def _split(rest: str) -> tuple[str, str, str, str]:
    """Result type, opcode, operands and attributes of an instruction's right side."""
    result, rest = _until(rest, " ", 0)
    opcode, _, rest = rest.partition("(")
    operands, attributes = _until(rest, ")", 1)
    return result, opcode, operands, attributes


def _until(text: str, end: str, depth: int) -> tuple[str, str]:
    """What is before and after the first `end` outside parentheses, where `depth` are open."""
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == end and depth == 0:
            return text[:position], text[position + 1 :]
    return text, ""


def _size(shapes: str) -> int:
    total = 0
    for dtype, dimensions in _SHAPE.findall(shapes):
        count = math.prod(int(d) for d in dimensions.split(",") if d)
        total += count * _BYTES.get(dtype, 4)
    return total


def _group_size(attributes: str) -> int:
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(iota[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    raise ValueError(f"no replica groups in {attributes[:200]}")

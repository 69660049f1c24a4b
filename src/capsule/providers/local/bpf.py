"""Classic BPF, as far as seccomp uses it: an assembler and an interpreter.

A jump can only go forward, and a conditional one at most 255 instructions far. So a program is
assembled from its end to its beginning: a target is always a node that exists already, its distance
is known, and where it is too far a copy or a `JA` is put in between.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, NewType

from capsule.errors import InvalidError

MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS: the kernel refuses more

LD_ABS = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
JA = 0x05
JEQ = 0x15
JGT = 0x25
JGE = 0x35
JSET = 0x45
RET = 0x06

_MAX_JUMP = 255

# struct seccomp_data { int nr; __u32 arch; __u64 instruction_pointer; __u64 args[6]; }
_DATA = struct.Struct("<IIQ6Q")
NR = 0
ARCH = 4


def arg_low(index: int) -> int:
    return 16 + 8 * index


def arg_high(index: int) -> int:
    return arg_low(index) + 4


Node = NewType("Node", int)  # position of an instruction, counted from the end of the program


class Instruction(NamedTuple):
    code: int
    jt: int
    jf: int
    k: int


class Assembler:
    """Instructions are added from the last to the first; each names the nodes that follow it."""

    def __init__(self) -> None:
        self._reversed: list[Instruction] = []
        self._loads: dict[Node, tuple[int, Node]] = {}
        self._returns: dict[int, Node] = {}

    def ret(self, value: int) -> Node:
        """`return value`; the nearest copy is used again."""
        node = self._returns.get(value)
        if node is None:
            node = self._returns[value] = self._add(Instruction(RET, 0, 0, value))
        return node

    def load(self, offset: int, then: Node) -> Node:
        """A = the 32-bit word of seccomp_data at `offset`."""
        node = self._add_before(Instruction(LD_ABS, 0, 0, offset), then)
        self._loads[node] = (offset, then)
        return node

    def mask(self, mask: int, then: Node) -> Node:
        return self._add_before(Instruction(AND, 0, 0, mask), then)

    def jump_if(self, code: int, k: int, yes: Node, no: Node, *, holds: int | None = None) -> Node:
        """Compare A with `k`. `holds` says what is in A: a load of the same is skipped."""
        if yes == no:
            return yes
        yes, no = self._past_load(yes, holds), self._past_load(no, holds)
        # Bringing one target near may push the other too far, so look at both once more.
        yes = self._near(yes, room=1)
        no = self._near(no, room=0)
        jt, jf = self._distance(yes), self._distance(no)
        return self._add(Instruction(code, jt, jf, k))

    def program(self, entry: Node) -> bytes:
        """The finished program, starting at `entry`."""
        instructions = self._reversed[: entry + 1][::-1]
        if len(instructions) > MAX_INSTRUCTIONS:
            raise InvalidError(
                f"seccomp program has {len(instructions)} instructions, limit {MAX_INSTRUCTIONS}",
                hint="use fewer argument conditions in the profile",
            )
        return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)

    def _add(self, instruction: Instruction) -> Node:
        self._reversed.append(instruction)
        return Node(len(self._reversed) - 1)

    def _add_before(self, instruction: Instruction, then: Node) -> Node:
        """For instructions that fall through: what follows must be the very next one."""
        if self._distance(then) != 0:
            self._stand_in(then)
        return self._add(instruction)

    def _distance(self, target: Node) -> int:
        return len(self._reversed) - 1 - target

    def _near(self, target: Node, *, room: int) -> Node:
        return target if self._distance(target) <= _MAX_JUMP - room else self._stand_in(target)

    def _stand_in(self, target: Node) -> Node:
        """A node right here that does what the far one does: a copy of a return, else a jump."""
        original = self._reversed[target]
        if original.code != RET:
            return self._add(Instruction(JA, 0, 0, self._distance(target)))
        copy = self._returns[original.k] = self._add(original)
        return copy

    def _past_load(self, target: Node, holds: int | None) -> Node:
        offset, then = self._loads.get(target, (None, target))
        return then if holds is not None and offset == holds else target


def disassemble(program: bytes) -> list[Instruction]:
    return [Instruction(*fields) for fields in struct.iter_unpack("<HBBI", program)]


class Verdict(NamedTuple):
    value: int  # SECCOMP_RET_*, with its data in the low 16 bits
    steps: int  # instructions executed


def simulate(program: bytes, nr: int, arch: int, args: tuple[int, ...] = ()) -> Verdict:
    """What the kernel would answer to this call. Arguments are 64-bit and may be negative."""
    padded = (*args, *(0,) * (6 - len(args)))
    data = _DATA.pack(nr & 0xFFFFFFFF, arch, 0, *(arg & (2**64 - 1) for arg in padded))
    instructions = disassemble(program)
    a = pc = steps = 0
    while True:
        code, jt, jf, k = instructions[pc]
        steps += 1
        pc += 1
        if code == RET:
            return Verdict(k, steps)
        if code == LD_ABS:
            (a,) = struct.unpack_from("<I", data, k)
        elif code == AND:
            a &= k
        elif code == JA:
            pc += k
        else:
            pc += jt if _holds(code, a, k) else jf


def _holds(code: int, a: int, k: int) -> bool:
    match code:
        case 0x15:
            return a == k
        case 0x25:
            return a > k
        case 0x35:
            return a >= k
        case 0x45:
            return bool(a & k)
    raise ValueError(f"not an instruction seccomp knows: {code:#x}")

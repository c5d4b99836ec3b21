"""PTX text to a program: parameters, basic blocks, instructions, operands."""

import re
import struct
from dataclasses import dataclass, field

import numpy as np

WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}
WIDTHS |= {f"{k}{w}": w for k in "usf" for w in (8, 16, 32, 64)}


class PTXError(Exception):
    """What is wrong with a program or with what it does; the message names the line of PTX."""


@dataclass(frozen=True, slots=True)
class Register:
    """A register of every thread."""

    index: int
    bits: int
    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """The bits of a constant, as wide as the text says or 64."""

    bits: int

    def as_type(self, dtype: np.dtype) -> np.ndarray:
        width = 8 * dtype.itemsize
        return np.array([self.bits & ((1 << width) - 1)], f"u{dtype.itemsize}").view(dtype)


@dataclass(frozen=True, slots=True)
class Special:
    """%tid.x, %ctaid.x and their kin, or the address of a shared symbol."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset]; the base is a register, a parameter's name or a shared symbol."""

    base: "Register | str"
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, ...}; None stands for `_`, an element that is dropped."""

    parts: "tuple[Operand | None, ...]"


Operand = Register | Immediate | Special | Address | Vector


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: its opcode, operands and guard."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    text: str
    target: str | None = None
    """Label of a branch."""


@dataclass(slots=True)
class Program:
    """A kernel: its parameters (name, bits), its blocks, its registers."""

    name: str
    parameters: list[tuple[str, int]]
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: int = 0
    threads: int = 0
    version: tuple[int, int] = (0, 0)
    target: str = ""


_ENDS = ("bra", "ret", "exit", "bar", "barrier")
_SPECIAL = re.compile(r"%(tid|ctaid|ntid|nctaid)\.[xyz]$|%laneid$|%warpid$")


class _Reader:
    def __init__(self, program: Program, shared: set[str]) -> None:
        self.program = program
        self.shared = shared
        self.declared: dict[str, int] = {}
        self.found: dict[str, Register] = {}

    def declare(self, line: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", line).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            self.declared[name.strip().split("<")[0]] = WIDTHS[kind]

    def register(self, name: str) -> Register:
        if name not in self.found:
            prefix = name if name in self.declared else re.sub(r"\d+$", "", name)
            if prefix not in self.declared:
                raise PTXError(f"register {name} is not declared")
            self.found[name] = Register(len(self.found), self.declared[prefix], name)
            self.program.registers = len(self.found)
        return self.found[name]

    def operand(self, text: str) -> Operand | None:
        text = text.strip()
        if text == "_":
            return None
        if text.startswith("{"):
            return Vector(tuple(self.operand(part) for part in text[1:-1].split(",")))
        if text.startswith("["):
            return self._address(text[1:-1])
        if _SPECIAL.match(text) or text in self.shared:
            return Special(text)
        number = immediate(text)
        return number if number is not None else self.register(text)

    def _address(self, text: str) -> Address:
        base, _, offset = (part.strip() for part in text.partition("+"))
        named = base in self.shared or base in dict(self.program.parameters)
        return Address(base if named else self.register(base), int(offset or "0", 0))

    def instruction(self, text: str) -> Instruction:
        guard, negated, rest = None, False, text
        if text.startswith("@"):
            name, rest = text[1:].split(None, 1)
            negated = name.startswith("!")
            guard = self.register(name.lstrip("!"))
        opcode, _, tail = rest.partition(" ")
        if opcode in ("bra", "bra.uni"):
            return Instruction(opcode, (), guard, negated, text, tail.strip())
        operands = [self.operand(part) for part in _split(tail)]
        if any(operand is None for operand in operands):
            raise PTXError(f"`_` outside of a vector: {text}")
        return Instruction(opcode, tuple(operands), guard, negated, text)  # type: ignore[arg-type]


def immediate(text: str) -> Immediate | None:
    """The bits of a literal; None if the text is none."""
    if re.match(r"0f[0-9A-Fa-f]{8}$", text):
        return Immediate(int(text[2:], 16))
    if re.match(r"0d[0-9A-Fa-f]{16}$", text):
        return Immediate(int(text[2:], 16))
    if re.match(r"-?(0x[0-9A-Fa-f]+|0b[01]+|\d+)U?$", text):
        return Immediate(int(text.rstrip("U"), 0))
    if re.match(r"-?\d+\.\d+$", text):
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0])
    return None


def _split(text: str) -> list[str]:
    """Operands between commas that are outside of braces; `a|b` is two."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", text)
    return [part for part in parts if part]


def _statements(body: str) -> list[str]:
    body = re.sub(r"//[^\n]*", "", body)
    found = []
    for line in body.splitlines():
        line = " ".join(line.split())
        if not line or line.startswith((".loc", ".pragma", ".file")):
            continue
        label = re.match(r"([$\w]+):$", line)
        if label:
            found.append(line)
            continue
        # `{ .reg .b32 tmp; mov ...; }` opens a scope; its names are new in each.
        if line.startswith("{") or line == "}":
            line = line.removeprefix("{").removesuffix("}")
        found += [part.strip() for part in line.split(";") if part.strip()]
    return found


def parse(text: str) -> Program:
    """The one kernel of a PTX module.

    Raises:
        PTXError: The text has no kernel, or something in it is not understood.
    """
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{\n(.*?)\n\}", text, re.DOTALL)
    if head is None:
        raise PTXError("no `.visible .entry` in the text")
    name, parameters, attributes, body = head.groups()
    found = re.findall(r"\.param \.([ubsf]\d+)[^,\n]*?(\w+)\s*(?:,|$)", parameters, re.MULTILINE)
    program = Program(name, [(n, WIDTHS[kind]) for kind, n in found])
    version = re.search(r"^\.version (\d+)\.(\d+)", text, re.MULTILINE)
    target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    threads = re.search(r"\.reqntid (\d+)", attributes)
    if version is None or target is None or threads is None:
        raise PTXError(f"{name}: no .version, .target or .reqntid")
    program.version = int(version[1]), int(version[2])
    program.target, program.threads = target[1], int(threads[1])
    shared = set(re.findall(r"\.shared \.align \d+ \.b8 (\w+)\[", text))
    if len(shared) > 1:
        raise PTXError(f"{name}: several shared symbols {sorted(shared)}; one is understood")
    _blocks(program, _Reader(program, shared), _statements(body))
    return program


def _blocks(program: Program, reader: _Reader, statements: list[str]) -> None:
    """Cut at labels, and after whatever may send threads elsewhere."""
    block: list[Instruction] = []
    program.blocks.append(block)
    for text in statements:
        if text.startswith(".reg"):
            reader.declare(text)
        elif text.endswith(":"):
            if block:
                block = []
                program.blocks.append(block)
            program.labels[text[:-1]] = len(program.blocks) - 1
        else:
            instruction = reader.instruction(text)
            block.append(instruction)
            if instruction.opcode.split(".")[0] in _ENDS:
                block = []
                program.blocks.append(block)

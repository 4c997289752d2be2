"""A small vocabulary that writes LLVM IR text, so that a kernel in Python reads like its algorithm.

    module = Module()
    f = module.function("dot", a="f32*", b="f32*", n="i64", out="f32*")
    a, b, n, out = f.parameters
    total = f.variable(f.splat(0.0, 16))           # a register that changes: 16 float32
    with f.loop(0, n, 16) as j:
        rest = f.tail(n - j, 16)                   # <16 x i1>: the lanes that exist
        total.value = f.fma(f.load(a + j, 16, rest), f.load(b + j, 16, rest), total.value)
    f.store(out, f.reduce_add(total.value))
    print(module)                                  # compiled.py makes machine code of this

Values know their type, "f32", "i1", "i8", "i16", "i32", "i64" or a pointer "f32*" to an element,
and their lanes, 0 for a scalar. Operators work as in Python on values of either kind and on
numbers: a number takes the type of the other side, a scalar beside a vector is splat, of two
integers the narrower is widened with its sign. Comparisons give i1 and are signed; & | ^ ~ work on
integers and i1; >> fills with zeros. So Mask.keep, called with values, emits its test.

A pointer moves by elements, p + i, and an element is loaded and stored in the type that computes:
"bf16*" and "f16*" give and take float32 (stores round to nearest even), "bool*" gives and takes i1.

Variables become registers (phi) in compiled.py; f.array() stays memory, on the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .values import BITS, COMPUTES, Operand, Value, element_bytes, literal, llvm_type, mangled

__all__ = ["Function", "Module", "Operand", "Value", "Variable"]

LINE_BYTES = 64  # of a cache


class Variable:
    """A register that changes: read and assign .value, inside loops and conditions too."""

    def __init__(self, f: Function, first: Value) -> None:
        self._f, self._like = f, first
        self._at = f.alloca(first.type, 1)
        self.value = first

    @property
    def value(self) -> Value:
        """What it holds here."""
        like = self._like
        return self._f.emit(f"load {like.type}, ptr {self._at}", like.kind, like.lanes)

    @value.setter
    def value(self, new: Operand) -> None:
        new = self._f.value(new, self._like.kind, self._like.lanes)
        assert (new.kind, new.lanes) == (self._like.kind, self._like.lanes), new.type
        self._f.emit(f"store {new.type} {new.name}, ptr {self._at}")


class Module:
    """Functions that are compiled together. str() is LLVM IR text."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self.declarations: dict[str, str] = {}

    def function(self, name: str, returns: str = "void", **parameters: str) -> Function:
        """A new function; parameters by name, each a kind: n="i64", q="f32*"."""
        self.functions.append(Function(self, name, returns, parameters))
        return self.functions[-1]

    def __str__(self) -> str:
        return "\n".join([*self.declarations.values(), *map(str, self.functions), "!0 = !{}"])


class Function:
    """One function while it is being written; see the top of this file."""

    def __init__(self, module: Module, name: str, returns: str, parameters: dict[str, str]) -> None:
        self.module, self.name, self.returns = module, name, returns
        self.parameters = [Value(self, f"%{word}", kind) for word, kind in parameters.items()]
        self._locals: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._block = "entry"

    def __str__(self) -> str:
        words = ", ".join(f"{p.type} {p.name}" for p in self.parameters)
        head = f"define {llvm_type(self.returns)} @{self.name}({words}) nounwind {{\nentry:"
        lines = [*self._locals, "  br label %start", "start:", *self._lines]
        if self.returns == "void":
            lines.append("  ret void")
        return "\n".join([head, *lines, "}"])

    # ---- text ----

    def emit(self, text: str, kind: str = "void", lanes: int = 0) -> Value:
        """One instruction; its result unless kind is "void"."""
        if kind == "void":
            self._lines.append(f"  {text}")
            return Value(self, "", "void")
        name = self._fresh()
        self._lines.append(f"  {name} = {text}")
        return Value(self, name, kind, lanes)

    def call(self, name: str, kind: str, lanes: int, *values: Value) -> Value:
        """Call a function of this module, of libm, or an intrinsic by its full name."""
        returns = llvm_type(kind, lanes)
        if all(name != f.name for f in self.module.functions):
            types = ", ".join(v.type for v in values)
            self.module.declarations[name] = f"declare {returns} @{name}({types})"
        words = ", ".join(f"{v.type} {v.name}" for v in values)
        return self.emit(f"call {returns} @{name}({words})", kind, lanes)

    def intrinsic(self, name: str, *values: Value) -> Value:
        """llvm.<name>, overloaded by the type of its first value, which it returns."""
        first = values[0]
        full = f"llvm.{name}.{mangled(first.type)}"
        return self.call(full, first.kind, first.lanes, *values)

    def ret(self, value: Value) -> None:
        """Return a value, at the end of the function."""
        self.emit(f"ret {value.type} {value.name}")

    def alloca(self, type_: str, count: int, align: int = 0) -> str:
        """Room on the stack, made once at the entry of the function; its name."""
        name = self._fresh()
        suffix = f", align {align}" if align else ""
        self._locals.append(f"  {name} = alloca {type_}, i64 {count}{suffix}")
        return name

    def _fresh(self, stem: str = "v") -> str:
        self._count += 1
        return f"%{stem}.{self._count}"

    # ---- control ----

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Value]:
        """for i in range(start, stop, step): the index, an i64. The step is positive."""
        first, end, by = (self.value(x, "i64") for x in (start, stop, step))
        index = Variable(self, first)
        head, body, after = self._fresh("head"), self._fresh("body"), self._fresh("after")
        self._open(head, jump=True)
        i = index.value
        self.emit(f"br i1 {(i < end).name}, label {body}, label {after}")
        self._open(body)
        yield i
        index.value = i + by
        self.emit(f"br label {head}")
        self._open(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """What follows runs only where the scalar condition (i1) holds."""
        body, after = self._fresh("then"), self._fresh("after")
        self.emit(f"br i1 {condition.name}, label {body}, label {after}")
        self._open(body)
        yield
        self._open(after, jump=True)

    def leave(self) -> None:
        """Return from the function here, inside a condition."""
        self.emit("ret void")
        self._open(self._fresh("unreached"))

    def take(self, counter: Value) -> Value:
        """Add 1 to an i64 in memory that other threads count on too; what it was before."""
        return self.emit(f"atomicrmw add ptr {counter.name}, i64 1 acq_rel", "i64")

    def _open(self, block: str, jump: bool = False) -> None:
        if jump:
            self.emit(f"br label {block}")
        self._lines.append(f"{block[1:]}:")

    # ---- values ----

    def value(self, x: Operand, kind: str, lanes: int = 0) -> Value:
        """A number as a constant of that type; a value as it is, widened or splat to that type."""
        if isinstance(x, Value):
            if not x.real and not x.kind.endswith("*") and kind in ("i16", "i32", "i64"):
                x = x.to(kind) if BITS[kind] > BITS[x.kind] else x
            return self.splat(x, lanes) if lanes and not x.lanes else x
        scalar = Value(self, literal(x, kind), kind)
        return self.splat(scalar, lanes) if lanes else scalar

    def alike(self, a: Operand, b: Operand) -> tuple[Value, Value]:
        """Both in one type: see the top of this file."""
        kinds = [x.kind for x in (a, b) if isinstance(x, Value)]
        kind = max(kinds, key=lambda k: 64 if k.endswith("*") else BITS[k])
        lanes = max(x.lanes for x in (a, b) if isinstance(x, Value))
        one, two = self.value(a, kind, lanes), self.value(b, kind, lanes)
        assert one.type == two.type, f"{one.type} beside {two.type}"
        return one, two

    def splat(self, x: Operand, lanes: int, kind: str = "f32") -> Value:
        """A scalar, or a number of type `kind`, in every lane."""
        x = self.value(x, kind)
        if x.lanes:
            assert x.lanes == lanes, f"{x.type} in {lanes} lanes"
            return x
        if not x.name.startswith("%"):
            return Value(self, f"splat ({x.type} {x.name})", x.kind, lanes)
        to = llvm_type(x.kind, lanes)
        one = self.emit(f"insertelement {to} poison, {x.type} {x.name}, i32 0", x.kind, lanes)
        return self.shuffle(one, [0] * lanes)

    def iota(self, lanes: int, kind: str = "i32") -> Value:
        """0, 1, 2, ..."""
        words = ", ".join(f"{kind} {n}" for n in range(lanes))
        return Value(self, f"<{words}>", kind, lanes)

    def tail(self, left: Operand, lanes: int) -> Value:
        """The first `left` lanes (at most all, at least none) as i1."""
        some = self.min(self.value(left, "i64"), lanes)
        return self.iota(lanes) < self.splat(some.to("i32"), lanes)

    def variable(self, first: Operand, kind: str = "f32") -> Variable:
        """A register that changes; `kind` is that of a first value given as a number."""
        return Variable(self, self.value(first, kind))

    def select(self, where: Value, yes: Operand, no: Operand) -> Value:
        """Lane by lane, or as a whole where the condition is a scalar."""
        a, b = self.alike(yes, no)
        if where.lanes and not a.lanes:
            a, b = self.splat(a, where.lanes), self.splat(b, where.lanes)
        words = f"{where.type} {where.name}, {a.type} {a.name}, {b.type} {b.name}"
        return self.emit(f"select {words}", a.kind, a.lanes)

    def max(self, a: Operand, b: Operand) -> Value:
        """The larger one; b where one of them is NaN."""
        a, b = self.alike(a, b)
        return self.select(a > b, a, b)

    def min(self, a: Operand, b: Operand) -> Value:
        """The smaller one; b where one of them is NaN."""
        a, b = self.alike(a, b)
        return self.select(a < b, a, b)

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        """a * b + c, rounded once."""
        one, two = self.alike(a, b)
        one, three = self.alike(one, c)
        return self.intrinsic("fma", one, self.value(two, one.kind, one.lanes), three)

    def extract(self, x: Value, lane: int) -> Value:
        """One lane."""
        return self.emit(f"extractelement {x.type} {x.name}, i32 {lane}", x.kind)

    def concat(self, a: Value, b: Value) -> Value:
        """The lanes of a, then those of b."""
        return self.shuffle(a, list(range(2 * a.lanes)), b)

    def shuffle(self, a: Value, lanes: Sequence[int], b: Value | None = None) -> Value:
        """The named lanes; those of b count on from those of a."""
        other = "poison" if b is None else b.name
        order = ", ".join(f"i32 {n}" for n in lanes)
        return self.emit(
            f"shufflevector {a.type} {a.name}, {a.type} {other}, <{len(lanes)} x i32> <{order}>",
            a.kind,
            len(lanes),
        )

    def reduce(self, x: Value, join: Callable[[Value, Value], Value]) -> Value:
        """All lanes joined to a scalar, halves first: the order does not depend on the data."""
        while x.lanes > 1:
            half = x.lanes // 2
            low, high = range(half), range(half, 2 * half)
            x = join(self.shuffle(x, list(low)), self.shuffle(x, list(high)))
        return self.extract(x, 0)

    def reduce_add(self, x: Value) -> Value:
        """The sum of all lanes."""
        return self.reduce(x, lambda a, b: a + b)

    def reduce_max(self, x: Value) -> Value:
        """The largest lane."""
        return self.reduce(x, self.max)

    def count(self, where: Value) -> Value:
        """How many lanes of an i1 vector hold, as i32; any(where) is count(where) > 0."""
        packed = self.emit(
            f"bitcast {where.type} {where.name} to i{where.lanes}", f"i{where.lanes}"
        )
        ones = self.intrinsic("ctpop", packed)
        return (
            ones if where.lanes == 32 else self.emit(f"zext {ones.type} {ones.name} to i32", "i32")
        )

    # ---- memory ----

    def array(self, kind: str, count: int) -> Value:
        """A pointer to `count` elements on the stack, aligned to 64 bytes, not initialised."""
        return Value(self, self.alloca(llvm_type(kind), count, align=64), f"{kind}*")

    def load(self, p: Value, lanes: int = 0, where: Value | None = None) -> Value:
        """The element at p, or `lanes` of them in a row; lanes outside `where` are not read: 0."""
        kind = p.kind[:-1]
        to = llvm_type(kind, lanes)
        if where is None:
            x = self.emit(f"load {to}, ptr {p.name}, align {element_bytes(kind)}", kind, lanes)
        else:
            x = self._masked("load", kind, where, f"ptr {p.name}", "ptr")
        return self._widened(x)

    def prefetch(self, p: Value, count: int = 1) -> None:
        """Ask for `count` elements in a row to be brought into the first cache; they need not
        exist."""
        name = "llvm.prefetch.p0"
        self.module.declarations[name] = f"declare void @{name}(ptr, i32, i32, i32)"
        line = LINE_BYTES // element_bytes(p.kind[:-1])
        for at in range(0, count, line):
            self.emit(f"call void @{name}(ptr {(p + at).name}, i32 0, i32 3, i32 1)")

    def constant(self, p: Value, kind: str) -> Value:
        """A scalar or a pointer, loaded from where nothing writes while the kernel runs."""
        words = f"load {llvm_type(kind)}, ptr {p.name}, align 8, !invariant.load !0"
        return self.emit(words, kind)

    def gather(self, p: Value, index: Value, where: Value | None = None) -> Value:
        """The elements p[index], lane by lane; lanes outside `where` are not read: 0."""
        kind = p.kind[:-1]
        words = f"ptr {p.name}, {index.type} {index.name}"
        at = self.emit(f"getelementptr {llvm_type(kind)}, {words}", p.kind, index.lanes)
        if where is None:
            where = self.splat(1, index.lanes, "i1")
        return self._widened(self._masked("gather", kind, where, f"{at.type} {at.name}", at.type))

    def store(self, p: Value, x: Operand, where: Value | None = None) -> None:
        """Write x to p, a vector to the elements in a row; lanes outside `where` are left alone."""
        kind = p.kind[:-1]
        x = self._narrowed(self.value(x, COMPUTES.get(kind, kind)), kind)
        align = element_bytes(kind)
        if where is None:
            self.emit(f"store {x.type} {x.name}, ptr {p.name}, align {align}")
            return
        if kind == "bf16":
            # LLVM 22 stores both halves of the word where one lane of cut words is to be stored;
            # behind the fence it does not see that they were cut
            whole = self.emit(f"bitcast {x.type} {x.name} to <{x.lanes // 2} x float>", "f32")
            whole = Value(self, whole.name, "f32", x.lanes // 2)
            whole = self.intrinsic("arithmetic.fence", whole)
            x = self.emit(f"bitcast {whole.type} {whole.name} to {x.type}", x.kind, x.lanes)
        name = f"llvm.masked.store.{mangled(x.type)}.p0"
        self.module.declarations[name] = f"declare void @{name}({x.type}, ptr, i32, {where.type})"
        words = f"{x.type} {x.name}, ptr {p.name}, i32 {align}, {where.type} {where.name}"
        self.emit(f"call void @{name}({words})")

    def _masked(self, what: str, kind: str, where: Value, at: str, pointer: str) -> Value:
        to = llvm_type(kind, where.lanes)
        name = f"llvm.masked.{what}.{mangled(to)}.{mangled(pointer)}"
        types = f"{pointer}, i32, {where.type}, {to}"
        self.module.declarations[name] = f"declare {to} @{name}({types})"
        words = f"{at}, i32 {element_bytes(kind)}, {where.type} {where.name}, {to} zeroinitializer"
        return self.emit(f"call {to} @{name}({words})", kind, where.lanes)

    def _widened(self, x: Value) -> Value:
        if x.kind == "bf16":
            x = Value(self, x.name, "i16", x.lanes)
            return (x.unsigned("i32") << 16).bits("f32")
        if x.kind == "bool":
            return Value(self, x.name, "i8", x.lanes) != 0
        return x.to("f32") if x.kind == "f16" else x

    def _narrowed(self, x: Value, kind: str) -> Value:
        if kind == "bf16":
            bits = x.bits("i32")
            even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet = (bits >> 16) | 64  # rounding up could make an infinity of a NaN
            return self.select(x == x, even, quiet).to("i16")
        if kind == "bool":
            return x.to("i8")
        return x.to("f16") if kind == "f16" else x

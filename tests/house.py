"""Checkers of the house rules: each takes a path or source text and returns what breaks the rule.

tests/test_house.py runs them over this repository, and over small bad examples, so that each is
known to be able to fail. Nothing here imports torch or nosquare.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "nosquare"

# A module may import modules of the lines above its own, and of its own line only where ALONGSIDE
# says so. "backends" is the folder's __init__, "backends/*" what lies in it, "." the package's own
# __init__. A new module is one word here and one line in docs/design.md.
RANKS = [
    ["errors"],
    ["device", "state", "dropout", "axes", "driver"],
    ["mask", "score", "kvcache"],
    ["bound", "spelling", "traced"],
    ["inputs", "mask_text"],
    ["problem"],
    ["pairs"],
    ["traffic"],
    ["cost"],
    ["oracle", "certify", "receipt", "finite", "weights"],
    ["backends"],
    ["backends/*"],
    ["ops", "explain", "estimate", "measure", "observe"],
    ["autograd"],
    ["api"],
    ["adapters"],
    ["."],
    ["records"],
    ["bench"],
    ["doctor", "plan", "fit", "verify"],
    ["report"],
    ["demo"],
    ["cli"],
    ["__main__"],
]
ALONGSIDE = {
    ("score", "mask"),
    ("certify", "oracle"),
    ("observe", "measure"),
    ("ops", "measure"),
}
COMPILERS = {"triton", "gluon", "llvmlite"}

FILE_LINES, FUNCTION_LINES, KERNEL_LINES, PARAMETERS, CLONE_LINES = 400, 80, 160, 8, 10

# Modules whose functions users call with many keyword-only arguments, the same in both.
KEYWORDS_FREE = {"api", "oracle", "weights"}

# Files whose parameter lists are not ours to choose.
FOREIGN_SIGNATURES = {
    "adapters": "the signature belongs to the library that is adapted",
    "ops": "an operator's schema is flat: torch.library takes no dataclass",
    "cli": "one parameter for each command-line option",
}


def tracked(*suffixes: str) -> list[Path]:
    """Files of the repository, tracked or about to be, with one of `suffixes` (none given: all)."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:  # an unpacked archive
        paths = [p for d in ("src", "tests", "scripts", "docs") for p in (ROOT / d).rglob("*")]
    else:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sorted(p for p in paths if p.is_file() and (not suffixes or p.suffix in suffixes))


# ---- imports ----


def module_of(path: Path, package: Path = PACKAGE) -> str:
    """Module path inside the package: "mask", "backends", "backends/a/plan"; "." is its root."""
    name = path.relative_to(package).with_suffix("").as_posix()
    return name.removesuffix("__init__").strip("/") or "."


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import that can run; relative ones resolved, lazy ones included.

    `from a import b` gives a.b, since b may be a module. Imports under TYPE_CHECKING never run.
    """
    here = ["nosquare", *(p for p in module.split("/") if p != ".")]
    for node in _running_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = here[: len(here) - up] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def _running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from _running_nodes(node)


def _place(module: str) -> str:
    """The word in RANKS that stands for `module`."""
    first, _, rest = module.partition("/")
    return "backends/*" if first == "backends" and rest else first


def _ours(name: str, modules: set[str]) -> str | None:
    """The module of ours that importing the dotted `name` loads; None for somebody else's."""
    first, *parts = name.split(".")
    if first != "nosquare":
        return None
    while parts and "/".join(parts) not in modules:
        parts.pop()
    return "/".join(parts) or "."


def wrong_imports(files: dict[str, str], packages: set[str]) -> list[str]:
    """Imports against the direction of RANKS. files: module -> source; packages: the folders."""
    rank = {word: number for number, line in enumerate(RANKS) for word in line}
    found = [
        f"{module}: no place in RANKS (tests/house.py)"
        for module in files
        if _place(module) not in rank
    ]
    for module, source in files.items():
        if _place(module) not in rank:
            continue
        for line, name in imports(source, module, module in packages):
            target = _ours(name, set(files))
            if target is None or target == module or _place(target) not in rank:
                continue
            mine, theirs = _place(module), _place(target)
            if mine == theirs:  # one file's own folder; but one backend may not know another
                wrong = mine == "backends/*" and module.split("/")[1] != target.split("/")[1]
            else:
                wrong = rank[theirs] >= rank[mine] and (mine, theirs) not in ALONGSIDE
            if wrong:
                found.append(f"{module}:{line} imports {target}")
    return found


def compilers_outside(files: dict[str, str], packages: set[str]) -> list[str]:
    """Imports of a kernel compiler anywhere but in a backend's own folder."""
    return [
        f"{module}:{line} imports {name}"
        for module, source in files.items()
        if _place(module) != "backends/*"
        for line, name in imports(source, module, module in packages)
        if COMPILERS & set(name.split(".")[:1])
    ]


def loaded_by(statement: str, watched: Iterable[str], before: str = "import torch") -> set[str]:
    """Which of `watched` a fresh process loads for `statement`, not counting what `before` did."""
    code = (
        f"import sys\n{before}\nold = set(sys.modules)\n{statement}\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - old})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split()) & set(watched)


# ---- sizes ----


def long_file(name: str, source: str) -> list[str]:
    count = len(source.splitlines())
    return [f"{name} has {count} lines"] if count > FILE_LINES else []


def _functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (ast.unparse(d).partition("(")[0] for d in function.decorator_list)
    return any(name.rpartition(".")[2] == "jit" for name in names)


def long_functions(name: str, source: str) -> list[str]:
    """Functions over the limit, counted from `def` to the last line, less the docstring."""
    found = []
    for function in _functions(source):
        count = (function.end_lineno or 0) - function.lineno + 1
        first = function.body[0]
        if ast.get_docstring(function) is not None:
            count -= (first.end_lineno or 0) - first.lineno + 1
        limit = KERNEL_LINES if _is_kernel(function) else FUNCTION_LINES
        if count > limit:
            found.append(f"{name}:{function.lineno} {function.name} has {count} lines, not {limit}")
    return found


def many_parameters(name: str, source: str, module: str) -> list[str]:
    """Host functions with over PARAMETERS parameters; see KEYWORDS_FREE for keyword-only ones."""
    if module.split("/")[0] in FOREIGN_SIGNATURES:
        return []
    found = []
    for function in _functions(source):
        given = [a.arg for a in [*function.args.posonlyargs, *function.args.args]]
        if given[:1] in (["self"], ["cls"]):
            given = given[1:]
        is_public = module in KEYWORDS_FREE and not function.name.startswith("_")
        count = len(given) + (0 if is_public else len(function.args.kwonlyargs))
        if count > PARAMETERS and not _is_kernel(function):
            found.append(f"{name}:{function.lineno} {function.name} takes {count} parameters")
    return found


# ---- text ----


def folded(source: str) -> list[tuple[int, str]]:
    """(line number, text) of the lines that hold code: no comments, no imports, spaces folded."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return [(n, " ".join(text.split())) for n, text in enumerate(lines, 1) if text.strip()]


def clones(files: dict[str, str], length: int = CLONE_LINES) -> list[str]:
    """Runs of `length` equal lines of code that stand in two files; one report for each pair."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    found: dict[tuple[str, str], str] = {}
    for name, source in files.items():
        lines = folded(source)
        for start in range(len(lines) - length + 1):
            window = tuple(text for _, text in lines[start : start + length])
            other, at = seen.setdefault(window, (name, lines[start][0]))
            if other != name:
                found.setdefault((other, name), f"{other}:{at} and {name}:{lines[start][0]}")
    return list(found.values())


_FOLDERS = r"(?:\.ci|src|tests|docs|examples|scripts|backends|adapters|bench|demo)"
_PATH = re.compile(rf"(?<![\w./:<>-])({_FOLDERS}/[\w.*/-]*[\w*/])")
_FILE = re.compile(r"`([\w.-]+\.(?:py|toml|txt|md|yaml))`")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def dead_paths(text: str, document: Path, root: Path = ROOT) -> list[str]:
    """Repository paths a document names that lead nowhere.

    `*` matches anything, and a path inside the package may leave out src/nosquare/.
    """
    package, found = root / "src" / "nosquare", []
    for pattern, bases in (
        (_PATH, [root, package]),
        (_FILE, [root, package, root / "docs", root / "tests"]),
        (_LINK, [document.parent]),
    ):
        for name in sorted({m[1].rstrip("/") for m in pattern.finditer(text)}):
            if not any(any(base.glob(_glob(name))) for base in bases):
                found.append(f"{document.name} names {name}")
    return found


def _glob(name: str) -> str:
    return re.sub(r"^(\./)+", "", name)


# "@" stands for nothing: it keeps this file from naming what it looks for.
_MACHINE = re.compile(
    (
        r"(?<![\w.<-])(?:/w@ork/|/r@oot/|/home/\w|/tmp/\w|/o@pt/(?:pypi|wheels)|/etc/x@dg)"
        r"|py@pi\.org|python@hosted\.org|download\.py@torch|npm@js\.org|deb\.deb@ian"
    ).replace("@", "")
)


def machine_names(name: str, text: str) -> list[str]:
    """Paths of one machine, and hosts of package registries."""
    return [
        f"{name}:{number} has {match[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in _MACHINE.finditer(line)
    ]


# ---- the public surface ----


def surface(names: Iterable[str], public: dict[str, object]) -> list[str]:
    """Where __all__ and the public names differ, and public names without words of their own."""
    names = list(names)
    found = [f"{n} is public and not in __all__" for n in sorted(set(public) - set(names))]
    found += [f"{n} is in __all__ and not there" for n in sorted(set(names) - set(public))]
    for name in sorted(set(names) & set(public)):
        thing = public[name]
        if not (callable(thing) or isinstance(thing, ModuleType)):
            continue  # a value
        doc = vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__
        if not doc or doc.startswith(f"{name}("):  # what dataclass writes is no docstring
            found.append(f"{name} has no docstring")
    return found

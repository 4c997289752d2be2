"""The house rules, enforced, and each checker shown to fail on a small bad example."""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Iterable
from pathlib import Path

import pytest

import house
from house import PACKAGE, ROOT

SOURCES = {p: p.read_text() for p in house.tracked(".py")}
OURS = {p: text for p, text in SOURCES.items() if p.is_relative_to(PACKAGE)}
MODULES = {house.module_of(p): text for p, text in OURS.items()}
PACKAGES = {house.module_of(p) for p in OURS if p.name == "__init__.py"}
DOCUMENTS = [p for p in house.tracked(".md") if p.parent in (ROOT, ROOT / "docs")]
LAZY = ["triton", "llvmlite", "transformers", "matplotlib"]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def clean(found: Iterable[str], advice: str) -> None:
    """Fail with every finding and what to do about them."""
    lines = list(found)
    assert not lines, "\n".join([*lines, f"Try: {advice}"])


# ---- this repository ----


def test_imports_point_left() -> None:
    advice = "move the shared part to a module further left, or pass it in (order: tests/house.py)"
    clean(house.wrong_imports(MODULES, PACKAGES), advice)


def test_only_backends_import_compilers() -> None:
    advice = "move the code into src/nosquare/backends/<x>/; find_spec tells whether it is there"
    clean(house.compilers_outside(MODULES, PACKAGES), advice)


def test_import_is_light() -> None:
    advice = "import it inside the function that needs it"
    clean(house.loaded_by("import nosquare", LAZY), advice)


def test_public_names() -> None:
    ns = importlib.import_module("nosquare")
    public = {
        n: v
        for n, v in vars(ns).items()
        if n in ns.__all__ or not (n.startswith("_") or isinstance(v, types.ModuleType))
    }
    public.pop("annotations", None)  # from __future__
    public |= {n: getattr(ns, n) for n in ns.__all__ if hasattr(ns, n)}
    clean(house.surface(ns.__all__, public), "keep __all__ in step, and write the docstring")


def test_files_are_short() -> None:
    found = (f for p, text in SOURCES.items() for f in house.long_file(name(p), text))
    clean(found, "split the file where its subject changes")


def test_functions_are_short() -> None:
    found = (f for p, text in SOURCES.items() for f in house.long_functions(name(p), text))
    clean(found, "name a part of it and move that part out")


def test_functions_take_few_parameters() -> None:
    found = (
        f for p, t in OURS.items() for f in house.many_parameters(name(p), t, house.module_of(p))
    )
    clean(found, "pass the Problem, the Plan or another dataclass that travels together")


def test_no_clones() -> None:
    advice = "call one piece from both places; what backends share lies further left"
    clean(house.clones({name(p): text for p, text in OURS.items()}), advice)


def test_documents_name_real_paths() -> None:
    found = (f for p in DOCUMENTS for f in house.dead_paths(p.read_text(), p))
    clean(found, "correct the name, or remove the sentence that outlived its file")


def test_no_machine_is_named() -> None:
    found = []
    for path in house.tracked():
        try:
            found += house.machine_names(name(path), path.read_text())
        except UnicodeDecodeError:  # a picture
            continue
    clean(found, "say it with a relative path, a variable or tmp_path; name no registry's host")


def test_one_version() -> None:
    written = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert written is not None, "pyproject.toml has no version"
    here = importlib.import_module("nosquare").__version__
    assert here == written[1], (
        f"{here} != {written[1]}\nTry: change both, pyproject.toml and __init__"
    )


# ---- the checkers can fail ----


def test_checkers_have_something_to_check() -> None:
    assert len(OURS) > 5
    assert DOCUMENTS
    assert "." in PACKAGES


@pytest.mark.parametrize(
    ("module", "line", "is_wrong"),
    [
        ("mask", "from .errors import ArgumentError", False),
        ("mask", "from . import api", True),
        ("mask", "from nosquare.problem import Problem", True),
        ("mask", "import nosquare.problem", True),
        ("mask", "from nosquare import errors", False),
        ("mask", "import nosquare", True),
        ("mask", "def f():\n    from .api import attention", True),
        ("mask", "if TYPE_CHECKING:\n    from .api import attention", False),
        ("state", "from .dropout import Dropout", True),
        ("backends/a/plan", "from ...problem import Problem", False),
        ("backends/a/plan", "from .forward import run", False),
        ("backends/a/plan", "from ..b import run", True),
        ("backends/a", "from ..b import run", True),
        ("backends/a", "from ...ops import forward", True),
        ("cli", "from .api import attention", False),
        ("newcomer", "import math", True),
    ],
)
def test_direction(module: str, line: str, is_wrong: bool) -> None:
    known = "errors state dropout mask problem ops api . backends backends/b backends/a/forward"
    files = dict.fromkeys(known.split(), "") | {module: line}
    packages = {"backends/a", "backends/b", "backends", "."}
    assert bool(house.wrong_imports(files, packages)) == is_wrong


def test_compilers() -> None:
    line = "import triton.language as tl"
    assert house.compilers_outside({"ops": line}, set()) == ["ops:1 imports triton.language"]
    assert not house.compilers_outside({"backends/a/forward": line, "ops": "import math"}, set())


def test_loaded() -> None:
    assert house.loaded_by("import colorsys", ["colorsys", "wave"], "pass") == {"colorsys"}
    assert not house.loaded_by("import colorsys", ["colorsys"], "import colorsys")


def test_sizes() -> None:
    body = "".join(f"    x = {n}\n" for n in range(100))
    assert house.long_file("a", "x\n" * 401)
    assert not house.long_file("a", "x\n" * 400)
    assert house.long_functions("a", "def f():\n" + body) == ["a:1 f has 101 lines, not 80"]
    assert house.long_functions("a", "class A:\n  def f():\n" + body)
    assert not house.long_functions("a", "@triton.jit\ndef f():\n" + body)
    assert house.long_functions("a", "@gluon.jit(x=1)\ndef f():\n" + body * 2)
    assert not house.long_functions("a", 'def f():\n    """' + "x\n" * 90 + '"""\n    return 1')


def test_parameters() -> None:
    nine, three = "a, b, c, d, e, f, g, h, i", "*, x=1, y=2, z=3"
    assert house.many_parameters("a", f"def f({nine}): ...", "cost")
    assert house.many_parameters("a", f"def f({nine}): ...", "api")
    assert house.many_parameters("a", f"def f({nine[:-6]}, {three}): ...", "cost")
    assert not house.many_parameters("a", f"def f({nine[:-6]}, {three}): ...", "api")
    assert not house.many_parameters("a", f"def f(self, {nine[:-3]}): ...", "cost")
    assert not house.many_parameters("a", f"@jit\ndef f({nine}): ...", "backends/a/forward")


def test_clones() -> None:
    body = "".join(f"x{n} = {n}\n" for n in range(10))
    same = body.replace(" = ", "   =  ").replace("\n", "  # a word\n\n")
    assert house.clones({"a": body, "b": "y = 1\n" + same}) == ["a:1 and b:2"]
    assert not house.clones({"a": body, "b": body.replace("x5", "y5")})
    assert not house.clones({"a": body + body})


def test_dead_paths(tmp_path: Path) -> None:
    (tmp_path / "src" / "nosquare").mkdir(parents=True)
    (tmp_path / "src" / "nosquare" / "mask.py").touch()
    readme = tmp_path / "README.md"
    good = "`src/nosquare/mask.py`, `mask.py`, src/nosquare/*.py. [here](src/nosquare) <x>/src/no"
    assert not house.dead_paths(good, readme, tmp_path)
    for bad in ("see src/gone.py.", "`gone.py`", "[here](gone.md)", "`backends/gone/`", "src/*.c"):
        assert house.dead_paths(bad, readme, tmp_path), bad


def test_machine_names() -> None:
    for bad in ("/w" + "ork/main", "`/ro" + "ot/x`", "/tm" + "p/v", "https://py" + "pi.org/simple"):
        assert house.machine_names("a", f"words\nof {bad}") == [f"a:2 has {_first(bad)}"]
    assert not house.machine_names("a", "frame" + "work/main, ./work, a/tmp/v, /tmp, pypi")


def _first(text: str) -> str:
    return house._MACHINE.search(text)[0]  # type: ignore[index]


def test_surface() -> None:
    def told() -> None:
        """Words."""

    def mute() -> None: ...

    assert not house.surface(["told"], {"told": told})
    assert house.surface(["gone"], {}) == ["gone is in __all__ and not there"]
    assert house.surface([], {"told": told}) == ["told is public and not in __all__"]
    assert house.surface(["mute"], {"mute": mute}) == ["mute has no docstring"]
    assert house.surface(["A"], {"A": type("A", (), {"__doc__": "A(x)"})})
    assert house.surface(["B"], {"B": type("B", (ValueError,), {})})
    assert not house.surface(["EPS"], {"EPS": 1e-3})

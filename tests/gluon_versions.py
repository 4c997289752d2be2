"""Which releases of Triton compile gluon_sm90's kernels, and what they make of them: `make
gluon-versions`. It fetches each release with pip, without what it depends on, into a folder that is
gone afterwards; the environment stays as it is. A release takes some minutes.

    python tests/gluon_versions.py            the releases the backend says it takes
    python tests/gluon_versions.py 3.6 3.7.1  these
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

from nosquare.backends.gluon_sm90.versions import KNOWN

ROOT = Path(__file__).resolve().parents[1]
FILES = "test_gluon_compile.py", "test_gluon_compile_backward.py"
TESTS = [str(ROOT / "tests" / name) for name in FILES]


class Row(NamedTuple):
    """What became of one kernel: None where it did not compile or was not asked for."""

    passed: bool
    why: str
    spills: str | None
    products: str | None


def fetch(release: str, folder: Path) -> str:
    """Install a release of triton into a folder; the version that came."""
    asked = release if release.count(".") > 1 else f"{release}.*"
    command = ["install", "-qq", "--no-deps", "--only-binary=:all:", f"triton=={asked}"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *command]
    subprocess.run([*pip, "--target", str(folder)], check=True)
    (found,) = folder.glob("triton-*.dist-info")
    return found.name.removeprefix("triton-").removesuffix(".dist-info")


def compiled(triton: Path, folder: Path) -> dict[str, Row]:
    """The tests under the triton of one folder, by name; the other keeps what it compiled."""
    report = folder / "report.xml"
    paths = [triton, ROOT / "src", ROOT / "tests"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    command = ["pytest", "-q", "-p", "no:cacheprovider", *TESTS, f"--junitxml={report}"]
    command += ["-o", "junit_family=xunit1", "-n", "2"]  # the later family has no properties
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if not report.exists():
        raise SystemExit(run.stdout + run.stderr)
    return {case.get("name", ""): _row(case) for case in ET.parse(report).iter("testcase")}


def _row(case: ET.Element) -> Row:
    bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    said = {p.get("name"): p.get("value") for p in case.iter("property")}
    why = "" if bad is None else (bad.get("message") or bad.tag).splitlines()[0]
    return Row(bad is None, why, said.get("spills"), said.get("products"))


def main(releases: list[str]) -> int:
    """Print the table; 1 where anything failed."""
    spilled, failed = [], []
    for release in releases or KNOWN:
        with tempfile.TemporaryDirectory() as folder:
            triton = Path(folder, "triton")
            version = fetch(release, triton)
            rows = compiled(triton, Path(folder))
        kernels = {name: row for name, row in rows.items() if row.products is not None}
        spilled += [
            f"{version:8}{r.spills:>5}  {name}" for name, r in kernels.items() if r.spills != "0"
        ]
        bad = {name: row.why for name, row in rows.items() if not row.passed}
        for why in dict.fromkeys(bad.values()):
            names = [name for name in bad if bad[name] == why]
            failed.append(f"{version:8}{len(names)} as {names[0]}: {why}")
        most = max((int(r.spills or 0) for r in kernels.values()), default=0)
        total = sum(int(r.products or 0) for r in kernels.values())
        verdict = f"{len(bad)} of {len(rows)} tests FAIL" if bad else "all tests pass"
        taken = f"{len(kernels)} kernels compile, {most} bytes spilled at most, {total} HGMMA"
        print(f"triton {version:8}{taken}, {verdict}", flush=True)
    print("\nbytes spilled, where any are:", *spilled, sep="\n")
    print(*(["\nwhat failed:", *failed] if failed else []), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The page of `nosquare report`, and what it says in a terminal."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nosquare.cli import app
from nosquare.report.page import anchor
from nosquare.report.run import report
from report_helpers import (
    CPU,
    SOFTWARE,
    TRAINING,
    bench,
    book,
    contestant,
    duel,
    everything,
    experiment,
    made_page,
    traffic,
    verified,
    write,
)

VOID = {"meta", "link", "br", "input", "img", "hr"}


# ---- the page ----


class Reader(HTMLParser):
    """Reads a page strictly: every tag closed by its own, ids once."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.svgs = self.named = 0
        self.named_lines: set[int] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in given.items()]
        self.ids.update([given["id"]] if "id" in given else [])
        if tag == "a":
            self.links.append(given["href"])
        if tag == "svg":
            self.svgs += 1
            self.named += "aria-labelledby" in given or given.get("aria-hidden") == "true"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag, f"</{tag}> does not close what is open"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)
        if self.open and self.open[-1] == "a" and (run := re.fullmatch(r"made:(\d+)-?(\d*)", data)):
            first, last = int(run[1]), int(run[2] or run[1])
            assert self.links[-1] == f"#r-made-{first}"
            self.named_lines.update(range(first, last + 1))


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made_page(
        tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("page") / "report.html"
    ).read_text("utf-8")


@pytest.fixture(scope="module")
def reader(html: str) -> Reader:
    one = Reader()
    one.feed(html)
    one.close()
    return one


def test_page_is_well_formed(reader: Reader) -> None:
    assert reader.open == []
    assert [name for name, n in reader.ids.items() if n > 1] == []
    assert all(href.startswith("#") and href[1:] in reader.ids for href in reader.links)
    for _, name, value in reader.attributes:
        if name == "aria-labelledby":
            assert all(word in reader.ids for word in value.split())
    assert reader.svgs > 20
    assert reader.named == reader.svgs


def test_page_fetches_nothing(html: str, reader: Reader) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|@font-face|url\((?!data:)", html)
    outside = [(t, n, v) for t, n, v in reader.attributes if n in ("src", "srcset", "data")]
    assert outside == []
    assert {t for t, _, _ in reader.attributes} & {"script", "img", "iframe", "object"} == set()


def test_page_has_every_section_and_source(reader: Reader, tmp_path: Path) -> None:
    names = "claims memory speed traffic rounding conformance receipts environment records".split()
    assert [n for n in reader.ids if n in names] == names
    made = book(tmp_path, *everything())
    for record in made.used:
        assert reader.ids[anchor(record.source)] == 1
        assert record.source.line in reader.named_lines
    text = " ".join(reader.text)
    for word in ("Made Up 9000 (avx2), 2 threads", "NVIDIA H200", "roof (datasheet)", "modelled",
                 "one stored square, calculated", "empty-rows", "torch:flash",
                 "95% interval", "established", "not established", "2026-12-01"):  # fmt: skip
        assert word in text, word


def test_figures_name_their_records(html: str) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", html, re.S)
    assert len(captions) > 4
    plain = [re.sub(r"<[^>]*>", "", caption) for caption in captions]
    assert all(re.search(r"From made:\d[\w:, -]* \(2026-12-01; ", c) for c in plain), plain


def test_page_is_the_same_for_the_same_records(html: str, tmp_path: Path) -> None:
    assert made_page(tmp_path, tmp_path / "again.html").read_text("utf-8") == html


def test_page_says_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, [bench(TRAINING, [contestant("nosquare", outputs=())])])
    assert report(tmp_path / "r.html", tmp_path) == 0
    text = (tmp_path / "r.html").read_text()
    for words in ("No record holds a measured peak", "No record of kind bench",
                  "No record holds measured traffic", "No record of kind experiment",
                  "No record of kind verify"):  # fmt: skip
        assert words in text


def test_words_of_a_record_are_text(tmp_path: Path) -> None:
    """What a record says is escaped: it can be no markup of the page."""
    bad = "<img src=x>'\"&"
    receipt = {"op": bad, "caller": bad, "backend": bad, "plan": bad, "kernels": [bad],
               "workspace_bytes": 1, "copies": [bad], "refusals": {bad: [bad]}}  # fmt: skip
    machine = CPU | {"cpu": bad, "features": [bad]}
    software = SOFTWARE | {"torch": bad, "commit": bad}
    entries = [
        contestant("nosquare", [1.0] * 8, peak_bytes=1, receipts=[receipt]),
        contestant(f"other {bad}", [1.0] * 8, ran=bad, peak_bytes=1),
        contestant(f"third {bad}", refused=bad, traffic=traffic(1, 1) | {"how": bad}),
    ]
    around = {"machine": machine, "software": software}
    bad_verify = verified(bad, {bad: "fail"}) | around
    cell = experiment(64, 64, 1.0) | around | {"question": bad}
    write(tmp_path, [bench(TRAINING, entries, suite="x<img", **around), bad_verify, cell])
    report(tmp_path / "r.html", tmp_path)
    text = (tmp_path / "r.html").read_text()
    assert "<img" not in text
    assert text.count("&lt;img") > 20
    page = Reader()
    page.feed(text)
    assert page.open == []


# ---- the command ----


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *words], env={"COLUMNS": "80", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_summary_in_the_terminal(tmp_path: Path) -> None:
    write(tmp_path, everything())
    out = tmp_path / "sub" / "r.html"
    code, text = run("--out", str(out), "--records", str(tmp_path))
    assert code == 0
    assert out.exists()
    assert max(map(len, text.splitlines()[:-1])) <= 80
    for words in ("16 records: made.jsonl:1-16", "On NVIDIA H200, torch 2.13.0",
                  "not established nosquare makes 2 times the context fit", "1 failed check",
                  "prefill: forward, bfloat16"):  # fmt: skip
        assert words in text, words


def test_claims_of_ones_own(tmp_path: Path) -> None:
    write(tmp_path, [duel()])
    path = tmp_path / "claims.txt"
    path.write_text("smaller: training by 20 than torch\n")
    out = str(tmp_path / "r.html")
    code, text = run("--out", out, "--records", str(tmp_path), "--claims", str(path), "--claim",
                     "faster: training by 1.5 than torch")  # fmt: skip
    assert code == 0
    folded = " ".join(text.split())
    assert "established nosquare is at least 1.5 times as fast as torch" in folded
    assert "narrower nosquare takes at most 1/20 of the memory of torch" in folded
    assert "Instead: smaller by 16.0x" in folded
    assert "Records: made.jsonl:1" in folded
    assert "at least 1.5 times as fast" in Path(out).read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--records", "nowhere"], "There are no records here."),
        (["--name", "gone"], "There are no records of this name."),
        (["--claim", "faster"], "This line is not a claim."),
        (["--claims", "nowhere.txt"], "This file of claims cannot be read."),
        (["--out", "/dev/null/r.html"], "The report cannot be written there."),
    ],
)
def test_bad_input_is_told_in_words(tmp_path: Path, words: list[str], sentence: str) -> None:
    write(tmp_path, [duel()])
    given = [] if "--records" in words else ["--records", str(tmp_path)]
    out = [] if "--out" in words else ["--out", str(tmp_path / "r.html")]
    code, text = run(*words, *given, *out)
    assert code == 2
    assert text.startswith(sentence)
    assert "\n  Try: " in text


def test_a_file_without_claims(tmp_path: Path) -> None:
    write(tmp_path, [duel()])
    (tmp_path / "empty.txt").write_text("# nothing\n")
    code, text = run("--records", str(tmp_path), "--claims", str(tmp_path / "empty.txt"))
    assert (code, text.splitlines()[0]) == (2, "This file holds no claim.")

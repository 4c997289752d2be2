"""What backends are held to on a card: all tables, and their lines by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import hopper, line, portable
from .report import print_table
from .timing import Result

if TYPE_CHECKING:
    from rich.console import Console

BOARDS = (portable.BOARD, hopper.BOARD)
BY_NAME = {one.name: one for board in BOARDS for one in board.lines}
GROUPS = {board.group: [one.name for one in board.lines] for board in BOARDS}
_BEHIND = re.compile(r"\*\*(.+?)\*\*")


def summary(console: Console, board: line.Board, results: Sequence[Result]) -> None:
    """Print a backend's tables, as README has them."""
    outcomes = [line.outcome(BY_NAME[r.suite], r) for r in results]
    tables = board.tables(outcomes)
    for n, (heads, rows) in enumerate(tables, 1):
        styled = [[_BEHIND.sub(r"[yellow]\1[/yellow]", cell) for cell in cells] for cells in rows]
        print_table(console, heads, styled, board.said if n == len(tables) else "")

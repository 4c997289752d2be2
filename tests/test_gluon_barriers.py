"""gluon_sm90: a model of who waits for whom. Each warp group and the warp that loads are a
generator that stops wherever another may run; they are run in any order, and nobody may wait for
ever, find another tile than its own in a slot, or see a slot change while it is read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest

TURN, EMPTY_K, EMPTY_V, EMPTY_Q, HANDED = 6, 9, 12, 15, 11  # as in pipe.py and packed.py
Steps = Generator[None, None, Any]
# a tile of rows: tiles of keys [first, last), and what each group sees of them
Rows = tuple[int, int, list[tuple[int, int]]]


class Block:
    """What the warps of a block share: named barriers, counts of full slots, what is in slots."""

    def __init__(self, groups: int) -> None:
        self.groups, self.all = groups, 128 * groups + 32
        self.here: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.full: Counter[Any] = Counter()
        self.slots: dict[Any, Any] = {}
        self.need: dict[int, int] = {}

    def arrive(self, number: int, total: int = 0, threads: int = 128) -> None:
        """bar.arrive."""
        total = total or self.all
        assert self.need.setdefault(number, total) == total
        self.here[number] += threads
        assert self.here[number] <= total, f"barrier {number} has too many"
        if self.here[number] == total:
            self.here[number] = 0
            self.done[number] += 1

    def sync(self, number: int, total: int = 0, threads: int = 128) -> Steps:
        """bar.sync."""
        before = self.done[number]
        self.arrive(number, total, threads)
        while self.done[number] == before:
            yield

    def fill(self, slot: Any, content: Any) -> Steps:
        """TMA, or a store: it takes its time."""
        self.slots[slot] = None
        yield
        self.slots[slot] = content
        self.full[slot] += 1

    def read(self, slot: Any, times: int, content: Any) -> Steps:
        """Wait until a slot has been filled once more than `times`, and look into it."""
        while self.full[slot] <= times:
            yield
        for _ in range(2):
            assert self.slots[slot] == content
            yield


class Plan:
    """Stages of k and v and of q, whether o takes q's place, whether work is handed over."""

    def __init__(self, stages: int, q_stages: int, alias: bool, packed: bool) -> None:
        self.stages, self.q_stages, self.alias, self.packed = stages, q_stages, alias, packed


def loads(block: Block, plan: Plan, work: list[Rows]) -> Steps:
    """loading.py."""
    number = 0

    def slot(kind: str, empty: int, n: int, content: Any) -> Steps:
        at = n % plan.stages
        yield from block.sync(empty + at, threads=32)
        yield from block.fill((kind, at), content)

    for done, rows in enumerate([*work, None] if plan.packed else work):
        if plan.packed:
            yield from block.sync(HANDED + 3 * (done % 2), threads=32)
            yield from block.fill(("work", done % 2), rows)
        if rows is None:
            return
        first, last, _ = rows
        q = done % plan.q_stages
        yield from block.sync(EMPTY_Q - 10 * q, threads=32)
        for c in range(block.groups):
            yield from block.fill(("q", q, c), done)
        yield from slot("k", EMPTY_K, number, (done, last - 1))
        for t in range(last - 2, first - 1, -1):
            yield from slot("k", EMPTY_K, number + 1, (done, t))
            yield from slot("v", EMPTY_V, number, (done, t + 1))
            number += 1
        yield from slot("v", EMPTY_V, number, (done, first))
        number += 1


def computes(block: Block, plan: Plan, work: list[Rows], c: int) -> Steps:
    """attend_kernel.py, of group c."""
    after, number = (c + 1) % block.groups, 0
    for q in range(plan.q_stages):
        block.arrive(EMPTY_Q - 10 * q)
    for slot in range(plan.stages):
        block.arrive(EMPTY_K + slot)
        block.arrive(EMPTY_V + slot)
    if c == block.groups - 1:
        block.arrive(TURN, 256)
    if plan.packed:
        block.arrive(HANDED)
        block.arrive(HANDED + 3)

    def read(kind: str, n: int, content: Any) -> Steps:
        yield from block.read((kind, n % plan.stages), n // plan.stages, content)

    def taken(n: int) -> Steps:
        rows = work[n] if n < len(work) else None
        if plan.packed:
            yield from block.read(("work", n % 2), n // 2, rows)
            block.arrive(HANDED + 3 * (n % 2))
        return rows

    def by(t: int, n: int) -> Steps:
        yield from read("k", n, (done, t))
        yield from block.sync(TURN + c, 256)
        block.arrive(TURN + after, 256)
        block.arrive(EMPTY_K + n % plan.stages)
        yield from read("v", n, (done, t))
        block.arrive(EMPTY_V + n % plan.stages)

    done = 0
    rows = yield from taken(0)
    while rows is not None:
        first, last, seen = rows
        mine, top = seen[c]
        for t in range(last - 1, top - 1, -1):
            yield from by(t, number)
            number += 1
        q = done % plan.q_stages
        yield from block.read(("q", q, c), done // plan.q_stages, done)
        for t in range(top - 1, mine - 1, -1):
            ahead = number + (t < top - 1)
            yield from read("k", ahead, (done, t))
            yield from block.sync(TURN + c, 256)
            if t < top - 1:
                yield from read("v", number, (done, t + 1))
            block.arrive(TURN + after, 256)
            yield from read("k", ahead, (done, t))
            block.arrive(EMPTY_K + ahead % plan.stages)
            if t < top - 1:
                yield from read("v", number, (done, t + 1))
                block.arrive(EMPTY_V + number % plan.stages)
                number += 1
        if not plan.alias:
            block.arrive(EMPTY_Q - 10 * q)
        yield from read("v", number, (done, mine))
        block.arrive(EMPTY_V + number % plan.stages)
        number += 1
        for t in range(mine - 1, first - 1, -1):
            yield from by(t, number)
            number += 1
        if plan.packed:
            rows = yield from taken(done + 1)
        if plan.alias:
            yield
            block.arrive(EMPTY_Q - 10 * q)
        if not plan.packed:
            rows = yield from taken(done + 1)
        done += 1
    assert done == len(work)


def some_work(dice: random.Random, groups: int, least: int) -> list[Rows]:
    """Tiles of rows of any kind: groups see any part of what is loaded."""
    found: list[Rows] = []
    for _ in range(dice.randint(least, 5)):
        first = dice.randint(0, 2)
        last = first + dice.randint(1, 5)
        lows = [dice.randint(first, last - 1) for _ in range(groups)]
        found.append((first, last, [(low, dice.randint(low + 1, last)) for low in lows]))
    return found


def run(block: Block, warps: list[Steps], choose: Callable[[list[Steps]], Steps]) -> None:
    """Let warps go on, one after the other, until all have ended."""
    idle = 0
    state: Any = None
    while warps:
        warp = choose(warps)
        try:
            next(warp)
        except StopIteration:
            warps.remove(warp)
        now = len(warps), dict(block.here), dict(block.done), dict(block.full)
        idle = idle + 1 if now == state else 0
        state = now
        assert idle < 500, f"they wait for each other: {now}"


PLANS: dict[str, tuple[int, Plan]] = {
    "D 64": (3, Plan(3, 2, False, False)),
    "D 128": (2, Plan(2, 2, False, False)),
    "D 256": (2, Plan(2, 1, True, False)),
    "D 64, packed": (3, Plan(2, 2, False, True)),
    "D 128, packed": (2, Plan(2, 2, False, True)),
    "D 256, packed": (2, Plan(2, 1, True, True)),
}


def try_orders(name: str, least: int, early: int | None = None) -> None:
    """Forty times some work in some order. early: a barrier at which a group arrives too soon."""
    groups, plan = PLANS[name]
    dice = random.Random(7)
    for _ in range(40):
        work = some_work(dice, groups, least)
        block = Block(groups)
        if early is not None:
            block.arrive(early)
        warps = [loads(block, plan, work)]
        warps += [computes(block, plan, work, c) for c in range(groups)]
        run(block, warps, dice.choice)


@pytest.mark.parametrize("name", PLANS)
def test_nobody_waits_for_ever(name: str) -> None:
    try_orders(name, 0 if "packed" in name else 1)


def test_a_slot_that_is_filled_too_early_is_seen() -> None:
    with pytest.raises(AssertionError):
        try_orders("D 128", 3, EMPTY_V)

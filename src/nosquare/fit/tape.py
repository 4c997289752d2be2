"""Which arrays are alive at once while a program runs, and at which moment they are most.

A program is a sequence of new(), free() and renamed(), written down from the code it stands for.
Lifetimes are Python's: an array lives as long as a variable, an argument on the stack or the
autograd graph refers to it. What a kernel takes inside one operator is not seen.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

# what an array is there for
CACHE, ACTIVATIONS, ATTENTION, LOGITS, SAVED, GRADIENTS = (
    "cache", "activations", "attention", "logits", "saved", "gradients",
)  # fmt: skip


def cache_role(kind: str) -> str:
    """The role of the cache of one kind of layer."""
    return f"{CACHE}, {kind}"


class Array(NamedTuple):
    """An array that is alive."""

    bytes: int
    role: str


class Tape:
    """The live arrays, their sum, and the moment at which the sum was largest.

    training  arrays that keep() names stay alive, as saved, when they are freed
    peaks     the most bytes of each role, each at its own moment
    """

    def __init__(self, training: bool = False) -> None:
        self.training = training
        self.live: dict[str, Array] = {}
        self.bytes = self.peak_bytes = 0
        self.peaks: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._events: list[tuple[str, Array | None]] = []  # None: the name is let go
        self._peak_event = 0
        self._kept: dict[str, str] = {}  # name -> the name it will have once it is saved
        self._saved: list[str] = []
        self._marks: list[int] = []

    def new(self, name: str, n_bytes: int, role: str = ACTIVATIONS) -> None:
        """An array comes to life."""
        assert name not in self.live, f"{name} is alive already"
        self._name(name, Array(n_bytes, role))
        self.bytes += n_bytes
        self._now[role] += n_bytes
        self.peaks[role] = max(self.peaks[role], self._now[role])
        if self.bytes > self.peak_bytes:
            self.peak_bytes, self._peak_event = self.bytes, len(self._events)

    def free(self, *names: str) -> None:
        """Nothing refers to these any more; in training, what was kept becomes saved."""
        for name in names:
            array = self._unname(name)
            self.bytes -= array.bytes
            self._now[array.role] -= array.bytes
            if name in self._kept:
                self.new(self._kept.pop(name), array.bytes, SAVED)

    def renamed(self, old: str, new: str) -> None:
        """Another variable refers to the same array."""
        assert new not in self.live, f"{new} is alive already"
        self._name(new, self._unname(old))
        if old in self._kept:
            self._kept[new] = self._kept.pop(old)

    def passing(self, name: str, n_bytes: int, role: str = ACTIVATIONS) -> None:
        """An array that lives for one moment only."""
        self.new(name, n_bytes, role)
        self.free(name)

    def keep(self, *names: str) -> None:
        """Backward needs these: autograd refers to them until it has run."""
        for name in names:
            if self.training and name not in self._kept:
                self._kept[name] = self._saved_name(name)

    def save(self, name: str, n_bytes: int) -> None:
        """An array that only autograd refers to: it is made, and stays until backward."""
        if self.training:
            self.new(self._saved_name(name), n_bytes, SAVED)

    def mark(self) -> None:
        """A stretch of the forward begins, which backward will leave as one."""
        self._marks.append(len(self._saved))

    def unwind(self) -> None:
        """Backward leaves the last stretch: what was saved in it goes."""
        first = self._marks.pop()
        self.free(*(name for name in self._saved[first:] if name in self.live))
        del self._saved[first:]

    def at_peak(self) -> dict[str, Array]:
        """What was alive when the sum was largest, for the first time."""
        alive: dict[str, Array] = {}
        for name, array in self._events[: self._peak_event]:
            if array is None:
                del alive[name]
            else:
                alive[name] = array
        return alive

    def _saved_name(self, name: str) -> str:
        self._saved.append(f"{name} (saved {len(self._saved)})")
        return self._saved[-1]

    def _name(self, name: str, array: Array) -> None:
        self.live[name] = array
        self._events.append((name, array))

    def _unname(self, name: str) -> Array:
        self._events.append((name, None))
        return self.live.pop(name)

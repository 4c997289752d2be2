"""Run the checks: here, or in a process of their own that may die without harm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .isolated import findings
from .registry import Check, chosen
from .subject import Inapplicable, Refusal, Subject
from .target import device_of, dtypes_of, subject_of
from .trial import Trial
from .verdict import FAIL, NOT_APPLICABLE, PASS, REFUSED, Finding, Verdict, Verdicts

# (checks done, checks in all, the next one in words)
Tick = Callable[[int, int, str], None]


def verify(
    function: str | Callable[..., Any],
    style: str | None = None,
    device: str = "cpu",
    dtypes: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    isolate: bool | None = None,
    tick: Tick | None = None,
) -> Verdicts:
    """Put a function through the contract: what it keeps, what it does not, what it does its way.

    function  with the signature of torch's scaled_dot_product_attention or of flash_attn_func; or
              its name, as `nosquare verify` takes it: "torch:flash", "package.module:function"
    style     "sdpa" or "flash_attn"; None: as its parameters say
    device    "cpu", "cuda", "cuda:1"
    dtypes    of "float64", "float32", "bfloat16", "float16"; None: float32 and bfloat16
    only      groups of checks, or single ones; None: all but group "compile"
    isolate   True: in another process, which may crash or hang; the function must then be given by
              name. None: names are isolated, functions are not
    tick      called before each check with (done, all, words)
    returns   Verdicts; print it, or ask .ok

    In a test-suite:

        @pytest.mark.parametrize("group", nosquare.verify.GROUPS)
        def test_contract(group):
            verdicts = nosquare.verify.verify(my_attention, style="sdpa", only=[group])
            assert verdicts.ok, verdicts

    torch's generators are left as they were. Raises ArgumentError for a function, a style, a
    device, a dtype or a group that is not one, UnsupportedError for a name that needs what is not
    here.
    """
    subject = subject_of(function, style)
    where, kinds, list_ = device_of(device), dtypes_of(dtypes), chosen(only)
    apart = isinstance(function, str) if isolate is None else isolate
    words = tuple(str(kind).removeprefix("torch.") for kind in kinds)
    jobs = [(check, word) for check in list_ for word in words]
    result = Verdicts(subject.name, subject.style, str(where), words)

    def step(number: int) -> None:
        if tick is not None:
            tick(number, len(jobs), f"{jobs[number][0].name} {jobs[number][1]}")

    if apart:
        asked = [(check.name, word) for check, word in jobs]
        found = findings(function, subject.style, str(where), asked, step)
    else:
        found = _here(subject, where, jobs, step)
    for (check, word), finding in zip(jobs, found, strict=True):
        result.rows.append(Verdict(check.name, check.group, word, finding))
    return result


def _here(
    subject: Subject, device: torch.device, jobs: Sequence[tuple[Check, str]],
    step: Callable[[int], None],
) -> list[Finding]:  # fmt: skip
    found: list[Finding] = []
    ask = Asker(subject, device)
    lost = ""
    for number, (check, word) in enumerate(jobs):
        step(number)
        if lost:
            found.append(Finding(NOT_APPLICABLE, f"not run: {lost} broke the device"))
            continue
        found.append(ask(check, word))
        lost = "" if is_alive(device) else check.name
    return found


class Asker:
    """Asks one subject, check by check; and before the first of a dtype, the plainest call there
    is: a function that does not answer that one is not asked more, whatever the reason."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject, self.device = subject, device
        self.plain: dict[str, Finding] = {}

    def __call__(self, check: Check, dtype: str) -> Finding:
        """The finding of a check in the dtype of that word."""
        trial = Trial(self.subject, dtypes_of([dtype])[0], self.device)
        if dtype not in self.plain:
            self.plain[dtype] = finding_of(_PLAINEST, trial)
        found = self.plain[dtype]
        return finding_of(check, trial) if found.verdict == PASS else found


def _plainest(trial: Trial) -> Finding:
    o = trial.attend(trial.qkv(64, 64, 64))
    return Finding(PASS, str(tuple(o.shape)))


_PLAINEST = Check(
    "plainest", "shapes", "Equal sizes of 64, no option, are answered.", "", _plainest
)


def finding_of(check: Check, trial: Trial) -> Finding:
    """One check, whatever happens in it. torch's generators are left as they were."""
    cards = [trial.device] if trial.device.type == "cuda" else []
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=cards):
            warnings.simplefilter("ignore")
            found = check.run(trial)
            if cards:  # what a kernel has done wrong is told here
                torch.cuda.synchronize(trial.device)
            return found
    except Refusal as refusal:
        return Finding(REFUSED, str(refusal))
    except Inapplicable as why:
        return Finding(NOT_APPLICABLE, str(why))
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        return Finding(FAIL, f"crash: {type(error).__name__}: {first}")


def is_alive(device: torch.device) -> bool:
    """Whether the device still answers: after some errors a CUDA context never does."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True

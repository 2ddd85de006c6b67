"""Judges what a driver makes of the golden vectors."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from weightbus.codecs.dtypes import numpy_dtype
from weightbus.tests.conformance.driver import Fault, vectors
from weightbus.tests.conformance.languages import OF_CLIENTS
from weightbus.tests.conformance.sequences import fault_of_sequence
from weightbus.tests.vectors.parts import filled

FOLDER = Path(__file__).parent.parent / "vectors"
SAME_CODES = ({"malformed", "protocol-version"},)  # which a worker need not tell apart

Case = dict[str, Any]
Judge = Callable[[Case, Case], str]  # the case and what a driver made of it: what is wrong


@dataclass
class Count:
    """What came of one table."""

    right: int = 0
    faults: list[str] = field(default_factory=list[str])
    unsupported: list[str] = field(default_factory=list[str])  # reasons


def tables() -> dict[str, dict[str, Case]]:
    """Return the cases that a driver must answer, by file and by name."""
    found: dict[str, dict[str, Case]] = {}
    for path in sorted(each for each in FOLDER.glob("*.json") if each.name not in OF_CLIENTS):
        lists = {k: v for k, v in json.loads(path.read_text()).items() if k != "format"}
        named = {
            name if len(lists) == 1 else f"{key}/{name}": case
            for key, cases in lists.items()
            for index, case in enumerate(cast("list[Case]", cases))
            for name in [str(case.get("name", index))]
            if _concerns_a_worker(case)
        }
        found[path.name] = named
    return found


def _concerns_a_worker(case: Case) -> bool:
    return case.get("direction") != "from_worker" or "ok" in case["expect"]


def judge(
    command: Sequence[str], unsupported: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Count]:
    """Run a driver on all vectors; return what came of each table.

    Args:
        command: The driver.
        unsupported: By table, why the driver prints nothing for it.
    """
    try:
        return judged(vectors(command, FOLDER), unsupported)
    except Fault as fault:
        return {name: Count(faults=[str(fault)]) for name in tables()}


def judged(lines: list[Case], unsupported: Mapping[str, str]) -> dict[str, Count]:
    """Return what came of each table by what a driver has said of all of them."""
    return {
        name: _judge_table(name, cases, lines, unsupported.get(name, ""))
        for name, cases in tables().items()
    }


def _judge_table(file: str, cases: dict[str, Case], lines: list[Case], unsupported: str) -> Count:
    count = Count()
    mine = [line for line in lines if line.get("file") == file]
    if unsupported:
        count.unsupported = [unsupported] * len(cases)
        answered = any("unsupported" not in line for line in mine)
        count.faults = ["it is declared as unsupported, and answered"] if answered else []
        return count
    answers: dict[str, Case] = {}
    for line in mine:
        name = str(line.get("case"))
        if name in answers:
            count.faults.append(f"{name}: two answers")
        if name not in cases:
            count.faults.append(f"{name}: there is no such case")
        answers[name] = line
    for name, case in cases.items():
        answer = answers.get(name)
        if answer is None:
            count.faults.append(f"{name}: no answer")
        elif "unsupported" in answer:
            count.faults.append(f"{name}: {answer['unsupported']}, which is not declared")
        elif fault := _fault(file, name, case, answer):
            count.faults.append(f"{name}: {fault}")
        else:
            count.right += 1
    return count


def _fault(file: str, name: str, case: Case, answer: Case) -> str:
    try:
        return _judge_of(file, name, case)(case, answer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"an answer that makes no sense ({error!r}): {json.dumps(answer)[:300]}"


def _judge_of(file: str, name: str, case: Case) -> Judge:
    match file:
        case "messages.json" | "applying.json" | "patching.json" | "checking.json" if (
            case.get("direction") == "from_worker"
        ):
            return _header
        case _ if case.get("direction") == "from_publisher":
            return fault_of_message
        case _ if "steps" in case:
            return fault_of_sequence
        case "checksums.json":
            return _equal("crc" if name.startswith("crc32c/") else "digest")
        case "casts.json":
            return cast_fault
        case "phases.json":
            return _equal("next")
        case "sealing.json" if "messages" in case:
            return _counts
        case "versions.json":
            return _equal("digest")
        case "layouts.json":
            return _layout
        case _:
            return _result


def _equal(key: str) -> Judge:
    def judge(case: Case, answer: Case) -> str:
        return "" if same(case[key], answer[key]) else f"{answer[key]}, not {case[key]}"

    return judge


def _result(case: Case, answer: Case) -> str:
    expect: Case = case["expect"]
    if "error" in answer:
        right = "error" in expect and _same_code(answer["error"], expect["error"])
    else:
        wanted = {k: v for k, v in expect.items() if k != "error"}
        right = "ok" in expect and same(wanted, {k: answer.get(k) for k in wanted})
    got = {k: v for k, v in answer.items() if k not in ("file", "case")}
    return "" if right else f"{_short(got)}, not {_short(expect)}"


def fault_of_message(case: Case, answer: Case) -> str:
    """Return what is wrong with how a message was read. A field left out has its default."""
    return _result({**case, "expect": _with_defaults(case["expect"])}, _with_defaults(answer))


def _with_defaults(result: Case) -> Case:
    return (
        {**result, "ok": filled(result["ok"]["type"], result["ok"])} if "ok" in result else result
    )


def _counts(case: Case, answer: Case) -> str:
    """Judge what counts of some messages: type and fields, null where one counts for nothing."""
    wanted = [said["counts"] and _told(said["counts"]) for said in case["messages"]]
    got: list[Case | None] = answer["counts"]
    told = [
        one and other and {k: filled(one["type"], one).get(k) for k in other}
        for one, other in zip(got, wanted, strict=True)
    ]
    return "" if same(told, wanted) else f"{_short(got)}, not {_short(wanted)}"


def _told(header: Case) -> Case:
    return {k: v for k, v in header.items() if k != "wbp"}


def cast_fault(case: Case, answer: Case) -> str:
    """Say what is wrong with values after a cast; any NaN is as good as another."""
    kind = numpy_dtype(case["to"])
    values = [np.frombuffer(bytes.fromhex(h), kind) for h in (answer["out"], case["out"])]
    bits = [value.view(f"u{kind.itemsize}") for value in values]
    wrong = (bits[0] != bits[1]) & ~(np.isnan(values[0]) & np.isnan(values[1]))
    if len(wrong) and wrong.any():
        at = int(wrong.argmax())
        return f"value {at} became {bits[0][at]:x}, not {bits[1][at]:x}"
    return ""


def _short(value: object) -> str:
    return json.dumps(value)[:200]


def _same_code(one: str, other: str) -> bool:
    return one == other or any({one, other} <= codes for codes in SAME_CODES)


def _layout(case: Case, answer: Case) -> str:
    """Order has no meaning among tensors that lie in the same place."""

    def ordered(result: Case) -> Case:
        if "ok" not in result:
            return result
        tensors = sorted(result["ok"]["tensors"], key=lambda t: (t["begin"], t["end"], t["name"]))
        return {**result, "ok": {**result["ok"], "tensors": tensors}}

    return _result({**case, "expect": ordered(case["expect"])}, ordered(answer))


def _header(case: Case, answer: Case) -> str:
    """What the client would send means what it should."""
    sent: Case = json.loads(answer["header"])
    wanted: Case = case["expect"]["ok"]
    if not same(sent.pop("wbp", None), 1):
        return f"without the number of the protocol: {answer['header'][:200]}"
    means, meant = (filled(wanted["type"], each) for each in (sent, wanted))
    return "" if same(means, meant) else f"sends {_short(sent)}, not {_short(wanted)}"


def same(one: object, other: object) -> bool:
    """Return whether two values of JSON are equal; true is not 1, and 1.0 is not 1."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        a, b = cast("Case", one), cast("Case", other)
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(one, list) and isinstance(other, list):
        some, others = cast("list[object]", one), cast("list[object]", other)
        return len(some) == len(others) and all(map(same, some, others))
    return type(one) is type(other) and one == other


def faults(counts: Mapping[str, Count]) -> Iterator[str]:
    """Yield everything that is wrong, in words."""
    for file, count in counts.items():
        yield from (f"{file}: {fault}" for fault in count.faults)

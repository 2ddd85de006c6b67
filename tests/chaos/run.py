"""Break a real bus, again and again: `python tests/chaos/run.py --rounds 20`.

Publishers and workers of all languages, as processes of their own, behind a proxy; every second
round has keys. A round that fails is told in order, with the command that plays it again.
Languages whose driver is not there are built first. `--publisher rust` has the core's publisher;
`--relay` has one or two relays between it and the workers; `--sources` has Python's, of 2 to 4
ranks, each of which publishes its part.
"""

import argparse
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from weightbus.tests.chaos.cast import clock
from weightbus.tests.chaos.faults import FAULTS
from weightbus.tests.chaos.round import Outcome, play
from weightbus.tests.chaos.schedule import PUBLISHERS, plan
from weightbus.tests.conformance.languages import LANGUAGES, Language, chosen
from weightbus.tests.conformance.run import build

AT_ONCE = 3  # rounds: they wait more than they compute
APART = "WEIGHTBUS_CHAOS_APART"  # set once we have a table of mounts of our own


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, help="play the round of this seed, and no other")
    parser.add_argument("--first", type=int, default=1, help="the seed of the first round")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no round after so many"
    )
    parser.add_argument("--jobs", type=int, default=AT_ONCE, help="rounds at a time")
    parser.add_argument("--languages", help="keys of tests/conformance/languages.py; else all")
    parser.add_argument("--publisher", choices=PUBLISHERS, default="python")
    parser.add_argument("--faults", help=f"only these, of {', '.join(FAULTS)}")
    parser.add_argument("--no-build", action="store_true", help="take the drivers that are there")
    parser.add_argument("--relay", action="store_true", help="with one or two relays on the way")
    parser.add_argument("--sources", action="store_true", help="2 to 4 ranks publish together")
    parser.add_argument("--story", action="store_true", help="tell what happened in any case")
    return parser.parse_args(words)


def ready(languages: Sequence[Language]) -> list[Language]:
    """Return the languages that can play; where CI is set, all of them must."""
    able, others = build(languages, must=bool(os.environ.get("CI")))
    for title, cell in others.items():
        print(f"!!! without {title}: {cell.reason or cell.faults[0]}", file=sys.stderr)
    if any(cell.verdict == "wrong" for cell in others.values()):
        raise SystemExit(1)
    return able


def one(
    seed: int,
    languages: Sequence[str],
    faults: Sequence[str],
    publisher: str,
    clock: Path,
    *,
    relayed: bool = False,
    ranked: bool = False,
) -> Outcome:
    """Play the round of a seed. (In a process of its own.)"""
    ours = [row.key for row in LANGUAGES if row.key in languages]
    made = plan(seed, ours, faults, publisher, relayed=relayed, ranked=ranked)
    outcome = play(made, {row.key: row.command for row in LANGUAGES}, clock)
    outcome.story[:0] = made.lines
    outcome.counts["with keys" if made.keyed else "without keys"] += 1
    return outcome


def outcomes(options: argparse.Namespace, able: Sequence[str], clock: Path) -> Iterator[Outcome]:
    """Play rounds, some at a time."""
    faults = options.faults.split(",") if options.faults else [*FAULTS]
    given = able, faults, options.publisher, clock
    ways = {"relayed": options.relay, "ranked": options.sources}
    if options.seed is not None:
        yield one(options.seed, *given, **ways)
        return
    seeds, over = iter(range(options.first, options.first + options.rounds)), time.monotonic()
    over += options.seconds
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        playing = set[Future[Outcome]]()
        while True:
            while len(playing) < options.jobs and time.monotonic() < over:
                seed = next(seeds, None)
                if seed is None:
                    break
                playing.add(pool.submit(one, seed, *given, **ways))
            if not playing:
                return
            done, playing = wait(playing, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)


def tell(outcome: Outcome, options: argparse.Namespace) -> None:
    """Print what became of a round."""
    languages = ", ".join(outcome.languages)
    verdict = "FAILED" if outcome.fault else f"well again after {outcome.seconds:.1f} s"
    keyed = "with keys" if outcome.counts["with keys"] else "without keys"
    print(f"round {outcome.seed}, {keyed}, {languages}: {verdict}", flush=True)
    if outcome.fault or options.story:
        print("\n".join(outcome.story))
    if outcome.fault:
        print(f"FAILED: {outcome.fault}")
        again = f"--seed {outcome.seed} --publisher {options.publisher}"
        again += " --relay" * options.relay + " --sources" * options.sources
        print(f"again: .venv/bin/python tests/chaos/run.py {again}", flush=True)


def apart(words: Sequence[str]) -> None:
    """Have a table of mounts of our own, where we may: small disks go with us, however we end."""
    alone = ["unshare", "--mount"]
    if os.geteuid() or APART in os.environ or shutil.which(alone[0]) is None:
        return
    if subprocess.run([*alone, "true"], check=False).returncode == 0:  # noqa: S603
        again = [*alone, sys.executable, __file__, *words]
        os.execvpe(again[0], again, {**os.environ, APART: "1"})  # noqa: S606 - ourselves


def main(words: Sequence[str]) -> int:
    """Play rounds; return the exit status."""
    options = parse(words)
    apart(words)
    languages = chosen(options.languages)
    able = [each.key for each in (languages if options.no_build else ready(languages))]
    if not (options.no_build or options.publisher in able or ready(chosen(options.publisher))):
        return 1  # nobody publishes
    counts, failed, slowest, played = Counter[str](), list[int](), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for outcome in outcomes(options, able, clock(Path(folder))):
            tell(outcome, options)
            counts += outcome.counts
            played += 1
            failed += [outcome.seed] if outcome.fault else []
            slowest = max(slowest, outcome.seconds)
    print(", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())))
    print(f"the slowest round was well again after {slowest:.1f} s; {len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

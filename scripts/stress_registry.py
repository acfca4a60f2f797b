"""Owns the proof that a registry survives faults at random points of promotions and rollbacks, and processes that race.

    python scripts/stress_registry.py faults [--count 200] [--seed 0]
    python scripts/stress_registry.py race [--processes 8] [--rounds 3]

Every fault is real and hits a process of its own: SIGKILL at a random system event or after a random time, a rename
that the system refuses, a file that may not grow (RLIMIT_FSIZE, as on a full disk), a database that another connection
holds. After each, before anything is repaired, the champion link has to open and lead to a version that a gate passed;
then `reconcile` has to bring record, link and history to one champion, with every earlier version whole; then the same
operation, undisturbed, has to succeed. Exits non-zero where anything does not hold.
"""

import argparse
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Self

from specdist.errors import ArtifactError, StaleBaseline
from specdist.export_record import ExportRecord, write_record
from specdist.registry.hub import HubCache
from specdist.registry.store import Registry
from specdist.schema import TargetIdentity

MODEL = "stress-draft"
KINDS = ("kill at an event", "kill at a time", "failed rename", "full disk", "locked database")
_WATCHED = ("open", "os.", "shutil.", "sqlite3.")  # audit events at which a process may be killed
_LOCKED_SECONDS = (0.2, 0.5, 1.0, 2.0, 25.0)  # MLflow waits 20 s for another connection
_SECONDS = 180  # the longest that one operation may take
_ENDS = {0: "succeeded", 2: "gave a reason", -signal.SIGKILL: "were killed"}
_GROUP = multiprocessing.get_context("fork")  # MLflow's import takes a second: once, before the fork


def make_export(directory: Path, name: str, quality: int) -> Path:
    """An export of a drafter and its gate's verdict; its files are several blocks long."""
    export = directory / name / "export"
    export.mkdir(parents=True)
    (export / "config.json").write_text(json.dumps({"model_type": "llama", "name": name, "quality": quality}))
    header = json.dumps({"weight": {"dtype": "U8", "shape": [40_000], "data_offsets": [0, 40_000]}}).encode()
    (export / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(40_000))
    target = TargetIdentity("stress/target", "a" * 64, "b" * 64, "c" * 64, 100, [0])
    write_record(export, ExportRecord("hf-causal-lm", "draft_model", target, True, 1, 1, {}, {}, []))
    (directory / name / "gate.json").write_text(json.dumps({"verdict": "promote"}))
    return export


def publish(registry: Registry, export: Path, expected: str | None) -> str:
    files = {"gate.json": export.parent / "gate.json"}
    return registry.publish(export, files=files, tags={"name": export.parent.name}, expected_champion=expected)


def quality_of(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["quality"])


# Faults


def kill_at_event(number: int) -> None:
    """SIGKILL this process at its `number`-th watched event."""
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event.startswith(_WATCHED):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def fail_rename(number: int) -> None:
    """The system refuses this process's `number`-th rename, once."""
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event == "os.rename":
            seen += 1
            if seen == number:
                raise OSError(5, "Input/output error")

    sys.addaudithook(hook)


def limit_files(num_bytes: int) -> None:
    """No file of this process may grow beyond `num_bytes`: writing fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def count_events(events: "Synchronized[int]", renames: "Synchronized[int]") -> None:
    """Count this process's events in shared memory."""

    def hook(event: str, _: object) -> None:
        events.value += event.startswith(_WATCHED)
        renames.value += event == "os.rename"

    sys.addaudithook(hook)


def in_process(work: Callable[[], object], meanwhile: Callable[[BaseProcess], object] = lambda process: None) -> int:
    """Run `work` in a forked process and `meanwhile` in this one; its exit code: 0, or 2 where it gave a reason."""

    def body() -> None:
        try:
            work()
        except ArtifactError:
            os._exit(2)
        os._exit(0)

    process = _GROUP.Process(target=body)
    process.start()
    meanwhile(process)
    process.join(_SECONDS)
    assert process.exitcode is not None, f"no end after {_SECONDS} s: the registry hangs"
    return process.exitcode


# What must hold


def check_serving(registry: Registry, allowed: set[str | None]) -> None:
    """The champion link opens, at once and unrepaired, and leads to a whole version of `allowed` that a gate passed."""
    link = registry.directory / "aliases" / "champion"
    if not link.is_symlink():
        assert None in allowed, f"no champion link, expected one of {allowed}"
        return
    number = os.readlink(link).rpartition("/")[2]
    assert number in allowed, f"the link serves {number}, expected one of {allowed}"
    assert json.loads((link / "gate.json").read_text())["verdict"] == "promote"
    assert json.loads((link / "config.json").read_text())["model_type"] == "llama"


def check_agreement(registry: Registry, allowed: set[str | None], known: set[str]) -> str | None:
    """After `reconcile`, record, link, cache and history name one champion, and every known version is whole."""
    registry.reconcile()
    check_serving(registry, allowed)
    champion = registry.champion()
    number = champion.number if champion else None
    assert number in allowed, f"the record's champion is {number}, expected one of {allowed}"
    assert known <= {v.number for v in registry.versions()}, f"lost versions: {known}"
    for version in registry.versions():
        registry.verify(version)
    leftovers = [str(path) for path in registry.root.rglob(".tmp-*")]
    assert not leftovers, f"left over: {leftovers}"
    if champion is not None:
        assert registry.champion_path().resolve() == champion.path
        assert registry.history()[-1]["version"] == number
        assert HubCache(registry.root, MODEL).names("champion", champion.number), "the cache names another version"
    return number


# Injections


@dataclass
class Tally:
    """What happened: injections by kind and operation, ends of the disturbed processes, what did not hold."""

    injected: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        number = sum(self.injected.values())
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return [
            *(f"{count:4d}  {kind}" for kind, count in sorted(self.injected.items())),
            f"{number} faults; the disturbed operations: {ends}",
            *(f"NOT HELD: {failure}" for failure in self.failures),
            f"{'held' if not self.failures else 'NOT HELD'}: the champion always opened and had passed a gate, record "
            f"and directory agreed after `reconcile`, nothing was lost ({len(self.failures)} of {number} failed)",
        ]


@dataclass(frozen=True)
class Size:
    """Events, renames and seconds of an undisturbed operation, so that faults hit all of it."""

    events: int
    renames: int
    seconds: float

    @classmethod
    def of(cls, root: Path, work: Callable[[Registry], object]) -> Self:
        """Measured on a copy of the registry at `root`."""
        events, renames = (_GROUP.Value("i", 0, lock=False) for _ in range(2))
        with tempfile.TemporaryDirectory(dir=root.parent) as directory:
            copy = Registry(Path(shutil.copytree(root, Path(directory) / "registry", symlinks=True)), MODEL)
            start = time.monotonic()
            code = in_process(lambda: (count_events(events, renames), work(copy)))
            seconds = time.monotonic() - start
        assert code == 0, f"the undisturbed operation exited {code}"
        return cls(events.value, renames.value, seconds)


def disturbed(kind: str, work: Callable[[], object], size: Size, database: Path, rng: random.Random) -> int:
    """Run `work` in a process that meets a fault of `kind`; its exit code."""
    if kind == "kill at a time":
        seconds = rng.uniform(0.0, size.seconds)
        return in_process(work, lambda process: (process.join(seconds), process.kill()))
    if kind == "locked database":
        return _while_locked(work, database, rng)
    event, rename, limit = rng.randint(1, size.events), rng.randint(1, size.renames), int(10 ** rng.uniform(0, 6))
    prepare = {
        "kill at an event": partial(kill_at_event, event),
        "failed rename": partial(fail_rename, rename),
        "full disk": partial(limit_files, limit),
    }[kind]
    return in_process(lambda: (prepare(), work()))


def _while_locked(work: Callable[[], object], database: Path, rng: random.Random) -> int:
    """Another process holds the database, for writing or altogether, for so long that some writers give up."""
    locked, how, seconds = _GROUP.Event(), rng.choice(["IMMEDIATE", "EXCLUSIVE"]), rng.choice(_LOCKED_SECONDS)

    def hold() -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute(f"BEGIN {how}")
        locked.set()
        time.sleep(seconds)
        connection.execute("ROLLBACK")

    holder = _GROUP.Process(target=hold)
    holder.start()
    locked.wait(_SECONDS)
    code = in_process(work)
    holder.join()
    return code


def inject(count: int, seed: int, directory: Path) -> Tally:
    """`count` faults, each kind in turn, on promotions and rollbacks in turn, in one registry."""
    rng, tally = random.Random(seed), Tally()
    registry = Registry(directory / "registry", MODEL)
    champion: str | None = None
    for i in range(3):
        champion = publish(registry, make_export(directory, f"first-{i}", i), champion)
    known = {version.number for version in registry.versions()}
    measured = make_export(directory, "measured-export", 0)
    sizes = {
        "promotion": Size.of(registry.root, lambda r: publish(r, measured, "3")),
        "rollback": Size.of(registry.root, lambda r: r.rollback("1")),
    }
    for i in range(count):
        kind, action = KINDS[i % len(KINDS)], ("promotion", "rollback")[i % 2]
        work: Callable[[], object]
        if action == "promotion":
            after = str(max(map(int, known)) + 1)
            work = partial(publish, registry, make_export(directory, f"export-{seed}-{i}", i), champion)
        else:
            after = rng.choice(sorted(known - {champion}))
            work = partial(registry.rollback, after)
        tally.injected[f"{kind}, {action}"] += 1
        try:
            code = disturbed(kind, work, sizes[action], registry.root / "mlflow.db", rng)
            tally.ends[_ENDS.get(code, f"exited {code}")] += 1
            assert code in _ENDS, f"exit code {code}: neither success nor a reason"
            check_serving(registry, {champion, after})
            number = check_agreement(registry, {champion, after}, known)
            assert code != 0 or number == after, f"success was told, but {number} is champion"
            if number != after:
                work()
            champion = check_agreement(registry, {after}, known)
        except AssertionError as error:
            tally.failures.append(f"{i}: {kind}, {action}: {error}")
            found = registry.champion()
            champion = found.number if found else None
        known = {version.number for version in registry.versions()}
    return tally


# Races


def race(processes: int, rounds: int, directory: Path) -> tuple[list[str], int]:
    """Processes promote at once, each a drafter of its own quality, and only where it is better.

    Returns what did not hold, and how many had to judge again because another one came first.
    """
    registry, failures, stale = Registry(directory / "registry", MODEL), [], _GROUP.Value("i", 0)
    publish(registry, make_export(directory, "first", 0), None)
    for number in range(rounds):
        qualities = random.Random(number).sample(range(100 * number + 1, 100 * number + 100), processes)
        exports = [make_export(directory, f"round-{number}-{i}", quality) for i, quality in enumerate(qualities)]
        before = len(registry.history())
        barrier = _GROUP.Barrier(processes)
        started = [_GROUP.Process(target=_compete, args=(registry, export, barrier, stale)) for export in exports]
        for process in started:
            process.start()
        for process in started:
            process.join(300)
        failures += [f"round {number}: a process exited {p.exitcode}" for p in started if p.exitcode != 0]
        failures += _race_faults(registry, number, max(qualities), before)
    return failures, stale.value


def _compete(registry: Registry, export: Path, barrier: Barrier, stale: "Synchronized[int]") -> None:
    """Judge against the champion and promote where better; judge again where another one came first."""
    barrier.wait()
    while True:
        champion = registry.champion()
        if champion and quality_of(champion.path) >= quality_of(export):
            return
        try:
            publish(registry, export, champion.number if champion else None)
        except StaleBaseline:
            with stale.get_lock():
                stale.value += 1
            continue
        return


def _race_faults(registry: Registry, number: int, best: int, before: int) -> list[str]:
    champion, faults = registry.champion(), []
    moves = [entry["version"] for entry in registry.history()[before:]]
    versions = {version.number: quality_of(version.path) for version in registry.versions()}
    if champion is None or versions[champion.number] != best:
        faults.append(f"round {number}: the champion is not the best of the round ({best})")
    if len(set(moves)) != len(moves):
        faults.append(f"round {number}: versions given twice: {moves}")
    if any(versions[b] <= versions[a] for a, b in pairwise(moves)):
        faults.append(f"round {number}: a worse drafter followed a better one: {moves}")
    if sorted(versions.values()) != sorted(set(versions.values())) or len(versions) != len(registry.history()):
        faults.append(f"round {number}: a promotion was lost: {len(versions)} versions, {registry.history()}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("faults")
    command.add_argument("--count", type=int, default=200)
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("race")
    command.add_argument("--processes", type=int, default=8)
    command.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)  # every fault is reported, as it should be
    with tempfile.TemporaryDirectory() as directory:
        if arguments.command == "faults":
            tally = inject(arguments.count, arguments.seed, Path(directory))
            failed, lines = bool(tally.failures), tally.lines()
        else:
            faults, stale = race(arguments.processes, arguments.rounds, Path(directory))
            failed = bool(faults)
            lines = [f"NOT HELD: {fault}" for fault in faults] or [
                f"held: {arguments.processes} processes at once, {arguments.rounds} rounds: versions distinct, "
                f"the best is champion, each was better than the one before, none lost; {stale} judged again"
            ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

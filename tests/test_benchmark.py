"""The measurements of scripts/benchmark.py at tiny sizes: all ways run, agree in their values, and are judged."""

import os
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from warm_process import run_script

ROOT = Path(__file__).resolve().parents[1]
SIZES = ("--hidden", "16", "--vocab", "300", "--threads", "1", "--dtype", "float32", "--rounds", "1")


def benchmark(*arguments: str) -> CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPECDIST_NUM_THREADS": "1"}
    return run_script([str(ROOT / "scripts/benchmark.py"), *arguments], environment)


def judged(output: str) -> dict[str, bool]:
    """Whether each requirement held, by its words."""
    lines = re.findall(r"^(held|NOT HELD): (.*?): -?[\d.e-]+, at most [\d.e-]+$", output, flags=re.MULTILINE)
    return {text: word == "held" for word, text in lines}


def test_losses_compares_all_ways_and_exits_with_its_verdict() -> None:
    name = "jensen_shannon"
    result = benchmark("losses", "--objectives", name, "--positions", "40", *SIZES)
    requirements = judged(result.stdout)
    assert list(requirements) == [
        f"{name}, {what} {other}"
        for other in ("eager", "trl")
        for what in ("time beside", "memory beside", "difference of values from")
    ], result.stdout + result.stderr
    assert requirements[f"{name}, difference of values from eager"]
    assert requirements[f"{name}, difference of values from trl"]
    assert result.returncode == (0 if all(requirements.values()) else 1)
    assert len(re.findall(rf"^{name}, 40 positions, \w+: \d+ ms, \d+ MB ", result.stdout, flags=re.MULTILINE)) == 3


def test_losses_reports_memory_by_the_number_of_tokens() -> None:
    result = benchmark(
        "losses", "--objectives", "mixture", "--ways", "chunked", "--positions", "2048", "512", "--train-projection",
        *("--hidden", "16", "--vocab", "32000", "--threads", "1"),
    )  # fmt: skip
    assert judged(result.stdout) == {"mixture, chunked, rows of logits per position": True}, (
        result.stdout + result.stderr
    )
    assert result.returncode == 0
    assert [int(n) for n in re.findall(r"mixture, (\d+) positions, chunked: [1-9]\d* MB", result.stdout)] == [512, 2048]


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    run_script([str(ROOT / "scripts/make_tiny_target.py"), str(directory)], os.environ).check_returncode()
    return directory / "target"


def test_train_draft_takes_the_same_steps_as_trls_loss(tiny_target: Path) -> None:
    result = benchmark(
        *("train-draft", "--target", str(tiny_target), "--layers", "0", "--steps", "1", "--rounds", "1"),
        *("--batch-rows", "2", "--max-length", "60", "--ways", "states", "trl_fused", "--dtype", "float32"),
    )
    requirements = judged(result.stdout)
    assert len(requirements) == 3, result.stdout + result.stderr
    assert requirements["states, difference of loss from trl_fused"]
    assert result.returncode == (0 if all(requirements.values()) else 1)


def test_train_heads_takes_the_published_step_and_reports_every_way(tiny_target: Path) -> None:
    result = benchmark(
        *("train-heads", "--target", str(tiny_target), "--heads", "2", "--documents", "2", "--batch-rows", "2"),
        *("--max-length", "100", "--rounds", "1", "--threads", "1"),
        *("--ways", "plain, autocast", "own", "shared, cached states", "target's pass alone"),
    )
    names = ("difference of loss of own and plain", "largest difference of gradients of own and plain")
    assert judged(result.stdout) == {f"2 heads, {name}": True for name in names}, result.stdout + result.stderr
    rows = re.findall(
        r"^\| 2 \| ([\w', ]+) \| ([\d.]+) \| [\d.]+ \| \d+ \| [\d.]+ \|$", result.stdout, flags=re.MULTILINE
    )
    ours = ["own", "shared, cached states"]
    assert [way for way, _ in rows] == ["plain", "plain, autocast", *ours, "target's pass alone"]
    assert all(float(speed) > 0 for _, speed in rows)
    assert result.returncode == 0


def test_a_measurement_that_does_not_exist_is_answered_by_those_that_do() -> None:
    result = benchmark("speed")
    assert result.returncode == 2
    assert "benchmark.py train-draft --help" in result.stdout

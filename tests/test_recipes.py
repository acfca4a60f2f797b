"""Both recipes as a user starts them, on a tiny target: the whole chain, its second run, and SIGKILL in each stage.

Those that train run in forked processes, which have their imports; a new interpreter starts each in a dry run, and
`accelerate launch` the draft's.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from registry_factory import empty_database
from warm_process import run_script

from specdist.cli import main
from specdist.registry.store import Registry
from specdist.schema import TargetIdentity

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {"draft": "recipes/distill_draft.py", "medusa": "recipes/train_medusa.py"}
# What appears in a run's directory as its stages go by; a run is killed as soon as one of them is there.
MILESTONES = (
    "data/prompts/*/.tmp-*",
    "data/*/plan.arrow",
    "data/*/shard-*.parquet",
    "data/*/manifest.json",
    "data/*/target-states.safetensors",
    "run/evaluations/checkpoint-0.json",
    "run/checkpoints/checkpoint-16",
    "run/checkpoints/checkpoint-32/complete.json",
    "run/checkpoints/done.json",
    "run/export/export.json",
    "run/report.json",
    "run/gate.json",
    "registry/*/versions/.tmp-*",
    "registry/*/versions/1",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    run_script([str(ROOT / "scripts/make_tiny_target.py"), str(directory)], environment()).check_returncode()
    return directory / "target"


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def command(kind: str, target: Path, directory: Path, *extra: str) -> list[str]:
    return [
        *(RECIPES[kind], "--config", f"recipes/configs/tiny/{kind}.yaml", "--target_model", str(target)),
        *("--output_dir", str(directory / "run"), "--data_dir", str(directory / "data")),
        *("--registry", str(directory / "registry"), *extra),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "SPECDIST_NUM_THREADS": "1"}


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return run_script(arguments, environment())


def run_anew(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """In a new interpreter."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=170)


def state_of(directory: Path, name: str) -> dict:
    """What has to be the same after a run that was killed and one that was not."""
    registry = Registry(directory / "registry", name)
    champion = registry.champion()
    rows = {
        p.parent.name: json.loads(p.read_text())["rows_sha256"] for p in (directory / "data").glob("*/manifest.json")
    }
    verdict = json.loads((directory / "run" / "gate.json").read_text())["verdict"]
    report = json.loads((directory / "run" / "report.json").read_text())
    return {
        "versions": [v.number for v in registry.versions()],
        "champion": champion and (champion.number, champion.tags["drafter_sha256"]),
        "rows": rows,
        "verdict": verdict,
        "acceptance": report["acceptance"],
        "checkpoints": report["checkpoints"],
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["draft", "medusa"])
def test_killed_in_each_stage_a_run_ends_as_an_uninterrupted_one(kind: str, target: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(command(kind, target, whole)).returncode == 0
    killed = []
    for milestone in MILESTONES:
        process = subprocess.Popen(
            [sys.executable, *command(kind, target, cut, "--shard_rows", "32")],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while process.poll() is None and not any(cut.glob(milestone)):
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed.append(milestone)
        process.wait()
    assert len(killed) >= len(MILESTONES) - 2, f"only killed at {killed}"
    finished = run(command(kind, target, cut))
    assert finished.returncode == 0, finished.stderr
    assert state_of(cut, f"tiny-{kind}") == state_of(whole, f"tiny-{kind}")


@pytest.mark.parametrize("kind", ["draft", "medusa"])
def test_the_whole_chain_then_a_weaker_run_is_not_promoted_and_rollback_returns(
    kind: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(command(kind, target, tmp_path))
    assert first.returncode == 0, first.stderr
    registry = Registry(tmp_path / "registry", f"tiny-{kind}")
    link = tmp_path / "registry" / f"tiny-{kind}" / "aliases" / "champion"
    assert registry.champion().number == "1"
    assert {"config.json", "export.json", "report.json", "report.html", "gate.json"} <= {p.name for p in link.iterdir()}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().split("\n") if line]
    gains = [m for m in metrics if "acceptance/gain_over_untrained" in m]
    assert len(gains) >= 3, "acceptance of each checkpoint is a metric of the run"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [point["step"] for point in report["checkpoints"]] == [0, *(m["step"] for m in gains)]
    left = {path.name for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*")}
    assert len(left) == 2, "save_total_limit"
    assert f"checkpoint-{report['checkpoint_step']}" in left, "C11: the best is never deleted"

    again = run(command(kind, target, tmp_path))
    assert again.returncode == 0, again.stderr
    assert "training: finished before" in again.stderr
    assert [v.number for v in registry.versions()] == ["1"], "a finished run publishes nothing twice"

    settings = {result["setting"]: result["texts_sha256"] for result in report["acceptance"]}
    assert report["untrained"]["texts_sha256"] == settings["greedy"]
    assert len(set(settings.values()) - {None}) == 2, "greedy and sampled texts"
    assert 0 < report["num_parameters"] < report["num_target_parameters"]
    if kind == "medusa":
        exported = [json.loads((link / name).read_text()) for name in ("export.json", "config.json")]
        assert exported[0]["speculative_config"]["num_speculative_tokens"] == report["heads"]["chain_length"]
        timed = [p["num_speculative_tokens"] for p in report["speed"]["points"] if p["num_tree_nodes"] is None]
        assert timed == sorted({2, 4, report["heads"]["chain_length"]}), "those asked for, and that which is served"
        sizes = [point["num_tree_nodes"] for point in report["speed"]["points"]]
        assert sizes == [*(None for _ in timed), len(exported[1]["medusa_choices"])], (
            "chains, then the tree that is saved"
        )
        assert [c["num_tree_nodes"] for c in report["certifications"]] == [None, None, sizes[-1]]
        assert all(c["passed"] for c in report["certifications"])

    if kind == "draft":
        assert main(["advise", "--measured", str(tmp_path / "run")]) == 0
        lines = capsys.readouterr().out.split("predicted and measured speed-up")[1].splitlines()[2:]
        assert [line.split()[0] for line in lines] == [str(gamma) for gamma in range(1, 11)]

    weaker = command(
        kind, target, tmp_path, "--max_train_prompts", "16", "--num_train_epochs", "1", "--output_dir",
        str(tmp_path / "weaker"),
    )  # fmt: skip
    second = run(weaker)
    assert second.returncode in (3, 4), second.stderr
    assert registry.champion().number == "1"
    assert link.resolve().name == "1"
    verdict = json.loads((tmp_path / "weaker" / "gate.json").read_text())
    assert verdict["verdict"] in ("hold", "reject")
    assert verdict["champion_version"] == "1"
    assert verdict["reason"]


def test_measured_layers_a_reduced_vocabulary_and_adapters_go_through_the_chain(target: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "recipes/configs/tiny/draft.yaml").read_text())
    del config["draft_layers"]
    config |= {"draft_layer_rule": "importance", "num_draft_layers": 2, "draft_vocab_size": 128, "lora_rank": 8}
    (tmp_path / "draft.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "mlflow.db").write_bytes(empty_database())
    result = run(command("draft", target, tmp_path, "--config", str(tmp_path / "draft.yaml")))
    assert result.returncode in (0, 3, 4), result.stderr

    origin = json.loads((tmp_path / "run/init/origin.json").read_text())
    best = sorted(range(4), key=lambda layer: -origin["block_influence"][layer])[:2]
    assert origin["layers"] == sorted(best)
    checkpoints = list((tmp_path / "run/checkpoints").glob("checkpoint-*"))
    assert checkpoints
    assert all([p.name for p in c.glob("*.safetensors")] == ["adapter_model.safetensors"] for c in checkpoints)
    assert "adapters merged: logits differ by" in result.stderr

    export = tmp_path / "run/export"
    assert [p.name for p in export.glob("*.safetensors")] == ["model.safetensors"]
    assert len(json.loads((export / "draft_vocabulary.json").read_text())["token_ids"]) == 128
    assert any("128 of 259" in limit for limit in json.loads((export / "export.json").read_text())["known_limits"])
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert [c["passed"] for c in report["certifications"]] == [True, True]
    assert report["fidelity"]["num_identical"] == report["fidelity"]["num_prompts"]


def test_two_processes_and_another_batch_size_write_the_same_rows(target: Path, tmp_path: Path) -> None:
    """The embedded engine in float32, greedy and sampled; `--only_data` stops before training."""
    digests = []
    launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_2proc.yaml"]
    for name, launcher, rows in (("one", [], "32"), ("two", launch, "32"), ("single", [], "1")):
        settings = [
            *("--target_dtype", "float32", "--train_temperatures", "0", "0.8", "--max_train_prompts", "40"),
            *("--max_eval_prompts", "8", "--only_data", "true", "--generation_batch_rows", rows),
        ]
        arguments = command("draft", target, tmp_path / name, *settings)
        result = run_anew([*launcher, *arguments]) if launcher else run(arguments)
        assert result.returncode == 0, result.stderr
        assert not (tmp_path / name / "run" / "checkpoints").exists()
        manifests = sorted((tmp_path / name / "data").glob("*/manifest.json"))
        digests.append({m.parent.name: json.loads(m.read_text())["rows_sha256"] for m in manifests})
        shards = {len(json.loads(m.read_text())["shards"]) for m in manifests}
        assert shards == ({2} if launcher else {1})
    assert len(digests[0]) == 3
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--target_model", "no/such-target"], "no such directory"),
        (["--lerning_rate", "1"], "did you mean learning_rate"),
        (["--top_p", "7"], "top_p 7.0: expected"),
        (["--context_length", "100000"], "reads 2048 tokens; lower it"),
        (["--engine", "server"], "server needs them"),
        (["--engine", "server", "--server_urls", "http://127.0.0.1:9"], "no server answers"),
        (["--eval_prompts", "data/prompts/train"], "prompts are in both"),
        (["--registry", "/dev/null/registry"], "/dev/null"),
        (["--draft_layers", "9"], "draft_layers"),
        (["--draft_vocab_size", "9999"], "draft_vocab_size = 9999: expected 1"),
        (["--lora_rank", "4", "--lora_target_modules", "query"], "the draft has no 'query'"),
        (["--lora_rank", "4", "--load_in_4bit", "true"], "load_in_4bit: "),
        (["--padding_free", "true"], "set packing: true instead"),
    ],
)
def test_bad_input_is_one_clear_line_and_makes_nothing(
    target: Path,
    tmp_path: Path,
    extra: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "argv", [*command("draft", target, tmp_path), *extra])
    monkeypatch.setenv("SPECDIST_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(RECIPES["draft"], run_name="__main__")
    assert ended.value.code == 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert message in line
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not list((tmp_path / "data").rglob("*.parquet"))


def test_a_malformed_prompt_file_is_refused_by_line_and_reason(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello there"}\n{"messages": [{"role": "user"}]}\n{broken\n', encoding="utf-8")
    result = run(command("draft", target, tmp_path, "--train_prompts", str(path)))
    assert result.returncode == 2
    assert all(part in result.stderr for part in (str(path), "line 2", "line 3")), result.stderr


@pytest.mark.parametrize("kind", ["draft", "medusa"])
def test_dry_run_prints_the_plan_and_makes_nothing(kind: str, target: Path, tmp_path: Path) -> None:
    result = run_anew(command(kind, target, tmp_path, "--dry_run", "true"))
    assert result.returncode == 0, result.stderr
    assert all(word in result.stderr for word in ("plan  target", "disk", "memory", "champion  none yet", "dry run"))
    assert ("fit of a draft (2 of its 4 layers)" in result.stderr) == (kind == "draft")
    assert not (tmp_path / "run").exists()


def test_an_output_folder_of_another_run_is_refused(target: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(parents=True)
    other = TargetIdentity("other", "0" * 64, "1" * 64, "2" * 64, 268, [267])
    record = {"kind": "medusa", "target": other.to_json()}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(record))
    (tmp_path / "run" / "run.yaml").write_text("target_model: other\n")
    result = run(command("draft", target, tmp_path))
    assert result.returncode == 2
    assert "belongs to a medusa run for target other" in result.stderr
    assert {p.name for p in (tmp_path / "run").iterdir()} <= {".lock", "provenance.json", "run.yaml"}

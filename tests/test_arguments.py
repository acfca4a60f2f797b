"""Configuration: what wins, what is refused and with which hint, and that the resolved one loads again."""

import re
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from transformers import TrainingArguments
from trl import SFTConfig

from specdist.config import EvaluationArguments, RecipeConfig
from specdist.drafter_config import DraftArguments, HeadsArguments, check_heads
from specdist.errors import ConfigError
from specdist.objective import ObjectiveArguments
from specdist.stages.arguments import _with_old_names, parse

ROOT = Path(__file__).resolve().parents[1]
KINDS = {True: (DraftArguments, SFTConfig), False: (HeadsArguments, TrainingArguments)}  # by: is it a draft model?


def read(tmp_path: Path, text: str, *arguments: str) -> RecipeConfig:
    path = tmp_path / "draft.yaml"
    path.write_text(text + f"\noutput_dir: {tmp_path / 'run'}\nreport_to: none\n", encoding="utf-8")
    return parse(
        DraftArguments, SFTConfig, default_config="does/not/exist.yaml", arguments=["--config", str(path), *arguments]
    )


def test_command_line_beats_file_beats_default(tmp_path: Path) -> None:
    config = read(tmp_path, "top_p: 0.9\neval_temperature: 0.7\nlearning_rate: 1e-4", "--eval_temperature", "0.6")
    assert (config.data.top_p, config.data.eval_temperature, config.data.top_k) == (0.9, 0.6, 0)
    assert config.training.learning_rate == 1e-4


def test_lists_and_nothing_come_from_both(tmp_path: Path) -> None:
    config = read(tmp_path, "draft_layers: [0, 5]\nmax_train_prompts: 3", "--train_temperatures", "0", "0.8")
    assert config.model.draft_layers == [0, 5]
    assert config.data.train_temperatures == [0.0, 0.8]
    assert config.prompts.max_eval_prompts is None


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("lerning_rate: 0.1", [], "unknown key 'lerning_rate'; did you mean learning_rate"),
        ("", ["--draft_layer", "1"], "unknown key 'draft_layer'; did you mean draft_layers"),
        ("", ["--max_new_tokns=4"], "unknown key 'max_new_tokns'"),
        ("top_p: 1.5", [], "top_p 1.5"),
        ("min_p: 1.5", [], "min_p 1.5: expected 0"),
        ("min_p: 0.1\ntop_p: 0.9\nengine: vllm", [], "vLLM applies min_p before top_p"),
        ("num_speculative_tokens: 0", [], "num_speculative_tokens = 0: expected 1 to 10"),
        ("target_dtype: fp32", [], "target_dtype = 'fp32': expected one of float32, bfloat16, float16"),
        ("eval_temperature: 0", [], "eval_temperature"),
        ("train_temperatures: []", [], "train_temperatures is empty"),
        ("speed_prompts: -1", [], "speed_prompts = -1: expected 0"),
        ("speed_prompts: 1", [], "speed_prompts = 1: expected 0"),
        ("speed_lengths: [0, -3]", [], "speed_lengths = 0: expected 1 to 10"),
        ("speed_lengths: []", [], "speed_lengths"),
        ("learning_rate: quick", [], "learning_rate = 'quick': expected a number"),
        ("top_p: [0.9]", [], r"top_p = \[0.9\]: expected a number"),
        ("train_temperatures: [warm]", [], "train_temperatures = 'warm': expected a number"),
        ("draft_layers: [0, 1.5]", [], "draft_layers: holds 1.5, expected whole numbers"),
        ("train_prompts: [7]", [], "train_prompts: holds 7, expected text"),
        ("- a\n- b", [], "not valid YAML|key: value"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_a_hint(
    tmp_path: Path, text: str, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text, *arguments)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type; a whole number is not a float here, nor a truth value a number."""
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, kind) for kind in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(item, get_args(hint)[0]) for item in value)
    return hint is Any or type(value) is (get_origin(hint) or hint)


def assert_types(config: RecipeConfig) -> None:
    parts = (getattr(config, part) for part in RecipeConfig.__annotations__ if part not in ("training", "given"))
    wrong = [
        f"{key} = {value!r}: {hint}"
        for part in parts
        for key, hint in get_type_hints(type(part)).items()
        if not fits(value := getattr(part, key), hint)
    ]
    assert wrong == []


CONFIGS = sorted(
    path
    for path in (ROOT / "recipes/configs").rglob("*.yaml")
    if path.name != "gate.yaml" and not path.name.endswith("-variants.yaml")
)
README_BLOCKS = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "recipes/configs")))
def test_each_shipped_configuration_gives_every_field_its_type(path: Path, tmp_path: Path) -> None:
    assert len(CONFIGS) >= 11
    arguments = ["--output_dir", str(tmp_path)]
    config = parse(*KINDS["draft" in path.name], default_config=str(path), arguments=arguments)
    assert_types(config)
    for sources in (config.prompts.train_prompts, config.prompts.eval_prompts):
        assert all((ROOT / source).exists() for source in sources), sources


@pytest.mark.parametrize("block", README_BLOCKS, ids=lambda block: block.split(":")[0])
def test_the_readmes_yaml_can_be_pasted(block: str, tmp_path: Path) -> None:
    assert len(README_BLOCKS) >= 4
    path = tmp_path / "pasted.yaml"
    path.write_text(block + "output_dir: runs/pasted\n", encoding="utf-8")
    draft = not {"head_kind", "init_heads"} & yaml.safe_load(block).keys()
    assert_types(parse(*KINDS[draft], default_config=str(path), arguments=[]))


def test_a_lists_only_item_may_stand_alone(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "train_prompts: mine.jsonl\nobjective: negative_log_acceptance\ntrain_temperatures: 7e-1\n"
        "speed_batch_sizes: 8\nlora_rank: 4\nlora_target_modules: q_proj\nlabel_names: labels\ndraft_layers:",
    )
    assert config.prompts.train_prompts == ["mine.jsonl"]
    assert config.objective.objective == ["negative_log_acceptance"]
    assert config.data.train_temperatures == [0.7]
    assert config.evaluation.speed_batch_sizes == [8]
    assert config.model.lora_target_modules == ["q_proj"]
    assert config.training.label_names == ["labels"]


@pytest.mark.parametrize(
    "line",
    [
        "accelerator_config: {dispatch_batches: false}",
        "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {lr_end: 1.0e-6}",
        "debug: [underflow_overflow]",
        "fsdp: true\nfsdp_config: {reshard_after_forward: true}",
    ],
    ids=lambda line: line.split(":")[0],
)
def test_what_the_trainer_makes_objects_of_is_recorded_and_loads_again(tmp_path: Path, line: str) -> None:
    config = read(tmp_path, line)
    again = read(tmp_path, yaml.safe_dump(config.resolved()))
    assert again.resolved() == config.resolved()


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        parse(DraftArguments, SFTConfig, default_config="does/not/exist.yaml", arguments=[])


def test_the_resolved_configuration_loads_again_as_itself(tmp_path: Path) -> None:
    config = read(tmp_path, "draft_layers: [0, 5]\nlearning_rate: 1.0e-4\nsave_strategy: steps\nsave_steps: 7")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.resolved()), encoding="utf-8")
    again = parse(DraftArguments, SFTConfig, default_config="", arguments=[f"--config={path}"])
    assert again.resolved() == config.resolved()
    assert again.training.save_steps == 7


def test_the_resolved_configuration_holds_no_secret_and_loads_again_as_itself(tmp_path: Path) -> None:
    text = "hub_token: hf_SECRET\neos_token: <end>\nmodel_init_kwargs: {token: SECRET, revision: main}\n"
    config = read(tmp_path, text, "--mlflow_tracking_uri", "https://me:SECRET@ml:80/x?a=1")
    assert (config.training.hub_token, config.release.mlflow_tracking_uri) == (
        "hf_SECRET",
        "https://me:SECRET@ml:80/x?a=1",
    ), "which the run itself needs"
    resolved = config.resolved()
    assert "SECRET" not in yaml.safe_dump(resolved)
    assert "hub_token" not in resolved
    assert resolved["mlflow_tracking_uri"] == "https://ml:80/x?a=1"
    assert (resolved["eos_token"], resolved["model_init_kwargs"]) == ("<end>", {"revision": "main"})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(resolved), encoding="utf-8")
    again = parse(DraftArguments, SFTConfig, default_config="", arguments=[f"--config={path}"])
    assert again.resolved() == resolved


def test_heads_cannot_be_judged_beyond_their_number() -> None:
    with pytest.raises(ConfigError, match="2 heads draft at most 2"):
        check_heads(
            HeadsArguments(medusa_num_heads=2), EvaluationArguments(num_speculative_tokens=3), ObjectiveArguments()
        )


@pytest.mark.parametrize(
    "asked", [{"on_policy_share": 0.5}, {"target_distribution": "top"}], ids=["on_policy", "best tokens"]
)
def test_heads_refuse_what_only_a_draft_model_can_learn_by(asked: dict) -> None:
    objective = ObjectiveArguments(objective=["forward_kl"], **asked)
    with pytest.raises(ConfigError, match=next(iter(asked))):
        check_heads(HeadsArguments(), EvaluationArguments(num_speculative_tokens=3), objective)


def test_a_sharded_target_does_not_store_states() -> None:
    heads = HeadsArguments(shard_target=True)
    with pytest.raises(ConfigError, match="cache_target_states: false"):
        check_heads(heads, EvaluationArguments(), ObjectiveArguments())
    check_heads(heads, EvaluationArguments(), ObjectiveArguments(cache_target_states=False))


def test_a_key_goes_by_its_old_name_where_the_installed_transformers_knows_no_other() -> None:
    values = {"activation_checkpointing": False, "learning_rate": 1.0}
    assert _with_old_names(values, {"activation_checkpointing", "gradient_checkpointing", "learning_rate"}) == values
    older = {"gradient_checkpointing": False, "learning_rate": 1.0}
    assert _with_old_names(values, {"gradient_checkpointing", "learning_rate"}) == older


JOINT = HeadsArguments(target_lora_rank=8, init_heads="runs/medusa")


@pytest.mark.parametrize(
    ("change", "objective", "message"),
    [
        ({"init_heads": None}, {"cache_target_states": False}, "name that run in init_heads"),
        ({}, {}, "cache_target_states: false"),
        ({"shard_target": True}, {"cache_target_states": False}, "leave one out"),
    ],
)
def test_what_cannot_be_while_the_target_learns_is_refused(change: dict, objective: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_heads(replace(JOINT, **change), EvaluationArguments(), ObjectiveArguments(**objective))
    check_heads(JOINT, EvaluationArguments(), ObjectiveArguments(cache_target_states=False))


@pytest.mark.parametrize("key", ["target_lora_rank", "target_learning_rate", "target_loss_weight"])
def test_what_concerns_the_target_has_a_range(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        HeadsArguments(**{key: -1})

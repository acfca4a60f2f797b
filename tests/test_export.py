"""Exports hold exactly what engines read: names, keys, ids, numbers. What is incomplete or altered is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from heads_factory import HIDDEN, export_heads, make_heads
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from specdist.drafters.causal_lm import load_draft_model, load_for_drafting
from specdist.drafters.prune import prune_layers
from specdist.drafters.vocabulary import VOCABULARY_FILE
from specdist.errors import ArtifactError, ConfigError
from specdist.export import draft_model
from specdist.export.record import EXPORT_FILE, ExportRecord, check_read_back, copy_tokenizer, read_record
from specdist.target import Target, open_target


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


def export_draft(target: Target, directory: Path, model=None, dtype: torch.dtype = torch.float32) -> ExportRecord:
    model = prune_layers(target.load_model(torch.float32), [1]) if model is None else model
    return draft_model.export_draft_model(
        model, target, directory, dtype=dtype, num_speculative_tokens=4, checkpoint_step=7
    )


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def tied_llama(vocab_size: int) -> LlamaForCausalLM:
    config = make_tiny_llama(vocab_size, layers=1).config
    config.tie_word_embeddings = True
    torch.manual_seed(4)
    return LlamaForCausalLM(config).eval()


TEXT = torch.tensor([[5, 9, 40, 3, 77, 12]])


# Draft models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c6_x6_x8_a_draft_comes_back_offline_with_the_same_logits(
    target: Target, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = prune_layers(target.load_model(torch.float32), [1]).eval()
    record = export_draft(target, tmp_path / "export", model, dtype)
    assert model.dtype == torch.float32, "exporting must leave the caller's model as it was"
    reloaded = load_draft_model(tmp_path / "export", dtype)
    with torch.inference_mode():
        expected = prune_layers(target.load_model(dtype), [1]).eval()(TEXT).logits
        assert torch.equal(reloaded(TEXT).logits, expected)
    assert record.num_parameters == model.num_parameters()
    names = {p.name for p in (tmp_path / "export").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", EXPORT_FILE}
    assert not [name for name in names if name.endswith((".bin", ".pt"))]


def test_c6_tied_weights_are_saved_once_and_come_back_tied(target: Target, tmp_path: Path) -> None:
    model = tied_llama(target.identity.vocab_size)
    export_draft(target, tmp_path / "export", model)
    assert "lm_head.weight" not in load_file(tmp_path / "export/model.safetensors")
    reloaded = load_draft_model(tmp_path / "export", torch.float32)
    assert reloaded.lm_head.weight.data_ptr() == reloaded.model.embed_tokens.weight.data_ptr()
    with torch.inference_mode():
        assert torch.equal(reloaded(TEXT).logits, model(TEXT).logits)


def test_c7_a_config_that_calls_different_weights_tied_is_corrected(target: Target, tmp_path: Path) -> None:
    model = make_tiny_llama(target.identity.vocab_size, layers=1, seed=4)
    model.config.tie_word_embeddings = True
    export_draft(target, tmp_path / "export", model)
    assert read(tmp_path / "export/config.json")["tie_word_embeddings"] is False
    reloaded = load_draft_model(tmp_path / "export", torch.float32)
    with torch.inference_mode():
        assert torch.equal(reloaded(TEXT).logits, model(TEXT).logits)


def test_c7_a_config_that_calls_one_tensor_two_is_corrected(target: Target, tmp_path: Path) -> None:
    model = tied_llama(target.identity.vocab_size)
    model.config.tie_word_embeddings = False
    export_draft(target, tmp_path / "export", model)
    assert read(tmp_path / "export/config.json")["tie_word_embeddings"] is True
    reloaded = load_draft_model(tmp_path / "export", torch.float32)
    with torch.inference_mode():
        assert torch.equal(reloaded(TEXT).logits, model(TEXT).logits)


def test_x3_a_contradictory_generation_config_does_not_stop_the_export(target: Target, tmp_path: Path) -> None:
    model = prune_layers(target.load_model(torch.float32), [1])
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.9, top_p=0.6)
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "as-it-is")
    export_draft(target, tmp_path / "export", model)
    saved = read(tmp_path / "export/generation_config.json")
    assert saved["num_assistant_tokens"] == 4
    assert saved["num_assistant_tokens_schedule"] == "constant"
    assert saved["assistant_confidence_threshold"] == 0.0
    assert not {"temperature", "top_p"} & set(saved)


def test_x4_no_file_of_an_export_names_a_path_of_this_machine(target: Target, tmp_path: Path) -> None:
    export_draft(target, tmp_path / "draft")
    export_heads(target, tmp_path / "medusa")
    files = list(tmp_path.glob("*/*.json"))
    assert {path.parent.name for path in files if path.name == "export.json"} == {"draft", "medusa"}
    for path in files:
        assert str(target.path) not in path.read_text(), path
        assert str(tmp_path) not in path.read_text(), path


def test_x7_another_vocabulary_size_is_refused(target: Target, tmp_path: Path) -> None:
    model = make_tiny_llama(target.identity.vocab_size + 1, layers=1)
    with pytest.raises(ConfigError, match="vocab_size 269 != target vocab_size 268"):
        export_draft(target, tmp_path / "export", model)
    assert not (tmp_path / "export").exists()


def padded_target(directory: Path, tokenizer: PreTrainedTokenizerFast) -> Target:
    """A target of 280 rows for the tokenizer's 268 ids."""
    model = make_tiny_llama(280)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return open_target(str(directory))


def test_x7_t5_no_engine_can_propose_the_padding_of_an_export(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    target = padded_target(tmp_path / "target", tiny_tokenizer)
    model = prune_layers(target.load_model(torch.float32), [1]).eval()
    with torch.no_grad():
        model.lm_head.weight[268:] = 50 * model.lm_head.weight[:1]
    export_draft(target, tmp_path / "export", model)
    ids = torch.randint(0, 268, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before, after = (m(ids).logits[0] for m in (model, load_draft_model(tmp_path / "export", torch.float32)))
    assert after.shape == (300, 280)
    assert int(before.argmax(-1).max()) >= 268
    assert int(after.argmax(-1).max()) < 268
    assert torch.equal(after[:, :268], before[:, :268])


def test_a_reduced_vocabulary_is_exported_beside_the_full_projection(target: Target, tmp_path: Path) -> None:
    model, ids = prune_layers(target.load_model(torch.float32), [1]).eval(), torch.tensor([4, 9, 200, 265, 267])
    record = draft_model.export_draft_model(
        model,
        target,
        tmp_path / "export",
        dtype=torch.float32,
        num_speculative_tokens=4,
        checkpoint_step=7,
        vocabulary_ids=ids,
    )
    # Engines read every safetensors file of a directory as weights
    assert [p.name for p in (tmp_path / "export").glob("*.safetensors")] == ["model.safetensors"]
    assert load_file(tmp_path / "export/model.safetensors")["lm_head.weight"].shape == (268, HIDDEN)
    assert VOCABULARY_FILE in read_record(tmp_path / "export").files
    assert [x for x in record.known_limits if "5 of 268" in x]
    ours, vocabulary = load_for_drafting(tmp_path / "export", target, torch.float32)
    assert torch.equal(vocabulary.ids, ids)
    with torch.inference_mode():
        engines = load_draft_model(tmp_path / "export", torch.float32)(TEXT).logits
        assert torch.equal(engines[..., ids], model(TEXT).logits[..., ids])
        assert torch.equal(engines.argmax(-1), ids[ours(TEXT).logits.argmax(-1)])  # an engine drafts what we draft
        torch.testing.assert_close(ours(TEXT).logits, model(TEXT).logits[..., ids])


def test_a_tied_draft_of_a_reduced_vocabulary_reads_what_it_cannot_propose(target: Target, tmp_path: Path) -> None:
    model, ids = prune_layers(target.load_model(torch.float32), [1]).eval(), torch.tensor([4, 9, 200, 265, 267])
    model.config.tie_word_embeddings = True
    model.tie_weights()
    settings = {"dtype": torch.float32, "num_speculative_tokens": 4, "checkpoint_step": 7}
    draft_model.export_draft_model(model, target, tmp_path / "export", vocabulary_ids=ids, **settings)
    exported = load_draft_model(tmp_path / "export", torch.float32)
    assert not exported.config.tie_word_embeddings
    assert torch.equal(exported.get_input_embeddings().weight, model.get_input_embeddings().weight)
    with torch.inference_mode():
        assert torch.equal(exported(TEXT).logits[..., ids], model(TEXT).logits[..., ids])
        assert set(exported(TEXT).logits.argmax(-1).flatten().tolist()) <= set(ids.tolist())


def test_a_full_vocabulary_has_no_such_limit(target: Target, tmp_path: Path) -> None:
    assert not [x for x in export_draft(target, tmp_path / "export").known_limits if "vocabulary" in x]
    assert not (tmp_path / "export" / VOCABULARY_FILE).exists()


def test_x10_the_exported_eos_set_is_the_targets(target: Target, tmp_path: Path) -> None:
    export_draft(target, tmp_path / "export")
    eos = target.identity.eos_token_ids
    assert len(eos) == 2, "the fixture's configuration and generation configuration must differ"
    assert AutoConfig.from_pretrained(tmp_path / "export").eos_token_id == eos
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == eos
    assert AutoTokenizer.from_pretrained(tmp_path / "export").eos_token_id in eos


@pytest.mark.parametrize(
    ("generation", "listed"),
    [([265, 267], ["config.json [267], generation_config.json [265, 267], tokenizer [267]"]), (267, []), (None, [])],
)
def test_x10_eos_ids_that_the_targets_files_name_differently_are_listed(
    target: Target, tmp_path: Path, generation: list[int] | int | None, listed: list[str]
) -> None:
    shutil.copytree(target.path, tmp_path / "target")
    (tmp_path / "target/generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    record = export_draft(open_target(str(tmp_path / "target")), tmp_path / "export")
    found = [limit for limit in record.known_limits if "EOS" in limit]
    assert found == [f"the target names its EOS ids differently ({t}); the draft has all of them" for t in listed]


def test_x9_x11_the_tokenizer_is_the_targets_byte_for_byte(target: Target, tmp_path: Path) -> None:
    export_draft(target, tmp_path / "export")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "export" / name).read_bytes() == (target.path / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert len(tokenizer) == len(target.tokenizer)
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert tokenizer.chat_template == target.tokenizer.chat_template


def test_x9_x11_added_tokens_and_a_list_of_special_ones_survive_the_export(target: Target, tmp_path: Path) -> None:
    """As transformers 5 saves them; two of them have embeddings, by which the target was resized."""
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|a|>"]})
    directory = tmp_path / "target"
    make_tiny_llama(len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    assert read(directory / "tokenizer_config.json")["extra_special_tokens"] == ["<|im_start|>", "<|a|>"]
    export_draft(open_target(str(directory)), tmp_path / "export")
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert len(reloaded) == len(tokenizer) == target.identity.vocab_size + 3
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    text = "<tool>the<|a|></tool>"
    ids = reloaded(text)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]
    assert len(ids) == 4, "each added token is one"
    assert (tmp_path / "export/tokenizer_config.json").read_bytes() == (
        directory / "tokenizer_config.json"
    ).read_bytes()


def test_x6_a_qwen2_like_draft_keeps_its_biases(target: Target, tmp_path: Path) -> None:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(
        **size, vocab_size=target.identity.vocab_size, num_hidden_layers=1, initializer_range=0.3, use_cache=False
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    biases = {name: tensor for name, tensor in model.named_parameters() if name.endswith("bias")}
    for bias in biases.values():
        torch.nn.init.normal_(bias)
    export_draft(target, tmp_path / "export", model)
    written = load_file(tmp_path / "export/model.safetensors")
    assert {name.split(".")[-2] for name in written if name.endswith("bias")} == {"q_proj", "k_proj", "v_proj"}
    assert written.keys() == dict(model.named_parameters()).keys()
    reloaded = load_draft_model(tmp_path / "export", torch.float32)
    with torch.inference_mode():
        assert torch.equal(reloaded(TEXT).logits, model(TEXT).logits)


def test_a_target_without_tokenizer_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no tokenizer files"):
        copy_tokenizer(tmp_path, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_older_readers_find_rope_theta_and_torch_dtype(target: Target, tmp_path: Path, dtype: str) -> None:
    model = prune_layers(target.load_model(torch.float32), [1])
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 54321.0}
    export_draft(target, tmp_path / "export", model, getattr(torch, dtype))
    config = read(tmp_path / "export/config.json")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 54321.0
    assert config["torch_dtype"] == config["dtype"] == dtype
    assert AutoConfig.from_pretrained(tmp_path / "export").rope_parameters["rope_theta"] == 54321.0


SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_older_readers_find_the_scaling_of_rotary_embeddings(target: Target, tmp_path: Path) -> None:
    config = make_tiny_llama(target.identity.vocab_size, layers=1).config
    config.rope_parameters = {**SCALED, "rope_theta": 54321.0}
    model = LlamaForCausalLM(config).eval()
    export_draft(target, tmp_path / "export", model)
    written = read(tmp_path / "export/config.json")
    assert (written["rope_scaling"], written["rope_theta"]) == (SCALED, 54321.0)
    reloaded = load_draft_model(tmp_path / "export", torch.float32)
    assert reloaded.config.rope_parameters == config.rope_parameters, "newer readers read both keys alike"
    with torch.inference_mode():
        assert torch.equal(reloaded(TEXT).logits, model(TEXT).logits)


@pytest.mark.parametrize(
    ("rope", "legacy"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, {"rope_theta": 1e4}),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ({}, {}),
    ],
    ids=["plain", "part of a head", "by kind of layer", "no rotary embedding"],
)
def test_older_readers_keys_of_rotary_embeddings(rope: dict, legacy: dict) -> None:
    assert draft_model._legacy_rope(rope) == legacy


def test_files_that_nobody_may_write_are_copied_without_their_mode(target: Target, tmp_path: Path) -> None:
    source = Path(shutil.copytree(target.path, tmp_path / "target"))
    for file in source.iterdir():
        file.chmod(0o444)
    export_draft(replace(target, path=source), tmp_path / "export")
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "export").iterdir()}
    assert "tokenizer.json" in modes
    assert [name for name, mode in modes.items() if not mode & 0o200] == []


def test_transformers_drafts_with_the_export_as_it_is(target: Target, tmp_path: Path) -> None:
    export_draft(target, tmp_path / "export")
    model = target.load_model(torch.float32)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert assistant.generation_config.num_assistant_tokens == 4
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(TEXT)}
    alone = model.generate(TEXT, **options)
    assert torch.equal(model.generate(TEXT, assistant_model=assistant, **options), alone)


# The record


@pytest.mark.parametrize("export", [export_draft, export_heads])
def test_the_record_comes_back_and_other_files_may_lie_beside(target: Target, tmp_path: Path, export) -> None:
    record = export(target, tmp_path / "export")
    (tmp_path / "export/report.json").write_text("{}")
    assert read_record(tmp_path / "export") == record
    assert record.target == target.identity
    assert record.checkpoint_step == 7
    assert record.lossless
    assert record.speculative_config["model"] == "."
    written = {p.name for p in (tmp_path / "export").iterdir()}
    assert set(record.files) == written - {EXPORT_FILE, "report.json"}


def test_the_same_drafter_has_the_same_hash_and_another_has_not(target: Target, tmp_path: Path) -> None:
    first, again = (export_heads(target, tmp_path / name) for name in ("a", "b"))
    other = export_heads(target, tmp_path / "c", make_heads(num_heads=4))
    assert first.drafter_sha256 == again.drafter_sha256 != other.drafter_sha256


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_an_altered_file_is_found(target: Target, tmp_path: Path, name: str) -> None:
    export_draft(target, tmp_path / "export")
    file = tmp_path / "export" / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{name}: missing, incomplete or altered"):
        read_record(tmp_path / "export")


def test_a_record_whose_hashes_were_altered_is_refused(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export")
    file = tmp_path / "export" / EXPORT_FILE
    data = read(file)
    del data["files"]["config.json"]
    file.write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match=f"{EXPORT_FILE}: drafter_sha256"):
        read_record(tmp_path / "export")


def test_exporting_again_replaces_the_old_export(target: Target, tmp_path: Path) -> None:
    export_draft(target, tmp_path / "export")
    export_heads(target, tmp_path / "export")
    assert not (tmp_path / "export/model.safetensors").exists()
    assert read_record(tmp_path / "export").format == "medusa"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize(
    "found",
    [
        {"a": torch.zeros(2)},
        {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)},
        {"a": torch.zeros(2), "x": torch.zeros(3)},
        {"a": torch.zeros(2), "b": torch.ones(3)},
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.bfloat16)},
    ],
    ids=["missing", "too many", "renamed", "values", "shape", "dtype"],
)
def test_x1_what_was_written_is_compared_with_what_was_meant(tmp_path: Path, found: dict[str, torch.Tensor]) -> None:
    meant = {"a": torch.zeros(2), "b": torch.zeros(3)}
    save_file(meant, tmp_path / "model.safetensors")
    check_read_back(tmp_path, meant)
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match="export again"):
        check_read_back(tmp_path, meant)

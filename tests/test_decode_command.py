"""`specdist decode`: the text is the target's own, colours mark exactly the accepted drafts, bad input is named."""

import io
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from heads_factory import export_heads, make_heads
from registry_factory import empty_database
from test_changed_target import write_adapter
from transformers import AutoModelForCausalLM, GenerationConfig, MistralConfig

from specdist import cli
from specdist.decoding.loop import DecodeResult, decode
from specdist.drafters.adapted_target import adapted_target
from specdist.drafters.prune import prune_layers
from specdist.errors import ArtifactError
from specdist.export.draft_model import export_draft_model
from specdist.export.medusa import export_medusa
from specdist.registry.store import Registry
from specdist.schema import SamplingSpec
from specdist.stages.decode import ACCEPTED, PLAIN, DecodeRequest, comparison_lines, decode_prompt
from specdist.stages.named_drafter import DrafterChoice, find_drafter, open_drafter
from specdist.target import Target, open_target
from specdist.tree import DraftTree

PROMPT, SAMPLING = "the inn", SamplingSpec(max_new_tokens=40)
TREE = DraftTree.of([[i] for i in range(8)] + [[i, j] for i in range(4) for j in range(4)], 3)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDIST_NUM_THREADS", "1")


def save_target(model: torch.nn.Module, directory: Path) -> Path:
    """`model` as a target whose answers are printable ASCII: other tokens have a logit of zero, which is never best."""
    tokenizer = make_tiny_tokenizer()
    for token in range(len(tokenizer)):
        if not re.fullmatch("[ -~]+", tokenizer.decode([token], skip_special_tokens=True)):
            model.lm_head.weight.data[token] = 0.0
    end = tokenizer.eos_token_id
    model.config.eos_token_id, model.generation_config = end, GenerationConfig(eos_token_id=end)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and below draft/, tree/ and heads/ runs with the export of a draft model and of heads. Read only."""
    directory = tmp_path_factory.mktemp("decode")
    target = open_target(str(save_target(make_tiny_llama(268, layers=4, seed=3), directory / "target")))
    model = target.load_model(torch.float32)
    settings = {"dtype": torch.float32, "num_speculative_tokens": 4, "checkpoint_step": 7}
    export_draft_model(prune_layers(model, [0, 2, 3]), target, directory / "draft" / "export", **settings)
    heads = make_heads()
    export_heads(target, directory / "tree" / "export", heads, tree=TREE)
    export_heads(target, directory / "heads" / "export", heads)
    return directory


@pytest.fixture(scope="module")
def target(artefacts: Path) -> Target:
    return open_target(str(artefacts / "target"))


def request(artefacts: Path, drafter: str | None = None, *, ngram: bool = False, tree: bool = False) -> DecodeRequest:
    choice = DrafterChoice(drafter and str(artefacts / drafter), ngram, tree)
    return DecodeRequest(str(artefacts / "target"), PROMPT, choice, SAMPLING, dtype="float32")


def shown(asked: DecodeRequest, *, colour: bool = True) -> tuple[str, str]:
    out, notes = io.StringIO(), io.StringIO()
    decode_prompt(asked, out, notes, colour=colour)
    return out.getvalue(), notes.getvalue()


def prompt_ids(target: Target) -> list[int]:
    messages = [{"role": "user", "content": PROMPT}]
    return target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def marked(target: Target, result: DecodeResult) -> str:
    """The text of a result, by its steps, with each accepted draft in colour."""
    accepted = {step.start + i for step in result.steps for i in range(step.accepted)}
    pieces = [target.tokenizer.decode([token]) for token in result.completion_ids]
    return "".join(f"{ACCEPTED}{piece}{PLAIN}" if i in accepted else piece for i, piece in enumerate(pieces))


@pytest.mark.parametrize(
    ("drafter", "tree", "most"),
    [("draft", False, 4), ("heads", False, 3), ("tree", True, 2), ("ngram", False, 4), (None, False, 0)],
)
def test_the_text_is_the_targets_own_and_colours_mark_what_was_accepted(
    artefacts: Path, target: Target, drafter: str | None, tree: bool, most: int
) -> None:
    asked = request(artefacts, None if drafter == "ngram" else drafter, ngram=drafter == "ngram", tree=tree)
    text, notes = shown(asked)
    opened = open_drafter(asked.choice, target, torch.float32, "cpu")
    settings = (prompt_ids(target), SAMPLING, target.identity.eos_token_ids)
    result = decode(opened.model, *settings, drafter=opened.drafter, num_speculative_tokens=most)
    plain = decode(opened.model, *settings)
    assert re.sub("\033.*?m", "", text) == target.tokenizer.decode(plain.completion_ids) + "\n"
    assert text == marked(target, result) + "\n"
    accepted, drafted = map(int, re.search(r"drafts accepted +(\d+) of (\d+)", notes).groups())
    assert text.count(ACCEPTED) == accepted
    counts = result.counts("p", "d", most)
    assert (accepted, drafted) == (counts.num_accepted_tokens, counts.num_draft_tokens)
    assert re.search(rf"tokens per step \(τ\) +{1 + accepted / counts.num_drafts:.2f}\n", notes)
    if drafter in ("draft", "tree"):
        assert accepted > 2, "the test must see accepted drafts"


def test_without_colour_the_output_is_the_text_and_nothing_else(artefacts: Path, target: Target) -> None:
    coloured, _ = shown(request(artefacts, "draft"))
    text, notes = shown(request(artefacts, "draft"), colour=False)
    assert text == re.sub("\033.*?m", "", coloured)
    assert "green" not in notes
    assert "acceptance rate" in notes


def test_the_target_alone_follows_on_request(artefacts: Path) -> None:
    for policy in ("confidence", "last-block", "acceptance", "pays"):
        text, notes = shown(replace(request(artefacts, "draft"), policy=policy, beside_target=True), colour=False)
        first, second = text.splitlines()
        assert first == second
        assert "text: the same as the target alone writes" in notes
        assert re.search(r"speed: \d+\.\d\d times the target alone's", notes)
        assert len(re.search(r"tokens per second +([\d.]+) +([\d.]+)\n", notes).groups()) == 2
    sampled = replace(SAMPLING, temperature=1.0)
    text, notes = shown(replace(request(artefacts, "draft"), sampling=sampled, beside_target=True), colour=False)
    assert "not expected to be the same" in notes
    assert shown(replace(request(artefacts, "draft"), sampling=sampled), colour=False)[0] == text.splitlines()[0] + "\n"


def test_where_texts_part_is_said(artefacts: Path) -> None:
    def result(*ids: int) -> DecodeResult:
        return DecodeResult(list(ids), "length", prefill_seconds=0.5)

    asked = replace(request(artefacts, "draft"), dtype="bfloat16")
    speed, text = comparison_lines(result(5, 6, 7, 8), result(5, 6, 9), asked)
    assert "speed: 1.33 times" in speed
    assert "differs from token 3 on" in text
    assert text.endswith("--dtype float32 tells")
    assert "differs from token 3 on" in comparison_lines(result(5, 6), result(5, 6, 9), asked)[1]


def test_a_target_that_the_drafter_changed_is_the_one_that_answers(
    artefacts: Path, target: Target, tmp_path: Path
) -> None:
    adapter = write_adapter(target, tmp_path / "adapter", 0.3)
    weight = target.load_model(torch.float32).get_output_embeddings().weight
    settings = {"dtype": torch.float32, "num_speculative_tokens": 3, "checkpoint_step": 7, "adapter": adapter}
    export_medusa(make_heads(), weight, target, tmp_path / "export", **settings)
    asked = replace(request(artefacts), choice=DrafterChoice(str(tmp_path)))
    text, notes = shown(asked, colour=False)
    changed = adapted_target(target, adapter).load_model(torch.float32)
    expected = decode(changed, prompt_ids(target), SAMPLING, target.identity.eos_token_ids).completion_ids
    assert text == target.tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert text != shown(request(artefacts), colour=False)[0]
    assert "change the target" in notes


def test_a_version_of_the_registry_is_found_by_its_name(artefacts: Path, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(empty_database())
    Registry(tmp_path, "mine").publish(artefacts / "draft" / "export", files={}, tags={}, expected_champion=None)
    for name in ("mine", "mine@1"):
        assert find_drafter(name, tmp_path) == tmp_path / "mine" / "versions" / "1"
    assert find_drafter(str(artefacts / "draft"), tmp_path) == artefacts / "draft" / "export"
    with pytest.raises(ArtifactError, match=r"no export\.json, .* has the models \['mine'\]"):
        find_drafter("yours", tmp_path)


def command(artefacts: Path, *argv: object) -> list[str]:
    return ["decode", "--target", str(artefacts / "target"), "--dtype", "float32", *map(str, argv)]


def test_the_command_reads_standard_input_and_colours_a_terminal_alone(
    artefacts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = command(artefacts, "--drafter", artefacts / "draft", "--max-new-tokens", 40)
    expected, _ = shown(request(artefacts, "draft"))
    plain = re.sub("\033.*?m", "", expected)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    assert cli.main(asked) == 0
    assert capsys.readouterr().out == plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main([*asked, PROMPT]) == 0
    assert capsys.readouterr().out == expected
    assert cli.main([*asked, PROMPT, "--no-color"]) == 0
    assert capsys.readouterr().out == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main([*asked, PROMPT, "--stop", plain[10:14]]) == 0
    assert capsys.readouterr().out.strip() in plain[:17]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([" "], "the prompt is empty"),
        (["<|im_end|>"], "control tokens"),
        (["a" * 600], r"the prompt has \d+ tokens, and the target's context ends at 512"),
        (["p", "--drafter", "nowhere"], r"nowhere: no export\.json, .* there is no registry"),
        (["p", "--drafter", "."], r"no export\.json there"),
        (["p", "--drafter", "draft", "--tree"], "a draft model has no draft tree"),
        (["p", "--drafter", "heads", "--tree"], "no draft tree lies with these heads"),
        (["p", "--ngram", "--tree"], "name the drafter that it lies with"),
        (["p", "--drafter", "heads", "--num-speculative-tokens", "4"], "4: expected 1 to 3, a token of each head"),
        (["p", "--drafter", "tree", "--tree", "--num-speculative-tokens", "3"], "3: expected 1 to 2, the levels"),
        (["p", "--ngram", "--num-speculative-tokens", "0"], "0: expected 1 or more"),
        (["p", "--num-speculative-tokens", "2"], "nothing drafts"),
        (["p", "--beside-target"], "nothing drafts"),
        (["p", "--top-p", "0"], "top_p 0.0"),
    ],
)
def test_bad_input_is_named(
    artefacts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.chdir(artefacts)
    assert cli.main(command(artefacts, *argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(f"error: .*{message}.*\n", captured.err)


def test_a_drafter_of_another_target_is_refused(
    artefacts: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("draft", "heads"):
        assert cli.main(["decode", "p", "--target", str(tiny_target_dir), "--drafter", str(artefacts / name)]) == 2
        assert "but the export was made for target with" in capsys.readouterr().err


def test_e11_a_tree_on_a_sliding_window_is_refused_and_a_chain_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = MistralConfig(
        vocab_size=268,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    directory = save_target(AutoModelForCausalLM.from_config(config).eval(), tmp_path / "target")
    export_heads(open_target(str(directory)), tmp_path / "export", tree=DraftTree.chain(2))
    asked = [*command(tmp_path, PROMPT, "--drafter", tmp_path / "export"), "--max-new-tokens", "20"]
    assert cli.main([*asked, "--tree"]) == 2
    assert "a chain works: draft without a tree" in capsys.readouterr().err
    assert cli.main(asked) == 0
    shutil.rmtree(tmp_path / "export")
    with_heads = capsys.readouterr().out
    assert cli.main([*command(tmp_path, PROMPT), "--max-new-tokens", "20"]) == 0
    assert capsys.readouterr().out == with_heads


def test_e14_a_target_with_another_chat_template_is_warned_of(
    artefacts: Path, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choice = DrafterChoice(str(artefacts / "draft"))
    open_drafter(choice, target, torch.float32, "cpu")
    assert "chat_template" not in caplog.text
    shutil.copytree(target.path, tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    open_drafter(choice, open_target(str(tmp_path / "other")), torch.float32, "cpu")
    assert (
        "target other: its chat_template is not the one that the drafter was trained and measured with" in caplog.text
    )

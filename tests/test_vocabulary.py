"""Which ids a draft may propose: the shared ones, a reduced set, and none of the padding; replay equals the decoder."""

import logging
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdist.dataset.token_statistics import completion_counts, sample_texts
from specdist.decoding.loop import decode
from specdist.drafter_config import DraftArguments
from specdist.drafters.base import DecodeContext
from specdist.drafters.causal_lm import DraftModelDrafter, fitted_vocabulary, load_for_drafting
from specdist.drafters.initial import make_draft_model
from specdist.drafters.prune import prune_layers
from specdist.drafters.vocabulary import (
    VOCABULARY_FILE,
    DraftVocabulary,
    check_same_tokenizer,
    mute_padding,
    read_vocabulary,
    restrict_projection,
    select_vocabulary,
    shared_vocabulary_size,
    write_vocabulary,
)
from specdist.errors import ArtifactError, ConfigError, TokenizerMismatch
from specdist.evaluation.acceptance import DraftModelScorer, EvalSet, target_pass
from specdist.evaluation.certify import certify_greedy, certify_sampled
from specdist.provenance import read_json, write_json
from specdist.schema import DistillRow, SamplingSpec
from specdist.target import Target, open_target
from specdist.verify import served_logprobs

GREEDY, SAMPLED = SamplingSpec(max_new_tokens=24), SamplingSpec(temperature=0.9, top_p=0.9, top_k=20, max_new_tokens=24)
EOS = [3]


def make_tokenizer(**ids: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="u")), unk_token="u")


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    return make_tokenizer(u=0, **{f"w{i}": i for i in range(1, size)})


def target_with(directory: Path, rows: int, tokenizer: PreTrainedTokenizerFast) -> Target:
    tokenizer.chat_template, tokenizer.eos_token = "{{ messages }}", "w3"
    model = make_tiny_llama(rows)
    model.config.eos_token_id = EOS
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return open_target(str(directory))


def row(i: int, prompt: list[int], completion: list[int], sampling: SamplingSpec) -> DistillRow:
    return DistillRow(f"r{i}", f"p{i}", 0, 0, "d", prompt, completion, "length", sampling, i)


# One tokenizer


def test_d7_two_swapped_entries_are_named() -> None:
    ours = make_tokenizer(u=0, x=1, y=2, a=3, b=4, c=5, d=6, e=7)
    theirs = make_tokenizer(u=0, x=1, y=2, a=4, b=3, c=5, d=6, e=7)
    with pytest.raises(TokenizerMismatch, match=r"first at token 'a': target id 3, draft id 4 \(8 and 8 tokens"):
        check_same_tokenizer(ours, theirs, "other")


def test_d7_a_special_token_with_another_id_is_named() -> None:
    ours, theirs = tokenizer_of(8), tokenizer_of(8)
    ours.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    theirs.add_special_tokens({"additional_special_tokens": ["<b>", "<a>"]})
    with pytest.raises(TokenizerMismatch, match="first at token '<a>': target id 8, draft id 9"):
        check_same_tokenizer(ours, theirs, "other")


def test_e4_a_token_that_the_draft_lacks_is_named() -> None:
    with pytest.raises(TokenizerMismatch, match="first at token 'w7': target id 7, draft id None"):
        check_same_tokenizer(tokenizer_of(8), tokenizer_of(7), "other")


def test_d7_another_eos_of_the_same_ids_is_told_and_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    """A base model drafts for its instruct model: every id means the same, and the draft learns the target's end."""
    target, draft = make_tiny_tokenizer(), make_tiny_tokenizer()
    draft.eos_token = "<|endoftext|>"
    caplog.set_level(logging.INFO)
    check_same_tokenizer(target, draft, "base")
    assert "draft model base: its texts end in <|endoftext|>, the target's in <|im_end|>" in caplog.text


@pytest.mark.parametrize("special", [True, False])
def test_x7_a_special_token_beyond_the_targets_is_no_difference_and_any_other_is(special: bool) -> None:
    ours, theirs = tokenizer_of(8), tokenizer_of(8)
    theirs.add_tokens(["[PAD]"], special_tokens=special)
    if special:
        theirs.pad_token = "[PAD]"
        check_same_tokenizer(ours, theirs, "padded")
    else:
        with pytest.raises(TokenizerMismatch, match=r"'\[PAD\]': target id None, draft id 8"):
            check_same_tokenizer(ours, theirs, "padded")


def test_the_same_tokenizer_read_twice_is_the_same() -> None:
    check_same_tokenizer(make_tiny_tokenizer(), make_tiny_tokenizer(), "twin")


# Padding


@pytest.mark.parametrize(
    ("shared", "target_rows", "draft_rows"), [(110, 128, 120), (990, 1000, 1024), (990, 1024, 1000)], ids=str
)
def test_e3_t5_ids_beyond_the_tokenizer_are_never_proposed(
    tmp_path: Path, shared: int, target_rows: int, draft_rows: int
) -> None:
    """The draft's padding rows are made its favourites; both pass decoding and replay, which agree."""
    target = target_with(tmp_path / "target", target_rows, tokenizer_of(shared))
    assert shared_vocabulary_size(target) == shared
    make_tiny_llama(draft_rows, seed=3).save_pretrained(tmp_path / "given")
    target.tokenizer.save_pretrained(tmp_path / "given")
    draft, _ = make_draft_model(DraftArguments(init=str(tmp_path / "given")), target)
    with torch.no_grad():
        draft.lm_head.weight[shared::2] = 50 * draft.lm_head.weight[0]
        draft.lm_head.weight[shared + 1 :: 2] = -50 * draft.lm_head.weight[0]
    draft.save_pretrained(tmp_path / "draft")
    model, vocabulary = load_for_drafting(tmp_path / "draft", target, torch.float32)
    drafter, scorer = DraftModelDrafter(model, vocabulary), DraftModelScorer(model, vocabulary)
    for sampling in (None, SAMPLED):
        drafter.reset()
        proposal = drafter.propose(DecodeContext([1, 2, 5], sampling, torch.Generator().manual_seed(0)), 40)
        assert int(proposal.token_ids.max()) < shared
        if sampling is not None:
            assert proposal.probs.shape == (40, target_rows)
            assert float(proposal.probs[:, shared:].abs().max()) == 0.0
            torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(40))
    assert not int(model(torch.tensor([[1, 2, 5]])).logits[0, -1].argmax()) < shared, "else nothing was tested"
    certify(target.load_model(torch.float32), drafter, scorer)


def certify(model, drafter: DraftModelDrafter, scorer: DraftModelScorer, count: int = 5) -> tuple:
    prompts = [[4 + i, 9, 30 + i] for i in range(count)]
    texts = []
    for i, prompt in enumerate(prompts):
        answer = decode(model, prompt, GREEDY, EOS)
        texts.append(target_pass(model, row(i, prompt, answer.completion_ids, GREEDY), GREEDY))
    greedy, fidelity = certify_greedy(model, drafter, scorer, EvalSet(GREEDY, texts), 3, EOS)
    assert greedy.passed, greedy
    assert not fidelity.divergences
    sampled = certify_sampled(model, drafter, scorer, EvalSet(SAMPLED, texts), 3, EOS)
    assert sampled.passed, sampled
    return greedy, sampled


def test_x7_muted_rows_cannot_win_whatever_they_were() -> None:
    model = make_tiny_llama(300, seed=5)
    with torch.no_grad():
        model.lm_head.weight[280:] *= 50
    ids = torch.randint(0, 280, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = model(ids).logits[0]
        mute_padding(model, 280)
        after = model(ids).logits[0]
    assert int(before.argmax(-1).max()) >= 280
    assert int(after.argmax(-1).max()) < 280
    assert torch.equal(after[:, :280], before[:, :280])
    assert float(after.softmax(-1)[:, 280:].max()) <= 1 / 280


# A reduced vocabulary


@pytest.mark.parametrize(
    ("counts", "size", "always", "expected"),
    [
        ([0, 5, 9, 1, 7], 2, [], [2, 4]),
        ([0, 5, 9, 1, 7], 2, [0], [0, 2]),
        ([3, 3, 3, 3, 9], 3, [], [0, 1, 4]),
        ([0, 0, 0, 2, 0], 3, [4], [0, 3, 4]),
        ([1, 2], 2, [1, 1], [0, 1]),
    ],
)
def test_the_most_frequent_ids_are_taken(counts: list[int], size: int, always: list[int], expected: list[int]) -> None:
    assert select_vocabulary(torch.tensor(counts), size, always).tolist() == expected


@pytest.mark.parametrize(("size", "always"), [(6, []), (1, [0, 1]), (0, [0]), (2, [5]), (2, [-1])])
def test_a_vocabulary_that_cannot_be_is_refused(size: int, always: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab_size|ids .* must be in"):
        select_vocabulary(torch.ones(5), size, always)


def test_only_what_the_target_wrote_is_counted() -> None:
    examples = Dataset.from_dict(
        {"input_ids": [[7, 7, 1, 2], [7, 2, 2]], "labels": [[-100, -100, 1, 2], [-100, 2, 2]], "prompt_length": [2, 1]}
    ).select([1, 0])
    assert completion_counts(examples, 5).tolist() == [0, 1, 3, 0, 0]
    assert sample_texts(examples, num_texts=9, max_tokens=2) == [[7, 2], [7, 7]]


def test_a_vocabulary_comes_back_from_disk_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None
    write_vocabulary(tmp_path, torch.tensor([1, 5, 8]), 9)
    assert torch.equal(read_vocabulary(tmp_path), torch.tensor([1, 5, 8]))
    for ids in ([], [5, 1], [1, 1], [1, 9], [-1, 2]):
        write_json(tmp_path / VOCABULARY_FILE, {**read_json(tmp_path / VOCABULARY_FILE), "token_ids": ids})
        with pytest.raises(ArtifactError, match=VOCABULARY_FILE):
            read_vocabulary(tmp_path)


def test_a_vocabulary_of_another_target_is_refused(tmp_path: Path) -> None:
    target = target_with(tmp_path / "target", 60, tokenizer_of(50))
    make_tiny_llama(60, seed=3).save_pretrained(tmp_path / "draft")
    write_vocabulary(tmp_path / "draft", torch.tensor([3, 55]), 60)
    with pytest.raises(ArtifactError, match="has id 55, the target's tokenizer ends at 49"):
        load_for_drafting(tmp_path / "draft", target, torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_the_projection_is_cut_to_the_ids_and_the_embeddings_are_not(tied: bool, tmp_path: Path) -> None:
    target = target_with(tmp_path / "target", 60, tokenizer_of(60))
    model, ids = make_tiny_llama(60, seed=3), torch.tensor([3, 8, 20, 59])
    if tied:
        model.lm_head.weight, model.config.tie_word_embeddings = model.model.embed_tokens.weight, True
    model.save_pretrained(tmp_path / "draft")
    write_vocabulary(tmp_path / "draft", ids, 60)
    reduced, vocabulary = load_for_drafting(tmp_path / "draft", target, torch.float32)
    assert torch.equal(vocabulary.ids, ids)
    assert reduced.get_input_embeddings().weight.shape[0] == 60
    assert reduced.get_output_embeddings().weight.shape[0] == 4
    text = torch.tensor([[1, 55, 30, 59]])
    with torch.inference_mode():
        torch.testing.assert_close(reduced(text).logits, model(text).logits[..., ids])


def test_a_projection_that_was_not_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="60 vocabulary rows for a reduced vocabulary of 2"):
        fitted_vocabulary(make_tiny_llama(60), DraftVocabulary(torch.tensor([3, 8]), 60))


def reduced_pair() -> tuple:
    target = make_tiny_llama(60, layers=4)
    ids = torch.tensor([3, 5, *range(10, 40, 2), 41, 59])
    vocabulary = DraftVocabulary(ids, 60)
    draft = restrict_projection(prune_layers(target, [0, 1, 3]).eval(), vocabulary)
    return target, draft, vocabulary


def test_drafts_come_from_the_reduced_distribution() -> None:
    _, draft, vocabulary = reduced_pair()
    drafter = DraftModelDrafter(draft, vocabulary)
    context = DecodeContext([1, 2, 5], SAMPLED, torch.Generator().manual_seed(0))
    proposal = drafter.propose(context, 6)
    assert set(proposal.token_ids.tolist()) <= set(vocabulary.ids.tolist())
    text = torch.tensor([[1, 2, 5, *proposal.token_ids[:-1].tolist()]])
    with torch.inference_mode():
        expected = torch.zeros(6, 60)
        expected[:, vocabulary.ids] = served_logprobs(draft(text).logits[0, 2:], SAMPLED).exp()
    torch.testing.assert_close(proposal.probs, expected)


def test_replay_of_a_reduced_draft_equals_the_real_decoder() -> None:
    target, draft, vocabulary = reduced_pair()
    greedy, sampled = certify(target, DraftModelDrafter(draft, vocabulary), DraftModelScorer(draft, vocabulary), 12)
    assert greedy.decoder_mean_accepted_length > 1.0
    assert sampled.decoder_mean_accepted_length > 1.0


def test_a_token_outside_the_vocabulary_is_never_accepted() -> None:
    _, draft, vocabulary = reduced_pair()
    completion = [11, 12, 13, 58, 59]  # 12 and 59 are in
    scorer = DraftModelScorer(draft, vocabulary)
    text = target_pass(reduced_pair()[0], row(0, [1, 2], completion, SAMPLED), SamplingSpec(temperature=0.9))
    accepts = scorer.accept(text, SamplingSpec(temperature=0.9))
    assert set(accepts) == {"greedy", "probabilistic"}
    for method, accept in accepts.items():
        for position, token in enumerate(completion):
            if token not in (12, 59) or method == "probabilistic":
                assert (float(accept[position, 0]) > 0) == (token in (12, 59)), (method, token)

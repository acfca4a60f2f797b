"""The engines on vLLM against the model itself: a tiny one, whose own defaults would change every draw.

Needs vLLM: in its environment, `python -m pytest -m vllm tests/test_vllm_engine.py`.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.check_vllm import ENGINE_ENVIRONMENT
from scripts.vllm_server import serve
from specdist.errors import ArtifactError
from specdist.generation.endpoint import TokenizerProbe
from specdist.generation.engine import Answer, Engine, Request
from specdist.generation.server import ServerEngine
from specdist.generation.vllm import VllmEngine
from specdist.schema import SamplingSpec
from specdist.verify import served_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

EOS = [266, 267, *range(5)]  # many, so that rows end at different steps
CONTEXT = 128
GREEDY = SamplingSpec(max_new_tokens=24)
SAMPLED = SamplingSpec(temperature=2.0, top_k=20, top_p=0.9, max_new_tokens=24)  # the model is sure of itself
MESSAGES = [{"role": "user", "content": "the other one"}]
SETTINGS = {"eos_token_ids": EOS, "max_in_flight": 8, "num_top_logprobs": 4}


@pytest.fixture(scope="module")
def model(tiny_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Heads of 32 dimensions: vLLM on a CPU knows no smaller ones."""
    return make_tiny_llama(len(tiny_tokenizer), hidden=128)


@pytest.fixture(scope="module")
def target(
    model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("served") / "target"
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.2,
        top_k=3,
        repetition_penalty=2.0,
        max_new_tokens=5,
        eos_token_id=list(range(250)),
    )
    model.save_pretrained(directory)
    tiny_tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def in_process(target: Path) -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENGINE_ENVIRONMENT.items():
            if name not in os.environ and name != "VLLM_ENABLE_V1_MULTIPROCESSING":
                patch.setenv(name, value)
        engine = VllmEngine(target, "float32", **SETTINGS, context_length=CONTEXT, enforce_eager=True)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def server(target: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Iterator[ServerEngine]:
    log = target.parent / "server.log"
    with serve(
        sys.executable, target, dtype="float32", context_length=CONTEXT, max_num_seqs=8, cores="nobind", log=log
    ) as started:
        started.wait()
        ids = tiny_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
        yield ServerEngine(
            [started.url], model=None, target_names=[str(target)], probes=[TokenizerProbe(MESSAGES, ids)], **SETTINGS
        )


@pytest.fixture(params=["in_process", "server"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


def requests(sampling: SamplingSpec, number: int = 20) -> list[Request]:
    return [Request(f"r{i}", [72 + i, 101, 108][: 1 + i % 3], sampling, seed=2**59 + i) for i in range(number)]


def run(engine: Engine, items: list[Request]) -> dict[str, Answer]:
    rest = iter(items)
    answers = list(engine.answers(lambda: next(rest, None)))
    assert sorted(a.request.key for a in answers) == sorted(r.key for r in items)
    return {answer.request.key: answer for answer in answers}


def logprobs(model: LlamaForCausalLM, answer: Answer) -> torch.Tensor:
    """Of the model alone, at temperature 1, for each token of the answer: [n, V]."""
    prompt, ids = answer.request.prompt_ids, answer.completion_ids
    with torch.inference_mode():
        return model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def greedy(model: LlamaForCausalLM, prompt_ids: list[int]) -> list[int]:
    """The best next token, over and over, until one of EOS."""
    ids = list(prompt_ids)
    with torch.inference_mode():
        while len(ids) - len(prompt_ids) < GREEDY.max_new_tokens and (
            len(ids) == len(prompt_ids) or ids[-1] not in EOS
        ):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


def test_greedy_answers_are_the_models_own(engine: Engine, model: LlamaForCausalLM) -> None:
    answers = run(engine, requests(GREEDY))
    assert {answer.finish_reason for answer in answers.values()} == {"stop", "length"}
    for answer in answers.values():
        assert answer.completion_ids == greedy(model, answer.request.prompt_ids)
        assert answer.finish_reason == ("stop" if answer.completion_ids[-1] in EOS else "length")


def test_logprobs_of_sampled_answers_are_those_at_temperature_1(engine: Engine, model: LlamaForCausalLM) -> None:
    answers = run(engine, requests(SAMPLED))
    surprises = 0
    for answer in answers.values():
        best = logprobs(model, answer).topk(4)
        assert answer.top.ids == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(answer.top.logprobs), best.values, atol=1e-3, rtol=0)
        surprises += sum(i not in ids for i, ids in zip(answer.completion_ids, answer.top.ids, strict=True))
    assert surprises  # tokens that vLLM adds to the four best, and that are dropped


def test_draws_belong_to_the_row(engine: Engine) -> None:
    together = run(engine, requests(SAMPLED))
    alone = run(engine, requests(SAMPLED)[7:8])
    assert alone["r7"].completion_ids == together["r7"].completion_ids
    same_prompt = [Request(f"s{seed}", [72, 101], SAMPLED, seed) for seed in range(8)]
    assert len({tuple(a.completion_ids) for a in run(engine, same_prompt).values()}) > 4


def test_draws_follow_the_served_distribution(engine: Engine, model: LlamaForCausalLM) -> None:
    number, sampling = 1000, replace(SAMPLED, max_new_tokens=2)
    answers = run(engine, [Request(f"d{i}", [72, 101], sampling, seed=i) for i in range(number)])
    drawn = Counter(answer.completion_ids[0] for answer in answers.values())
    with torch.inference_mode():
        probs = served_logprobs(model(torch.tensor([[72, 101]])).logits[0, -1:], sampling).exp()[0]
    support = probs.nonzero()[:, 0].tolist()
    assert set(drawn) <= set(support)
    assert len(support) > 3
    chi2 = sum((drawn[i] - number * p) ** 2 / (number * p) for i in support if (p := probs[i].item()) * number > 5)
    assert chi2 < len(support) + 5 * (2 * len(support)) ** 0.5  # mean and five deviations


def test_a_conversation_goes_on_after_its_answers(engine: Engine) -> None:
    ready, done = requests(GREEDY, 10), []
    for answer in engine.answers(lambda: ready.pop(0) if ready else None):
        done.append(answer.request.key)
        if answer.request.key.count("+") < 2:
            ids = [*answer.request.prompt_ids, *answer.completion_ids]
            ready.append(Request(f"{answer.request.key}+", ids, GREEDY, seed=0))
    assert sorted(done) == sorted(f"r{i}{'+' * turn}" for i in range(10) for turn in range(3))


def test_the_engine_can_be_used_again_where_the_caller_stopped_early(engine: Engine) -> None:
    rest = iter(requests(GREEDY, 50))
    answers = engine.answers(lambda: next(rest, None))
    next(answers)
    answers.close()
    run(engine, requests(GREEDY, 5))


def test_a_prompt_that_does_not_fit_is_refused(engine: Engine) -> None:
    assert engine.context_length == CONTEXT
    longest = Request("longest", [72] * (CONTEXT - 24), GREEDY, seed=0)
    assert run(engine, [longest])["longest"].completion_ids
    with pytest.raises(ArtifactError, match=r"prompt of 105 and answer of up to 24 tokens.*context has 128"):
        run(engine, [Request("long", [72] * (CONTEXT - 23), GREEDY, seed=0)])


def test_the_name_has_the_version_last(in_process: VllmEngine, server: ServerEngine) -> None:
    assert server.name.rpartition(" ") == ("vllm server", " ", in_process.name.removeprefix("vllm "))

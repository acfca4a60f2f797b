"""The server engine against a small server on loopback that fails in every way that is to be survived or reported."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server_factory import EOS, MESSAGES, PROBE_IDS, FakeServer, expected_ids

from specdist.errors import ArtifactError, ConfigError
from specdist.generation import pool
from specdist.generation.endpoint import TokenizerProbe
from specdist.generation.engine import Answer, Request
from specdist.generation.server import ServerEngine
from specdist.generation.vllm_terms import VllmTerms
from specdist.schema import SamplingSpec

GREEDY = SamplingSpec(max_new_tokens=6)
CHECKS = 1  # completions that the start takes


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for what in ("WAIT", "RECHECK"):
        monkeypatch.setattr(pool, f"FIRST_{what}_SECONDS", 0.02)
        monkeypatch.setattr(pool, f"LONGEST_{what}_SECONDS", 0.05)


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(**behaviour: Any) -> FakeServer:
        servers.append(FakeServer(**behaviour))
        return servers[-1]

    yield start
    for server in servers:
        if not server.is_killed:
            server.kill()
    assert not [t for t in threading.enumerate() if t.name == "specdist-servers"]


def make_engine(*servers: FakeServer, **changes: Any) -> ServerEngine:
    settings: dict[str, Any] = {
        "model": None,
        "target_names": ["org/target", "/models/target"],
        "probes": [TokenizerProbe(MESSAGES, PROBE_IDS)],
        "eos_token_ids": [EOS],
        "max_in_flight": 4,
        "patience": 5.0,
    }
    return ServerEngine([server.url for server in servers], **{**settings, **changes})


def requests(number: int, sampling: SamplingSpec = GREEDY) -> list[Request]:
    return [Request(f"r{i}", [i, 40], sampling, seed=i) for i in range(number)]


def feed(items: list[Request]) -> Callable[[], Request | None]:
    rest = iter(items)
    return lambda: next(rest, None)


def run(engine: ServerEngine, items: list[Request]) -> dict[str, Answer]:
    answers = list(engine.answers(feed(items)))
    assert sorted(a.request.key for a in answers) == sorted(r.key for r in items)
    return {answer.request.key: answer for answer in answers}


# What is asked and taken


def test_every_request_is_answered_by_token_ids(serve: Callable[..., FakeServer]) -> None:
    server = serve()
    engine = make_engine(server)
    assert (engine.name, engine.context_length) == ("vllm server 0.32.0", 64)
    for key, answer in run(engine, requests(20)).items():
        assert answer.completion_ids == expected_ids(answer.request.prompt_ids, 6)
        assert answer.finish_reason == ("stop" if int(key[1:]) % 2 == 0 else "length")
        assert answer.top is None


def test_no_default_of_the_server_shapes_the_draws(serve: Callable[..., FakeServer]) -> None:
    server = serve()
    run(make_engine(server), [Request("a", [3, 4], SamplingSpec(0.8, 50, 0.9, 6, 0.05), seed=77)])
    assert server.bodies[-1] == {
        "model": "target",
        "prompt": [3, 4],
        "max_tokens": 6,
        "min_tokens": 0,
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 77,
        "stop_token_ids": [EOS],
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_the_best_tokens_come_sorted_and_without_the_one_drawn(serve: Callable[..., FakeServer]) -> None:
    engine = make_engine(serve(), num_top_logprobs=3)
    top = run(engine, requests(1))["r0"].top
    assert top is not None
    assert top.ids == [[1000, 1001, 1002]] * 5
    assert top.logprobs == [[-1.0, -2.0, -3.0]] * 5


def test_the_model_may_be_named_and_a_key_sent(serve: Callable[..., FakeServer]) -> None:
    server = serve(model="other-name", root="/elsewhere")
    run(make_engine(server, model="other-name", api_key="secret"), requests(1))
    assert server.keys == {"Bearer secret"}


def test_a_conversation_goes_on_after_its_answers_and_few_are_in_flight(serve: Callable[..., FakeServer]) -> None:
    server = serve(delay=0.01)
    engine = make_engine(server, max_in_flight=3)
    ready = requests(7)
    taken: list[str] = []

    def next_request() -> Request | None:
        if not ready:
            return None
        taken.append(ready[0].key)
        return ready.pop(0)

    done: list[str] = []
    for answer in engine.answers(next_request):
        done.append(answer.request.key)
        assert len(taken) - len(done) <= 3
        if answer.request.key.count("+") < 2:
            ids = [*answer.request.prompt_ids, *answer.completion_ids]
            ready.append(Request(f"{answer.request.key}+", ids, GREEDY, seed=0))
    assert sorted(done) == sorted(f"r{i}{'+' * turn}" for i in range(7) for turn in range(3))
    assert server.most_at_once <= 3


def test_nothing_is_left_where_the_caller_stops_early(serve: Callable[..., FakeServer]) -> None:
    server = serve(delay=0.2)
    engine = make_engine(server)
    answers = engine.answers(feed(requests(50)))
    next(answers)
    began = time.monotonic()
    answers.close()
    assert time.monotonic() - began < 1.0
    assert not [t for t in threading.enumerate() if t.name == "specdist-servers"]
    assert len(server.bodies) < 20


def test_nothing_is_left_where_the_end_comes_while_connections_open(serve: Callable[..., FakeServer]) -> None:
    engine = make_engine(serve(), max_in_flight=16)
    for taken in [2, 5, 9, 14] * 12:
        answers = engine.answers(feed(requests(60)))
        for _ in range(taken):
            next(answers)
        answers.close()
    gc.collect()  # a coroutine that was never awaited, or an open socket, fails the test here
    assert not [t for t in threading.enumerate() if t.name == "specdist-servers"]


# What is survived


def test_a_server_that_dies_half_way_loses_no_row(serve: Callable[..., FakeServer]) -> None:
    first, second = serve(delay=0.01), serve(delay=0.01)
    engine = make_engine(first, second, max_in_flight=8)
    keys = []
    for answer in engine.answers(feed(requests(60))):
        keys.append(answer.request.key)
        if len(keys) == 30:
            second.kill()
    assert sorted(keys) == sorted(f"r{i}" for i in range(60))
    assert min(len(first.bodies), len(second.bodies)) > 10


def test_a_server_that_comes_back_is_used_again(serve: Callable[..., FakeServer]) -> None:
    first, second = serve(delay=0.02), serve(delay=0.02)
    engine = make_engine(first, second)
    before = 0
    for number, _ in enumerate(engine.answers(feed(requests(150)))):
        if number == 20:
            second.kill()
            before = len(second.bodies)
        if number == 60:
            second.start()
    assert len(second.bodies) > before + 10


def test_a_server_that_is_down_at_the_start_may_come_later(
    serve: Callable[..., FakeServer], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = serve(delay=0.02), serve()
    second.kill()
    engine = make_engine(first, second)
    assert f"server {second.url} is down (ConnectError" in caplog.text
    second.start()
    run(engine, requests(100))
    assert len(second.bodies) > 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"model": "else", "root": "else"}, "serves else"), ({"context_length": 32}, "context of 32 tokens")],
)
def test_a_server_that_comes_back_as_something_else_is_not_used(
    serve: Callable[..., FakeServer], caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    first, second = serve(delay=0.02), serve()
    second.kill()
    engine = make_engine(first, second)
    vars(second).update(change)
    second.start()
    run(engine, requests(60))
    assert f"server {second.url} is not used" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failures_that_pass_are_tried_again(serve: Callable[..., FakeServer], status: int) -> None:
    server = serve(fail=lambda number: status if 3 <= number < 14 else None)
    run(make_engine(server), requests(20))
    assert len(server.bodies) >= CHECKS + 20 + 11


def test_an_aborted_request_and_a_timeout_are_tried_again(serve: Callable[..., FakeServer]) -> None:
    aborted = []

    def abort_first(choice: dict[str, Any]) -> None:
        if choice["prompt_token_ids"] == [1, 40] and not aborted:
            aborted.append(choice.update(finish_reason="abort"))

    run(make_engine(serve(alter=abort_first)), requests(5))
    assert aborted
    server = serve()
    engine = make_engine(server, timeout=0.3)
    server.delay = 0.6
    threading.Timer(0.5, lambda: setattr(server, "delay", 0.0)).start()
    run(engine, requests(2))


# What is reported


def best_are(step: dict[str, float]) -> dict[str, Any]:
    """Behaviour of a server that gives these log-probabilities at both tokens of the first answer."""
    return {"alter": lambda choice: choice["logprobs"].update(top_logprobs=[step, step])}


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (
            {"model": "else", "root": "/models/else"},
            r"serves else \(from /models/else\), expected org/target or /models",
        ),
        ({"alter": lambda choice: choice.pop("token_ids")}, "answers without token ids"),
        ({"probe_ids": [5, 6, 8, 9]}, "another tokenizer or chat template.* 4 ids.* 3, the first .* position 2"),
        ({"fail": lambda number: 400}, r"POST /v1/completions: HTTP 400: .*failure"),
        ({"fail": lambda number: 503}, r"no server answers \(.*HTTP 503"),
        ({"alter": lambda choice: choice.update(prompt_token_ids=[1, 5, 6, 7])}, "read other prompt ids"),
        (best_are({"token_id:3": 0.0, "token_id:4": -9999.0}), "not those at temperature 1"),
        (best_are({"token_id:3": 22.0, "token_id:4": 21.0}), "not those at temperature 1"),
        (best_are({"the": -1.0, "a": -2.0}), "of words"),
        ({"alter": lambda choice: choice.pop("logprobs")}, "log-probabilities of 0 tokens, expected 2"),
    ],
)
def test_a_server_that_is_something_else_is_refused_at_the_start(
    serve: Callable[..., FakeServer], behaviour: dict[str, Any], message: str
) -> None:
    good, bad = serve(), serve(**behaviour)
    with pytest.raises(ArtifactError, match=message):
        make_engine(bad, num_top_logprobs=2)
    if "no server answers" not in message:
        with pytest.raises(ArtifactError, match=message):
            make_engine(good, bad, num_top_logprobs=2)


@pytest.mark.parametrize("urls", [[], ["host:8000"], ["http://"], ["http://h:1/", "http://h:1/v1"]])
def test_wrong_urls_are_refused(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        ServerEngine(urls, model=None, target_names=[], probes=[], eos_token_ids=[EOS], max_in_flight=1)


def test_a_refused_request_ends_the_work_with_the_servers_words(serve: Callable[..., FakeServer]) -> None:
    server = serve(fail=lambda number: 400 if number == 5 else None)
    engine = make_engine(server)
    with pytest.raises(ArtifactError, match=r"HTTP 400: .*failure 5"):
        run(engine, requests(20))


def test_a_request_that_always_fails_is_named(serve: Callable[..., FakeServer]) -> None:
    server = serve()
    engine = make_engine(server)
    server.fail = lambda number: 500 if server.bodies[number]["prompt"][0] == 7 else None
    with pytest.raises(ArtifactError, match=r"row r7: 8 attempts failed, the last at .*HTTP 500.*start again"):
        run(engine, requests(20))


def test_work_ends_where_no_server_is_left_for_long(serve: Callable[..., FakeServer]) -> None:
    first, second = serve(), serve()
    engine = make_engine(first, second, patience=0.5)
    answers = engine.answers(feed(requests(1000)))
    next(answers)
    first.kill()
    second.kill()
    with pytest.raises(ArtifactError, match=r"no server has answered for 0 s .*finished rows are safe"):
        list(answers)


def test_a_prompt_that_does_not_fit_the_smallest_context_is_refused(serve: Callable[..., FakeServer]) -> None:
    engine = make_engine(serve(), serve(context_length=32))
    assert engine.context_length == 32
    run(engine, [Request("fits", [1] * 26, GREEDY, 0)])
    with pytest.raises(
        ArtifactError, match=r"row long: prompt of 27 and answer of up to 6 .* context has 32; .*max-model"
    ):
        run(engine, [Request("long", [1] * 27, GREEDY, 0)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "stop"}, "stopped at token .* not in eos_token_ids"),
        ({"token_ids": [9, 9]}, "cut after 2 tokens, asked for 6"),
        ({"finish_reason": "repetition"}, "finish_reason 'repetition'"),
    ],
)
def test_an_answer_that_something_else_ended_is_refused(
    serve: Callable[..., FakeServer], change: dict[str, Any], message: str
) -> None:
    server = serve()
    engine = make_engine(server)
    server.alter = lambda choice: choice.update(change)
    with pytest.raises(ArtifactError, match=message):
        run(engine, requests(2)[1:])


def test_another_model_behind_the_same_url_is_noticed(serve: Callable[..., FakeServer]) -> None:
    server = serve()
    engine = make_engine(server)
    server.model = "else"
    with pytest.raises(ArtifactError, match="answers as model else, expected target"):
        run(engine, requests(1))


def test_d9_an_end_of_text_as_the_last_allowed_token_ends_by_itself() -> None:
    request = requests(1)[0]
    answer = VllmTerms([EOS]).answer(request, [5, 6, 7, 8, 9, EOS], "length", None, "vllm")
    assert answer == Answer(request, [5, 6, 7, 8, 9, EOS], "stop")

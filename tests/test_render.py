"""Rendering: one path from conversation to ids, policies that are counted, turns that await an answer."""

import pytest
from conftest import CHATML, make_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from specdist.dataset.render import PromptRejected, Renderer, history, open_turns
from specdist.errors import ConfigError
from specdist.schema import ChatFormat

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPS_THINKING = (
    "{% for m in messages %}{{ m['role'] + ':' + (m['content'].split('</think>')[-1] if m['role'] == 'assistant' "
    "else m['content']) + '|' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def turns(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["system", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_d5_content_that_spells_a_control_token_is_rejected(tiny_tokenizer: PreTrainedTokenizerFast):
    renderer = Renderer(tiny_tokenizer, ChatFormat())
    with pytest.raises(PromptRejected, match=r"messages\[0\].*<\|im_end\|>") as caught:
        renderer.encode(turns("Explain the tag <|im_end|> and </s> in HTML"))
    assert caught.value.reason == "control_token"


def test_d5_turns_recovered_from_ids_equal_the_messages(tiny_tokenizer: PreTrainedTokenizerFast):
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": f"the tag <|im_end and |im_end|> of {r}\n\n <im_start>"} for r in roles]
    ids = Renderer(tiny_tokenizer, ChatFormat()).encode(messages)
    assert ids.count(tiny_tokenizer.eos_token_id) == 4
    assert ids.count(tiny_tokenizer.convert_tokens_to_ids("<|im_start|>")) == 5  # the answer's opening is the fifth
    assert tiny_tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_m6_prompt_ids_have_exactly_the_templates_bos():
    tokenizer = with_template("{{ bos_token }}" + CHATML)
    tokenizer.add_bos_token = True
    ids = Renderer(tokenizer, ChatFormat()).encode(turns("the other one"))
    assert ids.count(tokenizer.bos_token_id) == 1
    assert (
        ids
        == tokenizer.apply_chat_template(
            turns("the other one"), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    )


def test_m9_the_whole_conversation_is_rendered_at_once():
    default = "{% if messages[0]['role'] != 'system' %}{{ 'DEFAULT|' }}{% endif %}" + CHATML
    tokenizer = with_template(default)
    ids = Renderer(tokenizer, ChatFormat()).encode(turns("a", "b", "c"))
    assert tokenizer.decode(ids).count("DEFAULT|") == 1


def test_m10_each_turn_is_rendered_as_the_server_would_where_the_template_rewrites_history():
    renderer = Renderer(with_template(DROPS_THINKING), ChatFormat())
    messages = [{"role": "user", "content": c} for c in ("q1", "q2")]
    first, second = history(messages, [], 0), history(messages, ["<think>x</think>A"], 1)
    assert renderer.tokenizer.decode(renderer.encode(first)) == "user:q1|assistant:"
    assert renderer.tokenizer.decode(renderer.encode(second)) == "user:q1|assistant:A|user:q2|assistant:"


def test_d2_a_system_turn_is_folded_or_rejected_where_the_template_has_no_system_role():
    tokenizer = with_template(NO_SYSTEM + CHATML)
    folding = Renderer(tokenizer, ChatFormat(system_role="fold"))
    messages = turns("be brief", "why?", first="system")
    assert not folding.has_system_role
    assert folding.encode(messages) == folding.encode(turns("be brief\n\nwhy?"))
    assert folding.actions == {"system_turn_folded": 1}
    with pytest.raises(PromptRejected) as caught:
        Renderer(tokenizer, ChatFormat(system_role="reject")).encode(messages)
    assert caught.value.reason == "system_role"
    with pytest.raises(ConfigError, match="no system role"):
        Renderer(tokenizer, ChatFormat(system_prompt="be brief", system_role="reject"))


def test_d2_a_template_that_leaves_system_turns_out_has_no_system_role():
    silent = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"
    assert not Renderer(with_template(silent), ChatFormat()).has_system_role


def test_the_system_prompt_stands_before_conversations_without_one(tiny_tokenizer: PreTrainedTokenizerFast):
    renderer = Renderer(tiny_tokenizer, ChatFormat(system_prompt="be brief"))
    plain = Renderer(tiny_tokenizer, ChatFormat())
    assert renderer.encode(turns("why?")) == plain.encode(turns("be brief", "why?", first="system"))
    own = turns("be long", "why?", first="system")
    assert renderer.encode(own) == plain.encode(own)
    with pytest.raises(ConfigError, match=r"system_prompt.*control tokens"):
        Renderer(tiny_tokenizer, ChatFormat(system_prompt="a <|im_end|>"))


def test_template_arguments_and_tools_reach_the_template():
    tokenizer = with_template("{{ 'think ' if enable_thinking else 'quick ' }}{{ tools | length if tools else 0 }}")
    chat_format = ChatFormat(template_arguments={"enable_thinking": True}, tools=[{"type": "function"}] * 2)
    assert tokenizer.decode(Renderer(tokenizer, chat_format).encode(turns("q"))) == "think 2"
    assert tokenizer.decode(Renderer(tokenizer, ChatFormat()).encode(turns("q"))) == "quick 0"


def test_d1_a_template_that_refuses_the_messages_rejects_that_prompt_only():
    tokenizer = with_template("{% if messages[0]['content'] == 'no' %}{{ raise_exception('refused') }}{% endif %}x")
    good, bad = Renderer(tokenizer, ChatFormat()).encode_many([turns("yes"), turns("no")])
    assert good == tokenizer("x")["input_ids"]
    assert isinstance(bad, PromptRejected)
    assert (bad.reason, str(bad)) == ("template", "the chat template refuses these messages: refused")


def test_no_chat_template_is_a_config_error():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(tokenizer, ChatFormat())


def test_every_user_turn_that_no_assistant_turn_follows_is_open():
    user, assistant, system = ({"role": r, "content": r} for r in ("user", "assistant", "system"))
    assert open_turns([system, user, assistant, user]) == [4]
    assert open_turns([user, user, assistant, user]) == [1, 4]
    assert history([user, user], ["own"], 1) == [user, {"role": "assistant", "content": "own"}, user]
    assert history([user, assistant, user], [], 0) == [user, assistant, user]


def test_m8_a_rendered_answer_can_merge_with_the_prompt_so_each_turn_is_rendered_anew(
    tiny_tokenizer: PreTrainedTokenizerFast,
):
    """The prompt ends in a newline, the answer starts with one: the prompt's ids are no prefix of the next turn's."""
    renderer = Renderer(tiny_tokenizer, ChatFormat())
    prompt = renderer.encode(turns("q"))
    newline = tiny_tokenizer("\n")["input_ids"]
    following = renderer.encode(turns("q", renderer.answer_text([*newline, *newline]), "r"))
    assert prompt[-1:] == newline
    assert following[: len(prompt)] != prompt
    assert tiny_tokenizer.decode(following).startswith(tiny_tokenizer.decode(prompt))

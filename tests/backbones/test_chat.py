import re
from datetime import datetime

import pytest

from codd.backbones import chat
from codd.errors import CoddError, FormatError

TURNS = [
    {"role": "user", "content": "  What is 1+1?\n"},
    {"role": "assistant", "content": " 2 "},
    {"role": "user", "content": "And 2+2?"},
]
SYSTEM = {"role": "system", "content": "Be brief.\n"}


def test_llada():
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    expected = (
        "<|startoftext|>"
        + header.format("system")
        + "Be brief.<|eot_id|>"
        + header.format("user")
        + "What is 1+1?<|eot_id|>"
        + header.format("assistant")
        + "2<|eot_id|>"
        + header.format("user")
        + "And 2+2?<|eot_id|>"
        + header.format("assistant")
    )
    assert chat.render(chat.LLADA, [SYSTEM, *TURNS]) == expected
    assert chat.render(chat.LLADA, [SYSTEM, *TURNS], add_generation_prompt=False) == expected


def test_chatml():
    assert chat.render(chat.CHATML, "Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(chat.CHATML, [SYSTEM, TURNS[1]], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.\n<|im_end|>\n<|im_start|>assistant\n 2 <|im_end|>\n"
    )


def test_mini():
    rendered = "<|user|>What is 1+1?<|assistant|>2<|eos|><|user|>And 2+2?"
    assert chat.render(chat.MINI, TURNS) == rendered + "<|assistant|>"
    assert chat.render(chat.MINI, TURNS, add_generation_prompt=False) == rendered
    assert chat.render(chat.MINI, [SYSTEM, *TURNS]) == rendered.replace("What", "Be brief.\n\nWhat") + "<|assistant|>"
    assert chat.render(chat.MINI, [{"role": "system", "content": " "}, TURNS[2]]) == "<|user|>And 2+2?<|assistant|>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([TURNS[0], SYSTEM], "may only come first"),
        ([SYSTEM], "a user message must follow"),
        ([SYSTEM, TURNS[1]], "a user message must follow"),
        ([{"role": "tool", "content": "x"}], "the roles are system, user and assistant, not tool"),
    ],
)
def test_mini_refuses_what_it_was_not_trained_on(messages, message):
    with pytest.raises(CoddError, match=message):
        chat.render(chat.MINI, messages)


def test_plain():
    assert chat.render(chat.PLAIN, "Paris is the [MASK] of France.") == "Paris is the [MASK] of France."
    assert chat.render(chat.PLAIN, [SYSTEM, TURNS[2]]) == "Be brief.\n\n\nAnd 2+2?"


@pytest.mark.parametrize("template", [chat.LLADA, chat.CHATML, chat.MINI, chat.PLAIN])
def test_contents_are_no_templates(template):
    assert "{{ 7 * 191 }}{% raw %}" in chat.render(template, "{{ 7 * 191 }}{% raw %}")


def test_what_published_templates_expect():
    template = """{%- if tools is defined and not tools -%}
    {% for message in messages %}
        {%- if message.tool_calls %}never{% endif %}
        {%- if loop.index > 1 %}{% break %}{% endif %}
    {{- bos_token }}{% generation %}{{ message.content }}{% endgeneration %}
    {% endfor %}
    {% set name %}<{{ 'é' }}>{% endset %}
    {% set loud | upper %}shout{% endset %}
    {{- {'text': name ~ 1 ~ none} | tojson }}{{ [1] | tojson(indent=1) }}{{ loud }}{{ undefined_thing }}
    {%- macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}{{ 'x' * 3 }}{{ 2 * 3 + 2 ** 3 }}{{ [1] + [2] }}
    {%- endif %}{{ strftime_now('%Y') }}"""
    rendered = chat.render(template, TURNS, special_tokens={"bos_token": "<s>"})
    assert rendered == (
        '<s>  What is 1+1?\n{"text": "<é>1None"}[\n 1\n]SHOUTababxxx14[1, 2]' + datetime.now().strftime("%Y")
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['CoddError'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages | map(attribute='__class__') | map(attribute='__mro__') | list }}{{ ''.__class__.mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_templates_stay_in_the_sandbox(template):
    with pytest.raises(FormatError, match=r"the chat template: (was stopped|failed)"):
        chat.render(template, TURNS)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in range(90000) %}" + "text" * 1000 + "{% endfor %}", "writes more than 10,000,000 characters"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),  # by Jinja's own limit
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ " + "not " * 20000 + "1 }}", "RecursionError"),
        ("{{ x }}" * 200000, "more than 100,000 characters"),
        ("{%" * 49000, "is not valid Jinja"),
    ],
    ids=lambda value: value[:60],
)
def test_templates_that_write_too_much_or_nest_too_deep_are_refused(template, words):
    with pytest.raises(FormatError, match=rf"^the chat template: .*{words}.*another chat_template\.$"):
        chat.render(template, TURNS)


def test_nothing_of_a_template_runs_before_it_is_rendered():
    chat.compile_template("{% set x = 10 ** (10 ** 9) %}")


def test_long_conversations_are_rendered():
    """A template that gathers 300 messages of 4000 characters in a variable, as some published ones do."""
    template = (
        "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s ~ m.content %}{% endfor %}{{ n.s }}"
    )
    contents = [f"{number:4000d}" for number in range(300)]
    messages = [{"role": "user", "content": content} for content in contents]
    assert chat.render(template, messages) == "".join(contents)


def test_what_is_no_json_is_refused():
    with pytest.raises(CoddError, match=r"expected messages of texts, .* type object"):
        chat.render("x", [{"role": "user", "content": "x", "more": object()}])


def test_a_refusal_is_one_line():
    with pytest.raises(CoddError, match=r"^the chat template refuses this conversation: no tools, please\.$") as caught:
        chat.render("{{ raise_exception('no tools,\n please.') }}", TURNS)
    assert not isinstance(caught.value, FormatError)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ missing.thing }}", "'missing' is undefined"),
        ("{{ bos_token + 'x' }}", "'bos_token' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_failures_of_a_template_are_one_line(template, message):
    with pytest.raises(FormatError, match=message) as caught:
        chat.render(template, TURNS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for x in %}", r"line 2: "),
        ("{{ messages | no_such_filter }}", "No filter named"),
        ("{% endif %}", "unknown tag 'endif'"),
        ("{{ " + "(" * 3000, "RecursionError"),
    ],
)
def test_what_is_not_jinja_is_refused(template, message):
    with pytest.raises(FormatError, match=re.escape("here.json: ") + ".*" + message) as caught:
        chat.compile_template(template, "here.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(FormatError, match="the chat template: .*" + message):
        chat.render(template, TURNS)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation is empty"),
        ([{"role": "user"}], 'message 0 has no text under "content"'),
        ([*TURNS, {"content": "x"}], 'message 3 has no text under "role"'),
    ],
)
def test_conversations_are_checked(messages, message):
    with pytest.raises(CoddError, match=message):
        chat.render(chat.PLAIN, messages)

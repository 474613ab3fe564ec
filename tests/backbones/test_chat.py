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
SAID = {"system": "Be brief.", "user": "What is 1+1?", "assistant": "2"}
LLADA = (
    "<|startoftext|>"
    + "".join(f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>" for role, text in SAID.items())
    + "<|start_header_id|>user<|end_header_id|>\n\nAnd 2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
MINI = "<|user|>What is 1+1?<|assistant|>2<|eos|><|user|>And 2+2?"
EXPECTED = """{%- if tools is defined and not tools -%}
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
"""What published templates expect to find."""


@pytest.mark.parametrize(
    ("template", "messages", "prompted", "expected"),
    [
        (chat.LLADA, [SYSTEM, *TURNS], True, LLADA),
        (chat.LLADA, [SYSTEM, *TURNS], False, LLADA),
        (chat.CHATML, "Hi", True, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (
            chat.CHATML,
            [SYSTEM, TURNS[1]],
            False,
            "<|im_start|>system\nBe brief.\n<|im_end|>\n<|im_start|>assistant\n 2 <|im_end|>\n",
        ),
        (chat.MINI, TURNS, True, MINI + "<|assistant|>"),
        (chat.MINI, TURNS, False, MINI),
        (chat.MINI, [SYSTEM, *TURNS], True, MINI.replace("What", "Be brief.\n\nWhat") + "<|assistant|>"),
        (chat.MINI, [{"role": "system", "content": " "}, TURNS[2]], True, "<|user|>And 2+2?<|assistant|>"),
        (chat.PLAIN, "Paris is the [MASK] of France.", True, "Paris is the [MASK] of France."),
        (chat.PLAIN, [SYSTEM, TURNS[2]], True, "Be brief.\n\n\nAnd 2+2?"),
        *((each, "{{ 7 * 191 }}{% raw %}", True, None) for each in (chat.LLADA, chat.CHATML, chat.MINI, chat.PLAIN)),
        (
            EXPECTED,
            TURNS,
            True,
            '<s>  What is 1+1?\n{"text": "<é>1None"}[\n 1\n]SHOUTababxxx14[1, 2]' + datetime.now().strftime("%Y"),
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_conversations_as_templates_write_them(template, messages, prompted, expected):
    """None is expected of contents that would be templates: they are text."""
    found = chat.render(template, messages, {"bos_token": "<s>"}, add_generation_prompt=prompted)
    assert found == expected if expected else messages in found


STOPPED = r"the chat template: (was stopped|failed)"
HOSTILE = (
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
)
"""Templates that would leave the sandbox."""
REFUSED = [
    *((template, TURNS, FormatError, STOPPED) for template in HOSTILE),
    ("{% for a in range(90000) %}" + "text" * 1000 + "{% endfor %}", TURNS, FormatError, "more than 10,000,000 char"),
    ("{{ range(10 ** 9) | list }}", TURNS, FormatError, "OverflowError"),  # by Jinja's own limit
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", TURNS, FormatError, "RecursionError"),
    ("{{ " + "not " * 20000 + "1 }}", TURNS, FormatError, "RecursionError"),
    ("{{ x }}" * 200000, TURNS, FormatError, "more than 100,000 characters"),
    ("{{ missing.thing }}", TURNS, FormatError, "'missing' is undefined"),
    ("{{ bos_token + 'x' }}", TURNS, FormatError, "'bos_token' is undefined"),
    ("{{ 1 / 0 }}", TURNS, FormatError, "ZeroDivisionError"),
    ("{{ raise_exception('no\n tools.') }}", TURNS, CoddError, r"^the chat template refuses this .*: no tools\.$"),
    (chat.MINI, [TURNS[0], SYSTEM], CoddError, "may only come first"),
    (chat.MINI, [SYSTEM], CoddError, "a user message must follow"),
    (chat.MINI, [SYSTEM, TURNS[1]], CoddError, "a user message must follow"),
    (chat.MINI, [{"role": "tool", "content": "x"}], CoddError, "the roles are system, user and assistant, not tool"),
    (chat.PLAIN, [{**TURNS[0], "more": object()}], CoddError, r"expected messages of texts, .* type object"),
    (chat.PLAIN, [], CoddError, "the conversation is empty"),
    (chat.PLAIN, [{"role": "user"}], CoddError, 'message 0 has no text under "content"'),
    (chat.PLAIN, [*TURNS, {"content": "x"}], CoddError, 'message 3 has no text under "role"'),
]


@pytest.mark.parametrize(("template", "messages", "error", "words"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_refused(template, messages, error, words):
    with pytest.raises(CoddError, match=words) as caught:
        chat.render(template, messages)
    assert isinstance(caught.value, FormatError) == (error is FormatError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for x in %}", r"line 2: "),
        ("{{ messages | no_such_filter }}", "No filter named"),
        ("{% endif %}", "unknown tag 'endif'"),
        ("{{ " + "(" * 3000, "RecursionError"),
        ("{%" * 49000, "is not valid Jinja"),
    ],
)
def test_what_is_not_jinja_is_refused_before_it_is_rendered(template, message):
    with pytest.raises(FormatError, match=re.escape("here.json: ") + ".*" + message) as caught:
        chat.compile_template(template, "here.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(FormatError, match="the chat template: .*" + message):
        chat.render(template, TURNS)


def test_nothing_of_a_template_runs_before_it_is_rendered():
    chat.compile_template("{% set x = 10 ** (10 ** 9) %}")

import json
import re
import subprocess
import sys
from datetime import datetime

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

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


FOREVER = "{% for a in range(90000) %}{% for b in range(90000) %}BODY{% endfor %}{% endfor %}"
GROWING = "{% set n = namespace(s='xx') %}{% for i in range(60) %}BODY{% endfor %}{{ n.s | length }}"


@pytest.mark.parametrize(
    "template",
    [
        FOREVER.replace("BODY", ""),
        FOREVER.replace("BODY", "{% set step = 1 %}{% continue %}"),
        FOREVER.replace("BODY", "{% set n = 'x' * -100000000 %}"),
        "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
        "{% set n = namespace(l=[]) %}{% for i in range(90000) %}{% set n.l = n.l + ['x' * 1000000 ~ i] %}{% endfor %}",
        "{% for a in range(90000) %}" + "text" * 1000 + "{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'x' * 10 ** 9 }}",
        GROWING.replace("BODY", "{% set n.s = n.s + n.s %}"),
        GROWING.replace("BODY", "{% set n.s = n.s ~ n.s %}"),
        GROWING.replace("BODY", "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"),
        GROWING.replace("BODY", "{% set n.s = [n.s, n.s] %}") + "{{ n.s }}",
        GROWING.replace("BODY", "{% set n.s = [n.s, n.s] %}") + "{{ n.s | tojson }}",
        GROWING.replace("'xx'", "[], t=[]").replace("BODY", "{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}")
        + "{{ n.s == n.t }}",
        GROWING.replace("'xx'", "3").replace("BODY", "{% set n.s = n.s * n.s %}"),
        FOREVER.replace("BODY", "{% set s = ('x' * 90000) | upper %}"),
        FOREVER.replace("BODY", "{{ range(90000) | sort | unique | list }}"),
        FOREVER.replace("BODY", "{{ ('<a (' * 90000) | striptags | urlize | wordcount }}"),
        "{% set c, j = cycler(1, 2), joiner(',') %}" + FOREVER.replace("BODY", "{{ c.next() }}{{ j() }}"),
        "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{% call m() %}{% endcall %}",
        "{% block b %}{{ self.b() }}{% endblock %}",
        "{{ 7 ** (10 ** 8) }}",
        "{{ 10 ** 5000 }}",
        "{{ 1 | round(-1000000000) }}",
        "{{ ('%4000000000d' % 1) | length }}",
        "{{ '%4000000000d' | format(1) | length }}",
        "{{ '{:4000000000d}'.format(1) | length }}",
        "{{ 'x' | center(4000000000) | length }}",
        "{% filter center(4000000000) %}x{% endfilter %}",
        "{{ ['x'] | map('center', 4000000000) | map('length') | list }}",
        "{{ 'x'.zfill(4000000000) | length }}",
        "{{ ('x ' * 50000000).split() | length }}",
        "{{ ('x' * 1000) | replace('x', 'x' * 1000000) | length }}",
        "{{ ([1] * 1000000) | join('x' * 100000) | length }}",
        "{{ [1] | batch(10 ** 9, 'x') | list | length }}",
        "{{ [1] | tojson(indent=10 ** 9) | length }}",
        "{{ strftime_now('%Y' * 10 ** 8) | length }}",
        "{{ 'é' * 20000000 }}",
        "{% autoescape 7 ** (10 ** 8) %}{% endautoescape %}",  # Jinja computes constants when it compiles
        "{% for i in range(90000) %}{% if not i %}{% endif %}BODY{% endfor %}".replace("BODY", "{{ x }}" * 14000),
        FOREVER.replace("BODY", "{% if x %}{% endif %}" * 4000),
        "{% macro m() %}" + "{% if x %}{% endif %}" * 4000 + "{% endmacro %}" + FOREVER.replace("BODY", "{{ m() }}"),
        "{% for a in range(90000) if " + "x or " * 400 + "x %}{% endfor %}",
        "{% for a in [1] recursive %}" + "{{ loop(range(90000)) }}" * 9 + "{% endfor %}",
        GROWING.replace("'xx'", "(1, 1)").replace("BODY", "{% set n.s = (n.s, n.s) %}") + "{{ {n.s: 1} }}",
        GROWING.replace("'xx'", "(1, 1)").replace("BODY", "{% set n.s = (n.s, n.s) %}") + "{{ messages[0][n.s] }}",
        GROWING.replace("'xx'", "(1, 1)").replace("BODY", "{% set n.s = (n.s, n.s) %}") + "{{ [n.s] | unique | list }}",
        GROWING.replace("BODY", "{% set n.s = dict(a=n.s, b=n.s) %}") + "{{ n.s is eq(n.s) }}{{ n.s | string }}",
        "{% macro m(d) %}{% if d %}{{ m(d - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}"
        "{{ m(40, 1, 1) }}",
        "{% set a, b = namespace(), namespace() %}{% set a.b = [b] %}{% set b.a = [a] %}{{ a.b }}",
        "{% set n = namespace() %}{{ n }}",
        "{{ ('f' * 10000000) | int(0, 16) }}",
        "{{ (1).to_bytes(10 ** 9, 'big') }}",
        "{{ ('x' * 20000000) | list | length }}",
        "{% for c in 'x' * 20000000 %}{% endfor %}",
        "{{ ('x' * 1000).join(['y'] * 1000000) | length }}",
        "{{ ('x' * 1000).replace('x', 'x' * 1000000) | length }}",
        "{{ ('x\n' * 10000000).splitlines() | length }}",
        "{{ ('x' * 20000000).split('x') | length }}",
        FOREVER.replace("BODY", "{% if messages[0].content * 10000 == 'x' * 10000 %}{% endif %}"),
        FOREVER.replace("BODY", "{% set s = ('x' * 90000)[1:] %}"),
        FOREVER.replace("BODY", "{% if loop.changed(messages * 1000) %}{% endif %}"),
        "{{ strftime_now('%1000000000Y') | length }}",
        "{{ [1] | tojson(separators=('x' * 10 ** 9, ':')) }}",
        "{{ (range(50000) | list) | tojson(separators=('x' * 1000000, ':')) | length }}",
        "{% set r = range(90000) %}" + FOREVER.replace("BODY", "{{ r | select('false') | first }}"),
        "{{ ([1] * 10000) | join(['x' * 100000]) | length }}",
        "{{ range(90000) | join('x' * 100000) | length }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ 1" + " + 1" * 20000 + " }}",
        "{{ " + "not " * 20000 + "1 }}",
        "{{ x }}" * 200000,
        "{%" * 49000,
        "{{ '" + "x" * 99000,
        "-" * 99000 + "{{",
    ],
    ids=lambda template: template[:60],
)
def test_templates_end_and_stay_small(template):
    with pytest.raises(FormatError, match=r"^the chat template: .*another chat_template\.$"):
        chat.render(template, TURNS)


def test_hostile_templates_take_little_memory():
    """Of what is kept while a template runs, since what it wrote is dropped."""
    program = (
        "import resource, sys\nfrom codd.backbones import chat\nfrom codd.errors import FormatError\n"
        "chat.render('{{ messages }}', 'x')\nbefore = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for template in sys.argv[1:]:\n    try:\n        chat.render(template, 'x')\n"
        "    except FormatError:\n        pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    hoards = (
        "{% set n = namespace(l=[]) %}{% for i in range(90000) %}{% set n.l = [n.l, BODY] %}{% endfor %}{{ n.l }}",
        "{% set n = namespace(l=[]) %}{% for i in range(90000) %}{% set n.l = n.l + [BODY] %}{% endfor %}{{ n.l }}",
        "{% for i in range(90000) %}{{ BODY }}{% endfor %}",
    )
    bodies = ("'\U0001f600' * 100000", "i ~ 'x'", "'x' * 90000 ~ i", "range(90000) | list")
    templates = [hoard.replace("BODY", body) for hoard in hoards for body in bodies]
    done = subprocess.run([sys.executable, "-c", program, *templates], capture_output=True, check=True, text=True)
    assert int(done.stdout) < 1_000_000  # kilobytes, on Linux; four bytes a character are the worst


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|', ) }}", "a|c"),
        ("{{ 'a,b,,c'.split(',') | reject('eq', '') | list }}{{ 'a b'.split() | last }}", "['a', 'b', 'c']b"),
        ("{{ 'x</think>y'.split('</think>')[-1].strip('\\n') }}{{ 'a\nb'.splitlines() | length }}", "y2"),
        ("{{ messages[::-1] | length }}{{ messages[0:1][0]['content'][1:] }}{{ 'b' in {'b': 1} }}", "3True"),
        ("{{ 'x' ~ ('a' * 2) ~ 2 ** 3 ~ 7 % 4 ~ -1 ~ 1.5 }}", "xaa83-11.5"),
        (
            "{{ {'b': [1], 'a': none} | tojson(indent=2, sort_keys=true) }}",
            '{\n  "a": null,\n  "b": [\n    1\n  ]\n}',
        ),
        (
            "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}"
            "{{ loop.last }}{% endif %}{% endfor %}",
            "1False(2False(3True))",
        ),
        (
            "{% for x in range(6) if x is odd %}{{ x }}/{{ loop.length }}{{ loop.cycle('a', 'b') }}{% endfor %}",
            "1/3a3/3b5/3a",
        ),
        (
            "{% macro m(x) %}<{{ x }}{{ caller() if caller else '' }}>{% endmacro %}"
            "{% call m(1) %}c{% endcall %}{{ m(2) }}",
            "<1c><2>",
        ),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{{ missing | default('d') }}{{ missing is defined }}", "ABdFalse"),
        ("{{ (1, 2) < (1, 3) }}{{ 1 <= 2 < 3 }}{{ [3, 1] | sort }}{{ [1, 1] | unique | list }}", "TrueTrue[1, 3][1]"),
        ("{% for k, v in {'x': {'y': 1}}.items() %}{{ k }}{{ v.y }}{{ v | items | list }}{% endfor %}", "x1[('y', 1)]"),
    ],
    ids=lambda value: value[:40],
)
def test_metered_templates_mean_what_they_mean_to_jinja(template, expected):
    messages = [
        {"role": role, "content": content} for role, content in zip(("user", "assistant", "user"), "abc", strict=True)
    ]
    assert chat.render(template, messages) == expected
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, **how: json.dumps(value, **how)
    assert plain.from_string(template).render(messages=messages) == expected


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

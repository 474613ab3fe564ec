import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from jaxtyping import TypeCheckError

from codd.backbones import chat, chat_sandbox
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


@pytest.fixture
def hurry(monkeypatch):
    """A hundredth of the time: what never ends is stopped all the same."""
    monkeypatch.setattr(chat, "SECONDS", chat.SECONDS / 100)


FOREVER = "{% for a in range(90000) %}{% for b in range(90000) %}BODY{% endfor %}{% endfor %}"
GROWING = "{% set n = namespace(s='xx') %}{% for i in range(60) %}BODY{% endfor %}{{ n.s | length }}"


@pytest.mark.parametrize(
    "template",
    [
        FOREVER.replace("BODY", ""),
        FOREVER.replace("BODY", "some text"),
        FOREVER.replace("BODY", "{% set step = 1 %}{% continue %}"),
        FOREVER.replace("BODY", "{% set n = 'x' * -100000000 %}"),
        "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% for a in [1, 1, 1] recursive %}{% if loop.depth < 50 %}{{ loop([1, 1, 1]) }}{% endif %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
        "{% set n = namespace(l=[]) %}{% for i in range(90000) %}{% set n.l = n.l + ['x' * 1000000 ~ i] %}{% endfor %}",
        "{% for a in range(90000) %}" + "text" * 1000 + "{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * ['x'] }}",
        "{{ 9 ** (9 ** 9) }}",
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
        "{{ '%x' % (7 ** (10 ** 8)) }}",
        "{{ 1 | round(-1000000000) }}",
        "{{ ('%4000000000d' % 1) | length }}",
        "{{ ('%*d' % (4000000000, 1)) | length }}",
        "{{ ('%.2000000000f' % 0.5) | length }}",
        "{{ '%4000000000d' | format(1) | length }}",
        "{{ '{:4000000000d}'.format(1) | length }}",
        "{{ 'x' | center(4000000000) | length }}",
        "{% filter center(4000000000) %}x{% endfilter %}",
        "{{ ['x'] | map('center', 4000000000) | map('length') | list }}",
        "{{ 'x'.zfill(4000000000) | length }}",
        "{{ 'x'.ljust(4000000000) | length }}",
        "{{ '\t'.expandtabs(2000000000) | length }}",
        "{{ ('x' * 1000).translate({120: 'x' * 1000000}) | length }}",
        "{{ ('x ' * 50000000).split() | length }}",
        "{{ ('x\n' * 100000) | indent(100000) | length }}",
        "{{ ('x' * 100000) | wordwrap(1, wrapstring='x' * 100000) | length }}",
        "{{ ('x' * 1000) | replace('x', 'x' * 1000000) | length }}",
        "{{ ([1] * 1000000) | join('x' * 100000) | length }}",
        "{{ [1] | batch(10 ** 9, 'x') | list | length }}",
        "{{ [1] | slice(10 ** 9, 'x') | list | length }}",
        "{{ ([[1] * 10000] * 10000) | sum(start=[]) | length }}",
        "{{ [1] | tojson(indent=10 ** 9) | length }}",
        "{{ lipsum(n=10 ** 9) | length }}",
        "{{ strftime_now('%Y' * 10 ** 8) | length }}",
        "{{ 'é' * 20000000 }}",
        "{% if false %}{{ 7 ** (10 ** 8) }}{% endif %}",  # Jinja computes constants when it compiles
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ 1" + " + 1" * 20000 + " }}",
        "{{ " + "not " * 20000 + "1 }}",
        "{{ x }}" * 200000,
    ],
    ids=lambda template: template[:60],
)
@pytest.mark.usefixtures("hurry")
def test_templates_end_and_stay_small(template):
    with pytest.raises(FormatError, match=r"^the chat template: .*another chat_template\.$"):
        chat.render(template, TURNS)


def test_long_conversations_are_rendered():
    """A template that gathers 300 messages of 4000 characters in a variable, as some published ones do."""
    template = (
        "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s ~ m.content %}{% endfor %}{{ n.s }}"
    )
    contents = [f"{number:4000d}" for number in range(300)]
    messages = [{"role": "user", "content": content} for content in contents]
    assert chat.render(template, messages) == "".join(contents)


@pytest.fixture
def helper(monkeypatch):
    """A process for this test alone, in place of the one that is shared."""
    helper = chat._Helper()
    monkeypatch.setattr(chat, "_helper", helper)
    yield helper
    helper.stop()


@pytest.mark.parametrize("template", sorted(chat.OURS))
def test_the_helper_renders_what_this_process_renders(template, helper):
    for messages in ([SYSTEM, *TURNS], [SYSTEM], chat.as_messages("\ud800 é\u2028")):
        variables = {"messages": messages, "add_generation_prompt": True}
        assert helper.render(template, variables) == chat_sandbox.render(template, variables)


def test_our_own_templates_need_no_helper(helper):
    chat.compile_template(chat.MINI)
    chat.render(chat.MINI, TURNS)
    assert helper._process is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce it, or show it")
def test_the_memory_of_the_helper_is_limited(helper):
    import resource

    chat.compile_template("x")
    assert resource.prlimit(helper._process.pid, resource.RLIMIT_AS) == (chat_sandbox.MEMORY,) * 2
    with pytest.raises(FormatError, match="512 MiB of memory"):
        chat.render("{{ ('%4000000000d' % 1) | length }}", TURNS)


def test_the_helper_is_kept_and_replaced_when_it_dies(helper):
    assert chat.render("{{ messages | length }}", TURNS) == "3"
    first = helper._process
    assert chat.render("{{ messages | length }}", "x") == "1"
    assert helper._process is first
    first.kill()
    first.wait()
    assert chat.render("{{ messages | length }}", "x") == "1"
    second = helper._process
    helper.reset()
    second.communicate(timeout=60)  # its input ends, as when the process that asks is gone
    assert second.returncode == 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no timer")
def test_an_interrupted_answer_is_not_the_next_one(helper):
    def interrupt(*_):
        raise KeyboardInterrupt

    def render_in_vain():
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        chat.render(FOREVER, TURNS)

    chat.compile_template("x")
    handler = signal.signal(signal.SIGALRM, interrupt)
    with pytest.raises(KeyboardInterrupt):
        render_in_vain()
    signal.signal(signal.SIGALRM, handler)
    assert chat.render("{{ messages[0].content }}", "next") == "next"


def test_threads_get_their_own_answers():
    with ThreadPoolExecutor(8) as pool:
        texts = [str(number) for number in range(200)]
        assert list(pool.map(lambda text: chat.render("{{ messages[0].content }}", text), texts)) == texts


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_helper_of_its_own():
    chat.compile_template("x")
    mine = chat._helper._process
    with chat._helper._lock:  # as if another thread were rendering: that thread is not in the child
        child = os.fork()
        if not child:
            signal.alarm(60)
            os._exit(chat.render("{{ 6 * 7 }}", "x") != "42" or chat._helper._process.pid == mine.pid)
    assert os.waitpid(child, 0)[1] == 0
    assert chat.render("{{ 6 * 7 }}", "x") == "42"
    assert chat._helper._process is mine


@pytest.mark.parametrize(("program", "message"), [("/no/such/python", "did not start"), ("true", "does not run")])
def test_a_helper_that_does_not_start_is_an_error(program, message, helper, monkeypatch):
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(CoddError, match=message) as caught:
        chat.compile_template("x")
    assert not isinstance(caught.value, FormatError)


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


@pytest.mark.parametrize("messages", [["hello"], [{"role": "user", "content": None}]])
def test_messages_of_wrong_types_are_refused(messages):
    with pytest.raises((CoddError, TypeCheckError)):
        chat.as_messages(messages)

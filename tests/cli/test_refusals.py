"""What every verb refuses: one line that names the wrong value, and the exit code."""

import json

import pytest

from codd.cli import FAILED, USAGE, main

GENERATE = ("generate", "one")
CACHE = ("cache", "--out", "out", "--data", "questions.jsonl")
TABLE = [
    ((), "generat", USAGE, "there is no verb 'generat' (did you mean generate?); see codd --help"),
    ((), "nonsense", USAGE, "there is no verb 'nonsense'; see codd --help"),
    ((), "--json demo", USAGE, "--json"),
    (("demo",), "--problms 3", USAGE, "--problms 3 (did you mean --problems?); see codd demo --help"),
    (("demo",), "--nonsense", USAGE, "unrecognized arguments: --nonsense; see codd demo --help"),
    (("demo",), "--seed -1", USAGE, "argument --seed: must be from 0 to"),
    (("demo",), "--seed x", USAGE, "argument --seed: invalid whole number value: 'x'"),
    (("demo",), f"--seed {2**63}", USAGE, "argument --seed: must be from 0 to"),
    (("demo",), "--problems 0", USAGE, "argument --problems: must be from 1 to 240, found 0"),
    (("demo",), "--circuit none", FAILED, "--circuit must not be none"),
    (("convert",), "", USAGE, "the following arguments are required"),
    (GENERATE, "--temprature 1", USAGE, "--temprature 1 (did you mean --temperature?); see codd generate --help"),
    (GENERATE, "--gen-length x", USAGE, "argument --gen-length/--max-new-tokens: invalid int value: 'x'"),
    (GENERATE, "--steps 2 --tokens-per-step 2", USAGE, "not allowed with argument --steps"),
    (GENERATE, "--stop . --no-stop", USAGE, "not allowed with argument --stop"),
    (GENERATE, "--ban x", USAGE, "expected token ids with commas between them, found 'x'"),
    (GENERATE, "--batch 0", USAGE, "argument --batch: must be at least 1, found 0"),
    (GENERATE, "--remasking x", FAILED, "remasking must be one of"),
    (GENERATE, "--temperature -1", FAILED, "temperature must be a number of at least 0"),
    (GENERATE, "--tokens-per-step 0", FAILED, "tokens_per_step must be"),
    (GENERATE, "--tokens-per-step 2 --gen-length 0", FAILED, "give steps instead"),
    (GENERATE, "--dtype int3", FAILED, "dtype must be a floating-point type (float32,"),
    (GENERATE, "--model no/such/model", FAILED, "no/such/model: there is no such folder"),
    (GENERATE, "--circuit no/such/circuit", FAILED, "no/such/circuit: there is no such folder"),
    (GENERATE, "--device toaster", FAILED, "there is no device 'toaster'"),
    (("generate",), "--file nowhere.txt", FAILED, "nowhere.txt: No such file or directory"),
    (GENERATE, "--file -", FAILED, "leave one of them out"),
    (CACHE, "--window 0", USAGE, "argument --window: must be from 1 to 9223372036854775807, found 0"),
    (CACHE, "--seed -1", USAGE, "argument --seed: must be from 0 to"),
    (CACHE, "--tolerance 0", USAGE, "argument --tolerance: must be above 0, found 0"),
    (("chat",), "--top-p 3", FAILED, "top_p must be a number of at least 0 and at most 1, found 3.0."),
    (("serve",), "--slots 0", USAGE, "argument --slots: must be at least 1"),
    (("serve",), "--port 70000", USAGE, "argument --port: must be from 0 to 65535"),
    (("serve",), "--timeout 0", USAGE, "argument --timeout: must be above 0"),
    (("serve",), "--io-timeout nan", USAGE, "argument --io-timeout: must be above 0"),
    (("serve",), "--compile-timeout 4000", USAGE, "argument --compile-timeout: must be above 0 and at most 3600"),
    (("serve",), "--cache-memory inf", USAGE, "argument --cache-memory: must be from 0 to 1048576"),
    (("serve",), "--replicas 3-2", USAGE, "expected at least 1, and the smaller number first, found '3-2'"),
    (("serve",), "--replicas x", USAGE, "expected a number, or two with - between them, found 'x'"),
    (("serve",), "--replicas 2 --metrics-port 0", FAILED, "--metrics-port is of one process"),
    (
        ("serve",),
        "--replicas 2 --gpus-per-replica 2",
        USAGE,
        "argument --gpus-per-replica: must be from 0 to 1, found 2",
    ),
    (("serve",), "--gpus-per-replica 1", FAILED, "--gpus-per-replica is for --replicas"),
    (("serve",), "--api-key-file /nowhere/key", FAILED, "/nowhere/key"),
    (("serve",), "--threshold 2", FAILED, "threshold must be"),
    (("serve",), "--model /nowhere/model", FAILED, "/nowhere/model"),
    (("info",), "nowhere.jpc", FAILED, "nowhere.jpc"),
]


@pytest.mark.parametrize(("verb", "arguments", "code", "words"), TABLE, ids=lambda value: str(value)[:40])
def test_one_line(verb, arguments, code, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}))
    assert main([*verb, *arguments.split()]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("codd: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err
    assert not (tmp_path / "out").exists()

"""``codd serve``: what is refused before anything listens. How it serves is in tests/serving."""

import argparse
import socket
import subprocess
import sys

import pytest

from codd.cli import FAILED, main, serve


def test_limits_of_constraints_are_what_the_options_say():
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    from codd.serving.prompts import Limits

    def limits(*arguments: str) -> Limits:
        parser = argparse.ArgumentParser()
        serve.configure(parser)
        return serve._settings(parser.parse_args(arguments)).limits

    assert limits() == Limits()
    told = "--max-pattern 100 --max-states 64 --compile-timeout 2.5 --compile-memory 0.5"
    wanted = Limits(constraint=100, states=64, compile_seconds=2.5, compile_memory=1 << 29)
    assert limits(*told.split()) == wanted


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\n", "there is no key in it"), (b"\xff\xfe", "one line of text"), (b"one\ntwo", "one line of text")],
)
def test_a_file_without_a_key(capsys, tmp_path, content, words):
    (tmp_path / "key").write_bytes(content)
    assert main(["serve", "--api-key-file", str(tmp_path / "key")]) == FAILED
    assert words in capsys.readouterr().err


def test_a_key_of_the_environment_that_no_client_can_send(capsys, monkeypatch):
    monkeypatch.setenv(serve.KEY, "\udcff")
    assert main(["serve"]) == FAILED
    assert f"{serve.KEY}: a key is one line of text" in capsys.readouterr().err


def test_without_its_extra_it_says_what_to_install():
    code = "import sys; sys.modules['fastapi'] = None; from codd.cli import main; sys.exit(main(['serve']))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == FAILED
    assert found.stderr.strip() == "codd: codd serve needs fastapi: pip install 'codd-lm[serve]'."


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "/nowhere"]) == FAILED
    assert capsys.readouterr().err.strip() == f"codd: cannot listen on 127.0.0.1, port {port}: Address already in use."

"""What a cluster does with a server: probes, scrapes, more load than it takes, and the end."""

import json
import logging
import signal
import time
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest

from codd.serving.app import Settings
from codd.serving.engine import MAX_RETRY_AFTER
from codd.serving.middleware import Security
from tests.support.browser import serving
from tests.support.live import IDS, PATIENCE, gated, live, until
from tests.support.small_models import Gate, small

PROBES = ("/health/live", "/health/ready")


def test_probes_need_neither_key_nor_name():
    with live(small(), Settings(security=Security(api_key="sesame"))) as server:
        for path in PROBES:
            found = server.http.get(path, headers={"Host": "10.1.2.3:8000"})
            assert (found.status_code, found.headers["Cache-Control"]) == (200, "no-store")
        for path in ("/health", "/metrics", "/v1/models", "/health/live/", "/health/ready/../../metrics"):
            refused = server.http.get(path, headers={"Host": "models.example"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_host")
            assert "--allow-host" in refused.json()["error"]["message"]


def test_a_model_thread_that_died_is_not_live(monkeypatch):
    with live(small()) as server:
        assert server.http.get("/health/live").json() == {"status": "live"}

        def die() -> None:
            raise RuntimeError("as if the device were lost")

        monkeypatch.setattr(server.engine, "_admit", die)
        assert server.http.post("/v1/denoise", json={**IDS, "stream": False}).status_code == 503
        assert [server.http.get(path).status_code for path in PROBES] == [503, 503]


def test_while_it_drains_new_requests_are_refused_and_others_finished(clients, caplog):
    caplog.set_level(logging.INFO, "codd.serving")
    gate = Gate()
    with live(small(), gated(gate)) as server:
        asked = clients.submit(httpx.post, f"{server.url}/v1/denoise", json=IDS, timeout=PATIENCE)
        assert gate.reached.acquire(timeout=PATIENCE)
        server.running.handle_exit(signal.SIGTERM, None)
        until(lambda: "shutting down: 1 requests" in caplog.text)
        assert [server.http.get(path).status_code for path in PROBES] == [200, 503]
        for stream in (True, False):
            refused = server.http.post("/v1/denoise", json={**IDS, "stream": stream})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
            assert refused.headers["Connection"] == "close"
            assert refused.json()["error"]["code"] == "shutting_down"
        for path in ("/v1/denoise", "/v1/constraint"):  # nothing is compiled for who is sent away
            refused = server.http.post(path, json={"guided_regex": "(", **(IDS if path == "/v1/denoise" else {})})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        gate.open.release(1000)
        assert asked.result(PATIENCE).text.count("event: done") == 1
        until(lambda: "1 requests finished, 0 broken off" in caplog.text)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health/live")


def test_what_takes_longer_than_the_drain_is_broken_off_with_an_error(clients, caplog):
    caplog.set_level(logging.INFO, "codd.serving")
    gate = Gate()
    with live(small(), gated(gate), drain=0) as server:
        asked = [
            clients.submit(httpx.post, f"{server.url}/v1/denoise", json={**IDS, "stream": stream}, timeout=PATIENCE)
            for stream in (True, False)
        ]
        until(lambda: server.engine.load.running + server.engine.load.waiting == 2)
        server.running.handle_exit(signal.SIGTERM, None)
        until(lambda: server.engine._stopped)
        gate.open.release(1000)  # the step under way ends, and no other is taken
        streamed, whole = [each.result(PATIENCE) for each in asked]
        assert "shutting_down" in streamed.text
        assert "event: done" not in streamed.text
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutting_down")
        until(lambda: "0 requests finished, 2 broken off" in caplog.text)


def test_a_connection_outlives_the_longest_retry_after():
    with live(small(), Settings(io_timeout=0.5)) as server:
        assert server.running.config.timeout_keep_alive > MAX_RETRY_AFTER
        with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)) as connection:
            connection.connect()
            wire = connection.sock
            for _ in range(2):
                connection.request("GET", "/health/live")
                assert connection.getresponse().read() == b'{"status":"live"}'
                time.sleep(1.0)  # longer than the beginning of a request may take
            assert connection.sock is wire
            wire.sendall(b"GET /hea")
            assert wire.recv(65536).startswith(b"HTTP/1.1 408")


def test_a_second_signal_ends_the_process_at_once():
    body = {"prompt": "What is 7 + 8?", "gen_length": 200, "steps": 200, "stop": False}
    with serving("--drain-timeout", str(PATIENCE), logged=True) as server:
        assert server.process.stderr is not None
        with httpx.stream("POST", f"{server.url}/v1/denoise", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: start"
            server.process.send_signal(signal.SIGTERM)
            assert "shutting down: 1 requests" in server.process.stderr.readline()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 1
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert "1 broken off" in server.process.stderr.read()


def test_metrics_have_a_port_of_their_own_and_sigint_ends_the_process():
    with serving("--metrics-port", "0", "--log-format", "json", logged=True, CODD_API_KEY="k") as server:
        assert server.process.stderr is not None
        own = server.told["metrics"].removesuffix("/metrics")
        assert own != server.url
        stranger = {"Host": "prometheus.example"}
        assert "codd_running 0.0" in httpx.get(server.told["metrics"], headers=stranger).text
        assert [httpx.get(own + path).status_code for path in PROBES] == [200, 200]
        for path in ("/", "/health", "/v1/models", "/openapi.json"):
            assert httpx.get(own + path, headers={"Authorization": "Bearer k"}).status_code == 404
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0
        *_, begun, ended = [json.loads(line)["message"] for line in server.process.stderr]
        assert begun.startswith("shutting down: 0 requests")
        assert ended.startswith("shut down after")

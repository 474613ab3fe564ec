"""The server as a Ray Serve deployment: several replicas on GPUs and machines behind one address.

Every replica is the application of `codd.serving` with a model, a fair queue and a limit of its own. Ray's proxies send
a request to one of two replicas, the less busy one, replace replicas that die, and change their number with the load.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported: nothing is reported to anybody

import ray
from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from ray import serve
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codd.errors import InvalidInput
from codd.serving.app import Settings, create_app
from codd.serving.engine import Engine
from codd.serving.server import prepare_process

NAME = "codd"
"""The name of the application and of its only deployment, for Ray's commands and dashboard."""
METRICS_TIMEOUT = 5.0
"""Seconds that /metrics waits for the other replicas."""
HEALTH_PERIOD = 2.0
"""Seconds between two questions of Ray whether a replica is well."""


@dataclass(frozen=True)
class ReplicaOptions:
    """How many replicas there are, and what each may use."""

    replicas: tuple[int, int] = (1, 1)
    """The least and the most; the number follows the load where they differ."""
    cpus: int = 1
    """CPUs of a replica. Ray gives PyTorch as many threads, unless OMP_NUM_THREADS is set."""
    gpus: float = 0.0
    """GPUs of a replica: 0, 1, or the share of one that several replicas use."""
    target: int = 8
    """Requests under way in a replica, on average, above which there should be more replicas."""
    most_requests: int = 256
    """Requests that are sent to a replica at once; the others wait in Ray's proxy."""
    drain: int = 30
    """Seconds that a replica which is stopped or replaced has to finish its requests."""

    def for_ray(self) -> dict[str, Any]:
        """The arguments of Ray's `Deployment.options`."""
        least, most = self.replicas
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": self.target}
        return {
            "name": NAME,
            **({"num_replicas": least} if least == most else {"autoscaling_config": scaling}),
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_ongoing_requests": self.most_requests,
            "health_check_period_s": HEALTH_PERIOD,
            "graceful_shutdown_timeout_s": self.drain,
        }


class Replica:
    """One process with a model; Ray makes as many as there are to be."""

    def __init__(self, make_engine: Callable[[], Engine], settings: Settings):
        """``make_engine`` is called in the replica's process; it loads the model."""
        prepare_process()
        self.engine, self.settings = make_engine(), settings
        self.id = serve.get_replica_context().replica_id.unique_id

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application; Ray sends its startup and shutdown events."""
        return ProxyRequestId(create_app(self.engine, self.settings, self._metrics_of_all))

    def check_health(self) -> None:
        """Raise if the model's thread has died, so that Ray replaces this replica."""
        if self.engine.failed:
            raise RuntimeError("the model's thread has ended; the log of the replica says why.")

    def metrics(self) -> tuple[str, list[Metric]]:
        """The id of this replica and its metrics."""
        return self.id, list(self.engine.metrics.registry.collect())

    async def _metrics_of_all(self) -> bytes:
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        asked = handle.broadcast("metrics")
        found = await asked.results_async(timeout_s=METRICS_TIMEOUT, return_exceptions=True)
        return generate_latest(MergedMetrics(each for each in found if not isinstance(each, BaseException)))


class ProxyRequestId:
    """Leaves the header X-Request-Id to Ray's proxy, which adds it, with the same id, to every response."""

    def __init__(self, app: ASGIApp):
        """``app``: the application inside."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take it out of the response."""

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["X-Request-Id"]
            await send(message)

        await self.app(scope, receive, send_without_id)


class MergedMetrics(Collector):
    """The metrics of several replicas, each sample with the label ``replica``."""

    def __init__(self, replicas: Iterable[tuple[str, Iterable[Metric]]]):
        """``replicas``: their ids and metrics."""
        self._merged: dict[str, Metric] = {}
        for replica, metrics in replicas:
            for metric in metrics:
                empty = Metric(metric.name, metric.documentation, metric.type)
                samples = self._merged.setdefault(metric.name, empty).samples
                samples += [each._replace(labels={"replica": replica, **each.labels}) for each in metric.samples]

    def collect(self) -> Iterable[Metric]:
        """For `generate_latest`."""
        return self._merged.values()


def application(make_engine: Callable[[], Engine], settings: Settings, options: ReplicaOptions) -> serve.Application:
    """What `serve.run` and ``serve deploy`` take. The replicas must be able to import ``make_engine``."""
    deployment = serve.deployment(serve.ingress()(Replica), **options.for_ray())
    return deployment.bind(make_engine, settings)


def run(app: serve.Application, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM: on the cluster that RAY_ADDRESS names, else on one of this machine's own.

    ``on_ready`` is called once all replicas take requests. At the end the application is removed from the cluster,
    after its requests; a second signal leaves at once. `InvalidInput` if the replicas cannot start.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster of our own: Ray's 15 yields to everybody else
    ray.init(include_dashboard=False, logging_level="ERROR")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    for each in (signal.SIGINT, signal.SIGTERM):  # Ray has set its own
        signal.signal(each, signal.default_int_handler)
    quiet = {"log_level": "WARNING", "enable_access_log": False}  # `Envelope` logs one line a request
    try:
        serve.start(http_options={"host": host, "port": port}, logging_config=quiet)
        serve.run(app, name=NAME, logging_config=quiet)
        on_ready()
        threading.Event().wait()
    except KeyboardInterrupt:
        serve.delete(NAME)
    except RuntimeError:  # Ray tells no kinds apart; the last line of its report is the exception of the replica
        report = serve.status().applications[NAME].deployments[NAME].message
        raise InvalidInput(f"the replicas did not start: {report.strip().splitlines()[-1]}") from None
    finally:
        ray.shutdown()

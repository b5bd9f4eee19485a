"""Settings of tasks on a cluster besides their inputs: time, memory, credentials."""

from __future__ import annotations

from typing import Any

from kfp import dsl, kubernetes

from fedloom.storage.base import S3_VARIABLES

MINUTE, HOUR, DAY = 60, 3600, 86400
CREDENTIALS = {name: name for name in S3_VARIABLES}
"""Keys of a storage Secret, and the environment variables that they become; any of them may be missing."""

CONFIG = dsl.PipelineConfig(active_deadline_seconds=14 * DAY)
"""Limit on a whole pipeline: two weeks. A federation has its own deadline."""


def sized(task: Any, seconds: int, *, cpu: str = "500m", memory: str = "1Gi") -> Any:
    """Set a task's timeout and resource requests; 0 seconds means no timeout."""
    if seconds:
        kubernetes.set_timeout(task, seconds)
    return task.set_cpu_request(cpu).set_memory_request(memory)


def with_storage(task: Any, secret: Any) -> Any:
    """Add the credentials of a store to a task, from a Secret that may be missing if no store is used."""
    return kubernetes.use_secret_as_env(task, secret, CREDENTIALS, optional=True)


def with_server(task: Any, secret: Any) -> Any:
    """Add the credentials for a model server to a task, from a Secret that may be missing if no server is used."""
    return kubernetes.use_secret_as_volume(task, secret, "/etc/fedloom/serve", optional=True)

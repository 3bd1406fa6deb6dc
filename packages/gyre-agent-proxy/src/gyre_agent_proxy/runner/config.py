"""[runner]: which tasks, which harness, how long."""

from __future__ import annotations

from typing import Literal

import msgspec


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[runner]. `tasks` is relative to the config file's folder, which the launcher writes to `folder`.

    `harness` is a command, or the name of a harness that is built in (`gyre_agent_proxy.runner.harnesses`), or a TOML
    file like theirs, relative to that folder, too. In a command's arguments and in the values of `env`, {python},
    {folder}, {workspace}, {instruction}, {instruction_file}, {base_url}, {key}, {model}, {task} and {execution} are
    replaced.
    """

    tasks: str = "tasks"  # a folder of task folders, or "harbor:NAME@VERSION": see sources.py
    tasks_only: tuple[str, ...] = ()  # patterns of task names, such as "git-*"; empty: all of them …
    tasks_except: tuple[str, ...] = ()  # … but those
    harbor_registry: str = ""  # a registry file, relative to `folder`, or a URL; empty: Harbor's own
    folder: str = ""  # of the config file
    harness: tuple[str, ...] | str = ()
    env: dict[str, str] = {}  # added to the harness's clean environment
    model: str = ""  # what harnesses call the policy; empty: [model] name
    budget: float = 3600.0  # wall-clock seconds of an execution, unless the task's [agent] timeout_sec is less
    concurrency: int = 0  # harnesses alive at a time; 0: as many as the scheduler grants
    order: Literal["shuffled", "listed"] = "shuffled"  # of the tasks over the groups; shuffled by run.seed
    evaluator_timeout: float = 600.0  # wall-clock seconds, unless the task's [verifier] timeout_sec is less
    evaluator_attempts: int = 3  # tries before an execution is excluded as evaluator_failed
    evaluator_memory_mb: int = 4096  # address space of each verifier process
    evaluators: int = 2  # verifiers at a time
    workspace_limit_mb: int = 2048  # what a verifier's copy of a workspace may hold
    # auto: a container for a task that brings an image, for others bubblewrap where it works, else a plain process
    # group and a warning; container: one for every task. See sandbox.py and container.py for what is seen inside.
    sandbox: Literal["auto", "bubblewrap", "container", "none"] = "auto"
    sandbox_network: Literal["proxy", "host"] = "proxy"  # proxy: nothing but the proxy can be reached
    sandbox_read: tuple[str, ...] = ()  # absolute paths that are shown inside, too
    evaluator_network: Literal["none", "host"] = "none"  # host: verifiers reach this machine's network, to fetch tools
    container_client: str = ""  # docker, podman or a path; empty: the first of them that works
    container_image: str = ""  # of tasks that bring none
    container_user: str = ""  # UID:GID, or "image": whom the image names; empty: never this machine's root
    container_python: str = ""  # one that every image has; empty: this runner's own is mounted
    container_pids: int = 4096  # processes and threads in a container
    keep_workspaces: Literal["all", "failed", "none"] = "all"  # once the feed has them; failed: those without a score
    refills: int = 2  # executions a group may have replaced that ended without a result through no fault of their own
    grant_within: float = 7200.0  # seconds to wait for a burst's grant
    fates_within: float = 3600.0  # seconds to wait, after the last submission, until every execution has its fate

    def __post_init__(self) -> None:
        for name in ("budget", "evaluator_timeout", "grant_within", "fates_within"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
        for name in ("evaluator_attempts", "evaluator_memory_mb", "evaluators", "workspace_limit_mb", "container_pids"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.concurrency < 0:
            raise ValueError(f"concurrency must be at least 0 (0: what the scheduler grants), got {self.concurrency!r}")
        if self.refills < 0:
            raise ValueError(f"refills must be at least 0 (0: none), got {self.refills!r}")

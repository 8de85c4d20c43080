"""Settings of the engines: the inference servers of a run, their start, and the client's timeouts."""

import os
import re
import secrets
from functools import cache, partial
from typing import Literal

from pydantic import Field, JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from agentrl.settings import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, HOSTED_KEY_VARIABLE, Settings, shown

_own_key = cache(partial(secrets.token_urlsafe, 32))
"""Return the key of the engines that this process starts."""


class EngineSettings(Settings):
    """Inference engines. All of them speak SGLang's HTTP protocol, except a hosted model; only the launcher knows their
    kind."""

    engine: Literal["embedded", "sglang", "external", "openai"] = "embedded"
    """Kind of inference engine: the built-in CPU server, real SGLang, or servers that run already. With openai, a
    hosted model behind OpenAI's chat API: for eval and rollout only, as it gives no token ids to train on."""
    base_url: str | None = Field(None, min_length=1)
    """Address of the chat API for --engine openai, for example https://api.openai.com/v1."""
    hosted_model: str | None = Field(None, min_length=1, description="Name of the model there.")
    hosted_api_key_env: str = HOSTED_KEY_VARIABLE
    """Environment variable that holds the API key, if the server asks for one."""
    hosted_options: dict[str, JsonValue] = Field(default_factory=dict)
    """More fields of each request to the hosted model, for example reasoning_effort=low; null leaves one out."""
    rollout_external_engine_addrs: tuple[str, ...] = Field(())
    """Addresses (host:port or URL) of running engines for --engine external."""
    sglang_server_concurrency: PositiveInt = 512
    """Requests in flight at one engine; more wait in the client."""

    engine_groups: dict[str, PositiveInt | str] = Field(default_factory=dict)
    """More engines by name: NAME=2 starts two with the weights of --hf-checkpoint, NAME=host:port,host:port are running
    ones. Their weights stay, except in a group named eval: it evaluates, with the weights of the step."""
    engine_start_timeout: PositiveFloat = 600.0
    """Seconds an engine may take from start to first healthy answer."""
    engine_request_timeout: PositiveFloat = 1800.0
    """Seconds one generation may take, waiting and retries included, if the caller sets no deadline."""
    engine_control_timeout: PositiveFloat = 300.0
    """Seconds one control call (pause, flush, weight update) may take at one engine."""
    engine_connect_timeout: PositiveFloat = Field(10.0, description="Seconds to open a connection to an engine.")
    engine_max_retries: NonNegativeInt = 5
    """Retries of a generation after a lost connection, a malformed answer, or status 408, 429 or 5xx. A retry goes to
    another engine if there is one."""
    engine_retry_backoff: NonNegativeFloat = 0.2
    """Seconds before the first retry if every engine has failed before. The time doubles with each retry, up to 10
    seconds; an engine can ask for more (Retry-After)."""
    engine_absence_timeout: NonNegativeFloat = 120.0
    """Seconds a generation waits for a restarted engine if no engine can be reached."""
    engine_probe_interval: PositiveFloat = 5.0
    """Seconds between two health probes of an engine, and the time limit of a probe. If an engine does not answer, its
    requests go to other engines. Use 5 or more for servers that generate a token for /health (SGLang's default)."""
    engine_max_restarts: NonNegativeInt = 10
    """Maximum restarts of an engine of this run after it died or hung."""
    engine_hang_timeout: PositiveFloat = 60.0
    """Seconds without an answer after which an engine that this run started is killed as hung. Any engine that answers,
    but generates nothing for so long, gets no requests until it generates again."""
    router_middleware_paths: tuple[str, ...] = Field(())
    """ASGI middleware classes around the router, outermost first (pkg.mod:Class or file.py:Class); each is made with
    the application and `router=`."""
    pause_generation_mode: Literal["abort", "retract", "in_place"] = "abort"
    """Treatment of running requests during a weight update; no request fails. With abort, the engine returns the tokens
    so far, and the client sends prompt and tokens again; works with every server and router. With retract, the engine
    reads the tokens again itself. With in_place, the engine goes on with keys and values of the old weights. Log-probs
    are then approximate, and SGLang keeps old prefixes in its cache. retract and in_place need a server that reports
    weight_versions (SGLang 0.5.23)."""

    engine_python: str | None = None
    """Python interpreter that has SGLang, for --engine sglang; default: the one running now."""
    sglang_cpu: bool | None = None
    """Start SGLang in its CPU mode; default: yes if the machine has no NVIDIA GPU."""
    sglang_options: dict[str, str | int | float | bool | list[str | int | float] | None] = Field(
        default_factory=dict,
        description="Options for the SGLang server, passed unchanged, for example --sglang-mem-fraction-static 0.7. "
        f"{API_KEY_VARIABLE} and {ADMIN_KEY_VARIABLE} give its keys.",
    )

    embedded_slots: PositiveInt = Field(64, description="Sequences the built-in engine keeps in memory at once.")
    embedded_threads: PositiveInt | None = None
    """CPU threads of one built-in engine; default: as many as the machine's cores allow."""
    embedded_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the built-in engine: auto is float32 on a CPU and bfloat16 with CUDA."""
    embedded_deterministic: bool = False
    """Compute bit-identical log-probs in the built-in engine, whatever else is in the batch; several times slower."""

    engine_context_length: PositiveInt | None = None
    """Longest sequence an engine accepts, in tokens; default: the model's own limit."""
    engine_host: str = Field("127.0.0.1", min_length=1, description="Address that started engines listen on.")
    engine_port_base: PositiveInt | None = Field(None, le=65535)
    """First port of started engines; the others get the next ports. Default: free ports."""

    @field_validator("hosted_api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII):
            raise ValueError("expected the name of an environment variable, not a key")  # it must not repeat a key
        return value

    @field_validator("engine_groups")
    @classmethod
    def _counts_or_addresses(cls, value: dict[str, int | str]) -> dict[str, int | str]:
        for name, said in value.items():
            if isinstance(said, str) and ":" not in said:
                raise ValueError(f"{name}={said}: expected a number of engines, or addresses as host:port,host:port")
        return value

    @property
    def started_groups(self) -> dict[str, int]:
        """The number of engines to start, by group."""
        return {name: said for name, said in self.engine_groups.items() if isinstance(said, int)}

    @field_validator("hosted_options")
    @classmethod
    def _leaves_ours(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted({"messages", "model", "n", "stream", "tools"} & value.keys()):
            raise ValueError(f"{', '.join(taken)}: agentrl sets this itself; leave it out")
        return value

    @property
    def api_key(self) -> str | None:
        """API key of SGLang servers (their `--api-key`), both started and external ones; by default that of the environment
        variable. With a hosted model its own, and no other."""
        if self.engine == "openai":
            return os.environ.get(self.hosted_api_key_env, "").strip() or None
        return self._key("api-key", API_KEY_VARIABLE)

    @property
    def hosted_name(self) -> str | None:
        """The hosted model and its address; None if the engines serve a model of the run."""
        return f"{self.hosted_model} at {shown(self.base_url)}" if self.engine == "openai" else None

    @property
    def admin_api_key(self) -> str | None:
        """Key of the servers' control routes (their `--admin-api-key`); by default that of the environment variable. Without
        any key, built-in engines that are started here get a random one."""
        key = self._key("admin-api-key", ADMIN_KEY_VARIABLE)
        return _own_key() if key is None and self.api_key is None and self.engine == "embedded" else key

    def _key(self, option: str, variable: str) -> str | None:
        options = self.sglang_options
        key = options.get(option.replace("-", "_"), options.get(option, os.environ.get(variable)))
        return None if key is None else str(key).strip() or None

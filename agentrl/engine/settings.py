"""Settings of the engine room: which inference servers there are, how they are started, how patient the client is."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from agentrl.settings import Settings


class EngineSettings(Settings):
    """Inference engines. All of them speak SGLang's HTTP protocol; only the launcher knows their kind."""

    engine: Literal["embedded", "sglang", "external"] = Field(
        "embedded",
        description="Kind of inference engine: the built-in CPU server, a real SGLang server, or servers already up.",
    )
    rollout_external_engine_addrs: tuple[str, ...] = Field(
        (), description="Addresses (host:port or URL) of running engines for --engine external."
    )
    sglang_server_concurrency: PositiveInt = Field(
        512, description="Requests in flight at one engine; more wait in the client."
    )

    engine_start_timeout: PositiveFloat = Field(
        600.0, description="Seconds an engine may take from start to first healthy answer."
    )
    engine_request_timeout: PositiveFloat = Field(
        1800.0,
        description="Seconds one generation may take, waiting and retries included, if the caller sets no deadline.",
    )
    engine_control_timeout: PositiveFloat = Field(
        300.0, description="Seconds one control call (pause, flush, weight update) may take at one engine."
    )
    engine_connect_timeout: PositiveFloat = Field(10.0, description="Seconds to open a connection to an engine.")
    engine_max_retries: NonNegativeInt = Field(
        5,
        description="Retries of a generation after a lost connection, a malformed answer, or status 408, 429 or 5xx. "
        "A retry goes to another engine if there is one.",
    )
    engine_retry_backoff: NonNegativeFloat = Field(
        0.2,
        description="Seconds before the first retry if every engine has failed before. The time doubles with each retry, up to "
        "10 seconds; an engine can ask for more (Retry-After).",
    )
    engine_absence_timeout: NonNegativeFloat = Field(
        120.0,
        description="Seconds a generation waits for a restarted engine if no engine can be reached.",
    )
    engine_probe_interval: PositiveFloat = Field(
        5.0,
        description="Seconds between two health probes of an engine, and the time limit of a probe. If an engine does not "
        "answer, its requests go to other engines. Use 5 or more for servers that generate a token for /health (SGLang's "
        "default).",
    )
    engine_max_restarts: NonNegativeInt = Field(
        10, description="Times an engine that this run started is started again after it died or hung."
    )
    engine_hang_timeout: PositiveFloat = Field(
        60.0, description="Seconds without an answer after which an engine that this run started is killed as hung."
    )
    router_middleware_paths: tuple[str, ...] = Field(
        (),
        description="ASGI middleware classes around the router, outermost first (pkg.mod:Class or file.py:Class); each is "
        "made with the application and `router=`.",
    )
    pause_generation_mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="Treatment of running requests during a weight update; no request fails. With abort, the engine returns "
        "the tokens so far, and the client sends prompt and tokens again; works with every server and router. "
        "With retract, the engine reads the tokens again itself. With in_place, the engine goes on with keys and values of the old "
        "weights. Log-probs are then approximate, and SGLang keeps old prefixes in its cache. retract and in_place "
        "need a server that reports weight_versions (SGLang 0.5.23).",
    )

    engine_python: str | None = Field(
        None, description="Python interpreter that has SGLang, for --engine sglang; default: the one running now."
    )
    sglang_cpu: bool | None = Field(
        None, description="Start SGLang in its CPU mode; default: yes if the machine has no NVIDIA GPU."
    )
    sglang_options: dict[str, str | int | float | bool | list[str | int | float] | None] = Field(
        default_factory=dict,
        description="Options passed to the SGLang server as they are: --sglang-mem-fraction-static 0.7 and the like.",
    )

    embedded_slots: PositiveInt = Field(64, description="Sequences the built-in engine keeps in memory at once.")
    embedded_threads: PositiveInt | None = Field(
        None, description="CPU threads of one built-in engine; default: as many as the machine's cores allow."
    )
    embedded_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number format of the built-in engine's weights; auto takes the model's own."
    )
    embedded_deterministic: bool = Field(
        False,
        description="Have the built-in engine compute log-probs that do not depend on what else is in the batch, to the bit; "
        "several times slower.",
    )

    engine_context_length: PositiveInt | None = Field(
        None, description="Longest sequence an engine accepts, in tokens; default: the model's own limit."
    )
    engine_host: str = Field("127.0.0.1", min_length=1, description="Address that started engines listen on.")
    engine_port_base: PositiveInt | None = Field(
        None, le=65535, description="First port of started engines, the next ones follow; default: free ports."
    )

    @property
    def api_key(self) -> str | None:
        """API key of SGLang servers (their `--api-key`), both started and external ones."""
        key = self.sglang_options.get("api_key", self.sglang_options.get("api-key"))
        return None if key is None else str(key)

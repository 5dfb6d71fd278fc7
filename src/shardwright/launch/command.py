"""From settings to what is started: the workers' command line and environment, and how to do it by hand.

Workers get torchrun's variables, and the configuration by the variables that the original's launcher sets, so
that a script can't tell the difference. Pure: nothing is started or looked up here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.config import emulation
from shardwright.config.parse import read, unwrap_json
from shardwright.errors import ConfigError

PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"
FRAMEWORK_VARIABLE = "SM_FRAMEWORK_PARAMS"
DEFAULT_MULTI_NODE_PORT = 29500  # torchrun's; all nodes must know it beforehand

_PIPELINE_KEY = "pipeline_parallel_degree"
_TENSOR_KEY = "tensor_parallel_degree"
# What transformers looks for in the environment (api.md 1.1).
_ENVIRONMENT_SPELLING = {_PIPELINE_KEY: "partitions"}


@dataclass(frozen=True)
class LaunchSettings:
    """One job on this host, complete and checked; `settle` makes it from what the user gave.

    script: a path, or the name of a module if `module` is set.
    config: the keys given on the command line or in its file, and no others: they win over the script's own.
    master_port: None until one is reserved.
    grace_s: time that workers have after SIGINT or SIGTERM before they are killed.
    emulate_cuda: the workers and their children take CUDA devices for the CPU.
    max_restarts: how often the workers of this host are started anew after one failed.   num_restarts: how often
        they have been.
    """

    script: str
    script_args: tuple[str, ...] = ()
    module: bool = False
    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    grace_s: float = 10.0
    tag_output: bool = False
    log_dir: str | None = None
    emulate_cuda: bool = False
    max_restarts: int = 0
    num_restarts: int = 0

    @property
    def world_size(self) -> int:
        """Processes of the whole job, on all nodes."""
        return self.nnodes * self.nproc


def settle(
    script: str,
    script_args: Sequence[str],
    *,
    module: bool = False,
    nproc: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    config: Mapping[str, object] | None = None,
    grace_s: float = 10.0,
    tag_output: bool = False,
    log_dir: str | None = None,
    emulate_cuda: bool = False,
    max_restarts: int = 0,
) -> LaunchSettings:
    """Fill in what the user left out and refuse what can't work.

    nproc: processes on this host; None for as many as the degrees need.
    config: as `merge_config` returns it.
    Raises: ConfigError naming the option, its value and what is allowed.
    """
    config = dict(config or {})
    degrees = _degrees_of(config)
    if nnodes < 1:
        raise ConfigError(f"--nnodes is {nnodes}, expected 1 or more")
    if not 0 <= node_rank < nnodes:
        raise ConfigError(f"--node-rank is {node_rank}, expected 0 to {nnodes - 1} (--nnodes is {nnodes})")
    if nnodes > 1 and master_addr is None:
        raise ConfigError(
            f"--nnodes is {nnodes} and --master-addr is not given",
            remedy="pass the address of node 0, the same on every node",
        )
    if nproc is None:
        nproc = _default_nproc(degrees, nnodes)
    if nproc < 1:
        raise ConfigError(f"--nproc is {nproc}, expected 1 or more")
    if master_port is not None and not 1 <= master_port <= 65535:
        raise ConfigError(f"--master-port is {master_port}, expected 1 to 65535")
    if grace_s < 0:
        raise ConfigError(f"--grace-s is {grace_s}, expected 0 or more")
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts is {max_restarts}, expected 0 or more")
    _check_world(nproc * nnodes, degrees)
    if nnodes > 1 and master_port is None:
        master_port = DEFAULT_MULTI_NODE_PORT
    return LaunchSettings(
        script=script,
        script_args=tuple(script_args),
        module=module,
        nproc=nproc,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr or "127.0.0.1",
        master_port=master_port,
        config=config,
        grace_s=grace_s,
        tag_output=tag_output,
        log_dir=log_dir,
        emulate_cuda=emulate_cuda,
        max_restarts=max_restarts,
    )


def merge_config(
    from_file: Mapping[str, object], options: Mapping[str, object], overrides: Sequence[str]
) -> dict[str, object]:
    """Join the configuration file, the named options (--pp ...) and the -o key=value pairs; later ones win.

    options: by configuration key; None means not given.
    Returns: the keys that were given, by canonical name. Rules between keys are not checked here, for the
        script may set the other key.
    Raises: ConfigError for an unknown key, a value that its key doesn't allow, an override without "=".
    """
    pairs = dict(parse_override(text) for text in overrides)
    return {
        **read(from_file, "the --config file").values,
        **read(
            {key: value for key, value in options.items() if value is not None}, "the command line"
        ).values,
        **read(pairs, "the command line (-o)").values,
    }


def parse_override(text: str) -> tuple[str, object]:
    """Read `key=value`; the value is JSON (true, 2, 0.5, "x") or else plain text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"-o {text!r} is not key=value", remedy="write for example: -o active_microbatches=2"
        )
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value.strip()


def worker_command(settings: LaunchSettings, python: str) -> list[str]:
    """Return the command line that every worker of this host runs."""
    target = ["-m", settings.script] if settings.module else [settings.script]
    return [python, *target, *settings.script_args]


def worker_environment(
    settings: LaunchSettings, inherited: Mapping[str, str], local_rank: int, num_cores: int
) -> dict[str, str]:
    """Return the complete environment of one worker.

    inherited: the launcher's own environment; it keeps OMP_NUM_THREADS and the like if set there.
    num_cores: cores this host's workers share.
    """
    if settings.master_port is None:
        raise ConfigError("the job has no port yet", remedy="reserve one with launch.ports.reserve")
    # Left over from a torchrun further up, this would keep rank 0 from opening the store.
    environment = {key: value for key, value in inherited.items() if key != "TORCHELASTIC_USE_AGENT_STORE"}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # output goes through a pipe and should show at once
    environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code leaves a stack
    environment.update(config_environment(settings, inherited))
    environment.update(emulation_environment(settings, inherited))
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_worker(settings, num_cores)))
    environment.update(
        RANK=str(settings.node_rank * settings.nproc + local_rank),
        WORLD_SIZE=str(settings.world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(settings.nproc),
        GROUP_RANK=str(settings.node_rank),
        GROUP_WORLD_SIZE=str(settings.nnodes),
        MASTER_ADDR=settings.master_addr,
        MASTER_PORT=str(port_of_start(settings)),
        TORCHELASTIC_RESTART_COUNT=str(settings.num_restarts),
        TORCHELASTIC_MAX_RESTARTS=str(settings.max_restarts),
    )
    return environment


def port_of_start(settings: LaunchSettings) -> int:
    """On several nodes each restart has a port of its own: a launcher that is quick must not meet the old store."""
    assert settings.master_port is not None
    return settings.master_port + (settings.num_restarts if settings.nnodes > 1 else 0)


def config_environment(settings: LaunchSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that carry the configuration; none when no key was given.

    Keys already in the inherited variables stay, unless given again.
    """
    if not settings.config:
        return {}
    before = read(_json_object(inherited, PARAMETERS_VARIABLE), PARAMETERS_VARIABLE).values
    parameters = {
        _ENVIRONMENT_SPELLING.get(key, key): value for key, value in {**before, **settings.config}.items()
    }
    framework = {**_json_object(inherited, FRAMEWORK_VARIABLE), "sagemaker_mpi_enabled": True}
    return {PARAMETERS_VARIABLE: json.dumps(parameters), FRAMEWORK_VARIABLE: json.dumps(framework)}


def emulation_environment(settings: LaunchSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make Python processes emulate CUDA; none unless that is wanted."""
    return emulation.variables(inherited) if settings.emulate_cuda else {}


def threads_per_worker(settings: LaunchSettings, num_cores: int) -> int:
    """Return how many CPU threads each worker may use without getting in another's way."""
    return max(1, num_cores // settings.nproc)


def torchrun_equivalent(settings: LaunchSettings, inherited: Mapping[str, str], num_cores: int) -> str:
    """Return the shell command that starts the same workers with torchrun."""
    variables = config_environment(settings, inherited) | emulation_environment(settings, inherited)
    if "OMP_NUM_THREADS" not in inherited:
        variables["OMP_NUM_THREADS"] = str(threads_per_worker(settings, num_cores))
    words = ["torchrun", f"--nproc-per-node={settings.nproc}"]
    if settings.nnodes > 1:
        words += [f"--nnodes={settings.nnodes}", f"--node-rank={settings.node_rank}"]
        words += [f"--master-addr={settings.master_addr}"]
    if settings.master_port is None:
        words += ["--standalone"]
    else:
        words += [f"--master-port={settings.master_port}"]
    if settings.max_restarts:
        words += [f"--max-restarts={settings.max_restarts}"]
    if settings.module:
        words += ["-m"]
    words += [settings.script, *settings.script_args]
    return " ".join([f"{key}={shlex.quote(value)}" for key, value in variables.items()] + [shlex.join(words)])


def check_devices(settings: LaunchSettings, num_devices: int, inherited: Mapping[str, str]) -> None:
    """Refuse more processes than accelerators on this host; 0 devices means training on the CPU.

    Raises: ConfigError naming both numbers.
    """
    if num_devices == 0 or settings.nproc <= num_devices or inherited.get("SHARDWRIGHT_SHARE_DEVICE") == "1":
        return
    raise ConfigError(
        f"--nproc is {settings.nproc}, but this host has {num_devices} "
        f"accelerator{'s' * (num_devices != 1)} to use",
        remedy=f"--nproc {num_devices} or lower degrees; CUDA_VISIBLE_DEVICES= (empty) to train on the CPU; "
        "SHARDWRIGHT_SHARE_DEVICE=1 to let processes share a device (for tests)",
    )


def _default_nproc(degrees: tuple[int, int], nnodes: int) -> int:
    needed = degrees[0] * degrees[1]
    if needed % nnodes != 0:
        raise ConfigError(
            f"{needed} processes (pipeline degree {degrees[0]} x tensor degree {degrees[1]}) "
            f"can't be spread evenly over --nnodes {nnodes}",
            remedy="pass --nproc, the number of processes on each node",
        )
    return needed // nnodes


def _check_world(world_size: int, degrees: tuple[int, int]) -> None:
    product = degrees[0] * degrees[1]
    if world_size % product != 0:
        raise ConfigError(
            f"the world has {world_size} process{'es' * (world_size != 1)}, but pipeline_parallel_degree "
            f"{degrees[0]} x tensor_parallel_degree {degrees[1]} = {product} must divide that number",
            remedy=f"a multiple of {product} processes (--nproc times --nnodes), or other degrees",
        )


def _degrees_of(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the pipeline and tensor degrees that the given keys fix; 1 where they say nothing."""
    pipeline, tensor = config.get(_PIPELINE_KEY, 1), config.get(_TENSOR_KEY, 1)
    assert isinstance(pipeline, int)
    assert isinstance(tensor, int)
    return pipeline, tensor


def _json_object(environ: Mapping[str, str], variable: str) -> Mapping[str, object]:
    text = environ.get(variable, "").strip()
    return unwrap_json(text, variable) if text else {}

"""``dclightning serve``: vLLM's API server for a model, to sample for runs on other machines.

Its engine is that of VLLMEngine, with the same options. Runs reach it with RemoteEngine, and push their weights into
it. On an address that other machines can reach it asks for a token: DCLIGHTNING_TOKEN in the environment.
"""

import asyncio
import os
from ipaddress import ip_address
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from transformers import AutoConfig

from dclightning.errors import UserError, one_line
from dclightning.identity import architecture, fingerprint
from dclightning.models import from_pretrained, longest_context, resolve_model
from dclightning.rollout.plugin import SERVING, TRANSFER
from dclightning.rollout.servers import TOKEN
from dclightning.rollout.vllm import VLLMEngine


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = ArgumentParser(prog="dclightning serve", description=__doc__, exit_on_error=False)
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_function_arguments(serve, skip={"engine"})
    parser.add_class_arguments(VLLMEngine, None)
    try:
        options = parser.instantiate_classes(parser.parse_args(arguments[1:])).as_dict()
        options.pop("config")
        served = {name: options.pop(name) for name in ("model", "host", "port", "max_length")}
        engine = VLLMEngine(**options)
    except (ArgumentError, ValueError) as error:
        raise UserError(one_line(error)) from error
    serve(engine=engine, **served)


def serve(
    model: str, engine: VLLMEngine, host: str = "127.0.0.1", port: int = 8000, max_length: int | None = None
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        model: By hub name or folder, or one that ships with the package.
        engine: How it samples; it is not started itself.
        host: The address to listen at.
        port: The port to listen at.
        max_length: Longest sequence, in tokens, prompt included; by default the model's longest.

    Raises:
        UserError: If others could reach it and there is no token, or vLLM refuses the model.
    """
    if not os.environ.get(TOKEN) and not _is_loopback(host):
        raise UserError(f"host={host!r}: others can reach it; set {TOKEN} in the environment, or serve at 127.0.0.1")
    if not 0 < port < 2**16:
        raise UserError(f"port={port}: must be from 1 to 65535")
    if max_length is not None and max_length < 2:
        raise UserError(f"max_length={max_length}: must be at least 2, a token of a prompt and one of a response")
    if engine.sleep:
        raise UserError("sleep=true: a server has nobody to make room for; set it to false")
    if engine.lora_rank:
        raise UserError(f"lora_rank={engine.lora_rank}: must be 0, for runs push adapters merged into the weights")
    # Found by the processes that vLLM starts; the second makes one less of them on a CPU.
    os.environ[SERVING] = "1"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dclightning.rollout.server import Served

    folder, max_length = resolve_model(model), max_length or longest_context(model)
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    vars(arguments).update(_for_servers(max_length), **engine.arguments(folder, max_length))
    vars(arguments).update(
        host=host,
        port=port,
        middleware=["dclightning.rollout.server.Gate"],
        allowed_origins=[],  # no page in a browser may ask
        disable_uvicorn_access_log=True,
        weight_transfer_config={"backend": TRANSFER},
        worker_extension_cls="dclightning.rollout.transfer.WorkerExtension",
    )
    trainable = getattr(from_pretrained(AutoConfig, model), "quantization_config", None) is None
    arguments.served = Served(fingerprint(model), architecture(model), trainable, _settings(engine))
    try:
        asyncio.run(run_server(arguments, timeout_graceful_shutdown=5))
    except OSError as error:
        raise UserError(f"host={host!r}, port={port}: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:
        raise UserError(f"vLLM cannot serve model={model!r}: {' '.join(str(error).split())}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _for_servers(max_length: int) -> dict[str, Any]:
    """Where a server's defaults have to differ from those of an engine in the trainer's process."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    # A prompt that is read in parts makes vLLM rewind the request's random generator, which on a CPU cannot be done.
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, max_length), "max_num_seqs": 256}


def _settings(engine: VLLMEngine) -> dict[str, Any]:
    names = ("quantization", "simulate", "simulate_activations", "kv_cache_dtype", "routing_replay")
    return {name: getattr(engine, name) for name in names}

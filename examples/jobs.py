"""The processes of a demo: forks of one that has imported what they need, which takes seconds.

A demo has up to ten processes, and the imports of each take 5 seconds of a core. The process of the
demo may not compute with several threads before it forks the last one, nor call CUDA.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import transformers
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import parallel_ext as px


def torchrun(main: Callable[[], None], ranks: int, *options: Any) -> float:
    """Run the main function of an example on some ranks; seconds that it took.

    It is ``torchrun --standalone --nproc_per_node RANKS SCRIPT OPTIONS``, but for the imports.
    """
    _import_what_is_lazy()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counts GPUs without CUDA
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    began = time.perf_counter()
    elastic_launch(config, _on_a_rank)(main, *options)
    return time.perf_counter() - began


def alone(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """What a function returns in a process of its own, on two threads; seconds that it took."""
    _import_what_is_lazy()
    began = time.perf_counter()
    fork = get_context("fork")
    with ProcessPoolExecutor(1, fork, torch.set_num_threads, (2,)) as process:
        result = process.submit(function, *args).result()
    return result, time.perf_counter() - began


def call(main: Callable[[], None], *options: Any) -> None:
    """Call the main function of an example with a command line."""
    sys.argv = [main.__module__, *map(str, options)]
    main()


def _on_a_rank(main: Callable[[], None], *options: Any) -> None:
    asked = False

    def remember(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        if signal.getsignal(number) is remember:  # the example does not listen
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, remember)  # that of torchrun came with the fork
    torch.set_num_threads(1)
    call(main, *options)
    if asked:
        os._exit(0)  # torchrun takes no results after a SIGTERM, and waits for the end


def _import_what_is_lazy() -> None:
    """Import what both packages would otherwise import in each process, at the first use."""
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM"):
        getattr(transformers, name)
    for name in px.__all__:
        getattr(px, name)

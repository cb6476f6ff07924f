"""Jobs of two gloo ranks that last a moment, forked after the imports: how they start and end.

``python short_jobs.py LOOPS`` prints as JSON, by the name of the case, what each of its jobs did.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

atexit.register(lambda: _last_words())  # the last to run, as the first here

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import parallel_ext as px  # noqa: E402
from parallel_ext import ops  # noqa: E402

TIMEOUT_S = 5.0
LONG_S = 60.0


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _last_words() -> None:
    """Say how many threads live when all handlers of the end have run."""
    if "RANK" in os.environ:
        print("threads:", _threads(), flush=True)


def _communicate(mesh: px.Mesh) -> None:
    for size in (3, 100_000):
        ops.reduce_from_region(torch.ones(size), mesh.tp)
    mesh.control.all_gather_object(mesh.rank)
    for work in [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(4)]:
        work.wait()


def ends() -> None:
    _communicate(px.init_mesh(tp=2, timeout=LONG_S))


def shuts_down() -> None:
    _communicate(px.init_mesh(tp=2, timeout=LONG_S))
    px.shutdown()
    px.shutdown()
    print("initialized:", dist.is_initialized(), flush=True)


def group_of_the_caller() -> None:
    dist.init_process_group("gloo")
    _communicate(px.init_mesh(tp=2, timeout=LONG_S))
    px.shutdown()
    print("initialized:", dist.is_initialized(), flush=True)
    dist.destroy_process_group()


def raises() -> None:
    _communicate(px.init_mesh(tp=2, timeout=LONG_S))
    raise KeyError("after all")


def lost_after_the_store() -> None:
    if os.environ["RANK"] == "1":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        dist.TCPStore(address, port, 2, False, timedelta(seconds=30), wait_for_workers=False)
        return
    _fails()


def lost_without_a_word() -> None:
    if os.environ["RANK"] == "0":
        _fails()


def lost_with_the_store() -> None:
    if os.environ["RANK"] == "1":
        _fails()


def lost_before_the_groups() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONG_S))
    if os.environ["RANK"] == "0":
        _fails()


def lost_among_the_groups() -> None:
    if os.environ["RANK"] == "1":
        dist.new_group = lambda *_, **__: os._exit(0)
    _fails()


def _fails() -> None:
    began = time.monotonic()
    try:
        px.init_mesh(tp=2, timeout=TIMEOUT_S)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        print(f"seconds: {time.monotonic() - began:.1f}", flush=True)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def _fork(case: Callable[[], None], rank: int, port: int, out: int) -> int:
    process = os.fork()
    if process:
        return process
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    for stream in (1, 2):
        os.dup2(out, stream)
    case()
    sys.exit(0)  # as a script ends, with all that the interpreter does then


Job = list[tuple[int, int]]
"""Process and output of each rank."""


def start(case: Callable[[], None]) -> Job:
    port, outputs = _free_port(), [os.memfd_create("output") for _ in range(2)]
    return [(_fork(case, rank, port, output), output) for rank, output in enumerate(outputs)]


def end(job: Job) -> list[tuple[int, str]]:
    """Exit code (negative for a signal) and output of each rank."""
    results = []
    for process, output in job:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with open(output, "rb") as file:
            file.seek(0)  # of the ranks' file, too
            results.append((code, file.read().decode()))
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be looked through at the end of each rank
    done: dict[str, Any] = {}
    for shared in (True, False):
        px._C.set_shared_memory(shared)
        done[f"ends, {shared}"] = [end(start(ends)) for _ in range(int(sys.argv[1]))]
    for case in (shuts_down, group_of_the_caller, raises):
        done[case.__name__] = [end(start(case))]
    waiting = {  # all at once for those who do not come
        case.__name__: start(case)
        for case in (
            *(lost_after_the_store, lost_without_a_word, lost_with_the_store),
            *(lost_before_the_groups, lost_among_the_groups),
        )
    }
    print(json.dumps(done | {name: [end(job)] for name, job in waiting.items()}))

"""Scripts as ``python`` and ``torchrun`` run them, forked from what has imported torch before."""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import fork

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def finished(result: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed, which must have succeeded."""
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run_forked(
    command: Sequence[Any],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path = ".",
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command of ``sys.executable`` as ``subprocess.run`` does, without its seconds of start.

    Of torchrun's command line the number of ranks counts, which are then forked here. glibc reads
    its variables at the start of a process: they have no effect.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = [Path(folder, name) for name in ("stdout", "stderr")]
        command, environment = [*map(str, command)], dict(os.environ if env is None else env)
        process = fork(0, _agent, command, environment, str(Path(cwd).resolve()), written)
        try:
            process.join(timeout)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(command, timeout)
        finally:
            if process.exitcode is None:  # also where Ctrl-C ends the tests
                os.killpg(process.pid, signal.SIGKILL)
        texts = [path.read_text() for path in written]
    return subprocess.CompletedProcess(command, process.exitcode, *texts)


def _agent(
    command: list[str], environment: dict[str, str], folder: str, written: list[Path]
) -> None:
    os.setsid()
    os.chdir(folder)
    for descriptor, path in enumerate(written, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.exit(_run_ranks(command, environment).returncode)


def _run_ranks(
    command: list[str], env: Mapping[str, str], check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Fork the ranks, and wait for them; what one of them fails with ends the others."""
    given, environment = command, dict(env)
    assert command[0] == sys.executable
    command, world = command[1:], 0
    if command[:2] == ["-m", "torch.distributed.run"]:
        command = command[2:]
        while command[0].startswith("--"):
            option, _, value = command.pop(0).partition("=")
            world = int(value) if option.replace("_", "-") == "--nproc-per-node" else world
        command = command[1:] if command[0] == sys.executable else command
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        environment |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = set()
    for rank in range(max(world, 1)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}
        pid = os.fork()
        if pid == 0:
            _become(command, environment | own)
        ranks.add(pid)
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    if failed and check:
        raise subprocess.CalledProcessError(failed, given)
    return subprocess.CompletedProcess(given, failed)


def _become(command: list[str], environment: dict[str, str]) -> None:
    """Be the process of a command, from its first line to its exit code."""
    code = 1
    try:
        gc.freeze()
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
        subprocess.run = _run_ranks  # of a benchmark, which starts ranks
        code = _run_main(command)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run_main(command: list[str]) -> int:
    module = command[0] == "-m"
    sys.argv = command[1:] if module else command
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

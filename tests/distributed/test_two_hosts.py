"""Jobs on two hosts: they train as one process does, and end in time when a host is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
import torch
from hosts import INTERFACE, NAMES, Host, Hosts, need_hosts, two_hosts
from ranks import Raised, Ranks, pool
from reference import FLOOR, Tiny, batch, parallel, quietly, shard_differences, worst
from reference_mixtral import Layout, TinyMixtral, training_differences
from reference_training import (
    MIXTRAL,
    Job,
    build,
    one_step,
    optimizer_of,
    scheduler_of,
    train,
)

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.distributed.interfaces import hint

TIMEOUT_S = 4.0
SLACK_S = 8.0  # for a machine with more ranks than cores, and to find out who is missing


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[tuple[Ranks, tuple[Host, Host]]]:
    """Two ranks on each host, for tests that leave both hosts and all ranks alive."""
    need_hosts()
    with two_hosts() as hosts:
        ranks = Ranks(4, Hosts(hosts, 2))
        yield ranks, hosts
        ranks.close()


# Training.


def _parity(tiny: TinyMixtral, layout: Layout) -> dict[str, float]:
    mesh = layout.mesh()
    reference = tiny.model()
    model = parallel(reference, mesh)
    if layout.dp > 1:
        px.data_parallel(model, mesh, zero=2)
    return training_differences(reference, model, mesh, tiny, 2)


LAYOUTS = {
    "tp across the hosts": Layout(1, 4, 1),
    "tp inside of a host, dp across": Layout(2, 2, 2),
    "ep across the hosts": Layout(2, 2, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_equals_the_single_process_with(name: str, four_ranks: Any) -> None:
    ranks, _ = four_ranks
    tiny = TinyMixtral(num_experts=5)
    for differences in ranks.run(_parity, tiny, LAYOUTS[name]):
        error, worst_name = worst(differences)
        assert error <= FLOOR[tiny.dtype], f"{worst_name} differs by {error:.1e}"


def _sums(group: str) -> tuple[list[float], int]:
    mesh = Layout(2, 2, 1).mesh()
    px._C.reset_collective_counts()
    summed = ops.reduce_from_region(torch.tensor([2.0**mesh.rank]), getattr(mesh, group))
    return summed.tolist(), px._C.collective_counts().get("in_shared_memory", 0)


@pytest.mark.parametrize(("group", "sums", "shared"), [("tp", [3, 12], 1), ("dp", [5, 10], 0)])
def test_memory_is_shared_inside_of_a_host_alone(
    group: str, sums: list[float], shared: int, four_ranks: Any
) -> None:
    found = four_ranks[0].run(_sums, group)
    place = [0, 0, 1, 1] if group == "tp" else [0, 1, 0, 1]
    assert found == [([sums[index]], shared) for index in place]


def _sum_over_hosts(dtype: torch.dtype, numel: int) -> tuple[bytes, float, int]:
    """The bits of a sum, how far it is off, and whether it went through shared memory."""
    mesh = Layout(1, 4, 1).mesh()
    parts = torch.randn(4, numel, generator=torch.Generator().manual_seed(7)).mul(9).to(dtype)
    px._C.reset_collective_counts()
    summed = ops.reduce_from_region(parts[mesh.rank].clone(), mesh.tp)
    expected = parts.double().sum(0)
    off = (summed.double() - expected).abs().max().item() if numel else 0.0
    shared = px._C.collective_counts().get("in_shared_memory", 0)
    return summed.view(torch.uint8).numpy().tobytes(), off, shared


@pytest.mark.parametrize("numel", [0, 1, 4099, 2**18 + 1])
@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.5)],
)
def test_a_short_sum_goes_first_inside_of_each_host(
    dtype: torch.dtype, most: float, numel: int, four_ranks: Any
) -> None:
    found = four_ranks[0].run(_sum_over_hosts, dtype, numel)
    short = numel * dtype.itemsize <= 2**20
    assert [shared for _, _, shared in found] == [int(short)] * 4
    assert len({bits for bits, _, _ in found}) == 1, "the ranks have other bits"
    assert found[0][1] <= most


# Files.


def _save(job: Job, root: Path) -> None:
    model, optimizer, scheduler, mesh = build(job)
    train(model, optimizer, scheduler, mesh, range(2))
    px.save_checkpoint(root, 2, model, optimizer, scheduler, asynchronous=True)
    px.wait_for_checkpoint(model)


def _resume(job: Job, root: Path) -> tuple[float, str]:
    model, optimizer, scheduler, mesh = build(job, seed=5)
    with quietly():  # of other random numbers
        px.load_checkpoint(root, model, optimizer, scheduler)
    train(model, optimizer, scheduler, mesh, range(2, 4))
    reference = job.tiny.model()
    optimizer = optimizer_of(reference, job.optimizer)
    scheduler = scheduler_of(optimizer)
    for step in range(4):
        one_step(reference, optimizer, scheduler, batch(reference.config.vocab_size, 4, 6, step))
    return worst(shard_differences(model, dict(reference.named_parameters()), False))


def test_a_job_of_two_hosts_resumes_on_one(four_ranks: Any, tmp_path: Path) -> None:
    four_ranks[0].run(_save, Job(MIXTRAL, Layout(2, 2, 4), zero=2), tmp_path)
    for error, name in pool(2).run(_resume, Job(MIXTRAL, Layout(1, 2, 2)), tmp_path):
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


def _save_to(how: str, directory: Path) -> None:
    lora = how == "save_pretrained of an adapter"
    model, optimizer, _, _ = build(Job(layout=Layout(2, 2, 1), zero=2, lora=lora))
    if how != "save_checkpoint":
        model.save_pretrained(directory)
    else:
        px.save_checkpoint(directory, 1, model, optimizer)


@pytest.mark.parametrize(
    "how", ["save_pretrained", "save_checkpoint", "save_pretrained of an adapter"]
)
def test_a_directory_that_is_not_shared_is_found_before_anything_is_written(
    how: str, four_ranks: Any, tmp_path: Path
) -> None:
    ranks, hosts = four_ranks
    own = tmp_path / "own"
    own.mkdir()
    for host in hosts:
        host.own_directory(own)
    said = f"is not the same directory on rank 0 (host {NAMES[0]}) and rank 2 (host {NAMES[1]})"
    out, error = own / "new" / "out", "CheckpointError"
    ranks.assert_raises(_save_to, how, out, words=f"{out} {said}", error=error)
    assert ranks.run(_entries, own) == [[]] * 4
    ranks.run(_save_to, how, tmp_path / "shared")  # the ranks can still work together
    assert not [path for path in tmp_path.rglob("*") if "token" in path.name]


def test_containers_of_one_machine_and_one_name_are_told_apart(tmp_path: Path) -> None:
    need_hosts()
    with two_hosts() as hosts:
        for host in hosts:
            host.run("hostname", "one")
            host.own_directory(tmp_path)
        ranks = Ranks(4, Hosts(hosts, 2))
        try:
            said = f"{tmp_path} is not the same directory on rank 0 (host one) and rank 2 (host one"
            ranks.assert_raises(_save_to, "save_checkpoint", tmp_path, words=said)
        finally:
            ranks.close()


def _entries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def _load_from(root: Path) -> None:
    model, optimizer, scheduler, _ = build(Job(layout=Layout(2, 2, 1), zero=2))
    px.load_checkpoint(root, model, optimizer)


def test_a_load_from_a_directory_of_one_host_says_so(four_ranks: Any, tmp_path: Path) -> None:
    ranks, hosts = four_ranks
    root = tmp_path / "root"
    ranks.run(_save_to, "save_checkpoint", root)
    hosts[1].own_directory(root)
    said = f"is not the same directory on rank 0 (host {NAMES[0]}) and rank 2 (host {NAMES[1]})"
    ranks.assert_raises(_load_from, root, words=said, error="CheckpointError")


# A host, or the cable, is lost.


def _cut(hosts: tuple[Host, Host]) -> None:
    hosts[1].link("down")


def _kill(hosts: tuple[Host, Host]) -> None:
    hosts[1].kill()


def _lose_power(hosts: tuple[Host, Host]) -> None:
    """Both: nobody is told that the processes are gone."""
    hosts[0].link("down")
    hosts[0].kill()


@contextmanager
def _when(ready: list[Path], action: Any, *args: Any) -> Iterator[None]:
    """Run an action once the ranks have made their files, and a moment has gone by."""

    def act() -> None:
        while not all(path.exists() for path in ready):
            time.sleep(0.05)
        time.sleep(0.3)
        action(*args)

    thread = Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join()


@contextmanager
def _timed() -> Iterator[None]:
    """Let an error end with the seconds that it took to come."""
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        error.args = (f"{error} [{time.monotonic() - began:.1f} s]",)
        raise


def _seconds(error: Raised) -> float:
    return float(re.search(r"\[([\d.]+) s\]$", error.text)[1])


def _until_it_fails(what: str, ready: Path) -> None:
    sides = {"data parallelism": {"dp": 2}, "expert parallelism": {"ep": 2}}.get(what, {"tp": 2})
    mesh = px.init_mesh(**sides, timeout=TIMEOUT_S)
    tiny = TinyMixtral(vocab_size=101) if "ep" in sides else Tiny()
    model = parallel(tiny.model(), mesh, agreement=what != "training without agreement")
    if mesh.dp_size > 1:
        px.data_parallel(model, mesh, zero=3)
    Path(f"{ready}-{mesh.rank}").touch()
    while True:
        with _timed():
            if what == "saving":
                model.save_pretrained(ready.with_name("out"))
            else:
                model(**batch(tiny.vocab_size)).loss.backward()


LOSSES = {
    "a cut cable": (_cut, (0, 1)),
    "a killed host": (_kill, (0,)),
    "the host of the store without power": (_lose_power, (1,)),
}


WAYS = ["training", "training without agreement", "saving"]
WAYS += ["data parallelism", "expert parallelism"]
OFTEN = [
    *(("a cut cable", what) for what in WAYS[1:]),
    ("a killed host", "training"),
    ("the host of the store without power", "training"),
]
OTHERS = [case for case in product(LOSSES, WAYS) if case not in OFTEN]


def _lose(loss: str, each: int, function: Any, *args: Any) -> list[tuple[int, Raised]]:
    """Return the ranks that live, with what they raise, of a job of ``each`` on two hosts."""
    lose, left = LOSSES[loss]
    living = [each * host + rank for host in left for rank in range(each)]
    with two_hosts() as hosts, TemporaryDirectory() as folder:
        ranks, ready = Ranks(2 * each, Hosts(hosts, each)), Path(folder, "ready")
        try:
            with _when([Path(f"{ready}-{rank}") for rank in range(2 * each)], lose, hosts):
                raised = ranks.run_living(living, function, *args, ready)
        finally:
            ranks.close()
    for error in raised:
        assert isinstance(error, Raised), (loss, args, error)
        assert _seconds(error) < TIMEOUT_S + SLACK_S, (loss, args, error)
    return [*zip(living, raised, strict=True)]


def _lose_each(cases: Sequence[tuple[Any, ...]]) -> list[list[tuple[int, Raised]]]:
    """Return what ``_lose`` does of each case; some at a time, as they wait most of it."""
    need_hosts()
    with ThreadPoolExecutor(3) as threads:
        return [*threads.map(lambda case: _lose(*case), cases)]


@pytest.mark.parametrize("cases", [OFTEN, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_the_ranks_that_live_raise_in_time(cases: list[tuple[str, str]]) -> None:
    found = _lose_each([(loss, 1, _until_it_fails, what) for loss, what in cases])
    for case, raised in zip(cases, found, strict=True):
        for rank, error in raised:
            if rank == 0:
                assert f"rank 1 on host {NAMES[1]} " in error.text, (case, error)
                continue
            assert "the store of the job at 10.77.0.1:29517 cannot be reached" in error.text, case
            assert "its host or the network to it is down (no answer within" in error.text, case
            if case[1] != "saving":
                assert f"nothing is known of rank 0 on host {NAMES[0]}, since" in error.text, case


def _sum_until_it_fails(ready: Path) -> None:
    mesh = px.init_mesh(tp=4, timeout=TIMEOUT_S)
    Path(f"{ready}-{mesh.rank}").touch()
    while True:
        with _timed():
            ops.reduce_from_region(torch.ones(5), mesh.tp)


def test_all_ranks_of_a_host_raise_in_time() -> None:
    jobs = _lose_each([(loss, 2, _sum_until_it_fails) for loss in ("a cut cable", "a killed host")])
    for rank, error in sum(jobs, []):
        if rank < 2:
            words = f"ranks 2, 3 on host {NAMES[1]} did not within {TIMEOUT_S:g} s, or ended before"
            assert words in error.text, error
        else:
            assert "the store of the job at 10.77.0.1:29517 cannot be reached" in error.text, error


# The page about it.

SCRIPT = """
import torch, parallel_ext as px
mesh = px.init_mesh(tp=2)
print("sum", px.ops.reduce_from_region(torch.ones(3), mesh.tp).tolist())
"""


def _printed(command: str) -> list[str]:
    """Run a command on two hosts; return what it prints on each."""
    need_hosts()
    with two_hosts() as hosts, ExitStack() as agents:
        running = []
        for number, host in enumerate(hosts):
            host.run("hostname", host.address)  # a name that both hosts know
            own = {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": INTERFACE}
            agent = subprocess.Popen(
                host.inside("bash", "-c", command),
                env=os.environ | own | {"HOST_RANK": str(number)},
                stdout=subprocess.PIPE,
                text=True,
            )
            running.append(agents.enter_context(agent))
        return [agent.communicate(timeout=120)[0] for agent in running]


def test_the_command_of_the_page_starts_a_job(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "multi-host.md").read_text()
    command = re.search(r"```bash\n(torchrun .*?)```", page, re.DOTALL)[1]
    (tmp_path / "train.py").write_text(SCRIPT)
    for said, here in (
        ("torchrun", f"{sys.executable} -m torch.distributed.run"),
        ("--nproc-per-node=8", "--nproc-per-node=1"),
        (" train.py", f" {tmp_path}/train.py"),
    ):
        assert said in command
        command = command.replace(said, here)
    assert _printed(command) == ["sum [2.0, 2.0, 2.0]\n"] * 2


STARTED_AGAIN = """
import os, pathlib, sys, time, torch, parallel_ext as px
started = pathlib.Path(sys.argv[1])
again = started.exists()
mesh = px.init_mesh(tp=2, timeout=60)
if not again and mesh.rank == 1:
    started.touch()
    os._exit(3)
if not again:
    time.sleep(60)  # the agent of this host ends it, since that of the other one starts again
print(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("sum", px.ops.reduce_from_region(torch.ones(3), mesh.tp).tolist())
"""


def test_ranks_that_are_started_again_on_two_hosts_come_together(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTED_AGAIN)
    rendezvous = "--rdzv-backend=c10d --rdzv-id=job --rdzv-endpoint=$MASTER_ADDR:29400"
    printed = _printed(
        f"{sys.executable} -m torch.distributed.run --nnodes=2 --max-restarts=1 {rendezvous} "
        f"{script} {tmp_path}/started"
    )
    # Only one of the hosts counts.
    assert sorted(printed) == ["0\nsum [2.0, 2.0, 2.0]\n", "1\nsum [2.0, 2.0, 2.0]\n"]


# Interfaces.


def _join() -> None:
    with _timed():
        px.init_mesh(tp=2, timeout=TIMEOUT_S)


def _raised_with(interface: str | None) -> list[Any]:
    need_hosts()
    with two_hosts() as hosts:
        ranks = Ranks(2, Hosts(hosts, 1, interface))
        try:
            return ranks.run_raising(_join)
        finally:
            ranks.close()


def test_an_interface_that_is_not_there_is_named() -> None:
    for error in _raised_with("eth9"):
        assert error.type == "CollectiveTimeout"
        assert "GLOO_SOCKET_IFNAME=eth9 must name an interface of this host" in error.text


def test_hosts_that_take_their_own_loopback_are_told_of_the_interface() -> None:
    errors = _raised_with(None)
    assert [error.type for error in errors] == ["CollectiveTimeout"] * 2
    assert all("set GLOO_SOCKET_IFNAME" in error.text for error in errors)
    # One of them connects to the other, and finds nobody on its own host.
    assert any("gloo has taken 127.0.0.1, which no other host" in error.text for error in errors)
    assert all(_seconds(error) < TIMEOUT_S + SLACK_S for error in errors)


def test_hints_name_the_interface_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = RuntimeError("Gloo connectFullMesh failed with [...] remote=[127.0.0.1]:3021")
    assert "gloo has taken 127.0.0.1" in hint(failed)
    assert "set GLOO_SOCKET_IFNAME" in hint(failed)
    other = RuntimeError("Gloo connectFullMesh failed with [...] remote=[172.17.0.1]:3021")
    assert "could not connect to a rank at 172.17.0.1; if all are alive, set GLOO" in hint(other)
    assert "set NCCL_SOCKET_IFNAME" in hint(RuntimeError("ncclRemoteError: A call failed"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert hint(RuntimeError("gloo: connection closed by peer [127.0.0.1]:3021")) == ""

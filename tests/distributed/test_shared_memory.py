"""The collectives of ranks on one host: the same results as through the group, and no hang."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, RankError, pool
from reference_ops import assert_all_raise, data_bytes, on_ranks

from parallel_ext import _C
from parallel_ext.ops import Group, copy_to_region, gather_from_region, reduce_from_region

SLOT = 2 << 20  # bytes; larger messages travel in pieces (csrc/comm/shared_memory.cpp)
SIZES = [0, 1, 7, 1025, SLOT // 4, 3 * SLOT // 4 + 5]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _carried() -> int:
    """Collectives of this process that went through shared memory."""
    return _C.collective_counts().get("in_shared_memory", 0)


def _call_in_world(function: Callable[[Group], Any]) -> Any:
    return function(Group.of(dist.group.WORLD))


def _sums(group: Group, dtype: torch.dtype) -> tuple[int, list[bytes], list[torch.Tensor]]:
    before = _carried()
    results = []
    for size in SIZES:
        torch.manual_seed(size + group.rank)
        results.append(reduce_from_region(torch.randn(size).to(dtype), group))
    return _carried() - before, [data_bytes(r) for r in results], results


def _in_rank_order(size: int, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum as promised: in rank order, 16-bit types in fp32, rounded once."""
    total: torch.Tensor | None = None
    for rank in range(ranks):
        torch.manual_seed(size + rank)
        part = torch.randn(size).to(dtype)
        part = part if dtype == torch.float64 else part.float()
        total = part if total is None else total + part
    return total.to(dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_those_of_the_rank_order_bit_by_bit(ranks, dtype):
    for carried, _, results in on_ranks(ranks, _sums, dtype):
        assert carried == len(SIZES)
        for size, result in zip(SIZES, results, strict=True):
            assert torch.equal(result, _in_rank_order(size, ranks, dtype)), size


def _gathers(group: Group) -> int:
    before = _carried()
    for size in SIZES:
        full = torch.arange(size * group.size, dtype=torch.int64)[None]
        own = full[:, size * group.rank : size * (group.rank + 1)]
        assert torch.equal(gather_from_region(own, [size] * group.size, group), full)
    return _carried() - before


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathers_are_in_rank_order(ranks):
    assert on_ranks(ranks, _gathers) == [len(SIZES)] * ranks


def _at_random(group: Group, steps: int) -> None:
    """Sums and gathers of random sizes by ranks that come at random times."""
    shared, own = random.Random(0), random.Random(group.rank)
    for step in range(steps):
        size = shared.choice([0, 1, 3, 64, 5000, SLOT // 8 + 1, SLOT // 2])
        value = float(step % 1000)
        if own.random() < 0.1:
            time.sleep(own.random() * 0.002)
        if shared.random() < 0.5:
            total = reduce_from_region(torch.full((size,), value + group.rank), group)
            ranks = group.size * (group.size - 1) / 2
            assert torch.equal(total, torch.full((size,), value * group.size + ranks)), step
        else:
            all_parts = gather_from_region(
                torch.full((1, size), value + group.rank), [size] * group.size, group
            )
            expected = torch.arange(group.size).repeat_interleave(size)[None] + value
            assert torch.equal(all_parts, expected), step


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_out_of_step_never_read_too_early_or_too_late(ranks):
    on_ranks(ranks, _at_random, 600)


def _without(group: Group, unwilling: list[int]) -> tuple[int, bytes]:
    before = _carried()
    _C.set_shared_memory(group.rank not in unwilling)
    try:
        result = reduce_from_region(torch.full((5,), group.rank + 1.0), group)
    finally:
        _C.set_shared_memory(True)
    return _carried() - before, data_bytes(result)


@pytest.mark.parametrize("unwilling", [[0], [1], [0, 1, 2]])
def test_all_ranks_use_the_group_when_one_must(unwilling):
    expected = (0, data_bytes(torch.full((5,), 6.0)))
    assert on_ranks(3, _without, unwilling) == [expected] * 3


def _without_room(group: Group) -> int:
    before, limits = _carried(), resource.getrlimit(resource.RLIMIT_FSIZE)
    _C.set_shared_memory(True)  # asks the neighbours anew
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert reduce_from_region(torch.ones(3), group).tolist() == [2.0] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        _C.set_shared_memory(True)
    return _carried() - before


def test_a_host_without_room_for_the_memory_uses_the_group():
    assert on_ranks(2, _without_room) == [0, 0]


def _files_left(group: Group) -> list[str]:
    def files() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("parallel_ext-*")}

    before = files()  # a process that was killed elsewhere may have left one
    dist.barrier()
    _C.set_shared_memory(True)
    reduce_from_region(torch.ones(3), group)
    dist.barrier()
    return sorted(files() - before)


def test_no_file_is_left_in_the_shared_memory():
    assert on_ranks(2, _files_left) == [[], []]


def _memory_of(process: int) -> int:
    """How many descriptors of memory for ranks the process has."""
    links = []
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(descriptor))
    return sum("parallel_ext-" in link for link in links)


def _tell_the_host(group: dist.ProcessGroup) -> None:
    """Take part in the first exchange of csrc/comm/known_groups.cpp, as a rank of this host."""
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host += os.readlink("/proc/self/ns/pid")
    _exchange(group, struct.pack("=127s?", host.encode(), True))


def _exchange(group: dist.ProcessGroup, record: bytes) -> None:
    part = torch.tensor(list(record), dtype=torch.uint8)
    dist.all_gather([torch.empty_like(part) for _ in range(2)], part, group=group)


def _killed_before_the_ranks_meet(group: Group) -> list[str]:
    """Rank 0 has made the memory, and nobody else has opened it."""
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    first, before = processes[0], _memory_of(processes[0])
    files = set(Path("/dev/shm").iterdir())
    own = dist.new_group([0, 1])
    dist.barrier()
    if group.rank == 0:
        reduce_from_region(torch.ones(3), Group.of(own))
    _tell_the_host(own)
    while _memory_of(first) == before:
        time.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    left = set(Path("/dev/shm").iterdir()) - files
    return sorted(path.name for path in left if path.name.startswith("parallel_ext-"))


def test_a_killed_rank_leaves_no_file_in_the_shared_memory():
    assert pool(2).run_losing(0, _call_in_world, _killed_before_the_ranks_meet) == [[]]


def _alone_in_an_exchange(group: Group, told: int, killed: bool) -> float:
    """Rank 1 takes part in so many exchanges in which the ranks meet; seconds until rank 0 raises.

    In the others it is killed, or late.
    """
    own = dist.new_group([0, 1], timeout=timedelta(seconds=20 if killed else 2))
    dist.barrier()
    if group.rank == 1:
        if told:
            _tell_the_host(own)
        time.sleep(0.5 if killed else 6)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="reduce_from_region: "):
        reduce_from_region(torch.ones(3), Group.of(own))
    return time.monotonic() - begin


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "late"])
@pytest.mark.parametrize("told", [0, 1])
def test_no_rank_waits_without_a_limit_for_another_to_meet_it(told: int, killed: bool):
    alone = partial(_alone_in_an_exchange, told=told, killed=killed)
    (seconds,) = pool(2).run_losing(1, _call_in_world, alone)
    assert seconds < (10 if killed else 5), "a killed rank at once, a late one within 2 s"


FILE_BYTES = 4096 + 3 * SLOT  # of the memory of two ranks
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _offered(kind: str, folder: str) -> int:
    """A descriptor of what another rank must not take for the memory of its group."""
    if kind == "a file":
        descriptor = os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT)
    elif kind == "a pipe":
        return os.pipe()[0]
    else:
        name = "somebody's" if kind == "memory of others" else "parallel_ext-ranks"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, FILE_BYTES + (4096 if kind == "longer memory" else 0))
    if kind != "memory without seals" and kind != "a file":
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def _offers(group: Group, kind: str, folder: str) -> tuple[int, float]:
    """Rank 0 says what it would in the exchanges in which ranks meet, but offers something else."""
    own, before = dist.new_group([0, 1], timeout=timedelta(seconds=20)), _carried()
    total = torch.full((3,), group.rank + 1.0)
    if group.rank == 1:
        total = reduce_from_region(total, Group.of(own))
    else:
        descriptor = _offered(kind, folder)
        _tell_the_host(own)
        _exchange(own, struct.pack("=iiQQ?7x", os.getpid(), descriptor, 1, 2, True))
        _exchange(own, struct.pack("=??", True, False))
        dist.all_reduce(total, group=own)
        if kind != "a pipe":
            assert not any(os.pread(descriptor, FILE_BYTES, 0)), "written to"
    return _carried() - before, total[0].item()


@pytest.mark.parametrize(
    "kind",
    ["a file", "a pipe", "memory of others", "memory without seals", "longer memory", "no token"],
)
def test_only_memory_of_the_group_is_mapped(kind, tmp_path):
    assert on_ranks(2, _offers, kind, str(tmp_path)) == [(0, 3.0)] * 2


# Threads.


def _sums_of_thread(number: int, group: Group, equal_sizes: bool, start: threading.Barrier) -> list:
    """What became of each of some sums: right, wrong, or the error that ended them."""
    results = []
    addend = torch.full((3 if equal_sizes else 3 + number,), 10.0**number)
    start.wait()
    for _ in range(20):
        try:
            total = reduce_from_region(addend, group)
        except RuntimeError as error:
            return [*results, str(error)]
        results.append("right" if torch.equal(total, addend * group.size) else "wrong")
    return results


def _in_two_threads(group: Group, equal_sizes: bool) -> list[list[list[str]]]:
    trials = []
    for _ in range(6):
        own = Group.of(dist.new_group([0, 1], timeout=timedelta(seconds=5)))
        start = threading.Barrier(2)
        dist.barrier()
        with ThreadPoolExecutor(2) as executor:
            calls = [
                executor.submit(_sums_of_thread, number, own, equal_sizes, start)
                for number in range(2)
            ]
            trials.append([call.result() for call in calls])
    return trials


@pytest.mark.parametrize("equal_sizes", [True, False])
def test_of_two_threads_in_a_group_one_is_refused_and_no_sum_is_wrong(equal_sizes):
    for trials in on_ranks(2, _in_two_threads, equal_sizes):
        for threads in trials:
            last = [results[-1] for results in threads]
            assert "wrong" not in sum(threads, []), threads
            assert any("is used by another thread; ops of one" in text for text in last), threads


def _after_each_other(group: Group) -> list[str]:
    own = Group.of(dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    results = []
    for _ in range(5):  # each as soon as Python has joined the last
        thread = threading.Thread(
            target=lambda: results.append(_one_sum(own)),
        )
        thread.start()
        thread.join()
    results += [_one_sum(own), _one_sum(own)]
    with ThreadPoolExecutor(1) as executor:  # beside the main thread, which does not end
        results.append(executor.submit(_one_sum, own).result())
    return [*results, _one_sum(own)]


def _one_sum(group: Group) -> str:
    try:
        return str(reduce_from_region(torch.ones(1), group).item())
    except RuntimeError as error:
        return str(error)


def test_a_group_passes_on_when_its_thread_has_ended():
    for *results, refused, after in on_ranks(2, _after_each_other):
        assert results == ["2.0"] * 7
        assert "is used by another thread" in refused
        assert after == "2.0"


# Signals.


def _calls_of(group: Group) -> dict[str, Callable[[], Any]]:
    leaf = torch.ones(3, requires_grad=True)
    partial_loss = copy_to_region(leaf, group).sum()
    return {
        "forward": lambda: reduce_from_region(torch.ones(3), group),
        "backward": lambda: partial_loss.backward(),
        "swap": lambda: _C.swap_bytes([[], []], [[], []], group.size, group.name, 60.0),
    }


def _signalled(group: Group, call: str, number: signal.Signals, ended: Path) -> tuple[float, str]:
    """Rank 0 gets a signal while it waits for rank 1; how long it waited, and what ended it.

    Rank 1 comes when the signal has been seen, or after 4 s.
    """
    own = Group.of(dist.new_group([0, 1], timeout=timedelta(seconds=60)))
    reduce_from_region(torch.ones(3), own)
    run, seen = _calls_of(own)[call], []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, lambda *_: (seen.append(time.monotonic()), ended.touch()))
    dist.barrier()
    begin = time.monotonic()
    if group.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    while group.rank == 1 and not ended.exists() and time.monotonic() < begin + 4:
        time.sleep(0.02)
    try:
        run()
    except (KeyboardInterrupt, RuntimeError) as error:
        seconds = time.monotonic() - begin
        ended.touch()
        return seconds, f"{type(error).__name__}: {error}"
    return (seen[0] if seen else time.monotonic()) - begin, "no error"


@pytest.mark.parametrize("call", ["forward", "backward", "swap"])
def test_ctrl_c_ends_a_wait_and_the_other_rank_raises(call, tmp_path):
    (seconds, error), (_, other) = on_ranks(2, _signalled, call, signal.SIGINT, tmp_path / "ended")
    assert error.startswith("KeyboardInterrupt")
    assert seconds < 3, "the other rank comes after 4 s"
    assert "rank 0 of the group has given up" in other


def test_a_handler_that_does_not_raise_runs_during_a_wait(tmp_path):
    ended = tmp_path / "ended"
    (seconds, error), (_, other) = on_ranks(2, _signalled, "forward", signal.SIGUSR1, ended)
    assert (error, other) == ("no error", "no error")
    assert seconds < 3, "the other rank comes after 4 s"


STEPS = {
    "reduce 3 doubles": lambda group: reduce_from_region(torch.ones(3, dtype=torch.float64), group),
    "reduce 6": lambda group: reduce_from_region(torch.ones(6), group),
    "reduce 4": lambda group: reduce_from_region(torch.ones(4), group),
    "gather": lambda group: gather_from_region(torch.ones(1, 3), [3, 3], group),
}


def _different(group: Group, steps: tuple[str, str]) -> torch.Tensor:
    return STEPS[steps[group.rank]](group)


@pytest.mark.parametrize(
    ("steps", "texts"),
    [
        (
            ("reduce 6", "reduce 4"),
            ["reduce_from_region/all_reduce Float with 24 bytes", "with 16 bytes on rank"],
        ),
        (
            ("gather", "reduce 6"),
            ["gather_from_region/all_gather with 12 bytes", "reduce_from_region/all_reduce"],
        ),
        (
            ("reduce 6", "reduce 3 doubles"),
            [
                "reduce_from_region/all_reduce Float with 24",
                "reduce_from_region/all_reduce Double with 24",
            ],
        ),
    ],
    ids=["other size", "other op", "other dtype"],
)
def test_different_collectives_raise_on_all_ranks_and_leave_the_group_whole(steps, texts):
    for text in texts:
        assert_all_raise(_different, steps, error="RuntimeError", text=text)
    on_ranks(2, _at_random, 20)


def _late(group: Group) -> None:
    short = Group.of(dist.new_group([0, 1], timeout=timedelta(seconds=1)))
    reduce_from_region(torch.ones(3), short)
    if group.rank == 1:
        time.sleep(2.5)
    reduce_from_region(torch.ones(3), short)


def test_a_late_rank_is_named_and_finds_the_group_given_up():
    punctual, late = pool(2).run_raising(_call_in_world, _late)
    assert isinstance(punctual, Raised)
    assert "rank 1 of the group did not come within 1 s" in punctual.text
    assert isinstance(late, Raised)
    assert "rank 0 of the group has given up" in late.text


def _skips_one(group: Group) -> torch.Tensor:
    short = Group.of(dist.new_group([0, 1], timeout=timedelta(seconds=1)))
    gather_from_region(torch.ones(1, 1), [1, 1], short)
    if group.rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 of the group did not come"):
            gather_from_region(torch.full((1, 1), 5.0), [1, 1], short)
    dist.barrier()
    return gather_from_region(torch.full((1, 1), 7.0 + group.rank), [1, 1], short)


def test_what_a_rank_showed_before_it_gave_up_is_never_read():
    """Rank 1 leaves out a step that rank 0 waits for in vain; then both take the next one."""
    pool(2).assert_raises(_call_in_world, _skips_one)


def _fails_half_way(group: Group) -> list[float]:
    """A backward that raises between the start of the sum and its end."""
    mm = torch.ops.parallel_ext.column_linear_backward
    features, width = 2**30, 2**20  # of a gradient that fits into no memory
    weight = torch.ones(1, 1).expand(features, width)
    arguments = (torch.ones(0, features), torch.ones(0, width), weight, [True, True, False])
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        mm(*arguments, group.size, group.name)
    return reduce_from_region(torch.ones(2), group).tolist()


def test_an_error_beside_a_sum_leaves_the_group_usable():
    assert on_ranks(2, _fails_half_way) == [[2.0, 2.0]] * 2


def _maps_after_many_groups(group: Group) -> int:
    for _ in range(8):
        process_group = dist.new_group([0, 1])
        reduce_from_region(torch.ones(2), Group.of(process_group))
        dist.destroy_process_group(process_group)
        del process_group
    reduce_from_region(torch.ones(2), Group.of(dist.new_group([0, 1])))
    return sum("parallel_ext-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_destroyed_group_gives_its_memory_back():
    before = on_ranks(2, _maps_after_many_groups)
    assert max(on_ranks(2, _maps_after_many_groups)) <= max(before) + 1


def _dies(group: Group) -> None:
    reduce_from_region(torch.ones(3), group)
    if group.rank == 1:
        os._exit(7)
    reduce_from_region(torch.ones(3), group)


def test_a_rank_that_dies_is_reported_at_once():
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of the group has exited"):
        pool(2).run(_call_in_world, _dies, timeout_s=60)
    assert time.monotonic() - start < 30, "the group's own timeout is 30 minutes"


def _swaps(group: Group, in_shared_memory: bool) -> int:
    """Messages of uneven sizes between all pairs, in uneven parts; what comes is what was sent."""
    before = _carried()
    _C.set_shared_memory(in_shared_memory)
    shared = random.Random(3)
    for step in range(12):
        largest = shared.choice([0, 3, 1000, SLOT, 5 * SLOT // 3])
        parts = {
            (sender, receiver): [shared.randint(1, largest) for _ in range(shared.randint(0, 3))]
            if largest
            else []
            for sender in range(group.size)
            for receiver in range(group.size)
        }

        def bytes_of(sender: int, receiver: int, sizes: list[int]) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(100 * sender + receiver)
            return [torch.randint(256, (n,), generator=generator).to(torch.uint8) for n in sizes]

        ranks = range(group.size)
        outgoing = [bytes_of(group.rank, to, parts[group.rank, to]) for to in ranks]
        incoming = [
            [torch.zeros(n, dtype=torch.uint8) for n in parts[x, group.rank]] for x in ranks
        ]
        _C.swap_bytes(
            [[x.numpy() for x in to] for to in outgoing],
            [[x.numpy() for x in sender] for sender in incoming],
            *(group.size, group.name, 20.0),
        )
        for sender in ranks:
            if sender == group.rank:
                continue  # what is for itself stays where it is
            expected = bytes_of(sender, group.rank, parts[sender, group.rank])
            for got, wanted in zip(incoming[sender], expected, strict=True):
                assert torch.equal(got, wanted), (step, sender)
    _C.set_shared_memory(True)
    return _carried() - before


@pytest.mark.parametrize("in_shared_memory", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_swaps_bring_uneven_messages_between_all_pairs(ranks, in_shared_memory):
    assert on_ranks(ranks, _swaps, in_shared_memory) == [12 * in_shared_memory] * ranks


def _wrong_swap(group: Group, sent: list[int], expected: list[int]) -> None:
    """Each rank's bytes for the other one, and from it."""
    own = Group.of(dist.new_group([0, 1]))
    buffer = torch.zeros(8, dtype=torch.uint8).numpy()
    outgoing, incoming = (
        [[buffer[: sizes[group.rank]]] for _ in range(2)] for sizes in (sent, expected)
    )
    _C.swap_bytes(outgoing, incoming, own.size, own.name, 5.0)


BUFFERS = {
    "outgoing has lists for 1 ranks in a group of 2": ([[]], [[], []]),
    "incoming has lists for 3 ranks in a group of 2": ([[], []], [[], [], []]),
    "a buffer of outgoing is not contiguous": ([[], [memoryview(b"abcd")[::2]]], [[], []]),
    "a buffer of incoming is not contiguous": ([[], []], [[], [memoryview(bytearray(4))[::2]]]),
    "not writable": ([[], []], [[], [b"abcd"]]),
}


@pytest.mark.parametrize("words", BUFFERS)
def test_buffers_that_a_swap_cannot_fill_or_read_are_refused(words):
    with pytest.raises((ValueError, BufferError), match=words):
        _C.swap_bytes(*BUFFERS[words], 2, "nowhere", 5.0)


@pytest.mark.parametrize(
    ("sent", "expected"), [([4, 8], [4, 8]), ([8, 8], [4, 8]), ([4, 8], [8, 8])]
)
def test_a_swap_of_other_sizes_than_expected_is_an_error_on_both(sent, expected):
    raised_by = pool(2).run_raising(
        _call_in_world, partial(_wrong_swap, sent=sent, expected=expected)
    )
    for rank, raised in enumerate(raised_by):
        other = 1 - rank
        assert f"sends {sent[other]} bytes for {expected[other]} where" in raised.text
        assert f"{expected[rank]} are expected for {sent[rank]}" in raised.text
        assert "swap_bytes/swap" in raised.text

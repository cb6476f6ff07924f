"""Read a file of any size from a cold disk: our readers, and a bare one.

    python benchmarks/cold_read.py --gib 40 [--folder DIR] [--repetitions N] [--smallest]
        [--update-docs]

Choose more than the memory of the machine. What is measured and how: docs/benchmarks/cold_read.md.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
import torch

from parallel_ext.io.hashing import ChunkHasher, FileRecord, chunk_bytes_for
from parallel_ext.io.reading import Reads, num_threads
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.sharding.reshard import bytes_of

SHAPE = (harness.size(8192, 64), 8192)  # of each tensor, in bf16: 128 MiB
TENSOR_BYTES = 2 * SHAPE[0] * SHAPE[1]


def write(path: Path, tensors: int) -> FileRecord:
    """Write a file of random numbers, so that no disk can make it smaller; return its hashes."""
    header = {
        f"layers.{number}.weight": {
            "dtype": "BF16",
            "shape": SHAPE,
            "data_offsets": [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES],
        }
        for number in range(tensors)
    }
    text = json.dumps(header).encode()
    hasher = ChunkHasher(chunk_bytes_for(tensors * TENSOR_BYTES))
    content = torch.empty(SHAPE, dtype=torch.bfloat16)
    with open(path, "wb", buffering=0) as file:
        for memory in (len(text).to_bytes(8, "little"), text):
            file.write(memory)
            hasher.update(memoryview(memory))
        for _ in range(tensors):
            content.view(torch.int64).random_()
            memory = bytes_of(content)
            hasher.update(memory)
            while len(memory):
                memory = memory[file.write(memory) :]
        os.fsync(file.fileno())
    return hasher.record()


def forget(path: Path) -> None:
    """Let the page cache forget the file."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path, record: FileRecord | None) -> None:
    """Read all tensors, one after the other, into the same memory, as a load reads them."""
    room = torch.empty(SHAPE, dtype=torch.bfloat16)
    box = tuple((0, size) for size in SHAPE)
    with SafetensorsFile(path, record) as file, ThreadPoolExecutor(num_threads(1)) as pool:
        reads = Reads(pool)
        for name in file.tensors:
            file.read_box(name, box, room, lambda places: reads.add(file, places))
            reads.run()
        reads.finish()


def read_bare(path: Path) -> None:
    """Read all bytes by one thread into the same memory."""
    room = bytearray(TENSOR_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass


def main() -> None:
    parser = harness.parser(__doc__, repetitions=3, malloc=False)
    parser.add_argument("--gib", type=float, default=harness.size(40, 1 / 256), help="of the file")
    parser.add_argument("--folder", help="on the disk to read from; one of temporary files")
    options = parser.parse_args()
    tensors = max(1, round(options.gib * 2**30 / TENSOR_BYTES))
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "model.safetensors")
        record = write(path, tensors)
        readers: dict[str, Callable[[], None]] = {
            "bare": lambda: read_bare(path),
            "parallel_ext": lambda: read(path, None),
            "parallel_ext, hashes compared": lambda: read(path, record),
        }
        for _ in range(options.repetitions):
            for name, reader in readers.items():
                forget(path)
                start = time.perf_counter()
                reader()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    gigabytes = record.size / 1e9
    rows = [
        [
            name,
            harness.spread([gigabytes / each for each in taken], 2),
            f"{min(taken) / min(seconds['bare']):.2f}",
        ]
        for name, taken in seconds.items()
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    table = harness.markdown_table(["reader", "GB/s: median (min-max)", "time / bare"], rows)
    text = (
        f"{harness.machine()}\n\nA file of {gigabytes:.1f} GB; the machine has {memory:.1f} GB of "
        f"memory.\n\n{table}"
    )
    harness.publish("cold_read", text, options)


if __name__ == "__main__":
    main()

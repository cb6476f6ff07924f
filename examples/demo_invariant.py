"""One training on any layout, bit for bit: `make demo-invariant`.

SmolLM2-135M is trained with px.Invariant by 1, 2, 3 and 4 ranks in six layouts, and once more by
jobs that are killed and resume in another layout. Each ends with the same digest of its weights and
the same losses. So does a Mixtral that is made of its first layers, with its experts on 1 to 4
ranks, over tp and over dp. Ordinary trainings beside them agree to rounding: invariant.png shows
how far they are apart.

    python examples/demo_invariant.py [--work FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from demo_checkpoint import Job
from finetune_mixtral import mixtral_from_dense
from jobs import alone

STEPS, ROWS, TOKENS, RATE, SAVE_EVERY, LEAVES = 8, 4, 64, 1e-4, 3, 4
LAYOUTS = {"1 rank": (1, 1), "tp=2": (2, 2), "tp=3": (3, 3), "dp=2": (2, 1), "dp=3": (3, 1)}
WIDEST = {"tp=2, dp=2": (4, 2)}
OF_MIXTRAL = {"1 rank": (1, 1, 1), "tp=ep=2": (2, 2, 2), "tp=2": (2, 2, 1), "dp=ep=3": (3, 1, 3)}
WIDEST_OF_MIXTRAL = {"tp=dp=ep=2": (4, 2, 2), "tp=dp=2, ep=4": (4, 2, 4)}
ORDINARY = ("1 rank", "tp=2", "tp=3", "dp=2")


def job(title: str, layout: tuple[int, ...], model: Path, root: Path, *options: Any) -> Job:
    """Start a training of (ranks, tp), of a mixture (ranks, tp, ep)."""
    ranks, tp, *ep = layout
    if ep:
        options = (*options, "--ep", *ep)
    sizes = ["--steps", STEPS, "--rows", ROWS, "--tokens", TOKENS, "--learning-rate", RATE]
    return Job(title, ranks, model, root, *sizes, "--save-every", SAVE_EVERY, "--tp", tp, *options)


def trained(title: str, layout: tuple[int, ...], model: Path, root: Path, *options: Any) -> Any:
    """The report of a job that ran to its end."""
    running = job(title, layout, model, root, *options)
    running.finish()
    if running.process.exitcode != 0:
        running.fail()
    report = json.loads(running.report.read_text())
    shutil.rmtree(root, ignore_errors=True)
    return report


def interrupted(model: Path, root: Path) -> Any:
    """The report of the last of three jobs, of which two were killed."""
    leaves = ["--leaves", LEAVES]
    for title, layout, step in (
        ("killed-first: tp=3, killed after step 5", (3, 3), 5),
        ("killed-second: dp=2, killed after step 7", (2, 1), 7),
    ):
        running = job(title, layout, model, root, *leaves)
        running.until(step)
        running.kill()
        running.finish()
    return trained("killed-last: tp=2, dp=2, to the end", (4, 2), model, root, *leaves)


def apart(losses: list[float], reference: list[float]) -> list[float]:
    """How far each loss is from that of one rank, relative to it."""
    return [abs(a - b) / b for a, b in zip(losses, reference, strict=True)]


def of_layouts(model: Path, layouts: dict[str, tuple[int, ...]], root: Path) -> dict[str, Any]:
    """The reports of invariant trainings."""
    leaves = ["--leaves", LEAVES]
    return {
        name: trained(
            f"{name.replace(' ', '')}-{model.name} invariant", layout, model, root, *leaves
        )
        for name, layout in layouts.items()
    }


def compare(name: str, reports: dict[str, Any]) -> None:
    """Print the digests of one model, and stop where one is another."""
    first = reports["1 rank"]
    print(f"\n{name:16}{'last loss':>12}  digest of the weights")
    for layout, report in reports.items():
        own = report["loss"]
        print(f"{layout:16}{own[-1]:>12.6f}  {report['digest']}")
        if report["digest"] != first["digest"] or own != first["loss"][-len(own) :]:
            raise SystemExit(f"{name}, {layout} has other bits than 1 rank")


def draw(ordinary: dict[str, list[float]], same: dict[str, list[float]], path: Path) -> None:
    """Draw how far the losses of each layout are from those of one rank."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    steps = range(1, STEPS + 1)
    for each, runs, title in (
        (axes[0], ordinary, "ordinary"),
        (axes[1], same, "px.Invariant: all at 0"),
    ):
        for name, losses in runs.items():
            each.plot(steps, apart(losses, runs["1 rank"]), "o-", label=name, fillstyle="none")
        each.set(xlabel="step", title=title)
        each.set_yscale("symlog", linthresh=1e-8)
        each.set_ylim(-2e-9, None)
        each.legend(loc="upper left")
    axes[0].set_ylabel("loss: relative difference from 1 rank")
    figure.suptitle("SmolLM2-135M, fp32: one training in several layouts")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".work"))
    options = parser.parse_args()
    model, root = options.work / "smollm2", options.work / "invariant"
    shutil.rmtree(root, ignore_errors=True)
    same = of_layouts(model, LAYOUTS | WIDEST, root)
    same["killed twice"] = interrupted(model, root)
    mixtral = options.work / "small-mixtral"
    alone(mixtral_from_dense, str(model), mixtral, 4, 2, 4)
    of_mixtral = of_layouts(mixtral, OF_MIXTRAL | WIDEST_OF_MIXTRAL, root)
    ordinary = {
        name: trained(f"{name.replace(' ', '')} ordinary", LAYOUTS[name], model, root)["loss"]
        for name in ORDINARY
    }
    compare("SmolLM2", same)
    compare("its Mixtral", of_mixtral)
    print("\nordinary: relative difference of the last loss from that of 1 rank")
    for name, losses in ordinary.items():
        print(f"{name:16}{apart(losses, ordinary['1 rank'])[-1]:>12.1e}")
    whole = {name: report["loss"] for name, report in same.items() if name != "killed twice"}
    draw(ordinary, whole, options.work / "invariant.png")
    print(f"\n{options.work / 'invariant.png'} shows both")


if __name__ == "__main__":
    main()

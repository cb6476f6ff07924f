"""Draw the load of every expert over the steps, from what ``px.RoutingMetrics`` has written.

    pip install "parallel_ext[plot]"
    python examples/plot_routing.py routing.jsonl --out routing.png

One panel a layer, one row an expert. The colour is the expert's choices over the mean of its layer:
1 (white) is even, 0 (blue) an expert without a token, red one that gets too many.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any


def read(path: Path) -> tuple[list[int], list[list[list[float]]]]:
    """The steps in order, and of each [layers][E]: choices over the mean of the layer.

    Of a step that was trained again, after a restart, the last line counts.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    choices = {line["step"]: line["choices"] for line in map(json.loads, lines)}
    if not choices:
        raise SystemExit(f"{path} holds no step")
    steps = sorted(choices)
    return steps, [[_over_mean(layer) for layer in choices[step]] for step in steps]


def _over_mean(counts: list[int]) -> list[float]:
    mean = sum(counts) / len(counts)
    return [count / mean for count in counts]


def draw(steps: list[int], loads: list[list[list[float]]], figure: Any) -> None:
    """Fill a matplotlib figure."""
    num_layers, num_experts = len(loads[0]), len(loads[0][0])
    columns = math.ceil(math.sqrt(num_layers))
    rows = math.ceil(num_layers / columns)
    figure.set_size_inches(2 + 2.8 * columns, 0.8 + (1 + 0.12 * num_experts) * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for layer, panel in enumerate(panels):
        if layer >= num_layers:
            panel.set_axis_off()
            continue
        of_expert = list(zip(*(load[layer] for load in loads), strict=True))
        image = panel.imshow(
            of_expert, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2
        )
        panel.set_title(f"layer {layer}", fontsize="small")
        panel.set_yticks(range(0, num_experts, math.ceil(num_experts / 8)))
        shown = range(0, len(steps), math.ceil(len(steps) / 5))
        panel.set_xticks(shown, [steps[place] for place in shown])
    figure.supxlabel("step")
    figure.supylabel("expert")
    figure.colorbar(image, ax=figure.axes, extend="max", label="choices over the layer's mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("routing", type=Path, help="JSON lines of px.RoutingMetrics")
    parser.add_argument("--out", type=Path, default=Path("routing.png"), help="png, pdf or svg")
    options = parser.parse_args()
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            f'plot_routing.py needs matplotlib ({error}): pip install "parallel_ext[plot]"'
        ) from error
    figure = Figure(layout="constrained")
    draw(*read(options.routing), figure)
    figure.savefig(options.out, dpi=150)


if __name__ == "__main__":
    main()

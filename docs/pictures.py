"""Draw the pictures of docs/img as SVG; no argument, nothing but Python and parallel_ext.

    python docs/pictures.py

The numbers in them are those of the package's own rules, and a test compares the files with what
this script draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from parallel_ext.sharding.layout import split, split_heads

IMAGES = Path(__file__).parent / "img"
INK, GREY, RULE = "#1f2328", "#59636e", "#d1d9e0"
# Of rank 0, of rank 1, of both, and of what travels between them.
FIRST, SECOND, BOTH, TRAVEL = "#b6d7f5", "#f9d8a8", "#dfe3e8", "#a40e26"
RANKS = 2
# SmolLM2-135M-Instruct with one added token.
VOCAB, HEADS, KEY_VALUE_HEADS, INNER, HIDDEN, EXPERTS = 49153, 9, 3, 1536, 576, 5


class Drawing:
    """An SVG of rectangles, lines and texts on a white ground, readable in light and dark pages."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Draw a rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{GREY}" stroke-width="0.8"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        """Write words on one line; ``y`` is its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{fill}"{weight}>{escape(words)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], stroke: str = RULE) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.2"/>'
        )

    def arrow(self, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line that ends in a head, which points along its last stretch."""
        self.line(points, GREY)
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        corners = [(x, y), (x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx)]
        corners.append((x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx))
        path = " ".join(f"{a:g},{b:g}" for a, b in corners)
        self.parts.append(f'<polygon points="{path}" fill="{GREY}"/>')

    def svg(self) -> str:
        """Return the file's content."""
        return "\n".join([*self.parts, "</svg>", ""])


def what_each_rank_holds() -> str:
    """Return the picture of the parts of a Llama and of a mixture on 2 ranks."""
    drawing = Drawing(860, 452, "What each of 2 ranks holds")
    left, bar = 236, 600
    drawing.text(24, 34, "SmolLM2 with one added token on 2 ranks", 16, bold=True)
    legend = ((FIRST, "rank 0"), (SECOND, "rank 1"), (BOTH, "both"))
    for number, (fill, words) in enumerate(legend):
        drawing.box(left + 330 + 96 * number, 23, 14, 14, fill)
        drawing.text(left + 350 + 96 * number, 35, words)

    heads = split_heads(HEADS, KEY_VALUE_HEADS, RANKS)
    rows = [
        (
            "Embedding, output head",
            f"{VOCAB} rows of the vocabulary",
            [(stop - start, f"rows {start} to {stop - 1}") for start, stop in split(VOCAB, RANKS)],
        ),
        (
            "Attention: query, output",
            f"{HEADS} heads",
            [(stop - start, f"heads {start} to {stop - 1}") for start, stop in heads.query],
        ),
        (
            "Attention: key, value",
            f"{KEY_VALUE_HEADS} key-value heads",
            [
                (
                    stop - start,
                    f"head {start}" if stop - start == 1 else f"heads {start}, {stop - 1}",
                )
                for start, stop in heads.key_value
            ],
        ),
        (
            "MLP: gate, up, down",
            f"{INNER} inner features",
            [
                (stop - start, f"features {start} to {stop - 1}")
                for start, stop in split(INNER, RANKS)
            ],
        ),
    ]
    y = 62
    for name, of, shards in rows:
        _row(drawing, y, name, of, shards, left, bar)
        y += 62
    _row(drawing, y, "Norms", f"{HIDDEN} features each", [(1, "replicated")], left, bar, BOTH)
    y += 62
    drawing.line([(24, y - 6), (836, y - 6)])
    experts = [
        (stop - start, "experts " + ", ".join(map(str, range(start, stop))))
        for start, stop in split(EXPERTS, RANKS)
    ]
    _row(drawing, y + 6, "In a mixture: experts", f"{EXPERTS} experts", experts, left, bar)
    return drawing.svg()


def _row(
    drawing: Drawing,
    y: float,
    name: str,
    of: str,
    shards: Sequence[tuple[int, str]],
    left: float,
    bar: float,
    fill: str = "",
) -> None:
    """Draw a part of the model: its name, and a bar with a piece for each rank."""
    drawing.text(24, y + 18, name, 14, bold=True)
    drawing.text(24, y + 36, of, 12.5, fill=GREY)
    whole, x = sum(size for size, _ in shards), left
    for rank, (size, words) in enumerate(shards):
        width = bar * size / whole
        drawing.box(x, y, width, 44, fill or (FIRST, SECOND)[rank])
        count = f"{size}: " if len(shards) > 1 else ""
        drawing.text(x + width / 2, y + 27, count + words, 13, "middle")
        x += width


def step() -> str:
    """Return the picture of the collectives of one training step on 2 tp ranks."""
    title = "One training step: what each rank computes, and what travels"
    drawing = Drawing(860, 496, title)
    drawing.text(24, 34, title, 16, bold=True)
    width, height, pitch, top = 190, 46, 70, 78
    forward, backward = 40, 820 - width
    middle_forward, middle_backward = forward + width / 2, backward + width / 2
    blocks = [
        ("agreement", "the same batch?", "1 all-gather of 32 bytes", None),
        ("embedding", "own rows", "each row once, from its owner", "nothing"),
        ("attention", "own heads", "1 all-reduce", "1 all-reduce"),
        ("MLP", "own features", "1 all-reduce", "1 all-reduce"),
        ("head and loss", "own rows, a tile at a time", "1 all-gather a tile", "1 all-reduce"),
    ]
    drawing.text(middle_forward, 66, "forward", 14, "middle", bold=True)
    drawing.text(middle_backward, 66, "backward", 14, "middle", bold=True)
    drawing.box(24, top + 2 * pitch - 11, 812, pitch + height + 22, "#f6f8fa")
    drawing.text(430, top + 2.5 * pitch + 27, "each layer", 12.5, "middle", GREY)
    for number, (name, holds, forth, back) in enumerate(blocks):
        y = top + number * pitch
        above, below = y - pitch + height, y - 1
        drawing.box(forward, y, width, height, BOTH)
        drawing.text(middle_forward, y + 20, name, 14, "middle", bold=True)
        drawing.text(middle_forward, y + 37, holds, 12, "middle", GREY)
        drawing.text(forward + width + 14, y + 28, forth, 13, fill=TRAVEL)
        if number > 0:
            drawing.arrow([(middle_forward, above), (middle_forward, below)])
        if number > 1:
            drawing.arrow([(middle_backward, below), (middle_backward, above)])
        if back:
            drawing.box(backward, y, width, height, BOTH)
            drawing.text(middle_backward, y + 28, name, 14, "middle", bold=True)
            fill = GREY if back == "nothing" else TRAVEL
            drawing.text(backward - 14, y + 28, back, 13, "end", fill)
    last = top + 4 * pitch + height
    turn = [(middle_forward, last), (middle_forward, last + 16), (middle_backward, last + 16)]
    drawing.arrow([*turn, (middle_backward, last)])
    end = "At the end of backward(): 1 all-reduce of what several ranks hold, such as LoRA factors"
    drawing.text(40, 470, end + " and shared key-value heads.", 12.5)
    return drawing.svg()


def pictures() -> dict[str, str]:
    """Return the content of every picture by its file's name."""
    return {"what-each-rank-holds.svg": what_each_rank_holds(), "step.svg": step()}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (IMAGES / name).write_text(svg)
        print(IMAGES / name)

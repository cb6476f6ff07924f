"""The prompt of a question, and of what was said before it, for each published checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Template(NamedTuple):
    """The text around questions and answers.

    Attributes:
        start: before the first question.
        end: behind the last question; the answer follows.
        to_answer: between an earlier question and its answer; None where there is one question.
        to_question: between an earlier answer and the next question.
    """

    start: str
    end: str
    to_answer: str | None = None
    to_question: str = ""


TEMPLATES = {
    "chat": Template(" [INST] ", " [/INST] ", " [/INST] ", " [INST] "),
    "chat_old": Template("<EOI>Question: ", " Answer:", " Answer: ", "\nQuestion: "),
    "vqa": Template("<EOI>Question: ", " Short answer:"),
    "base": Template("", ""),
}
"""The text around prompts, by ``template_version``. In the published code ``<EOI>`` is plain text,
whose tokens stand behind the image; so here. "base" adds nothing, for prompts of other forms."""


def prompt_of(
    query: str, history: Sequence[tuple[str, str]] = (), template_version: str = "chat"
) -> str:
    """Return the prompt for a question as the published code writes it.

    Args:
        query: the question.
        history: earlier questions with their answers, oldest first.
        template_version: a key of :data:`TEMPLATES`.

    Raises:
        ValueError: an unknown template, or a history for one that holds a single question.

    >>> prompt_of("And now?", [("What is open?", "A browser.")])
    ' [INST] What is open? [/INST] A browser. [INST] And now? [/INST] '
    """
    if template_version not in TEMPLATES:
        raise ValueError(
            f"CogAgent: template_version is {template_version!r}; known are {list(TEMPLATES)}"
        )
    template = TEMPLATES[template_version]
    # The published code drops such a history without a word.
    if history and template.to_answer is None:
        raise ValueError(
            f"CogAgent: template {template_version!r} holds one question, but history has "
            f"{len(history)} rounds; leave it out, or take 'chat'"
        )
    rounds = [f"{q}{template.to_answer}{a}{template.to_question}" for q, a in history]
    return f"{template.start}{''.join(rounds)}{query}{template.end}"

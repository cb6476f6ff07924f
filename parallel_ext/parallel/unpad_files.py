"""Take padding rows off the vocabulary of a saved model, in the memory of some rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import transformers

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.header_hashes import open_compared
from parallel_ext.io.hf_reader import CONFIG_NAME, INDEX_NAME, HFDirectory
from parallel_ext.io.hf_writer import index_of, to_file
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.publish import Publication
from parallel_ext.io.rewrite import check_new, copy_beside, rows_of, write_again
from parallel_ext.parallel.configuration import is_of_images
from parallel_ext.parallel.expected_files import expected

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Unpadded:
    """What :func:`unpad_files` has written."""

    vocab_size: int  # the rows that the vocabulary has now
    padded_vocab_size: int  # those that it had
    shortened: tuple[str, ...]  # names of the tensors that lost rows
    tensors: int  # of the model


def unpad_files(
    source: Path,
    out: Path,
    vocab_size: int | None = None,
    filled_padding: bool = False,
    progress: Progress = nothing,
) -> Unpadded:
    """Write a HuggingFace model that is another one without the padding rows of its vocabulary.

    Embedding, output head and its bias keep their first rows, every other tensor its bytes, and
    ``config.json`` gets the true size. ColossalAI pads with rows of zeros, which stay zero;
    Megatron with random rows, which are trained.

    Args:
        vocab_size: the true number of rows; None for that of ``config.json`` where it is less than
            the rows in the files, else the number of ids of the tokenizer.
        filled_padding: drop also rows that are not zero, if a tokenizer lies beside the model and
            none of its ids reaches them.
        progress: called with the bytes of each piece that was written.

    Raises:
        CheckpointError: what would be dropped is not padding, there is nothing to drop, the files
            are not those of a model that is served, or one is not as the hashes in its header say;
            nothing is written.
        OSError: a file cannot be read or written.
    """
    check_new(out, source)
    with HFDirectory(source, lambda name: open_compared(source / name)) as model:
        if is_of_images(model.config):
            raise CheckpointError(
                f"{source}: the vocabulary of a model of images is not shortened here; load it by "
                "transformers, call model.resize_token_embeddings(V), and save it"
            )
        layout, vocabulary = expected(model)
        configured = layout[vocabulary[0]].shape[0]
        padded = max(model.shapes[name][0] for name in vocabulary if name in model.shapes)
        ids = _ids_of_tokenizer(source)
        true = vocab_size or (configured if configured < padded else ids)
        if vocab_size is not None and vocab_size >= padded:
            raise CheckpointError(
                f"{source}: nothing to drop: --vocab-size {vocab_size} is not below the {padded} "
                "rows of the vocabulary; pass the true size, without padding"
            )
        if true is None or true >= padded:
            raise CheckpointError(
                f"{source}: nothing to drop: the vocabulary has {padded} rows, config.json says "
                f"{configured}, and "
                + ("there is no tokenizer" if ids is None else f"the tokenizer has {ids} ids")
                + "; --vocab-size V names the true size"
            )
        if ids is not None and ids > true:
            raise CheckpointError(
                f"{source}: the tokenizer has the id {ids - 1}, so the rows from {true} on are no "
                "padding"
            )
        if filled_padding and ids is None:
            raise CheckpointError(
                f"{source}: rows that are not zero are dropped only where a tokenizer shows that "
                "no id reaches them, and there is none in the folder"
            )
        model.drop_padding_rows(vocabulary, true, filled=filled_padding)
        model.check(*expected(model, true))
        with Publication(out) as temporary:
            written = write_again(
                model,
                temporary,
                lambda tensor, file: rows_of(file, tensor.name, tensor.shape),
                progress,
            )
            texts = {CONFIG_NAME: to_file({**model.config, "vocab_size": true})}
            if len(written) > 1:
                texts[INDEX_NAME] = index_of(written)
            copy_beside(source, temporary, texts)
        shape_of = {name: file.tensors[name].shape for name, file in model.file_of.items()}
        shortened = tuple(name for name in shape_of if shape_of[name] != model.shapes[name])
        return Unpadded(true, padded, shortened, len(model.shapes))


def _ids_of_tokenizer(source: Path) -> int | None:
    """Return one more than the largest id of the tokenizer in a folder; None if there is none."""
    if not any((source / name).is_file() for name in _TOKENIZERS):
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever a tokenizer's class stumbles over
        raise CheckpointError(f"{source}: the tokenizer cannot be read: {error!r:.300}") from error
    return 1 + max(tokenizer.get_vocab().values())

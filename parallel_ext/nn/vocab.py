"""The modules whose parameters are sharded by vocabulary: embedding and output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from parallel_ext import ops
from parallel_ext.nn.fused_loss import current_loss_call
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.nn.initial_values import drawn, drawn_linear
from parallel_ext.nn.sharded_module import (
    ShardedLinear,
    ShardedModule,
    group_of_shards,
    require_plain,
    row_layouts,
    shard_of,
)
from parallel_ext.nn.trained_rows import TrainedRows, with_rows
from parallel_ext.ops import Group, LossOptions
from parallel_ext.ops.group import Range
from parallel_ext.sharding.layout import TensorLayout, shard_along, split

_LOGITS_ROW_MULTIPLE = 64  # elements; rows of the logits begin at a cache line in every dtype


class _RowsOfVocabulary(ShardedModule):
    """The base of embedding and head, of whose rows each rank holds a range.

    Attributes:
        vocab_range: the ids of this rank, ``(start, stop)``.
        sizes: of each rank of the group, how many rows it has.
    """

    def set_layouts(self, layouts: Mapping[str, TensorLayout]) -> None:
        super().set_layouts(layouts)
        ranges = layouts["weight"].first_ranges
        self.vocab_range: Range = ranges[self.group.rank]
        self.sizes = [stop - start for start, stop in ranges]


_OPTIONS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def refuse_options(plain: nn.Embedding, name: str) -> None:
    """Raise if a plain embedding does more than to look rows up.

    Raises:
        ValueError: ``max_norm``, ``scale_grad_by_freq`` or ``sparse`` is set.
    """
    for option, default in _OPTIONS.items():
        if (value := getattr(plain, option)) != default:
            raise ValueError(
                f"{name} has {option}={value}, which the parallel embedding does not do; set it to "
                f"{default}"
            )


class VocabParallelEmbedding(_RowsOfVocabulary):
    """``nn.Embedding`` of which each rank holds a range of rows.

    Args:
        weight: [R, H], the rows of this rank.
        layout: of the table, sharded along dimension 0 into one range a rank.
        padding_idx: global id whose row gets no gradient, or None.
        group: the tensor-parallel group.
        partials: sums the partial gradients of adapters.
        tied: whether the weight is the head's too.
        embed_scale: a scalar by which the rows are multiplied that are looked up, or None.

    ``num_embeddings`` is the true vocabulary size. Called with replicated int64 or int32 ids [...]
    it returns the replicated [..., H].

    Attributes:
        keeps: says of ids how many of their tokens each rank is to be given the rows of, so that
            those of others are NaN in what is returned; None, or None of some ids, for all rows.
        tied_heads: outside of the model that it belongs to.
        max_norm, scale_grad_by_freq, sparse: of ``nn.Embedding``, not served: a forward raises
            where one is set.
    """

    max_norm = _OPTIONS["max_norm"]
    scale_grad_by_freq = _OPTIONS["scale_grad_by_freq"]
    sparse = _OPTIONS["sparse"]
    keeps: Callable[[torch.Tensor], list[int] | None] | None = None

    def __init__(
        self,
        weight: nn.Parameter,
        layout: TensorLayout,
        padding_idx: int | None,
        group: Group,
        partials: PartialGradients | None = None,
        tied: bool = False,
        embed_scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__({"weight": layout}, group)
        self.register_buffer("embed_scale", embed_scale, persistent=False)
        self.padding_idx = padding_idx
        self.weight = weight
        self.partials, self.tied = partials, tied
        self.tied_heads: list[TiedHead] = []

    @classmethod
    def from_plain(
        cls, plain: nn.Embedding, group: Group | dist.ProcessGroup, vocab_multiple_of: int = 1
    ) -> VocabParallelEmbedding:
        """Shard a plain embedding, which every rank of a group holds, by its rows.

        Args:
            plain: the same on all ranks; it is left as it is.
            group: of consecutive ranks.
            vocab_multiple_of: boundaries between the ranks' rows are multiples of this.

        Raises:
            ValueError: ``max_norm``, ``scale_grad_by_freq`` or ``sparse`` is set.
        """
        require_plain(plain, nn.Embedding, f"{cls.__name__}.from_plain")
        refuse_options(plain, "the embedding")
        group = group_of_shards(group)
        ranges = split(plain.num_embeddings, group.size, vocab_multiple_of)
        layout = shard_along("weight", tuple(plain.weight.shape), 0, ranges)
        return cls(shard_of(plain.weight, layout, group), layout, plain.padding_idx, group)

    @classmethod
    def from_sizes(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        group: Group | dist.ProcessGroup,
        padding_idx: int | None = None,
        vocab_multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> VocabParallelEmbedding:
        """Build this rank's rows with the initial values of ``nn.Embedding(...)`` in one process.

        Every rank of the group draws the whole table, with one state of torch's generator, and
        keeps its rows; on the CPU in blocks of 4 MiB, on a GPU with one copy of the table for the
        time of the call.

        Args:
            num_embeddings: rows of the whole table.
            embedding_dim: H.
            group: of consecutive ranks.
            padding_idx: global id whose row is zeros and gets no gradient, or None.
            vocab_multiple_of: boundaries between the ranks' rows are multiples of this.
            device: of the rows, with whose generator they are drawn; on ``"meta"`` none is.
            dtype: of the rows.

        Example:
            >>> VocabParallelEmbedding.from_sizes(7, 3, ops.ALONE).weight.shape
            torch.Size([7, 3])
        """
        plain = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device="meta", dtype=dtype)
        own = drawn(cls.from_plain(plain, group, vocab_multiple_of), device, weight=nn.init.normal_)
        start, stop = own.vocab_range
        if own.padding_idx is not None and start <= own.padding_idx < stop:
            own.weight.data[own.padding_idx - start] = 0
        return own

    def set_layouts(self, layouts: Mapping[str, TensorLayout]) -> None:
        """Take the sizes of the embedding from ``layouts``; ``weight`` is this rank's shard."""
        super().set_layouts(layouts)
        self.num_embeddings, self.embedding_dim = layouts["weight"].shape

    def forward(self, input: torch.Tensor, trained: TrainedRows | None = None) -> torch.Tensor:
        refuse_options(self, "this VocabParallelEmbedding")
        tokens, ids = self.tokens(input), input.long() if input.dtype == torch.int32 else input
        rows = self.rows(ids, self.weight, sizes=self.sizes, tokens=tokens, group=self.group)
        if trained is not None:
            through = self.vocab_range
            if tokens is not None:
                first = sum(tokens[: self.group.rank])
                ids = ids.narrow(-1, first, tokens[self.group.rank]).contiguous()
                through = None
            rows = trained.looked_up(ids, rows, through, self.padding_idx)
        return self.finished(rows, tokens)

    def rows(self, ids: torch.Tensor, table: torch.Tensor, **sum_of: Any) -> torch.Tensor:
        """Look up rows of a table that is sharded as the weight; zeros where others hold them.

        Args:
            ids: [...] int64.
            table: this rank's rows of it.
            sum_of: sizes, tokens and group of all ranks, for rows that are summed over them.
        """
        num_rows, start, padding = self.num_embeddings, self.vocab_range[0], self.padding_idx
        return ops.vocab_embedding(ids, table, num_rows, start, padding_idx=padding, **sum_of)

    def tokens(self, ids: torch.Tensor) -> list[int] | None:
        """Return how many tokens of ids each rank is given the rows of; None for all of them."""
        return None if self.keeps is None else self.keeps(ids)

    def finished(self, rows: torch.Tensor, tokens: list[int] | None = None) -> torch.Tensor:
        """Return rows that were looked up as the embedding returns them.

        Args:
            rows: [..., H]; with ``tokens`` this rank's.
            tokens: what :meth:`tokens` has returned.
        """
        if self.embed_scale is not None:
            rows = rows * self.embed_scale.to(rows.dtype)
        if tokens is None:
            return rows
        rank = self.group.rank
        others = (0, 0, sum(tokens[:rank]), sum(tokens[rank + 1 :]))
        return functional.pad(rows, others, value=float("nan"))


class VocabParallelHead(_RowsOfVocabulary, ShardedLinear):
    """The output layer to the vocabulary, of which each rank holds a range of rows.

    Args:
        weight: [R, H], the rows of this rank; the embedding's own parameter where they are tied.
        bias: [R] or None.
        layouts: of ``weight`` and, if there is one, ``bias``.
        group: the tensor-parallel group.
        partials: sums the partial gradients of the model's replicated parameters.
        tied: whether the weight is the embedding's too.

    ``out_features`` is the true vocabulary size. Called with replicated hidden states [..., H] it
    returns the replicated logits [..., V]; inside a :class:`LossCall` this rank's columns [..., R]
    unless others see them, or the hidden states where that is fused.
    """

    replicas = ops.ALONE  # no two ranks hold the same rows
    blocks: ops.Blocks | None = None  # of the rows, under px.Invariant
    makes_logits = True  # which wrappers that change nothing hand on, as who_sees_logits asks

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layouts: dict[str, TensorLayout],
        group: Group,
        partials: PartialGradients | None,
        tied: bool = False,
    ) -> None:
        super().__init__(weight, bias, layouts, group)
        self.partials, self.tied = partials, tied

    def check_ties(self, embedding: VocabParallelEmbedding, op_name: str) -> None:
        """Raise RuntimeError if the head was tied to an embedding, or untied, since it was made."""
        if (embedding.weight is self.weight) != self.tied:
            tied, now = ("tied", "not") if self.tied else ("not tied", "they are")
            raise RuntimeError(
                f"{op_name}: embedding and head were {tied} when the model was made parallel, but "
                f"now {now}; call model.tie_weights() or set tie_word_embeddings before "
                "px.parallelize"
            )

    @classmethod
    def from_plain(
        cls,
        plain: nn.Linear,
        group: Group | dist.ProcessGroup,
        vocab_multiple_of: int = 1,
        weight: nn.Parameter | None = None,
    ) -> VocabParallelHead:
        """Shard a plain output layer, which every rank of a group holds, by its rows.

        Args:
            plain: the same on all ranks; it is left as it is.
            group: of consecutive ranks.
            vocab_multiple_of: boundaries between the ranks' rows are multiples of this.
            weight: that of a :class:`VocabParallelEmbedding` to which the head is tied.
        """
        require_plain(plain, nn.Linear, f"{cls.__name__}.from_plain")
        group = group_of_shards(group)
        layouts = row_layouts(plain, group, vocab_multiple_of)
        bias = shard_of(plain.bias, layouts["bias"], group) if "bias" in layouts else None
        tied = weight is not None
        weight = weight if tied else shard_of(plain.weight, layouts["weight"], group)
        return cls(weight, bias, layouts, group, None, tied)

    @classmethod
    def from_sizes(
        cls,
        in_features: int,
        out_features: int,
        group: Group | dist.ProcessGroup,
        bias: bool = True,
        vocab_multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> VocabParallelHead:
        """Build this rank's rows with the initial values of ``nn.Linear(...)`` in one process.

        Arguments and memory are those of
        :meth:`parallel_ext.nn.ColumnParallelLinear.from_sizes`; ``out_features`` is the vocabulary.

        Example:
            >>> VocabParallelHead.from_sizes(3, 7, ops.ALONE, bias=False).weight.shape
            torch.Size([7, 3])
        """
        plain = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        return drawn_linear(cls.from_plain(plain, group, vocab_multiple_of), device)

    def enter(self, input: torch.Tensor) -> torch.Tensor:
        """Mark the hidden states, whose backward opens the sum of partial gradients."""
        return input if self.partials is None else self.partials.open_with(input)

    def leave(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits gathered over the ranks, or as they are for most :class:`LossCall`."""
        call = current_loss_call()
        if call is not None and call.seen_by is None:
            return logits
        return ops.gather_from_region(logits, self.sizes, self.group)

    def loss(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        options: LossOptions | None = None,
    ) -> torch.Tensor:
        """Return the cross entropy of the logits, which no rank ever holds.

        Args:
            hidden: [T, H], replicated.
            labels: [T], replicated; they belong to the rows of ``hidden`` (nothing is shifted).
            options: of the loss; None for the mean over the labels that are not -100.

        Returns:
            The loss, replicated.
        """
        return ops.linear_vocab_cross_entropy(
            hidden,
            self.weight,
            labels,
            self.out_features,
            self.vocab_range,
            options or LossOptions(),
            bias=self.bias,
            group=self.group,
        )

    def forward(self, input: torch.Tensor, trained: TrainedRows | None = None) -> torch.Tensor:
        hidden = self.enter(input)
        call = current_loss_call()
        if call is not None and call.fused:
            return call.hand_over(self, hidden, with_rows(self.weight, trained))
        if self.blocks is None:
            return self.leave(_own_logits(hidden, self.weight, self.bias, trained, self.group))
        return self.leave(self.in_blocks(hidden, with_rows(self.weight, trained)))

    def in_blocks(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply a weight [R, K], this rank's rows, to a replicated [..., K] under px.Invariant.

        Returns:
            [..., R], sharded. In backward the gradient of ``input`` is replicated.

        Raises:
            TypeError: it is to be trained in fp16.
        """
        (logits,) = ops.block_linears(input, [weight], [self.blocks], group=self.group)
        if logits.dtype == torch.float16 and torch.is_grad_enabled():
            raise TypeError("px.Invariant does not serve training in fp16; use bf16")
        return logits


class TiedHead(nn.Module):
    """An output layer outside of a parallel model, tied to the embedding of that model.

    It has no weight of its own, so that optimizers and files have one. Called with replicated
    hidden states [..., H] it returns the replicated logits [..., V].

    Args:
        embedding: of the parallel model, which remembers the head.
        bias: [V], which every rank holds whole, or None.

    Attributes:
        weight: [R, H], that of the embedding: the rows of this rank.
    """

    blocks: ops.Blocks | None = None  # under px.Invariant there is no such head
    makes_logits = True  # which wrappers that change nothing hand on, as who_sees_logits asks

    def __init__(self, embedding: VocabParallelEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        vars(self)["tied_to"] = embedding  # no part of this module
        embedding.tied_heads.append(self)
        self.bias = bias
        self.register_load_state_dict_pre_hook(_take_weight_of_head)

    def __getattr__(self, name: str) -> Any:
        return self.tied_to.weight if name == "weight" else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight" or value is not self.tied_to.weight:  # which ties it once more
            super().__setattr__(name, value)

    def forward(self, input: torch.Tensor, trained: TrainedRows | None = None) -> torch.Tensor:
        call, embedding = current_loss_call(), self.tied_to
        if call is not None and call.fused and self.bias is None:
            return call.hand_over(self, input, with_rows(self.weight, trained))
        own = _own_logits(input, self.weight, None, trained, embedding.group)
        logits = ops.gather_from_region(own, embedding.sizes, embedding.group)
        return logits if self.bias is None else logits + self.bias


def _take_weight_of_head(
    head: TiedHead, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Take the head's weight out of a ``state_dict`` that has one, as that of a plain model.

    The embedding has loaded its own by then, so that another one is an error.
    """
    given = state_dict.pop(f"{prefix}weight", None)
    if given is None:
        return
    embedding, errors = head.tied_to, others[-1]
    own = embedding.weight.detach()
    if given.shape[0] == embedding.num_embeddings:
        given = given[slice(*embedding.vocab_range)]
    if given.shape != own.shape or not torch.equal(given.to(own), own):
        errors.append(f"{prefix}weight is not that of the embedding, to which the head is tied")


def _own_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    trained: TrainedRows | None,
    group: Group,
) -> torch.Tensor:
    """Return the logits [..., R] of this rank's rows, for replicated hidden states [..., H]."""
    if torch.is_grad_enabled():
        weight, trained = with_rows(weight, trained), None
    row_stride = -(-len(weight) // _LOGITS_ROW_MULTIPLE) * _LOGITS_ROW_MULTIPLE
    if row_stride == len(weight) and not torch.is_grad_enabled():
        # It has less to do: decoding.
        logits = functional.linear(hidden, weight, bias)
    else:
        logits = ops.column_linear(hidden, weight, bias, row_stride=row_stride, group=group)
    return logits if trained is None else trained.in_logits(logits, hidden, bias)

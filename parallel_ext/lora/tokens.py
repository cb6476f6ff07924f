"""Train some rows of embedding and head, as of new tokens: PEFT's ``trainable_token_indices``.

PEFT keeps the values of these rows beside the frozen table, as a parameter [k, H]. On a parallel
model every rank holds that whole, and of the table its rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from peft.utils import TrainableTokensWrapper
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.errors import first_few
from parallel_ext.lora.layers import OfAdapters
from parallel_ext.lora.merge import refuse_to_keep, rows_here
from parallel_ext.nn.grad_sync import for_use
from parallel_ext.nn.trained_rows import TrainedRows
from parallel_ext.nn.vocab import TiedHead, VocabParallelEmbedding, VocabParallelHead
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.slices import local_part

_WITH_ROWS = (VocabParallelEmbedding, VocabParallelHead)


class TokenRows(TrainableTokensLayer):
    """Rows of an embedding or output head that are trained, around the module that has them all.

    The bookkeeping is PEFT's. Of a head that is tied to the embedding ``tied_adapter`` is the layer
    around that, which holds the values for both.
    """

    reads_weights_inside = True

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        token_indices: list[int],
        tied_adapter: TokenRows | None = None,
    ) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # PEFT's, of ours
            super().__init__(base_layer, adapter_name, token_indices, tied_adapter)
        self._index: dict[str, TrainedRows] = {}  # without values
        self._serves_both_ends = False
        if tied_adapter is None:
            self.trainable_tokens_delta = OfAdapters(self._table.group)
        else:
            tied_adapter._serves_both_ends = True

    @property
    def _table(self) -> VocabParallelEmbedding | VocabParallelHead:
        base = self.get_base_layer()
        return base.tied_to if isinstance(base, TiedHead) else base

    @property
    def _holder(self) -> TokenRows:
        return self.tied_adapter or self

    def update_layer(
        self,
        adapter_name: str,
        config: peft.PeftConfig | None = None,
        tied_adapter: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Add an adapter, which begins with the rows of the table; all ranks call it, from PEFT."""
        if tied_adapter is not None:
            return
        table, token_indices = self._table, kwargs["token_indices"]
        layout, weight = table.layouts["weight"], table.weight.detach()
        rows = ops.vocab_embedding(
            torch.tensor(token_indices, device=weight.device),
            weight,
            layout.shape[0],
            table.vocab_range[0],
            sizes=table.sizes,
            group=table.group,
        )
        name = f"{layout.name.removesuffix('weight')}trainable_tokens_delta.{adapter_name}"
        at = TensorLayout(name, tuple(rows.shape))
        self.trainable_tokens_delta.add(adapter_name, at, rows.clone())
        self.trainable_tokens_original[adapter_name] = rows
        self.token_indices[adapter_name] = token_indices
        ids, places = torch.tensor(token_indices, device=weight.device).sort()
        bounds = torch.tensor(table.vocab_range, device=weight.device)
        own = tuple(torch.searchsorted(ids, bounds).tolist())
        self._index[adapter_name] = TrainedRows(ids, places, rows[:0], own, table.vocab_range[0])

    def _trained(self, adapter: str) -> TrainedRows:
        """Return the rows of an adapter for a forward."""
        holder, table = self._holder, self._table
        delta = holder.trainable_tokens_delta
        index = holder._index[adapter] = holder._index[adapter].to(table.weight.device)
        name = delta.layouts[adapter].name
        values = for_use(delta[adapter], name, table.group, holder._table.partials)
        return replace(index, values=values)

    def forward_adapters(
        self, x: torch.Tensor, active_adapters: list[str], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Call the module with the rows of the active adapter, if it has one."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [each for each in active_adapters if each in self.token_indices]
        if self.disable_adapters or self.merged or not active:
            return self.base_layer(x, *args, **kwargs)
        return self.base_layer(x, *args, trained=self._trained(*active), **kwargs)

    def get_merged_weights(self, active_adapters: list[str]) -> torch.Tensor:
        """Return this rank's rows of the table, [R, H], with those of the active adapter."""
        weight = self.weight
        for adapter in active_adapters:
            weight = self._trained(adapter).in_table(weight)
        return weight

    def for_agreement(self) -> str:
        """Return what must be equal on all tp ranks before a forward, as text."""
        if self.disable_adapters:
            return "rows of tokens disabled"
        merged = f", merged {', '.join(self.merged_adapters)}" if self.merged else ""
        return f"rows of tokens of {', '.join(self.active_adapters) or 'none'}{merged}"

    def check_merge(self, safe_merge: bool, adapter_names: list[str] | None, keep: bool) -> None:
        """Raise what ``merge`` would raise, without changing anything."""
        names = self._to_merge(adapter_names)
        weight = self._table.layouts["weight"].name
        shared = self._table.tied or getattr(self._table, "tied_heads", None)
        if names and shared and not self._holder._serves_both_ends:
            raise ValueError(
                f"merge into {weight}: embedding and head share this weight, and merging the rows "
                "of one would change both; untie them first"
            )
        if names and keep:
            refuse_to_keep(self._table.weight)
        written = [*names, *self.merged_adapters]
        indices = [each for name in written for each in self.token_indices[name]]
        if names and len(set(indices)) < len(indices):
            raise ValueError(
                f"merge into {weight}: the adapters {', '.join(written)} have rows of the same "
                "tokens; merge one of them"
            )
        delta = self._holder.trainable_tokens_delta
        if safe_merge and not all(local_part(delta[name]).isfinite().all() for name in names):
            raise ValueError(f"NaN or infinite rows of tokens: {', '.join(names)} seems broken")

    def _to_merge(self, adapter_names: list[str] | None) -> list[str]:
        names = check_adapters_to_merge(self, adapter_names)
        return [name for name in names if name in self.token_indices]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write the rows of adapters into this rank's rows of the table."""
        self.check_merge(safe_merge, adapter_names, keep=False)
        for name in self._to_merge(adapter_names):
            self._write(name, self._holder.trainable_tokens_delta[name])
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Put the rows of the table back, bit for bit."""
        for name in self.merged_adapters:
            self._write(name, self._holder.trainable_tokens_original[name])
        self.merged_adapters.clear()

    @torch.no_grad()
    def _write(self, adapter: str, rows: torch.Tensor) -> None:
        """Write rows [k, H], in the order of the adapter, into those of the table that are here."""
        weight, indices = self._table.weight, self.token_indices[adapter]
        here = rows_here(torch.arange(*self._table.vocab_range), weight)
        first, stop = (int(here[0]), int(here[-1]) + 1) if len(here) else (0, 0)
        places = [place for place, each in enumerate(indices) if first <= each < stop]
        local = local_part(weight.data)
        index = torch.tensor([indices[place] - first for place in places], device=local.device)
        local.index_copy_(0, index.long(), rows[places].to(local))


def put_inside(
    plain: Callable[..., None],
    self: TrainableTokensWrapper,
    adapter_name: str,
    token_indices: list[int],
    tied_adapter: TokenRows | None,
) -> None:
    """Extend ``TrainableTokensWrapper.init_modules``: put the layer of a parallel model inside."""
    base = self.original_module
    if not isinstance(base, (*_WITH_ROWS, TiedHead)):
        plain(self, adapter_name, token_indices, tied_adapter)
        return
    self.token_adapter = TokenRows(base, adapter_name, token_indices, tied_adapter)
    self.makes_logits = getattr(base, "makes_logits", False)


def rows_to_save(
    plain: Callable[..., dict[str, Any]],
    self: TrainableTokensWrapper,
    adapter_name: str,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Extend what ``TrainableTokensWrapper`` saves and loads: nothing of an adapter without rows.

    PEFT looks for rows of every adapter in the model.
    """
    tokens = self.token_adapter
    if isinstance(tokens, TokenRows) and adapter_name not in tokens.trainable_tokens_delta:
        return {}
    return plain(self, adapter_name, *args, **kwargs)


def refuse_tokens(model: nn.Module, config: peft.LoraConfig, op_name: str) -> None:
    """Raise unless ``trainable_token_indices`` are rows of the parallel embedding or head."""
    given = config.trainable_token_indices
    if not isinstance(given, dict):
        embedding = model.get_input_embeddings()
        names = [path for path, module in model.named_modules() if module is embedding]
        given = {name: given for name in names if given}
    for target, indices in given.items():
        alone = len(given) == 1 or any(each != indices for each in given.values())
        for path, module in model.named_modules():
            if path.endswith(target):
                _refuse_rows(path, module, indices, alone, op_name)


def _refuse_rows(
    path: str, module: nn.Module, indices: list[int], alone: bool, op_name: str
) -> None:
    if isinstance(module, TrainableTokensWrapper):
        if module.token_adapter.tied_adapter and alone:
            raise NotImplementedError(
                f"{op_name}: trainable_token_indices names {path}, which has the rows of the "
                "embedding with an adapter of before, since they share one weight; give ids of the "
                "embedding, or untie the two"
            )
        module = module.original_module
    if not isinstance(module, _WITH_ROWS):
        raise NotImplementedError(
            f"{op_name}: trainable_token_indices names {path}, a {type(module).__name__}; on a "
            "parallel model they are rows of its embedding or output head"
        )
    rows = module.layouts["weight"].shape[0]
    for each in indices:
        if type(each) is not int or not 0 <= each < rows:
            raise ValueError(
                f"{op_name}: trainable_token_indices of {path} must be ids in [0, {rows}), got "
                f"{each!r}"
            )
    if len(set(indices)) < len(indices):
        several = [str(each) for each in sorted(set(indices)) if indices.count(each) > 1]
        raise ValueError(
            f"{op_name}: trainable_token_indices of {path} name {first_few(several)} more than once"
        )

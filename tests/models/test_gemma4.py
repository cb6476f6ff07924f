"""What Gemma 4 has beside other models: an embedding for its layers, beside that of ids."""

from __future__ import annotations

from dataclasses import replace

import torch
from ranks import pool
from reference import difference, mesh_of, parallel, refusal
from test_specs import OfSpec

import parallel_ext as px

E2B = OfSpec("gemma4_text that shares keys", dtype=torch.float32)
IDS = torch.tensor([[5, 60, 7, 8, 90, 10]])


def _of_embeddings() -> tuple[float, str]:
    """How far a forward of embeddings is from that of one process, and why it needs two."""
    plain = E2B.model().eval()
    model = parallel(plain, mesh_of()).eval()
    with torch.no_grad():
        given = {
            "inputs_embeds": model.get_input_embeddings()(IDS),
            "per_layer_inputs": model.model.get_per_layer_inputs(IDS, None),
        }
        far = difference(model(**given).logits, plain(IDS).logits)
    del given["per_layer_inputs"]
    return far, refusal(lambda: model(**given))


def test_embeddings_come_with_those_of_the_layers() -> None:
    for far, why in pool(2).run(_of_embeddings):
        assert far < 1e-5
        assert "inputs_embeds under tp needs per_layer_inputs" in why


def _of_embeddings_over_dp() -> None:
    plain = E2B.model().eval()
    model = parallel(plain, mesh := mesh_of(tp=1)).eval()
    embeddings = plain.get_input_embeddings()(IDS)
    px.data_parallel(model, mesh)
    model(inputs_embeds=embeddings)


def test_embeddings_alone_are_refused_over_dp() -> None:
    words = "inputs_embeds under data_parallel needs per_layer_inputs"
    pool(2).assert_raises(_of_embeddings_over_dp, error="NotImplementedError", words=words)


def _rows() -> tuple[int, str]:
    model = parallel(E2B.model(), mesh_of())
    rows = len(model.model.embed_tokens_per_layer.weight)
    return rows, refusal(lambda: model.resize_token_embeddings(110))


def test_each_rank_holds_its_rows_of_both_embeddings() -> None:
    (first, why), (second, _) = pool(2).run(_rows)
    assert (first, second) == (51, 50)
    assert "embed_tokens_per_layer has a row for each id, too" in why


def _parameters_but_embeddings() -> list[int]:
    plain = E2B.model()
    models = (plain, parallel(plain, mesh_of()))
    return [each.num_parameters(exclude_embeddings=True) for each in models]


def test_parameters_are_counted_without_either_embedding() -> None:
    for plain, ours in pool(2).run(_parameters_but_embeddings):
        assert ours == plain


def _of_first_layers(layers: int | None) -> float:
    ids = IDS.repeat(2, 1)
    model = parallel(E2B.model(), mesh_of())
    return px.check_gradients(model, {"input_ids": ids, "labels": ids}, layers=layers).worst[1]


def test_gradients_are_checked_of_all_layers_or_none() -> None:
    assert max(pool(2).run(_of_first_layers, None)) < 1e-4
    words = "layers=2 of a 'gemma4_text' whose layers share keys"
    pool(2).assert_raises(_of_first_layers, 2, error="NotImplementedError", words=words)


def _shared_keys(key_value_heads: int) -> float:
    plain = replace(E2B, key_value_heads=key_value_heads).model().eval()
    model = parallel(plain, mesh_of()).eval()
    with torch.no_grad():
        ours, expected = (
            each(IDS, return_shared_kv_states=True).shared_kv_states for each in (model, plain)
        )
    return max(
        difference(a, b)
        for kind in expected
        for a, b in zip(ours[kind], expected[kind], strict=True)
    )


def test_shared_keys_are_those_of_all_heads_or_refused() -> None:
    assert max(pool(2).run(_shared_keys, 1)) < 1e-5
    words = "return_shared_kv_states, as a Gemma 4 assistant needs"
    pool(2).assert_raises(_shared_keys, 3, error="NotImplementedError", words=words)

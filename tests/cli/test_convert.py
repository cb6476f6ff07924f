"""``parallel-ext convert``: what it makes of models, checkpoints, DCPs and adapters."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from disk_faults import change_last_byte
from ranks import pool
from reference import Tiny, batch, mesh_of, saved_tensors
from reference_cogagent import tiny_config
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.multiprocessing.reductions import StorageWeakRef

import parallel_ext as px
from parallel_ext.checkpoint import to_dcp
from parallel_ext.checkpoint.dcp_reader import DcpDirectory
from parallel_ext.cli.main import main
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.sharding import reshard

TINY = Tiny(dtype=torch.float32)
V, PADDED = TINY.vocab_size, 128


def _json(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert main(["convert", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _refused(capsys: pytest.CaptureFixture[str], out: Path, *arguments: Any) -> str:
    """The error; nothing is left of what was begun."""
    assert main(["convert", *map(str, arguments)]) == 2
    assert not [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.")]
    return capsys.readouterr().err


def _has_hashes(capsys: pytest.CaptureFixture[str], out: Path) -> bool:
    """Whether ``verify`` compares each file, and finds what was written."""
    assert main(["verify", str(out)]) == 0
    return "every byte of its tensors is that which was written" in capsys.readouterr().out


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        value.dtype == expected[name].dtype and torch.equal(value, expected[name])
        for name, value in found.items()
    )


def _tokenizer(folder: Path, ids: int) -> None:
    vocabulary = {f"t{number}": number for number in range(ids)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _pad(folder: Path, tiny: Tiny, fill: float, configured: int, size: str = "1GB") -> None:
    """Save a model whose vocabulary was padded with rows of a value."""
    model = tiny.model()
    model.resize_token_embeddings(PADDED, mean_resizing=False)
    for end in {model.get_input_embeddings(), model.get_output_embeddings()}:
        end.weight.data[V:] = fill
    model.save_pretrained(folder, max_shard_size=size)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": configured}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", ["1GB", "30KB"])
@pytest.mark.parametrize("how", ["config", "option", "tokenizer"])
def test_a_padded_vocabulary_gets_its_rows_back(
    how: str, size: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Tiny(dtype=torch.bfloat16, tied=tied)
    padded, plain, out = (tmp_path / name for name in ("padded", "plain", "out"))
    _pad(padded, tiny, 0.0, V if how == "config" else PADDED, size)
    tiny.model().save_pretrained(plain)
    if how == "tokenizer":
        _tokenizer(padded, V)
    (padded / "pytorch_model.bin").write_bytes(b"old")
    found = _json(capsys, padded, out, *(["--vocab-size", V] if how == "option" else []))
    assert (found["vocab_size"], found["padded_vocab_size"]) == (V, PADDED)
    assert _same(saved_tensors(out), saved_tensors(plain))
    assert not (out / "pytorch_model.bin").exists()
    assert (out / "tokenizer.json").exists() == (how == "tokenizer")
    assert json.loads((out / "config.json").read_text())["vocab_size"] == V
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert model.get_input_embeddings().weight.shape[0] == V
    if (index := out / "model.safetensors.index.json").exists():
        total = json.loads(index.read_text())["metadata"]["total_size"]
        assert total == sum(tensor.nbytes for tensor in saved_tensors(out).values())


def test_only_padding_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    padded, out = tmp_path / "padded", tmp_path / "out"
    _pad(padded, TINY, 0.5, PADDED)
    convert = [padded, out, "--vocab-size", V]
    assert f"row {V} is not zero" in _refused(capsys, out, *convert)
    for rows in (PADDED, 5000):
        text = _refused(capsys, out, padded, out, "--vocab-size", rows)
        assert f"--vocab-size {rows} is not below the {PADDED} rows" in text
    assert "there is none in the folder" in _refused(capsys, out, *convert, "--filled-padding")
    _tokenizer(padded, V + 1)
    assert f"has the id {V}" in _refused(capsys, out, *convert, "--filled-padding")
    _tokenizer(padded, V)
    assert f"row {V} is not zero" in _refused(capsys, out, *convert)
    assert not out.exists()
    assert _json(capsys, *convert, "--filled-padding")["vocab_size"] == V
    TINY.model().save_pretrained(tmp_path / "plain")
    assert _same(saved_tensors(out), saved_tensors(tmp_path / "plain"))
    assert "is there already" in _refused(capsys, out, *convert, "--filled-padding")
    assert "nothing to drop" in _refused(capsys, out, out, tmp_path / "again")
    assert "or in it" in _refused(capsys, out, padded, padded / "inside")


def test_what_was_shortened_is_printed_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _pad(tmp_path / "padded", TINY, 0.0, V)
    assert main(["convert", str(tmp_path / "padded"), str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "shortened lm_head.weight and model.embed_tokens.weight, tensors 21" in text


def test_a_file_of_a_model_is_no_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TINY.model().save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    text = _refused(capsys, out, tmp_path / "model" / "model.safetensors", out)
    assert "model.safetensors is a safetensors file without an adapter of" in text
    assert "convert takes the folder" in text


def _save(root: Path, adapter: bool) -> None:
    """Train and save; in plain DCP too, of shards."""
    model: Any = px.parallelize(TINY.model(), mesh_of(tp=2))
    if adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for step in range(2):
        model(**batch(TINY.vocab_size, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    px.save_checkpoint(root / "checkpoints", 2, model, optimizer, data_state={"samples": 7})
    if not adapter:
        dcp.save({"model": model.state_dict()}, checkpoint_id=root / "shards")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    pool(2).run(_save, root, False)
    return root


def test_a_checkpoint_becomes_a_plain_model(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, out = px.latest_checkpoint(saved / "checkpoints"), tmp_path / "out"
    found = _json(capsys, saved / "checkpoints", out)
    assert (found["from"], found["to"], found["tensors"]) == ("training checkpoint", "hf", 21)
    assert _same(saved_tensors(out), saved_tensors(step))
    expected = {path.name for path in step.iterdir()} - {"COMMIT", "parallel_state"}
    assert {path.name for path in out.iterdir()} == expected
    assert _has_hashes(capsys, out)


def test_an_adapters_checkpoint_becomes_a_plain_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool(2).run(_save, tmp_path, True)
    out = tmp_path / "out"
    _json(capsys, tmp_path / "checkpoints", out)
    assert {path.name for path in out.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    step = px.latest_checkpoint(tmp_path / "checkpoints")
    assert _same(saved_tensors(out), saved_tensors(step))
    assert _has_hashes(capsys, out)
    peft.PeftModel.from_pretrained(TINY.model(), out)


def test_a_damaged_model_is_not_shortened(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _json(capsys, saved / "checkpoints", tmp_path / "model")
    change_last_byte(next((tmp_path / "model").glob("*.safetensors")))
    out = tmp_path / "out"
    assert "is damaged" in _refused(capsys, out, tmp_path / "model", out, "--vocab-size", 100)


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_damaged_checkpoint_is_not_converted(
    to: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(saved / "checkpoints", tmp_path / "copy")
    file = next(px.latest_checkpoint(root).glob("*.safetensors"))
    change_last_byte(file)
    out = tmp_path / "out"
    assert "are damaged" in _refused(capsys, out, root, out, "--to", to)
    assert not out.exists()


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1000])
def test_a_checkpoint_through_dcp_and_back_has_the_same_bytes(
    chunk_bytes: int,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(to_dcp, "_CHUNK_BYTES", chunk_bytes)
    there, back = tmp_path / "dcp", tmp_path / "back"
    _json(capsys, saved / "checkpoints", there, "--to", "dcp")
    _json(capsys, there, back)
    step = px.latest_checkpoint(saved / "checkpoints")
    again = px.latest_checkpoint(back)
    assert again.name == step.name
    files = {path.relative_to(step) for path in step.rglob("*") if path.is_file()}
    assert {path.relative_to(again) for path in again.rglob("*") if path.is_file()} == files
    for name in files:
        assert (again / name).read_bytes() == (step / name).read_bytes()
    assert px.verify_checkpoint(again) == 2
    model = tmp_path / "model"
    _json(capsys, there, model, "--to", "hf")
    assert _same(saved_tensors(model), saved_tensors(step))
    transformers.AutoModelForCausalLM.from_pretrained(model)


def test_a_dcp_takes_the_memory_of_a_piece(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[StorageWeakRef] = []
    rows = SafetensorsFile.read_rows

    def watched(*args: Any) -> torch.Tensor:
        assert sum(1 for piece in held if not piece.expired()) <= 1
        piece = rows(*args)
        held.append(StorageWeakRef(piece.untyped_storage()))
        return piece

    monkeypatch.setattr(SafetensorsFile, "read_rows", watched)
    to_dcp.to_dcp(px.latest_checkpoint(saved / "checkpoints"), tmp_path / "dcp")
    assert len(held) == 63


def test_torch_resumes_from_the_dcp(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "dcp"
    _json(capsys, saved / "checkpoints", there, "--to", "dcp")
    model = TINY.model(seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=there, no_dist=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    step = px.latest_checkpoint(saved / "checkpoints")
    assert _same(model.state_dict(), saved_tensors(step))
    assert optimizer.param_groups[0]["lr"] == 3e-3
    moments = saved_tensors(step / "parallel_state")
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert state["step"].item() == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], moments[f"{key}/{name}"])


def test_a_dcp_that_was_changed_is_no_checkpoint_any_more(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, out = tmp_path / "dcp", tmp_path / "out"
    _json(capsys, saved / "checkpoints", there, "--to", "dcp")
    (file,) = there.glob("*.distcp")
    content = file.read_bytes()
    norm = saved_tensors(px.latest_checkpoint(saved / "checkpoints"))["model.norm.weight"]
    raw = norm.numpy().tobytes()
    assert content.count(raw) == 1
    file.write_bytes(content.replace(raw, (norm + 1).numpy().tobytes()))
    # torch.save has a checksum of its own, which torch.load does not look at
    assert "the hashes are others" in _refused(capsys, out, there, out)
    commit = (px.latest_checkpoint(saved / "checkpoints") / "COMMIT").read_bytes()
    assert content.count(commit) == 1
    file.write_bytes(content.replace(commit, commit.swapcase()))
    assert "the manifest in it is damaged, by the commit in it" in _refused(capsys, out, there, out)


def test_a_tensor_that_a_dcp_lacks_is_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, out = tmp_path / "dcp", tmp_path / "out"
    _json(capsys, saved / "checkpoints", there, "--to", "dcp")
    content = pickle.loads((there / ".metadata").read_bytes())
    del content.state_dict_metadata["model.model.norm.weight"]
    (there / ".metadata").write_bytes(pickle.dumps(content))
    assert "there is no tensor model.model.norm.weight" in _refused(capsys, out, there, out)


def test_shards_of_ranks_in_a_dcp_become_a_model(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, config = tmp_path / "out", tmp_path / "config"
    assert "pass --config" in _refused(capsys, out, saved / "shards", out, "--to", "hf")
    assert "holds no training checkpoint" in _refused(capsys, out, saved / "shards", out)
    Tiny(dtype=torch.float32, inner=98).config().save_pretrained(config)
    convert = [saved / "shards", out, "--to", "hf", "--config", config]
    assert "must be" in _refused(capsys, out, *convert)
    TINY.config().save_pretrained(config)
    assert _json(capsys, *convert)["tensors"] == 21
    assert _same(saved_tensors(out), saved_tensors(px.latest_checkpoint(saved / "checkpoints")))
    transformers.AutoModelForCausalLM.from_pretrained(out)
    assert _has_hashes(capsys, out)


class _Harm:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (os.fspath(self.place),)


def test_code_in_a_dcp_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, out = tmp_path / "dcp", tmp_path / "out"
    there.mkdir()
    (there / ".metadata").write_bytes(pickle.dumps(_Harm(tmp_path / "ran")))
    assert "mkdir is not of a DCP" in _refused(capsys, out, there, out)
    assert not (tmp_path / "ran").exists()


def test_a_dcp_writes_no_file_outside_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_bytes(content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    plain = Tiny(dtype=torch.float32).model()
    names = [str(tmp_path / "absolute.json"), "../beside.json", "sub/below.json"]
    files = {f"parallel_ext.{name}": of_bytes(b"{}") for name in names}
    files["parallel_ext.config.json"] = of_bytes(plain.config.to_json_string().encode())
    source, out = tmp_path / "dcp", tmp_path / "out"
    dcp.save({"model": plain.state_dict(), **files}, checkpoint_id=source, no_dist=True)
    assert main(["convert", str(source), str(out), "--to", "hf"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"dcp", "out"}
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}


def test_swiss_army_adapters_become_peft_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, out = "transformer.layers.0.attention.dense.matrix_{}.0", tmp_path / "out"
    factors = {name.format("A"): torch.randn(3, 64), name.format("B"): torch.randn(64, 3)}
    source = tmp_path / "adapter.safetensors"
    save_file(factors, source)
    tiny_config().save_pretrained(tmp_path / "config")
    assert "pass --config" in _refused(capsys, out, source, out)
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")
    assert "is an adapter of PEFT already" in _refused(capsys, out, tmp_path / "peft", out)
    convert = [source, out, "--config", tmp_path / "config", "--lora-alpha", 6]
    assert _json(capsys, *convert)["to"] == "peft"
    lora = peft.LoraConfig.from_pretrained(out)
    assert (lora.r, lora.lora_alpha) == (3, 6)
    values = sorted(saved_tensors(out).values(), key=lambda value: value.shape)
    assert torch.equal(values[0], factors[name.format("A")])
    assert torch.equal(values[1], factors[name.format("B")])
    save_file(factors | {"mixins.eva.boi": torch.ones(2)}, source)
    convert[1] = again = tmp_path / "again"
    assert "adapters_only=True" in _refused(capsys, again, *convert)
    _json(capsys, *convert, "--adapters-only")
    assert _same(saved_tensors(again), saved_tensors(out))


def test_code_in_a_swiss_army_checkpoint_runs_only_if_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ran, out = tmp_path / "adapter.pt", tmp_path / "ran", tmp_path / "out"
    torch.save({"module": {}, "harm": _Harm(ran)}, source)
    tiny_config().save_pretrained(tmp_path / "config")
    convert = [source, out, "--config", tmp_path / "config"]
    assert "mkdir, which is no tensor" in _refused(capsys, out, *convert)
    assert not ran.exists()
    assert "no adapter" in _refused(capsys, out, *convert, "--allow-pickle")
    assert ran.exists()


def test_stripes_of_rows_are_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pad(tmp_path / "padded", TINY, 0.0, V)
    _json(capsys, tmp_path / "padded", tmp_path / "whole")
    monkeypatch.setattr(reshard, "STRIPE_BYTES", 1000)
    _json(capsys, tmp_path / "padded", tmp_path / "striped")
    assert _same(saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "striped"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "peft"], "not peft"),
        (["--vocab-size", "9"], "--vocab-size is for --to hf of a HuggingFace model, but"),
        (
            ["--config", "/tmp"],
            "--config is for --to hf of a DCP or --to peft of a check",
        ),
        (["--lora-alpha", "0"], "--lora-alpha is for --to peft of a checkpoint of Swiss"),
        (["--allow-pickle"], "--allow-pickle is for --to peft of a checkpoint of Swiss"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    options: list[str],
    message: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert message in _refused(capsys, out, saved / "checkpoints", out, *options)
    assert not out.exists()


def test_pieces_in_a_dcp_that_are_not_the_tensor_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(8.0).view(4, 2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    saved = DcpDirectory(tmp_path / "dcp")
    (chunk,) = saved._chunks["a"]
    assert torch.equal(saved.read("a"), torch.arange(8.0).view(4, 2))
    for shape, rows, words in (
        ((5, 2), 4, "a has 5 rows, but pieces end at 4"),
        ((4, 3), 4, r"the rows \[0, 4\) have 12 elements, but pieces hold 8"),
        ((3, 2), 3, r"but a piece of shape \(3, 2\) was saved"),
    ):
        saved.tensors["a"] = torch.float32, shape
        saved._chunks["a"] = [replace(chunk, sizes=torch.Size((rows, 2)))]
        with pytest.raises(CheckpointError, match=words):
            saved.read("a")

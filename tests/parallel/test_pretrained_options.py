"""What ``from_pretrained`` is asked for: HuggingFace's words mean the same, others are refused."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import pool
from reference import Tiny, mesh_of
from reference_mixtral import TinyMixtral

import parallel_ext as px
from parallel_ext.io.hf_reader import HFDirectory
from parallel_ext.parallel.state import state_of

TINY = Tiny(dtype=torch.bfloat16, layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    TINY.model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"torch_dtype": "auto"}, torch.bfloat16),
        ({"dtype": "float64"}, torch.float64),
        ({"dtype": torch.float32}, torch.float32),
        ({"dtype": torch.float64, "torch_dtype": "float64"}, torch.float64),
    ],
)
def test_dtypes_are_given_as_in_huggingface(
    folder: Path, options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = px.from_pretrained(folder, px.init_mesh(), **options)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.config.dtype == dtype


REFUSED = {
    "no dtype": ({"dtype": ""}, ValueError, "dtype must be a floating-point torch.dtype"),
    "zero": ({"dtype": 0.0}, ValueError, "dtype must be .* got 0.0"),
    "integers": ({"dtype": "int8"}, ValueError, "dtype must be .* got 'int8'"),
    "function": ({"torch_dtype": "load"}, ValueError, "torch_dtype must be .* got 'load'"),
    "two dtypes": ({"dtype": "auto", "torch_dtype": "float16"}, ValueError, "two names of one"),
    "no attention": ({"attn_implementation": ""}, TypeError, "attn_implementation must be a text"),
    "number for a revision": ({"revision": 3}, TypeError, "revision must be a text"),
    "unknown": (
        {"revison": "main"},
        TypeError,
        "from_pretrained has no option revison; .*revision",
    ),
    "of the configuration": (
        {"num_hidden_layers": 1},
        TypeError,
        "no option num_hidden_layers; .*; what a configuration has, set in config=",
    ),
    "pickles": ({"use_safetensors": False}, TypeError, "use_safetensors: weights are read from"),
    "variant": ({"variant": "fp16"}, TypeError, "variant: weights are read from model.safetensors"),
    "older token": ({"use_auth_token": "x"}, TypeError, "use_auth_token: it is token now"),
    "devices": ({"device_map": "auto"}, TypeError, "does not take device_map: the mesh places"),
    "configuration": ({"config": {}}, TypeError, "config must be a configuration of"),
    "quantized": ({"load_in_8bit": True}, TypeError, "quantized models are not served"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_is_refused_before_a_file_is_opened(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any) -> None:
        raise AssertionError("a directory was opened")

    monkeypatch.setattr(HFDirectory, "__init__", opened)
    options, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        px.from_pretrained(folder, px.init_mesh(), **options)


def _load_differently(folder: str, other: str, how: str) -> None:
    mesh = mesh_of(tp=2)
    if how == "dtype":
        px.from_pretrained(folder, mesh, dtype=(torch.float32, torch.bfloat16)[mesh.rank])
    elif how == "eps":
        config = transformers.AutoConfig.from_pretrained(folder)
        config.rms_norm_eps = (1e-6, 1e-2)[mesh.rank]
        px.from_pretrained(folder, mesh, config=config)
    else:
        px.from_pretrained((folder, other)[mesh.rank], mesh)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dtype", "dtype must be equal on all ranks"),
        ("eps", "config.rms_norm_eps must be equal on all ranks"),
        ("files", "the values in the files of model.layers.0.input_layernorm.weight must be equal"),
    ],
)
def test_ranks_that_load_different_models_are_told(tmp_path: Path, how: str, words: str) -> None:
    paths = [str(tmp_path / str(seed)) for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        Tiny(layers=1).model(seed).save_pretrained(path)
    pool(2).assert_raises(_load_differently, *paths, how, error="DisagreementError", words=words)


def _load_with_an_option_on_rank_1(folder: str) -> None:
    px.from_pretrained(folder, mesh_of(), **({"max_memory": 3} if mesh_of().rank else {}))


def test_what_one_rank_is_refused_all_are(folder: Path) -> None:
    words = "from_pretrained does not take max_memory: each rank holds its shards"
    pool(2).assert_raises(_load_with_an_option_on_rank_1, str(folder), words=words)


def test_huggingfaces_words_for_nothing_change_nothing(folder: Path) -> None:
    nothing = {"device_map": None, "trust_remote_code": False, "quantization_config": None}
    nothing |= {"use_safetensors": True, "low_cpu_mem_usage": True, "variant": None}
    of_the_hub = {"revision": "main", "token": None, "local_files_only": True, "subfolder": ""}
    of_the_hub |= {"force_download": True, "resume_download": False}
    model = px.from_pretrained(folder, px.init_mesh(), **nothing, **of_the_hub)
    for name, parameter in TINY.model().named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_a_configuration_may_name_its_dtype(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.dtype = "bfloat16"
    model = px.from_pretrained(folder, px.init_mesh(), config=config)
    assert model.dtype == torch.bfloat16


def _first_layer(folder: Path, tiny: Tiny | TinyMixtral) -> None:
    config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=1)
    words = f"{re.escape(str(folder))}: the first 1 of 3 layers are loaded"
    with pytest.warns(UserWarning, match=words) if mesh_of().rank == 0 else nullcontext():
        model = px.from_pretrained(folder, mesh_of(tp=2), config=config)
    reference = tiny.model()
    reference.load_state_dict(type(reference).from_pretrained(folder, config=config).state_dict())
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(ids, labels=ids).loss, reference(ids, labels=ids).loss)
    full = px.full_state_dict(model, writer_only=False)
    assert full.keys() == reference.state_dict().keys()
    assert all(torch.equal(full[name], each) for name, each in reference.state_dict().items())


@pytest.mark.parametrize("tiny", [Tiny, TinyMixtral])
def test_fewer_layers_than_in_the_files_are_the_first_ones(tmp_path: Path, tiny: Any) -> None:
    tiny(dtype=torch.float32, layers=3).model().save_pretrained(tmp_path)
    pool(2).run(_first_layer, tmp_path, tiny(dtype=torch.float32, layers=1))


def test_a_revision_and_a_subfolder_of_the_hub_are_found_in_its_cache(
    folder: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "models--some--llama"
    of_revision = {"main": (0, 1), "v2": (1, 2)}
    for revision, (number, layers) in of_revision.items():
        commit = f"{number}" * 40
        inner = repository / "snapshots" / commit / "inner"
        Tiny(dtype=torch.float32, layers=layers).model().save_pretrained(inner)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    options = {"cache_dir": tmp_path, "local_files_only": True, "subfolder": "inner"}
    for revision, (_, layers) in of_revision.items():
        model = px.from_pretrained("some/llama", px.init_mesh(), revision=revision, **options)
        assert model.config.num_hidden_layers == layers
    assert px.from_pretrained(
        repository / "snapshots" / ("1" * 40), px.init_mesh(), subfolder="inner"
    )
    with pytest.raises(px.CheckpointError, match="some/llama: no such directory, and the hub does"):
        px.from_pretrained("some/llama", px.init_mesh(), revision="v3", **options)


@pytest.mark.parametrize(
    ("source", "options", "error", "words"),
    [
        *(
            ("x", {"subfolder": each}, ValueError, "subfolder must lie in the source")
            for each in ("..", "a/../../b", "/etc")
        ),
        *(
            (each, {}, px.CheckpointError, re.escape(f"{each}: no such directory") + "$")
            for each in ("/absent/llama", "./absent", "absent/some/llama")
        ),
        *((each, {}, TypeError, "source must be a directory or hub id") for each in ("", None, 3)),
    ],
)
def test_what_names_no_place_is_refused(
    source: Any, options: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        px.from_pretrained(source, px.init_mesh(), **options)


def test_code_of_the_files_is_refused_where_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    assert px.from_pretrained(folder, px.init_mesh(), trust_remote_code=True)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Other"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert px.from_pretrained(tmp_path, px.init_mesh())
    with pytest.raises(px.CheckpointError, match="asks for the code of auto_map, .* never run"):
        px.from_pretrained(tmp_path, px.init_mesh(), trust_remote_code=True)


def test_without_a_mesh_the_one_made_last_serves(folder: Path) -> None:
    px.init_mesh()
    mesh = px.init_mesh()
    assert state_of(px.from_pretrained(folder)).mesh is mesh
    assert state_of(px.parallelize(TINY.model())).mesh is mesh


def test_without_a_mesh_the_sentence_says_how_to_make_one(folder: Path) -> None:
    px.init_mesh().close()  # nor does one that is closed
    for given in ((), (None,), (2,)):
        with pytest.raises(
            TypeError, match=r"from_pretrained needs the mesh .* px.init_mesh\(tp=2\)"
        ):
            px.from_pretrained(folder, *given)
    with pytest.raises(TypeError, match="parallelize needs the mesh .* was given none"):
        px.parallelize(TINY.model(), None)

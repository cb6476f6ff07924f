"""The command ``parallel-ext`` on what parallel models have saved."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from disk_faults import change_last_byte
from launch import run_forked
from ranks import pool
from reference import Tiny, batch, mesh_of
from reference_cogagent import DATA as COGAGENT
from reference_mixtral import TinyMixtral
from safetensors.torch import load_file, save_file

import parallel_ext as px
from parallel_ext.cli.main import main
from parallel_ext.io import progress
from parallel_ext.parallel.estimate import Planner, Step

TINY = Tiny(dtype=torch.float32)


def _save(root: Path, tp: int, steps: int) -> None:
    """Train some steps, and save a model and a training checkpoint, as each tp does."""
    model = px.parallelize(TINY.model(), mesh_of(tp=tp))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(**batch(TINY.vocab_size, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(root / "model")
    px.save_checkpoint(root / "checkpoints", steps, model, optimizer)


def _save_adapter(folder: Path) -> None:
    model = px.parallelize(TINY.model(), mesh_of())
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], lora_alpha=6)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder)
    px.save_checkpoint(folder.with_name("steps of adapter"), 1, adapted)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    pool(2).run(_save, root / "two", 2, 2)
    pool(3).run(_save, root / "three", 3, 2)
    pool(2).run(_save, root / "other", 2, 3)
    pool(2).run(_save_adapter, root / "adapter")
    return root


def _json(capsys: pytest.CaptureFixture[str], code: int, *arguments: Any) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_each_tensor(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, 0, "inspect", saved / "two" / "model")
    plain = TINY.model().state_dict()
    assert found["kind"] == "HuggingFace model"
    assert found["facts"]["vocab_size"] == TINY.vocab_size
    shapes = {name: each["shape"] for name, each in found["tensors"].items()}
    assert shapes == {name: list(tensor.shape) for name, tensor in plain.items()}
    assert {each["dtype"] for each in found["tensors"].values()} == {"F32"}


def test_inspect_names_what_a_checkpoint_has_beside(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _json(capsys, 0, "inspect", saved / "two" / "checkpoints")
    assert (found["kind"], found["facts"]["step"], found["facts"]["save"]) == (
        "training checkpoint",
        2,
        1,
    )
    assert found["facts"]["parallel_ext"] == px.__version__
    names = set(TINY.model().state_dict())
    of_optimizer = {name for name in found["tensors"] if name.startswith("optimizer: ")}
    assert set(found["tensors"]) - of_optimizer == names
    assert len([n for n in of_optimizer if "exp_avg_sq" in n]) == len(names)


def test_inspect_prints_layers_on_one_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved / "two" / "model")]) == 0
    text = capsys.readouterr().out
    layers = TINY.config().num_hidden_layers
    (line,) = (each for each in text.splitlines() if "q_proj" in each)
    assert re.fullmatch(rf"model\.layers\.\*\.self_attn\.q_proj\.weight .* {layers}", line.rstrip())
    count = sum(tensor.numel() for tensor in TINY.model().state_dict().values())
    assert f"{count:,}" in text
    assert main(["inspect", "--all", str(saved / "two" / "model")]) == 0
    assert "model.layers.1.self_attn.q_proj.weight" in capsys.readouterr().out


def test_inspect_knows_adapters_and_files(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = _json(capsys, 0, "inspect", saved / "adapter")
    assert (adapter["kind"], adapter["facts"]["r"]) == ("adapter", 3)
    step = _json(capsys, 0, "inspect", saved / "steps of adapter")
    assert (step["kind"], step["facts"]["step"]) == ("training checkpoint", 1)
    for facts in (adapter["facts"], step["facts"]):
        assert (facts["peft_type"], facts["r"], facts["lora_alpha"]) == ("LORA", 3, 6)
        assert facts["target_modules"] == ["q_proj"]
    file = _json(capsys, 0, "inspect", saved / "adapter" / "adapter_model.safetensors")
    assert (file["kind"], file["tensors"]) == ("file", adapter["tensors"])


def test_verify_finds_one_changed_byte(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(saved / "two" / "checkpoints", tmp_path / "copy")
    found = _json(capsys, 0, "verify", root)
    assert found["checked"] == "every byte is that which was written"
    file = next(px.latest_checkpoint(root).glob("parallel_state/optim-*"))
    change_last_byte(file)
    wrong = _json(capsys, 1, "verify", root)["wrong"]
    assert file.name in wrong
    assert "hash" in wrong


@pytest.mark.parametrize(
    ("folder", "kind"), [("two/model", "HuggingFace model"), ("adapter", "adapter")]
)
def test_verify_compares_a_model_with_the_hashes_in_its_file(
    folder: str, kind: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(saved / folder, tmp_path / "copy")
    found = _json(capsys, 0, "verify", model)
    assert found["kind"] == kind
    assert found["checked"] == "every byte of its tensors is that which was written"
    file = next(model.glob("*.safetensors"))
    content = file.read_bytes()
    for damaged, words in (
        (content[:-1] + bytes([content[-1] ^ 1]), "is damaged: its hash is"),
        (content[:-1], "truncated"),
    ):
        file.write_bytes(damaged)
        assert words in _json(capsys, 1, "verify", model)["wrong"]


def test_verify_says_how_many_files_have_hashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    px.parallelize(TINY.model(), px.init_mesh()).save_pretrained(tmp_path, max_shard_size="10KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    words = f"{len(files) - 1} of {len(files)} hold hashes, and are those that were written"
    for rewritten, expected in ((files[:1], words), (files[1:], "there are no hashes")):
        for file in rewritten:
            save_file(load_file(file), file, {"format": "pt"})
        assert expected in _json(capsys, 0, "verify", tmp_path)["checked"]


def test_a_step_without_commit_is_not_complete(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(saved / "two" / "checkpoints", tmp_path / "copy")
    step = px.latest_checkpoint(root)
    (step / "COMMIT").unlink()
    assert "not a complete one" in _json(capsys, 1, "verify", step)["wrong"]
    assert main(["inspect", str(step)]) == 2
    assert "not a complete one" in capsys.readouterr().err
    for left in ("LATEST", step.name, ".tmp-step-00000002-0"):
        alone = tmp_path / f"root of {left}"
        alone.mkdir()
        (alone / left).mkdir()
        for path in (root, alone):
            assert main(["verify", str(path)]) == 2
            assert f"{path} has no complete step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model/config.json", "config.json is no safetensors file; give a model's"),
        ("checkpoints/LATEST", "LATEST is no safetensors file; give a model's"),
        ("model", "there is neither model.safetensors nor"),
        ("bin", "pytorch_model.bin is a pickle"),
        ("adapter", "adapter_model.safetensors: no such file"),
    ],
)
def test_what_holds_no_tensors_that_can_be_read_is_not_damaged(
    name: str, message: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved / "two" / "checkpoints", tmp_path / "checkpoints")
    for folder in ("model", "bin"):
        TINY.config().save_pretrained(tmp_path / folder)
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"old")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert main(["verify", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_diff_compares_layouts_and_trainings(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two, three, other = (saved / name / "checkpoints" for name in ("two", "three", "other"))
    assert _json(capsys, 0, "diff", two, two)["different"] == []
    assert main(["diff", str(two), str(three), "--rtol", "0.01"]) == 0
    assert "tensors are equal to 0.01" in capsys.readouterr().out
    found = _json(capsys, 1, "diff", two, other)["different"]
    assert {each["name"] for each in found} > set(TINY.model().state_dict())
    first, second = (
        load_file(next((saved / name / "model").glob("*.safetensors")))["model.norm.weight"]
        for name in ("two", "other")
    )
    (norm,) = (each for each in found if each["name"] == "model.norm.weight")
    gap = (first.double() - second.double()).abs().max()
    assert norm["difference"] == gap.item()
    assert norm["relative"] == (gap / first.double().abs().max()).item()


def test_diff_shows_progress_on_a_terminal_alone(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = [str(saved / "two" / "checkpoints")] * 2
    assert main(["diff", *pair]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "_LONG_S", 0.0)
    assert main(["diff", *pair]) == 0
    assert "100%" in capsys.readouterr().err


def test_diff_rtol_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    for rtol in ("x", "nan", "-1"):
        with pytest.raises(SystemExit):
            main(["diff", "/tmp", "/tmp", "--rtol", rtol])
        expected = f"--rtol: expected a finite number of at least 0, got {rtol!r}"
        assert expected in capsys.readouterr().err


def test_diff_says_why_tensors_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    a = {"shape": torch.ones(2), "one": torch.ones(1), "nan": torch.tensor([nan, 1.0, nan])}
    b = {"shape": torch.ones(3), "two": torch.ones(1), "nan": torch.tensor([nan, nan, 2.0])}
    a["dtype"], b["dtype"] = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    a["empty"], b["empty"] = torch.ones(0, 3), torch.ones(0, 3)
    a["scalar"], b["scalar"] = torch.tensor(2.0), torch.tensor(3.0)
    a["large"], b["large"] = torch.tensor(2**53), torch.tensor(2**53 + 1)
    a["infinite"], b["infinite"] = torch.tensor([nan, torch.inf]), torch.tensor([nan, torch.inf])
    for name, tensors in (("a", a), ("b", b)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    found = _json(capsys, 1, "diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found["tensors"] == 9
    different = {each["name"]: each for each in found["different"]}
    assert set(different) == {"shape", "one", "two", "nan", "dtype", "scalar", "large"}
    assert different["shape"]["why"] == "[2] against [3]"
    assert different["one"]["why"].startswith("only in")
    assert different["dtype"]["why"] == "F32 against BF16"
    assert different["nan"]["difference"] is None
    assert different["scalar"]["relative"] == 0.5
    assert different["large"]["difference"] == 1
    files = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
    assert main(["diff", *files, "--top", "2"]) == 1
    equal, _, *rows, more = capsys.readouterr().out.splitlines()
    assert (equal, more) == ("2 of 9 tensors are equal", "and 5 more")
    assert [row.split()[0] for row in rows] == ["nan", "one"]


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["verify", "/nowhere"], ["verify", "/tmp"], ["compare"], ["diff", "/tmp"]),
        *(["inspect", "/tmp"], ["diff", "/tmp", "/tmp", "--rtol", "nan"]),
        *(["diff", "/tmp", "/tmp", "--top", "-1"], ["convert", "/tmp", "out", "--vocab-size", "0"]),
    ],
)
def test_wrong_use_is_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "parallel_ext", *arguments]
    # -m looks into the current folder first, where the sources may be.
    result = run_forked(command, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "parallel-ext" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_installed_command_is_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'parallel-ext = "parallel_ext.cli.main:main"' in text
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"parallel_ext {px.__version__}\n"


def test_plan_sorts_layouts_by_their_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TINY.config().save_pretrained(tmp_path)
    found = _json(capsys, 0, "plan", tmp_path, "--world", 8, "--tokens", 16, "--dtype", "float32")
    peaks = [layout["peak"] for layout in found["layouts"]]
    assert peaks == sorted(peaks)
    for layout in found["layouts"]:
        assert layout["tp"] * layout["dp"] == 8
        assert layout["peak"][0] >= sum(layout[name][0] for name in ("weights", "optimizer"))
    heads = TINY.config().num_attention_heads
    assert {layout["tp"] for layout in found["layouts"]} == {n for n in (1, 2, 4, 8) if n <= heads}
    numbers = sum(parameter.numel() for parameter in TINY.model().parameters())
    assert {layout["model_on_disk"] for layout in found["layouts"]} == {4 * numbers}
    assert all("query heads" in why for why in found["refused"].values())


def test_plan_knows_a_cogagent(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, 0, "plan", COGAGENT, "--world", 2, "--tokens", 16)
    assert {(layout["tp"], layout["dp"]) for layout in found["layouts"]} == {(2, 1), (1, 2)}


def test_plan_trains_an_adapter_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    TINY.config().save_pretrained(tmp_path)
    plan = ["plan", tmp_path, "--world", 2, "--tp", 2, "--tokens", 512]
    (whole,), (adapter,) = (
        _json(capsys, 0, *plan, *more)["layouts"] for more in ([], ["--lora-r", 4])
    )
    assert whole["gradients"] == whole["weights"]
    added = adapter["weights"][0] - whole["weights"][0]
    assert adapter["gradients"][0] == added > 0
    assert adapter["optimizer"][0] == 2 * added
    assert adapter["peak"][0] < whole["peak"][0]


def test_plan_says_whether_a_layout_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TINY.config().save_pretrained(tmp_path)
    plan = ["plan", str(tmp_path), "--world", "2", "--tokens", "16", "--checkpointing"]
    assert main([*plan, "--memory", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-2:] == ["peak", "fits"]
    assert [line.split()[:3] + line.split()[-1:] for line in lines[1:3]] == [
        ["2", "1", "1", "yes"],
        ["1", "1", "2", "yes"],
    ]
    assert main([*plan, "--memory", "0.000001"]) == 1
    assert " no" in capsys.readouterr().out
    layouts = _json(capsys, 0, *plan)["layouts"]
    assert not any("fits" in each for each in layouts)
    between = str(sum(each["peak"][0] for each in layouts) / 2e9)
    found = _json(capsys, 0, *plan, "--memory", between)["layouts"]
    assert [(each["tp"], each["fits"]) for each in found] == [(2, True), (1, False)]


def test_plan_keeps_the_layouts_of_a_dp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TinyMixtral().config().save_pretrained(tmp_path)
    plan = ["plan", tmp_path, "--world", 4, "--tokens", 16]
    every, some = (_json(capsys, 0, *plan, *more)["layouts"] for more in ([], ["--dp", 2]))
    assert some == [each for each in every if each["dp"] == 2]
    assert 0 < len(some) < len(every)


def test_plan_takes_the_last_step_of_a_root(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_root, of_model = (
        _json(capsys, 0, "plan", saved / "two" / name, "--world", 2)
        for name in ("checkpoints", "model")
    )
    assert of_root == of_model


def test_plan_says_that_there_is_no_such_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", "nowhere", "--world", "2"]) == 2
    text = capsys.readouterr().err
    assert "there is no directory or file nowhere; as a name on the hub: nowhere: " in text


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"model_type": "bert"}', [], "no spec for model_type 'bert'"),
        ('{"model_type": "llava"}', [], "is planned; it holds a decoder of text, 'llama'"),
        ('{"model_type": "clip"}', [], "'clip' is no causal language model, which alone is"),
        (
            '{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}',
            [],
            "it is of a LlamaForSequenceClassification; planned are causal",
        ),
        ('{"model_type": "llama", "architectures": ["LlamaModel"]}', [], "of a LlamaModel"),
        ("{}", [], "Unrecognized model"),
        ("[]", [], "no model can be built from it: "),
        ('{"model_type": "llama", "hidden_size": "big"}', [], "'hidden_size' expected int"),
        ('{"model_type": "llama", "num_hidden_layers": -1}', [], "without layers"),
        ('{"model_type": "llama"}', ["--ep", "2"], "a model without experts has ep=1"),
        ('{"model_type": "llama"}', ["--tp", "3"], "must divide --world 4"),
        ('{"model_type": "llama"}', ["--dp", "3"], "must divide --world 4"),
        ('{"model_type": "llama"}', ["--tp", "2", "--dp", "4"], "tp times dp is the world"),
    ],
)
def test_plan_names_what_it_cannot_plan(
    content: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", str(tmp_path), "--world", "4", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "1000000000"], "--world: 1000000000 is more than the 1048576 ranks"),
        (["--world", "0"], "--world: expected a whole number of at least 1, got '0'"),
        (["--world", "x"], "--world: expected a whole number of at least 1, got 'x'"),
        (["--world", "2", "--tokens", "0"], "--tokens: expected a whole number of at least 1"),
        (["--world", "2", "--tp", "1.5"], "--tp: expected a whole number of at least 1"),
        *(
            (
                ["--world", "2", "--memory", gb],
                f"--memory: expected a number of GB above 0, got {gb!r}",
            )
            for gb in ("-1", "0", "nan", "inf", "x")
        ),
    ],
)
def test_plan_refuses_numbers_of_no_job_at_once(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "anything", *options])
    assert message in capsys.readouterr().err


STEPS = {
    "--rows 3": {"rows": 3},
    "--dtype float16": {"dtype": torch.float16},
    "--dtype float64": {"dtype": torch.float64},
    "--autocast float16": {"dtype": torch.float32, "autocast": torch.float16},
    "--optimizer sgd": {"optimizer": "sgd"},
    "--optimizer sgd-momentum": {"optimizer": "sgd-momentum"},
    "--zero 3": {"zero": 3},
    "--checkpointing": {"checkpointing": True},
    "--sequence-parallel": {"sequence_parallel": True},
}


@pytest.mark.parametrize("options", STEPS)
def test_plan_plans_the_step_that_its_options_describe(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Only layouts of the mesh's sides that are asked for."""
    planned = []

    def estimate(planner: Planner, world: int, tp: int, ep: int, step: Step) -> None:
        planned.append((world, tp, ep, step))
        raise ValueError("seen")

    monkeypatch.setattr(Planner, "estimate", estimate)
    TinyMixtral().config().save_pretrained(tmp_path)
    plan = ["plan", tmp_path, "--world", 4, "--ep", 2, "--tokens", 7, *options.split()]
    _json(capsys, 1, *plan)
    assert planned == [(4, tp, 2, Step(tokens=7, **STEPS[options])) for tp in (1, 2, 4)]


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_folder_with_nothing_of_ours_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [str(tmp_path / "out")] if command == "convert" else []
    assert main([command, str(tmp_path), *out]) == 2
    assert "HuggingFace model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([command, str(tmp_path / "none"), *out])
    assert "none does not exist" in capsys.readouterr().err

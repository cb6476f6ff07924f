"""Functions of other packages on parallel models: exact, or refused, as docs/interplay.md says."""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import interplay
import interplay_checkpoint
import interplay_torch
import pytest
import torch
from interplay import PAGE, Case, Spread, Trial, load_cases, page, run_case
from ranks import pool
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from parallel_ext import ops
from parallel_ext.interplay import serve, withdraw
from parallel_ext.interplay.ddp import start_ddp
from parallel_ext.interplay.flops import register_flops
from parallel_ext.interplay.optimizers import _verdict
from parallel_ext.interplay.refusals import REFUSALS
from parallel_ext.interplay.trl import extend_trl
from parallel_ext.nn.extended import extend
from parallel_ext.parallel.state import STATE_NAME
from parallel_ext.sharding.shards import LocalShard

RUNS = [(case, spread) for case in load_cases() for spread in case.spreads]


@pytest.mark.parametrize(("case", "spread"), RUNS, ids=[f"{c.key}-{s}" for c, s in RUNS])
def test_what_the_page_says_is_so(case: Case, spread: Spread, tmp_path: Path) -> None:
    pool(spread.tp * spread.dp).run(run_case, case.key, spread, tmp_path, timeout_s=120)


def _fails_withdrawn(key: str, folder: Path) -> bool:
    make = Trial.another

    def another(trial: Trial) -> Any:
        model = make(trial)
        withdraw()
        extend(DistributedDataParallel.__init__, start_ddp)  # else DDP waits for a rank that raised
        return model

    interplay.Trial.another = another
    try:
        run_case(key, Spread(), folder)
    except Exception:
        return True
    finally:
        interplay.Trial.another = make
        serve()
    return False


OF_EXTENSIONS = """clip_grad_norm clip_several total_norm parameters_to_vector drawn parametrized
    pruned adafactor optimizer_state foreign_optimizer_state get_model_state_dict async_save
    full_optimizer_state generate_batch set_embeddings trainer_evaluate peft_state_dict save_state
    hotswapped_rank lorafa_on_shards prepare_model gather_for_metrics offloaded"""


@pytest.mark.parametrize("key", OF_EXTENSIONS.split())
def test_without_the_extensions_a_case_fails(key: str, tmp_path: Path) -> None:
    assert all(pool(2).run(_fails_withdrawn, key, tmp_path))


def _saved(spread: Spread, folder: Path) -> None:
    interplay_checkpoint.save(Trial(spread, folder), folder)


def _loaded(spread: Spread, folder: Path, dp: int) -> None:
    interplay_checkpoint.load(Trial(spread, folder), folder, dp)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Spread(2), Spread(3)),
        (Spread(2, 2, 3), Spread(1, 1)),
        (Spread(3), Spread(1, 2, 2)),
        (Spread(1, 2, 3), Spread(4)),
    ],
    ids=str,
)
def test_dcp_resumes_on_another_layout(saved: Spread, loaded: Spread, tmp_path: Path) -> None:
    pool(saved.tp * saved.dp).run(_saved, saved, tmp_path, timeout_s=120)
    pool(loaded.tp * loaded.dp).run(_loaded, loaded, tmp_path, saved.dp, timeout_s=120)


# Public names without a row: they take neither models nor parameters, or only undo or look at what
# other rows say, or make a plain model.
WITHOUT = {
    "torch.nn.utils": """convert_conv2d_weight_memory_format convert_conv3d_weight_memory_format
        fuse_conv_bn_weights fuse_linear_bn_weights parametrizations remove_spectral_norm
        remove_weight_norm rnn skip_init stateless""",
    "torch.nn.utils.parametrizations": "",
    "torch.nn.utils.parametrize": """cached ParametrizationList is_parametrized
        remove_parametrizations type_before_parametrizations""",
    "torch.nn.utils.prune": "is_pruned remove",
    "torch.distributed.checkpoint.state_dict": """FQNS_T PrimitiveType ValueType DictValueType
        ListDictValueType OptimizerStateType StateDictOptions""",
    "torch.distributed.checkpoint": "",
    "torch.optim": "swa_utils functional",
    "torch.optim.swa_utils": """get_ema_multi_avg_fn get_swa_multi_avg_fn get_ema_avg_fn
        get_swa_avg_fn""",
    "peft": """AutoPeftModel AutoPeftModelForCausalLM AutoPeftModelForFeatureExtraction
        AutoPeftModelForQuestionAnswering AutoPeftModelForSeq2SeqLM
        AutoPeftModelForSequenceClassification AutoPeftModelForTokenClassification CPTEmbedding
        CartridgeEncoder LoraModel MODEL_TYPE_TO_PEFT_MODEL_MAPPING MultitaskPromptTuningInit
        NoMatchingPeftModuleError PEFT_TYPE_TO_CONFIG_MAPPING PEFT_TYPE_TO_MIXED_MODEL_MAPPING
        PEFT_TYPE_TO_TUNER_MAPPING PeftConfig PeftError PeftModel PeftModelForFeatureExtraction
        PeftModelForQuestionAnswering PeftModelForSeq2SeqLM PeftModelForSequenceClassification
        PeftModelForTokenClassification PeftType PeftWarning PrefixEncoder PromptEmbedding
        PromptEncoder PromptEncoderReparameterizationType PromptTuningInit
        TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING TaskType
        bloom_model_postprocess_past_key_value compose_cartridge_adapters get_peft_config
        initialize_kv_prefix_from_past_key_values initialize_kv_prefix_from_text
        prompt_embeddings_from_past_key_values shift_tokens_right""",
    "accelerate": """debug_launcher find_executable_batch_size init_empty_weights init_on_device
        is_rich_available notebook_launcher skip_first_batches synchronize_rng_states""",
    "accelerate.Accelerator": """check_trigger clear context_parallel_rank data_parallel_rank
        data_parallel_shard_rank deepspeed_plugin deepspeed_ulysses_dl_adapter device
        dispatch_batches distributed_type end_training even_batches fp8_backend free_memory
        get_tracker gradient_accumulation_steps init_trackers is_composable_parallelism_enabled
        is_fsdp2 is_last_process is_local_main_process is_main_process
        local_main_process_first local_process_index log logging_dir lomo_backward
        main_process_first maybe_context_parallel mixed_precision multi_device non_blocking
        num_processes on_last_process on_local_main_process on_local_process on_main_process
        on_process optimizer_step_was_skipped parallelism_config pipeline_parallel_rank print
        process_index profile project_dir register_load_state_pre_hook register_save_state_pre_hook
        save_iteration set_trigger should_save_model split_batches sync_gradients
        tensor_parallel_rank torch_device_mesh trigger_sync_in_backward use_distributed
        use_seedable_sampler use_stateful_dataloader verify_device_map wait_for_everyone""",
}


def _public(module: str) -> set[str]:
    """The public names of a module or class, functions alone where it lists none."""
    if module == "accelerate.Accelerator":
        return {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    found = importlib.import_module(module)
    functions = inspect.getmembers(found, inspect.isfunction)
    own = (name for name, value in functions if value.__module__.startswith(module))
    return set(getattr(found, "__all__", None) or {n for n in own if not n.startswith("_")})


@pytest.mark.parametrize("module", WITHOUT)
def test_every_public_function_has_its_row(module: str) -> None:
    names = {name.split(" ")[0] for case in load_cases() for name in case.names}
    lacking = {name for name in _public(module) if f"{module}.{name}" not in names}
    assert lacking - set(WITHOUT[module].split()) == set()


def test_every_function_that_is_refused_is_found() -> None:
    for refusal in REFUSALS:
        module, _, name = refusal.function.partition(":")
        assert operator.attrgetter(name)(importlib.import_module(module)), refusal.function


def test_the_page_is_that_of_the_cases() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run make interplay-page"


X, ROWS_OF_EXPERTS = (5, 7), [2, 0, 3]


def _low_rank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.linear(functional.linear(x, a), b)


def _of_each(product: Any, rows: torch.Tensor, *of_experts: torch.Tensor) -> torch.Tensor:
    parts = zip(rows.split(ROWS_OF_EXPERTS), *of_experts, strict=True)
    return torch.cat([product(*part) for part in parts if len(part[0])])


# Shapes, the op and the plain products that stand for it.
PRODUCTS: dict[str, tuple[list[tuple[int, ...]], Any, Any]] = {
    "column_linear": ([X, (11, 7)], ops.column_linear, functional.linear),
    "row_linear": ([X, (11, 7)], ops.row_linear, functional.linear),
    "column_linears": (
        [X, (11, 7), (3, 7)],
        lambda x, *weights: torch.cat(ops.column_linears(x, weights), -1),
        lambda x, *weights: torch.cat([functional.linear(x, each) for each in weights], -1),
    ),
    "lora_linear": (
        [X, (11, 7), (2, 7), (11, 2)],
        ops.lora_linear,
        lambda x, weight, a, b: functional.linear(x, weight) + _low_rank(x, a, b),
    ),
    "moe_linear": (
        [X, (3, 11, 7)],
        lambda rows, weight: ops.moe_linear(rows, weight, ROWS_OF_EXPERTS),
        lambda *tensors: _of_each(functional.linear, *tensors),
    ),
    "moe_lora_linear": (
        [X, (3, 11, 7), (3, 2, 7), (3, 11, 2)],
        lambda rows, *factors: ops.moe_lora_linear(rows, *factors, ROWS_OF_EXPERTS),
        lambda *tensors: _of_each(
            lambda x, weight, a, b: functional.linear(x, weight) + _low_rank(x, a, b), *tensors
        ),
    ),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen weight"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operations_of_products_are_those_of_plain_ones(name: str, frozen: bool) -> None:
    register_flops()
    shapes, *both = PRODUCTS[name]
    found = []
    for product in both:
        tensors = [torch.ones(shape, requires_grad=True) for shape in shapes]
        tensors[1].requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            output = product(*tensors)
            forward = counter.get_total_flops()
            output.sum().backward()
        found.append((forward, counter.get_total_flops()))
    assert found[0] == found[1]
    assert found[0][0] > 0


@pytest.mark.parametrize("dim", [0, 1], ids=["columns", "rows"])
def test_an_optimizer_that_takes_norms_of_rows_or_columns_is_found_out(dim: int) -> None:
    class Normalized(interplay_torch.Lion):
        @staticmethod
        def direction(mean: torch.Tensor) -> torch.Tensor:
            return mean / mean.norm(dim=dim, keepdim=True)

    optimizer = Normalized([torch.nn.Parameter(torch.ones(2, 3))])
    assert _verdict(optimizer) == "looks at more than single elements"


class _Quantized(interplay_torch.Lion):
    """One that keeps large states in blocks of 256 numbers, as those in 8 bits do."""

    @staticmethod
    def direction(mean: torch.Tensor) -> torch.Tensor:
        if mean.numel() < 4096:
            return mean
        blocks = mean.flatten()[: mean.numel() // 256 * 256].view(-1, 256)
        blocks /= blocks.abs().amax(1, keepdim=True)
        return mean


class _NowAndThen(interplay_torch.Lion):
    """One that looks at a sum, of which not all gradients show it."""

    @staticmethod
    def direction(mean: torch.Tensor) -> torch.Tensor:
        return mean.sign() if mean.sum() > 0.3 * mean.numel() ** 0.5 else mean


@pytest.mark.parametrize("cls", [_Quantized, _NowAndThen])
def test_an_optimizer_that_looks_at_others_seldom_is_found_out(cls: Any) -> None:
    assert _verdict(interplay_torch.Lion([torch.nn.Parameter(torch.ones(2, 3))])) == ""
    optimizer = cls([torch.nn.Parameter(torch.ones(2, 3))])
    assert _verdict(optimizer) == "looks at more than single elements"


def test_an_optimizer_is_tried_with_the_rate_behind_its_warm_up() -> None:
    optimizer = interplay_torch.Lion([torch.nn.Parameter(torch.ones(2, 3))])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert _verdict(optimizer) == ""


def test_a_trl_without_a_fused_head_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", ModuleType("trl.trainer.utils"))
    extend_trl()


def _shards_of_nobody(folder: Path) -> None:
    trial = Trial(Spread(), folder)
    optimizer = torch.optim.AdamW(trial.model.parameters())
    interplay.step(trial.model, optimizer, trial.own)
    state = optimizer.state_dict()
    del state[STATE_NAME]
    for of_parameter in state["state"].values():
        for key, value in of_parameter.items():
            if isinstance(value, LocalShard):
                of_parameter[key] = value.plain()
    optimizer.load_state_dict(state)


def test_shards_in_the_state_of_an_optimizer_that_name_no_rank_are_refused(tmp_path: Path) -> None:
    words = "nothing says whose shard it is; give the full"
    pool(2).assert_raises(_shards_of_nobody, tmp_path, error="RuntimeError", words=words)

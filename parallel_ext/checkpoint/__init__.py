"""Reading and writing saved models: the files, HuggingFace directories, full state dicts."""

from parallel_ext.checkpoint.contents import ADAPTER_NAME, Contents, WholeModel
from parallel_ext.checkpoint.full_state import check_shapes, full_state_dict, gather_in_step
from parallel_ext.checkpoint.gather import gather_tensor
from parallel_ext.checkpoint.hf_directory import HFDirectory
from parallel_ext.checkpoint.manifest import Manifest
from parallel_ext.checkpoint.one_error import one_error
from parallel_ext.checkpoint.open_file import CheckpointError, shown
from parallel_ext.checkpoint.safetensors_file import SafetensorsFile, bytes_of
from parallel_ext.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec, write_tensors
from parallel_ext.checkpoint.save import files_that, save_directory
from parallel_ext.checkpoint.scheduler_state import Scheduler
from parallel_ext.checkpoint.steps import latest
from parallel_ext.checkpoint.stream import PlannedFile, plan_files
from parallel_ext.checkpoint.strict_json import parse_json
from parallel_ext.checkpoint.training_load import Resumed, load_step
from parallel_ext.checkpoint.training_save import save_step
from parallel_ext.checkpoint.verify import verify

__all__ = [
    "ADAPTER_NAME",
    "CheckpointError",
    "Contents",
    "HFDirectory",
    "Manifest",
    "PlannedFile",
    "Resumed",
    "SafetensorsFile",
    "SafetensorsWriter",
    "Scheduler",
    "TensorSpec",
    "WholeModel",
    "bytes_of",
    "check_shapes",
    "files_that",
    "full_state_dict",
    "gather_in_step",
    "gather_tensor",
    "latest",
    "load_step",
    "one_error",
    "parse_json",
    "plan_files",
    "save_directory",
    "save_step",
    "shown",
    "verify",
    "write_tensors",
]

"""Reading and writing saved models: the files, HuggingFace directories, full state dicts."""

from parallel_ext.checkpoint.full_state import full_state_dict, gather_in_step
from parallel_ext.checkpoint.gather import gather_tensor
from parallel_ext.checkpoint.hf_directory import HFDirectory
from parallel_ext.checkpoint.open_file import CheckpointError
from parallel_ext.checkpoint.safetensors_file import SafetensorsFile, bytes_of
from parallel_ext.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec, write_tensors
from parallel_ext.checkpoint.save import save_directory
from parallel_ext.checkpoint.scheduler_state import Scheduler
from parallel_ext.checkpoint.steps import latest, verify
from parallel_ext.checkpoint.training_load import Resumed, load_step
from parallel_ext.checkpoint.training_save import save_step

__all__ = [
    "CheckpointError",
    "HFDirectory",
    "Resumed",
    "SafetensorsFile",
    "SafetensorsWriter",
    "Scheduler",
    "TensorSpec",
    "bytes_of",
    "full_state_dict",
    "gather_in_step",
    "gather_tensor",
    "latest",
    "load_step",
    "save_directory",
    "save_step",
    "verify",
    "write_tensors",
]

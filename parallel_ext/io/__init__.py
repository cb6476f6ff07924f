"""Read and write HuggingFace directories and safetensors files."""

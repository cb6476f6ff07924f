"""Fine-tune a HuggingFace model: torchrun --nproc_per_node 2 minimal.py MODEL TEXT OUT"""

import sys

import torch
from transformers import AutoTokenizer

import parallel_ext as px

source, text, out = sys.argv[1:]

mesh = px.init_mesh(tp=2)  # two ranks share one model
model = px.from_pretrained(source, mesh).train()  # each rank reads its own slices only
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
tokenizer = AutoTokenizer.from_pretrained(source)

with open(text) as file:
    ids = tokenizer(file.read(), return_tensors="pt").input_ids.to(mesh.device)
for step, batch in enumerate(ids.split(128, dim=1)[:8]):  # the same tokens on both ranks
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()  # every .grad is final here
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the single-process norm
    optimizer.step()
    optimizer.zero_grad()
    if mesh.rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}")

model.save_pretrained(out)  # every rank calls it; a plain HuggingFace directory
if mesh.rank == 0:
    tokenizer.save_pretrained(out)

"""Accelerate's DeepSpeed plugin.

torchrun --nproc-per-node 2 examples/accelerate_training.py
"""

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn

import z3ext

z3ext.patch_deepspeed()

plugin = DeepSpeedPlugin(
    hf_ds_config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000},
    }
)
accelerator = Accelerator(deepspeed_plugin=plugin)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(96, 32), torch.randn(96, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, target in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print(z3ext.status(model))

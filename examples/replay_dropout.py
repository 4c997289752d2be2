"""Dropout replayed: two shards of the queries drop exactly what the whole call drops."""

import torch

import nosquare as ns

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 256, 32)

whole = ns.attention(q, k, v, dropout=ns.Dropout(p=0.1, seed=7))
late = ns.attention(q[:, :, 128:], k, v, dropout=ns.Dropout(p=0.1, seed=7, offsets=(0, 0, 128, 0)))
print("largest difference of the second shard:", (whole[:, :, 128:] - late).abs().max().item())

kept = ns.dropout_keep(7, 0, range(4), range(256), range(256), 0.1)  # the mask itself, on request
print(f"dropped {1 - kept.double().mean().item():.4f} of all pairs")
assert torch.allclose(whole[:, :, 128:], late, atol=1e-6)

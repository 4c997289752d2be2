"""The keys of one row in two parts: averaging the parts is wrong, merging their states is exact."""

import math

import torch

import nosquare as ns

# scores 0, 0, ln 2, ln 2 with values 0, 0, 10, 10: exact attention gives 20/3
q = torch.ones(1, 1, 1, dtype=torch.float64)  # (heads, queries, D)
k = torch.tensor([0, 0, math.log(2), math.log(2)], dtype=torch.float64).view(1, 4, 1)
v = torch.tensor([0.0, 0, 10, 10], dtype=torch.float64).view(1, 4, 1)

whole = ns.attention(q, k, v, scale=1.0)
left = ns.attention_state(q, k[:, :2], v[:, :2], scale=1.0)
right = ns.attention_state(q, k[:, 2:], v[:, 2:], scale=1.0)
merged = ns.merge(left, right).o
average = (left.o + right.o) / 2

print(f"whole {whole.item():.4f}  merged {merged.item():.4f}  average {average.item():.4f}")
assert torch.allclose(whole, merged), "merging is exact"
assert not torch.allclose(whole, average), "averaging forgets the normalisers"

"""A prefix language model with a window, packed documents and a sink: masks compose."""

import torch

import nosquare as ns

torch.manual_seed(0)
q = torch.randn(2, 8, 300, 64, requires_grad=True)  # 8 query heads
k, v = torch.randn(2, 2, 2, 300, 64)  # 2 key heads, each read by 4 query heads
sinks = torch.zeros(8, requires_grad=True)
documents = (torch.arange(300) >= 120).int()  # two documents in each row of the batch

mask = (ns.Causal() & ns.Window(before=63, after=0) | ns.Prefix(16)) & ns.Documents(
    documents, documents
)
with ns.receipts() as log:
    o = ns.attention(q, k, v, mask=mask, sinks=sinks)
    o.sum().backward()

print(mask)
print(log)
print("gradient of the sinks:", [round(g, 2) for g in sinks.grad.tolist()])

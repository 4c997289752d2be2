"""One of every kind: masks and options that the tests of every kernel go through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import nosquare as ns
from helpers import INF, rnd

LOW = torch.finfo(torch.float32).min


def masks(
    batch: int, hq: int, m: int, n: int, tile: int = 16, large: int = 64, hidden: int = 64
) -> dict[str, ns.Mask]:
    """Of `m` queries and `n` keys. tile, large: sides of block-sparse tiles; hidden: the first of
    some keys, more than a kernel's tile, that nobody sees in "dense"."""
    g = torch.Generator().manual_seed(7)

    def chance(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g) < 0.4

    q_ids = torch.randint(0, 4, (batch, m), generator=g)
    k_ids = torch.randint(0, 5, (batch, n), generator=g).sort().values
    documents = ns.Documents(q_ids, k_ids)
    holes = chance(batch, hq, m, n)
    holes[:, :, 3:4], holes[..., hidden : 9 * hidden // 4] = False, False  # and a row
    tiles = ns.BlockSparse(chance(hq, -(-m // tile), -(-n // tile)), tile)
    some, half = 3 * n // 8, n // 2
    return {
        "dense": ns.Dense(holes),
        "one for all keys": ns.Dense(chance(hq, m, 1)),
        "one for all queries": ns.Dense(chance(batch, 1, 1, n)),
        "apart in memory": ns.Dense(chance(n, m).T),
        "lengths": ns.Lengths(torch.tensor([0, some])),
        "documents": documents,
        "bytes": ns.Documents(q_ids.to(torch.uint8), k_ids.to(torch.int32)),
        "bytes and longer ids": ns.Documents(q_ids.to(torch.uint8), k_ids),
        "tiles": tiles,
        "large tiles": ns.BlockSparse(chance(1, -(-m // large), -(-n // large)), large),
        "both": ns.Causal() & ns.Lengths(torch.tensor([half, some])) & documents,
        "both causal": ns.Causal() & ns.Window(20, None),
        "either": (documents & tiles) | ns.Prefix(3),
        "prefix and causal": ns.Prefix(21) | ns.Causal(),
        "two far apart": ns.Prefix(4) | (ns.Window(3, 3) & ns.Causal()),
        "nothing": ns.Prefix(0),
    }


def options(m: int, n: int) -> dict[str, dict[str, Any]]:
    """Of `m` queries and `n` keys, two entries and four query heads."""
    return {
        "scale": {"scale": 0.7},
        "scale below 0": {"scale": -0.3},
        "scale of 0": {"scale": 0.0},
        "softcap": {"softcap": 3.0},
        "softcap, scale below 0": {"softcap": 3.0, "scale": -0.3},
        "alibi": {"alibi": rnd(4, seed=4).abs()},
        "sinks": {"sinks": torch.tensor([-INF, 0.0, 2.0, -1e38])},
        "sinks of bfloat16": {"sinks": rnd(2, 4, seed=4, dtype=torch.bfloat16)},
        "bias": {"bias": rnd(2, 4, m, n, seed=5)},
        "bias of a key": {"bias": rnd(4, 1, n, seed=5, dtype=torch.bfloat16)},
        "bias of a query": {"bias": rnd(m, 1, seed=5, dtype=torch.float64)},
        "bias of a head": {"bias": rnd(4, 1, 1, seed=5)},
        "bias apart in memory": {"bias": rnd(n, m, seed=5).T},
        "bias that hides": {"bias": (rnd(m, n, seed=5) > 1).float().log()},
        "bias of finfo.min": {"bias": (rnd(m, n, seed=5) > 0).float() * LOW},
        "bias of finfo.min in whole rows": {"bias": torch.full((1, n), LOW)},
        "dropout": {"dropout": ns.Dropout(0.3, 7)},
        "dropout of a shard": {"dropout": ns.Dropout(0.1, -7, (1, 2, 3, 4))},
        "dropout of a shard at an odd key": {
            "dropout": ns.Dropout(0.1, 1 << 62, (1, 2, 1 << 33, 5))
        },
        "seed on the device": {"dropout": ns.Dropout(0.5, torch.tensor(11))},
        "all": {
            "softcap": 2.0,
            "alibi": rnd(4, seed=4).abs(),
            "sinks": rnd(4, seed=6),
            "bias": rnd(m, n, seed=5),
            "dropout": ns.Dropout(0.5, 9),
        },
    }

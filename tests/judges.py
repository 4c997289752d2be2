"""Entrances for judges from outside: suites that take any function with torch's SDPA signature.

    sdpa          nosquare's, every backend as it chooses
    sdpa_tiles2   the same on torch_any in tiles of 2 x 2, so that small samples cross many tiles
    wrong         a control that must fail every judge: it averages softmaxes of separate tiles

$KIT is the folder with the judges, $OUT an empty one. From the root of this repository, with
PYTHONPATH=src:tests and IMPL each of judges:sdpa, judges:sdpa_tiles2 and judges:wrong in turn:

    python $KIT/opinfo_sdpa.py $IMPL                       torch's own samples of the operator
    python $KIT/model_refs.py check $IMPL minilm smollm2   two models (VERIFY_MODEL_CACHE=folder)
    $KIT/pt_prepare.sh $OUT                                PyTorch's own tests; then, inside $OUT:
    VERIFY_KIT=$KIT PT_KEEP=60 SDPA_IMPL=$IMPL python -m pytest -q test_transformers26.py \\
        -k "SDPA or AttnBias" -p no:cacheprovider --deselect test_transformers26.py::\\
        TestSDPAFailureModesCPU::test_invalid_sdpa_kernel_grouped_query_attention_cpu_cpu

opinfo_sdpa.py needs the package expecttest, as all of torch.testing._internal does. PyTorch's tests
need absolute paths in PYTHONPATH; PT_KEEP=10 keeps six times as many cases; the test left out asks
which of torch's kernels refuses grouped heads. sdpa_tiles2 wants a process of its own: it forces
the tiles of every torch_any call from then on.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nosquare import attention, ops
from nosquare import sdpa as sdpa

TILE = 2
# modules that a function of the same name hides from `import`
adapter: Any = importlib.import_module("nosquare.adapters.sdpa")
tiles: Any = importlib.import_module("nosquare.backends.torch_any.tiling")


def force_tiles() -> None:
    """Tiles of 2 x 2 for every torch_any call from now on, backward included."""
    if tiles.FORCED != (TILE, TILE):
        tiles.FORCED = (TILE, TILE)
        ops._DECISIONS.clear()


def sdpa_tiles2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """sdpa on torch_any in tiles of 2 x 2."""
    force_tiles()
    adapter.attention = partial(attention, backend="torch_any")
    try:
        return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    finally:
        adapter.attention = attention


def wrong(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What tiled attention is without the rescaling: each tile of keys has a softmax of its own,
    and the outputs are averaged. Right only for N <= 2."""
    sdpa(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)  # it raises as sdpa does
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    s = query @ key.transpose(-1, -2) * factor
    if is_causal:
        attn_mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    if type(attn_mask) not in (Tensor, type(None)):
        attn_mask = attn_mask._materialize(s.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = s.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        s = s + attn_mask
    n = s.shape[-1]
    s = torch.nn.functional.pad(s, (0, -n % TILE), value=float("-inf"))
    w = torch.softmax(s.unflatten(-1, (-1, TILE)), -1).nan_to_num(0.0)
    w = w.flatten(-2)[..., :n] / max(-(-n // TILE), 1)
    return (w.to(value.dtype) @ value).to(query.dtype)

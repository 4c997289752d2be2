"""nosquare as an attention implementation of transformers (5 or newer).

    import nosquare.adapters.transformers as adapter
    adapter.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="nosquare")

transformers asks twice: once a forward for a mask, once a layer for attention. Both answers are
registered under one name, because without the first the second is handed None, padding included.
The mask stays symbolic in between: a small frozen object, never M x N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import errors
from ..api import attention
from ..dropout import Dropout
from ..mask import Dense, Mask
from .mask_lower import Frame, lower, visible_keys
from .mask_reader import All, Axes, Keys, Same, read

Tensor = torch.Tensor

# Keyword arguments that reach an attention function and do not change what it computes once the
# mask has been made: bookkeeping, or (position_ids, sliding_window, is_causal) already in the mask.
_HARMLESS = frozenset(
    "position_ids cache_position use_cache past_key_values layer_idx return_dict labels "
    "num_items_in_batch output_hidden_states output_router_logits logits_to_keep "
    "encoder_hidden_states encoder_attention_mask position_embeddings token_type_ids "
    "mm_token_type_ids sliding_window is_causal max_length_q max_length_k seq_idx "
    "deterministic inputs_embeds".split()
)


@dataclass(frozen=True)
class SymbolicMask:
    """What one forward's queries may see, in O(M + N) memory; made by the mask function.

    mask is None when every pair is visible. Keys from n_visible on are hidden from all (the unused
    part of a static cache). shape, ndim, contiguous and to are what generate() asks of a mask that
    it prepares itself.
    """

    mask: Mask | None
    batch: int
    n_queries: int
    n_keys: int
    n_visible: int
    packed: bool = False  # whether ids of sequences are part of the mask

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, 1, self.n_queries, self.n_keys)

    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> SymbolicMask:
        return self

    def to(self, *_: object, **__: object) -> SymbolicMask:
        return self

    def __str__(self) -> str:
        shown = "everything" if self.mask is None else str(self.mask)
        return f"{self.n_queries} queries see {shown} of the first {self.n_visible} keys"


def register(name: str = "nosquare", backend: str | None = None) -> None:
    """Make attn_implementation=name mean nosquare, on the given backend or the best for each call.

    Raises ArgumentError for a name that transformers treats specially, UnsupportedError when
    transformers is missing or older than 5.
    """
    special = [word for word in ("flash", "sdpa", "flex", "eager", "paged", "/") if word in name]
    if special:
        raise errors.ArgumentError(
            "This name makes transformers run checks meant for another attention.",
            {"name": repr(name), "holds": ", ".join(special)},
            'name="nosquare".',
        )
    attentions, masks = _interfaces()
    attentions.register(name, _attention_function(name, backend))
    masks.register(name, symbolic_mask)


def _interfaces() -> tuple[Any, Any]:
    """transformers' two registries."""
    try:
        import transformers
    except ImportError as error:
        raise errors.UnsupportedError(
            "transformers is not installed.",
            {"needed": "transformers >= 5"},
            'pip install "transformers>=5".',
        ) from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise errors.UnsupportedError(
            "This transformers is too old: it makes masks in another way.",
            {"transformers": transformers.__version__, "needed": ">= 5"},
            'pip install "transformers>=5".',
        )
    return transformers.AttentionInterface, transformers.AttentionMaskInterface


def symbolic_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | SymbolicMask | None = None,
    device: torch.device | str = "cpu",
    **_: object,
) -> SymbolicMask:
    """The mask function registered with transformers, which calls it with these keywords.

    attention_mask is the padding mask (B, keys seen), bool, True = a real token; or what an earlier
    call returned, when generate() prepared the mask before the forward. Raises UnsupportedError for
    a mask function that cannot be read.
    """
    if isinstance(attention_mask, SymbolicMask):
        return attention_mask
    if mask_function is None:  # transformers' own mask functions have this default
        from transformers.masking_utils import causal_mask_function

        mask_function = causal_mask_function
    # A static cache counts in a tensor that its update changes in place: read it now.
    first_q, first_k = int(q_offset), int(kv_offset)
    place = torch.device(device)
    axes = Axes(
        b=torch.arange(batch_size, device=place)[:, None],
        q=torch.arange(first_q, first_q + q_length, device=place)[None, :],
        k=torch.arange(first_k, first_k + kv_length, device=place)[None, :],
    )
    rule = read(mask_function, axes)
    if attention_mask is not None:
        padding = _padding(attention_mask, first_k, kv_length, place)
        rule = All((*(rule.parts if isinstance(rule, All) else (rule,)), padding))
    shift = first_q - first_k
    n_visible = visible_keys(rule, q_length, kv_length, shift)
    mask = lower(rule, Frame(q_length, n_visible, shift, batch_size, place))
    packed = isinstance(rule, All) and any(isinstance(part, Same) for part in rule.parts)
    return SymbolicMask(mask, batch_size, q_length, kv_length, n_visible, packed)


def _padding(attention_mask: Tensor, first_k: int, kv_length: int, place: torch.device) -> Keys:
    """Which keys are real tokens; keys past the mask's end are not there yet."""
    if attention_mask.dim() != 2:
        raise errors.UnsupportedError(
            "An attention_mask is either a padding mask or a full one.",
            {"shape": tuple(attention_mask.shape), "known": "(B, keys) or (B, heads, M, N)"},
            "one of the two shapes.",
        )
    keep = attention_mask.to(place, torch.bool)[:, first_k : first_k + kv_length]
    return Keys(torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1])))


def _attention_function(name: str, backend: str | None) -> Callable[..., tuple[Tensor, None]]:
    """The attention function registered with transformers."""

    def nosquare_attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: SymbolicMask | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """query (B, Hq, M, D), key (B, Hk, N, D), value (B, Hk, N, E) -> (B, M, Hq, E), None."""
        _refuse_unknown(module, attention_mask, kwargs)
        mask, bias, n = _what_is_visible(name, module, query, key, attention_mask, kwargs)
        if position_bias is not None:
            position_bias = position_bias[..., :n]
            bias = position_bias if bias is None else bias + position_bias
        if n < key.shape[2]:
            key, value = key[:, :, :n], value[:, :, :n]
        drop = None
        if dropout:
            # Drawn from torch's generator, so that manual_seed and checkpointing repeat it; kept on
            # the device, so that nothing waits.
            seed = torch.randint(2**62, (), dtype=torch.int64, device=query.device)
            drop = Dropout(p=dropout, seed=seed)
        out = attention(
            query, key, value, mask=mask, scale=scaling, softcap=softcap, bias=bias, sinks=s_aux,
            dropout=drop, backend=backend,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return nosquare_attention


def _what_is_visible(
    name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: SymbolicMask | Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Mask | None, Tensor | None, int]:
    """(mask, additive bias, number of leading keys to use) of one call."""
    M, N = query.shape[2], key.shape[2]
    if isinstance(mask, SymbolicMask):
        if (mask.n_queries, mask.n_keys) != (M, N):
            raise errors.ArgumentError(
                "The mask was made for other lengths than this layer's queries and keys.",
                {"layer": type(module).__name__, "mask": f"M={mask.n_queries} N={mask.n_keys}",
                 "tensors": f"M={M} N={N}"},
                "a cache whose layers all hold the same tokens.",
            )  # fmt: skip
        return mask.mask, None, mask.n_visible
    if mask is None:
        _check_none_is_meant(name, module, kwargs)
        return None, None, N
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] not in (1, N):
        raise errors.UnsupportedError(
            "This attention mask was not made by nosquare's mask function and is not a full one.",
            {"layer": type(module).__name__, "mask": getattr(mask, "shape", type(mask).__name__),
             "known": f"(B, heads, {M}, {N}), bool or additive"},
            "attention_mask of shape (B, keys), which stays small.",
        )  # fmt: skip
    # The caller's own square: used as it is, bool as a mask, float as transformers' additive mask.
    return (Dense(mask), None, N) if mask.dtype == torch.bool else (None, mask, N)


def _check_none_is_meant(name: str, module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """None is meant only by a model without masks: our mask function never returns it."""
    config = getattr(module, "config", None)
    chosen = getattr(config, "_attn_implementation", None) or name
    ours = _interfaces()[1]._global_mapping.get(chosen) is symbolic_mask
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if ours and not causal:
        return
    raise errors.ArgumentError(
        "Attention was called without the mask that nosquare's mask function makes, so padding "
        "and causality are unknown.",
        {"layer": type(module).__name__, "attn_implementation": repr(chosen),
         "mask function": "nosquare's" if ours else "missing or another one's",
         "is_causal": causal},
        "nosquare.adapters.transformers.register() before the forward, and a model that makes its "
        "masks with transformers.masking_utils.",
    )  # fmt: skip


def _refuse_unknown(module: torch.nn.Module, mask: object, kwargs: dict[str, Any]) -> None:
    """Raise for every keyword that would change the result and is not computed here."""
    config = getattr(module, "config", None)
    if kwargs.pop("output_attentions", None) or getattr(config, "output_attentions", False):
        raise errors.UnsupportedError(
            "output_attentions=True asks for M x N weights, which are never made.",
            {"layer": type(module).__name__},
            'attn_implementation="eager" for that, or nosquare.weights for a slice of them.',
        )
    lengths = kwargs.pop("cu_seq_lens_q", None), kwargs.pop("cu_seq_lens_k", None)
    in_mask = isinstance(mask, SymbolicMask) and mask.packed
    if any(x is not None and len(x) > 2 for x in lengths) and not in_mask:
        raise errors.UnsupportedError(
            "cu_seq_lens say that sequences are packed, but the mask was made without them.",
            {"layer": type(module).__name__},
            "position_ids that restart with each sequence; the mask is then made from them.",
        )
    odd = {
        k: v for k, v in kwargs.items() if k not in _HARMLESS and v is not None and v is not False
    }
    if odd:
        raise errors.UnsupportedError(
            "This model passes something to its attention that nosquare does not know.",
            {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in odd.items()},
            'attn_implementation="sdpa" or "eager" for this model.',
        )

"""What a receipt says against what the profiler saw: names of kernels, the printed page, and
reading the events of a GPU, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare import measure
from nosquare.receipt import Measured, Receipt, family, short
from test_receipts_measured import FUSED, leaves, train

# ---- what was said against what was seen ----

# as CUPTI spells them
CUPTI = {
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::bfloat16_t>, false, false>(pytorch_flash::Flash_fwd_params)": "flash",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<float> > >"
    "(flash::Params)": "flash",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": "memory-efficient",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128": "cuDNN",
    "triton_tem_fused_flex_attention_0": "flex",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn": None,
    FUSED: "flash",
    "aten::_scaled_dot_product_attention_math": None,
    "cuDNN attention backward": "cuDNN",
    "memory-efficient attention": "memory-efficient",
}


@pytest.mark.parametrize("name", CUPTI)
def test_families(name: str) -> None:
    assert family(name) == CUPTI[name]


def test_short_names() -> None:
    assert [short(name) for name in CUPTI][:4] == [
        "pytorch_flash::flash_fwd_kernel",
        "cutlass::device_kernel",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128",
    ]
    assert short("void at::native::(anonymous namespace)::softmax<float>(int)") == (
        "at::native::softmax"
    )


def made(kernels: tuple[str, ...], seen: tuple[str, ...] | None, **fields: Any) -> Receipt:
    (r,) = [r for r in train() if r.op == "forward"]
    measured = None if seen is None else Measured(2.0, 1024, 4e12, 5e9, 0.5, seen, "CUDA events")
    return replace(r, kernels=kernels, measured=measured, **fields)


def test_a_mismatch_is_visible() -> None:
    flash, _, fmha, *_ = CUPTI
    said = ("flash attention",)
    assert made(said, (flash, "Memset (Device)")).agrees is True
    assert made(said, (fmha,)).agrees is False
    assert made(said, ()).agrees is None
    assert made(said, None).agrees is None
    assert made(("torch tiles",), (flash,)).agrees is None
    text = str(made(said, (fmha,)))
    assert f"says       flash attention\n  saw        {short(fmha)}\n" in text
    assert "BUT        the profiler saw no kernel of the family that is said to have run" in text
    assert "BUT" not in str(made(said, (flash,)))


# ---- the page and the errors ----


def test_the_printed_page() -> None:
    r = made(
        ("flash attention",),
        (next(iter(CUPTI)), "Memset (Device)"),
        version="nosquare 0.1.0, torch 2.13.0",
        plan="torch's flash attention",
        copies=("q, whose batch axes are not evenly strided",),
        refusals={"fast": ("it has no float32", "D is at most 8")},
        workspace_bytes=1536,
    )
    assert str(r) == (
        "forward   nosquare: torch_fused (nosquare 0.1.0, torch 2.13.0)\n"
        "  problem    B=1 Hq=2 Hk=2 M=48 N=48 D=16 E=16 float32 cpu mask full() gradients\n"
        "             of qkv\n"
        "  plan       torch's flash attention\n"
        "  says       flash attention\n"
        "  saw        pytorch_flash::flash_fwd_kernel, Memset (Device)\n"
        "  predicted  295 kFLOP, 25 kB must move\n"
        "  measured   2.0 us, 4 TFLOP/s, 5 GB/s, 50% of the roofline, peak 1,024 bytes\n"
        "  how        CUDA events\n"
        "  workspace  1,536 bytes\n"
        "  copied     q, whose batch axes are not evenly strided\n"
        "  refused    fast: it has no float32; D is at most 8"
    )


def test_no_line_is_wider_than_a_page() -> None:
    with ns.receipts(measure=True) as log:
        ns.attention(*leaves(), softcap=1.0, mask=ns.Causal() & ns.Window(3, 0)).sum().backward()
    assert max(map(len, str(log).splitlines())) <= 80


# ---- reading CUPTI's events: what a GPU's session gives, made by hand ----


class Event:
    """As torch's _KinetoEvent, as far as it is read."""

    def __init__(self, name: str, start: int, link: int = 1, index: int = 0, **words: Any) -> None:
        self.told = {"name": name, "start_ns": start, "linked_correlation_id": link,
                     "device_index": index, "device_type": torch._C._autograd.DeviceType.CUDA,
                     "is_user_annotation": False, "nbytes": 0} | words  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return lambda: self.told[name]


def test_kernels_are_those_that_the_call_launched() -> None:
    events = [
        Event("second", 30),
        Event("first", 20),
        Event("second", 40),
        Event("at::cuda::spin_kernel(long)", 10),  # the pause before the call
        Event("launched by another thread", 25, link=0),
        Event("on another card", 26, index=1),
        Event("nosquare measures", 15, is_user_annotation=True),
        Event("cudaLaunchKernel", 12, device_type=torch._C._autograd.DeviceType.CPU),
        Event("[memory]", 13, nbytes=512),
    ]
    seen = measure._kernels(events, torch.device("cuda", 0))
    assert list(seen) == ["first", "second"]


def test_memory_is_that_of_the_device() -> None:
    events = [
        Event("[memory]", 40, nbytes=-700),
        Event("[memory]", 10, nbytes=512),
        Event("[memory]", 20, nbytes=700),
        Event("[memory]", 30, nbytes=4096, index=1),
        Event("[memory]", 30, nbytes=4096, device_type=torch._C._autograd.DeviceType.CPU),
        Event("[memory]", 50, nbytes=600),
        Event("first", 60),
    ]
    assert measure._peak_bytes(events, torch.device("cuda", 0)) == 1212
    assert measure._peak_bytes(events, torch.device("cuda", 1)) == 4096

"""Split training on a GPU equals a plain PyTorch loop on the device that trains.

Tolerances, float32 without TF32 (Hapi turns it off, so it is off for the plain loop as well): losses of three
epochs within 1e-4 relative, as on a CPU. Gradients of the first step within 1e-4 relative instead of 1e-5: cuDNN
picks its way through a convolution by the batch's size, and the COS batch, the micro-batch and the plain loop's
batch differ; its Winograd and its direct ways differ by a few 1e-6 in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.plain import (
    FAMILIES,
    Family,
    check_equal,
    open_session,
    order_of,
    plain_training,
    split_training,
)

from hapi.server.service import Service

pytestmark = pytest.mark.gpu

GRADIENT_TOLERANCE = 1e-4
CHOSEN = [f for f in FAMILIES if f.name in ("alexnet", "resnet18", "densenet121", "vit_b_16")]


@pytest.mark.parametrize("f", CHOSEN, ids=lambda f: f.name)
@pytest.mark.parametrize("tiers", ["server and client", "server", "client"])
def test_split_training_equals_the_plain_loop(
    f: Family,
    tiers: str,
    place: str,
    store: Path,
    make_service: Callable[..., Service],
    note: Callable[[str], None],
) -> None:
    """``tiers`` names the side or sides that are on the GPU; the other is on the CPU."""
    server = place if "server" in tiers else "cpu"
    client = place if "client" in tiers else "cpu"
    service = make_service(cos_batch=3, device=server)
    splits = (0, f.freeze // 2, f.freeze) if tiers == "server and client" else (f.freeze // 2,)
    plain = None
    for split in splits:
        with open_session(service, f, split, f.freeze, device=client) as session:
            assert session.device.type == torch.device(client).type
            if plain is None:
                plain = plain_training(f, order_of(session, store), client)
            what = f"{f.name} split {split}, on the GPU: {tiers}"
            largest = check_equal(split_training(session), plain, what, GRADIENT_TOLERANCE)
            note(f"{what}: gradients differ by at most {largest:.1e}, allowed {GRADIENT_TOLERANCE:.0e}")


def test_tf32_is_off(cuda: torch.device, make_service: Callable[..., Service]) -> None:
    """A convolution and a product that would show TF32's rounding (3e-4) do not once a server was made."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    make_service()
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    torch.manual_seed(0)
    x, w = torch.randn(8, 64, 28, 28), torch.randn(64, 64, 3, 3)
    exact = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    here = torch.nn.functional.conv2d(x.to(cuda), w.to(cuda), padding=1).cpu().double()
    assert (here - exact).norm() / exact.norm() < 2e-5
    a = torch.randn(256, 512)
    product = (a.to(cuda) @ a.to(cuda).T).cpu().double()
    whole = a.double() @ a.double().T
    assert (product - whole).norm() / whole.norm() < 2e-5

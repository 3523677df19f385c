"""What is known of a job before it runs: its layers' sizes and operations, its samples' bytes."""

from __future__ import annotations

from hapi.models.layers import LayeredModel
from hapi.profiler.observe import Sizes, Tier
from hapi.profiler.profile import LayerProfile, SampleProfile
from hapi.profiler.work import layer_work

OPTIMIZER_STATE = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0, "adamw": 2.0, "rmsprop": 2.0}
"""Bytes that torch's optimisers keep per byte of parameters, beside the gradients (rmsprop: with momentum)."""


def sizes_of(
    model: LayeredModel,
    title: str,
    freeze: int,
    *,
    stored_bytes: float,
    encoded: bool,
    client: Tier,
    optimizer: str = "momentum",
) -> Sizes:
    """Sizes of ``model`` frozen at ``freeze`` for samples of ``stored_bytes`` each; ``encoded`` ones are decoded first.

    ``optimizer``: a key of :data:`OPTIMIZER_STATE`.
    """
    tensor_bytes = model.output_bytes()[0]
    return Sizes(
        model=title,
        freeze=freeze,
        last_split=model.pushable(freeze).stop - 1,
        layers=tuple(
            LayerProfile(
                name=layer.name,
                output_bytes=layer.output_bytes,
                flops=work.flops,
                parameter_bytes=layer.parameter_bytes,
                working_bytes=work.working_bytes,
                saved_bytes=work.saved_bytes,
                server_seconds=0.0,
                client_seconds=0.0,
            )
            for layer, work in zip(model.layers, layer_work(model), strict=True)
        ),
        samples=SampleProfile(
            stored_bytes=max(1, round(stored_bytes)),
            encoded=encoded,
            uint8_bytes=tensor_bytes // 4,
            tensor_bytes=tensor_bytes,
        ),
        client=client,
        optimizer_bytes_per_parameter_byte=OPTIMIZER_STATE[optimizer],
    )

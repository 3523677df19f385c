"""Facts of a job before it runs: its layers' sizes and operations, its samples' bytes."""

from __future__ import annotations

from collections.abc import Sequence

from hapi.models.graph.layers import LayeredModel
from hapi.profiler.fit import Sizes, Tier
from hapi.profiler.profile import LayerProfile, SampleProfile
from hapi.profiler.work import LayerWork, layer_work


def sizes_of(
    model: LayeredModel,
    title: str,
    freeze: int,
    *,
    stored_bytes: float,
    encoded: bool,
    client: Tier,
    optimizer_bytes: float = 1.0,
    work: Sequence[LayerWork] | None = None,
) -> Sizes:
    """Return the sizes of a job.

    Args:
        model: its layers.
        title: the model's name.
        freeze: last frozen layer.
        stored_bytes: of one sample, in the mean.
        encoded: samples are decoded first.
        client: resources of this side.
        optimizer_bytes: the optimiser's per byte of parameters.
        work: of these layers, if it is known already.
    """
    tensor_bytes = model.output_bytes()[0]
    last_split = model.last_split(freeze)
    # Trained layers work on a float32 copy of features in fewer bits.
    exact = model.output_bytes() if model.rounding is None else model.rounding.base.output_bytes()
    exact_input = exact[last_split] - model.output_bytes()[last_split]
    return Sizes(
        model=title,
        freeze=freeze,
        last_split=last_split,
        layers=tuple(
            LayerProfile(
                name=layer.name,
                output_bytes=layer.output_bytes,
                flops=each.flops,
                parameter_bytes=layer.parameter_bytes,
                working_bytes=each.working_bytes,
                saved_bytes=each.saved_bytes + (exact_input if layer.index == last_split + 1 else 0),
                workspace_bytes=each.workspace_bytes,
                server_seconds=0.0,
                client_seconds=0.0,
            )
            for layer, each in zip(
                model.layers, work or layer_work(model, last_split, client.device), strict=True
            )
        ),
        samples=SampleProfile(
            stored_bytes=max(1, round(stored_bytes)),
            encoded=encoded,
            uint8_bytes=tensor_bytes // 4,
            tensor_bytes=tensor_bytes,
        ),
        client=client,
        optimizer_bytes_per_parameter_byte=optimizer_bytes,
    )

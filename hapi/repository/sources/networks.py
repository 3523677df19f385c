"""Networks with weights of any kind: a seed, a library's, or a checkpoint on this machine."""

from __future__ import annotations

from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.architectures import ImportRule
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.names import checkpoint_in, is_checkpoint, is_file
from hapi.paths import is_folder, user_path
from hapi.repository.sources.open import open_source


def weights_named(text: str) -> str:
    """Return a user's weights as a spec names them: of a folder with a checkpoint, the checkpoint's path.

    Raises:
        ModelError: the folder has no checkpoint.
    """
    return str(checkpoint_in(user_path(text, "weights"))) if is_checkpoint(text) and is_folder(text) else text


def build_network(spec: ModelSpec, *, allow_import: ImportRule = False) -> LayeredModel:
    """Build the model of ``spec`` as :func:`hapi.models.zoo.build.build` does, also with weights in a checkpoint.

    Args:
        spec: the model.
        allow_import: whether a ``package.module:factory`` may be imported: yes, no, or which.

    Raises:
        ModelError: the model or its weights cannot be made.
    """
    state = open_source(spec.weights).load if is_file(spec.weights) else None
    return build(spec, allow_import=allow_import, state=state)
